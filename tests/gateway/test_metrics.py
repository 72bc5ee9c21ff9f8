"""`/metrics`: strictly valid, and correct after known traffic."""

import math
import re
import time
from typing import NamedTuple

import pytest

from pointsman.gateway import pages
from pointsman.gateway.metrics import counters_of, merged
from pointsman.gateway.pages import SharedPage
from pointsman.strategies import FIFOPolicy
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision
from tests.gateway.backends import DONE, OK, answer, answers, chunk, event, hangs, sends, stream
from tests.gateway.bed import CHAT_DEPLOYMENT, Bed, MakeBed, plan_of
from tests.gateway.wire import HEALTH, chat, post, wait_for

PAGE = b"GET /metrics HTTP/1.1\r\nhost: gateway\r\n\r\n"
Labels = frozenset[tuple[str, str]]

_SAMPLE = re.compile(r"([a-z_][a-z0-9_]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')


class Family(NamedTuple):
    kind: str
    samples: dict[tuple[str, Labels], float]


def parsed(text: str) -> dict[str, Family]:
    """The metric families of a page. Raises AssertionError if it violates the format."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    name = helped = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped = line.split(" ")[2]
            assert helped not in families, f"{helped} has two HELP lines"
            assert len(line.split(" ", 3)[3]) > 5
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == helped, "TYPE follows HELP"
            assert kind in ("counter", "gauge", "histogram")
            families[name] = Family(kind, {})
        else:
            sample, labels, value = sample_of(line)
            assert sample.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") == name or sample == name
            assert (sample, labels) not in families[name].samples, f"{line} is repeated"
            families[name].samples[sample, labels] = value
    for name, family in families.items():
        check(name, family)
    return families


def sample_of(line: str) -> tuple[str, Labels, float]:
    match = _SAMPLE.fullmatch(line)
    assert match is not None, f"not a sample: {line!r}"
    labels, rest = {}, match[2] or ""
    while rest:
        label = _LABEL.match(rest)
        assert label is not None, f"not a label: {rest!r}"
        assert label[1] not in labels
        labels[label[1]] = label[2]
        rest = rest[label.end() :]
    return match[1], frozenset(labels.items()), float(match[3])


def check(name: str, family: Family) -> None:
    assert name.startswith("pointsman_")
    assert family.samples, f"{name} has no samples"
    assert (family.kind == "counter") == name.endswith("_total")
    for value in family.samples.values():
        assert math.isfinite(value)
        assert value >= 0
    if family.kind == "histogram":
        series = {labels for sample, labels in family.samples if sample == f"{name}_count"}
        for labels in series:
            buckets = [
                (float(dict(known)["le"]), value)
                for (sample, known), value in family.samples.items()
                if sample == f"{name}_bucket" and {one for one in known if one[0] != "le"} == labels
            ]
            assert [bound for bound, _ in buckets] == sorted(bound for bound, _ in buckets)
            assert [count for _, count in buckets] == sorted(count for _, count in buckets)
            assert buckets[-1] == (math.inf, family.samples[f"{name}_count", labels])
            assert (f"{name}_sum", labels) in family.samples


def page(bed: Bed) -> dict[str, Family]:
    got = bed.fetch(PAGE)
    assert got.status == 200
    assert got.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(got.body.decode())


def value(families: dict[str, Family], name: str, **labels: str) -> float:
    """Sum of the samples with these labels; 0 if there are none."""
    family = families.get(f"pointsman_{re.sub('_(sum|count)$', '', name)}")
    if family is None:
        return 0
    wanted = set(labels.items())
    return sum(v for (sample, known), v in family.samples.items() if sample == f"pointsman_{name}" and wanted <= known)


def test_metrics_before_the_first_request(bed: Bed) -> None:
    families = page(bed)
    assert value(families, "connections") == 1
    assert value(families, "instances", deployment="chat") == 0
    assert value(families, "waiting_requests", deployment="chat") == 0


def test_metrics_of_known_traffic(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"maxTries": 2}}, {**CHAT_DEPLOYMENT, "scheduling": {"policy": "fifo"}})
    bed.backend()
    for _ in range(7):
        assert bed.fetch(chat(pointsman={"deadline_ms": 60_000})).status == 200
    assert bed.fetch(chat(pointsman={"deadline_ms": 0.000001})).status == 200
    for _ in range(2):
        assert bed.fetch(b"NONSENSE\r\n\r\n").status == 400
    assert bed.fetch(post(b"{")).status == 400
    assert bed.fetch(chat(model="unknown")).status == 404
    families = page(bed)
    assert value(families, "requests_total", deployment="chat", status="200") == 8
    assert value(families, "requests_total") == 8, "requests for no deployment are not counted there"
    assert value(families, "unread_requests_total", status="400") == 2
    assert value(families, "decisions_total", deployment="chat", strategy="fifo", instance_id="chat-0") == 8
    assert value(families, "outcomes_total", deployment="chat", outcome="served") == 8
    assert value(families, "deadlines_total", met="true") == 7
    assert value(families, "deadlines_total", met="false") == 1
    assert value(families, "request_seconds_count", deployment="chat") == 8
    assert value(families, "queue_seconds_count", deployment="chat") == 8
    assert value(families, "tokens_total", kind="input") == 40
    assert value(families, "tokens_total", kind="output") == 16
    assert value(families, "instances") == 1
    assert value(families, "running_requests") == value(families, "waiting_requests") == 0
    assert value(families, "policy_errors_total") == 0
    assert value(families, "first_token_seconds_count") == 0


class Faulty(FIFOPolicy):
    """A policy of a user's."""

    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        raise RuntimeError("no idea")


def test_calls_of_users_code_that_fail_are_counted(make_bed: MakeBed) -> None:
    bed = make_bed({}, {**CHAT_DEPLOYMENT, "scheduling": {"policy": f"{__name__}:Faulty"}})
    bed.backend()
    assert bed.fetch(chat()).status == 200
    families = page(bed)
    assert value(families, "user_code_failures_total", deployment="chat", policy="faulty", why="raised") == 1
    assert value(families, "user_code_failures_total") == 1, "neither slow nor blocked"


def test_running_and_waiting_requests(bed: Bed) -> None:
    bed.backend(hangs(), max_concurrency=1)
    clients = [bed.client() for _ in range(3)]
    for client in clients:
        client.send(chat())
    wait_for(lambda: bed.running() == 1)
    wait_for(lambda: bed.waiting() == 2)
    families = page(bed)
    assert value(families, "running_requests", deployment="chat") == 1
    assert value(families, "waiting_requests", deployment="chat") == 2
    assert value(families, "connections") == 4
    for client in clients:
        client.close()
    wait_for(lambda: bed.waiting() + bed.running() == 0)
    assert value(page(bed), "abandoned_requests_total", deployment="chat") == 3


def test_metrics_of_streams_and_failures(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"maxTries": 2}})
    bed.backend(sends(stream(event(0))[:-5]), answers(answer({"error": "oops"}, 500)))
    assert b"stream_interrupted" in bed.fetch(chat(stream=True)).body
    assert bed.fetch(chat()).status == 502
    bed.backend(answers(stream(event(0)), stream(event(0))))
    families = page(bed)
    assert value(families, "broken_off_answers_total") == 1
    assert value(families, "failed_tries_total", instance_id="chat-0") == 3
    assert value(families, "requests_total", status="502") == 1
    assert value(families, "first_token_seconds_count") == 1
    assert value(families, "outcomes_total", outcome="EvictedOther") == 2


def test_time_to_the_first_token_and_between_tokens(bed: Bed) -> None:
    bed.backend(answers(stream(event(0), event(1), DONE), OK), max_concurrency=1)
    bed.fetch(chat(stream=True))
    families = page(bed)
    assert value(families, "first_token_seconds_count", deployment="chat") == 1
    assert 0 < value(families, "first_token_seconds_sum") <= value(families, "request_seconds_sum")


def test_large_counts_are_exact(bed: Bed) -> None:
    usage = {"prompt_tokens": 123_456_789, "completion_tokens": 987_654_321}
    bed.backend(answers(answer({"choices": [], "usage": usage})))
    bed.fetch(chat())
    families = page(bed)
    assert value(families, "tokens_total", kind="input") == 123_456_789
    assert value(families, "tokens_total", kind="output") == 987_654_321


def test_label_values_are_escaped(make_bed: MakeBed) -> None:
    strange = 'a "b" \\ c'
    bed = make_bed({}, {**CHAT_DEPLOYMENT, "scheduling": {"policy": "fifo"}})
    bed.backend(instance_id=strange)
    bed.fetch(chat())
    families = page(bed)
    assert value(families, "decisions_total", instance_id=strange.replace("\\", "\\\\").replace('"', '\\"')) == 1


def test_expected_prefix_hits(bed: Bed) -> None:
    bed.backend()
    prompt = "the same long prompt again and again " * 200
    for _ in range(3):
        bed.fetch(chat(messages=[{"role": "user", "content": prompt}]))
    families = page(bed)
    assert value(families, "prefix_tokens_total", kind="prompt") > 0
    assert (
        0
        < value(families, "prefix_tokens_total", kind="expected_cached")
        < value(families, "prefix_tokens_total", kind="prompt")
    )


@pytest.mark.parametrize("data", [b"HTTP/1.1 200 OK\r\n\r\n", chunk(b"x")], ids=["not JSON", "not HTTP"])
def test_metrics_after_failures_only(make_bed: MakeBed, data: bytes) -> None:
    bed = make_bed({"upstream": {"maxTries": 1}})
    bed.backend(sends(data))
    for _ in range(3):
        assert bed.fetch(chat()).status == 502
    assert bed.fetch(HEALTH).status == 200
    families = page(bed)
    assert value(families, "requests_total", status="502") == 3
    assert value(families, "failed_tries_total") == 3


# Pages that are costly to make


COST_S = 0.005


def burn(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def test_a_costly_page_is_shared_until_it_is_twenty_times_as_old_as_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used, made = 1000.0, 50.0, 0

    def make() -> bytes:
        nonlocal made, used
        made += 1
        used += 0.1
        return b"%d" % made

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "thread_time", lambda: used)
    page = SharedPage(make)
    assert [page.content() for _ in range(5)] == [b"1"] * 5
    now += 1.5  # of the 2 s that 0.1 s are worth, less the credit at the beginning
    assert page.content() == b"1"
    now += 0.2
    assert page.content() == b"2"
    page.forget()
    assert page.content() == b"3"


def test_a_cheap_page_is_made_for_each_request_unless_there_are_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used, made = 1000.0, 50.0, 0

    def make() -> bytes:
        nonlocal made, used
        made += 1
        used += 0.001
        return b"%d" % made

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "thread_time", lambda: used)
    page = SharedPage(make)
    assert [page.content() for _ in range(5)] == [b"1", b"2", b"3", b"4", b"5"]
    for _ in range(1000):
        now += 0.001
        page.content()
    assert made <= 2 + (pages.PAGE_CREDIT_S + 1.0 * pages.PAGE_SHARE) / 0.001, "1,005 requests in a second"


def test_an_error_is_not_a_page() -> None:
    def make() -> bytes:
        raise ZeroDivisionError

    page = SharedPage(make)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            page.content()


def test_metrics_of_many_models_take_a_bounded_share_of_the_loop(make_bed: MakeBed) -> None:
    deployments = [
        {"name": f"d{n}", "model": f"m{n}", "endpoints": [{"url": "http://127.0.0.1:1"}]} for n in range(150)
    ]
    bed = make_bed({}, *deployments)
    made: list[float] = []
    bed.gateway.metrics.sources.append(lambda _: made.append(time.monotonic()))
    bed.gateway.metrics.sources.append(lambda _: burn(COST_S))
    for number in range(150):
        bed.gateway.metrics.of(f"d{number}").total.add(0.1)
    client, began = bed.client(), time.monotonic()
    for _ in range(10):
        client.send(PAGE * 10)
        bodies = {client.read_response().body for _ in range(10)}
        assert all(b'pointsman_request_seconds_count{deployment="d149"} 1' in body for body in bodies)
    most = 1 + (pages.PAGE_CREDIT_S + (time.monotonic() - began) * pages.PAGE_SHARE) / COST_S
    assert len(made) <= most, "100 requests"


def test_the_list_of_models_is_encoded_once_for_each_change(make_bed: MakeBed) -> None:
    bed = make_bed()
    request = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n"
    assert [one["id"] for one in bed.fetch(request).json()["data"]] == ["m", "other-name"]
    changed = plan_of({}, {**CHAT_DEPLOYMENT, "aliases": ["new"]}).deployments
    bed.thread.call(lambda: bed.gateway.traffic.configure(changed))
    assert [one["id"] for one in bed.fetch(request).json()["data"]] == ["m", "new"]


OF_ONE_PROCESS = """# HELP pointsman_requests_total Requests.
# TYPE pointsman_requests_total counter
pointsman_requests_total{{status="200"}} {served}
# HELP pointsman_running_requests Now.
# TYPE pointsman_running_requests gauge
pointsman_running_requests {running}
# HELP pointsman_instances In service.
# TYPE pointsman_instances gauge
pointsman_instances 3
# HELP pointsman_seconds Time.
# TYPE pointsman_seconds histogram
pointsman_seconds_bucket{{le="+Inf"}} {served}
pointsman_seconds_sum {served}.5
pointsman_seconds_count {served}
"""


def test_pages_of_several_processes_are_added_up_once_each() -> None:
    one, other = OF_ONE_PROCESS.format(served=3, running=1), OF_ONE_PROCESS.format(served=4, running=2)
    whole = merged([one, other])
    assert whole.count("# TYPE pointsman_requests_total counter") == 1
    assert 'pointsman_requests_total{status="200"} 7\n' in whole
    assert "pointsman_running_requests 3\n" in whole
    assert "pointsman_instances 3\n" in whole
    assert "pointsman_seconds_sum 8.0\n" in whole
    left = merged([one, counters_of(other)])
    assert 'pointsman_requests_total{status="200"} 7\n' in left
    assert 'pointsman_seconds_bucket{le="+Inf"} 7\n' in left
    assert "pointsman_running_requests 1\n" in left, "what a process that has ended had then is not there now"

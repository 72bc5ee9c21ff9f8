"""Budgets of tenants over real sockets: what is reserved, charged and returned, however a request ends."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pointsman.gateway.tenants import Tenant
from pointsman.reasons import Reason
from tests.gateway.backends import (
    DONE,
    OK,
    STREAM,
    BackendConnection,
    Script,
    answer,
    answers,
    chunk,
    completion,
    event,
    hangs,
    stream,
)
from tests.gateway.bed import Bed, MakeBed, plan_of
from tests.gateway.test_budgets import BUDGET, ONE_EACH
from tests.gateway.test_keys import RED, by, guarded
from tests.gateway.test_metrics import parsed
from tests.gateway.wire import Client, wait_for

# Over real sockets


def limited(make_bed: MakeBed, **limits: Any) -> tuple[Bed, Tenant]:
    bed = make_bed(*guarded({"name": "red", "costBudget": BUDGET, **limits}, price=ONE_EACH))
    return bed, bed.gateway.admission.keys.tenants["red"]


def all_at_once(bed: Bed, number: int, **fields: Any) -> list[int]:
    """The statuses of requests that are sent at the same moment."""
    clients = [bed.client() for _ in range(number)]
    ready = threading.Barrier(number)
    statuses: list[int] = []

    def send(client: Client) -> None:
        ready.wait()
        statuses.append(client.fetch(by(RED, **fields)).status)

    threads = [threading.Thread(target=send, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def slow_answer(tokens: int, release: threading.Event) -> Script:
    def script(connection: BackendConnection) -> None:
        while connection.request() is not None:
            release.wait(10)
            connection.send(answer(completion(output=tokens)))

    return script


def two_of(bed: Bed, count: int, tokens: int) -> None:
    """All requests arrive before any is answered: two are served, and the others refused."""
    release = threading.Event()
    bed.backend(slow_answer(tokens, release), max_concurrency=100)
    answered: list[int] = []
    sending = threading.Thread(target=lambda: answered.extend(all_at_once(bed, count, max_tokens=tokens)))
    sending.start()
    wait_for(lambda: bed.gateway.metrics.limited["red"] == count - 2)
    release.set()
    sending.join()
    assert sorted(answered) == [200] * 2 + [429] * (count - 2)


def test_sixty_requests_at_once(make_bed: MakeBed) -> None:
    """Each costs 50: two fit into the budget of 100."""
    bed, tenant = limited(make_bed)
    two_of(bed, 60, 50)
    assert (tenant.spent, tenant.cost.amount, tenant.cost.holders) == (100, 0, 0)


def test_without_a_limit_the_assumption_of_the_deployment_is_reserved(make_bed: MakeBed) -> None:
    price = {**ONE_EACH, "assumedOutputTokens": 30}
    bed = make_bed(*guarded({"name": "red", "costBudget": BUDGET}, price=price))
    release = threading.Event()
    bed.backend(slow_answer(1, release), max_concurrency=100)
    clients = [bed.client() for _ in range(3)]
    for client in clients:
        client.send(by(RED))
    wait_for(lambda: bed.gateway.in_flight == 3)
    got = bed.fetch(by(RED))
    assert got.status == 429
    assert "90 is reserved for 3 requests in flight, and this one may cost 30" in got.error["message"]
    assert got.header("retry-after") == "1"
    release.set()
    assert [client.read_response().status for client in clients] == [200] * 3
    assert bed.fetch(by(RED)).status == 200


def test_tokens_of_requests_in_flight_are_reserved(make_bed: MakeBed) -> None:
    bed, tenant = limited(make_bed, costBudget=1e9, tokensPerMinute=1000)
    two_of(bed, 20, 400)
    assert tenant.tokens.amount == tenant.tokens.holders == 0


TOKENS = [event(number) for number in range(20)]


def disconnects(client: Client, _: Bed) -> None:
    client.close()


def reads(client: Client, _: Bed) -> None:
    client.rest()


def loses_its_instance(client: Client, bed: Bed) -> None:
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", Reason("crashed")))
    client.until(b"stream_interrupted")


def is_cut_off(client: Client, bed: Bed) -> None:
    bed.thread.call(lambda: bed.gateway.upstream.cut_off("shutting down"))
    client.rest()


ENDS: Mapping[str, tuple[Script, dict[str, Any], Callable[[Client, Bed], None], float]] = {
    "answered": (answers(answer(completion(output=7))), {}, reads, 7),
    "answered without usage": (answers(answer({"choices": [], "text": "x" * 20})), {}, reads, 11),
    "streamed": (answers(stream(*TOKENS, DONE)), {"stream": True}, reads, 19),
    "refused by the engine": (answers(answer({"error": "no"}, 400)), {}, reads, 0),
    "refused by every try": (answers(answer({"error": "no"}, 500)), {}, reads, 0),
    "not JSON": (answers(answer(b"{nonsense")), {}, reads, 0),
    "disconnected before the answer": (hangs(), {}, disconnects, 0),
    "disconnected within a stream": (hangs(STREAM + b"".join(map(chunk, TOKENS))), {"stream": True}, disconnects, 20),
    "lost within a stream": (hangs(STREAM + b"".join(map(chunk, TOKENS))), {"stream": True}, loses_its_instance, 20),
    "cut off before the answer": (hangs(), {}, is_cut_off, 0),
    "cut off within a stream": (hangs(STREAM + b"".join(map(chunk, TOKENS))), {"stream": True}, is_cut_off, 20),
}


@pytest.mark.parametrize("how", ENDS)
def test_what_was_reserved_is_returned_however_a_request_ends(make_bed: MakeBed, how: str) -> None:
    script, fields, end, spent = ENDS[how]
    bed, tenant = limited(make_bed)
    backend = bed.backend(script)
    client = bed.client()
    client.send(by(RED, "connection: close", max_tokens=60, **fields))
    wait_for(lambda: backend.received)
    if "within" in how:
        client.until(b"t19")
        assert (tenant.spent, tenant.cost.amount) == (20, 40), "what has come is charged at once"
    end(client, bed)
    wait_for(lambda: not bed.gateway.in_flight)
    assert (tenant.cost.amount, tenant.cost.holders, tenant.tokens.amount, tenant.tokens.holders) == (0, 0, 0, 0)
    assert tenant.spent == spent


def test_a_request_that_no_instance_takes_costs_nothing(make_bed: MakeBed) -> None:
    bed, tenant = limited(make_bed, tokensPerMinute=1000)
    got = bed.fetch(by(RED, max_tokens=60, pointsman={"timeout_s": 0.05}))
    assert got.status in (429, 503)
    assert (tenant.spent, tenant.cost.amount, tenant.cost.holders, tenant.tokens.amount) == (0, 0, 0, 0)
    assert tenant.tokens_left is not None
    assert tenant.tokens_left.refill(time.monotonic()) == 1000


def test_a_retried_request_is_charged_once(make_bed: MakeBed) -> None:
    bed, tenant = limited(make_bed)
    bed.backend(answers(answer({"error": "no"}, 500), OK))
    bed.backend(answers(answer({"error": "no"}, 500), OK))
    assert bed.fetch(by(RED, max_tokens=60)).status == 200
    assert (tenant.spent, tenant.cost.amount, tenant.cost.holders) == (2, 0, 0)


def test_usage_of_requests_in_flight_counts_after_new_settings(make_bed: MakeBed) -> None:
    """They were charged to the limits that were in force when they came."""
    gateway, deployment = guarded({"name": "red", "costBudget": BUDGET}, price=ONE_EACH)
    bed = make_bed(gateway, deployment)
    release = threading.Event()
    bed.backend(slow_answer(90, release))
    client = bed.client()
    client.send(by(RED, max_tokens=90))
    wait_for(lambda: bed.gateway.in_flight == 1)
    bed.thread.call(lambda: bed.gateway.configure(plan_of(gateway, deployment).gateway))
    assert bed.fetch(by(RED, max_tokens=90)).status == 429
    release.set()
    assert client.read_response().status == 200
    assert bed.gateway.admission.keys.tenants["red"].spent == 90


def test_the_usage_of_tenants_is_shown(make_bed: MakeBed) -> None:
    bed, _ = limited(make_bed, costPeriod="1h", tokensPerMinute=1000, requestsPerMinute=60)
    bed.backend(hangs(STREAM + b"".join(map(chunk, TOKENS))))
    client = bed.client()
    client.send(by(RED, max_tokens=60, stream=True))
    client.until(b"t19")
    [blue] = [one for one in bed.gateway.admission.report() if one["name"] == "blue"]
    assert (blue["budget"], blue["tokens_left"], blue["requests_left"], blue["in_flight"]) == (None, None, None, 0)
    families = parsed(bed.fetch(b"GET /metrics HTTP/1.1\r\nhost: gateway\r\n\r\n").body.decode())

    def value(family: str, kind: str = "") -> float:
        labels = {("tenant", "red"), *([("kind", kind)] if kind else [])}
        return families[f"pointsman_{family}"].samples[f"pointsman_{family}", frozenset(labels)]

    assert (value("tenant_cost", "spent"), value("tenant_cost", "reserved")) == (20, 40)
    assert value("tenant_cost", "budget") == BUDGET
    assert time.time() + 3500 < value("tenant_period_end_seconds") < time.time() + 3601
    assert 900 < value("tenant_tokens", "left") < 1000
    assert value("tenant_tokens", "reserved") == 40
    assert (value("tenant_tokens", "per_minute"), value("tenant_requests", "per_minute")) == (1000, 60)
    assert 59 <= value("tenant_requests", "left") < 60

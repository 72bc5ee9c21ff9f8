"""Requests that fail before the first byte of a response are retried on another instance, within limits."""

import time

import pytest

from pointsman.gateway.upstream import LATELY_S, RetryBudget
from pointsman.reasons import Reason
from pointsman.routing.outliers import Doubt, Outlier
from tests.gateway.backends import (
    OK,
    Backend,
    BackendConnection,
    Gate,
    Script,
    answer,
    answers,
    event,
    hangs,
    never_accepting,
    sends,
    silent,
    stream,
)
from tests.gateway.bed import CHAT_DEPLOYMENT, Bed, MakeBed
from tests.gateway.wire import chat, wait_for
from tests.shortages import no_descriptors

OOPS = answers(answer({"error": "oops"}, 500))


def received(*backends: Backend) -> list[int]:
    return [len(backend.received) for backend in backends]


def test_a_request_is_tried_once_per_instance_and_then_refused(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"maxTries": 3}})
    backends = [bed.backend(OOPS) for _ in range(5)]
    got = bed.fetch(chat("x-request-id: it"))
    assert got.status == 502
    assert got.error["type"] == "server_error"
    assert "try 3 of 3" in got.error["message"]
    assert "oops" in got.error["message"]
    assert sorted(received(*backends)) == [0, 0, 1, 1, 1]
    record = bed.record("it")
    assert (record.state, record.status, len(record.failures)) == ("failed", 502, 3)
    assert len({instance for instance, _ in record.failures}) == 3
    assert got.header("x-request-id") == "it"
    assert got.header("x-pointsman-instance") is None


def test_max_tries_of_one(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"maxTries": 1}})
    backends = [bed.backend(OOPS) for _ in range(3)]
    assert bed.fetch(chat()).status == 502
    assert sum(received(*backends)) == 1


def test_a_retry_sends_the_same_bytes(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"maxTries": 4}}, {**CHAT_DEPLOYMENT, "scheduling": {"policy": "fifo"}})
    backends = [*(bed.backend(OOPS) for _ in range(3)), bed.backend(current_load=100)]
    assert bed.fetch(chat("x-custom: 1", "connection: close", stream=False, temperature=0.5)).status == 200
    assert received(*backends) == [1, 1, 1, 1]
    requests = [backend.received[0] for backend in backends]
    assert len({request.body for request in requests}) == 1
    assert {request.start for request in requests} == {b"POST /v1/chat/completions HTTP/1.1"}
    assert {request.header("x-custom") for request in requests} == {"1"}


def test_a_hung_instance_is_retried_before_the_first_byte(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"firstTokenTimeout": "100ms"}})
    hanging = [bed.backend(silent), bed.backend(hangs()), bed.backend(hangs(b"HTTP/1.1 200 OK\r\ncontent-le"))]
    good = bed.backend()
    for _ in range(4):
        assert bed.fetch(chat()).status == 200
    assert received(good) == [4]
    failures = [why for record in bed.dispatcher().records.newest() for _, why in record.failures]
    assert failures
    assert all("no answer within 0.1 s" in str(why) for why in failures)
    wait_for(lambda: all(backend.all_closed() for backend in hanging), "connections to hung instances are closed")


def test_a_connect_timeout_is_retried_on_another_instance(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"connectTimeout": "100ms"}})
    with never_accepting() as port:
        bed.admit(port)
        bed.backend()
        for _ in range(3):
            assert bed.fetch(chat()).header("x-pointsman-instance") == "chat-1"
    failures = [why for record in bed.dispatcher().records.newest() for _, why in record.failures]
    assert any("no connection within 0.1 s" in str(why) for why in failures)


def test_retries_are_limited_by_the_budget(make_bed: MakeBed) -> None:
    """When every try fails, retries do not triple the load of the fleet."""
    bed = make_bed({"upstream": {"maxTries": 3, "retryBudget": 0}})
    bed.thread.call(lambda: setattr(bed.gateway.upstream, "retries", RetryBudget(0.0, reserve=5.0, per_second=0.0)))
    backends = [bed.backend(OOPS) for _ in range(3)]
    statuses = [bed.fetch(chat()).status for _ in range(10)]
    assert set(statuses) == {502}
    assert 10 < sum(received(*backends)) <= 15


def test_the_budget_grows_with_requests_and_with_time() -> None:
    budget = RetryBudget(0.5, reserve=2.0, per_second=1.0)
    assert [budget.allows(0.0) for _ in range(3)] == [True, True, False]
    budget.requests += 1
    assert not budget.allows(0.0)
    budget.requests += 1
    assert budget.allows(0.0)
    assert not budget.allows(0.0)
    assert budget.allows(1.0)
    assert not budget.allows(1.5)
    assert [budget.allows(100.0) for _ in range(3)] == [True, True, False]


def test_requests_survive_an_instance_that_leaves(bed: Bed) -> None:
    """A request without a response yet is retried; a begun response ends with an error."""
    bed.backend(hangs(), deployment="chat")
    client = bed.client()
    client.send(chat("x-request-id: it"))
    wait_for(bed.running)
    bed.backend()
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", Reason("it crashed")))
    got = client.read_response()
    assert (got.status, got.header("x-pointsman-instance")) == (200, "chat-1")
    assert bed.record("it").failures == (("chat-0", Reason("it crashed")),)


def test_responses_of_an_instance_that_has_left_are_ignored(bed: Bed) -> None:
    """There is no other instance yet: the request waits, and the late response of the old instance is ignored."""
    gate = Gate(then=answer({"old": True}))
    old = bed.backend(gate)
    client = bed.client()
    client.send(chat())
    wait_for(lambda: old.received)
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", Reason("it moved")))
    gate.open()
    wait_for(old.all_closed)
    assert bed.waiting() == 1
    bed.backend(answers(answer({"old": False})))
    assert client.read_response().json() == {"old": False}


def test_a_stream_of_a_removed_instance_is_interrupted(bed: Bed) -> None:
    first = bed.backend(hangs(stream(event(0))[:-5]))
    client = bed.client()
    client.send(chat("x-request-id: it", stream=True))
    wait_for(lambda: bed.dispatcher().records.get("it") and bed.record("it").first_token_at)
    bed.backend()
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", Reason("it crashed")))
    got = client.read_response()
    assert len(got.events()) == 2
    assert b"it crashed" in got.events()[1]
    assert b"stream_interrupted" in got.events()[1]
    wait_for(first.all_closed)
    assert client.stays_open()


def test_an_instance_that_moves_is_found_at_its_new_address(bed: Bed) -> None:
    """Same name, another port: connections to the old port are not reused."""
    old = bed.backend()
    assert bed.fetch(chat()).status == 200
    new = Backend([answers(OK)])
    bed.backends.append(new)
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", Reason("restarted")))
    bed.admit(new.port)
    assert bed.fetch(chat()).header("x-pointsman-instance") == "chat-0"
    assert received(old, new) == [1, 1]


@pytest.mark.parametrize("fault", [OOPS, sends(), sends(b"garbage\r\n\r\n")], ids=["500", "closed", "garbage"])
def test_three_failures_in_a_row_are_reported(make_bed: MakeBed, fault: object) -> None:
    bed = make_bed({"upstream": {"maxTries": 1}})
    reports: list[tuple[str, Reason]] = []
    bed.gateway.traffic.hooks.failing = lambda instance, why: reports.append((instance, why))
    bed.backend(fault)  # type: ignore[arg-type]
    for expected in (0, 0, 1, 1, 1, 2):
        assert bed.fetch(chat()).status == 502
        assert [instance for instance, _ in reports] == ["chat-0"] * expected


# Failures of the gateway's own side

CLOSING = sends(answer({"id": "x"}, headers=("content-type: application/json", "connection: close")))


def test_without_descriptors_clients_get_503_and_no_instance_is_blamed(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"maxTries": 2, "retryBudget": 0}})
    backends = [bed.backend(CLOSING), bed.backend(CLOSING)]
    blamed: list[str] = []
    bed.gateway.traffic.hooks.failing = lambda instance, _: blamed.append(instance)
    client = bed.client()
    assert client.fetch(chat()).status == 200
    with no_descriptors():
        answers = [client.fetch(chat(f"x-request-id: r{number}")) for number in range(10)]
    for got in answers:
        assert (got.status, got.error["code"], got.error["reason"]["code"]) == (503, "evicted_not_sent", "not-sent")
        assert int(got.header("retry-after") or 0) >= 1
    assert blamed == []
    assert bed.dispatcher().counters.retries == {}
    [problem] = bed.gateway.upstream.unsent.problems(time.monotonic())
    assert "ulimit -n" in str(problem)
    assert bed.gateway.upstream.unsent.problems(time.monotonic() + LATELY_S) == []
    assert client.fetch(chat()).status == 200
    assert sum(received(*backends)) == 2


def test_without_descriptors_a_request_goes_to_an_instance_with_a_connection(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"maxTries": 2}}, {**CHAT_DEPLOYMENT, "scheduling": {"policy": "fifo"}})
    backends = [bed.backend(CLOSING), bed.backend(current_load=100)]
    bed.dispatcher()
    client = bed.client()
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", Reason("left")))
    assert client.fetch(chat()).status == 200
    bed.admit(backends[0].port, instance_id="chat-0")
    with no_descriptors():
        got = client.fetch(chat("x-request-id: it"))
    assert (got.status, got.header("x-pointsman-instance")) == (200, "chat-1")
    assert [instance for instance, _ in bed.record("it").failures] == ["chat-0"]


# Instances that take no more for now


def busy(*headers: str, status: int = 429) -> Script:
    return answers(answer({"error": "busy"}, status, ("content-type: application/json", *headers)))


FIFO = {**CHAT_DEPLOYMENT, "scheduling": {"policy": "fifo"}}


@pytest.mark.parametrize(
    ("instance", "pause_s"),
    [
        (busy("retry-after: 7"), 7),
        (busy("Retry-After: Wed, 21 Oct 2015 07:28:00 GMT"), 0.1),
        (busy("retry-after: 86400"), 60),
        (busy("retry-after: soon"), 0.1),
        (busy(), 0.1),
        (busy("retry-after: 7", status=503), 7),
    ],
    ids=["seconds", "a date in the past", "a day", "not a time", "without", "503"],
)
def test_an_instance_that_takes_no_more_is_paused_and_another_is_tried(
    make_bed: MakeBed, instance: Script, pause_s: float
) -> None:
    bed = make_bed({}, FIFO)
    paused, _ = bed.backend(instance), bed.backend(current_load=100)
    first = bed.fetch(chat("x-request-id: it"))
    until = bed.dispatcher().fleet.pauses.get("chat-0", 0.0)
    assert (first.status, first.header("x-pointsman-instance")) == (200, "chat-1")
    [(failed, why)] = bed.record("it").failures
    assert (failed, why.code) == ("chat-0", "answered-error")
    if pause_s > 1:
        assert pause_s - 5 < until - time.monotonic() <= pause_s
        assert {bed.fetch(chat()).header("x-pointsman-instance") for _ in range(5)} == {"chat-1"}
        assert received(paused) == [1], "a paused instance gets no requests"
        status = bed.thread.call(lambda: bed.gateway.traffic.status("chat"))
        assert status is not None
        assert pause_s - 5 < status["instances"]["chat-0"]["paused_s"] <= pause_s
        assert status["instances"]["chat-1"]["paused_s"] is None


def test_a_paused_instance_is_named_in_explain(make_bed: MakeBed) -> None:
    bed = make_bed({}, FIFO)
    bed.backend(busy("retry-after: 7"))
    gate = Gate()
    bed.backend(gate, current_load=1, max_concurrency=2)
    clients = [bed.client() for _ in range(2)]
    clients[0].send(chat())
    wait_for(lambda: bed.running() == 1 and bed.dispatcher().fleet.pauses)
    clients[1].send(chat("x-request-id: it"))
    wait_for(lambda: bed.waiting() == 1)
    record = bed.thread.call(lambda: bed.dispatcher().explain("it", time.monotonic()))
    assert record is not None
    assert record.failure is not None
    why = {str(endpoint): reason for endpoint, _, reason in record.failure.reasons()}["chat-0"]
    assert why.code == "paused"
    assert why.facts["for_s"] == pytest.approx(7.0)
    assert 0 < why.facts["left_s"] <= 7
    assert "s left: it answered 429" in str(why)
    gate.open()
    assert [client.read_response().status for client in clients] == [200, 200]


def test_if_every_instance_takes_no_more_the_client_gets_that_answer(bed: Bed) -> None:
    backends = [bed.backend(busy("retry-after: 9")) for _ in range(3)]
    got = bed.fetch(chat("x-request-id: it"))
    assert (got.status, got.json(), got.header("retry-after")) == (429, {"error": "busy"}, "9")
    assert (got.header("x-request-id"), got.header("x-pointsman-instance")) == ("it", bed.record("it").failures[-1][0])
    assert received(*backends) == [1, 1, 1]
    later = bed.fetch(chat("x-request-id: later"))
    assert (later.status, later.error["code"]) == (429, "rejected_capacity")
    assert 0 < int(later.header("retry-after") or "") <= 9
    assert "all 3 instances in service take no requests" in later.error["message"]
    assert received(*backends) == [1, 1, 1], "paused instances are not tried"
    assert bed.gateway.metrics.of("chat").statuses[429] == 2


def test_requests_wait_for_the_end_of_a_short_pause(bed: Bed) -> None:
    only = bed.backend(answers(answer({}, 429), OK))
    assert bed.fetch(chat()).status == 429
    assert bed.fetch(chat()).status == 200
    assert received(only) == [2]
    assert bed.dispatcher().fleet.pauses == {}


def test_a_request_that_was_refused_waits_for_an_instance_that_is_only_full(make_bed: MakeBed) -> None:
    bed = make_bed({}, FIFO)
    gate = Gate()
    bed.backend(gate, max_concurrency=1)
    first, second = bed.client(), bed.client()
    first.send(chat())
    wait_for(lambda: bed.running() == 1)
    bed.backend(busy("retry-after: 9"))
    second.send(chat())
    wait_for(lambda: bed.waiting() == 1)
    gate.open()
    assert [first.read_response().status, second.read_response().status] == [200, 200]


def test_the_pause_of_an_instance_that_names_none_doubles_until_it_works(make_bed: MakeBed) -> None:
    bed = make_bed({}, FIFO)
    lane = bed.lane()
    bed.backend()

    def pauses(count: int) -> list[float]:
        found = []
        for _ in range(count):
            lane.pause("chat-0", None, Reason("it answered 429"))
            found.append(round(lane.dispatcher.fleet.pauses.pop("chat-0") - time.monotonic(), 1))
        return found

    assert bed.thread.call(lambda: pauses(9)) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    bed.thread.call(lambda: lane.worked("chat-0"))
    assert bed.thread.call(lambda: pauses(2)) == [0.1, 0.2]


def test_several_refusals_at_once_are_one_pause(bed: Bed) -> None:
    bed.backend()
    lane = bed.lane()
    for _ in range(8):
        bed.thread.call(lambda: lane.pause("chat-0", None, Reason("it answered 429")))
    assert lane.dispatcher.fleet.pauses["chat-0"] - time.monotonic() <= 0.1


def test_refusals_are_not_reported_as_failures(bed: Bed) -> None:
    reports: list[str] = []
    bed.gateway.traffic.hooks.failing = lambda instance, why: reports.append(instance)
    bed.backend(busy())
    for _ in range(7):
        assert bed.fetch(chat()).status == 429
    assert reports == []


# Second opinions


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_an_error_that_may_be_the_instances_is_checked_with_another(make_bed: MakeBed, status: int) -> None:
    bed = make_bed({}, FIFO)
    bed.backend(busy(status=status))
    bed.backend(current_load=100)
    got = bed.fetch(chat("x-request-id: it"))
    assert (got.status, got.header("x-pointsman-instance")) == (200, "chat-1")
    assert [instance for instance, _ in bed.record("it").failures] == ["chat-0"]


def test_an_error_on_which_instances_agree_is_the_clients(bed: Bed) -> None:
    """Ever fewer of them are checked, so that bad requests do not double the load."""
    backends = [bed.backend(busy(status=400)) for _ in range(2)]
    for _ in range(200):
        got = bed.fetch(chat())
        assert (got.status, got.json()) == (400, {"error": "busy"})
    assert 200 < sum(received(*backends)) < 240
    assert bed.gateway.metrics.of("chat").statuses == {400: 200}


def test_an_error_is_passed_on_if_no_other_instance_takes_requests(make_bed: MakeBed) -> None:
    bed = make_bed({}, FIFO)
    bed.backend(busy(status=404))
    bed.backend(can_accept_request=False)
    assert bed.fetch(chat("x-request-id: it")).status == 404
    assert (bed.record("it").state, bed.record("it").status) == ("failed", 404)


def test_an_error_is_passed_on_if_no_other_instance_has_room_in_time(make_bed: MakeBed) -> None:
    bed = make_bed({}, FIFO)
    bed.backend(busy(status=404))
    bed.backend(max_concurrency=1, current_load=1)
    got = bed.fetch(chat("x-request-id: it", "x-pointsman-timeout-s: 0.2"))
    assert (got.status, got.json(), got.header("x-pointsman-instance")) == (404, {"error": "busy"}, "chat-0")


def test_an_error_is_passed_on_if_another_instance_fails(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"maxTries": 2}}, FIFO)
    bed.backend(busy(status=404))
    bed.backend(OOPS, current_load=100)
    got = bed.fetch(chat())
    assert (got.status, got.json(), got.header("x-pointsman-instance")) == (404, {"error": "busy"}, "chat-0")


def test_second_opinions_leave_half_of_the_retry_budget(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"retryBudget": 0}})
    bed.thread.call(lambda: setattr(bed.gateway.upstream, "retries", RetryBudget(0.0, reserve=6.0, per_second=0.0)))
    backends = [bed.backend(answers(answer({}, status))) for status in (401, 403)]
    for _ in range(20):
        assert bed.fetch(chat()).status in (401, 403)
    assert sum(received(*backends)) == 24
    assert [bed.gateway.upstream.retries.allows(time.monotonic()) for _ in range(3)] == [True, True, False]


# Instances that stand out


def picky(connection: BackendConnection) -> None:
    """Answers bad requests with 400, as any engine does."""
    while (request := connection.request()) is not None:
        connection.send(answer({"error": "bad"}, 400) if b"very bad" in request.body else OK)


def outliers_of(bed: Bed) -> list[Outlier]:
    found: list[Outlier] = []
    bed.gateway.traffic.hooks.standing_out = found.append
    return found


@pytest.mark.parametrize("tries", [5, 1])
def test_one_client_with_bad_requests_on_one_instance_does_not_make_it_stand_out(make_bed: MakeBed, tries: int) -> None:
    """Without second opinions it is reported after twenty errors, and the controller then probes it."""
    bed = make_bed({"upstream": {"maxTries": tries}}, FIFO)
    bed.backend(picky)
    for _ in range(3):
        bed.backend(picky, current_load=100)
    found = outliers_of(bed)
    client = bed.client()
    for number in range(100):
        client.fetch(chat(messages=[{"role": "user", "content": "very bad"}]))
        if number % 4 == 0:
            assert client.fetch(chat()).status == 200
    if tries > 1:
        assert found == []
    else:
        assert {(one.instance_id, one.contradicted) for one in found} <= {("chat-0", 0)}


def test_an_instance_that_answers_with_errors_where_others_do_not_stands_out(make_bed: MakeBed) -> None:
    bed = make_bed({}, FIFO)
    bed.backend(busy(status=403))
    for _ in range(3):
        bed.backend(current_load=100)
    found = outliers_of(bed)
    client = bed.client()
    assert {client.fetch(chat()).status for _ in range(20)} == {200}
    assert {one.instance_id for one in found} == {"chat-0"}
    assert found[0].kind == "403"
    assert found[0].contradicted >= 3
    assert found[0].results <= 10, "after a few requests"


def test_a_stream_that_has_begun_contradicts_an_error(make_bed: MakeBed) -> None:
    """Its end may be minutes away."""
    bed = make_bed({}, FIFO)
    bed.backend(busy(status=404))
    bed.backend(hangs(stream(event(0))[:-5]), current_load=100)
    client = bed.client()
    client.send(chat(stream=True))
    client.until(b"t0")
    count = bed.lane().outliers._count(Doubt("chat-0", "404"))
    assert (count.errors, count.contradicted) == (1, 1)


def test_results_are_counted_for_good_requests_without_more_work(bed: Bed) -> None:
    bed.backend()
    client = bed.client()
    for _ in range(5):
        client.fetch(chat())
    assert bed.lane().outliers.good == {"chat-0": 5}
    assert bed.lane().outliers.streaks == {}

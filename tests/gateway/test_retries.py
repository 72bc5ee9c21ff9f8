"""Requests that fail before the first byte of a response are retried on another instance, within limits."""

import time

import pytest

from pointsman.gateway.upstream import LATELY_S, RetryBudget
from tests.gateway.backends import (
    OK,
    Backend,
    Gate,
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
    assert (record.state, len(record.failures)) == ("refused", 3)
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
    assert all("no answer within 0.1 s" in why for why in failures)
    wait_for(lambda: all(backend.all_closed() for backend in hanging), "connections to hung instances are closed")


def test_a_connect_timeout_is_retried_on_another_instance(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"connectTimeout": "100ms"}})
    with never_accepting() as port:
        bed.admit(port)
        bed.backend()
        for _ in range(3):
            assert bed.fetch(chat()).header("x-pointsman-instance") == "chat-1"
    failures = [why for record in bed.dispatcher().records.newest() for _, why in record.failures]
    assert any("no connection within 0.1 s" in why for why in failures)


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
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", "it crashed"))
    got = client.read_response()
    assert (got.status, got.header("x-pointsman-instance")) == (200, "chat-1")
    assert bed.record("it").failures == (("chat-0", "it crashed"),)


def test_responses_of_an_instance_that_has_left_are_ignored(bed: Bed) -> None:
    """There is no other instance yet: the request waits, and the late response of the old instance is ignored."""
    gate = Gate(then=answer({"old": True}))
    old = bed.backend(gate)
    client = bed.client()
    client.send(chat())
    wait_for(lambda: old.received)
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", "it moved"))
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
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", "it crashed"))
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
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", "restarted"))
    bed.admit(new.port)
    assert bed.fetch(chat()).header("x-pointsman-instance") == "chat-0"
    assert received(old, new) == [1, 1]


@pytest.mark.parametrize("fault", [OOPS, sends(), sends(b"garbage\r\n\r\n")], ids=["500", "closed", "garbage"])
def test_three_failures_in_a_row_are_reported(make_bed: MakeBed, fault: object) -> None:
    bed = make_bed({"upstream": {"maxTries": 1}})
    reports: list[tuple[str, str]] = []
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
    assert "ulimit -n" in problem
    assert bed.gateway.upstream.unsent.problems(time.monotonic() + LATELY_S) == []
    assert client.fetch(chat()).status == 200
    assert sum(received(*backends)) == 2


def test_without_descriptors_a_request_goes_to_an_instance_with_a_connection(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"maxTries": 2}}, {**CHAT_DEPLOYMENT, "scheduling": {"policy": "fifo"}})
    backends = [bed.backend(CLOSING), bed.backend(current_load=100)]
    bed.dispatcher()
    client = bed.client()
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", "so that the other gets a connection"))
    assert client.fetch(chat()).status == 200
    bed.admit(backends[0].port, instance_id="chat-0")
    with no_descriptors():
        got = client.fetch(chat("x-request-id: it"))
    assert (got.status, got.header("x-pointsman-instance")) == (200, "chat-1")
    assert [instance for instance, _ in bed.record("it").failures] == ["chat-0"]

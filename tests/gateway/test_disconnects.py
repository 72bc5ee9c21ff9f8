"""Clients that disconnect: the request is cancelled at once, its slot is freed, and no state remains."""

from collections.abc import Callable

import pytest

from tests.gateway.backends import (
    OK,
    STREAM,
    BackendConnection,
    Gate,
    answers,
    chunk,
    event,
    hangs,
    never_accepting,
    silent,
)
from tests.gateway.bed import Bed, MakeBed
from tests.gateway.wire import Client, chat, wait_for

WAYS: dict[str, Callable[[Client], None]] = {
    "closes": Client.close,
    "resets": Client.reset,
    "closes its side": Client.finish_writing,
}

each_way = pytest.mark.parametrize("how", WAYS)


def is_cancelled(bed: Bed, request_id: str) -> bool:
    refusal = bed.record(request_id).refusal
    return refusal is not None and refusal.outcome.value == "EvictedContextCancelled"


@each_way
def test_disconnect_while_queued(bed: Bed, how: str) -> None:
    gate = Gate()
    backend = bed.backend(gate, max_concurrency=1)
    first, second, third = bed.client(), bed.client(), bed.client()
    first.send(chat("x-request-id: first"))
    wait_for(bed.running)
    second.send(chat("x-request-id: second"))
    wait_for(lambda: bed.waiting() == 1)
    third.send(chat("x-request-id: third"))
    wait_for(lambda: bed.waiting() == 2)
    WAYS[how](second)
    wait_for(lambda: bed.waiting() == 1)
    assert is_cancelled(bed, "second")
    gate.open()
    assert first.read_response().header("x-request-id") == "first"
    assert third.read_response().header("x-request-id") == "third"
    assert len(backend.received) == 2


@each_way
def test_disconnect_while_no_instance_serves_the_model(bed: Bed, how: str) -> None:
    client = bed.client()
    client.send(chat("x-request-id: it"))
    wait_for(lambda: bed.waiting() == 1)
    WAYS[how](client)
    wait_for(lambda: bed.waiting() == 0)
    assert is_cancelled(bed, "it")


@each_way
def test_disconnect_while_the_instance_processes_the_request(bed: Bed, how: str) -> None:
    backend = bed.backend(hangs())
    client = bed.client()
    client.send(chat("x-request-id: it"))
    wait_for(lambda: backend.received)
    WAYS[how](client)
    wait_for(backend.all_closed, "the connection to the instance must be closed")
    assert is_cancelled(bed, "it")
    assert bed.running() == 0
    assert bed.lane().outliers.streaks == {}, "it is not a failure of the instance"
    assert bed.gateway.metrics.of("chat").abandoned == 1


@each_way
def test_disconnect_between_events_of_a_stream(bed: Bed, how: str) -> None:
    backend = bed.backend(hangs(STREAM + chunk(event(0))))
    client = bed.client()
    client.send(chat("x-request-id: it", stream=True))
    client.until(b"t0")
    WAYS[how](client)
    wait_for(backend.all_closed, "the connection to the instance must be closed")
    assert is_cancelled(bed, "it")
    assert bed.running() == 0


@each_way
def test_disconnect_while_the_instance_sends_events(bed: Bed, how: str) -> None:
    """The instance sends continuously."""
    sent: list[int] = []

    def script(connection: BackendConnection) -> None:
        connection.request()
        connection.send(STREAM)
        while True:
            connection.send(chunk(event(len(sent))))
            sent.append(1)

    backend = bed.backend(script)
    client = bed.client()
    client.send(chat("x-request-id: it", stream=True))
    client.until(b"t10")
    WAYS[how](client)
    wait_for(backend.all_closed, "the connection to the instance must be closed")
    assert is_cancelled(bed, "it")


@each_way
def test_disconnect_while_connecting_to_the_instance(make_bed: MakeBed, how: str) -> None:
    bed = make_bed({"upstream": {"connectTimeout": "10s"}})
    with never_accepting() as port:
        bed.admit(port)
        client = bed.client()
        client.send(chat("x-request-id: it"))
        wait_for(bed.running)
        WAYS[how](client)
        wait_for(lambda: bed.running() == 0)
        assert is_cancelled(bed, "it")


@each_way
def test_disconnect_between_two_tries(make_bed: MakeBed, how: str) -> None:
    bed = make_bed({"upstream": {"firstTokenTimeout": "50ms"}})
    first, second = bed.backend(silent), bed.backend(silent)
    client = bed.client()
    client.send(chat("x-request-id: it"))
    wait_for(lambda: bed.dispatcher().records.get("it") and bed.record("it").failures)
    WAYS[how](client)
    wait_for(lambda: bed.running() + bed.waiting() == 0)
    wait_for(lambda: first.all_closed() and second.all_closed())


def test_disconnect_with_pipelined_requests(bed: Bed) -> None:
    backend = bed.backend(hangs())
    client = bed.client()
    client.send(b"".join(chat(f"x-request-id: n{n}") for n in range(5)))
    wait_for(lambda: backend.received)
    client.close()
    wait_for(backend.all_closed)
    wait_for(lambda: not bed.gateway.clients)
    assert [request.header("x-request-id") for request in backend.received] == ["n0"]


def test_disconnect_while_sending_the_request(bed: Bed) -> None:
    backend = bed.backend()
    request = chat()
    for cut in range(1, len(request)):
        client = bed.client()
        client.send(request[:cut])
        client.reset() if cut % 2 else client.close()
    wait_for(lambda: not bed.gateway.clients)
    assert backend.received == []


def test_the_seat_of_a_cancelled_request_is_free_at_once(bed: Bed) -> None:
    """One slot, held by a client that disconnects: the next request in the queue gets it."""
    backend = bed.backend(hangs(), answers(OK), max_concurrency=1)
    leaving, staying = bed.client(), bed.client()
    leaving.send(chat())
    wait_for(lambda: backend.received)
    staying.send(chat())
    wait_for(lambda: bed.waiting() == 1)
    leaving.close()
    assert staying.read_response().status == 200


def test_the_request_id_of_a_disconnected_client_can_be_reused(bed: Bed) -> None:
    backend = bed.backend(hangs(), answers(OK))
    first = bed.client()
    first.send(chat("x-request-id: same"))
    wait_for(lambda: backend.received)
    first.reset()
    wait_for(lambda: bed.running() == 0)
    assert bed.fetch(chat("x-request-id: same")).header("x-request-id") == "same"

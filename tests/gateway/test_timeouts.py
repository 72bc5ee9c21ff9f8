"""Timeouts of clients, backpressure, and shutdown."""

import asyncio
import threading
import time

import pytest

from pointsman.http import server as server_module
from tests.gateway.backends import STREAM, BackendConnection, Gate, answer, answers, chunk, event, hangs, stream
from tests.gateway.bed import Bed, MakeBed
from tests.gateway.memory import Memory
from tests.gateway.wire import CHAT, HEALTH, TIMEOUT_S, Client, chat, wait_for

QUICK = {
    "headerTimeout": "100ms",
    "bodyTimeout": "100ms",
    "idleTimeout": "100ms",
    "writeTimeout": "300ms",
}
HEAD = b"POST %b HTTP/1.1\r\nhost: gateway\r\ncontent-length: 50\r\n\r\n" % CHAT


def limits(**changed: object) -> dict[str, object]:
    """Default limits with these changes."""
    return {"limits": changed}


def test_a_client_that_sends_nothing_is_disconnected(make_bed: MakeBed) -> None:
    client = make_bed(limits(headerTimeout="100ms")).client()
    assert client.is_closed()


@pytest.mark.parametrize("data", [b"G", b"GET /health", b"GET /health HTTP/1.1\r\nhost: gateway\r\nx: "])
def test_slow_headers(make_bed: MakeBed, data: bytes) -> None:
    bed = make_bed(limits(headerTimeout="100ms"))
    client = bed.client()
    client.send(data)
    got = client.read_response()
    assert (got.status, got.header("connection")) == (408, "close")
    assert "in time" in got.error["message"]
    assert client.is_closed()
    assert bed.gateway.metrics.unread == {408: 1}


def test_the_header_timeout_covers_the_whole_head(make_bed: MakeBed) -> None:
    """Each byte is in time, the whole head is not."""
    client = make_bed(limits(headerTimeout="200ms")).client()
    client.send(b"GET /health HTTP/1.1\r\nhost: gateway\r\n")
    assert trickle(client, b"x") == 408


def test_empty_lines_do_not_extend_the_header_timeout(make_bed: MakeBed) -> None:
    client = make_bed(limits(headerTimeout="200ms")).client()
    assert trickle(client, b"\r\n") is None


def trickle(client: Client, byte: bytes) -> int | None:
    """Send bytes slowly until the gateway responds or closes. The status; None if it closes without a response."""
    client.socket.settimeout(0.02)
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        try:
            client.send(byte)
            if not client.more():
                return None
        except TimeoutError:
            continue
        except ConnectionError:
            pass
        client.socket.settimeout(TIMEOUT_S)
        return client.read_response().status if client._read else None
    raise AssertionError("the gateway did not time out")


def test_a_slow_body(make_bed: MakeBed) -> None:
    bed = make_bed(limits(bodyTimeout="100ms"))
    backend = bed.backend()
    client = bed.client()
    client.send(HEAD + b"{")
    assert client.read_response().status == 408
    assert client.is_closed()
    assert backend.received == []


def test_a_body_that_trickles_in_times_out(make_bed: MakeBed) -> None:
    client = make_bed(limits(bodyTimeout="200ms")).client()
    client.send(b"POST %b HTTP/1.1\r\nhost: gateway\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT)
    assert trickle(client, b"1\r\n \r\n") == 408


def test_a_slow_pipelined_request_times_out(make_bed: MakeBed) -> None:
    bed = make_bed(limits(headerTimeout="100ms"))
    bed.backend()
    client = bed.client()
    client.send(chat() + HEALTH + b"GET /hea")
    assert [client.read_response().status for _ in range(3)] == [200, 200, 408]
    assert client.is_closed()


def test_an_idle_connection_is_closed_without_an_answer(make_bed: MakeBed) -> None:
    bed = make_bed(limits(idleTimeout="100ms"))
    bed.backend()
    client = bed.client()
    assert client.fetch(chat()).status == 200
    assert client.is_closed()
    assert bed.gateway.metrics.unread == {}


def test_a_client_waiting_for_its_response_is_not_idle(make_bed: MakeBed) -> None:
    """However short the other timeouts are."""
    bed = make_bed({"limits": QUICK})
    gate = Gate()
    bed.backend(gate)
    client = bed.client()
    client.send(chat())
    wait_for(bed.running)
    waited = threading.Event()
    waited.wait(0.4)  # longer than every timeout; there is no event to wait for
    gate.open()
    assert client.read_response().status == 200


def test_a_client_with_occasional_requests_is_not_idle(make_bed: MakeBed) -> None:
    client = make_bed({"limits": {**QUICK, "idleTimeout": "5s"}}).client()
    for _ in range(4):
        assert client.fetch(HEALTH).status == 200
        threading.Event().wait(0.15)  # longer than the header timeout
    assert client.stays_open()


# Clients that do not read


class Flood:
    """Sends a stream of up to `most` bytes, and counts them."""

    def __init__(self, size: int = 50_000, most: int = 1 << 40) -> None:
        self.event = b"data: " + b"x" * size + b"\n\n"
        self.most = most
        self.sent = 0

    def __call__(self, connection: BackendConnection) -> None:
        connection.request()
        connection.send(STREAM)
        while self.sent < self.most:
            connection.send(chunk(self.event))
            self.sent += len(self.event)
        connection.send(chunk(b"data: [DONE]\n\n") + chunk(b""))

    def has_stopped(self) -> bool:
        before = self.sent
        threading.Event().wait(0.1)
        return self.sent == before


def test_a_client_that_does_not_read_pauses_the_instance(bed: Bed) -> None:
    """Backpressure limits the data in transit."""
    flood = Flood()
    bed.backend(flood)
    client = bed.client(narrow=True)
    client.send(chat(stream=True))
    wait_for(lambda: flood.sent)
    wait_for(flood.has_stopped)
    assert flood.sent < 64 * 1024 * 1024
    [connection] = bed.gateway.clients
    assert bed.thread.call(connection.transport.get_write_buffer_size) < 2 * 1024 * 1024
    assert connection.paused


def test_a_client_that_resumes_reading_gets_everything(bed: Bed) -> None:
    flood = Flood(most=60_000_000)
    bed.backend(flood)
    client = bed.client(narrow=True)
    client.send(chat(stream=True))
    wait_for(lambda: flood.sent)
    wait_for(flood.has_stopped)
    got = client.read_response()
    assert len(got.body) == flood.sent + len(b"data: [DONE]\n\n")
    assert got.body.count(flood.event) == flood.sent // len(flood.event)
    assert client.stays_open()


def test_an_upstream_connection_is_reusable_after_a_slow_client(bed: Bed) -> None:
    """The end of the stream arrives while reading from the instance is paused."""
    response = stream(b"data: " + b"x" * 150_000 + b"\n\n", b"data: [DONE]\n\n")
    backend = bed.backend(answers(response, answer(b"{}")), max_concurrency=1)
    slow = bed.client(narrow=True)
    slow.send(chat(stream=True))
    wait_for(lambda: bed.dispatcher().counters.outcomes["served"] == 1)
    assert bed.fetch(chat()).body == b"{}"
    assert len(backend.connections) == 1
    assert len(slow.read_response().body) > 150_000


def test_a_client_that_never_reads_is_disconnected(make_bed: MakeBed) -> None:
    bed = make_bed(limits(writeTimeout="200ms"))
    flood = Flood()
    backend = bed.backend(flood)
    client = bed.client(narrow=True)
    client.send(chat("x-request-id: it", stream=True))
    wait_for(lambda: bed.dispatcher().records.get("it") and bed.record("it").state == "abandoned")
    wait_for(backend.all_closed, "the connection to the instance must be closed")
    wait_for(lambda: not bed.gateway.clients)


def test_a_client_that_reads_slowly_is_not_disconnected(make_bed: MakeBed) -> None:
    """As long as it reads at all."""
    bed = make_bed(limits(writeTimeout="500ms"))
    flood = Flood()
    bed.backend(flood)
    client = bed.client(narrow=True)
    client.send(chat(stream=True))
    wait_for(lambda: flood.sent)
    wait_for(flood.has_stopped)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert client.socket.recv(10_000)
        threading.Event().wait(0.005)
    assert len(bed.gateway.clients) == 1


def test_unread_responses_to_pipelined_requests_are_bounded(make_bed: MakeBed) -> None:
    """The buffer is bounded, and the write timeout applies."""
    bed = make_bed(limits(writeTimeout="300ms"))
    body = b'{"x": "' + b"y" * 100_000 + b'"}'
    backend = bed.backend(answers(answer(body)))
    client = bed.client(narrow=True)
    request = chat()
    client.socket.settimeout(0.5)
    largest = 0
    try:
        for _ in range(2000):
            client.send(request)
            for connection in list(bed.gateway.clients):
                largest = max(largest, connection.transport.get_write_buffer_size())
    except (ConnectionError, TimeoutError):
        pass
    wait_for(lambda: not bed.gateway.clients, "it must be disconnected")
    assert largest < 1_000_000
    assert len(backend.received) < 200


def test_pages_for_a_client_that_does_not_read_are_not_buffered(make_bed: MakeBed) -> None:
    bed = make_bed(limits(writeTimeout="300ms"))
    client = bed.client(narrow=True)
    client.socket.settimeout(0.5)
    requests = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n" * 500
    largest = 0
    try:
        for _ in range(400):
            client.send(requests)
            for connection in list(bed.gateway.clients):
                largest = max(largest, connection.transport.get_write_buffer_size())
    except (ConnectionError, TimeoutError):
        pass
    wait_for(lambda: not bed.gateway.clients, "it must be disconnected")
    assert largest < 1_000_000


def test_the_idle_timeout_applies_after_a_slowly_read_response(make_bed: MakeBed) -> None:
    bed = make_bed(limits(idleTimeout="100ms"))
    bed.backend(answers(answer(b'{"x": "' + b"y" * 3_000_000 + b'"}')))
    client = bed.client(narrow=True)
    client.send(chat())
    wait_for(lambda: any(connection.paused for connection in bed.gateway.clients))
    assert client.read_response().status == 200
    assert client.is_closed()


def test_pipelined_requests_continue_after_a_slowly_read_response(bed: Bed) -> None:
    bed.backend(answers(answer(b'{"x": "' + b"y" * 3_000_000 + b'"}')))
    client = bed.client(narrow=True)
    client.send(chat() + HEALTH)
    wait_for(lambda: any(connection.paused for connection in bed.gateway.clients))
    client.send(HEALTH + b"NONSENSE\r\n\r\n")
    assert [client.read_response().status for _ in range(4)] == [200, 200, 200, 400]
    assert client.is_closed()


def test_the_last_answer_times_out_if_it_is_never_read(make_bed: MakeBed) -> None:
    bed = make_bed(limits(writeTimeout="200ms"))
    bed.backend(answers(answer(b'{"x": "' + b"y" * 3_000_000 + b'"}')))
    client = bed.client(narrow=True)
    client.send(chat("connection: close"))
    wait_for(lambda: bed.gateway.clients)
    wait_for(lambda: not bed.gateway.clients, "it must be disconnected")


def test_the_last_answer_times_out_if_it_is_read_almost_to_its_end() -> None:
    """The last bytes fit below the low-water mark, so that writing is no longer paused."""
    memory = Memory()
    client, _ = memory.client()
    client.data_received(b"GET /health HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n")
    client.pause_writing()
    client.resume_writing()
    assert client.deadline < time.monotonic() + 61
    memory.disconnect_all()


def test_a_client_that_goes_on_sending_a_refused_request_is_disconnected(
    make_bed: MakeBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LINGER_S", 0.2)
    bed = make_bed(limits(maxBodyBytes=1000))
    client = bed.client()
    client.send(b"POST %b HTTP/1.1\r\nhost: gateway\r\ncontent-length: 99999999999\r\n\r\n" % CHAT)
    with pytest.raises(ConnectionError):  # noqa: PT012
        while True:
            client.send(b" " * 100_000)
    assert not bed.gateway.clients


# Shutdown


def test_draining_completes_streams_and_accepts_no_requests(bed: Bed) -> None:
    gate = Gate(then=stream(event(1), b"data: [DONE]\n\n").partition(b"\r\n\r\n")[2], first=STREAM + chunk(event(0)))
    bed.backend(gate)
    idle, busy, reading = bed.client(), bed.client(), bed.client()
    assert idle.fetch(HEALTH).status == 200
    busy.send(chat(stream=True))
    busy.until(b"t0")
    reading.send(HEALTH[:10])
    wait_for(lambda: sum(connection.parser.in_head for connection in bed.gateway.clients) == 1)
    draining = asyncio.run_coroutine_threadsafe(bed.gateway.drain(TIMEOUT_S), bed.thread.loop)
    assert idle.is_closed()
    assert not draining.done()
    reading.send(HEALTH[10:])
    last = reading.read_response()
    assert (last.status, last.header("connection")) == (200, "close")
    assert reading.is_closed()
    late = bed.client()
    assert late.fetch(b"GET /ready HTTP/1.1\r\nhost: gateway\r\n\r\n").status == 503
    assert late.is_closed()
    gate.open()
    assert b"data: [DONE]" in busy.rest()
    assert draining.result(TIMEOUT_S) == 0


def test_requests_cut_off_at_shutdown_are_answered(bed: Bed) -> None:
    """One request streams, one is being processed, one waits."""
    backend = bed.backend(hangs(STREAM + chunk(event(0))), hangs(), max_concurrency=2)
    streaming, working, waiting = (bed.client() for _ in range(3))
    streaming.send(chat(stream=True))
    streaming.until(b"t0")
    working.send(chat())
    wait_for(lambda: bed.running() == 2)
    waiting.send(chat())
    wait_for(lambda: bed.waiting() == 1)
    assert bed.thread.run(bed.gateway.drain(0.05)) == 3
    bed.thread.call(lambda: bed.gateway.upstream.cut_off("shutting down"))
    assert b"stream_interrupted" in streaming.rest()
    for client in (working, waiting):
        got = client.read_response()
        assert (got.status, got.error["message"], got.header("connection")) == (503, "shutting down", "close")
        assert client.is_closed()
    wait_for(backend.all_closed)


def test_draining_ends_after_its_timeout(bed: Bed) -> None:
    gate = Gate()
    bed.backend(gate)
    client = bed.client()
    client.send(chat())
    wait_for(bed.running)
    assert bed.thread.run(bed.gateway.drain(0.05)) == 1
    gate.open()
    assert client.read_response().status == 200

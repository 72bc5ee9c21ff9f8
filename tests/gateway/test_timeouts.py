"""Timeouts of clients, clients that do not read, and shutdown."""

import asyncio
import threading
import time

import pytest

from pointsman.http import server as server_module
from tests.gateway.backends import STREAM, Gate, Line, answer, answers, chunk, event, hangs, stream
from tests.gateway.bed import Bed, Lay
from tests.gateway.memory import Memory
from tests.gateway.wire import CHAT, HEALTH, PATIENCE_S, Client, chat, wait_for

QUICK = {
    "headerTimeout": "100ms",
    "bodyTimeout": "100ms",
    "idleTimeout": "100ms",
    "writeTimeout": "300ms",
}
HEAD = b"POST %b HTTP/1.1\r\nhost: gateway\r\ncontent-length: 50\r\n\r\n" % CHAT


def limits(**changed: object) -> dict[str, object]:
    """Long timeouts, except for those given."""
    return {"limits": changed}


def test_a_client_that_sends_nothing_is_disconnected(lay: Lay) -> None:
    client = lay(limits(headerTimeout="100ms")).client()
    assert client.is_closed()


@pytest.mark.parametrize("said", [b"G", b"GET /health", b"GET /health HTTP/1.1\r\nhost: gateway\r\nx: "])
def test_slow_headers(lay: Lay, said: bytes) -> None:
    bed = lay(limits(headerTimeout="100ms"))
    client = bed.client()
    client.send(said)
    got = client.answer()
    assert (got.status, got.header("connection")) == (408, "close")
    assert "too long" in got.error["message"]
    assert client.is_closed()
    assert bed.gateway.metrics.unread == {408: 1}


def test_the_header_timeout_covers_the_whole_head(lay: Lay) -> None:
    """Each byte is in time; all of them together are not."""
    client = lay(limits(headerTimeout="200ms")).client()
    client.send(b"GET /health HTTP/1.1\r\nhost: gateway\r\n")
    assert trickle(client, b"x") == 408


def test_empty_lines_do_not_extend_the_header_timeout(lay: Lay) -> None:
    client = lay(limits(headerTimeout="200ms")).client()
    assert trickle(client, b"\r\n") is None


def trickle(client: Client, byte: bytes) -> int | None:
    """Send a byte now and then until the gateway times out. The status of its answer; None if it just closed."""
    client.socket.settimeout(0.02)
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            client.send(byte)
            if not client.more():
                return None
        except TimeoutError:
            continue
        except ConnectionError:
            pass
        client.socket.settimeout(PATIENCE_S)
        return client.answer().status if client._read else None
    raise AssertionError("it was patient for ever")


def test_a_slow_body(lay: Lay) -> None:
    bed = lay(limits(bodyTimeout="100ms"))
    backend = bed.backend()
    client = bed.client()
    client.send(HEAD + b"{")
    assert client.answer().status == 408
    assert client.is_closed()
    assert backend.received == []


def test_a_body_that_trickles_in_times_out(lay: Lay) -> None:
    client = lay(limits(bodyTimeout="200ms")).client()
    client.send(b"POST %b HTTP/1.1\r\nhost: gateway\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT)
    assert trickle(client, b"1\r\n \r\n") == 408


def test_a_slow_pipelined_request_times_out(lay: Lay) -> None:
    bed = lay(limits(headerTimeout="100ms"))
    bed.backend()
    client = bed.client()
    client.send(chat() + HEALTH + b"GET /hea")
    assert [client.answer().status for _ in range(3)] == [200, 200, 408]
    assert client.is_closed()


def test_an_idle_connection_is_closed_without_an_answer(lay: Lay) -> None:
    bed = lay(limits(idleTimeout="100ms"))
    bed.backend()
    client = bed.client()
    assert client.ask(chat()).status == 200
    assert client.is_closed()
    assert bed.gateway.metrics.unread == {}


def test_a_client_waiting_for_its_response_is_not_idle(lay: Lay) -> None:
    """However short the other timeouts are."""
    bed = lay({"limits": QUICK})
    gate = Gate()
    bed.backend(gate)
    client = bed.client()
    client.send(chat())
    wait_for(bed.running)
    waited = threading.Event()
    waited.wait(0.4)  # longer than every timeout; there is no event to wait for
    gate.open()
    assert client.answer().status == 200


def test_a_client_with_occasional_requests_is_not_idle(lay: Lay) -> None:
    client = lay({"limits": {**QUICK, "idleTimeout": "5s"}}).client()
    for _ in range(4):
        assert client.ask(HEALTH).status == 200
        threading.Event().wait(0.15)  # longer than the timeout of a head
    assert client.stays_open()


# Clients that do not read


class Flood:
    """Sends an endless stream, and counts the bytes."""

    def __init__(self, size: int = 50_000, most: int = 1 << 40) -> None:
        self.event = b"data: " + b"x" * size + b"\n\n"
        self.most = most
        self.sent = 0

    def __call__(self, line: Line) -> None:
        line.request()
        line.send(STREAM)
        while self.sent < self.most:
            line.send(chunk(self.event))
            self.sent += len(self.event)
        line.send(chunk(b"data: [DONE]\n\n") + chunk(b""))

    def stands_still(self) -> bool:
        before = self.sent
        threading.Event().wait(0.1)
        return self.sent == before


def test_a_client_that_does_not_read_pauses_the_instance(bed: Bed) -> None:
    """Backpressure: buffered bytes are bounded, however much the instance sends."""
    flood = Flood()
    bed.backend(flood)
    client = bed.client(narrow=True)
    client.send(chat(stream=True))
    wait_for(lambda: flood.sent)
    wait_for(flood.stands_still)
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
    wait_for(flood.stands_still)
    got = client.answer()
    assert len(got.body) == flood.sent + len(b"data: [DONE]\n\n")
    assert got.body.count(flood.event) == flood.sent // len(flood.event)
    assert client.stays_open()


def test_an_upstream_connection_is_reusable_after_a_slow_client(bed: Bed) -> None:
    """The stream ends in the bytes that fill the buffers, after reading was paused."""
    said = stream(b"data: " + b"x" * 150_000 + b"\n\n", b"data: [DONE]\n\n")
    backend = bed.backend(answers(said, answer(b"{}")), max_concurrency=1)
    slow = bed.client(narrow=True)
    slow.send(chat(stream=True))
    wait_for(lambda: bed.dispatcher().counters.outcomes["served"] == 1)
    assert bed.ask(chat()).body == b"{}"
    assert len(backend.lines) == 1
    assert len(slow.answer().body) > 150_000


def test_a_client_that_never_reads_is_disconnected(lay: Lay) -> None:
    bed = lay(limits(writeTimeout="200ms"))
    flood = Flood()
    backend = bed.backend(flood)
    client = bed.client(narrow=True)
    client.send(chat("x-request-id: it", stream=True))
    wait_for(lambda: bed.dispatcher().records.get("it") and bed.record("it").state == "refused")
    wait_for(backend.all_over, "the instance must hear of it")
    wait_for(lambda: not bed.gateway.clients)


def test_a_client_that_reads_slowly_is_not_disconnected(lay: Lay) -> None:
    """As long as it reads, however slowly."""
    bed = lay(limits(writeTimeout="500ms"))
    flood = Flood()
    bed.backend(flood)
    client = bed.client(narrow=True)
    client.send(chat(stream=True))
    wait_for(lambda: flood.sent)
    wait_for(flood.stands_still)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert client.socket.recv(10_000)
        threading.Event().wait(0.005)
    assert len(bed.gateway.clients) == 1


def test_unread_responses_to_pipelined_requests_are_bounded(lay: Lay) -> None:
    """Unread answers are not buffered without limit, and the client times out."""
    bed = lay(limits(writeTimeout="300ms", maxPipelined=4))
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
    wait_for(lambda: not bed.gateway.clients, "it must be cut off")
    assert largest < 1_000_000
    assert len(backend.received) < 200


def test_pages_for_a_client_that_does_not_read_are_not_buffered(lay: Lay) -> None:
    bed = lay(limits(writeTimeout="300ms", maxPipelined=4))
    client = bed.client(narrow=True)
    client.socket.settimeout(0.5)
    asked = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n" * 500
    largest = 0
    try:
        for _ in range(400):
            client.send(asked)
            for connection in list(bed.gateway.clients):
                largest = max(largest, connection.transport.get_write_buffer_size())
    except (ConnectionError, TimeoutError):
        pass
    wait_for(lambda: not bed.gateway.clients, "it must be cut off")
    assert largest < 1_000_000


def test_the_idle_timeout_applies_after_a_slowly_read_response(lay: Lay) -> None:
    bed = lay(limits(idleTimeout="100ms"))
    bed.backend(answers(answer(b'{"x": "' + b"y" * 3_000_000 + b'"}')))
    client = bed.client(narrow=True)
    client.send(chat())
    wait_for(lambda: any(connection.paused for connection in bed.gateway.clients))
    assert client.answer().status == 200
    assert client.is_closed()


def test_pipelined_requests_continue_after_a_slowly_read_response(bed: Bed) -> None:
    bed.backend(answers(answer(b'{"x": "' + b"y" * 3_000_000 + b'"}')))
    client = bed.client(narrow=True)
    client.send(chat() + HEALTH)
    wait_for(lambda: any(connection.paused for connection in bed.gateway.clients))
    client.send(HEALTH + b"NONSENSE\r\n\r\n")
    assert [client.answer().status for _ in range(4)] == [200, 200, 200, 400]
    assert client.is_closed()


def test_the_last_answer_times_out_if_it_is_never_read(lay: Lay) -> None:
    bed = lay(limits(writeTimeout="200ms"))
    bed.backend(answers(answer(b'{"x": "' + b"y" * 3_000_000 + b'"}')))
    client = bed.client(narrow=True)
    client.send(chat("connection: close"))
    wait_for(lambda: bed.gateway.clients)
    wait_for(lambda: not bed.gateway.clients, "it must be given up")


def test_the_last_answer_times_out_if_it_is_read_almost_to_its_end() -> None:
    """The last bytes are below the mark at which writing is paused."""
    memory = Memory()
    client, _ = memory.client()
    client.data_received(b"GET /health HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n")
    client.pause_writing()
    client.resume_writing()
    assert client.deadline < time.monotonic() + 61
    memory.forget()


def test_a_client_that_goes_on_sending_a_refused_request_is_disconnected(
    lay: Lay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LINGER_S", 0.2)
    bed = lay(limits(maxBodyBytes=1000))
    client = bed.client()
    client.send(b"POST %b HTTP/1.1\r\nhost: gateway\r\ncontent-length: 99999999999\r\n\r\n" % CHAT)
    with pytest.raises(ConnectionError):  # noqa: PT012
        while True:
            client.send(b" " * 100_000)
    assert not bed.gateway.clients


# The end


def test_draining_completes_streams_and_accepts_no_requests(bed: Bed) -> None:
    gate = Gate(then=stream(event(1), b"data: [DONE]\n\n").partition(b"\r\n\r\n")[2], first=STREAM + chunk(event(0)))
    bed.backend(gate)
    idle, busy, reading = bed.client(), bed.client(), bed.client()
    assert idle.ask(HEALTH).status == 200
    busy.send(chat(stream=True))
    busy.until(b"t0")
    reading.send(HEALTH[:10])
    wait_for(lambda: sum(connection.parser.in_head for connection in bed.gateway.clients) == 1)
    draining = asyncio.run_coroutine_threadsafe(bed.gateway.drain(PATIENCE_S), bed.thread.loop)
    assert idle.is_closed()
    assert not draining.done()
    reading.send(HEALTH[10:])
    last = reading.answer()
    assert (last.status, last.header("connection")) == (200, "close")
    assert reading.is_closed()
    late = bed.client()
    assert late.ask(b"GET /ready HTTP/1.1\r\nhost: gateway\r\n\r\n").status == 503
    assert late.is_closed()
    gate.open()
    assert b"data: [DONE]" in busy.rest()
    assert draining.result(PATIENCE_S) == 0


def test_requests_cut_off_at_shutdown_are_answered(bed: Bed) -> None:
    """One request streams, one runs, one waits."""
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
        got = client.answer()
        assert (got.status, got.error["message"], got.header("connection")) == (503, "shutting down", "close")
        assert client.is_closed()
    wait_for(backend.all_over)


def test_draining_ends_after_its_timeout(bed: Bed) -> None:
    gate = Gate()
    bed.backend(gate)
    client = bed.client()
    client.send(chat())
    wait_for(bed.running)
    assert bed.thread.run(bed.gateway.drain(0.05)) == 1
    gate.open()
    assert client.answer().status == 200

"""Streams are forwarded byte for byte and event by event, and never cut off silently."""

import json
import threading
from hashlib import sha256
from typing import Any, NamedTuple

import pytest

from pointsman.http.responses import TURN_BYTES, TURN_CHUNKED_BYTES
from pointsman.reasons import Reason
from tests.gateway.backends import (
    DONE,
    LAST_CHUNK,
    STREAM,
    BackendConnection,
    Script,
    answers,
    chunk,
    drips,
    event,
    hangs,
    resets,
    sends,
    stream,
)
from tests.gateway.bed import CHAT_DEPLOYMENT, Bed, MakeBed
from tests.gateway.memory import Memory, statuses
from tests.gateway.wire import Client, Message, chat, post, wait_for

EVENTS = [event(n) for n in range(8)]
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":8,"total_tokens":15}}\n\n'
ASKED: Any = {"stream_options": {"include_usage": True}}
"""Then the usage is passed on."""
WHOLE = b"".join(EVENTS) + USAGE + DONE


def in_chunks(payload: bytes, size: int) -> bytes:
    return STREAM + b"".join(chunk(payload[n : n + size]) for n in range(0, len(payload), size)) + LAST_CHUNK


PLAIN = STREAM.replace(b"transfer-encoding: chunked\r\n", b"")

GOOD: dict[str, Script] = {
    "an event in each chunk": answers(stream(*EVENTS, USAGE, DONE)),
    "all events in one chunk": answers(stream(WHOLE)),
    "events split over chunks": answers(in_chunks(WHOLE, 10)),
    "a byte in each chunk": answers(in_chunks(WHOLE, 1)),
    "events and a half in each chunk": answers(in_chunks(WHOLE, 90)),
    "with a length": answers(PLAIN[:-2] + b"content-length: %d\r\n\r\n" % len(WHOLE) + WHOLE),
    "until it closes": sends(PLAIN + WHOLE),
    "over HTTP/1.0": sends(PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0") + WHOLE),
    "Content-Type in capitals": answers(stream(WHOLE).replace(b"text/event-stream", b"Text/Event-Stream")),
}


@pytest.mark.parametrize("piece", [0, 1, 7], ids=lambda size: f"in pieces of {size}" if size else "at once")
@pytest.mark.parametrize("name", GOOD)
def test_every_byte_is_forwarded(bed: Bed, name: str, piece: int) -> None:
    def script(connection: BackendConnection) -> None:
        connection.piece = piece
        GOOD[name](connection)

    bed.backend(script)
    client = bed.client()
    for _ in range(2):
        got = client.fetch(chat("x-request-id: it", stream=True, **ASKED))
        assert got.status == 200
        assert got.header("transfer-encoding") == "chunked"
        assert (got.header("content-type") or "").lower().startswith("text/event-stream")
        assert got.header("x-pointsman-instance") == "chat-0"
        assert sha256(got.body).digest() == sha256(WHOLE).digest()
        wait_for(lambda: bed.record("it").output_tokens == 8)
    assert client.stays_open()


ODD = {
    "CR LF": b"".join(EVENTS).replace(b"\n", b"\r\n") + USAGE.replace(b"\n", b"\r\n") + DONE.replace(b"\n", b"\r\n"),
    "CR LF at the end only": b"".join(EVENTS) + DONE.replace(b"\n", b"\r\n"),
    "comments": b": hello\n\n" + b"\n\n: ping\n\n".join(EVENTS) + b": bye\n\n" + DONE,
    "comments in CR LF": b": hello\r\n\r\n" + DONE,
    "named events": b"event: message\nid: 1\nretry: 5\ndata: {}\n\n" + DONE,
    "several lines of data": b"data: a\ndata: b\n\n" + DONE,
    "no space": b"data:{}\n\ndata:[DONE]\n\n",
    "no end of the last event": b"".join(EVENTS) + DONE[:-1],
    "no end of line at all": b"".join(EVENTS) + DONE[:-2],
    "only the end mark": DONE,
    "empty lines before": b"\n\n" + WHOLE,
    "letters beyond ASCII": 'data: {"x": "é日本🙂"}\n\n'.encode() + DONE,
    "a long event": b"data: " + b"x" * 3_000_000 + b"\n\n" + DONE,
    "very many events": event(1) * 20_000 + DONE,
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("size", [3, 1000, 10_000_000], ids=lambda size: f"chunks of {size}")
def test_streams_of_every_kind_are_forwarded(bed: Bed, name: str, size: int) -> None:
    payload = ODD[name]
    if size == 3 and len(payload) > 100_000:
        size = 50_000
    bed.backend(answers(in_chunks(payload, size)))
    got = bed.fetch(chat(stream=True, **ASKED))
    assert got.status == 200
    assert sha256(got.body).digest() == sha256(payload).digest()


def test_http_1_0_gets_a_stream_without_chunks(bed: Bed) -> None:
    bed.backend(answers(stream(*EVENTS, DONE)))
    for lines in ((), ("connection: keep-alive",)):
        client = bed.client()
        got = client.fetch(chat(*lines, stream=True, **ASKED, version=b"1.0"))
        assert (got.status, got.header("transfer-encoding"), got.header("connection")) == (200, None, "close")
        assert got.body == b"".join(EVENTS) + DONE
        assert client.is_closed()


def test_an_event_is_forwarded_as_soon_as_it_is_complete(bed: Bed) -> None:
    """The backend sends the next part only after the client has received the last."""
    seen = threading.Semaphore(0)

    def script(connection: BackendConnection) -> None:
        connection.request()
        connection.send(STREAM + chunk(EVENTS[0]))
        seen.acquire(timeout=20)
        connection.send(chunk(EVENTS[1][:10]))
        connection.send(chunk(EVENTS[1][10:] + EVENTS[2][:5]))
        seen.acquire(timeout=20)
        connection.send(chunk(EVENTS[2][5:]) + chunk(DONE) + LAST_CHUNK)

    bed.backend(script)
    client = bed.client()
    client.send(chat(stream=True, **ASKED))
    assert client.head().status == 200
    assert one_chunk(client) == EVENTS[0]
    seen.release()
    assert one_chunk(client) == EVENTS[1]
    seen.release()
    assert b"".join(client.chunked()) == EVENTS[2] + DONE


def one_chunk(client: Client) -> bytes:
    size = int(client.until(b"\r\n")[:-2], 16)
    payload = client.exactly(size)
    assert client.exactly(2) == b"\r\n"
    return payload


def error_of(got: Message) -> dict[str, Any]:
    """The error in the last event, in OpenAI's format. Everything before it must be as the instance sent it."""
    last = got.events()[-1]
    assert last.startswith(b"data: ")
    body: dict[str, Any] = json.loads(last[6:])
    assert body.keys() == {"error"}
    assert {"message", "type", "param", "code"} <= body["error"].keys()
    return dict(body["error"])


BEGIN = chunk(EVENTS[0]) + chunk(EVENTS[1])


class Cut(NamedTuple):
    """A way to interrupt a stream."""

    name: str
    first: bytes
    then: bytes = b""
    """Sent after the client has received the first part."""
    how: str = "close"


CUTS = [
    Cut("closed between events", STREAM + BEGIN),
    Cut("closed within an event", STREAM + BEGIN, chunk(EVENTS[2][:20])),
    Cut("closed within a chunk", STREAM + BEGIN, chunk(EVENTS[2])[:20]),
    Cut("reset between events", STREAM + BEGIN, how="reset"),
    Cut("reset within an event", STREAM + BEGIN, chunk(EVENTS[2][:20]), "reset"),
    Cut("ended without the end mark", STREAM + BEGIN, LAST_CHUNK, "keep"),
    Cut("ended within an event", STREAM + BEGIN, chunk(EVENTS[2][:20]) + LAST_CHUNK, "keep"),
    Cut("garbage instead of a chunk", STREAM + BEGIN, b"\x00\xff garbage\r\n\r\n", "keep"),
    Cut("a chunk that is too long", STREAM + BEGIN, b"5\r\nmore than that\r\n", "keep"),
    Cut("more after the end", STREAM + BEGIN, LAST_CHUNK + b"!", "keep"),
    Cut("closed, if it should end so", PLAIN + EVENTS[0] + EVENTS[1]),
    Cut("fewer bytes than the length", PLAIN[:-2] + b"content-length: 1000\r\n\r\n" + EVENTS[0] + EVENTS[1]),
    Cut("it hangs", STREAM + BEGIN, how="keep"),
    Cut("it hangs within an event", STREAM + BEGIN, chunk(EVENTS[2][:20]), "keep"),
]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"], ids=["HTTP/1.1", "HTTP/1.0"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_an_interrupted_stream_ends_with_an_error_event(make_bed: MakeBed, cut: Cut, version: bytes) -> None:
    bed = make_bed({"upstream": {"stallTimeout": "100ms"}})

    def script(connection: BackendConnection) -> None:
        connection.request()
        connection.send(cut.first)
        wait_for(lambda: bed.record("it").first_token_at)
        connection.send(cut.then)
        if cut.how == "reset":
            connection.reset()
        elif cut.how == "keep":
            connection.wait_for_close()

    first = bed.backend(script)
    other = bed.backend(max_concurrency=1, current_load=1)
    client = bed.client()
    got = client.fetch(chat("x-request-id: it", stream=True, **ASKED, version=version))
    assert got.status == 200
    assert got.body.startswith(EVENTS[0] + EVENTS[1])
    assert len(got.events()) == 3
    error = error_of(got)
    assert (error["type"], error["code"]) == ("server_error", "stream_interrupted")
    assert "chat-0" in error["message"]
    if version == b"1.1":
        assert client.stays_open()
    else:
        assert client.is_closed()
    assert len(first.received) == 1
    assert other.received == [], "what has begun is never sent again"
    record = bed.record("it")
    assert (record.state, record.status, len(record.failures)) == ("failed", 200, 1)
    assert bed.gateway.metrics.of("chat").broken_off == 1


def test_an_error_event_stands_alone_after_part_of_a_long_event(bed: Bed) -> None:
    """A long event is forwarded in parts."""

    def script(connection: BackendConnection) -> None:
        connection.request()
        connection.send(STREAM + chunk(b"data: " + b"x" * 2_000_000))
        wait_for(lambda: bed.record("it").first_token_at)

    bed.backend(script)
    got = bed.fetch(chat("x-request-id: it", stream=True, **ASKED))
    assert error_of(got)["code"] == "stream_interrupted"


def test_http_1_0_keep_alive_is_closed_after_a_stream(bed: Bed) -> None:
    bed.backend(GOOD["with a length"])
    client = bed.client()
    got = client.fetch(chat("connection: keep-alive", stream=True, **ASKED, version=b"1.0"))
    assert (got.body, got.header("connection")) == (WHOLE, "close")


def test_done_must_be_an_event_of_its_own(bed: Bed) -> None:
    bed.backend(answers(stream(EVENTS[0], b'data: {"choices":[{"delta":{"content":"say data: [DONE]"}}]}\n\n')))
    got = bed.fetch(chat(stream=True, **ASKED))
    assert error_of(got)["code"] == "stream_interrupted"


def test_a_stream_that_is_cut_after_its_end_mark_is_complete(make_bed: MakeBed) -> None:
    """Nothing is missing after [DONE]."""
    bed = make_bed({"upstream": {"stallTimeout": "100ms"}})
    sent = STREAM + chunk(b"".join(EVENTS) + DONE)
    bed.backend(sends(sent), hangs(sent), resets(sent))
    client = bed.client()
    for _ in range(3):
        got = client.fetch(chat("x-request-id: it", stream=True, **ASKED))
        assert got.body == b"".join(EVENTS) + DONE
        assert bed.record("it").state == "served"
    assert client.stays_open()


def test_streams_of_the_responses_api_need_no_done(bed: Bed) -> None:
    sent = b'event: response.completed\ndata: {"response": {"usage": {"input_tokens": 3, "output_tokens": 4}}}\n\n'
    bed.backend(answers(stream(b"event: response.created\ndata: {}\n\n", sent)))
    got = bed.fetch(post({"model": "m", "input": "x", "stream": True}, b"/v1/responses", ["x-request-id: it"]))
    assert got.events()[-1] == sent[:-2]
    assert bed.record("it").output_tokens == 4


def test_a_stream_that_ends_with_its_connection_needs_an_end_mark(bed: Bed) -> None:
    bed.backend(sends(PLAIN + b"event: response.created\ndata: {}\n\n"))
    got = bed.fetch(post({"model": "m", "input": "x", "stream": True}, b"/v1/responses"))
    assert error_of(got)["code"] == "stream_interrupted"


def test_an_error_event_of_the_engine_is_forwarded(bed: Bed) -> None:
    sent = [EVENTS[0], b'data: {"error": {"message": "out of memory"}}\n\n', DONE]
    bed.backend(answers(stream(*sent)))
    assert bed.fetch(chat(stream=True, **ASKED)).body == b"".join(sent)


def test_json_instead_of_a_stream_is_forwarded(bed: Bed) -> None:
    """An error response is not a stream, even if a stream was requested."""
    sent = b'{"error": {"message": "no such thing"}}'
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(sent)
    backend = bed.backend(answers(head + sent))
    got = bed.fetch(chat(stream=True, **ASKED))
    assert (got.status, got.body) == (400, sent)
    assert len(backend.received) == 1


def test_usage_is_in_the_record(bed: Bed) -> None:
    details = b'"prompt_tokens_details":{"cached_tokens":4}'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":8,%b}}\n\n' % details
    bed.backend(answers(stream(*EVENTS, usage, DONE)))
    bed.fetch(chat("x-request-id: it", stream=True, **ASKED))
    record = bed.record("it")
    assert (record.input_tokens, record.cached_tokens, record.output_tokens) == (7, 4, 8)
    assert record.first_token_at is not None
    assert bed.gateway.metrics.of("chat").tokens() == {"input": 7, "output": 8, "cached": 4}


@pytest.mark.parametrize(
    ("size", "most"), [(1, 3 * TURN_CHUNKED_BYTES), (0, 3 * TURN_BYTES)], ids=["in tiny chunks", "with a length"]
)
def test_much_of_an_answer_is_read_over_several_turns(size: int, most: int) -> None:
    """So that an engine does not keep the loop from others."""
    memory = Memory()
    client, transport = memory.client()
    client.data_received(chat(stream=True))
    memory.loop.turn()
    [(engine, wire)] = memory.pool.made
    payload = b"data: {}\n\n" * 40_000 + DONE
    framed = b"content-length: %d\r\n\r\n" % len(payload)
    whole = in_chunks(payload, size) if size else PLAIN[:-2] + framed + payload
    engine.data_received(whole)
    assert len(transport.written) < most
    assert not wire.reads
    memory.loop.turn()
    assert wire.reads
    written = bytes(transport.written)
    assert statuses(written) == [200]
    assert written.count(b"data: {}") == 40_000
    assert (engine.listener, engine in memory.pool._idle) == (None, True)
    memory.disconnect_all()


def test_a_listener_that_waits_gets_nothing_in_later_turns() -> None:
    memory = Memory()
    client, transport = memory.client()
    client.data_received(chat(stream=True))
    memory.loop.turn()
    [(engine, wire)] = memory.pool.made
    engine.data_received(in_chunks(b"data: {}\n\n" * 10_000 + DONE, 100))
    client.pause_writing()
    written = len(transport.written)
    memory.loop.turn()
    assert (len(transport.written), wire.reads) == (written, False)
    client.resume_writing()
    memory.loop.turn()
    assert wire.reads
    assert statuses(bytes(transport.written)) == [200]
    assert transport.written.count(b"data: {}") == 10_000
    memory.disconnect_all()


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_has_arrived_is_read_when_the_connection_ends(is_whole: bool) -> None:
    memory = Memory()
    client, transport = memory.client()
    client.data_received(chat(stream=True))
    memory.loop.turn()
    [(engine, wire)] = memory.pool.made
    whole = in_chunks(b"data: {}\n\n" * 10_000 + DONE, 100)
    engine.data_received(whole if is_whole else whole[:-5])
    wire.abort()
    memory.loop.turn()
    assert transport.written.count(b"data: {}") == 10_000
    assert (b"stream_interrupted" in transport.written) is False
    memory.disconnect_all()


def test_many_concurrent_streams(bed: Bed) -> None:
    """Each client gets its own stream."""

    def script(connection: BackendConnection) -> None:
        while (request := connection.request()) is not None:
            word = json.loads(request.body)["messages"][0]["content"].encode()
            connection.send(in_chunks((b'data: {"x":"%b"}\n\n' % word) * 50 + DONE, 64))

    bed.backend(script)
    bed.backend(script)
    clients = [bed.client() for _ in range(30)]
    for number, client in enumerate(clients):
        client.send(chat(stream=True, **ASKED, messages=[{"role": "user", "content": f"n{number}"}]))
    for number, client in enumerate(clients):
        assert client.read_response().body == (b'data: {"x":"n%d"}\n\n' % number) * 50 + DONE
    wait_for(lambda: bed.running() == 0)


# Drips: bytes that never become an event


DRIPS = {
    "single bytes of an event": chunk(b"d"),
    "single bytes without framing": b"d",
    "comments": chunk(b": ping\n\n"),
    "events without data": chunk(b"event: ping\n\n"),
    "events with empty data": chunk(b"data:\n\ndata: \r\n\r\n"),
}


@pytest.mark.parametrize("drip", DRIPS.values(), ids=DRIPS.keys())
def test_bytes_without_data_do_not_postpone_the_first_token(make_bed: MakeBed, drip: bytes) -> None:
    """Another instance takes over, as none of it has gone to the client."""
    bed = make_bed({"upstream": {"firstTokenTimeout": "200ms"}}, {**CHAT_DEPLOYMENT, "scheduling": {"policy": "fifo"}})
    head = PLAIN if drip == b"d" else STREAM
    dripping = bed.backend(drips(head, drip))
    bed.backend(answers(stream(EVENTS[0], DONE)), current_load=100)
    got = bed.fetch(chat("x-request-id: it", stream=True, **ASKED))
    assert (got.status, got.body) == (200, EVENTS[0] + DONE)
    assert bed.record("it").failures == (("chat-0", Reason("no-answer-in-time", {"limit_s": 0.2})),)
    wait_for(dripping.all_closed)


@pytest.mark.parametrize("drip", [one for one in DRIPS.values() if one != b"d"])
def test_bytes_without_data_do_not_postpone_a_stall(make_bed: MakeBed, drip: bytes) -> None:
    bed = make_bed({"upstream": {"stallTimeout": "200ms"}})
    dripping = bed.backend(drips(STREAM + chunk(EVENTS[0]), drip))
    got = bed.fetch(chat(stream=True, **ASKED))
    assert got.body.startswith(EVENTS[0])
    error = error_of(got)
    assert error["code"] == "stream_interrupted"
    assert "no event with data within 0.2 s" in error["message"]
    wait_for(dripping.all_closed)


def test_comments_are_passed_on_with_the_first_data_and_after_it(bed: Bed) -> None:
    parts = [b": one\n\n", EVENTS[0], b": two\n\n", EVENTS[1], DONE]
    bed.backend(answers(stream(*parts)))
    assert bed.fetch(chat("x-request-id: it", stream=True, **ASKED)).body == b"".join(parts)
    assert bed.record("it").state == "served"


def test_a_stream_of_comments_alone_is_bounded(make_bed: MakeBed) -> None:
    bed = make_bed({}, {**CHAT_DEPLOYMENT, "scheduling": {"policy": "fifo"}})
    bed.backend(drips(STREAM, chunk(b": " + b"x" * 300_000 + b"\n\n")))
    bed.backend(answers(stream(EVENTS[0], DONE)), current_load=100)
    assert bed.fetch(chat("x-request-id: it", stream=True, **ASKED)).status == 200
    assert bed.record("it").failures == (("chat-0", Reason("stream-without-data")),)


def test_a_long_body_needs_more_than_single_bytes(make_bed: MakeBed) -> None:
    """It is cut off when 64 KiB take longer than the timeout."""
    bed = make_bed({"upstream": {"stallTimeout": "200ms"}})
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9000000\r\n\r\n"
    dripping = bed.backend(drips(head, b" "))
    client = bed.client()
    client.send(chat())
    assert client.rest().startswith(b"HTTP/1.1 200")
    wait_for(dripping.all_closed)


def test_a_long_body_that_progresses_slowly_is_complete(make_bed: MakeBed) -> None:
    """The whole takes longer than the timeout; each 64 KiB does not."""
    bed = make_bed({"upstream": {"stallTimeout": "1s"}})
    part, count = b" " * 65_536, 80

    def script(connection: BackendConnection) -> None:
        connection.request()
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (count * len(part)))
        for _ in range(count):
            connection.send(part)
            threading.Event().wait(0.02)

    bed.backend(script)
    assert len(bed.fetch(chat()).body) == count * len(part)

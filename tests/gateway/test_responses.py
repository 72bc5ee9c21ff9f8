"""Responses of instances with any framing: clients get the same bytes, or the request is retried elsewhere."""

import json
from hashlib import sha256

import pytest

from pointsman.http.pool import BUFFERED_BYTES
from pointsman.reasons import Reason
from pointsman.types import ExecutionInstance
from tests.gateway.backends import (
    DONE,
    LAST_CHUNK,
    OK,
    STREAM,
    Backend,
    BackendConnection,
    Script,
    answer,
    answers,
    chunk,
    completion,
    event,
    hangs,
    resets,
    sends,
    stream,
)
from tests.gateway.bed import Bed, MakeBed
from tests.gateway.wire import Message, chat, post, wait_for

SAID = json.dumps(completion()).encode()
KIND = b"content-type: application/json\r\n"
CHUNKS = b"HTTP/1.1 200 OK\r\n" + KIND + b"transfer-encoding: chunked\r\n\r\n"
IN_CHUNKS = CHUNKS + b"".join(chunk(SAID[n : n + 50]) for n in range(0, len(SAID), 50)) + LAST_CHUNK

GOOD: dict[str, Script] = {
    "a length": answers(OK),
    "a length and close": sends(OK.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)),
    "a length, then closed": sends(OK),
    "chunks": answers(IN_CHUNKS),
    "chunks of one byte": answers(CHUNKS + b"".join(chunk(SAID[n : n + 1]) for n in range(len(SAID))) + LAST_CHUNK),
    "chunks with extensions": answers(CHUNKS + b"%X;a=b\r\n%b\r\n0;c\r\n\r\n" % (len(SAID), SAID)),
    "chunks with trailers": answers(IN_CHUNKS[:-2] + b"x-late: 1\r\nx-later: 2\r\n\r\n"),
    "chunks and close": sends(IN_CHUNKS.replace(b"\r\n", b"\r\nConnection: Close\r\n", 1)),
    "until it closes": sends(b"HTTP/1.1 200 OK\r\n" + KIND + b"\r\n" + SAID),
    "until it closes, over HTTP/1.0": sends(b"HTTP/1.0 200 OK\r\n" + KIND + b"\r\n" + SAID),
    "HTTP/1.0 with a length, kept alive": answers(
        OK.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"\r\n", b"\r\nconnection: keep-alive\r\n", 1)
    ),
    "HTTP/1.0 with a length": sends(OK.replace(b"HTTP/1.1", b"HTTP/1.0")),
    "100 before it": answers(b"HTTP/1.1 100 Continue\r\n\r\n" + OK),
    "many 1xx before it": answers(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * 5000 + OK),
    "no reason phrase": answers(OK.replace(b" Said", b" ")),
    "no reason phrase and no space": answers(OK.replace(b" Said", b"")),
    "two equal lengths": answers(OK.replace(b"\r\n", b"\r\ncontent-length: %d\r\n" % len(SAID), 1)),
    "names in capitals": answers(OK.replace(b"content-length", b"Content-Length")),
    "no space after the colon": answers(OK.replace(b"content-length: ", b"content-length:")),
}


@pytest.mark.parametrize("piece", [0, 1], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("name", GOOD)
def test_every_valid_framing_is_read(bed: Bed, name: str, piece: int) -> None:
    if piece and name.startswith("many"):
        pytest.skip("too many packets for a byte each")

    def script(connection: BackendConnection) -> None:
        connection.piece = piece
        GOOD[name](connection)

    backend = bed.backend(script)
    client = bed.client()
    for _ in range(3):
        got = client.fetch(chat())
        assert got.status == 200
        assert got.body == SAID
        assert got.header("content-length") == str(len(SAID))
        assert got.header("x-late") is got.header("link") is None
        assert bed.newest().failures == ()
    assert len(backend.received) == 3


def test_connections_are_reused(bed: Bed) -> None:
    backend = bed.backend()
    client = bed.client()
    for _ in range(20):
        assert client.fetch(chat()).status == 200
    assert len(backend.connections) == 1


def test_idle_connections_are_closed(make_bed: MakeBed) -> None:
    bed = make_bed({"upstream": {"idleTimeout": "50ms"}})
    backend = bed.backend()
    assert bed.fetch(chat()).status == 200
    wait_for(backend.all_closed)
    assert bed.fetch(chat()).status == 200
    assert len(backend.connections) == 2


def test_connections_to_a_removed_instance_are_closed(bed: Bed) -> None:
    backend = bed.backend()
    assert bed.fetch(chat()).status == 200
    bed.thread.call(lambda: bed.gateway.traffic.withdraw("chat", "chat-0", Reason("stopped")))
    wait_for(backend.all_closed)
    assert bed.gateway.upstream.pools == {}


def test_a_connection_with_unsolicited_bytes_is_not_used_again(bed: Bed) -> None:
    def talkative(connection: BackendConnection) -> None:
        connection.request()
        connection.send(OK)
        wait_for(lambda: bed.running() == 0)
        connection.send(OK)
        connection.wait_for_close()

    backend = bed.backend(talkative, answers(OK))
    assert bed.fetch(chat()).body == SAID
    wait_for(backend.all_closed)
    assert bed.fetch(chat("x-request-id: it")).body == SAID
    assert bed.record("it").failures == ()


def test_headers_of_an_instance_are_passed_on(bed: Bed) -> None:
    lines = [
        "Content-Type: application/json", "x-custom: 1", "X-Custom: 2", "set-cookie: a=b", "openai-model: m",
        "server: engine", "date: today", "x-request-id: its-own", "X-Pointsman-Instance: me",
        "keep-alive: timeout=5", "proxy-authenticate: x", "connection: x-hop, keep-alive", "x-hop: 1",
    ]  # fmt: skip
    bed.backend(answers(answer(SAID, headers=lines)))
    got = bed.fetch(chat("x-request-id: given"))
    assert [(name, value) for name, value in got.headers if name != b"content-length"] == [
        (b"content-type", b"application/json"),
        (b"x-custom", b"1"),
        (b"x-custom", b"2"),
        (b"set-cookie", b"a=b"),
        (b"openai-model", b"m"),
        (b"x-request-id", b"given"),
        (b"x-pointsman-instance", b"chat-0"),
    ]


@pytest.mark.parametrize("status", [200, 201, 400, 401, 404, 422, 429, 501])
def test_statuses_that_are_not_failures_of_the_instance_are_forwarded(bed: Bed, status: int) -> None:
    """Of an error, another instance is asked as well; it is the same one here."""
    first, second = bed.backend(answers(answer(SAID, status))), bed.backend(answers(answer(SAID, status)))
    got = bed.fetch(chat())
    assert (got.status, got.body) == (status, SAID)
    assert len(first.received) + len(second.received) == (2 if 400 <= status < 500 else 1)


@pytest.mark.parametrize("status", [204, 304])
def test_responses_without_a_body(bed: Bed, status: int) -> None:
    backend = bed.backend(answers(b"HTTP/1.1 %d Nothing\r\nx: y\r\n\r\n" % status))
    client = bed.client()
    for _ in range(2):
        got = client.fetch(chat())
        assert (got.status, got.header("x"), got.header("content-length")) == (status, "y", None)
    assert len(backend.connections) == 1


BAD: dict[str, Script] = {
    "garbage": sends(b"\x00\xff<<< this is not what you asked for >>>\r\n\r\n"),
    "garbage without end": hangs(b"\x00" * 1000),
    "a greeting": hangs(b"220 mail.example ESMTP\r\n"),
    "HTTP/2": sends(b"HTTP/2 200\r\ncontent-length: 0\r\n\r\n"),
    "another kind of HTTP": sends(OK.replace(b"HTTP/1.1", b"HTTP/1.9")),
    "a status of two digits": sends(OK.replace(b"200", b"20")),
    "a status that is not a number": sends(OK.replace(b"200", b"2OO")),
    "a status out of range": sends(OK.replace(b"200", b"999")),
    "a head without end": hangs(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000),
    "a line without end": hangs(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000),
    "a header without a colon": sends(OK.replace(b"\r\n", b"\r\nnothing\r\n", 1)),
    "a header without a name": sends(OK.replace(b"\r\n", b"\r\n: x\r\n", 1)),
    "a space before a colon": sends(OK.replace(b"content-length:", b"content-length :")),
    "a tab before a colon": sends(OK.replace(b"content-length:", b"content-length\t:")),
    "a folded header": sends(OK.replace(b"\r\n", b"\r\nx: a\r\n b\r\n", 1)),
    "a folded header with a colon": sends(OK.replace(b"\r\n", b"\r\nx: a\r\n\tb: c\r\n", 1)),
    "a NUL in a header": sends(OK.replace(b"\r\n", b"\r\nx: a\x00b\r\n", 1)),
    "a bare LF": sends(OK.replace(b"\r\n", b"\r\nx: a\ny: b\r\n", 1)),
    "a bare CR": sends(OK.replace(b"\r\n", b"\r\nx: a\ry: b\r\n", 1)),
    "lines ended by LF": sends(OK.replace(b"\r\n", b"\n")),
    "two lengths": sends(OK.replace(b"\r\n", b"\r\ncontent-length: 5\r\n", 1)),
    "a length and chunks": sends(IN_CHUNKS.replace(b"\r\n", b"\r\ncontent-length: 5\r\n", 1)),
    "a length with a sign": sends(OK.replace(b"content-length: ", b"content-length: +")),
    "a length with an underscore": sends(OK.replace(b"content-length: ", b"content-length: 0_")),
    "a length out of range": sends(OK.replace(b"content-length: ", b"content-length: 9999999999999999999")),
    "an empty length": sends(b"HTTP/1.1 200 OK\r\ncontent-length:\r\n\r\n"),
    "an unknown transfer coding": sends(IN_CHUNKS.replace(b"chunked", b"gzip, chunked")),
    "chunked twice": sends(IN_CHUNKS.replace(b"\r\n", b"\r\ntransfer-encoding: chunked\r\n", 1)),
    "more bytes than the length": sends(OK + b"!"),
    "fewer bytes than the length": sends(OK[:-5]),
    "fewer bytes than the length, then a reset": resets(OK[:-5]),
    "no last chunk": sends(IN_CHUNKS[:-5]),
    "half a last chunk": sends(IN_CHUNKS[:-2]),
    "trailers without end": sends(IN_CHUNKS[:-2] + b"x: y\r\n"),
    "data after the last chunk": sends(IN_CHUNKS + b"!"),
    "a chunk size that is not a number": hangs(CHUNKS + b"xyz\r\n" + SAID),
    "a chunk size with a sign": hangs(CHUNKS + b"-5\r\n" + SAID),
    "a chunk size with 0x": hangs(CHUNKS + b"0x5\r\n" + SAID),
    "a chunk size with an underscore": hangs(CHUNKS + b"1_0\r\n" + SAID),
    "a chunk size out of range": hangs(CHUNKS + b"f" * 20 + b"\r\n" + SAID),
    "no chunk size": hangs(CHUNKS + b"\r\n" + SAID),
    "an endless chunk size": hangs(CHUNKS + b"0" * 5000),
    "a chunk longer than its size": hangs(CHUNKS + b"5\r\n" + SAID),
    "a chunk size ended by LF": hangs(CHUNKS + b"5\n" + SAID),
    "no bytes": sends(),
    "a reset instead of a response": resets(),
    "a reset after the head": resets(IN_CHUNKS[:100]),
    "half a head": sends(OK[:30]),
    "only 100": sends(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "another protocol": sends(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n" + OK),
    "not JSON": sends(answer(b"hello")),
    "not JSON in chunks": sends(CHUNKS + chunk(b"\x00\xffhello") + LAST_CHUNK),
    "truncated JSON": sends(answer(SAID[:-10])),
    "an empty response": sends(answer(b"")),
    "500": answers(answer(SAID, 500)),
    "502": answers(answer(b"", 502)),
    "503": answers(answer({"error": "loading"}, 503)),
    "504": answers(answer(SAID, 504)),
    "500 in chunks": answers(IN_CHUNKS.replace(b"200", b"500")),
    "500 until it closes": sends(b"HTTP/1.1 500 Oh\r\n\r\noops"),
    "500 as a stream": answers(stream(event(), DONE).replace(b"200", b"500")),
    "a stream without events": answers(stream(b"<html>oops</html>\n\n")),
    "an empty stream": answers(stream()),
    "a stream that ends before its first event": answers(stream(b"data: {")),
    "a stream that is closed before its first event": sends(STREAM + chunk(b"data: {")),
    "a stream that is reset before its first event": resets(STREAM + chunk(b"data: {")),
}


WELL_FRAMED = {"500", "502", "503", "504", "500 in chunks", "500 as a stream", "a stream without events"} | {
    "an empty stream", "a stream that ends before its first event"
}  # fmt: skip
"""The connection is intact and may be reused."""


@pytest.mark.parametrize("name", BAD)
def test_an_instance_that_fails_is_replaced_by_another(bed: Bed, name: str) -> None:
    """Nothing of a bad response reaches the client; the record has the failed try."""
    bad = bed.backend(BAD[name])
    good = bed.backend(max_concurrency=1, current_load=1)  # full, so the first try goes to the other
    client = bed.client()
    client.send(chat("x-request-id: it", stream="stream" in name))
    wait_for(lambda: bed.dispatcher().records.get("it") and bed.record("it").failures)
    assert bed.record("it").failures[0][0] == "chat-0"
    assert bed.record("it").failures[0][1].code
    bed.thread.call(lambda: bed.gateway.traffic.update("chat", instance_at(good)))
    got = client.read_response()
    assert (got.status, got.body, got.header("x-pointsman-instance")) == (200, SAID, "chat-1")
    assert len(bad.received) == len(good.received) == 1
    assert good.received[0].body == bad.received[0].body
    assert [instance for instance, _ in bed.record("it").failures] == ["chat-0"]
    assert bed.record("it").state == "served"
    if name not in WELL_FRAMED:
        wait_for(bad.all_closed, "the connection with the bad response should be closed")


def instance_at(backend: Backend) -> ExecutionInstance:
    return ExecutionInstance(instance_id="chat-1", host="127.0.0.1", port=backend.port, model_name="m")


def test_a_refused_connection_is_retried_elsewhere(bed: Bed) -> None:
    gone = bed.backend()
    gone.stop_listening()
    good = bed.backend()
    for _ in range(6):
        assert bed.fetch(chat()).header("x-pointsman-instance") == "chat-1"
    assert len(good.received) == 6
    assert "no connection" in str(next(r for r in bed.dispatcher().records.newest() if r.failures).failures[0][1])


def test_a_connection_closed_while_idle_is_replaced_silently(bed: Bed) -> None:
    """Engines close idle connections; the request is sent again on a new one."""
    backend = bed.backend(sends(OK))
    failing: list[str] = []
    bed.gateway.traffic.hooks.failing = lambda instance, why: failing.append(instance)
    client = bed.client()
    for number in range(10):
        assert client.fetch(chat(f"x-request-id: n{number}")).status == 200
        assert bed.record(f"n{number}").failures == ()
    assert len(backend.received) == 10
    assert failing == []
    assert bed.lane().outliers.streaks == {}


def test_a_stale_connection_is_replaced_when_it_is_used(bed: Bed) -> None:
    """The backend closes it without a response when the second request arrives."""

    def closes_on_the_second(connection: BackendConnection) -> None:
        connection.request()
        connection.send(OK)
        connection.request()

    backend = bed.backend(closes_on_the_second, answers(OK))
    client = bed.client()
    assert client.fetch(chat()).status == 200
    assert client.fetch(chat("x-request-id: second")).status == 200
    assert bed.record("second").failures == ()
    assert bed.lane().outliers.streaks == {}
    assert len(backend.connections) == 2


def test_a_new_connection_that_is_closed_is_a_failure(bed: Bed) -> None:
    """There is no other instance, so the same one is tried again."""
    backend = bed.backend(sends(), answers(OK))
    assert bed.fetch(chat("x-request-id: it")).status == 200
    assert [instance for instance, _ in bed.record("it").failures] == ["chat-0"]
    assert "without an answer" in str(bed.record("it").failures[0][1])
    assert len(backend.received) == 2


@pytest.mark.parametrize("size", [BUFFERED_BYTES - 100, BUFFERED_BYTES + 100, 3 * BUFFERED_BYTES])
@pytest.mark.parametrize("framing", ["length", "chunks", "close"])
def test_long_responses_are_forwarded_byte_for_byte(bed: Bed, size: int, framing: str) -> None:
    body = b'{"data": "' + b"0123456789abcdef" * (size // 16) + b'"}'
    if framing == "length":
        script = answers(answer(body))
    elif framing == "chunks":
        script = answers(
            CHUNKS + b"".join(chunk(body[n : n + 100_000]) for n in range(0, len(body), 100_000)) + LAST_CHUNK
        )
    else:
        script = sends(b"HTTP/1.1 200 OK\r\n" + KIND + b"\r\n" + body)
    bed.backend(script)
    for request in (chat(), chat(version=b"1.0")):
        got = bed.fetch(request)
        assert got.status == 200
        assert sha256(got.body).digest() == sha256(body).digest()


def test_a_truncated_long_response_is_truncated_for_the_client(bed: Bed) -> None:
    """The connection is reset, so that the client does not take the part for the whole."""
    body = answer(b'{"data": "' + b"x" * (BUFFERED_BYTES + 1000) + b'"}')
    bed.backend(sends(body[:-500]))
    client = bed.client()
    client.send(chat("x-request-id: it"))
    head = client.head()
    length = int(head.header("content-length") or 0)
    assert len(client.rest()) < length
    wait_for(lambda: bed.record("it").state == "failed")
    assert bed.gateway.metrics.of("chat").broken_off == 1
    assert bed.gateway.metrics.of("chat").abandoned == 0


def same(one: Message, other: Message) -> bool:
    return sha256(one.body).digest() == sha256(other.body).digest()


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/embeddings", b"/v1/responses"])
def test_other_apis_are_forwarded(make_bed: MakeBed, path: bytes) -> None:
    bed = make_bed()
    body = {"object": "list", "data": [{"embedding": [0.5, -1.25]}], "usage": {"input_tokens": 3, "output_tokens": 4}}
    backend = bed.backend(answers(answer(body)))
    got = bed.fetch(post({"model": "m", "input": "x", "prompt": "x"}, path))
    assert got.json() == body
    assert backend.received[0].start == b"POST %b HTTP/1.1" % path

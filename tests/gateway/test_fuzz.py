"""Malformed input: the gateway responds or closes, forwards nothing malformed, and leaks nothing."""

import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.gateway.openai import BadRequest, metadata, read_body, usage_of_stream
from pointsman.http.responses import (
    MAX_HEAD_BYTES,
    ChunkReader,
    EventStream,
    MalformedHttp,
    RepeatedResponseHead,
    ResponseHead,
)
from tests.gateway.backends import (
    DONE,
    LAST_CHUNK,
    OK,
    STREAM,
    BackendConnection,
    answer,
    chunk,
    completion,
    event,
    stream,
)
from tests.gateway.bed import Bed, MakeBed
from tests.gateway.memory import Memory, requests, statuses
from tests.gateway.mutations import mutated, pieces
from tests.gateway.wire import HEALTH, chat, post
from tests.properties import examples

CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = b'{"model": "m", "messages": [], "stream": true}'
REQUESTS = [
    HEALTH,
    chat(),
    chat(stream=True),
    chat("connection: close"),
    chat(version=b"1.0"),
    chat("connection: keep-alive", version=b"1.0"),
    chat("expect: 100-continue"),
    chat("connection: upgrade, http2-settings", "upgrade: h2c"),
    chat("x-pointsman-priority: high", "x-request-id: mine", pointsman={"session": "s"}),
    post(b"{"),
    CHUNKED + chunk(BODY) + LAST_CHUNK,
    CHUNKED + chunk(BODY[:10]) + chunk(BODY[10:]) + b"0\r\nx: y\r\n\r\n",
    b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://x/health HTTP/1.1\r\nhost: x\r\n\r\n",
]
HEAD = b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
"""Separate, because the response alone does not show that it has no body."""
ANSWERS = [
    OK,
    answer(completion(), 500),
    answer(b"", 204, ()),
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\n{}",
    stream(event(0), event(1), DONE),
    stream(event(0)),
    STREAM + chunk(event(0)) + chunk(event(1)[:10]) + chunk(event(1)[10:] + DONE) + LAST_CHUNK,
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + event(0) + DONE,
]


@pytest.fixture(scope="module")
def memory() -> Memory:
    """One for all examples, so that leftovers of one affect the next."""
    return Memory(upstream={"maxTries": 2}, limits={"maxBodyBytes": 5000, "maxHeaderBytes": 5000})


def results_of(memory: Memory, parts: list[bytes]) -> tuple[list[int], list[bytes], bool]:
    """Statuses for the client, bodies that reach the instance, and whether the connection stays_open open."""
    client, transport = memory.client()
    for part in parts:
        if not transport.is_closing():
            client.data_received(part)
        memory.loop.turn()
        memory.answer_all()
    bodies = [body for _, upstream in memory.pool.made for body in requests(bytes(upstream.written))]
    assert transport.is_closing() or client.is_free
    stays_open = not transport.is_closing() and not transport.finished
    memory.disconnect_all()
    return statuses(bytes(transport.written)), bodies, stays_open


@given(st.data())
@settings(max_examples=examples(400))
def test_mutated_requests(memory: Memory, data: st.DataObject) -> None:
    """Responses and forwarded requests do not depend on how the bytes are split."""
    sent = data.draw(mutated(REQUESTS))
    at_once = results_of(memory, [sent])
    in_pieces = results_of(memory, data.draw(pieces(sent)))
    assert at_once == in_pieces
    answered, bodies, _ = at_once
    assert len(answered) >= len(bodies)


@given(st.binary(max_size=300), st.data())
@settings(max_examples=examples(250))
def test_random_bytes(memory: Memory, sent: bytes, data: st.DataObject) -> None:
    _, bodies, _ = results_of(memory, data.draw(pieces(sent)))
    assert bodies == []


MOVES = st.sampled_from(["turn", "respond", "part of a response", "pause or resume", "instance leaves", "nothing"])


@given(st.data())
@settings(max_examples=examples(300))
def test_clients_may_disconnect_at_any_point(memory: Memory, data: st.DataObject) -> None:
    """Also during responses: `disconnect_all` checks that nothing is left."""
    parts = data.draw(pieces(data.draw(mutated([*REQUESTS, HEAD], most=1))))
    moves = data.draw(st.lists(MOVES, min_size=len(parts), max_size=len(parts)))
    response = data.draw(st.sampled_from(ANSWERS))[: data.draw(st.integers(1, 200))]
    whole = data.draw(st.sampled_from([OK, stream(event(0), DONE)]))
    client, transport = memory.client()
    for part, move in zip(parts, moves, strict=True):
        if transport.is_closing():
            break
        client.data_received(part)
        upstream = memory.pool.made[-1] if memory.pool.made else None
        if move == "turn":
            memory.loop.turn()
        elif move == "respond":
            memory.answer_all(whole)
        elif move == "pause or resume":
            client.resume_writing() if client.paused else client.pause_writing()
        elif move == "part of a response" and upstream is not None and upstream[0].listener is not None:
            upstream[0].data_received(response)
        elif move == "instance leaves" and upstream is not None:
            upstream[1].abort()
    memory.disconnect_all()


@given(st.data())
@settings(max_examples=examples(300))
def test_mutated_responses(memory: Memory, data: st.DataObject) -> None:
    """Whatever an instance sends before it closes, the client gets one complete response or a visible truncation."""
    response = [data.draw(pieces(data.draw(mutated(ANSWERS)))) for _ in range(2)]
    client, transport = memory.client()
    client.data_received(chat(stream=True))
    for parts in response:
        connection, upstream = memory.pool.made[-1]
        for part in parts:
            if upstream.is_closing():
                break
            connection.data_received(part)
        memory.loop.turn()
        upstream.close()
        memory.loop.turn()
    assert len(statuses(bytes(transport.written), cut=transport.aborted)) == 1
    assert client.request is None or transport.aborted
    memory.disconnect_all()


@given(st.binary(max_size=200) | mutated([head.partition(b"\r\n\r\n")[0] for head in ANSWERS]))
@settings(max_examples=examples(300))
def test_mutated_response_heads(head: bytes) -> None:
    try:
        read = ResponseHead(head)
    except MalformedHttp:
        return
    assert 100 <= read.status < 600
    assert read.length is None or not read.chunked
    for line in read.lines.removesuffix(b"\r\n").split(b"\r\n") if read.lines else []:
        assert not {b"\r", b"\n", b"\0"} & {line[n : n + 1] for n in range(len(line))}
        assert b":" in line


def facts(head: ResponseHead) -> tuple[object, ...]:
    return tuple(getattr(head, name) for name in ResponseHead.__slots__)


@given(st.sampled_from(ANSWERS), mutated(ANSWERS, most=2))
@settings(max_examples=examples(250))
def test_a_response_head_that_is_repeated_is_read_as_if_it_were_new(first: bytes, second: bytes) -> None:
    before, end, _ = first.partition(b"\r\n\r\n")
    repeated = RepeatedResponseHead()
    repeated.remember(before + end, ResponseHead(before))
    assert repeated.read(first) is not None
    read = repeated.read(second)
    if read is not None:
        assert read[1] == second.index(end) + len(end)
        assert facts(read[0]) == facts(ResponseHead(second.partition(end)[0]))


LENGTHS = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\ncontent-length: %b\r\n\r\n"


def test_a_response_head_with_two_lengths_is_read_anew_each_time() -> None:
    repeated = RepeatedResponseHead()
    repeated.remember(LENGTHS % b"5", ResponseHead((LENGTHS % b"5").removesuffix(b"\r\n\r\n")))
    assert repeated.read(LENGTHS % b"5") is None
    assert repeated.read(LENGTHS % b"6") is None


def unchunked(parts: list[bytes], *, shortcut: bool = False) -> tuple[str, bytes]:
    """State of a chunked body (ended, malformed, more to come) and its payload. `shortcut`: as streams are read."""
    reader, payload = ChunkReader(), b""
    for part in parts:
        if reader.ended:
            return "malformed", b""
        try:
            only = reader.only(part) if shortcut else None
            payload += reader.feed(part) if only is None else only
        except MalformedHttp:
            return "malformed", b""
        if reader.beyond:
            return "malformed", b""
    return "ended" if reader.ended else "more", payload


CHUNKS = [
    chunk(b"hello"),
    chunk(b"x" * 300),
    b"5;a=b\r\nworld\r\n",
    chunk(b"\r\n\r\n"),
    LAST_CHUNK,
    b"0\r\nx: y\r\n\r\n",
]


@given(st.data())
@settings(max_examples=examples(250))
def test_chunks_are_read_the_same_in_any_pieces(data: st.DataObject) -> None:
    sent = data.draw(mutated(CHUNKS, most=2))
    assert unchunked(data.draw(pieces(sent))) == unchunked([sent])


@given(st.lists(mutated(CHUNKS, most=1), max_size=6))
@settings(max_examples=examples(250))
def test_a_chunk_in_a_separate_read_is_read_like_any_other(parts: list[bytes]) -> None:
    assert unchunked(parts, shortcut=True) == unchunked(parts)


@pytest.mark.parametrize(
    "size", [b"5", b"005", b"a", b"A", b"0x5", b"+5", b"1_0", b" 5", b"5 ", b"5;a=b", b"\xd9\xa5", b"0"]
)
def test_a_size_is_read_alike_by_both(size: bytes) -> None:
    sent = size + b"\r\nhello67890123456"
    parts = [sent[: len(size) + 2 + length] + b"\r\n" for length in (0, 5, 10, 16)]
    assert [unchunked([part], shortcut=True) for part in parts] == [unchunked([part]) for part in parts]


@pytest.mark.parametrize("trailers", [b"\n0\r\n", b"a: b\n\r\n", b"a: b\r\nc: d\r\n"])
def test_trailers_are_read_the_same_byte_by_byte(trailers: bytes) -> None:
    sent = chunk(b"hello") + b"0\r\n" + trailers + b"\r\n"
    assert unchunked([sent[i : i + 1] for i in range(len(sent))]) == unchunked([sent])


@pytest.mark.parametrize(("excess", "state"), [(0, "ended"), (1, "malformed")])
def test_trailers_have_one_limit_however_they_arrive(excess: int, state: str) -> None:
    sent = b"0\r\n" + b"a" * (MAX_HEAD_BYTES - 2 + excess) + b"\r\n\r\n"
    assert {unchunked([sent[:-left], sent[-left:]])[0] for left in range(1, 8)} == {unchunked([sent])[0]} == {state}


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=8), st.data())
@settings(max_examples=examples(200))
def test_chunked_bodies_round_trip(parts: list[bytes], data: st.DataObject) -> None:
    sent = b"".join(map(chunk, parts)) + LAST_CHUNK
    assert unchunked(data.draw(pieces(sent))) == ("ended", b"".join(parts))


EVENTS = [
    event(0),
    event(1, b"\r\n\r\n"),
    b": ping\n\n",
    DONE,
    b"data: a\ndata: b\n\n",
    b"\n",
    b'data: {"usage": {}}\n\n',
]


@given(st.data())
@settings(max_examples=examples(300))
def test_events_are_forwarded_whole(data: st.DataObject) -> None:
    sent = data.draw(mutated(EVENTS, most=2))
    events, passed = EventStream(), []
    for part in data.draw(pieces(sent)):
        passed.append(events.feed(part))
        assert not passed[-1] or passed[-1].endswith((b"\n\n", b"\r\n\r\n"))
    assert b"".join(passed) + events.held == sent
    usage_of_stream(events)


@given(st.lists(mutated(EVENTS, most=1), max_size=6))
@settings(max_examples=examples(300))
def test_usual_events_are_read_like_any_other(parts: list[bytes]) -> None:
    events, slow = EventStream(), EventStream()
    for part in parts:
        passed = events.feed(part)
        usual = part.startswith(b"data: {")
        at_once = slow.feed(part[:1]) + slow.feed(part[1:]) if usual else slow.feed(part)
        assert passed == at_once
        assert (events.held, events.events, events.last) == (slow.held, slow.events, slow.last)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "model", "stream", "messages", "prompt", "input", "instructions", "tools", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "cache_salt", "pointsman", "priority", "deadline_ms", "tenant", "session", "cost_budget",
    "timeout_s",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), JSON | st.dictionaries(st.sampled_from(FIELDS), JSON), max_size=6))
@settings(max_examples=examples(200))
def test_bodies_of_any_shape(body: dict[str, object]) -> None:
    raw: dict[bytes, bytes] = {}
    try:
        request = metadata("r", read_body(msgspec.json.encode(body)), raw, 0.0, "")
    except BadRequest:
        return
    assert request.max_tokens is None or request.max_tokens > 0
    assert not any(b in value for value in raw.values() for b in (b"\r", b"\n", b"\0"))


@given(
    st.dictionaries(
        st.sampled_from([f"x-pointsman-{field}".replace("_", "-").encode() for field in FIELDS]),
        st.binary(max_size=20) | st.sampled_from([b"1", b"-5", b"high", b"1e9", b"nan", b"inf", b"1" * 400, b" 7 "]),
        max_size=4,
    )
)
@settings(max_examples=examples(250))
def test_headers_of_any_shape(raw: dict[bytes, bytes]) -> None:
    raw = {name: bytes(byte for byte in value if byte not in b"\r\n\0") for name, value in raw.items()}
    try:
        request = metadata("r", read_body(b'{"model": "m"}'), raw, 0.0, "")
    except BadRequest:
        return
    assert isinstance(request.priority, int)


# The same over sockets, with fewer examples


def stream_or_answer(connection: BackendConnection) -> None:
    """An instance that streams if requested, and sends a plain response otherwise."""
    while (request := connection.request()) is not None:
        connection.send(stream(event(0), event(1), DONE) if b'"stream": true' in request.body else OK)


def test_mutated_requests_over_sockets() -> None:
    bed = Bed({"limits": {"maxBodyBytes": 5000, "maxHeaderBytes": 5000}})
    backend = bed.backend(stream_or_answer)

    @given(st.data())
    @settings(max_examples=examples(150))
    def run(data: st.DataObject) -> None:
        sent = data.draw(mutated([*REQUESTS, HEAD]))
        client = bed.client()
        try:
            for part in data.draw(pieces(sent)):
                client.send(part)
            client.finish_writing()
        except OSError:
            pass  # closed before everything was sent
        client.rest()  # raises after a timeout
        client.close()
        assert bed.fetch(chat()).status == 200

    try:
        run()
        assert backend.received
    finally:
        bed.close()


def test_mutated_responses_over_sockets() -> None:
    bed = Bed({"upstream": {"maxTries": 2, "stallTimeout": "2s", "firstTokenTimeout": "2s"}})
    response = b""
    lock = threading.Lock()

    def script(connection: BackendConnection) -> None:
        connection.request()
        with lock:
            mutated_response = response
        connection.send(mutated_response, piece=7 if len(mutated_response) < 300 else 0)

    bed.backend(script)

    @given(mutated(ANSWERS))
    @settings(max_examples=examples(100))
    def run(mutated_response: bytes) -> None:
        nonlocal response
        with lock:
            response = mutated_response
        client = bed.client()
        client.send(chat("connection: close", stream=True))
        written = client.rest()
        assert len(statuses(written, cut=b"transfer-encoding: chunked" in written)) == 1
        client.close()

    try:
        run()
    finally:
        bed.close()


def having(field: str) -> bytes:
    return b'{"model": "m", %b}' % field.encode("latin-1")


def told(setting: str) -> bytes:
    return having(f'"pointsman": {{{setting}}}')


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"null", b"\xff", b"\0", b'{"model": "m"', b'{"model": "\\ud800"}', b'{"model": "\xff"}',
        b"[" * 200_000, b'{"a":' * 200_000, having('"messages": ' + "[" * 200_000 + "]" * 200_000), b'{"model": NaN}',
        having('"max_tokens": 1e400'), having('"max_tokens": 1.5'), having('"max_tokens": NaN'),
        having(f'"max_tokens": {"9" * 5000}'), having('"pointsman": []'), told('"priority": 1e400'),
        told(f'"priority": {"9" * 5000}'), told('"priority": []'), told('"deadline_ms": 1e400'),
        told('"deadline_ms": NaN'),
        told('"deadline_ms": Infinity'), told('"deadline_ms": -1'), told(f'"deadline_ms": {"9" * 400}'),
        told('"timeout_s": 0'), told('"cost_budget": 1e16'), told('"session": "\\ud800"'), told('"session": "\\u0000"'),
    ],
    ids=lambda body: ascii(body[:60]),
)  # fmt: skip
def test_bodies_that_cannot_be_read(make_bed: MakeBed, body: bytes) -> None:
    bed = make_bed()
    backend, client = bed.backend(), bed.client()
    got = client.fetch(post(body))
    assert got.status == 400
    assert len(got.body) < 1000
    assert backend.received == []
    assert client.stays_open()


@pytest.mark.parametrize(
    "number", ["nan", "inf", "-inf", "1e400", "9" * 200, "-1", "0", "1e15", "", "x", "0x10", "1_000"]
)
@pytest.mark.parametrize("header", ["deadline-ms", "timeout-s", "cost-budget"])
def test_numbers_in_headers_that_cannot_be_read(make_bed: MakeBed, header: str, number: str) -> None:
    got = make_bed().fetch(chat(f"x-pointsman-{header}: {number}"))
    assert got.status == 400
    assert header.replace("-", "_") in got.error["message"].replace("-", "_")


def test_a_name_twice_in_a_body_has_its_last_value(make_bed: MakeBed) -> None:
    """As the JSON parsers of engines read it."""
    bed = make_bed()
    bed.backend()
    assert bed.fetch(post(b'{"model": "unknown", "model": "m"}')).status == 200
    assert bed.fetch(post(b'{"model": "m", "model": "unknown"}')).status == 404

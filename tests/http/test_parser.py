"""The fast parser reads plain requests exactly as llhttp does."""

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from httptools import HttpRequestParser
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.config.schema import LimitsSpec
from pointsman.gateway.connection import GatewayConnection
from pointsman.http.buffers import LARGE_BYTES, READ_BYTES, PartialBody
from pointsman.http.heads import LONG_BYTES, HttpRequest, read_fast
from tests.gateway.memory import Memory, read_into_buffers, requests, statuses
from tests.gateway.mutations import mutated
from tests.gateway.wire import chat
from tests.properties import examples

LIMITS = LimitsSpec(max_header_bytes=5000)
PLAIN = chat()


class Parsed:
    """The first request as llhttp reads it."""

    def __init__(self, data: bytes) -> None:
        self.target = self.body = b""
        self.headers: dict[bytes, bytes] = {}
        self.ended = 0
        parser = HttpRequestParser(self)
        parser.feed_data(data)
        self.method, self.version, self.keeps_alive = (
            parser.get_method(),
            parser.get_http_version(),
            parser.should_keep_alive(),
        )

    def on_url(self, url: bytes) -> None:
        if not self.ended:
            self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.ended:
            assert name.lower() not in self.headers, "what comes twice is not plain"
            self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        if not self.ended:
            self.body += body

    def on_message_complete(self) -> None:
        self.ended += 1


@given(mutated([PLAIN, chat("accept: */*", "authorization: Bearer key"), chat("connection: keep-alive")], most=2))
@settings(max_examples=examples(250))
def test_the_fast_parser_agrees_with_llhttp(data: bytes) -> None:
    read = read_fast(data, 0, LIMITS)
    if read is None:
        return
    request, start, length = read
    body = data[start : start + length]
    parsed = Parsed(data[:start] + body.ljust(length, b"x"))  # raises if the request is invalid
    assert (parsed.method, parsed.version, parsed.keeps_alive, parsed.ended) == (b"POST", "1.1", True, 1)
    assert (request.method, request.target, request.headers) == (parsed.method, parsed.target, parsed.headers)
    assert (request.path, request.query, request.keep_alive, request.is_http_1_0) == (request.target, b"", True, False)
    assert body.ljust(length, b"x") == parsed.body


def facts(read: tuple[HttpRequest, int, int] | None) -> object:
    if read is None:
        return None
    request, start, length = read
    return request.method, request.target, request.path, request.query, request.headers, start, length


@given(mutated([PLAIN, chat(prompt="longer"), chat("accept: */*"), chat("Content-length: 9")], most=2))
@settings(max_examples=examples(250))
def test_a_head_that_is_repeated_is_read_as_if_it_were_new(data: bytes) -> None:
    """The first request of a connection is a plain one."""
    first = read_fast(PLAIN, 0, LIMITS)
    assert first is not None
    assert first[0].repeats is not None
    repeated = first[0].repeats.read(data, 0, LIMITS)
    assert repeated is None or facts(repeated) == facts(read_fast(data, 0, LIMITS))
    assert facts(first) == facts(read_fast(PLAIN, 0, LIMITS)), "it has headers of its own"


def test_only_the_length_of_a_repeated_head_may_change() -> None:
    first = read_fast(PLAIN, 0, LIMITS)
    assert first is not None
    assert first[0].repeats is not None
    again, longer, other = chat(), chat(prompt="x" * 5_000), chat("accept: */*")
    for data, is_repeated in ((again, True), (longer, True), (other, False), (again[:-1], True)):
        assert (first[0].repeats.read(data, 0, LIMITS) is not None) is is_repeated
    for number in (b"", b"+1", b"1 ", b"0x1", b"1" * 16, b"9" * 15):  # the last one is too long a body
        data = re.sub(rb"(?<=content-length: )\d+", number, PLAIN)
        assert first[0].repeats.read(data, 0, LIMITS) is None
    assert first[0].repeats.read(PLAIN, 0, LimitsSpec(max_header_bytes=10)) is None, "other limits"


def changed(old: bytes, new: bytes) -> bytes:
    assert old in PLAIN
    return PLAIN.replace(old, new, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        PLAIN[:30],
        changed(b"POST", b"PUT"),
        changed(b"POST ", b"POST  "),
        changed(b"HTTP/1.1", b"HTTP/1.0"),
        changed(b"/v1/", b"http://x/v1/"),
        changed(b"/v1/chat/completions", b"/v1/chat/completions?x=1"),
        changed(b"/v1/chat/completions", b"/" + b"x" * LONG_BYTES),
        changed(b"host: ", b"Transfer-Encoding: chunked\r\nhost: "),
        changed(b"host: ", b"expect: 100-continue\r\nhost: "),
        changed(b"host: ", b"connection: close\r\nhost: "),
        changed(b"host: ", b"upgrade: h2c\r\nhost: "),
        changed(b"host: ", b"content-length: 5\r\nhost: "),
        changed(b"host: ", b"x: one\r\nx: two\r\nhost: "),
        changed(b"host: ", b"x: one\r\n two\r\nhost: "),
        changed(b"host: ", b"x: o\tne\r\nhost: "),
        changed(b"host: ", b"x: \xff\r\nhost: "),
        changed(b"host: ", b"x : y\r\nhost: "),
        changed(b"host: ", b"x\r\nhost: "),
        changed(b"host: ", b"x: y\nhost: "),
        changed(b"host: ", b"x: " + b"y" * LONG_BYTES + b"\r\nhost: "),
        changed(b"host: ", b"not-host: "),
        changed(b"content-length: ", b"content-length: +"),
        changed(b"content-length: ", b"content-length: 0x"),
        changed(b"content-length: ", b"not-content-length: "),
        PLAIN.replace(b"\r\n", b"\n"),
    ],
    ids=repr,
)
def test_unusual_requests_are_left_to_llhttp(data: bytes) -> None:
    assert read_fast(PLAIN, 0, LIMITS) is not None
    assert read_fast(data, 0, LIMITS) is None


def test_thousands_of_pipelined_requests_do_not_recurse() -> None:
    """Requests are not parsed recursively."""
    memory = Memory()
    client, transport = memory.client()
    client.data_received(PLAIN[:-5])
    client.data_received(PLAIN[-5:] + PLAIN * 3_000)
    for _ in range(3_001):
        memory.loop.turn()
        memory.answer_all()
    assert statuses(bytes(transport.written)) == [200] * 3_001
    memory.disconnect_all()


def test_a_head_that_is_too_long_is_left_to_llhttp() -> None:
    head = PLAIN.index(b"\r\n\r\n") + 4
    assert read_fast(PLAIN, 0, LimitsSpec(max_header_bytes=head)) is not None
    assert read_fast(PLAIN, 0, LimitsSpec(max_header_bytes=head - 1)) is None


@pytest.mark.parametrize("size", [100, 3_000, 40_000])
@pytest.mark.parametrize("piece", [7, 1_000, 16_384, 1_000_000])
def test_bodies_are_forwarded_unchanged_in_any_pieces(size: int, piece: int) -> None:
    """Whole, split anywhere, or followed by the next request: the engine gets the same."""
    memory, request = Memory(), chat(prompt="x" * size)
    client, transport = memory.client()
    sent = request + request
    for start in range(0, len(sent), piece):
        client.data_received(sent[start : start + piece])
        memory.loop.turn()
    memory.answer_all()
    assert statuses(bytes(transport.written)) == [200, 200]
    bodies = [body for _, upstream in memory.pool.made for body in requests(bytes(upstream.written))]
    assert bodies == [request.partition(b"\r\n\r\n")[2]] * 2
    memory.disconnect_all()


def test_data_after_the_last_request_is_ignored() -> None:
    memory = Memory()
    client, transport = memory.client()
    client.data_received(chat("connection: close"))
    client.data_received(chat())
    memory.loop.turn()
    memory.answer_all()
    assert len([body for _, upstream in memory.pool.made for body in requests(bytes(upstream.written))]) == 1
    assert statuses(bytes(transport.written)) == [200]
    memory.disconnect_all()


@pytest.mark.parametrize("room", [2 * LARGE_BYTES, 3 * LARGE_BYTES, 9 * LARGE_BYTES])
def test_a_large_body_is_whole_however_it_arrives(room: int) -> None:
    parts = [bytes([number]) * (1 + number * 997) for number in range(90)]  # 4 MB
    body = PartialBody(room)
    for number, part in enumerate(parts):
        body.add(part if number % 2 else memoryview(part))
    assert (body.size, bytes(body.whole())) == (sum(map(len, parts)), b"".join(parts))


def long_chat(size: int) -> bytes:
    return chat(messages=[{"role": "user", "content": "x" * size}])


BODIES = [
    PLAIN,
    *map(long_chat, (20_000, READ_BYTES - 500, READ_BYTES, 260_000, 2 * LARGE_BYTES)),
    b"GET / HTTP/1.1\r\n\r\n",
]


@given(
    sent=st.lists(st.sampled_from(BODIES), min_size=1, max_size=3).map(b"".join),
    cuts=st.lists(st.integers(1, 3 * LARGE_BYTES), max_size=6),
)
@settings(max_examples=examples(40), deadline=None)
def test_bytes_that_are_read_into_buffers_are_the_same_requests(sent: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cut for cut in set(cuts) if cut < len(sent)), len(sent)]
    pieces = [sent[start:end] for start, end in pairwise(edges)]

    def outcome(deliver: Callable[[GatewayConnection, bytes], object]) -> tuple[list[bytes], list[int]]:
        memory = Memory()
        client, transport = memory.client()
        for piece in pieces:
            deliver(client, piece)
            for _ in range(4):
                memory.loop.turn()
                memory.answer_all()
        served = [body for _, upstream in memory.pool.made for body in requests(bytes(upstream.written))]
        memory.disconnect_all()
        assert memory.gateway.buffered.held == 0
        return served, statuses(bytes(transport.written))

    assert outcome(read_into_buffers) == outcome(GatewayConnection.data_received)


def test_the_rest_of_a_long_body_is_read_into_its_own_buffer() -> None:
    memory = Memory()
    client, _ = memory.client()
    assert read_into_buffers(client, long_chat(260_000)) > 260_000 - READ_BYTES
    memory.disconnect_all()


def test_a_body_that_is_only_announced_takes_no_memory() -> None:
    memory = Memory()
    client, _ = memory.client()
    head, _, body = long_chat(900_000).partition(b"\r\n\r\n")
    read_into_buffers(client, head + b"\r\n\r\n" + body[:20_000])
    assert memory.gateway.buffered.held == 20_000
    read_into_buffers(client, body[20_000:100_000])
    assert memory.gateway.buffered.held == len(body), "its buffer counts as a whole"
    memory.disconnect_all()
    assert memory.gateway.buffered.held == 0

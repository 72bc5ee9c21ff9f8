"""`python -m tests.gateway.differential COUNT [NAME...]`: each fast way to read input, beside the plain one.

COUNT inputs: valid ones with random edits, which are found again by their number.
"""

import sys
import time
from collections.abc import Callable
from itertools import pairwise
from random import Random

import msgspec

from pointsman.config.schema import LimitsSpec
from pointsman.gateway.known_bodies import KnownBodies
from pointsman.gateway.openai import BadRequest, Body, read_body
from pointsman.http.heads import Bytes, HttpRequest
from pointsman.http.parser import RequestParser
from pointsman.http.responses import ChunkReader, MalformedHttp
from tests.gateway.wire import chat

LIMITS = LimitsSpec(max_header_bytes=2000, max_body_bytes=1_000_000)
TOKENS = [
    b"\r\n", b"\n", b"\r", b": ", b":", b" ", b"\x00", b"\x1f", b"\x80", b"\xff", b'"', b"\\", b"\\u00", b"{", b"}",
    b"[", b"]", b",", b"0", b"9", b"-1", b"1e9", b"true", b"null", b'"messages":', b'"model":', b"HTTP/1.0", b"POST",
    b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"host: y\r\n", b"\xc3\xa9", b"5\r\nhello\r\n",
    b"0\r\n\r\n", b";a=b",
]  # fmt: skip


def edited(rng: Random, data: bytes, most: int = 3) -> bytes:
    for _ in range(rng.randrange(most + 1)):
        at = rng.randrange(len(data) + 1)
        kind, end = rng.randrange(5), min(len(data), at + rng.choice((1, 1, 2, 10, 100)))
        if kind == 0:
            data = data[:at] + rng.choice(TOKENS) + data[at:]
        elif kind == 1:
            data = data[:at] + rng.choice(TOKENS) + data[end:]
        elif kind == 2:
            data = data[:at] + data[end:]
        elif kind == 3:
            data = data[:end] + data[at:]
        else:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    return data


def pieces(rng: Random, data: bytes) -> list[bytes]:
    edges = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(rng.randrange(4)))})
    return [data[start:end] for start, end in pairwise(edges)]


class Received:
    """What a parser made of its bytes."""

    limits = LIMITS

    def __init__(self, make: Callable[["Received"], RequestParser], parts: list[bytes], *, into_buffers: bool) -> None:
        self.outcome: list[object] = []
        self.parser = make(self)
        for part in parts:
            while into_buffers and self.parser.space is not None and part and not self.parser.closed:
                space = self.parser.space[: len(part)]
                space[:] = part[: len(space)]
                part = part[len(space) :]
                self.parser.filled(len(space))
            if part and not self.parser.closed:
                self.parser.feed(part)
        self.outcome.append(self.parser.is_in_request)

    def head_read(self, request: HttpRequest) -> None: ...

    def body_grew(self, request: HttpRequest, size: int) -> None: ...

    def request_incomplete(self) -> None: ...

    def continue_expected(self) -> None:
        self.outcome.append("continue")

    def read_later(self) -> None:
        self.parser.read_on()

    def request_read(self, request: HttpRequest) -> None:
        r = request
        flags = (r.keep_alive, r.is_http_1_0)
        self.outcome.append((r.method, r.target, r.path, r.query, r.headers, bytes(r.body), flags))
        self.parser.read_on()

    def request_refused(self, status: int, message: str) -> None:
        self.outcome.append(status)


class PlainParser(RequestParser):
    """Reads every head with llhttp."""

    def _read_fast(self, data: bytes, at: int) -> None:
        return None


def fast(one: Received) -> RequestParser:
    return RequestParser(one, one)


def plain(one: Received) -> RequestParser:
    return PlainParser(one, one)


CHATS = [chat(), chat("accept: */*", "authorization: Bearer key"), chat("connection: keep-alive"), chat(stream=True)]
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
LONG = chat(messages=[{"role": "user", "content": "x" * 200_000}])


def heads(rng: Random) -> None:
    """The fast reader of heads and the one for repeated heads, beside llhttp."""
    sent = edited(rng, b"".join(rng.choices((*CHATS, CHUNKED), k=rng.randrange(1, 4))))
    parts = pieces(rng, sent)
    assert Received(fast, parts, into_buffers=False).outcome == Received(plain, parts, into_buffers=False).outcome


def buffers(rng: Random) -> None:
    """Long bodies that are read into buffers of their own, beside bytes that are joined; each in splits of its own."""
    sent = edited(rng, rng.choice(CHATS) * rng.randrange(2) + LONG + rng.choice((*CHATS, CHUNKED, LONG)))
    one, other = pieces(rng, sent), pieces(rng, sent)
    assert Received(fast, one, into_buffers=True).outcome == Received(fast, other, into_buffers=False).outcome


CHUNKS = [b"5\r\nhello\r\n", b"a\r\n0123456789\r\n", b"05;a=b\r\nworld\r\n", b"4\r\n\r\n\r\n\r\n", b"0\r\n\r\n"]


def chunks(rng: Random) -> None:
    """A chunk in a read of its own, beside the general reader."""
    parts = [edited(rng, rng.choice(CHUNKS), 1) for _ in range(rng.randrange(1, 6))]
    assert unchunked(parts, shortcut=True) == unchunked(parts, shortcut=False)


def unchunked(parts: list[bytes], *, shortcut: bool) -> object:
    reader, payload = ChunkReader(), b""
    try:
        for part in parts:
            only = reader.only(part) if shortcut and not reader.ended else None
            payload += reader.feed(part) if only is None else only
            if reader.ended:
                break
    except MalformedHttp:
        return "malformed", payload
    return reader.ended, reader.beyond, reader.count, payload


KNOWN = KnownBodies(min_bytes=120, max_kept=20_000)
MESSAGES = [
    {"role": "system", "content": "You are helpful.\n" * 4},
    {"role": "user", "content": 'a "quoted" {"role": [}]},\\ text \u00e9'},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "arguments": '{"a": [1, 2]}'}]},
    {"role": "user", "content": [{"type": "text", "text": "x" * 50}]},
]


def bodies(rng: Random) -> None:
    """Bodies that begin like others, beside the full decoder."""
    messages: list[object] = [MESSAGES[rng.randrange(len(MESSAGES))] for _ in range(rng.randrange(1, 6))]
    if not rng.randrange(20):
        messages.insert(rng.randrange(len(messages)), rng.choice((1, "text", [], None)))
    fields: list[tuple[str, object]] = [("model", "chat"), ("messages", messages), ("max_tokens", 5), ("stream", True)]
    if rng.randrange(4):
        rng.shuffle(fields)
    if not rng.randrange(10):
        fields.append(("messages", rng.choice(([], messages[:1], "text"))))
    encode = msgspec.json.encode
    space = b" " * (not rng.randrange(3))
    body = b"{" + b",".join(encode(name) + b":" + space + encode(value) for name, value in fields) + b"}"
    if not rng.randrange(3):
        body = body.replace(b"},{", b"} ,\n {")
    for sent in (body, body, edited(rng, body), edited(rng, body, 1)):
        head, room = rng.randbytes(rng.randrange(50)), bytes(rng.randrange(50))
        for same in (sent, memoryview(head + sent)[len(head) :], memoryview(bytearray(sent + room))[: len(sent)]):
            assert verdict(KNOWN.read, same) == verdict(read_body, sent)


def verdict(read: Callable[[Bytes], Body], body: Bytes) -> object:
    try:
        found = read(body)
    except BadRequest as error:
        return str(error)
    return [getattr(found, name) for name in Body.__struct_fields__ if name not in RAW] + [
        bytes(getattr(found, name)) for name in RAW
    ]


RAW = ("stream_options", "messages", "prompt", "input", "instructions", "system", "tools", "n", "best_of")
COMPARISONS: list[Callable[[Random], None]] = [heads, buffers, chunks, bodies]


def compare(comparison: Callable[[Random], None], count: int, first: int = 0) -> None:
    """Raises AssertionError for the first input that the two read differently."""
    for number in range(first, first + count):
        try:
            comparison(Random(number))
        except Exception as error:
            raise AssertionError(f"{comparison.__name__}, input {number}: {error}") from error


def main(count: int, names: list[str]) -> None:
    for comparison in COMPARISONS:
        if names and comparison.__name__ not in names:
            continue
        start = time.monotonic()
        compare(comparison, count)
        print(f"{comparison.__name__}: {count:,} inputs, differences 0, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

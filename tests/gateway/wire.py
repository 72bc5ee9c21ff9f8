"""A strict HTTP reader that shares no code with the product, and raw client sockets."""

import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

TIMEOUT_S = 20.0
"""Far longer than any step takes."""

CHAT = b"/v1/chat/completions"
HEALTH = b"GET /health HTTP/1.1\r\nhost: gateway\r\n\r\n"

_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([\t\x20-\x7e\x80-\xff]*)")
_STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) ([\t\x20-\x7e]+)")
_REQUEST = re.compile(rb"([A-Z]+) (/[\x21-\x7e]*) HTTP/1\.1")


def wait_for(condition: Callable[[], object], what: str = "", timeout_s: float = TIMEOUT_S) -> None:
    """Poll until a condition holds. Raises AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {timeout_s:g} s{f': {what}' if what else ''}"
        time.sleep(0.002)


class Closed(Exception):
    """The peer closed the connection where a message was expected."""


class Message(NamedTuple):
    """A request or a response."""

    start: bytes
    headers: list[tuple[bytes, bytes]]
    """Lower-cased names, in order."""
    body: bytes = b""
    chunks: tuple[bytes, ...] = ()
    """The chunks of a chunked body."""

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value.decode("latin-1") for known, value in self.headers if known == name.encode()]

    def header(self, name: str) -> str | None:
        """The value of a header; None if it is missing. Raises AssertionError if it is repeated."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} is there {len(values)} times: {values}"
        return values[0] if values else None

    @property
    def status(self) -> int:
        return int(self.start.split(b" ")[1])

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in a response, which must have OpenAI's format."""
        assert self.header("content-type") == "application/json"
        body = self.json()
        assert body.keys() == {"error"}, body
        error: dict[str, Any] = body["error"]
        assert {"message", "type", "param", "code"} <= error.keys(), error
        assert isinstance(error["message"], str)
        assert error["message"]
        assert error["type"] in {
            "invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "server_error"
        }  # fmt: skip
        return error

    def events(self) -> list[bytes]:
        """The events of a stream, without separators. The last event must be complete."""
        *events, rest = self.body.replace(b"\r\n", b"\n").split(b"\n\n")
        assert rest == b"", f"the stream ends within an event: {rest!r}"
        return events


class Wire:
    """A socket that reads HTTP messages."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.socket.settimeout(TIMEOUT_S)
        if self.socket.family == socket.AF_INET:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""

    def send(self, data: bytes, *, piece: int = 0) -> None:
        """Send data, in pieces of `piece` bytes unless 0."""
        for start in range(0, len(data), piece or len(data) or 1):
            self.socket.sendall(data[start : start + piece] if piece else data)

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Close with a TCP reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()

    def finish_writing(self) -> None:
        """Close the sending side only."""
        self.socket.shutdown(socket.SHUT_WR)

    # Reading

    def more(self) -> bool:
        """Read more data; False at the end."""
        try:
            data = self.socket.recv(256 * 1024)
        except (ConnectionError, ssl.SSLError):
            return False
        self._read += data
        return bool(data)

    def until(self, end: bytes) -> bytes:
        """Read up to and including these bytes."""
        while end not in self._read:
            if not self.more():
                raise Closed(f"closed after {self._read[:200]!r}")
        length = self._read.index(end) + len(end)
        taken, self._read = self._read[:length], self._read[length:]
        return taken

    def exactly(self, number: int) -> bytes:
        while len(self._read) < number:
            if not self.more():
                raise Closed(f"closed {number - len(self._read)} bytes too early")
        taken, self._read = self._read[:number], self._read[number:]
        return taken

    def rest(self) -> bytes:
        """Read until the peer closes."""
        while self.more():
            pass
        taken, self._read = self._read, b""
        return taken

    def head(self) -> Message:
        """Read the head of a message."""
        start, *lines = self.until(b"\r\n\r\n")[:-4].split(b"\r\n")
        headers = []
        for line in lines:
            match = _LINE.fullmatch(line)
            assert match is not None, f"not a header: {line!r}"
            headers.append((match[1].lower(), match[2]))
        return Message(start, headers)

    def chunked(self) -> tuple[bytes, ...]:
        """Read the chunks of a body, including the last one."""
        chunks: list[bytes] = []
        while True:
            size = self.until(b"\r\n")[:-2]
            assert re.fullmatch(rb"[0-9a-fA-F]{1,8}", size), f"not a chunk size: {size!r}"
            if not int(size, 16):
                assert self.until(b"\r\n") == b"\r\n"
                return tuple(chunks)
            chunks.append(self.exactly(int(size, 16)))
            assert self.exactly(2) == b"\r\n"

    def is_closed(self) -> bool:
        """Wait for the peer. Whether it closes the connection; raises AssertionError if data arrives."""
        assert self._read == b"", f"unexpected data: {self._read[:200]!r}"
        arrived = self.more()
        assert self._read == b"", f"unexpected data: {self._read[:200]!r}"
        return not arrived


class Client(Wire):
    """A client's connection to the gateway."""

    settle: Callable[[], None] | None = None
    """Waits until the gateway has done everything that it does after it has sent an answer."""

    def read_response(self, *, to_head: bool = False) -> Message:
        """Read the next response. `to_head`: it has no body, whatever its headers say."""
        response = self._response(to_head)
        if self.settle is not None:
            self.settle()
        return response

    def _response(self, to_head: bool) -> Message:
        head = self.head()
        assert _STATUS.fullmatch(head.start), head.start
        lengths, codings = head.all("content-length"), head.all("transfer-encoding")
        assert len(lengths) + len(codings) <= 1, f"two framings: {head.headers}"
        if to_head or head.status < 200 or head.status in (204, 304):
            return head
        if codings:
            assert codings == ["chunked"]
            chunks = self.chunked()
            return head._replace(body=b"".join(chunks), chunks=chunks)
        if lengths:
            assert lengths[0].isdecimal()
            return head._replace(body=self.exactly(int(lengths[0])))
        assert head.header("connection") == "close", f"no framing: {head.headers}"
        return head._replace(body=self.rest())

    def fetch(self, request: bytes) -> Message:
        """Send a request and read its response."""
        self.send(request)
        return self.read_response()

    def stays_open(self) -> bool:
        """Whether this connection serves another request."""
        assert self._read == b"", f"unexpected data: {self._read[:200]!r}"
        try:
            self.send(HEALTH)
            return self.read_response().status == 200
        except (Closed, ConnectionError):
            assert self._read == b"", f"unexpected data: {self._read[:200]!r}"
            return False


def received(wire: Wire) -> Message | None:
    """Read the next request on a backend's connection and check its format; None at the end."""
    if not wire._read and not wire.more():
        return None
    head = wire.head()
    assert _REQUEST.fullmatch(head.start), head.start
    assert len(head.all("host")) == 1
    assert head.all("transfer-encoding") == []
    [length] = head.all("content-length")
    assert length.isdecimal()
    return head._replace(body=wire.exactly(int(length)))


def post(body: object, path: bytes = CHAT, headers: Iterable[str] = (), version: bytes = b"1.1") -> bytes:
    """A POST request, as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = "".join(f"{line}\r\n" for line in headers).encode("latin-1")
    return b"POST %b HTTP/%b\r\nhost: gateway\r\n%bcontent-length: %d\r\n\r\n%b" % (
        path, version, lines, len(data), data
    )  # fmt: skip


def chat(*headers: str, model: str = "m", version: bytes = b"1.1", **fields: object) -> bytes:
    """A small chat request."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], **fields}
    return post(body, headers=headers, version=version)

"""HTTP as tests see it: answers and requests read strictly, without the product's own code, and raw client sockets."""

import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

PATIENCE_S = 20.0
"""A test that takes this long has failed."""

CHAT = b"/v1/chat/completions"
HEALTH = b"GET /health HTTP/1.1\r\nhost: gateway\r\n\r\n"

_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([\t\x20-\x7e\x80-\xff]*)")
_STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) ([\t\x20-\x7e]+)")
_REQUEST = re.compile(rb"([A-Z]+) (/[\x21-\x7e]*) HTTP/1\.1")


def wait_for(condition: Callable[[], object], what: str = "", patience_s: float = PATIENCE_S) -> None:
    """Poll until the condition is true; fail after a timeout."""
    until = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until, f"waited {patience_s:g} s for nothing{f': {what}' if what else ''}"
        time.sleep(0.002)


class Closed(Exception):
    """The other side has closed the connection where a message should come."""


class Message(NamedTuple):
    """A request or an answer."""

    start: bytes
    headers: list[tuple[bytes, bytes]]
    """Lower-cased names, in their order."""
    body: bytes = b""
    chunks: tuple[bytes, ...] = ()
    """Of a chunked body, as they came."""

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value.decode("latin-1") for known, value in self.headers if known == name.encode()]

    def header(self, name: str) -> str | None:
        """The value of a header that is there once or not at all."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} came {len(values)} times: {values}"
        return values[0] if values else None

    @property
    def status(self) -> int:
        return int(self.start.split(b" ")[1])

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in an answer, which must have the form of the OpenAI API."""
        assert self.header("content-type") == "application/json"
        told = self.json()
        assert told.keys() == {"error"}, told
        error: dict[str, Any] = told["error"]
        assert {"message", "type", "param", "code"} <= error.keys(), error
        assert isinstance(error["message"], str)
        assert error["message"]
        assert error["type"] in {
            "invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "server_error"
        }  # fmt: skip
        return error

    def events(self) -> list[bytes]:
        """The events of a stream, each without its end; the last must be whole."""
        *events, rest = self.body.replace(b"\r\n", b"\n").split(b"\n\n")
        assert rest == b"", f"the stream ends within an event: {rest!r}"
        return events


class Wire:
    """A socket, read message by message."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.socket.settimeout(PATIENCE_S)
        if self.socket.family == socket.AF_INET:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""

    def send(self, data: bytes, *, piece: int = 0) -> None:
        """Send, in pieces of this size if it is not 0."""
        for start in range(0, len(data), piece or len(data) or 1):
            self.socket.sendall(data[start : start + piece] if piece else data)

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Close with a reset instead of an end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()

    def finish_writing(self) -> None:
        """Close the writing side, and go on reading."""
        self.socket.shutdown(socket.SHUT_WR)

    # Reading

    def more(self) -> bool:
        """Read what comes next; False at the end."""
        try:
            data = self.socket.recv(256 * 1024)
        except (ConnectionError, ssl.SSLError):
            return False
        self._read += data
        return bool(data)

    def until(self, end: bytes) -> bytes:
        """Everything up to and including this."""
        while end not in self._read:
            if not self.more():
                raise Closed(f"closed after {self._read[:200]!r}")
        found = self._read.index(end) + len(end)
        taken, self._read = self._read[:found], self._read[found:]
        return taken

    def exactly(self, number: int) -> bytes:
        while len(self._read) < number:
            if not self.more():
                raise Closed(f"closed {number - len(self._read)} bytes too early")
        taken, self._read = self._read[:number], self._read[number:]
        return taken

    def rest(self) -> bytes:
        """Everything until the other side closes."""
        while self.more():
            pass
        taken, self._read = self._read, b""
        return taken

    def head(self) -> Message:
        """The head of a message."""
        start, *lines = self.until(b"\r\n\r\n")[:-4].split(b"\r\n")
        headers = []
        for line in lines:
            match = _LINE.fullmatch(line)
            assert match is not None, f"not a header: {line!r}"
            headers.append((match[1].lower(), match[2]))
        return Message(start, headers)

    def chunked(self) -> tuple[bytes, ...]:
        """The chunks of a body, up to its clean end."""
        chunks: list[bytes] = []
        while True:
            size = self.until(b"\r\n")[:-2]
            assert re.fullmatch(rb"[0-9a-fA-F]{1,8}", size), f"not the size of a chunk: {size!r}"
            if not int(size, 16):
                assert self.until(b"\r\n") == b"\r\n"
                return tuple(chunks)
            chunks.append(self.exactly(int(size, 16)))
            assert self.exactly(2) == b"\r\n"

    def is_closed(self) -> bool:
        """Whether the other side has closed the connection without sending more; waits for either."""
        assert self._read == b"", f"more came: {self._read[:200]!r}"
        came = self.more()
        assert self._read == b"", f"more came: {self._read[:200]!r}"
        return not came


class Client(Wire):
    """A client's connection to the gateway."""

    def answer(self, *, to_head: bool = False) -> Message:
        """The next answer. `to_head`: it has no body, whatever it says."""
        head = self.head()
        assert _STATUS.fullmatch(head.start), head.start
        lengths, codings = head.all("content-length"), head.all("transfer-encoding")
        assert len(lengths) + len(codings) <= 1, f"it is framed twice: {head.headers}"
        if to_head or head.status < 200 or head.status in (204, 304):
            return head
        if codings:
            assert codings == ["chunked"]
            chunks = self.chunked()
            return head._replace(body=b"".join(chunks), chunks=chunks)
        if lengths:
            assert lengths[0].isdecimal()
            return head._replace(body=self.exactly(int(lengths[0])))
        assert head.header("connection") == "close", f"nothing says where it ends: {head.headers}"
        return head._replace(body=self.rest())

    def ask(self, request: bytes) -> Message:
        """Send a request and read its answer."""
        self.send(request)
        return self.answer()

    def stays_open(self) -> bool:
        """Whether another request is answered on this connection."""
        assert self._read == b"", f"more came: {self._read[:200]!r}"
        try:
            self.send(HEALTH)
            return self.answer().status == 200
        except (Closed, ConnectionError):
            assert self._read == b"", f"more came: {self._read[:200]!r}"
            return False


def received(wire: Wire) -> Message | None:
    """The next request on a backend's connection, which must be valid; None at the end."""
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
    """A request for an answer of a model, as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = "".join(f"{line}\r\n" for line in headers).encode("latin-1")
    return b"POST %b HTTP/%b\r\nhost: gateway\r\n%bcontent-length: %d\r\n\r\n%b" % (
        path, version, lines, len(data), data
    )  # fmt: skip


def chat(*headers: str, model: str = "m", version: bytes = b"1.1", **fields: object) -> bytes:
    """A small chat request."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], **fields}
    return post(body, headers=headers, version=version)

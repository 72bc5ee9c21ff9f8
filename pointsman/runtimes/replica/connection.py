"""HTTP/1.1 on one connection: bytes in, requests out; answers in, bytes out. One request is answered at a time."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

JSON = "application/json"
PHRASES = {
    200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 422: "Unprocessable Content",
    500: "Internal Server Error", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip
READ_AHEAD = 16
"""Requests that may wait behind the one that is being answered."""
SECRET = b"x-pointsman-secret"


class Exchange:
    """One request, and the way its answer takes."""

    __slots__ = ("_keep_alive", "body", "connection", "gone", "method", "path", "secret")

    def __init__(
        self, connection: "Connection", method: bytes, path: bytes, secret: bytes, body: bytes, keep_alive: bool
    ) -> None:
        self.connection = connection
        self.method = method
        self.path = path
        self.secret = secret
        self.body = body
        self.gone: Callable[[], None] | None = None
        """Called if the client goes away before the answer has ended."""
        self._keep_alive = keep_alive

    def respond(self, status: int, body: bytes, kind: str = JSON) -> None:
        """The whole answer."""
        self.connection.write(self._head(status, f"content-type: {kind}\r\ncontent-length: {len(body)}\r\n") + body)
        self._end()

    def open_stream(self, kind: str) -> None:
        """The head of an answer that comes in pieces: whoever passes them on need not wait for the last."""
        framing = "transfer-encoding: chunked\r\nx-pointsman-pieces: 1\r\n"
        self.connection.write(self._head(200, f"content-type: {kind}\r\n{framing}"))

    def add(self, piece: bytes) -> None:
        if piece:  # an empty one would be the end
            self.connection.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end_stream(self, piece: bytes = b"") -> None:
        self.add(piece)
        self.connection.write(b"0\r\n\r\n")
        self._end()

    def cut(self) -> None:
        """The rest will not come: whoever reads must see that it is missing."""
        self._end(cut=True)

    def hang_up(self) -> None:
        """The connection is not used for another request."""
        self._keep_alive = False

    def _end(self, *, cut: bool = False) -> None:
        self.gone = None
        self.connection.answered(self._keep_alive and not cut)

    def _head(self, status: int, headers: str) -> bytes:
        close = "" if self._keep_alive else "connection: close\r\n"
        return f"HTTP/1.1 {status} {PHRASES.get(status, 'Error')}\r\n{headers}{close}\r\n".encode("latin-1")


class Connection(asyncio.Protocol):
    """One client: the gateway, or whoever probes."""

    def __init__(self, handle: Callable[[Exchange], None], open_ones: set["Connection"]) -> None:
        self._handle = handle
        self._open_ones = open_ones
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._behind: deque[Exchange] = deque()
        self._url = b""
        self._secret = b""
        self._body: list[bytes] = []
        self._room: asyncio.Event | None = None
        """Set while what was written fits into the buffers; None: it always has."""

    @property
    def is_full(self) -> bool:
        """Whether the client is slower than we are."""
        return self._room is not None and not self._room.is_set()

    async def room(self) -> None:
        """Wait until the client has read some of what was written, or is gone."""
        if self._room is not None:
            await self._room.wait()

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass of it
        self._open_ones.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._open_ones.discard(self)
        self._behind.clear()
        self.resume_writing()
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange.gone is not None:
            exchange.gone()

    def pause_writing(self) -> None:
        self._room = self._room or asyncio.Event()
        self._room.clear()

    def resume_writing(self) -> None:
        if self._room is not None:
            self._room.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.close()
        except httptools.HttpParserError:
            self.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.close()

    # What the parser calls

    def on_message_begin(self) -> None:
        self._url = self._secret = b""
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == SECRET:
            self._secret = value
        elif lowered == b"expect" and value.lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        path = self._url.partition(b"?")[0]
        exchange = Exchange(self, self._parser.get_method(), path, self._secret, body, self._parser.should_keep_alive())
        self._body = []
        if self._exchange is not None:
            self._behind.append(exchange)
            if len(self._behind) >= READ_AHEAD and self._transport is not None:
                self._transport.pause_reading()
            return
        self._begin(exchange)

    # What exchanges and the server do

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def answered(self, keep_alive: bool) -> None:
        """The exchange has ended; on with the next one."""
        self._exchange = None
        if not keep_alive:
            self.close()
        elif self._behind:
            if self._transport is not None:
                self._transport.resume_reading()
            self._begin(self._behind.popleft())

    def close(self) -> None:
        """No more from us: what was written still arrives."""
        if self._transport is not None:
            self._transport.close()

    def _begin(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._handle(exchange)

"""HTTP/1.1 on one connection: bytes in, requests out; answers in, bytes out. One request is answered at a time."""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

PHRASES = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests", 500: "Internal Server Error"}
READ_AHEAD = 16
"""Requests that may wait behind the one that is being answered."""


class Exchange:
    """One request, and the way its answer takes."""

    def __init__(self, connection: "Connection", method: str, path: str, body: bytes, keep_alive: bool) -> None:
        self.connection = connection
        self.method = method
        self.path = path
        self.body = body
        self.gone: Callable[[], None] | None = None
        """Called if the client goes away before the answer has ended."""
        self._keep_alive = keep_alive
        self._pieces: list[bytes] = []

    def respond(self, status: int, body: bytes, kind: str = "application/json", length: int | None = None) -> None:
        """The whole answer. `length`: what the head says of it, if that is not to be true."""
        said = len(body) if length is None else length
        self.connection.write(self._head(status, f"content-type: {kind}\r\ncontent-length: {said}\r\n") + body)
        self.end()

    def open_stream(self) -> None:
        """The head of an answer that comes in pieces."""
        kind = "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
        self.connection.write(self._head(200, kind))

    def add(self, piece: bytes) -> None:
        """A piece of a stream; it leaves with the next `flush`."""
        if piece:  # an empty one would be the end
            self._pieces.append(b"%x\r\n%b\r\n" % (len(piece), piece))

    def flush(self) -> None:
        if self._pieces:
            self.connection.write(b"".join(self._pieces))
            self._pieces.clear()

    def end_stream(self) -> None:
        self._pieces.append(b"0\r\n\r\n")
        self.flush()
        self.end()

    def end(self) -> None:
        """The answer is complete."""
        self.connection.answered(self._keep_alive)

    def _head(self, status: int, headers: str) -> bytes:
        close = "" if self._keep_alive else "connection: close\r\n"
        return f"HTTP/1.1 {status} {PHRASES.get(status, 'Error')}\r\n{headers}{close}\r\n".encode()


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, handle: Callable[[Exchange], None], open_ones: set["Connection"]) -> None:
        self._handle = handle
        self._open_ones = open_ones
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._behind: deque[Exchange] = deque()
        self._url = b""
        self._body: list[bytes] = []

    @property
    def is_idle(self) -> bool:
        return self._exchange is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass of it
        self._open_ones.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._open_ones.discard(self)
        self._behind.clear()
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange.gone is not None:
            exchange.gone()

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
        self._url = b""
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode("latin-1")
        path = self._url.partition(b"?")[0].decode("latin-1")
        exchange = Exchange(self, method, path, b"".join(self._body), self._parser.should_keep_alive())
        if self._exchange is not None:
            self._behind.append(exchange)
            if len(self._behind) >= READ_AHEAD and self._transport is not None:
                self._transport.pause_reading()
            return
        self._begin(exchange)

    # What exchanges and faults do

    def write(self, data: bytes) -> None:
        if data and self._transport is not None:
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

    def reset(self) -> None:
        """As if the machine had died: the client sees a reset."""
        if self._transport is not None:
            end: socket.socket = self._transport.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def _begin(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._handle(exchange)

"""HTTP/1.1 on one connection: bytes in, requests out; answers in, bytes out. One request is answered at a time.

For servers of ours that answer the gateway and whoever probes: replicas and simulated engines. Strangers, who must be
bounded in everything, are the gateway's own matter.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from typing import cast

import httptools

JSON = "application/json"
PHRASES = {status.value: status.phrase for status in HTTPStatus}
READ_AHEAD = 16
"""Requests that may wait behind the one that is being answered."""


class ServerExchange:
    """One request, and the way its answer takes."""

    __slots__ = ("_held", "_keep_alive", "body", "connection", "gone", "headers", "method", "path")

    def __init__(
        self,
        connection: "Connection",
        method: bytes,
        path: bytes,
        headers: dict[bytes, bytes],
        body: bytes,
        keep_alive: bool,
    ) -> None:
        self.connection = connection
        self.method = method
        self.path = path
        self.headers = headers
        """By lower-cased name."""
        self.body = body
        self.gone: Callable[[], None] | None = None
        """Called if the client goes away before the answer has ended."""
        self._keep_alive = keep_alive
        self._held = b""

    @property
    def asked(self) -> str:
        """What is asked for, in words."""
        return (b"%b %b" % (self.method, self.path)).decode("latin-1")

    def respond(self, status: int, body: bytes, kind: str = JSON) -> None:
        """The whole answer."""
        head = _head(status, kind, self._keep_alive)
        self.connection.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self.end()

    def open_stream(self, kind: str, lines: bytes = b"") -> None:
        """The head of an answer that comes in pieces; `lines`: headers of its own, each with its end."""
        head = _head(200, kind, self._keep_alive)
        self.connection.write(b"%btransfer-encoding: chunked\r\n%b\r\n" % (head, lines))

    def add(self, piece: bytes) -> None:
        """A piece of a stream."""
        if piece:  # an empty one would be the end
            self.connection.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def hold(self, piece: bytes) -> None:
        """A piece of a stream that leaves with the next `flush`, or with the end."""
        if piece:
            self._held += b"%x\r\n%b\r\n" % (len(piece), piece)

    def flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self.connection.write(held)

    def end_stream(self, piece: bytes = b"") -> None:
        """The last piece, and the end."""
        self.hold(piece)
        self._held += b"0\r\n\r\n"
        self.flush()
        self.end()

    def end(self) -> None:
        """The answer is complete."""
        self.gone = None
        self.connection.answered(self._keep_alive)

    def cut(self) -> None:
        """The rest will not come: whoever reads must see that it is missing."""
        self.hang_up()
        self.end()

    def hang_up(self) -> None:
        """The connection is not used for another request."""
        self._keep_alive = False


@lru_cache(maxsize=64)
def _head(status: int, kind: str, keep_alive: bool) -> bytes:
    """All but how long the answer is: the same again and again."""
    close = "" if keep_alive else "connection: close\r\n"
    return f"HTTP/1.1 {status} {PHRASES.get(status, 'Error')}\r\ncontent-type: {kind}\r\n{close}".encode("latin-1")


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, handle: Callable[[ServerExchange], None], open_ones: set["Connection"]) -> None:
        self._handle = handle
        self._open_ones = open_ones
        self._parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport | None = None
        self._exchange: ServerExchange | None = None
        self._behind: deque[ServerExchange] = deque()
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._room: asyncio.Event | None = None
        """Set while what was written fits into the buffers; None: it always has."""

    @property
    def is_idle(self) -> bool:
        return self._exchange is None

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
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass of it
        self._open_ones.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
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

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        parser, path, headers = self._parser, self._url.partition(b"?")[0], self._headers
        body = b"".join(self._body)
        self._url, self._headers, self._body = b"", {}, []
        exchange = ServerExchange(self, parser.get_method(), path, headers, body, parser.should_keep_alive())
        if self._exchange is not None:
            self._behind.append(exchange)
            if len(self._behind) >= READ_AHEAD and self.transport is not None:
                self.transport.pause_reading()
            return
        self._begin(exchange)

    # What exchanges and servers do

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def answered(self, keep_alive: bool) -> None:
        """The exchange has ended; on with the next one."""
        self._exchange = None
        if not keep_alive:
            self.close()
        elif self._behind:
            if self.transport is not None:
                self.transport.resume_reading()
            self._begin(self._behind.popleft())

    def close(self) -> None:
        """No more from us: what was written still arrives."""
        if self.transport is not None:
            self.transport.close()

    def _begin(self, exchange: ServerExchange) -> None:
        self._exchange = exchange
        self._handle(exchange)


async def listen(
    host: str, port: int, handle: Callable[[ServerExchange], None], open_ones: set[Connection]
) -> tuple[asyncio.Server, int]:
    """Take connections: who does, and the port that was taken."""
    # Given a name, the loop would look it up in a thread, and a thread is a megabyte.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=1024)
    taken: int = listening.getsockname()[1]
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Connection(handle, open_ones), sock=listening), taken

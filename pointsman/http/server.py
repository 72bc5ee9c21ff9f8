"""The server side of HTTP/1.1: connections, and answers whole or in pieces. One request is answered at a time.

Enters: bytes from clients; answers. Leaves: requests, to the server that the connection belongs to; bytes. The one
rule: a connection reads one request per turn of the loop, and only after the request ahead of it is answered. Every
request is answered once.
"""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol, cast

from pointsman.http.buffers import READ_BYTES, BufferBudget
from pointsman.http.heads import HttpRequest, RequestLimits
from pointsman.http.parser import RequestParser
from pointsman.http.pool import Outbox
from pointsman.http.responses import TURN_BYTES

NEVER = float("inf")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
KEEP_ALIVE = b"connection: keep-alive\r\n"
"""Header for clients that speak HTTP/1.0. Later versions keep the connection by default."""
CLOSE = b"connection: close\r\n"
JSON = b"application/json"
RETRY_SOON = b"retry-after: 1\r\n"
LINGER_S = 2.0
"""How long a client may continue to send a request that was refused. This gives it time to read the reason."""
REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class ConnectionLimits(RequestLimits, Protocol):
    """Limits for clients; times in seconds."""

    @property
    def header_timeout(self) -> float: ...

    @property
    def body_timeout(self) -> float: ...

    @property
    def idle_timeout(self) -> float: ...

    @property
    def write_timeout(self) -> float: ...


class ConnectionOwner(Protocol):
    """The server that a connection belongs to."""

    draining: bool
    """Whether connections are closed after their current answer."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def outbox(self) -> Outbox: ...

    @property
    def limits(self) -> ConnectionLimits: ...

    @property
    def buffered(self) -> BufferBudget: ...

    def connected(self, connection: Any) -> bool:
        """Whether to accept this new connection, which is of the class that the owner creates."""

    def disconnected(self, connection: Any) -> None: ...

    def check(self, connection: Any, request: HttpRequest) -> None:
        """Check the head of a request whose body has not arrived. If the request will not be served, answer it now,
        which closes the connection."""

    def serve(self, connection: Any, request: HttpRequest) -> None:
        """Answer a request, now or later."""

    def refusal(self, status: int, message: str) -> bytes:
        """The body of the answer to a request that could not be read."""


class RequestHandler(Protocol):
    """Answers a request asynchronously."""

    def abandon(self) -> None:
        """The client has disconnected: give up the answer."""

    def pause(self) -> None:
        """The client does not read fast enough."""

    def resume(self) -> None: ...


class ServerConnection(asyncio.BufferedProtocol):
    __slots__ = (
        "_awaits_body", "_charged", "_stopped_reading", "_unread", "deadline", "idle_since", "owner", "parser",
        "paused", "request", "serving", "transport",
    )  # fmt: skip

    transport: asyncio.Transport

    def __init__(self, owner: ConnectionOwner) -> None:
        self.owner = owner
        self.serving: RequestHandler | None = None
        self.request: HttpRequest | None = None
        """The request that is being answered."""
        self.deadline = NEVER
        """When the client times out; the owner checks it."""
        self.idle_since = 0.0
        """When the last answer ended, or the connection was opened."""
        self.paused = False
        """Whether the client does not read what was written."""
        self.parser = RequestParser(self, owner)
        self._awaits_body: bool | None = None
        """True if the deadline is for the body of a request, False if it is for the head, None if for neither."""
        self._charged = 0
        """Bytes of an incomplete body, which count towards the owner's limit."""
        self._unread = 0
        """Bytes that were received ahead of their turn, which count towards that limit as well."""
        self._stopped_reading = False

    @property
    def is_free(self) -> bool:
        """Whether no request is being answered, and the client reads its answers."""
        return self.request is None and not self.paused

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # transports of other loops only behave like one
        self.idle_since = time.monotonic()
        self.deadline = self.idle_since + self.owner.limits.header_timeout
        if not self.owner.connected(self):
            self.turn_away(503, "too many connections; try again later", RETRY_SOON)

    def connection_lost(self, error: Exception | None) -> None:
        self.owner.disconnected(self)
        self.parser.close()
        self._forget_body()
        self._let_go()
        serving, self.serving = self.serving, None
        if serving is not None:
            serving.abandon()

    def pause_writing(self) -> None:
        self.paused = True
        self.deadline = time.monotonic() + self.owner.limits.write_timeout
        if self.serving is not None:
            self.serving.pause()

    def resume_writing(self) -> None:
        self.paused = False
        if self.parser.closed and self.request is None:
            return  # the last bytes are being sent; the deadline of the end applies
        self.deadline = NEVER
        if self.serving is not None:
            self.serving.resume()
        elif self.request is None:
            self._next()

    def get_buffer(self, sizehint: int) -> memoryview:
        space = self.parser.space
        return self.owner.buffered.scratch if space is None else space

    def buffer_updated(self, nbytes: int) -> None:
        parser = self.parser
        if parser.space is None:
            parser.feed(bytes(self.owner.buffered.scratch[:nbytes]))
            if parser.unread:
                self._hold_unread()
            is_enough = nbytes == READ_BYTES and parser.space is None
        else:
            parser.filled(nbytes)
            is_enough = nbytes == TURN_BYTES
        if is_enough:  # otherwise the loop would continue to read, and other clients would wait
            self._let_read(on=False)
            self.owner.loop.call_soon(self._let_read)

    def data_received(self, data: bytes) -> None:
        self.parser.feed(data)
        if self.parser.unread:
            self._hold_unread()

    def _let_read(self, *, on: bool = True) -> None:
        if not self._stopped_reading and not self.transport.is_closing():
            self.transport.resume_reading() if on else self.transport.pause_reading()

    # Called by the parser

    def head_read(self, request: HttpRequest) -> None:
        self.owner.check(self, request)

    def body_grew(self, request: HttpRequest, size: int) -> None:
        budget = self.owner.buffered
        self._charged += size
        budget.held += size
        if budget.is_exceeded:
            self.turn_away(503, "the gateway holds too many bytes of requests; try again later", RETRY_SOON)

    def request_read(self, request: HttpRequest) -> None:
        self._awaits_body = None
        self.deadline = NEVER
        request.charged, self._charged = self._charged, 0
        self.request = request
        try:
            self.owner.serve(self, request)
        except Exception as error:
            self.owner.loop.call_exception_handler({"message": "a request broke the server", "exception": error})
            self.transport.abort()

    def read_later(self) -> None:
        self.owner.loop.call_soon(self._read_on)

    def request_incomplete(self) -> None:
        """Set the deadline of a head, or of a body: each is set only once."""
        in_body = self.parser.in_body
        if self._awaits_body is not in_body:
            self._awaits_body = in_body
            self.deadline = time.monotonic() + self._timeout_s()

    def request_refused(self, status: int, message: str) -> None:
        self.turn_away(status, message)

    def continue_expected(self) -> None:
        self.write(CONTINUE)

    # Answering

    def write(self, data: bytes) -> None:
        self.owner.outbox.write(self.transport, data)

    def respond(self, status: int, body: bytes, lines: bytes, reason: bytes = b"") -> None:
        """Answer the current request. `lines`: header lines, each with its end."""
        request, owner = self.request, self.owner
        close = request is None or not request.keep_alive or owner.draining
        framing = b"" if status in (204, 304) else b"content-length: %d\r\n" % len(body)
        if close:
            framing += CLOSE
        elif request is not None and request.is_http_1_0:
            framing += KEEP_ALIVE
        if request is not None and request.method == b"HEAD":
            body = b""
        head = (status, reason or REASONS.get(status, b"Unknown"), lines, framing, body)
        owner.outbox.write(self.transport, b"HTTP/1.1 %d %b\r\n%b%b\r\n%b" % head)
        self.answered(close=close)

    def answer(self, status: int, body: bytes, content_type: bytes = JSON, lines: bytes = b"") -> None:
        """Answer the current request with a body of this type."""
        self.respond(status, body, b"content-type: %b\r\n%b" % (content_type, lines))

    def answered(self, *, close: bool) -> None:
        """Finish the current request, and go on to the next one."""
        self._let_go()
        self.serving = None
        if close:
            self.close(linger=self.parser.in_body)
        elif not self.paused:  # a client that does not read its answers gets no further ones
            self._next()

    def _let_go(self) -> None:
        """Release the memory of the current request."""
        request, self.request = self.request, None
        if request is not None and request.charged:
            self.owner.buffered.held -= request.charged
            request.charged = 0

    def _forget_body(self) -> None:
        """Drop everything that was received and not answered."""
        self.owner.buffered.held -= self._charged + self._unread
        self._charged = self._unread = 0

    def _next(self) -> None:
        self.idle_since = now = time.monotonic()
        if self.parser.rest():
            self.deadline = now + self.owner.limits.idle_timeout
            return
        self.deadline = now + self._timeout_s()
        if self.parser.unread:
            # Do not answer from here: a client that sends many requests at once gets one answer per turn of the loop.
            self.owner.loop.call_soon(self._read_on)
        else:
            self.parser.read_on()

    def _read_on(self) -> None:
        if self.request is None and not self.paused and not self.transport.is_closing():
            self.parser.read_on()
            self._hold_unread()

    def _hold_unread(self) -> None:
        """Count the bytes that were received ahead of their turn, and read no more of them than the server can hold."""
        unread, budget = self.parser.unread, self.owner.buffered
        budget.held += unread - self._unread
        self._unread = unread
        if unread and budget.is_exceeded:
            self._drop_unread()
        is_much = unread > self.owner.limits.max_header_bytes
        if is_much is not self._stopped_reading and not self.transport.is_closing():
            self._stopped_reading = is_much
            self.transport.pause_reading() if is_much else self.transport.resume_reading()

    def _drop_unread(self) -> None:
        """Close the connection, because there is no memory for requests that wait for their turn."""
        self.parser.close()
        self.owner.buffered.held -= self._unread
        self._unread = 0
        if self.request is None:
            self.close()
        else:
            self.request.keep_alive = False

    def _timeout_s(self) -> float:
        """How long the client may take for what it does now."""
        limits, parser = self.owner.limits, self.parser
        before_body = limits.header_timeout if parser.in_head else limits.idle_timeout
        return limits.body_timeout if parser.in_body else before_body

    # The end

    def turn_away(self, status: int, message: str, lines: bytes = b"") -> None:
        """Answer and close the connection, although a request was not read to its end, or there is none at all."""
        body = self.owner.refusal(status, message)
        head = (status, REASONS.get(status, b"Unknown"), JSON, len(body), lines + CLOSE, body)
        self.write(b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % head)
        self.close(linger=self.parser.is_in_request)

    def close(self, *, linger: bool = False) -> None:
        """Close once everything is written. `linger`: more of a request may still come. Closing a connection with
        unread bytes resets it, and the reset may overtake the answer. So only our side is closed, and further bytes are
        discarded for a while."""
        self.parser.close()
        self._forget_body()
        self.owner.outbox.flush()
        if linger and self.transport.can_write_eof():
            self.deadline = time.monotonic() + LINGER_S
            self.transport.write_eof()
            return
        self.deadline = time.monotonic() + self.owner.limits.write_timeout
        self.transport.close()

    def abort(self) -> None:
        """Close at once: an answer that has begun stays incomplete."""
        self.serving = None
        self.transport.abort()

    def timed_out(self) -> None:
        self.deadline = NEVER
        if self.paused or self.parser.closed:
            self.transport.abort()
        elif self.parser.is_in_request:
            self.turn_away(408, "the request did not arrive in time")
        else:
            self.close()

    def drain(self) -> None:
        """Take no more requests; the current one is answered."""
        if self.is_free and not self.parser.is_in_request:
            self.close()


class ResponseStream:
    """The answer to the current request of a connection, in pieces."""

    __slots__ = ("_connection", "_held", "_request", "_transport", "_write", "is_chunked", "is_framed")

    def __init__(
        self,
        connection: ServerConnection,
        lines: bytes,
        first: bytes = b"",
        *,
        status: int = 200,
        reason: bytes = b"OK",
        length: int | None = None,
    ) -> None:
        """Send the head and the first piece. `lines`: header lines, each with its line end. `length`: the length of the
        body, if it is known."""
        request = connection.request
        assert request is not None
        self._connection = connection
        self._write, self._transport = connection.owner.outbox.write, connection.transport
        self._request = request
        self._held = b""
        self.is_chunked = length is None and not request.is_http_1_0
        self.is_framed = self.is_chunked or length is not None
        """Whether the client can find the end of the answer before the connection ends."""
        framing = b"transfer-encoding: chunked\r\n" if self.is_chunked else b""
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        if not self._stays:
            framing += CLOSE
        elif request.is_http_1_0:
            framing += KEEP_ALIVE
        connection.write(b"HTTP/1.1 %d %b\r\n%b%b\r\n%b" % (status, reason, lines, framing, self._framed(first)))

    @property
    def _stays(self) -> bool:
        """Whether the connection stays open after this answer."""
        return self._request.keep_alive and not self._connection.owner.draining and self.is_framed

    def _framed(self, piece: bytes) -> bytes:
        if not self.is_chunked:
            return piece
        return b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""  # an empty chunk would be the end

    def write(self, piece: bytes) -> None:
        if piece:
            self._write(self._transport, b"%x\r\n%b\r\n" % (len(piece), piece) if self.is_chunked else piece)

    def hold(self, piece: bytes) -> None:
        """Send a piece with the next `flush`, or with the end."""
        self._held += self._framed(piece)

    def flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._connection.write(held)

    def end(self, piece: bytes = b"", trailers: bytes = b"") -> None:
        """Send the last piece, and the end. `trailers`: lines after the last chunk, each with its end; only for chunked
        answers."""
        self._held += self._framed(piece)
        if self.is_chunked:
            self._held += b"0\r\n%b\r\n" % trailers if trailers else LAST_CHUNK
        self.flush()
        self._connection.answered(close=not self._stays)

    def cut(self) -> None:
        """Close the connection without the end of the answer, so that the client sees that the end is missing."""
        self.flush()
        self._connection.answered(close=True)


class OwnLimits(NamedTuple):
    """Limits of servers whose clients belong to the plane: they are large, and no timeout is enforced."""

    max_header_bytes: int = 64 * 1024
    max_headers: int = 1000
    max_body_bytes: int = 1 << 40
    max_chunks: int = 1 << 40
    header_timeout: float = NEVER
    body_timeout: float = NEVER
    idle_timeout: float = NEVER
    write_timeout: float = NEVER


class HttpServer:
    """The server of a replica, or of a simulated engine."""

    def __init__(self, serve: Callable[[ServerConnection, HttpRequest], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.outbox = Outbox(self.loop, ())
        self.limits = OwnLimits()
        self.buffered = BufferBudget()
        self.draining = False
        self.serve = serve
        self.connections: set[ServerConnection] = set()
        self._listener: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Accept connections. Returns the port, a free one if `port` is 0."""
        # If the loop got a name, it would look the name up in a thread, and a thread costs a megabyte.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024)
        taken: int = listening.getsockname()[1]
        self._listener = await self.loop.create_server(lambda: ServerConnection(self), sock=listening)
        return taken

    @property
    def is_listening(self) -> bool:
        return self._listener is not None

    def stop_listening(self) -> None:
        """Accept no more connections. Open connections stay open."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def connected(self, connection: ServerConnection) -> bool:
        self.connections.add(connection)
        return True

    def disconnected(self, connection: ServerConnection) -> None:
        self.connections.discard(connection)

    def check(self, connection: ServerConnection, request: HttpRequest) -> None: ...

    def refusal(self, status: int, message: str) -> bytes:
        return json.dumps({"error": {"message": message, "code": status}}).encode()

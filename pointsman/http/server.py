"""The server side of HTTP/1.1: connections, and answers whole or in pieces. One request is answered at a time.

Enters: bytes of clients; answers. Leaves: requests, to the server that the connection belongs to; bytes. The one rule:
requests that arrive before the one ahead of them is answered wait their turn, and every request is answered once.
"""

import asyncio
import json
import socket
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol, cast

from pointsman.http.parser import HttpRequest, RequestLimits, RequestParser
from pointsman.http.pool import Outbox

NEVER = float("inf")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
KEEP_ALIVE = b"connection: keep-alive\r\n"
"""For clients of HTTP/1.0; later versions take it for granted."""
CLOSE = b"connection: close\r\n"
JSON = b"application/json"
LINGER_S = 2.0
"""How long a client whose request was refused may go on sending it, so that it gets to read why."""
REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class ConnectionLimits(RequestLimits, Protocol):
    """What clients may do; times in seconds."""

    @property
    def max_pipelined(self) -> int: ...

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
    """Connections are closed after the answer that is being given."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def outbox(self) -> Outbox: ...

    @property
    def limits(self) -> ConnectionLimits: ...

    def connected(self, connection: Any) -> bool:
        """Whether a new connection is accepted. Connections are of the kind that the owner makes."""

    def disconnected(self, connection: Any) -> None: ...

    def serve(self, connection: Any, request: HttpRequest) -> None:
        """Answer a request, now or later."""

    def refusal(self, status: int, message: str) -> bytes:
        """The body of the answer to a request that could not be read."""


class RequestHandler(Protocol):
    """What answers a request that takes its time."""

    def abandon(self) -> None:
        """The client has disconnected: no answer is wanted."""

    def pause(self) -> None:
        """The client does not read fast enough."""

    def resume(self) -> None: ...


class ServerConnection(asyncio.Protocol):
    __slots__ = (
        "_awaits_body", "_owes_continue", "_queue", "_stopped_reading", "deadline", "owner", "parser", "paused",
        "request", "serving", "transport",
    )  # fmt: skip

    transport: asyncio.Transport

    def __init__(self, owner: ConnectionOwner) -> None:
        self.owner = owner
        self.serving: RequestHandler | None = None
        self.request: HttpRequest | None = None
        """The one that is being answered."""
        self.deadline = NEVER
        """When the client times out; the owner looks."""
        self.paused = False
        """The client does not read what was written."""
        self.parser = RequestParser(self, owner)
        self._queue: deque[HttpRequest | tuple[int, str]] = deque()
        """Requests that wait for their turn; last, perhaps, status and message of a refusal."""
        self._awaits_body: bool | None = None
        """What the deadline is for: the body or the head of a request; None if neither."""
        self._owes_continue = False
        self._stopped_reading = False

    @property
    def is_free(self) -> bool:
        """Whether no request is being answered or waits for its turn, and the client reads its answers."""
        return self.request is None and not self._queue and not self.paused

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # transports of other loops only act like one
        self.deadline = time.monotonic() + self.owner.limits.header_timeout
        if not self.owner.connected(self):
            self.parser.close()
            self.request_refused(503, "too many connections; try again later")

    def connection_lost(self, error: Exception | None) -> None:
        self.owner.disconnected(self)
        self.parser.close()
        self._queue.clear()
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
        if self.parser.closed and self.request is None and not self._queue:
            return  # the last bytes are on their way; the deadline of the end holds
        self.deadline = NEVER
        if self.serving is not None:
            self.serving.resume()
        elif self.request is None:
            self._next()

    def data_received(self, data: bytes) -> None:
        self.parser.feed(data)

    # Called by the parser

    def request_read(self, request: HttpRequest) -> None:
        """Serve it now, or when its turn comes."""
        self._awaits_body = None
        self._owes_continue = False
        if self.request is None and not self._queue and not self.paused:
            self.deadline = NEVER
            self.request = request
            self.owner.serve(self, request)
        else:
            self._queue.append(request)
            if len(self._queue) >= self.owner.limits.max_pipelined and not self._stopped_reading:
                self._stopped_reading = True
                self.transport.pause_reading()

    def request_incomplete(self) -> None:
        """The timeout of a head, and that of a body, begin once."""
        in_body = self.parser.in_body
        if self._awaits_body is not in_body:
            self._awaits_body = in_body
            if self.is_free and not self.parser.closed:
                self.deadline = time.monotonic() + self._timeout_s()

    def request_refused(self, status: int, message: str) -> None:
        """The refusal goes out after the answers to the requests before."""
        if self.is_free:
            self._refuse(status, message)
        else:
            self._queue.append((status, message))

    def continue_expected(self) -> None:
        if self.is_free:
            self.write(CONTINUE)
        else:
            self._owes_continue = True

    def request_raised(self, error: Exception) -> None:
        self.owner.loop.call_exception_handler({"message": "a request broke the server", "exception": error})
        self.transport.abort()

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
        """The current request is answered; the next one's turn comes."""
        self.serving = self.request = None
        if close:
            self.close()
        elif not self.paused:  # a client that does not read its answers gets no more of them
            self._next()

    def _next(self) -> None:
        if not self._queue:
            self.deadline = time.monotonic() + self._timeout_s()
            if self._owes_continue:
                self._owes_continue = False
                self.write(CONTINUE)
            return
        following = self._queue.popleft()
        if self._stopped_reading and len(self._queue) <= self.owner.limits.max_pipelined // 2:
            self._stopped_reading = False
            if not self.transport.is_closing():
                self.transport.resume_reading()
        if isinstance(following, tuple):
            self._refuse(*following)
        else:
            # Not from here: a long row of quick answers would nest without end.
            self.request = following
            self.owner.loop.call_soon(self._serve_if_open, following)

    def _serve_if_open(self, request: HttpRequest) -> None:
        if self.paused:  # by the answer before; the turn of this request comes when the client reads again
            self.request = None
            self._queue.appendleft(request)
        elif not self.transport.is_closing():
            self.deadline = NEVER
            self.owner.serve(self, request)

    def _timeout_s(self) -> float:
        """How long the client may take for what it does now."""
        limits, parser = self.owner.limits, self.parser
        return (
            limits.body_timeout if parser.in_body else limits.header_timeout if parser.in_head else limits.idle_timeout
        )

    # The end

    def _refuse(self, status: int, message: str) -> None:
        body = self.owner.refusal(status, message)
        head = (status, REASONS.get(status, b"Unknown"), JSON, len(body), CLOSE, body)
        self.write(b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % head)
        self.close(linger=self.parser.is_in_request)

    def close(self, *, linger: bool = False) -> None:
        """Close once everything is written. `linger`: more of a request may be coming. A connection that is closed with
        unread bytes is reset, which may overtake the answer; so only our side is closed, and what comes is discarded
        for a while."""
        self.parser.close()
        self._queue.clear()
        self.owner.outbox.flush()
        if linger and self.transport.can_write_eof():
            self.deadline = time.monotonic() + LINGER_S
            self.transport.write_eof()
            return
        self.deadline = time.monotonic() + self.owner.limits.write_timeout
        self.transport.close()

    def abort(self) -> None:
        """Close at once: the answer that has begun will not end."""
        self.serving = None
        self.transport.abort()

    def timed_out(self) -> None:
        self.deadline = NEVER
        if self.paused or self.parser.closed:
            self.transport.abort()
        elif self.parser.is_in_request:
            self.parser.close()
            self.request_refused(408, "the request did not arrive in time")
        else:
            self.close()

    def drain(self) -> None:
        """Take no more requests; the current one is answered."""
        if self.is_free and not self.parser.is_in_request:
            self.close()


class ResponseStream:
    """The answer to the current request of a connection, in pieces."""

    __slots__ = ("_connection", "_held", "_request", "is_chunked", "is_framed")

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
        """Send the head and the first piece. `lines`: header lines, each with its end; `length`: of the body, if it is
        known."""
        request = connection.request
        assert request is not None
        self._connection = connection
        self._request = request
        self._held = b""
        self.is_chunked = length is None and not request.is_http_1_0
        self.is_framed = self.is_chunked or length is not None
        """The client can tell where the answer ends without the end of the connection."""
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
            self._connection.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.is_chunked else piece)

    def hold(self, piece: bytes) -> None:
        """Send a piece with the next `flush`, or with the end."""
        self._held += self._framed(piece)

    def flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._connection.write(held)

    def end(self, piece: bytes = b"") -> None:
        """Send the last piece, and the end."""
        self._held += self._framed(piece)
        if self.is_chunked:
            self._held += LAST_CHUNK
        self.flush()
        self._connection.answered(close=not self._stays)

    def cut(self) -> None:
        """Close the connection without the end of the answer: the client must see that it is missing."""
        self.flush()
        self._connection.answered(close=True)


class OwnLimits(NamedTuple):
    """For servers whose clients belong to the plane: large, and no timeout is enforced."""

    max_header_bytes: int = 64 * 1024
    max_body_bytes: int = 1 << 40
    max_pipelined: int = 16
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
        self.draining = False
        self.serve = serve
        self.connections: set[ServerConnection] = set()
        self._listener: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Accept connections. Returns the port, a free one if `port` is 0."""
        # Given a name, the loop would look it up in a thread, and a thread is a megabyte.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024)
        taken: int = listening.getsockname()[1]
        self._listener = await self.loop.create_server(lambda: ServerConnection(self), sock=listening)
        return taken

    @property
    def is_listening(self) -> bool:
        return self._listener is not None

    def stop_listening(self) -> None:
        """Accept no more connections; those that are open stay."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def connected(self, connection: ServerConnection) -> bool:
        self.connections.add(connection)
        return True

    def disconnected(self, connection: ServerConnection) -> None:
        self.connections.discard(connection)

    def refusal(self, status: int, message: str) -> bytes:
        return json.dumps({"error": {"message": message, "code": status}}).encode()

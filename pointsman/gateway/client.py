"""Connections of clients: bytes in, requests out, answers back in order.

Clients are not trusted. The parser (llhttp, in its strict mode) refuses what could be read in two ways; sizes, times
and numbers are bounded here. Requests that come before the one ahead of them is answered wait their turn.
"""

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from pointsman.http.fast_parser import read_fast
from pointsman.http.heads import KEEP_ALIVE, error_body, error_kind, head_of
from pointsman.http.requests import COPIED_BYTES, Bytes, HttpRefused, HttpRequest
from pointsman.reasons import Reason

if TYPE_CHECKING:
    from pointsman.gateway.gateway import Gateway
    from pointsman.gateway.tenants import Keys, Tenant


# Requests of clients as they come off a connection.


NEVER = float("inf")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TINY_BYTES = 512
"""Pieces of a body shorter than this are put together as they come: a list of them would take many times their room."""
LINGER_S = 2.0
"""How long a client whose request was refused may go on sending it, so that it gets to read why."""
JSON = b"application/json"


class Service(Protocol):
    """A request that is being served."""

    def abandon(self) -> None:
        """Nobody waits for it any more: the client has gone."""

    def pause(self) -> None:
        """The client does not read fast enough."""

    def resume(self) -> None: ...


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_awaits_body",
        "_body",
        "_body_bytes",
        "_closing",
        "_gateway",
        "_head_bytes",
        "_in_body",
        "_in_head",
        "_owes_continue",
        "_parser",
        "_plain_left",
        "_queue",
        "_reading",
        "_reads_plain",
        "_stopped_reading",
        "deadline",
        "is_local",
        "key_memo",
        "paused",
        "request",
        "serving",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, gateway: "Gateway", *, is_local: bool = False) -> None:
        self._gateway = gateway
        self.is_local = is_local
        """It came over the socket in the state directory, whose owner may do anything."""
        self.serving: Service | None = None
        self.request: HttpRequest | None = None
        """The one that is being answered."""
        self.deadline = NEVER
        """When we lose patience with the client."""
        self.paused = False
        """The client does not read what we write."""
        self.key_memo: tuple[Keys, bytes, Tenant] | None = None
        """The last credentials seen here, and whose they are."""
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self._queue: deque[HttpRequest | HttpRefused] = deque()
        self._reading = HttpRequest()
        self._body: list[Bytes] = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._in_head = False
        self._in_body = False
        self._plain_left = 0
        """Bytes to come of the body of a plain request, which is read without the parser."""
        self._reads_plain = True
        """Whether more requests may come after the last that was read."""
        self._awaits_body: bool | None = None
        """What patience is had with: the body or the head of a request; None: with neither."""
        self._owes_continue = False
        """The client of the request that is being read waits to be told to go on."""
        self._closing = False
        """No more requests are read."""
        self._stopped_reading = False

    @property
    def is_free(self) -> bool:
        """Whether no request is being answered or waits for its turn, and the client takes its answers."""
        return self.request is None and not self._queue and not self.paused

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.deadline = time.monotonic() + self._gateway.limits.header_timeout
        if not self._gateway.admits(self):
            self._refuse(503, "too many connections; try again later")

    def connection_lost(self, error: Exception | None) -> None:
        self._gateway.clients.discard(self)
        self._closing = True
        self._parser = None
        self._queue.clear()
        serving, self.serving = self.serving, None
        if serving is not None:
            serving.abandon()

    def eof_received(self) -> bool:
        """A client that says it has no more to say is gone: nobody waits for the answer to half a conversation."""
        return False

    def pause_writing(self) -> None:
        self.paused = True
        self.deadline = time.monotonic() + self._gateway.limits.write_timeout
        if self.serving is not None:
            self.serving.pause()

    def resume_writing(self) -> None:
        self.paused = False
        if self._closing and self.request is None and not self._queue:
            return  # the last bytes are on their way; the deadline of the end holds
        self.deadline = NEVER
        if self.serving is not None:
            self.serving.resume()
        elif self.request is None:
            self._next()

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None or self._closing:
            return
        if self._plain_left:
            self._read_plain_body(data)
            return
        if not self._in_head and not self._in_body and self._reads_plain:
            plain = read_fast(data, self._gateway.limits.max_header_bytes)
            if plain is not None and plain[2] <= self._gateway.limits.max_body_bytes:
                self._begin_plain(*plain, data)
                return
        reading = self._reading
        self._head_bytes += len(data)
        try:
            parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data[upgrade.args[0] :])
            return
        except HttpParserCallbackError as error:  # not the client's fault, but ours
            self._gateway.loop.call_exception_handler({"message": "a request broke the gateway", "exception": error})
            self.transport.abort()
            return
        except HttpParserError as error:
            self._refuse(400, f"this is not HTTP/1.1 as it should be: {error}")
        if self._reading is not reading:
            self._head_bytes = 0  # the next one began somewhere in these bytes; what comes from here on is counted
        elif self._head_bytes > self._gateway.limits.max_header_bytes:
            self._refuse(431, "the headers are too large")
        if self._in_head or self._in_body:
            self._await_rest()

    def _begin_plain(self, request: HttpRequest, start: int, length: int, data: bytes) -> None:
        """The head of a plain request has come, and perhaps more."""
        self._reading = request
        self._plain_left = length
        if start + length == len(data) and length <= COPIED_BYTES:
            self._plain_left = 0
            request.body = data[start:]
            self._complete(request)
        else:
            self._in_body = True
            self._read_plain_body(memoryview(data)[start:])

    def _read_plain_body(self, data: Bytes) -> None:
        """More of the body of a plain request has come; what is beyond its end begins the next one."""
        here, beyond = data, b""
        if len(data) > self._plain_left:
            here, beyond = data[: self._plain_left], bytes(data[self._plain_left :])
        self._plain_left -= len(here)
        self._keep(here)
        if self._plain_left:
            self._await_rest()
            return
        self._in_body = False
        parts, self._body = self._body, []
        self._reading.body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._complete(self._reading)
        if beyond:
            self.data_received(beyond)

    def _await_rest(self) -> None:
        """Part of a request has come. The patience for its head, and that for its body, begin once."""
        if self._awaits_body is not self._in_body:
            self._awaits_body = self._in_body
            if self.is_free and not self._closing:
                self.deadline = time.monotonic() + self._patience_s()

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Nothing is upgraded here. The parser takes what follows an offer to do so for another protocol, even the
        body of the request: let it read the head again without the offer."""
        request, parser = self._reading, self._parser
        if parser is None or self._closing:
            return
        if request.method == b"CONNECT":
            self._refuse(405, "there are no tunnels through here")
            return
        del request.headers[b"upgrade"]
        lines = b"".join([b"%b: %b\r\n" % header for header in request.headers.items()])
        version = parser.get_http_version().encode()
        self._reading, self._parser = HttpRequest(), HttpRequestParser(self)
        self._head_bytes = self._body_bytes = 0
        self.data_received(b"%b %b HTTP/%b\r\n%b\r\n%b" % (request.method, request.target, version, lines, rest))

    # From the parser

    def on_message_begin(self) -> None:
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._reading.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:  # trailers
            return
        headers = self._reading.headers
        name = name.lower()
        if name in headers:
            if name in _ONLY_ONCE:
                self._refuse(400, f"the header {name.decode('latin-1')} came twice")
                return
            headers[name] += b", " + value
        else:
            headers[name] = value

    def on_headers_complete(self) -> None:
        parser, request, limits = self._parser, self._reading, self._gateway.limits
        if self._closing or parser is None:
            return
        request.method = parser.get_method()
        if parser.should_upgrade():
            return  # it is read once more
        self._in_head, self._in_body = False, True
        headers = request.headers
        version = parser.get_http_version()
        request.keep_alive = self._reads_plain = parser.should_keep_alive()
        request.is_http_1_0 = version == "1.0"
        if self._head_bytes > limits.max_header_bytes and _size_of(request) > limits.max_header_bytes:
            self._refuse(431, "the headers are too large")
        elif version != "1.1" and version != "1.0":
            self._refuse(505, f"HTTP/1.1 and HTTP/1.0 are spoken here, HTTP/{version} is not")
        elif b"#" in request.target:
            self._refuse(400, "the target has a fragment")
        elif not request.is_http_1_0 and b"host" not in headers:
            self._refuse(400, "the header host is missing")
        elif request.is_http_1_0 and b"transfer-encoding" in headers:
            self._refuse(400, "HTTP/1.0 has no transfer encodings")
        elif headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            self._refuse(501, "of the transfer encodings only chunked is understood")
        elif int(headers.get(b"content-length", b"0")) > limits.max_body_bytes:
            self._refuse(413, f"the body is too large; {limits.max_body_bytes} bytes are allowed")
        elif b"expect" in headers and not request.is_http_1_0:
            if headers[b"expect"].strip().lower() != b"100-continue":
                self._refuse(417, "the only expectation that can be met is 100-continue")
            elif self.is_free:
                self.write(CONTINUE)
            else:
                self._owes_continue = True

    def on_body(self, body: bytes) -> None:
        if self._closing:
            return
        self._body_bytes += len(body)
        self._head_bytes = 0
        if self._body_bytes > self._gateway.limits.max_body_bytes:
            self._refuse(413, f"the body is too large; {self._gateway.limits.max_body_bytes} bytes are allowed")
            return
        self._keep(body)

    def _keep(self, piece: Bytes) -> None:
        """Part of a body has come."""
        parts = self._body
        if parts and len(parts[-1]) < TINY_BYTES:
            parts[-1] = b"".join((parts[-1], piece))
        else:
            parts.append(piece)

    def on_message_complete(self) -> None:
        request, parts = self._reading, self._body
        if self._closing or not self._in_body:
            return
        if parts:
            request.body = parts[0] if len(parts) == 1 else b"".join(parts)
            self._body = []
            self._body_bytes = 0
        request.path, _, request.query = request.target.partition(b"?")
        if not request.path.startswith(b"/"):
            request.path = _path_of(request.path)
            request.target = b"%b?%b" % (request.path, request.query) if request.query else request.path
        self._in_body = self._owes_continue = False
        self._complete(request)

    def _complete(self, request: HttpRequest) -> None:
        """A request has been read whole: it is served now, or when its turn comes."""
        self._reading = HttpRequest()
        self._awaits_body = None
        if self.request is None and not self._queue and not self.paused:
            self._serve(request)
        else:
            self._queue.append(request)
            if len(self._queue) >= self._gateway.limits.max_pipelined and not self._stopped_reading:
                self._stopped_reading = True
                self.transport.pause_reading()

    # Answering

    def _serve(self, request: HttpRequest) -> None:
        self.deadline = NEVER
        self.request = request
        self._gateway.serve(self, request)

    def write(self, data: bytes) -> None:
        """Send part of an answer."""
        self._gateway.outbox.write(self.transport, data)

    def answer(self, status: int, body: bytes, content_type: bytes = JSON, headers: bytes = b"") -> None:
        """Answer the current request with something of our own."""
        request = self.request
        close = request is None or not request.keep_alive or self._gateway.draining
        if not close and request is not None and request.is_http_1_0:
            headers += KEEP_ALIVE
        head = head_of(status, content_type, len(body), close=close, headers=headers)
        self.write(head if request is not None and request.method == b"HEAD" else head + body)
        self.answered(close=close)

    def error(self, status: int, message: str | Reason, code: str | None = None, headers: bytes = b"") -> None:
        """Answer the current request with an error in OpenAI's shape; a reason goes along as `error.reason`."""
        extra = {"reason": message.as_dict()} if isinstance(message, Reason) else {}
        self.answer(status, error_body(str(message), error_kind(status), code, **extra), headers=headers)

    def answered(self, *, close: bool) -> None:
        """The current request is answered; the next one's turn comes."""
        self.serving = self.request = None
        if close:
            self._close()
        elif not self.paused:  # whoever does not take answers gets no more of them
            self._next()

    def _next(self) -> None:
        if not self._queue:
            self.deadline = time.monotonic() + self._patience_s()
            if self._owes_continue:
                self._owes_continue = False
                self.write(CONTINUE)
            return
        following = self._queue.popleft()
        if self._stopped_reading and len(self._queue) <= self._gateway.limits.max_pipelined // 2:
            self._stopped_reading = False
            if not self.transport.is_closing():
                self.transport.resume_reading()
        if isinstance(following, HttpRefused):
            self._answer_refused(following)
        else:
            # Not from here: a long row of quick answers would nest without end.
            self.request = following
            self._gateway.loop.call_soon(self._serve_if_open, following)

    def _serve_if_open(self, request: HttpRequest) -> None:
        if self.paused:  # the answer before has only just gone out; it is this one's turn when the client reads again
            self.request = None
            self._queue.appendleft(request)
        elif not self.transport.is_closing():
            self._serve(request)

    def _patience_s(self) -> float:
        """How long the client may take with what it does now."""
        limits = self._gateway.limits
        return limits.body_timeout if self._in_body else limits.header_timeout if self._in_head else limits.idle_timeout

    def _refuse(self, status: int, message: str) -> None:
        """Nothing more is read. The answer goes out after those of the requests before."""
        if self._closing:
            return
        self._closing = True
        refused = HttpRefused(status, message)
        if self.is_free:
            self._answer_refused(refused)
        else:
            self._queue.append(refused)

    def _answer_refused(self, refused: HttpRefused) -> None:
        self._gateway.refused_unread(refused.status)
        body = error_body(refused.message, error_kind(refused.status))
        self.write(head_of(refused.status, JSON, len(body), close=True) + body)
        self._close(linger=self._in_head or self._in_body)

    def _close(self, *, linger: bool = False) -> None:
        """`linger`: more of a request may be coming. A connection that is closed with unread bytes is reset, which may
        overtake the answer; so only our side is closed, and what comes is thrown away for a while."""
        self._closing = True
        self._queue.clear()
        self._gateway.outbox.flush()
        if linger and self.transport.can_write_eof():
            self.deadline = time.monotonic() + LINGER_S
            self.transport.write_eof()
            return
        self.deadline = time.monotonic() + self._gateway.limits.write_timeout
        self.transport.close()

    def timed_out(self) -> None:
        """We have lost patience."""
        self.deadline = NEVER
        if self.paused or self._closing:
            self.transport.abort()
        elif self._in_head or self._in_body:
            self._refuse(408, "the request took too long to come")
        else:
            self._close()

    def drain(self) -> None:
        """No more requests are taken; what is under way is answered."""
        if self.is_free and not self._in_head and not self._in_body:
            self._close()


_ONLY_ONCE = frozenset({b"host", b"content-length", b"transfer-encoding", b"authorization", b"content-type", b"expect"})


def _size_of(request: HttpRequest) -> int:
    headers = request.headers
    return len(request.target) + sum(map(len, headers)) + sum(map(len, headers.values())) + 4 * len(headers)


def _path_of(target: bytes) -> bytes:
    """The path of a target in absolute form."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return target
    _, slash, path = rest.partition(b"/")
    return slash + path

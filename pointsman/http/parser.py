"""Requests read from the bytes of a connection: a fast parser for what nearly all clients send, llhttp for the rest.

Enters: bytes of clients, who are not trusted. Leaves: whole requests in their order, or one refusal. The one rule:
bytes that two servers could read in two ways are refused, and nothing after them is read.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol, TypeAlias

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

Bytes: TypeAlias = bytes | memoryview
COPIED_BYTES = 16 * 1024
"""Longer bodies and prompts are not copied out of the buffer they were received in."""
TINY_BYTES = 512
"""Shorter parts of a body are joined as they arrive: a list of them would take many times their size."""


class HttpRequest:
    """One request, read completely."""

    __slots__ = ("body", "headers", "is_http_1_0", "keep_alive", "method", "path", "query", "target")

    def __init__(
        self,
        method: bytes = b"",
        target: bytes = b"",
        path: bytes = b"",
        query: bytes = b"",
        headers: dict[bytes, bytes] | None = None,
        body: Bytes = b"",
    ) -> None:
        self.method = method
        self.target = target
        self.path = path
        self.query = query
        self.headers = {} if headers is None else headers
        """By lower-cased name; repeated headers are joined by a comma."""
        self.body = body
        self.keep_alive = True
        self.is_http_1_0 = False


class RequestLimits(Protocol):
    """Maximum sizes."""

    @property
    def max_header_bytes(self) -> int: ...

    @property
    def max_body_bytes(self) -> int: ...


class LimitsOwner(Protocol):
    """Has the limits that apply now; they may change while connections are open."""

    @property
    def limits(self) -> RequestLimits: ...


class RequestReceiver(Protocol):
    """Gets what a parser has read."""

    def request_read(self, request: HttpRequest) -> None: ...

    def request_incomplete(self) -> None:
        """Part of a request has arrived."""

    def request_refused(self, status: int, message: str) -> None:
        """The bytes are not a request that can be served. The parser is closed."""

    def continue_expected(self) -> None:
        """The client waits for `100 Continue` before it sends the body."""

    def request_raised(self, error: Exception) -> None:
        """Serving a request raised while the parser was reading."""


class RequestParser:
    """The parser of one connection."""

    __slots__ = (
        "_body", "_body_bytes", "_body_left", "_has_ended", "_head_bytes", "_llhttp", "_may_follow", "_owner",
        "_reading", "_receiver", "closed", "in_body", "in_head",
    )  # fmt: skip

    def __init__(self, receiver: RequestReceiver, owner: LimitsOwner) -> None:
        self._receiver = receiver
        self._owner = owner
        self.closed = False
        """Nothing more is read."""
        self.in_head = False
        self.in_body = False
        self._llhttp: HttpRequestParser | None = None
        """None until a request comes that the fast parser leaves alone."""
        self._reading = NO_REQUEST
        self._body: list[Bytes] = []
        self._body_bytes = 0
        self._body_left = 0
        """Bytes to come of a body whose head was read by the fast parser."""
        self._head_bytes = 0
        self._has_ended = False
        """A request ended in the bytes that llhttp was given last."""
        self._may_follow = True
        """Another request may follow the one that was read last."""

    @property
    def is_in_request(self) -> bool:
        return self.in_head or self.in_body

    def close(self) -> None:
        self.closed = True
        self._llhttp = None

    def feed(self, data: bytes) -> None:
        if self.closed:
            return
        if self._body_left:
            self._read_body(data)
            return
        if not self.in_head and not self.in_body and self._may_follow:
            limits = self._owner.limits
            fast = read_fast(data, limits.max_header_bytes)
            if fast is not None and fast[2] <= limits.max_body_bytes:
                request, start, length = fast
                if start + length == len(data) and length <= COPIED_BYTES:
                    request.body = data[start:]
                    self._receiver.request_read(request)
                else:
                    self._reading, self._body_left, self.in_body = request, length, True
                    self._read_body(memoryview(data)[start:])
                return
        self._feed_llhttp(data)

    def _read_body(self, data: Bytes) -> None:
        """More of a body whose head was read by the fast parser; bytes beyond its end begin the next request."""
        here, beyond = data, b""
        if len(data) > self._body_left:
            here, beyond = data[: self._body_left], bytes(data[self._body_left :])
        self._body_left -= len(here)
        self._keep(here)
        if self._body_left:
            self._receiver.request_incomplete()
            return
        self.in_body = False
        request = self._reading
        request.body = self._taken_body()
        self._receiver.request_read(request)
        if beyond:
            self.feed(beyond)

    def _feed_llhttp(self, data: bytes) -> None:
        llhttp = self._llhttp
        if llhttp is None:
            llhttp = self._llhttp = HttpRequestParser(self)
        self._head_bytes += len(data)
        self._has_ended = False
        try:
            llhttp.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data[upgrade.args[0] :])
            return
        except HttpParserCallbackError as error:
            self._receiver.request_raised(error)
            return
        except HttpParserError as error:
            self._refuse(400, f"this is not valid HTTP/1.1: {error}")
        if self._has_ended:
            self._head_bytes = 0  # the next request began somewhere in these bytes; count from here
        elif self._head_bytes > self._owner.limits.max_header_bytes:
            self._refuse(431, "the headers are too large")
        if self.in_head or self.in_body:
            self._receiver.request_incomplete()

    def _read_without_upgrade(self, rest: bytes) -> None:
        """No protocol is upgraded here. llhttp takes the bytes after an offer to upgrade, even the body of the request,
        for another protocol: give it the head once more without the offer."""
        request, llhttp = self._reading, self._llhttp
        if self.closed or llhttp is None:
            return
        if request.method == b"CONNECT":
            self._refuse(405, "tunnels are not supported")
            return
        del request.headers[b"upgrade"]
        lines = b"".join([b"%b: %b\r\n" % header for header in request.headers.items()])
        version = llhttp.get_http_version().encode()
        self._llhttp = None
        self._head_bytes = self._body_bytes = 0
        self._feed_llhttp(b"%b %b HTTP/%b\r\n%b\r\n%b" % (request.method, request.target, version, lines, rest))

    def _keep(self, part: Bytes) -> None:
        parts = self._body
        if parts and len(parts[-1]) < TINY_BYTES:
            parts[-1] = b"".join((parts[-1], part))
        else:
            parts.append(part)

    def _taken_body(self) -> Bytes:
        parts, self._body, self._body_bytes = self._body, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _refuse(self, status: int, message: str) -> None:
        if not self.closed:
            self.closed = True
            self._receiver.request_refused(status, message)

    # Called by llhttp

    def on_message_begin(self) -> None:
        self.in_head = True
        self._reading = HttpRequest()

    def on_url(self, url: bytes) -> None:
        self._reading.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_body:  # trailers
            return
        headers = self._reading.headers
        name = name.lower()
        if name not in headers:
            headers[name] = value
        elif name in _ONLY_ONCE:
            self._refuse(400, f"the header {name.decode('latin-1')} came twice")
        else:
            headers[name] += b", " + value

    def on_headers_complete(self) -> None:
        llhttp, request = self._llhttp, self._reading
        if self.closed or llhttp is None:
            return
        request.method = llhttp.get_method()
        if llhttp.should_upgrade():
            return  # it is read once more
        self.in_head, self.in_body = False, True
        request.keep_alive = self._may_follow = llhttp.should_keep_alive()
        version = llhttp.get_http_version()
        request.is_http_1_0 = version == "1.0"
        for status, message in _problems(request, version, self._head_bytes, self._owner.limits):
            self._refuse(status, message)
            return
        if b"expect" in request.headers and not request.is_http_1_0:
            self._receiver.continue_expected()

    def on_body(self, body: bytes) -> None:
        if self.closed:
            return
        self._body_bytes += len(body)
        self._head_bytes = 0
        limit = self._owner.limits.max_body_bytes
        if self._body_bytes > limit:
            self._refuse(413, _too_large(limit))
        else:
            self._keep(body)

    def on_message_complete(self) -> None:
        if self.closed or not self.in_body:
            return
        request = self._reading
        if self._body:
            request.body = self._taken_body()
        request.path, _, request.query = request.target.partition(b"?")
        if not request.path.startswith(b"/"):
            request.path = _path_of(request.path)
            request.target = b"%b?%b" % (request.path, request.query) if request.query else request.path
        self.in_body = False
        self._has_ended = True
        self._receiver.request_read(request)


NO_REQUEST = HttpRequest()
_ONLY_ONCE = frozenset({b"host", b"content-length", b"transfer-encoding", b"authorization", b"content-type", b"expect"})


def _problems(request: HttpRequest, version: str, head_bytes: int, limits: RequestLimits) -> Iterator[tuple[int, str]]:
    """Why a request that llhttp accepts cannot be served, as status and message."""
    headers = request.headers
    if head_bytes > limits.max_header_bytes and _size_of(request) > limits.max_header_bytes:
        yield 431, "the headers are too large"
    if version not in ("1.1", "1.0"):
        yield 505, f"HTTP/{version} is not supported; use HTTP/1.1 or HTTP/1.0"
    if b"#" in request.target:
        yield 400, "the target has a fragment"
    if not request.is_http_1_0 and b"host" not in headers:
        yield 400, "the header host is missing"
    if request.is_http_1_0 and b"transfer-encoding" in headers:
        yield 400, "HTTP/1.0 has no transfer encodings"
    if headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
        yield 501, "chunked is the only transfer encoding that is supported"
    if int(headers.get(b"content-length", b"0")) > limits.max_body_bytes:
        yield 413, _too_large(limits.max_body_bytes)
    if not request.is_http_1_0 and headers.get(b"expect", b"100-continue").strip().lower() != b"100-continue":
        yield 417, "100-continue is the only expectation that is supported"


def _too_large(limit: int) -> str:
    return f"the body is too large; {limit} bytes are allowed"


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


# The fast parser. It takes a request only if every line of its head can be read in one way and says nothing beyond what
# a POST of JSON needs; everything else, valid or not, is left to llhttp. Clients send the same lines again and again:
# lines are cached.

LONG_BYTES = 256
"""Longer lines are left to llhttp: they are not worth caching."""

_REQUEST_LINE = re.compile(rb"POST (/[!$%&'()*+,./0-9:;=@A-Z_a-z~-]*) HTTP/1\.1")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ ]*([!-~](?:[ -~]*[!-~])?)")
_DIGITS = re.compile(rb"[0-9]{1,15}")
_UNUSUAL = frozenset(b"transfer-encoding upgrade expect te trailer keep-alive proxy-connection http2-settings".split())
"""Headers about the framing of a message or the life of its connection."""


def read_fast(data: bytes, max_head_bytes: int) -> tuple[HttpRequest, int, int] | None:
    """The request in these bytes, as far as it has arrived, where its body starts, and how long that is. None if the
    bytes are more than one request, or one for llhttp."""
    end = data.find(b"\r\n\r\n", 0, max_head_bytes)
    if end < 0:
        return None
    first, *lines = data[:end].split(b"\r\n")
    path = _path_in(first) if len(first) < LONG_BYTES else None
    if path is None:
        return None
    headers: dict[bytes, bytes] = {}
    for line in lines:
        header = _header_in(line) if len(line) < LONG_BYTES else None
        if header is None:
            return None
        headers[header[0]] = header[1]
    length = headers.get(b"content-length")
    if length is None or b"host" not in headers or len(headers) != len(lines):  # one came twice
        return None
    if end + 4 + int(length) < len(data):
        return None  # several requests, perhaps many: llhttp takes them in one go
    return HttpRequest(b"POST", path, path, b"", headers), end + 4, int(length)


@lru_cache(maxsize=64)
def _path_in(line: bytes) -> bytes | None:
    found = _REQUEST_LINE.fullmatch(line)
    return None if found is None else found[1]


@lru_cache(maxsize=1024)
def _header_in(line: bytes) -> tuple[bytes, bytes] | None:
    """(lower-cased name, value)"""
    found = _HEADER.fullmatch(line)
    if found is None:
        return None
    name, value = found[1].lower(), found[2]
    if name in _UNUSUAL:
        return None
    if name == b"connection" and value.lower() != b"keep-alive":
        return None
    if name == b"content-length" and not _DIGITS.fullmatch(value):
        return None
    return name, value

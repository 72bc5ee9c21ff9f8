"""Heads of requests: common ones are read by a fast parser, all others by llhttp.

Enters: bytes from clients, who are not trusted. Leaves: method, target and headers, or why they are refused. Bodies are
not read here: the framing alone decides what follows a head, and both parsers must read the framing in the same way.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Protocol, TypeAlias

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

Bytes: TypeAlias = bytes | memoryview
COPIED_BYTES = 16 * 1024
"""Longer bodies and prompts are not copied out of the receive buffer."""


class HttpRequest:
    """One request, read completely."""

    __slots__ = (
        "body", "charged", "headers", "is_http_1_0", "keep_alive", "method", "path", "query", "repeats", "target",
    )  # fmt: skip

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
        """Headers by lower-cased name; repeated headers are joined by a comma."""
        self.body = body
        self.keep_alive = True
        self.is_http_1_0 = False
        self.charged = 0
        """Bytes of its body that count towards the limit of buffered bytes."""
        self.repeats: RepeatedHead | None = None
        """The repeated head of its connection; None if the fast parser did not read it."""


class RequestLimits(Protocol):
    """Limits on sizes."""

    @property
    def max_header_bytes(self) -> int: ...

    @property
    def max_headers(self) -> int: ...

    @property
    def max_body_bytes(self) -> int: ...

    @property
    def max_chunks(self) -> int: ...


NO_REQUEST = HttpRequest()
_ONLY_ONCE = frozenset({b"host", b"content-length", b"transfer-encoding", b"authorization", b"content-type", b"expect"})
_PROTOCOL = re.compile(rb" HTTP/[0-9.]+\r\n")


class HeadReader:
    """One head, read by llhttp as it arrives. It never gets a body: framing is decided here and nowhere else."""

    __slots__ = (
        "_first_line", "_framing_error", "_llhttp", "_tail", "count", "has_begun", "is_complete", "problem", "request",
        "size",
    )  # fmt: skip

    def __init__(self) -> None:
        self.request = HttpRequest()
        self.has_begun = False
        self.is_complete = False
        self.size = 0
        self.count = 0
        """The number of header lines."""
        self.problem = ""
        self._llhttp = HttpRequestParser(self)
        self._tail = b""
        """The last three bytes that were read: the empty line may be split between two reads at any point."""
        self._first_line = b""
        self._framing_error = ""
        """Why llhttp rejects the framing. `problems` often finds a more precise reason."""

    def feed(self, data: bytes, start: int, stop: int) -> int:
        """Read up to the end of the head, or to `stop`. Returns where reading ended. Raises `HttpParserError`."""
        joined = self._tail + data[start:stop]
        empty_line = joined.find(b"\r\n\r\n")
        end = stop if empty_line < 0 else start + empty_line + 4 - len(self._tail)
        piece = data[start:end]
        self._tail = (self._tail + piece)[-3:] if empty_line < 0 else b""
        if not self._first_line.endswith(b"\n"):
            self._read_first_line(piece)
        self.size += len(piece)
        try:
            with suppress(HttpParserUpgrade):  # upgrades are not supported: the offer is ignored
                self._llhttp.feed_data(piece)
        except HttpParserError as error:
            if not self.is_complete:
                raise
            self._framing_error = str(error)
        return end

    def _read_first_line(self, piece: bytes) -> None:
        """Keep the request line: llhttp does not report its protocol."""
        so_far = (self._first_line + piece).lstrip(b"\r\n")
        line, newline, _ = so_far.partition(b"\n")
        self._first_line = line + newline

    def problems(self, limits: RequestLimits) -> Iterator[tuple[int, str]]:
        """The reasons why a request that llhttp accepts cannot be served, as pairs of a status and a message."""
        request = self.request
        headers, version = request.headers, self._llhttp.get_http_version()
        if self.problem:
            yield 400, self.problem
        if request.method == b"CONNECT":
            yield 405, "tunnels are not supported"
        if version not in ("1.1", "1.0"):
            yield 505, f"HTTP/{version} is not supported; use HTTP/1.1 or HTTP/1.0"
        if not _PROTOCOL.search(self._first_line):
            yield 400, "the protocol is not HTTP"
        if b"#" in request.target:
            yield 400, "the target has a fragment"
        if not request.is_http_1_0 and b"host" not in headers:
            yield 400, "the header host is missing"
        if request.is_http_1_0 and b"transfer-encoding" in headers:
            yield 400, "HTTP/1.0 has no transfer encodings"
        if headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            yield 501, "chunked is the only transfer encoding that is supported"
        if int(headers.get(b"content-length", b"0")) > limits.max_body_bytes:
            yield 413, too_large(limits.max_body_bytes)
        if not request.is_http_1_0 and headers.get(b"expect", b"100-continue").strip().lower() != b"100-continue":
            yield 417, "100-continue is the only expectation that is supported"
        if self._framing_error:
            yield 400, f"this is not valid HTTP/1.1: {self._framing_error}"

    # Called by llhttp

    def on_message_begin(self) -> None:
        self.has_begun = True

    def on_url(self, url: bytes) -> None:
        self.request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.count += 1
        headers = self.request.headers
        name = name.lower()
        if name not in headers:
            headers[name] = value
        elif name in _ONLY_ONCE:
            self.problem = f"the header {name.decode('latin-1')} came twice"
        else:
            headers[name] += b", " + value

    def on_headers_complete(self) -> None:
        llhttp, request = self._llhttp, self.request
        self.is_complete = True
        request.method = llhttp.get_method()
        request.keep_alive = llhttp.should_keep_alive()
        request.is_http_1_0 = llhttp.get_http_version() == "1.0"
        request.headers.pop(b"upgrade", None)
        request.path, _, request.query = request.target.partition(b"?")
        if not request.path.startswith(b"/"):
            request.path = _path_of(request.path)
            request.target = b"%b?%b" % (request.path, request.query) if request.query else request.path


def too_large(limit: int) -> str:
    return f"the body is too large; {limit} bytes are allowed"


def _path_of(target: bytes) -> bytes:
    """The path of a target in absolute form."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return target
    _, slash, path = rest.partition(b"/")
    return slash + path


def problem_in_trailers(trailers: bytes) -> str:
    """Why trailers are refused; empty if they are accepted. Their values are not used."""
    if not trailers:
        return ""
    head = HeadReader()
    lines = b"GET / HTTP/1.1\r\n" + trailers + b"\r\n"
    try:
        head.feed(lines, 0, len(lines))
    except HttpParserError as error:
        return f"this is not valid HTTP/1.1: {error}"
    framing = head.request.headers.keys() & {b"content-length", b"transfer-encoding"}
    return f"{min(framing).decode()} among the trailers" if framing else ""


# The fast parser. It takes a request only if every line of the head can be read in one way only, and says nothing
# beyond what a POST of JSON needs. Everything else, valid or not, is left to llhttp. Lines are cached, because clients
# send the same lines again and again.

LONG_BYTES = 256
"""Longer lines are not worth caching, and are left to llhttp."""

_REQUEST_LINE = re.compile(rb"POST (/[!$%&'()*+,./0-9:;=@A-Z_a-z~-]*) HTTP/1\.1")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ ]*([!-~](?:[ -~]*[!-~])?)")
MAX_LENGTH_DIGITS = 15
_DIGITS = re.compile(rb"[0-9]{1,%d}" % MAX_LENGTH_DIGITS)
_UNUSUAL = frozenset(b"transfer-encoding upgrade expect te trailer keep-alive proxy-connection http2-settings".split())
"""Headers about the framing of a message or the life of its connection."""


class RepeatedHead:
    """The head of the last request on a connection. Clients often repeat a head with only the length of the body
    changed. Then only the length is read again."""

    __slots__ = ("_after", "_before", "_limits", "headers", "lines_for_engines", "path")

    def __init__(self, head: bytes, path: bytes, headers: dict[bytes, bytes], limits: RequestLimits) -> None:
        """`head` includes its empty line. The fast parser has read it within these limits."""
        self.path = path
        self.headers = headers
        """Headers as last received; each request gets a copy."""
        self.lines_for_engines: bytes | None = None
        """The header lines to pass on if nothing changes them; None until they are first needed."""
        length = headers[b"content-length"]
        value = head.index(b":", head.lower().index(b"\r\ncontent-length:")) + 1
        value = head.index(length, value)
        self._before, self._after = head[:value], head[value + len(length) :]
        self._limits = limits

    def read(self, data: bytes, at: int, limits: RequestLimits) -> tuple[HttpRequest, int, int] | None:
        """The result of `read_fast`; None if the head differs."""
        start = at + len(self._before)
        if not data.startswith(self._before, at) or self._limits is not limits:
            return None
        end = data.find(b"\r", start, start + MAX_LENGTH_DIGITS + 1)
        if end < 0 or not data.startswith(self._after, end):
            return None
        written = data[start:end]
        if not written.isdigit() or (length := int(written)) > limits.max_body_bytes:
            return None
        self.headers[b"content-length"] = written
        request = HttpRequest(b"POST", self.path, self.path, b"", self.headers.copy())
        request.repeats = self
        return request, end + len(self._after), length


def read_fast(data: bytes, at: int, limits: RequestLimits) -> tuple[HttpRequest, int, int] | None:
    """The request that begins at `at`, without its body, and the start and length of the body. None if the head is
    incomplete, or must be read by llhttp."""
    end = data.find(b"\r\n\r\n", at, at + limits.max_header_bytes)
    if end < 0:
        return None
    first, *lines = data[at:end].split(b"\r\n")
    if len(lines) > limits.max_headers:
        return None
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
    if length is None or b"host" not in headers or len(headers) != len(lines):  # a header occurs twice
        return None
    if int(length) > limits.max_body_bytes:
        return None
    request = HttpRequest(b"POST", path, path, b"", headers)
    request.repeats = RepeatedHead(data[at : end + 4], path, headers.copy(), limits)
    return request, end + 4, int(length)


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

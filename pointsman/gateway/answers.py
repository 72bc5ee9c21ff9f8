"""Engines' answers: their head and their framing, read piece by piece.

Enters: bytes as they come from a socket. Leaves: the payload. The one rule: what is not HTTP is `Garbled`, at once.
"""

import re

from pointsman.errors import PointsmanError
from pointsman.gateway.http import NOT_FOR_CLIENTS

MAX_HEAD_BYTES = 64 * 1024
MAX_CHUNK_LINE_BYTES = 1024

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: ([^\r\n\x00]*))?")
_DIGITS = re.compile(rb"[0-9]{1,18}")
_CONTROLS = bytes({*range(32), 127} - set(b"\t\r\n"))
_TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""What names of headers are made of."""


class Garbled(PointsmanError):
    """What an engine sent is not an HTTP answer."""


class AnswerHead:
    """Status and headers of an answer."""

    __slots__ = ("_named", "chunked", "closes", "is_stream", "length", "passed_on", "reason", "status")

    def __init__(self, head: bytes) -> None:
        """Read everything before the empty line. Raises `Garbled`."""
        status_line, *lines = head.split(b"\r\n")
        match = _STATUS_LINE.fullmatch(status_line)
        if match is None:
            raise Garbled(f"it does not begin like an HTTP answer: {status_line[:60]!r}")
        self.status = int(match[1])
        self.reason = match[2] or b""
        self.length: int | None = None
        self.chunked = False
        self.closes = status_line.startswith(b"HTTP/1.0")
        self.is_stream = False
        """Server-sent events."""
        self._named: set[bytes] = set()
        """Headers that are for this connection alone."""
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise Garbled("a line of its head does not end with CR LF")
        if len(head.translate(None, _CONTROLS)) != len(head):
            raise Garbled("its head has control characters in it")
        passed_on = []
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or not name or name.strip(_TOKEN):
                raise Garbled(f"not a header: {line[:60]!r}")
            name = name.lower()
            if name in NOT_FOR_CLIENTS:
                self._framing(name, value.strip())
                continue
            if name == b"content-type":
                self.is_stream = b"text/event-stream" in value.lower() and self.status == 200
            passed_on.append(line)
        self.passed_on = passed_on
        """Header lines that clients get as they are."""
        if self._named:
            self.passed_on = [line for line in passed_on if line.partition(b":")[0].lower() not in self._named]
        if self.chunked and self.length is not None:
            raise Garbled("it has a content-length and is chunked")

    def _framing(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            if not _DIGITS.fullmatch(value) or self.length not in (None, int(value)):
                raise Garbled(f"content-length: {value[:60]!r}")
            self.length = int(value)
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked" or self.chunked:
                raise Garbled(f"transfer-encoding: {value[:60]!r}")
            self.chunked = True
        elif name == b"connection":
            self._named = {named.strip() for named in value.lower().split(b",")}
            self.closes = b"close" in self._named or (self.closes and b"keep-alive" not in self._named)

    @property
    def has_body(self) -> bool:
        """Whether anything follows the head."""
        return self.status not in (204, 304) and self.length != 0


class ChunkReader:
    """Takes the payload out of a chunked body."""

    __slots__ = ("_closing", "_left", "_rest", "ended")

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0
        """Bytes of the current chunk to come; 0: a size line comes next."""
        self._closing = False
        """The line end after a chunk comes next."""
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """The payload in these bytes, joined. Raises `Garbled`."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        pieces: list[bytes] = []
        at, size = 0, len(data)
        while at < size:
            if self._left:
                here = min(self._left, size - at)
                pieces.append(data[at : at + here])
                at += here
                self._left -= here
                self._closing = not self._left
            elif self._closing:
                if size - at < 2:
                    break
                at = _past_line_end(data, at)
                self._closing = False
            else:
                line_end = data.find(b"\r\n", at)
                if line_end < 0:
                    break
                length, at = _chunk_length(data[at:line_end]), line_end + 2
                if not length:
                    self._finish(data, at)
                    break
                if at + length + 2 <= size:  # all of it is here, as most often
                    pieces.append(data[at : at + length])
                    at = _past_line_end(data, at + length)
                else:
                    self._left = length
        else:
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if not self.ended and not self._rest:
            self._rest = data[at:]
            if len(self._rest) > MAX_CHUNK_LINE_BYTES or (b"\n" in self._rest and not self._closing):
                raise Garbled("a chunk has no size")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _finish(self, data: bytes, at: int) -> None:
        """The last chunk has come; what follows are trailers, up to an empty line."""
        end = at + 2 if data.startswith(b"\r\n", at) else data.find(b"\r\n\r\n", at) + 4
        if end < 4:
            self._rest = b"0\r\n" + data[at:]
            if len(self._rest) > MAX_HEAD_BYTES:
                raise Garbled("trailers without an end")
        elif end < len(data):
            raise Garbled("bytes after the end of the answer")
        else:
            self.ended = True


def _chunk_length(line: bytes) -> int:
    digits = line.partition(b";")[0].strip(b" \t")
    if digits.isalnum() and len(digits) <= 15 and b"\n" not in line:
        try:
            return int(digits, 16)
        except ValueError:
            pass
    raise Garbled(f"not the size of a chunk: {line[:60]!r}")


def _past_line_end(data: bytes, at: int) -> int:
    if data[at : at + 2] != b"\r\n":
        raise Garbled("a chunk does not end where it said")
    return at + 2

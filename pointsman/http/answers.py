"""Engines' answers: their head and their framing, read piece by piece.

Enters: bytes as they come from a socket. Leaves: the payload. The one rule: what is not HTTP is `Garbled`, at once.
"""

import re
from functools import lru_cache

from pointsman.errors import PointsmanError
from pointsman.http.heads import NOT_FOR_CLIENTS, PIECES

MAX_HEAD_BYTES = 64 * 1024
MAX_CHUNK_LINE_BYTES = 1024
LONG_LINE_BYTES = 512
"""Lines of a head that are longer are not remembered."""

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: ([^\r\n\x00]*))?")
_DIGITS = re.compile(rb"[0-9]{1,18}")
_CONTROLS = bytes({*range(32), 127} - set(b"\t\r\n"))
_TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""What names of headers are made of."""


class Garbled(PointsmanError):
    """What an engine sent is not an HTTP answer."""


class AnswerHead:
    """Status and headers of an answer."""

    __slots__ = ("_named", "chunked", "closes", "is_stream", "length", "lines", "reason", "status")

    def __init__(self, head: bytes) -> None:
        """Read everything before the empty line. Raises `Garbled`."""
        status_line, *lines = head.split(b"\r\n")
        self.status, self.reason, self.closes = _read_status_line(status_line)
        self.length: int | None = None
        self.chunked = False
        self.is_stream = False
        """Server-sent events, or other pieces that a replica of ours says are to be passed on as they come."""
        self._named: set[bytes] = set()
        """Headers that are for this connection alone."""
        for_clients = []
        for line in lines:
            name, value, passed_on = _read_line(line) if len(line) < LONG_LINE_BYTES else _line_read_anew(line)
            if passed_on:
                for_clients.append(passed_on)
                if name == b"content-type":
                    self.is_stream |= b"text/event-stream" in value.lower() and self.status == 200
            else:
                self._framing(name, value)
        if self._named:
            for_clients = [line for line in for_clients if line.partition(b":")[0].lower() not in self._named]
        self.lines = b"".join(for_clients)
        """Header lines that clients get as they are."""
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
        elif name == PIECES:
            self.is_stream = self.status == 200

    @property
    def has_body(self) -> bool:
        """Whether anything follows the head."""
        return self.status not in (204, 304) and self.length != 0


# Engines say the same again and again: a line that was read before is not read once more.


@lru_cache(maxsize=64)
def _read_status_line(line: bytes) -> tuple[int, bytes, bool]:
    """(status, reason, whether the connection closes unless the headers say otherwise)"""
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise Garbled(f"it does not begin like an HTTP answer: {line[:60]!r}")
    _check_characters(line)
    return int(match[1]), match[2] or b"", line.startswith(b"HTTP/1.0")


def _line_read_anew(line: bytes) -> tuple[bytes, bytes, bytes]:
    """(lower-cased name, value, the line as clients get it; empty: they do not)"""
    _check_characters(line)
    name, colon, value = line.partition(b":")
    if not colon or not name or name.strip(_TOKEN):
        raise Garbled(f"not a header: {line[:60]!r}")
    name = name.lower()
    return name, value.strip(), b"" if name in NOT_FOR_CLIENTS else line + b"\r\n"


_read_line = lru_cache(maxsize=1024)(_line_read_anew)


def _check_characters(line: bytes) -> None:
    if b"\n" in line or b"\r" in line:
        raise Garbled("a line of its head does not end with CR LF")
    if len(line.translate(None, _CONTROLS)) != len(line):
        raise Garbled("its head has control characters in it")


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

"""Responses of servers: their head and their framing, read piece by piece.

Enters: bytes as they arrive. Leaves: the payload. The one rule: what is not HTTP raises `MalformedHttp`, at once.
"""

import re
from asyncio import AbstractEventLoop, Transport
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from functools import lru_cache

from pointsman.errors import PointsmanError, shown_bytes

# Server-sent events

MAX_HELD_BYTES = 1024 * 1024
"""A longer event is passed on in parts."""
CONTENT_TYPE = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
"""The end mark of OpenAI's streams."""
FIELDS = (b"data", b"event", b"id", b"retry", b":", b"\n", b"\r")
"""Possible first bytes of a stream of events."""

_USUAL = b"data: {"
_ENDS = (b"\n\n", b"\r\n\r\n")
_DATA = re.compile(rb"(?:^|[\r\n])data:[ \t]*[^ \t\r\n]")

PROGRESS_BYTES = 64 * 1024
"""A body that is not a stream of events makes progress when this much of it has arrived, not with every byte."""


def event(data: bytes) -> bytes:
    """An event with this data, which may have several lines."""
    if b"\n" not in data and b"\r" not in data:
        return b"data: %b\n\n" % data
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return b"".join(b"data: %b\n" % line for line in lines) + b"\n"


def data_in(events: bytes) -> Iterator[bytes]:
    """The data lines of whole events, without the end mark."""
    for line in events.splitlines():
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data and data != b"[DONE]":
                yield data


def ends_with_done(events: bytes) -> bool:
    """Whether the last of these events is the end mark, and not a text that contains it. Comments may follow it."""
    name, value = b"", b""
    while not name and events:
        events, _, line = events.rstrip().rpartition(b"\n")
        name, _, value = line.partition(b":")
    return name == b"data" and value.strip() == b"[DONE]"


class EventStream:
    """Holds incomplete events back: a client that is cut off in the middle of one cannot be sent an error event."""

    __slots__ = ("_held", "_in_event", "before_last", "events", "has_data", "last")

    def __init__(self) -> None:
        self._held = b""
        self._in_event = False
        """Whether the beginning of a long event was passed on, and its end was not."""
        self.has_data = False
        """Whether the last result of `feed` contained data. Comments and empty events are not progress."""
        self.events = 0
        """Number of events with data that were passed on."""
        self.last = b""
        """The last two pieces with data that were passed on. The last event before the end mark contains the usage."""
        self.before_last = b""

    def feed(self, payload: bytes) -> bytes:
        """What may be passed on now."""
        if payload.startswith(_USUAL) and payload.endswith(b"\n\n") and not self._held and not self._in_event:
            self.has_data = True
            self.events += payload.count(b"\n\n")
            self.before_last, self.last = self.last, payload
            return payload
        if self._held:
            payload, self._held = self._held + payload, b""
        was_in_event, self._in_event = self._in_event, False
        if not payload.endswith(_ENDS):
            whole = max((payload.rfind(end) + len(end) for end in _ENDS if end in payload), default=0)
            if whole or len(payload) < MAX_HELD_BYTES:
                payload, self._held = payload[:whole], payload[whole:]
                if not payload:
                    self.has_data, self._in_event = False, was_in_event
                    return b""
            else:
                self._in_event = True
        self.has_data = was_in_event or _DATA.search(payload) is not None
        if self.has_data:
            self.events += payload.count(b"\n\n") or payload.count(b"\r\n\r\n")
            self.before_last, self.last = self.last, payload
        return payload

    @property
    def held(self) -> bytes:
        """The bytes that have not been passed on."""
        return self._held


HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade http2-settings".split()
)
"""Headers about one connection, which are not passed on."""
PIECES = b"x-pointsman-pieces"
"""The header with which a replica asks that its response be passed on piece by piece, whatever its type."""
NOT_FOR_CLIENTS = HOP_BY_HOP | frozenset(
    b"content-length date server x-request-id x-pointsman-instance x-pointsman-pieces".split()
)
"""Headers of a response that are not passed on: the gateway sets length and ids itself."""

MAX_HEAD_BYTES = 64 * 1024
MAX_CHUNK_LINE_BYTES = 1024
LONG_LINE_BYTES = 512
"""Longer lines of a head are not cached."""

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: ([^\r\n\x00]*))?")
_CONTENT_TYPE = re.compile(rb"^content-type:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_RETRY_AFTER = re.compile(rb"^retry-after:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*", re.IGNORECASE)
MAX_LENGTH_DIGITS = 18
_DIGITS = re.compile(rb"[0-9]{1,%d}" % MAX_LENGTH_DIGITS)
_CONTROLS = bytes({*range(32), 127} - set(b"\t\r\n"))
_TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Characters of header names."""


class MalformedHttp(PointsmanError):
    """The other side has sent something that is not HTTP."""


class ResponseHead:
    """Status and headers of a response."""

    __slots__ = ("_named", "chunked", "closes", "is_stream", "length", "lines", "reason", "status")

    def __init__(self, head: bytes) -> None:
        """Read the lines before the empty line. Raises `MalformedHttp`."""
        status_line, *lines = head.split(b"\r\n")
        self.status, self.reason, self.closes = _read_status_line(status_line)
        self.length: int | None = None
        self.chunked = False
        self.is_stream = False
        """Whether the body consists of server-sent events, or of other pieces that are passed on as they arrive."""
        self._named: set[bytes] = set()
        """Headers that, as the response declares, are for this connection only."""
        for_clients = []
        for line in lines:
            name, value, passed_on = _read_line(line) if len(line) < LONG_LINE_BYTES else _parse_line(line)
            if passed_on:
                for_clients.append(passed_on)
                if name == b"content-type":
                    self.is_stream |= b"text/event-stream" in value.lower() and self.status == 200
            else:
                self._framing(name, value)
        if self._named:
            for_clients = [line for line in for_clients if line.partition(b":")[0].lower() not in self._named]
        self.lines = b"".join(for_clients)
        """Header lines to pass on."""
        if self.chunked and self.length is not None:
            raise MalformedHttp("it has a content-length and is chunked")

    def _framing(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            if not _DIGITS.fullmatch(value) or self.length not in (None, int(value)):
                raise MalformedHttp(f"content-length: {shown_bytes(value, 60)}")
            self.length = int(value)
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked" or self.chunked:
                raise MalformedHttp(f"transfer-encoding: {shown_bytes(value, 60)}")
            self.chunked = True
        elif name == b"connection":
            self._named = {named.strip() for named in value.lower().split(b",")}
            self.closes = b"close" in self._named or (self.closes and b"keep-alive" not in self._named)
        elif name == PIECES:
            self.is_stream = self.status == 200

    @property
    def has_body(self) -> bool:
        return self.status not in (204, 304) and self.length != 0

    @property
    def content_type(self) -> bytes:
        """The content type; empty if the server did not send one."""
        found = _CONTENT_TYPE.search(self.lines)
        return b"" if found is None else found[1].strip()

    def of_length(self, length: int) -> "ResponseHead":
        """The same head with another content-length."""
        if length == self.length:
            return self
        other = ResponseHead.__new__(ResponseHead)
        other.status, other.reason, other.closes, other.chunked = self.status, self.reason, self.closes, self.chunked
        other.is_stream, other.lines, other._named, other.length = self.is_stream, self.lines, self._named, length
        return other


class RepeatedResponseHead:
    """The last head from a server. Servers often repeat a head with only the length of the body changed. Then only the
    length is read again."""

    __slots__ = ("_after", "_before", "_head")

    def __init__(self) -> None:
        self._head: ResponseHead | None = None
        """None until a head has arrived that may be repeated."""
        self._before = self._after = b""
        """The bytes before and after the content-length; `_after` is empty if the head has no content-length."""

    def read(self, data: bytes) -> tuple[ResponseHead, int] | None:
        """The head at the beginning of the data, and where its body starts; None if the head is not the last one."""
        head, before, after = self._head, self._before, self._after
        if head is None or not data.startswith(before):
            return None
        if not after:
            return head, len(before)
        end = data.find(b"\r", len(before), len(before) + MAX_LENGTH_DIGITS + 1)
        if end < 0 or not data.startswith(after, end):
            return None
        written = data[len(before) : end]
        return (head.of_length(int(written)), end + len(after)) if written.isdigit() else None

    def remember(self, written: bytes, head: ResponseHead) -> None:
        """Keep a head to compare later ones with. `written` includes the empty line."""
        self._head, self._before, self._after = head, written, b""
        if head.length is None:
            return
        found = _CONTENT_LENGTH.findall(written)
        value = written.find(found[0]) + len(found[0])
        length = written[value : written.index(b"\r", value)]
        if len(found) != 1 or not length.isdigit():  # a second content-length must be compared
            self._head = None
        else:
            self._before, self._after = written[:value], written[value + len(length) :]


def retry_after_s(head: ResponseHead, unix_time: float) -> float | None:
    """How many seconds a server asks clients to wait, by a number or a date; None if it does not ask, or if the form is
    unknown."""
    found = _RETRY_AFTER.search(head.lines)
    if found is None:
        return None
    value = found[1].strip()
    if _DIGITS.fullmatch(value):
        return float(value)
    try:
        return max(parsedate_to_datetime(value.decode("latin-1")).timestamp() - unix_time, 0.0)
    except (ValueError, OverflowError):
        return None


# Servers send the same lines again and again, so lines are cached.


@lru_cache(maxsize=64)
def _read_status_line(line: bytes) -> tuple[int, bytes, bool]:
    """(status, reason, whether the connection closes unless the headers say otherwise)"""
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise MalformedHttp(f"it does not begin like an HTTP answer: {shown_bytes(line, 60)}")
    _check_characters(line)
    return int(match[1]), match[2] or b"", line.startswith(b"HTTP/1.0")


def _parse_line(line: bytes) -> tuple[bytes, bytes, bytes]:
    """(lower-cased name, value, the line to pass on); the line is empty if it is not passed on."""
    _check_characters(line)
    name, colon, value = line.partition(b":")
    if not colon or not name or name.strip(_TOKEN):
        raise MalformedHttp(f"not a header: {shown_bytes(line, 60)}")
    name = name.lower()
    return name, value.strip(), b"" if name in NOT_FOR_CLIENTS else line + b"\r\n"


_read_line = lru_cache(maxsize=1024)(_parse_line)


def _check_characters(line: bytes) -> None:
    if b"\n" in line or b"\r" in line:
        raise MalformedHttp("a line of its head does not end with CR LF")
    if len(line.translate(None, _CONTROLS)) != len(line):
        raise MalformedHttp("its head has control characters in it")


_EXTENSION = (
    rb';[!#$%&\'*+.^_`|~0-9A-Za-z-]+(?:=(?:[!#$%&\'*+.^_`|~0-9A-Za-z-]+|"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~])*"))?'
)
_REQUEST_SIZE = re.compile(rb"0*([0-9A-Fa-f]{1,16})(?:%b)*" % _EXTENSION)
_RESPONSE_SIZE = re.compile(rb"[ \t]*0*([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\n]*)?")


_USUAL_DIGITS = 4
_USUAL_SIZE = re.compile(rb"[0-9A-Fa-f]{1,%d}" % _USUAL_DIGITS)


@lru_cache(maxsize=1024)
def _plain_size(line: bytes) -> int:
    """The size of a chunk; 0 if the line holds anything but a few digits."""
    return int(line, 16) if _USUAL_SIZE.fullmatch(line) else 0


class ChunkReader:
    """Extracts the payload of a chunked body."""

    __slots__ = ("_closing", "_rest", "_size_of", "beyond", "count", "ended", "left", "trailers")

    def __init__(self, *, is_request: bool = False) -> None:
        """`is_request`: sizes and extensions must follow the grammar strictly. For responses the check is relaxed."""
        self._size_of = (_REQUEST_SIZE if is_request else _RESPONSE_SIZE).fullmatch
        self._rest = b""
        self.left = 0
        """Bytes of the current chunk that are still to come; 0 if a size line comes next."""
        self._closing = False
        """Whether the line end after a chunk comes next."""
        self.count = 0
        """Number of chunks so far."""
        self.ended = False
        self.trailers = b""
        """Lines after the last chunk, without the empty line; complete once the body has ended."""
        self.beyond = b""
        """The bytes after the end of the body."""

    def only(self, data: bytes) -> bytes | None:
        """The payload, if these bytes are exactly one whole chunk. Otherwise None, and the bytes must go to `feed`."""
        end = data.find(b"\r\n", 0, _USUAL_DIGITS + 2)
        if end <= 0 or self.left or self._closing or self._rest:
            return None
        size = _plain_size(data[:end])
        if not size or end + size + 4 != len(data) or not data.endswith(b"\r\n"):
            return None
        self.count += 1
        return data[end + 2 : -2]

    def feed(self, data: bytes) -> bytes:
        """The payload in these bytes, joined. Raises `MalformedHttp`."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        pieces: list[bytes] = []
        at, size = 0, len(data)
        while at < size:
            if self.left:
                here = min(self.left, size - at)
                pieces.append(data[at : at + here])
                at += here
                self.left -= here
                self._closing = not self.left
            elif self._closing:
                if size - at < 2:
                    break
                at = _past_line_end(data, at)
                self._closing = False
            else:
                line_end = data.find(b"\r\n", at)
                if line_end < 0:
                    break
                length = self._length(data[at:line_end])
                if not length:
                    self._finish(data, at, line_end + 2)
                    break
                at = line_end + 2
                self.count += 1
                if at + length + 2 <= size:  # all of it is here, which is the usual case
                    pieces.append(data[at : at + length])
                    at = _past_line_end(data, at + length)
                else:
                    self.left = length
        else:
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if not self.ended and not self._rest:
            self._rest = data[at:]
            if len(self._rest) > MAX_CHUNK_LINE_BYTES or not self._may_continue(self._rest):
                raise MalformedHttp("a chunk has no size")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _length(self, line: bytes) -> int:
        found = self._size_of(line)
        if found is None or len(line) > MAX_CHUNK_LINE_BYTES:
            raise MalformedHttp(f"not the size of a chunk: {shown_bytes(line, 60)}")
        return int(found[1], 16)

    def _may_continue(self, rest: bytes) -> bool:
        """Whether these bytes can be the beginning of a line: they have no CR except as the last byte."""
        if self._closing:
            return rest == b"\r"
        return b"\n" not in rest and b"\r" not in rest[:-1]

    def _finish(self, data: bytes, start: int, at: int) -> None:
        """Read the trailers that follow the last chunk, up to an empty line. The last chunk begins at `start`."""
        end = at if data.startswith(b"\r\n", at) else data.find(b"\r\n\r\n", at) + 2
        complete = end >= at
        self.trailers = data[at:end] if complete else data[at:]
        # Incomplete trailers may end with the CR of the empty line.
        if len(self.trailers) > MAX_HEAD_BYTES + (not complete):
            raise MalformedHttp("trailers without an end")
        if self.trailers.count(b"\n") != self.trailers.count(b"\r\n"):
            raise MalformedHttp("a line of the trailers does not end with CR LF")
        if complete:
            self.ended = True
            self.beyond = data[end + 2 :]
        else:
            self._rest = data[start:]


def _past_line_end(data: bytes, at: int) -> int:
    if data[at : at + 2] != b"\r\n":
        raise MalformedHttp("a chunk does not end at its size")
    return at + 2


# How much is read at a time

TURN_BYTES, TURN_CHUNKED_BYTES = 128 * 1024, 8 * 1024
"""Maximum bytes that one turn of the loop reads from one connection; without a limit it might read megabytes. Chunked
bodies have a lower limit, because chunks may be tiny."""


class ReadPace:
    """Spreads the reading of a connection to a server over several turns of the loop, and stops while its listener has
    paused."""

    __slots__ = ("_loop", "_paused", "_read", "_transport", "later")

    def __init__(self, transport: Transport, loop: AbstractEventLoop, read: Callable[[bytes], None]) -> None:
        self._transport = transport
        self._loop = loop
        self._read = read
        self._paused = False
        """Whether the listener has asked to pause."""
        self.later = b""
        """Bytes that have arrived and will be read in a later turn."""

    def first(self, data: bytes, most: int) -> bytes:
        """The part of the data that is read now; the rest is read later."""
        if len(data) <= most:
            return data
        self.later = data[most:]
        self._read_or_wait()
        self._loop.call_soon(self._next_turn)
        return data[:most]

    def let_read(self, *, on: bool) -> None:
        """Read on if the listener is ready for more (`on`); otherwise pause."""
        if on and self._paused and self.later:
            self._loop.call_soon(self._next_turn)
        self._paused = not on
        self._read_or_wait()

    def read_on(self) -> None:
        """Read more of the received data, even if the listener has paused."""
        data, self.later = self.later, b""
        self._read(data)

    def _next_turn(self) -> None:
        if self.later and not self._paused:
            self.read_on()
            self._read_or_wait()

    def _read_or_wait(self) -> None:
        if not self._transport.is_closing():
            waits = self._paused or self.later
            self._transport.pause_reading() if waits else self._transport.resume_reading()

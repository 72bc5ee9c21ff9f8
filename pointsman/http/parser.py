"""Requests read from the bytes of a connection, one at a time.

Enters: bytes from clients, who are not trusted. Leaves: whole requests, one at a time, or one refusal. The one rule:
bytes that two servers could read in two ways are refused, and nothing after them is read.

A request is not read before the request ahead of it is answered (`read_on`). One call does a bounded amount of work:
the rest is read in a later turn of the loop, so that no client keeps the others waiting.
"""

from typing import Protocol

from httptools import HttpParserError

from pointsman.http.buffers import NO_BODY, PartialBody
from pointsman.http.heads import (
    COPIED_BYTES,
    NO_REQUEST,
    Bytes,
    HeadReader,
    HttpRequest,
    RepeatedHead,
    RequestLimits,
    problem_in_trailers,
    read_fast,
    too_large,
)
from pointsman.http.responses import ChunkReader, MalformedHttp

RESERVED_BYTES = 64 * 1024 * 1024
"""Address space for a large body of unknown size."""
SLICE_BYTES = 8 * 1024
"""Heads and chunks are read in slices of this size."""
MAX_CHUNKS_PER_TURN = 1000


class LimitsOwner(Protocol):
    """Has the limits that apply now; they may change while connections are open."""

    @property
    def limits(self) -> RequestLimits: ...


class RequestReceiver(Protocol):
    """Gets what a parser has read."""

    def head_read(self, request: HttpRequest) -> None:
        """The head of a request was read, and its body is still to come. May close the parser."""

    def body_grew(self, request: HttpRequest, size: int) -> None:
        """More of a body has arrived. May close the parser."""

    def request_read(self, request: HttpRequest) -> None:
        """A whole request was read. The next one is read when `read_on` is called."""

    def request_incomplete(self) -> None:
        """Part of a request has arrived."""

    def request_refused(self, status: int, message: str) -> None:
        """The bytes are not a request that can be served. The parser is closed."""

    def continue_expected(self) -> None:
        """The client waits for `100 Continue` before it sends the body."""

    def read_later(self) -> None:
        """Enough was read for now: `read_on` must be called in a later turn."""


class RequestParser:
    """The parser of one connection."""

    __slots__ = (
        "_at", "_body", "_body_left", "_chunks", "_data", "_head", "_is_waiting", "_owner", "_reading",
        "_receiver", "_repeated", "closed", "in_body", "space",
    )  # fmt: skip

    def __init__(self, receiver: RequestReceiver, owner: LimitsOwner) -> None:
        self._receiver = receiver
        self._owner = owner
        self.closed = False
        """Whether reading has ended for good."""
        self.in_body = False
        self.space: memoryview | None = None
        """The buffer to read the next bytes into, if they belong to a body; None if the next bytes must be fed."""
        self._is_waiting = False
        """Whether the parser waits for `read_on`, because a request was handed over, or enough was read for now."""
        self._data: bytes = b""
        """Received bytes. The bytes from `_at` on have not been read."""
        self._at = 0
        self._head: HeadReader | None = None
        """Reads a head that the fast parser does not handle."""
        self._repeated: RepeatedHead | None = None
        """The last head that the fast parser has read; None if it has not read any."""
        self._reading = NO_REQUEST
        self._body = NO_BODY
        self._body_left = 0
        """Remaining bytes of a body with a length."""
        self._chunks: ChunkReader | None = None
        """The reader of a chunked body."""

    @property
    def in_head(self) -> bool:
        return self._head is not None and self._head.has_begun

    @property
    def is_in_request(self) -> bool:
        return self.in_body or self.in_head

    @property
    def unread(self) -> int:
        """Number of bytes that were received but have not been read."""
        return len(self._data) - self._at

    def close(self) -> None:
        self.closed = True
        self._head = self._chunks = None
        self._data, self._at = b"", 0
        self._body, self.space = NO_BODY, None

    def feed(self, data: bytes) -> None:
        if self.closed:
            return
        if not self._is_waiting and not self.in_body and self._head is None and not self._data:
            fast = self._read_fast(data, 0)
            if fast is not None:
                request, start, length = fast
                if start + length == len(data) and length <= COPIED_BYTES:
                    request.body = data[start:]
                    self._deliver(request)
                    return
                self._data, self._reading, self._at = data, request, start
                self._begin_body(length)
                self._read()
                return
        self._data, self._at = self._data[self._at :] + data if self._data else data, 0
        if not self._is_waiting:
            self._read()

    def rest(self) -> bool:
        """Wait for the next request. If part of that request has arrived, this does nothing and returns False."""
        if self._data or self.in_body or self._head is not None:
            return False
        self._is_waiting = False
        return True

    def read_on(self) -> None:
        """Continue reading, up to the end of the next request."""
        self._is_waiting = False
        if self._data and not self.closed:
            self._read()

    def _read(self) -> None:
        """Read until a request is complete, nothing is left, or enough was read for now."""
        most = MAX_CHUNKS_PER_TURN + (0 if self._chunks is None else self._chunks.count)
        while self._at < len(self._data) and not self.closed and not self._is_waiting:
            if self._body_left:
                self._read_body()
            elif self._chunks is None:
                self._read_head()
            elif self._chunks.count < most:
                self._read_chunks()
            else:
                self._is_waiting = True
                self._receiver.read_later()
        if self._at >= len(self._data):
            self._data, self._at = b"", 0
        if self.is_in_request and not self.closed:
            self._receiver.request_incomplete()

    # Heads

    def _read_fast(self, data: bytes, at: int) -> tuple[HttpRequest, int, int] | None:
        """The result of `read_fast`. A head that repeats the last one is not read again."""
        limits, repeated = self._owner.limits, self._repeated
        if repeated is not None and (fast := repeated.read(data, at, limits)) is not None:
            return fast
        fast = read_fast(data, at, limits)
        if fast is not None:
            self._repeated = fast[0].repeats
        return fast

    def _read_head(self) -> None:
        limits, head = self._owner.limits, self._head
        if head is None:
            fast = self._read_fast(self._data, self._at)
            if fast is not None:
                self._reading, self._at, length = fast
                self._begin_body(length)
                return
            head = self._head = HeadReader()
        try:
            self._at = head.feed(self._data, self._at, min(len(self._data), self._at + SLICE_BYTES))
        except HttpParserError as error:
            self._refuse(400, f"this is not valid HTTP/1.1: {error}")
            return
        if head.size > limits.max_header_bytes:
            self._refuse(431, "the headers are too large")
        elif head.count > limits.max_headers:
            self._refuse(431, f"there are too many headers; {limits.max_headers} are allowed")
        elif head.is_complete:
            self._take_head(head)

    def _take_head(self, head: "HeadReader") -> None:
        for status, message in head.problems(self._owner.limits):
            self._refuse(status, message)
            return
        self._head = None
        request = self._reading = head.request
        head.request = NO_REQUEST  # the reader is part of a cycle: its garbage must not keep the body
        is_chunked = b"transfer-encoding" in request.headers
        if is_chunked:
            self._chunks = ChunkReader(is_request=True)
        self._begin_body(int(request.headers.get(b"content-length", b"0")), is_chunked=is_chunked)
        if self.in_body and not self.closed and b"expect" in request.headers and not request.is_http_1_0:
            self._receiver.continue_expected()

    # Bodies

    def _begin_body(self, length: int, *, is_chunked: bool = False) -> None:
        if not length and not is_chunked:
            self._deliver(self._reading)
            return
        self.in_body, self._body_left = True, length
        room = min(self._owner.limits.max_body_bytes, RESERVED_BYTES) if is_chunked else length
        self._body = PartialBody(room, is_exact=not is_chunked)
        if is_chunked or length > COPIED_BYTES:  # the answer must not depend on how bytes are split
            self._receiver.head_read(self._reading)

    def _read_body(self) -> None:
        """Read more of a body with a length."""
        data, at, left = self._data, self._at, self._body_left
        end = min(len(data), at + left)
        self._at = end
        self._body_left = left - (end - at)
        is_view = end - at > COPIED_BYTES and end == len(data)
        self._keep(memoryview(data)[at:end] if is_view else data[at:end])
        self._read_on_in_body()

    def filled(self, size: int) -> None:
        """Count bytes that were read into `space`."""
        self._body_left -= size
        self._receiver.body_grew(self._reading, self._body.filled(size))
        self._read_on_in_body()

    def _read_on_in_body(self) -> None:
        if self.closed:
            return
        if self._body_left:
            self.space = self._body.space()
        else:
            self._end_body()

    def _read_chunks(self) -> None:
        assert self._chunks is not None
        chunks, limits = self._chunks, self._owner.limits
        end = min(len(self._data), self._at + SLICE_BYTES)
        try:
            payload = chunks.feed(self._data[self._at : end])
        except MalformedHttp as error:
            self._refuse(400, f"this is not valid HTTP/1.1: {error}")
            return
        self._at = end - len(chunks.beyond)
        if self._body.size + len(payload) + chunks.left > limits.max_body_bytes:
            self._refuse(413, too_large(limits.max_body_bytes))
        elif chunks.count > limits.max_chunks:
            self._refuse(413, f"the body has too many chunks; {limits.max_chunks} are allowed")
        elif len(chunks.trailers) > limits.max_header_bytes:
            self._refuse(431, "the trailers are too large")
        else:
            if payload:
                self._keep(payload)
            if chunks.ended and not self.closed:
                self._end_chunks(chunks)

    def _end_chunks(self, chunks: ChunkReader) -> None:
        self._chunks = None
        problem = problem_in_trailers(chunks.trailers)
        if problem:
            self._refuse(400, problem)
        else:
            self._end_body()

    def _keep(self, part: Bytes) -> None:
        self._receiver.body_grew(self._reading, self._body.add(part))

    def _end_body(self) -> None:
        request = self._reading
        request.body = self._body.whole()
        self.in_body, self._body, self.space, self._reading = False, NO_BODY, None, NO_REQUEST
        self._deliver(request)

    # Results

    def _deliver(self, request: HttpRequest) -> None:
        self._is_waiting = True
        self._receiver.request_read(request)

    def _refuse(self, status: int, message: str) -> None:
        if not self.closed:
            self.closed = True
            self._receiver.request_refused(status, message)

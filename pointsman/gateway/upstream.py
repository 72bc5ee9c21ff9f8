"""Connections to instances: one request at a time on each, kept open between requests.

Enters: a request as bytes. Leaves: an answer, told to whoever asked. The one rule: whoever asked hears exactly one of
`answered`, `stream_ended` and `upstream_failed` last, unless they let go first.
"""

import asyncio
import ssl
import time
from asyncio import AbstractEventLoop, Task, Transport
from collections.abc import Sized
from typing import Protocol, cast

from pointsman.http.answers import MAX_HEAD_BYTES, AnswerHead, ChunkReader, Garbled
from pointsman.http.requests import COPIED_BYTES, Bytes
from pointsman.types import ExecutionInstance

# Bytes on their way out, written together at the end of a turn of the event loop.
#
# A write wakes whoever reads at the other end. Written one by one between bits of work, every one of them wakes
# somebody who has just gone to sleep; written in a row, the first wakes them and they find the rest. That takes a
# third off the cost of a request. With few requests under way nothing is gained, and what is written goes out at
# once.


FEW = 2
"""With so many requests under way, nobody waits for others."""
LARGE = 8 * 1024
"""Longer pieces do not wait either."""


class Outbox:
    """What is to be written, in its order."""

    __slots__ = ("_in_flight", "_loop", "_pending")

    def __init__(self, loop: AbstractEventLoop, in_flight: Sized) -> None:
        self._loop = loop
        self._in_flight = in_flight
        self._pending: list[tuple[Transport, Bytes]] = []

    def write(self, transport: Transport, data: Bytes) -> None:
        """Write, soon or at once. What is written to one transport keeps its order."""
        if len(data) > LARGE:  # how much a client leaves unread must be known before there is more of it
            self.flush()
            transport.write(data)
        elif self._pending:
            self._pending.append((transport, data))
        elif len(self._in_flight) <= FEW:
            transport.write(data)
        else:
            self._pending.append((transport, data))
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write everything now."""
        pending, self._pending = self._pending, []
        for transport, data in pending:
            if not transport.is_closing():
                transport.write(data)


BUFFERED_BYTES = 4 * 1024 * 1024
"""Answers that are no streams are read whole before any of it goes out, up to this size: so they can be retried."""


class Asker(Protocol):
    """Whoever sent a request upstream."""

    def answered(self, head: AnswerHead, body: bytes) -> None:
        """The whole answer."""

    def stream_began(self, head: AnswerHead) -> None:
        """The answer comes in pieces from here on."""

    def stream_piece(self, payload: bytes) -> None: ...

    def stream_ended(self) -> None: ...

    def upstream_failed(self, why: str, *, stale: bool = False) -> None:
        """There will be no answer, or no more of it. `stale`: the connection had been closed before we used it."""

    def connected(self, connection: "UpstreamConnection") -> None:
        """A connection had to be made for the request, and is there."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to an instance."""

    __slots__ = (
        "_buffer",
        "_chunks",
        "_head",
        "_left",
        "_pieces",
        "asker",
        "heard",
        "idle_since",
        "pool",
        "reused",
        "transport",
    )

    transport: Transport

    def __init__(self, pool: "UpstreamPool") -> None:
        self.pool = pool
        self.asker: Asker | None = None
        self.reused = False
        self.heard = False
        """A byte of the answer has come."""
        self.idle_since = 0.0
        self._buffer = b""
        self._head: AnswerHead | None = None
        self._chunks: ChunkReader | None = None
        self._left: int | None = None
        """Bytes of the body to come; None: it ends with its chunks, or with the connection."""
        self._pieces: list[bytes] | None = None
        """Of an answer that is read whole; None: it is passed on as it comes."""

    def ask(self, asker: Asker, request: bytes, body: Bytes) -> None:
        """Send a request."""
        self.asker = asker
        self.heard = False
        write = self.pool.outbox.write
        if len(body) > COPIED_BYTES:
            write(self.transport, request)
            write(self.transport, body)  # not joined: that would copy it
        else:
            write(self.transport, b"".join((request, body)))

    def let_go(self, asker: object) -> None:
        """Whoever asked wants no answer any more: the engine learns it by the closed connection."""
        if self.asker is asker:
            self.asker = None
            self.transport.abort()

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.asker is None:  # nobody asked: the connection is not what we think it is
            self.transport.abort()
            return
        self.heard = True
        try:
            if self._head is None:
                self._read_head(data)
            else:
                self._read_body(data)
        except Garbled as error:
            self._fail(f"it answered with something that is not HTTP: {error}")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.pool.lost(self)
        if self.asker is None:
            return
        head = self._head
        if error is None and head is not None and self._left is None and self._chunks is None:
            self._end()  # the end of the connection is the end of this answer
            return
        if error is not None:
            why = f"the connection broke: {error}"
        elif self.heard:
            why = "it closed the connection in the middle of the answer"
        else:
            why = "it closed the connection without an answer"
        self._fail(why)

    # Reading

    def _read_head(self, data: bytes) -> None:
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        while (end := data.find(b"\r\n\r\n")) >= 0:
            head, data = AnswerHead(data[:end]), data[end + 4 :]
            if head.status >= 200:
                self._take_head(head, data)
                return
            if head.status == 101:
                raise Garbled("it goes on in another protocol")
        if len(data) > MAX_HEAD_BYTES or not b"HTTP/1.".startswith(data[:7]):
            raise Garbled(f"it begins with {data[:40]!r}")
        self._buffer = data

    def _take_head(self, head: AnswerHead, rest: bytes) -> None:
        self._head = head
        if not head.has_body:
            self._left, self._pieces = 0, []
        elif head.is_stream or (head.length is not None and head.length > BUFFERED_BYTES):
            self._left, self._pieces = head.length, None
        else:
            self._left, self._pieces = head.length, []
        self._chunks = ChunkReader() if head.chunked else None
        if self._pieces is None and self.asker is not None:
            self.asker.stream_began(head)
        if rest or self._left == 0:
            self._read_body(rest)

    def _read_body(self, data: bytes) -> None:
        if self._chunks is not None:
            data = self._chunks.feed(data)
            ended = self._chunks.ended
        elif self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise Garbled("bytes after the end of the answer")
            ended = self._left == 0
        else:
            ended = False
        if self._pieces is None:
            if data and self.asker is not None:
                self.asker.stream_piece(data)
        else:
            self._pieces.append(data)
            if not ended and sum(map(len, self._pieces)) > BUFFERED_BYTES:
                self._pass_on()
        if ended and self.asker is not None:
            self._end()

    def _pass_on(self) -> None:
        """It is too long to be kept back."""
        assert self._head is not None
        assert self._pieces is not None
        pieces, self._pieces = self._pieces, None
        if self.asker is not None:
            self.asker.stream_began(self._head)
        if self.asker is not None:
            self.asker.stream_piece(b"".join(pieces))

    def _end(self) -> None:
        asker, head, pieces = self.asker, self._head, self._pieces
        assert asker is not None
        assert head is not None
        self.asker = self._head = self._chunks = self._pieces = None
        if head.closes or (self._left is None and not head.chunked):
            self.transport.close()
        else:
            self.reused = True
            self.pool.put_back(self)
        if pieces is None:
            asker.stream_ended()
        else:
            asker.answered(head, pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _fail(self, why: str) -> None:
        asker, self.asker = self.asker, None
        self.transport.abort()
        if asker is not None:
            asker.upstream_failed(why, stale=self.reused and not self.heard)


class UpstreamPool:
    """The connections to one instance."""

    def __init__(
        self, instance: ExecutionInstance, loop: AbstractEventLoop, outbox: Outbox, connect_timeout_s: float
    ) -> None:
        self.instance = instance
        self.host = instance.host
        self.port = instance.port
        self.tls = ssl.create_default_context() if instance.tls else None
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.authority = f"{host}:{self.port}".encode()
        self.outbox = outbox
        self._loop = loop
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[UpstreamConnection] = []
        self._connecting: set[Task[None]] = set()
        self._closed = False

    def leads_to(self, instance: ExecutionInstance) -> bool:
        """Whether the instance is still where these connections go."""
        leads = self.port == instance.port and self.host == instance.host and (self.tls is not None) == instance.tls
        if leads:
            self.instance = instance  # what else is known of it may have changed
        return leads

    def ask(self, asker: Asker, request: bytes, body: Bytes, *, fresh: bool = False) -> UpstreamConnection | Task[None]:
        """Send a request on an idle connection; on a new one if there is none, or if a fresh one is wanted.

        Returns the connection, or the task that makes one, which may be cancelled.
        """
        while self._idle and not fresh:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                connection.ask(asker, request, body)
                return connection
        task = self._loop.create_task(self._connect(asker, request, body))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    async def _connect(self, asker: Asker, request: bytes, body: Bytes) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(self), self.host, self.port, ssl=self.tls
                )
        except TimeoutError:
            asker.upstream_failed(f"no connection within {self._connect_timeout_s:g} s")
            return
        except OSError as error:
            asker.upstream_failed(f"no connection: {error.strerror or error}")
            return
        asker.connected(connection)
        connection.ask(asker, request, body)

    def put_back(self, connection: UpstreamConnection) -> None:
        """It may be used again."""
        if self._closed:
            connection.transport.close()
        else:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)

    def lost(self, connection: UpstreamConnection) -> None:
        """It is closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close_idle(self, since_before: float) -> None:
        """Close connections that nobody has used since."""
        while self._idle and self._idle[0].idle_since < since_before:
            self._idle.pop(0).transport.close()

    def close(self) -> None:
        """No new requests; those under way go on."""
        self._closed = True
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()

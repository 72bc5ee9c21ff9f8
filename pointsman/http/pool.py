"""Connections to servers. They are kept open between requests, and each carries one request at a time.

Enters: requests as bytes. Leaves: responses, to a listener as they arrive. The one rule: the last call to a listener is
exactly one of `answered`, `stream_ended` and `request_failed`, unless the listener cancels before.
"""

import asyncio
import errno
import os
import socket
import ssl
import time
from asyncio import AbstractEventLoop, Task, Transport
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, cast

from pointsman.errors import PointsmanError, shown_bytes, system_reason
from pointsman.http.heads import COPIED_BYTES, Bytes
from pointsman.http.responses import (
    MAX_HEAD_BYTES,
    TURN_BYTES,
    TURN_CHUNKED_BYTES,
    ChunkReader,
    MalformedHttp,
    ReadPace,
    RepeatedResponseHead,
    ResponseHead,
)

REQUEST_HEAD = b"%b %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n"
"""Method, target, authority, header lines each with its end, and length of the body."""

# Each write wakes the process that reads. So the writes of one turn of the event loop are collected, and wake that
# process once, which saves a third of the cost of a request. With few requests in flight that gains nothing, and bytes
# are written at once.

FEW = 2
"""If at most this many requests are in flight, writes are not collected."""
LARGE = 8 * 1024
"""Longer pieces are written at once."""


class Outbox:
    """Pending writes, in order."""

    __slots__ = ("_in_flight", "_loop", "_pending")

    def __init__(self, loop: AbstractEventLoop, in_flight: Sized) -> None:
        self._loop = loop
        self._in_flight = in_flight
        self._pending: list[tuple[Transport, Bytes]] = []

    def write(self, transport: Transport, data: Bytes) -> None:
        """Write, now or at the end of this turn. Writes to one transport keep their order."""
        if len(data) > LARGE:  # a client's unread bytes must be counted before more is written
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
        pending, self._pending = self._pending, []
        for transport, data in pending:
            if not transport.is_closing():
                transport.write(data)


BUFFERED_BYTES = 4 * 1024 * 1024
"""A response up to this size that is not a stream is read completely before it is passed on, so that the request can be
retried."""
MAX_PATH_BYTES = 100
"""Maximum length of the path of a unix socket; systems allow 104 to 108."""
BUSY_WAIT_S = 0.01
BUSY_TRIES = 500


class TcpTarget(Protocol):
    """Where a server listens."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def tls(self) -> bool: ...


class UnixSocket(NamedTuple):
    """A server that listens on a unix socket."""

    path: Path


Target: TypeAlias = TcpTarget | UnixSocket

# Failures of this process or machine. They say nothing about the server, because it was not reached.

SHORTAGES: Mapping[int, str] = {
    errno.EMFILE: "files",
    errno.ENFILE: "files-of-machine",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "memory",
    errno.EAGAIN: "processes",
}
"""What this side lacks, by error number."""
UNCONNECTED: Mapping[int, str] = {
    **SHORTAGES,
    errno.EADDRNOTAVAIL: "ports",
    errno.EAGAIN: "ports",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EAFNOSUPPORT: "protocol",
}
"""What this side lacks, for an attempt to connect."""
UNRESOLVED = frozenset({socket.EAI_AGAIN, socket.EAI_MEMORY, socket.EAI_SYSTEM})
"""Errors in a name lookup to which no name server has answered. "No such name" is an answer."""


def local_cause(error: BaseException | None, causes: Mapping[int, str] = UNCONNECTED) -> str:
    """What is wrong on this side after a failed attempt to connect; empty if the server may be at fault."""
    if not isinstance(error, OSError):
        return ""
    if isinstance(error, socket.gaierror | ssl.SSLError):  # lookup errors have numbers of their own
        cause = "names" if error.errno in UNRESOLVED and isinstance(error, socket.gaierror) else ""
    else:
        cause = causes.get(error.errno or 0, "")
    if cause or isinstance(error, ConnectionError | TimeoutError):
        return cause
    # Names, trusted certificates and libraries are read from files. Errors in reading these files are hidden, or look
    # like other errors.
    return "" if descriptors_left() else "files"


def descriptors_left(count: int = 1) -> bool:
    """Whether this process can open this many more files."""
    held: list[int] = []
    try:
        while len(held) < count:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    finally:
        for one in held:
            os.close(one)
    return True


class ResponseListener(Protocol):
    """Gets the response to a request."""

    def answered(self, head: ResponseHead, body: bytes) -> None:
        """The whole response."""

    def stream_began(self, head: ResponseHead) -> None:
        """The response comes in pieces from here on."""

    def stream_piece(self, payload: bytes) -> None: ...

    def stream_ended(self, trailers: bytes = b"") -> None:
        """`trailers`: lines after the last chunk, each with its end."""

    def request_failed(self, why: str, *, stale: bool = False, error: OSError | None = None, local: str = "") -> None:
        """There is no response, or the rest of it is missing. `stale`: the server had closed the connection before the
        request was sent. `error`: why no connection could be opened, if that failed. `local`: see `local_cause`."""

    def connected(self, connection: "ClientConnection") -> None:
        """A connection was opened for the request."""


class ClientConnection(asyncio.Protocol):
    """One connection to a server."""

    __slots__ = (
        "_buffer", "_chunks", "_head", "_held", "_left", "_pieces", "has_response", "idle_since", "listener", "pace",
        "pool", "reused", "transport",
    )  # fmt: skip

    transport: Transport
    pace: ReadPace

    def __init__(self, pool: "ConnectionPool") -> None:
        self.pool = pool
        self.listener: ResponseListener | None = None
        self.reused = False
        self.has_response = False
        """Whether a byte of the response has arrived."""
        self.idle_since = 0.0
        self._buffer = b""
        self._head: ResponseHead | None = None
        self._chunks: ChunkReader | None = None
        self._left: int | None = None
        """Bytes of the body that are still to come; None if the body ends with its chunks, or with the connection."""
        self._pieces: list[bytes] | None = None
        """Pieces of a response that is read completely; None if pieces are passed on as they arrive."""
        self._held = 0
        """Total bytes of these pieces."""

    def send(self, listener: ResponseListener, head: bytes, body: Bytes) -> None:
        self.listener = listener
        self.has_response = False
        write = self.pool.outbox.write
        if len(body) > COPIED_BYTES:
            write(self.transport, head)
            write(self.transport, body)  # not joined: that would copy it
        else:
            write(self.transport, b"".join((head, body)))

    def cancel(self, listener: object) -> None:
        """Give up the response. The server notices because the connection is closed."""
        if self.listener is listener:
            self.listener = None
            self.transport.abort()

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(Transport, transport)
        self.pace = ReadPace(self.transport, self.pool.loop, self.data_received)

    def data_received(self, data: bytes) -> None:
        if self.listener is None:  # a response to no request: the connection is no longer usable
            self.transport.abort()
            return
        self.has_response = self.pool.is_heard = True
        if self.pace.later:
            self.pace.later += data
            return
        if self._chunks is not None and self._pieces is None and len(data) <= TURN_CHUNKED_BYTES:
            payload = self._chunks.only(data)
            if payload is not None:  # as engines stream
                self.listener.stream_piece(payload)
                return
        try:
            if self._head is None:
                self._read_head(data)
            else:
                self._read_body(data)
        except MalformedHttp as error:
            self._fail(f"it answered with something that is not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.pool.lost(self)
        while self.pace.later and self.listener is not None:
            self.pace.read_on()
        if self.listener is None:
            return
        if error is None and self._head is not None and self._left is None and self._chunks is None:
            self._end()  # the end of the connection is the end of this response
            return
        if error is not None:
            why = f"the connection broke: {error}"
        elif self.has_response:
            why = "it closed the connection in the middle of the answer"
        else:
            why = "it closed the connection without an answer"
        self._fail(why, local_cause(error, SHORTAGES))

    # Reading

    def _read_head(self, data: bytes) -> None:
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        repeated = self.pool.last_head.read(data)
        if repeated is not None:
            self._take_head(repeated[0], data[repeated[1] :])
            return
        while (end := data.find(b"\r\n\r\n")) >= 0:
            head, written, data = ResponseHead(data[:end]), data[: end + 4], data[end + 4 :]
            if head.status >= 200:
                self.pool.last_head.remember(written, head)
                self._take_head(head, data)
                return
            if head.status == 101:
                raise MalformedHttp("the server switched to another protocol")
        if len(data) > MAX_HEAD_BYTES or not b"HTTP/1.".startswith(data[:7]):
            raise MalformedHttp(f"it begins with {shown_bytes(data, 40)}")
        self._buffer = data

    def _take_head(self, head: ResponseHead, rest: bytes) -> None:
        self._head = head
        if not head.has_body:
            self._left, self._pieces = 0, []
        elif head.is_stream or (head.length is not None and head.length > self.pool.buffered_bytes):
            self._left, self._pieces = head.length, None
        else:
            self._left, self._pieces = head.length, []
        self._chunks = ChunkReader() if head.chunked else None
        self._held = 0
        if self._pieces is None and self.listener is not None:
            self.listener.stream_began(head)
        if rest or self._left == 0:
            self._read_body(rest)

    def _read_body(self, data: bytes) -> None:
        data = self.pace.first(data, TURN_BYTES if self._chunks is None else TURN_CHUNKED_BYTES)
        if self._chunks is not None:
            data = self._chunks.feed(data)
            ended, is_beyond = self._chunks.ended, bool(self._chunks.beyond)
        elif self._left is not None:
            self._left -= len(data)
            ended, is_beyond = self._left == 0, self._left < 0
        else:
            ended = is_beyond = False
        if is_beyond or (ended and self.pace.later):
            raise MalformedHttp("bytes after the end of the answer")
        if self._pieces is None:
            if data and self.listener is not None:
                self.listener.stream_piece(data)
        else:
            self._pieces.append(data)
            self._held += len(data)
            if not ended and self._held > self.pool.buffered_bytes:
                self._pass_on()
        if ended and self.listener is not None:
            self._end()

    def _pass_on(self) -> None:
        """Pass on a response that is too long to be buffered."""
        assert self._head is not None
        assert self._pieces is not None
        pieces, self._pieces = self._pieces, None
        if self.listener is not None:
            self.listener.stream_began(self._head)
        if self.listener is not None:
            self.listener.stream_piece(b"".join(pieces))

    def _end(self) -> None:
        listener, head, pieces = self.listener, self._head, self._pieces
        trailers = b"" if self._chunks is None else self._chunks.trailers
        assert listener is not None
        assert head is not None
        self.listener = self._head = self._chunks = self._pieces = None
        if head.closes or (self._left is None and not head.chunked):
            self.transport.close()
        else:
            self.reused = True
            self.pool.put_back(self)
        if pieces is None:
            listener.stream_ended(trailers)
        else:
            listener.answered(head, pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _fail(self, why: str, local: str = "") -> None:
        listener, self.listener = self.listener, None
        self.transport.abort()
        if listener is not None:
            listener.request_failed(why, stale=self.reused and not self.has_response, local=local)


class ConnectionPool:
    def __init__(
        self,
        target: Target,
        loop: AbstractEventLoop,
        outbox: Outbox,
        connect_timeout_s: float,
        buffered_bytes: int = BUFFERED_BYTES,
    ) -> None:
        self.target = target
        self.lines = b""
        """Header lines of every request to this server, each with its line end."""
        self.last_head = RepeatedResponseHead()
        self.outbox = outbox
        self.is_heard = False
        """Whether a byte of a response has arrived since this was last reset by its reader."""
        self.buffered_bytes = buffered_bytes
        self._address = _address_of(target)
        host, port, _ = self._address
        self.authority = f"{f'[{host}]' if ':' in host else host}:{port}".encode() if port else b"localhost"
        self.loop = loop
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[ClientConnection] = []
        self._connecting: set[Task[None]] = set()
        self._closed = False

    def leads_to(self, target: Target) -> bool:
        """Whether these connections lead to the target."""
        leads = self._address == _address_of(target)
        if leads:
            self.target = target  # other properties of the target may have changed
        return leads

    def send(
        self, listener: ResponseListener, head: bytes, body: Bytes, *, fresh: bool = False
    ) -> ClientConnection | Task[None]:
        """Send a request on an idle connection, or on a new one if none is idle or `fresh` is set. Returns the
        connection, or the task that opens a new one; the task may be cancelled.
        """
        while self._idle and not fresh:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                connection.send(listener, head, body)
                return connection
        task = self.loop.create_task(self._connect(listener, head, body))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    async def _connect(self, listener: ResponseListener, head: bytes, body: Bytes) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                connection = await self._connected()
        except TimeoutError:
            why = f"no connection within {self._connect_timeout_s:g} s"
            listener.request_failed(why, error=TimeoutError(why))
            return
        except OSError as error:
            listener.request_failed(f"no connection: {_reason(error)}", error=error, local=local_cause(error))
            return
        listener.connected(connection)
        connection.send(listener, head, body)

    async def _connected(self) -> ClientConnection:
        target = self.target
        if not isinstance(target, UnixSocket):
            host, port, tls = self._address
            context = _tls() if tls else None
            return (await self.loop.create_connection(lambda: ClientConnection(self), host, port, ssl=context))[1]
        for _ in range(BUSY_TRIES):
            try:
                with short_path(target.path) as path:
                    return (await self.loop.create_unix_connection(lambda: ClientConnection(self), path))[1]
            except BlockingIOError:  # the server's backlog is full; a TCP socket would wait by itself
                await asyncio.sleep(BUSY_WAIT_S)
        raise BlockingIOError("the server accepts no connections")

    def put_back(self, connection: ClientConnection) -> None:
        if self._closed:
            connection.transport.close()
        else:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)

    def lost(self, connection: ClientConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close_idle(self, since_before: float) -> None:
        """Close connections that have been idle since before this time."""
        while self._idle and self._idle[0].idle_since < since_before:
            self._idle.pop(0).transport.close()

    def close(self) -> None:
        """Take no new requests; those in flight continue."""
        self._closed = True
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()


def _address_of(target: Target) -> tuple[str, int, bool]:
    return (str(target.path), 0, False) if isinstance(target, UnixSocket) else (target.host, target.port, target.tls)


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return system_reason(error)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A path to a unix socket that is short enough to bind or connect to, while this is open."""
    if len(os.fsencode(path)) <= MAX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not Path("/proc/self/fd").exists():
            raise PointsmanError(f"{path} is too long for a socket here; choose a state directory with a shorter path")
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)

"""HTTP/1.1 requests to one server, over a unix socket, on connections that are kept open between them."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeAlias

from pointsman.errors import PointsmanError
from pointsman.wire import CallFailed

# Unix sockets, whatever the length of their path.


SHORT_ENOUGH = 100
"""Bytes of a unix socket's path; systems take 104 to 108."""


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """A path to a socket that is short enough to bind or connect to, while this is open."""
    if len(os.fsencode(path)) <= SHORT_ENOUGH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if Path("/proc/self/fd").exists():
            yield f"/proc/self/fd/{folder}/{path.name}"
        else:
            raise PointsmanError(f"{path} is too long for a socket here; choose a state directory with a shorter path")
    finally:
        os.close(folder)


Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LONGEST_HEAD = 64 * 1024
BROKE_OFF = "the answer broke off in the middle"
BUSY_WAIT_S = 0.01
BUSY_TRIES = 500


class HttpAnswer:
    """An answer whose body has not been read yet."""

    def __init__(self, reader: asyncio.StreamReader, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split(" ", 2)[1])
        self._reader = reader
        named = [line.partition(":") for line in lines if line]
        headers = {name.strip().lower(): value.strip() for name, _, value in named}
        self.kind = headers.get("content-type", "")
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._left = int(headers["content-length"]) if "content-length" in headers else None
        self._closes = headers.get("connection", "").lower() == "close" or not (self._chunked or self._left is not None)
        self._is_read = False

    @property
    def leaves_connection_usable(self) -> bool:
        return self._is_read and not self._closes

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `CallFailed` if it breaks off."""
        try:
            async for piece in self._pieces():
                yield piece
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise CallFailed(BROKE_OFF, status=502) from error

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self._chunked:
            while size := int((await self._reader.readline()).partition(b";")[0], 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readexactly(2)
        elif self._left is not None:
            if self._left:
                yield await self._reader.readexactly(self._left)
        else:
            while piece := await self._reader.read(65536):
                yield piece
        self._is_read = True


class Requesting:
    """A `Transport` of handles."""

    def __init__(
        self, connect: Callable[[], Awaitable[Streams]], where: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._connect = connect
        self._where = where
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._idle: list[Streams] = []

    @classmethod
    def unix(cls, path: str, headers: Mapping[str, str] | None = None) -> "Requesting":
        return cls(lambda: _connected(path), path, headers)

    @asynccontextmanager
    async def ask(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[HttpAnswer]:
        """Send a request; whoever leaves before the answer has ended hangs up. Raises `CallFailed`."""
        own = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {path} HTTP/1.1\r\nhost: pointsman\r\n{self._headers}{own}content-length: {len(body)}\r\n\r\n"
        streams, answer = await self._answered(head.encode("latin-1", "replace") + body)
        try:
            yield answer
        finally:
            if answer.leaves_connection_usable:
                self._idle.append(streams)
            else:
                streams[1].transport.abort()

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _answered(self, request: bytes) -> tuple[Streams, HttpAnswer]:
        while self._idle:
            streams = self._idle.pop()
            if not streams[0].at_eof() and not streams[1].is_closing():
                try:
                    return streams, await _sent(streams, request)
                except (ConnectionError, asyncio.IncompleteReadError) as error:
                    if isinstance(error, asyncio.IncompleteReadError) and error.partial:
                        raise CallFailed(BROKE_OFF, status=502) from error
                    # It had hung up on the old connection, as it may.
        try:
            streams = await self._connected()
            return streams, await _sent(streams, request)
        except (OSError, asyncio.IncompleteReadError, ValueError, IndexError) as error:
            said = str(error) or type(error).__name__
            raise CallFailed(f"the gateway at {self._where} does not answer: {said}", status=503) from error

    async def _connected(self) -> Streams:
        """A unix socket whose queue is full refuses at once; then it is tried again, as a port would do by itself."""
        for _ in range(BUSY_TRIES):
            try:
                return await self._connect()
            except BlockingIOError:
                await asyncio.sleep(BUSY_WAIT_S)
        return await self._connect()


async def _sent(streams: Streams, request: bytes) -> HttpAnswer:
    reader, writer = streams
    try:
        writer.write(request)
        await writer.drain()
        while True:
            answer = HttpAnswer(reader, (await reader.readuntil(b"\r\n\r\n"))[:-4])
            if answer.status >= 200:
                return answer
    except BaseException:  # also if whoever asked is cancelled: the other side must see it
        writer.transport.abort()
        raise


async def _connected(path: str) -> Streams:
    with reachable(Path(path)) as short:
        return await asyncio.open_unix_connection(short, limit=LONGEST_HEAD)

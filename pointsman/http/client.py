"""Requests whose responses are awaited: whole, or piece by piece."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from pointsman.errors import PointsmanError
from pointsman.http.pool import ClientConnection, ConnectionPool, Outbox, Target
from pointsman.http.responses import ResponseHead

MAX_RESPONSE_BYTES = 16 * 1024 * 1024
"""Of a response that is fetched as a whole."""
AHEAD_BYTES = 1024 * 1024
"""Bytes of a streamed response that may wait to be read."""


class NoResponse(PointsmanError):
    """A server gave no response, or an incomplete or unreadable one; the message says how that showed."""

    def __init__(self, why: str, *, began: bool = False, error: OSError | None = None, local: str = "") -> None:
        self.began = began
        """Part of a response has arrived."""
        self.error = error
        """Why there is no connection; None if there was one."""
        self.local = local
        """What is wrong on this side; empty: it may be the server."""
        super().__init__(why)


class HttpResponse(NamedTuple):
    """A whole response."""

    status: int
    body: bytes


class StreamedResponse:
    """A response whose body is read as it comes: a `ResponseListener` that can be awaited."""

    def __init__(self, pool: ConnectionPool, head: bytes, body: bytes) -> None:
        self._pool = pool
        self._request = (head, body)
        self.status = 0
        """0 before the head has arrived."""
        self._pieces: deque[bytes] = deque()
        self._is_paused = False
        self._has_ended = False
        self._failure: NoResponse | None = None
        self._news = asyncio.Event()
        self._attempt = pool.send(self, head, body)

    async def began(self) -> None:
        """Wait for the head. Raises `NoResponse`."""
        while not self.status:
            if self._failure is not None:
                raise self._failure
            await self._wait()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `NoResponse` if it breaks off."""
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            self._pause(False)
            if self._failure is not None:
                raise self._failure
            if self._has_ended:
                return
            await self._wait()

    async def read(self, max_bytes: int | None = None) -> bytes:
        """The whole body. Raises `NoResponse`."""
        parts, length = [], 0
        async for piece in self.pieces():
            parts.append(piece)
            length += len(piece)
            if max_bytes is not None and length > max_bytes:
                raise NoResponse(f"its answer is longer than {max_bytes} bytes", began=True)
        return b"".join(parts)

    def close(self) -> None:
        """Give the rest up, if any is missing."""
        if self._has_ended:
            return
        if isinstance(self._attempt, ClientConnection):
            self._attempt.cancel(self)
        else:
            self._attempt.cancel()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _pause(self, pause: bool) -> None:
        if pause is self._is_paused or not isinstance(self._attempt, ClientConnection):
            return
        self._is_paused = pause
        transport = self._attempt.transport
        if not transport.is_closing():
            transport.pause_reading() if pause else transport.resume_reading()

    # Called by the connection

    def answered(self, head: ResponseHead, body: bytes) -> None:
        self.status = head.status
        self._pieces.append(body)
        self.stream_ended()

    def stream_began(self, head: ResponseHead) -> None:
        self.status = head.status
        self._news.set()

    def stream_piece(self, payload: bytes) -> None:
        self._pieces.append(payload)
        if sum(map(len, self._pieces)) > AHEAD_BYTES:
            self._pause(True)
        self._news.set()

    def stream_ended(self) -> None:
        self._pause(False)  # the connection may serve another request from here on
        self._has_ended = True
        self._news.set()

    def request_failed(self, why: str, *, stale: bool = False, error: OSError | None = None, local: str = "") -> None:
        if stale:
            self._attempt = self._pool.send(self, *self._request, fresh=True)
        else:
            self._has_ended, self._failure = True, NoResponse(why, began=self.status > 0, error=error, local=local)
            self._news.set()

    def connected(self, connection: ClientConnection) -> None:
        self._attempt = connection


class HttpClient:
    """Awaits responses of one server, on connections that are kept open between requests."""

    def __init__(self, target: Target, *, connect_timeout_s: float = 30.0) -> None:
        self._target = target
        self._connect_timeout_s = connect_timeout_s
        self._pool: ConnectionPool | None = None
        """None before the first request."""

    async def fetch(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float,
        headers: str = "",
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> HttpResponse:
        """The whole response. `headers`: lines, each with its end. Raises `NoResponse`."""
        try:
            async with asyncio.timeout(timeout_s), self.stream(method, path, body, headers) as response:
                return HttpResponse(response.status, await response.read(max_bytes))
        except TimeoutError:
            raise NoResponse(f"no answer to {method} {path} within {timeout_s:g} s") from None

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, body: bytes = b"", headers: str = ""
    ) -> AsyncIterator[StreamedResponse]:
        """The response as it comes; leaving this before its end closes the connection. Raises `NoResponse`."""
        pool = self._pool
        if pool is None:
            loop = asyncio.get_running_loop()
            pool = ConnectionPool(self._target, loop, Outbox(loop, ()), self._connect_timeout_s, buffered_bytes=0)
            self._pool = pool
        lines = f"host: {pool.authority.decode()}\r\nuser-agent: pointsman\r\n{headers}"
        if body and "content-type" not in headers:
            lines += "content-type: application/json\r\n"
        if body or method != "GET":
            lines += f"content-length: {len(body)}\r\n"
        head = f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1", "replace")
        response = StreamedResponse(pool, head, body)
        try:
            await response.began()
            yield response
        finally:
            response.close()

    def close(self) -> None:
        """Close the idle connections."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


async def fetch(
    target: Target,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    timeout_s: float,
    headers: str = "",
    max_bytes: int = MAX_RESPONSE_BYTES,
) -> HttpResponse:
    """The whole response, on a connection of its own. Raises `NoResponse`."""
    client = HttpClient(target)
    try:
        return await client.fetch(method, path, body, timeout_s=timeout_s, headers=headers, max_bytes=max_bytes)
    finally:
        client.close()

"""Requests whose responses are awaited: whole, or piece by piece."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeAlias

from pointsman.errors import PointsmanError
from pointsman.http.pool import ClientConnection, ConnectionPool, Outbox, Target
from pointsman.http.responses import ResponseHead

MAX_RESPONSE_BYTES = 16 * 1024 * 1024
"""Maximum size of a response that is fetched as a whole."""
KEPT_S = 30.0
"""How long an idle connection is kept. After a longer time, a middlebox may have dropped it silently."""
AHEAD_BYTES = 1024 * 1024
"""Bytes of a streamed response that may wait to be read."""


class NoResponse(PointsmanError):
    """A server gave no response, or an incomplete or unreadable one; the message describes the failure."""

    def __init__(self, why: str, *, began: bool = False, error: OSError | None = None, local: str = "") -> None:
        self.began = began
        """Whether part of a response has arrived."""
        self.error = error
        """Why no connection could be opened; None if there was a connection."""
        self.local = local
        """What is wrong on this side; empty if the server may be at fault."""
        super().__init__(why)


class HttpResponse(NamedTuple):
    """A whole response."""

    status: int
    body: bytes


Reply: TypeAlias = HttpResponse | NoResponse


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
        """Give up the rest of the body, if part of it is missing."""
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
        self._attempt.pace.let_read(on=not pause)

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

    def stream_ended(self, trailers: bytes = b"") -> None:
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


class Exchange:
    """A request whose whole response goes to a callback, once: a `ResponseListener` that needs no task."""

    def __init__(
        self, pool: ConnectionPool, head: bytes, body: bytes, timeout_s: float, done: Callable[[Reply], None]
    ) -> None:
        self._pool = pool
        self._request = (head, body)
        self._done: Callable[[Reply], None] | None = done
        """The callback; None once it was called, or the exchange was cancelled."""
        self._status = 0
        self._pieces: list[bytes] = []
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._timed_out, timeout_s)
        self._attempt = pool.send(self, head, body)

    def cancel(self) -> None:
        """Give up the response."""
        self._done = None
        self._timer.cancel()
        if isinstance(self._attempt, ClientConnection):
            self._attempt.cancel(self)
        else:
            self._attempt.cancel()

    def _end(self, reply: Reply) -> None:
        done, self._done = self._done, None
        self._timer.cancel()
        if done is not None:
            done(reply)

    def _timed_out(self, timeout_s: float) -> None:
        done = self._done
        self.cancel()
        if done is not None:
            asked = " ".join(self._request[0].decode("latin-1").split(" ", 2)[:2])
            done(NoResponse(f"no answer to {asked} within {timeout_s:g} s", began=self._status > 0))

    # Called by the connection

    def answered(self, head: ResponseHead, body: bytes) -> None:
        self._end(HttpResponse(head.status, body))

    def stream_began(self, head: ResponseHead) -> None:
        self._status = head.status

    def stream_piece(self, payload: bytes) -> None:
        self._pieces.append(payload)
        if sum(map(len, self._pieces)) > MAX_RESPONSE_BYTES:
            done = self._done
            self.cancel()
            if done is not None:
                done(NoResponse(f"its answer is longer than {MAX_RESPONSE_BYTES} bytes", began=True))

    def stream_ended(self, trailers: bytes = b"") -> None:
        self._end(HttpResponse(self._status, b"".join(self._pieces)))

    def request_failed(self, why: str, *, stale: bool = False, error: OSError | None = None, local: str = "") -> None:
        if stale and self._done is not None:
            self._attempt = self._pool.send(self, *self._request, fresh=True)
        else:
            self._end(NoResponse(why, began=self._status > 0, error=error, local=local))

    def connected(self, connection: ClientConnection) -> None:
        self._attempt = connection


class HttpClient:
    """Awaits responses of one server, on connections that are kept open between requests."""

    def __init__(self, target: Target, *, connect_timeout_s: float = 30.0, buffered_bytes: int = 0) -> None:
        """`buffered_bytes`: responses up to this size are not read piece by piece."""
        self.target = target
        self._connect_timeout_s = connect_timeout_s
        self._buffered_bytes = buffered_bytes
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
        """The response as it comes. Leaving the block before the response has ended closes the connection. Raises
        `NoResponse`."""
        pool = self._open()
        response = StreamedResponse(pool, _head(pool, method, path, body, headers), body)
        try:
            await response.began()
            yield response
        finally:
            response.close()

    def exchange(
        self, method: str, path: str, body: bytes, timeout_s: float, done: Callable[[Reply], None], headers: str = ""
    ) -> Exchange:
        """Send a request. `done` is called with the whole response, or with the reason why there is none."""
        pool = self._open()
        pool.close_idle(time.monotonic() - KEPT_S)
        return Exchange(pool, _head(pool, method, path, body, headers), body, timeout_s, done)

    def _open(self) -> ConnectionPool:
        if self._pool is None:
            loop = asyncio.get_running_loop()
            outbox = Outbox(loop, ())
            self._pool = ConnectionPool(self.target, loop, outbox, self._connect_timeout_s, self._buffered_bytes)
        return self._pool

    def close(self) -> None:
        """Close the idle connections."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _head(pool: ConnectionPool, method: str, path: str, body: bytes, headers: str = "") -> bytes:
    lines = f"host: {pool.authority.decode()}\r\nuser-agent: pointsman\r\n{headers}"
    if body and "content-type" not in headers:
        lines += "content-type: application/json\r\n"
    if body or method != "GET":
        lines += f"content-length: {len(body)}\r\n"
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1", "replace")


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
    """The whole response, on its own connection. Raises `NoResponse`."""
    client = HttpClient(target)
    try:
        return await client.fetch(method, path, body, timeout_s=timeout_s, headers=headers, max_bytes=max_bytes)
    finally:
        client.close()

"""Questions to servers: small HTTP/1.1 requests with a time limit, for probes and metrics; clients' go elsewhere."""

import asyncio
import ssl
from functools import cache
from typing import cast

import httptools
import msgspec

from pointsman.control.desired import Address
from pointsman.errors import PointsmanError

LONGEST_ANSWER = 16 * 1024 * 1024


class Unanswered(PointsmanError):
    """A server gave no answer, or none that can be read; the message says how that showed."""


class Answer(msgspec.Struct, frozen=True):
    """What a server said."""

    status: int
    body: bytes


class ProbeConnection(asyncio.Protocol):
    """A connection to one server, made when needed and kept as long as the server wants. One question at a time."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._transport: asyncio.Transport | None = None
        """None: not connected."""
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Answer] | None = None
        """None: nothing was asked."""
        self._body = bytearray()
        self._status = 0
        self._ends_with_connection = False

    async def ask(self, method: str, path: str, body: bytes = b"", *, timeout_s: float, headers: str = "") -> Answer:
        """Ask once; raises `Unanswered`. `headers`: more of them, each with its line end."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(method, path, body, headers)
        except TimeoutError:
            self.close()
            raise Unanswered(f"no answer to {method} {path} within {timeout_s:g} s") from None
        except OSError as error:
            self.close()
            raise Unanswered(_reason(error)) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Hang up; the next question connects again."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def _ask(self, method: str, path: str, body: bytes, headers: str) -> Answer:
        kept = self._transport is not None
        try:
            return await self._exchange(method, path, body, headers)
        except ConnectionError:
            if not kept or self._status:
                raise
        return await self._exchange(method, path, body, headers)  # it had hung up on the old line, as it may

    async def _exchange(self, method: str, path: str, body: bytes, headers: str) -> Answer:
        loop = asyncio.get_running_loop()
        if self._transport is None:
            host, port, tls = self._address
            await loop.create_connection(lambda: self, host, port, ssl=_tls() if tls else None)
        assert self._transport is not None
        self._answer = loop.create_future()
        self._status, self._ends_with_connection = 0, False
        self._body.clear()
        self._transport.write(self._request(method, path, body, headers))
        return await self._answer

    def _request(self, method: str, path: str, body: bytes, headers: str) -> bytes:
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        head = f"{method} {path} HTTP/1.1\r\nhost: {host}:{self._address.port}\r\nuser-agent: pointsman\r\n{headers}"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return f"{head}\r\n".encode("latin-1") + body

    # asyncio's and httptools' callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # not a check: transports of other loops only act like one
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Unanswered(f"what it answered is not HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._ends_with_connection and error is None:
            self._finish()
        self._fail(error or ConnectionResetError("hung up without an answer"))

    def on_message_begin(self) -> None:
        self._ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > LONGEST_ANSWER:
            self._fail(Unanswered(f"its answer is longer than {LONGEST_ANSWER} bytes"))
            self.close()

    def on_message_complete(self) -> None:
        if self._status < 200:  # 100 Continue and its like come before the answer
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._finish()

    def _finish(self) -> None:
        if self._answer is not None and not self._answer.done() and self._status:
            self._answer.set_result(Answer(self._status, bytes(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


async def ask(
    address: Address, method: str, path: str, body: bytes = b"", *, timeout_s: float, headers: str = ""
) -> Answer:
    """Ask on a connection of its own; raises `Unanswered`."""
    line = ProbeConnection(address)
    try:
        return await line.ask(method, path, body, timeout_s=timeout_s, headers=headers)
    finally:
        line.close()


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return error.strerror or str(error) or type(error).__name__


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()

"""Server connections over real sockets; the tests write the responses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from pointsman.http.heads import HttpRequest
from pointsman.http.server import HttpServer, ResponseStream, ServerConnection

TIMEOUT_S = 10.0
GET = b"GET /it?never=read HTTP/1.1\r\nhost: here\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
PLAIN = b"content-type: text/plain\r\n"


class Client:
    """A connection to a server whose requests the test handles."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[tuple[ServerConnection, HttpRequest]] = asyncio.Queue()
        self.server = HttpServer(lambda connection, request: self.requests.put_nowait((connection, request)))
        self._reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def connect(self, port: int) -> None:
        self._reader, self.writer = await asyncio.open_connection("127.0.0.1", port)

    async def request(self) -> tuple[ServerConnection, HttpRequest]:
        """The next request that the server received."""
        return await asyncio.wait_for(self.requests.get(), TIMEOUT_S)

    async def read(self, size: int) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(size), TIMEOUT_S)

    async def rest(self) -> bytes:
        """Everything until the server closes the connection."""
        return await asyncio.wait_for(self._reader.read(), TIMEOUT_S)


class Handler:
    """Records its calls."""

    def __init__(self) -> None:
        self.abandoned = False
        self.room = asyncio.Event()

    def abandon(self) -> None:
        self.abandoned = True
        self.room.set()

    def pause(self) -> None:
        self.room.clear()

    def resume(self) -> None:
        self.room.set()


@asynccontextmanager
async def connected() -> AsyncIterator[Client]:
    client = Client()
    await client.connect(await client.server.listen("127.0.0.1", 0))
    try:
        yield client
    finally:
        client.writer.transport.abort()
        client.server.stop_listening()
        while client.server.connections:
            await asyncio.sleep(0)


def run(check: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with connected() as client:
            await check(client)

    asyncio.run(main())


def test_a_request_is_read_completely_and_the_connection_is_reused() -> None:
    async def check(client: Client) -> None:
        for body in (b"", b"some words", b"x" * 300_000):
            length = b"content-length: %d\r\n\r\n" % len(body)
            head = b"POST /it?never=read HTTP/1.1\r\nhost: here\r\nX-Pointsman-Secret: Sesame\r\n"
            client.writer.write(head + length + body)
            connection, request = await client.request()
            assert (request.method, request.path, bytes(request.body)) == (b"POST", b"/it", body)
            assert request.headers[b"x-pointsman-secret"] == b"Sesame"
            connection.answer(200, b"{}")
            assert await client.read(len(OK)) == OK

    run(check)


def test_requests_share_no_state() -> None:
    async def check(client: Client) -> None:
        client.writer.write(b"POST /a HTTP/1.1\r\nhost: here\r\nmine: 1\r\ncontent-length: 1\r\n\r\nx" + GET)
        (await client.request())[0].answer(200, b"{}")
        _, second = await client.request()
        assert (second.path, second.headers, second.body) == (b"/it", {b"host": b"here"}, b"")

    run(check)


def test_pipelined_requests_wait_their_turn() -> None:
    async def check(client: Client) -> None:
        many = 50
        client.writer.write(b"".join(GET.replace(b"/it", b"/%d" % number) for number in range(many)))
        for number in range(many):
            connection, request = await client.request()
            assert request.path == b"/%d" % number
            assert client.requests.empty(), "one at a time"
            connection.answer(200, b"{}")
        assert await client.read(many * len(OK)) == many * OK

    run(check)


def test_pieces_are_sent_as_they_are_written_and_held_pieces_together() -> None:
    async def check(client: Client) -> None:
        client.writer.write(GET)
        connection, _ = await client.request()
        stream = ResponseStream(connection, PLAIN + b"own: 1\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nown: 1\r\ntransfer-encoding: chunked\r\n\r\n"
        assert await client.read(len(head)) == head
        stream.hold(b"held")
        stream.write(b"")
        stream.write(b"seventeen letters")
        assert await client.read(23) == b"11\r\nseventeen letters\r\n"
        stream.flush()
        assert await client.read(9) == b"4\r\nheld\r\n"
        stream.hold(b"one")
        stream.end(b"two")
        assert await client.read(21) == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        client.writer.write(GET)
        await client.request()

    run(check)


@pytest.mark.parametrize("head", [b"GET / HTTP/1.0\r\n", b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"])
def test_connection_close_is_confirmed(head: bytes) -> None:
    async def check(client: Client) -> None:
        client.writer.write(head + b"\r\n")
        (await client.request())[0].answer(404, b"", b"text/plain")
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 404 Not Found\r\n")
        assert b"connection: close\r\n" in answer

    run(check)


def test_a_stream_over_http_1_0_ends_with_the_connection() -> None:
    async def check(client: Client) -> None:
        client.writer.write(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        stream = ResponseStream((await client.request())[0], PLAIN)
        stream.write(b"part")
        stream.end(b"end")
        answer = await client.rest()
        assert answer.endswith(b"connection: close\r\n\r\npartend")
        assert b"chunked" not in answer

    run(check)


def test_a_truncated_stream_has_no_last_chunk() -> None:
    async def check(client: Client) -> None:
        client.writer.write(GET + GET)
        stream = ResponseStream((await client.request())[0], PLAIN)
        stream.write(b"part")
        stream.cut()
        assert (await client.rest()).endswith(b"4\r\npart\r\n")
        assert client.requests.empty()

    run(check)


def test_invalid_http_is_refused() -> None:
    async def check(client: Client) -> None:
        client.writer.write(b"not HTTP at all\r\n\r\n")
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"connection: close\r\n" in answer

    run(check)


def test_an_offer_to_upgrade_is_ignored() -> None:
    async def check(client: Client) -> None:
        client.writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n")
        _, request = await client.request()
        assert b"upgrade" not in request.headers

    run(check)


def test_a_client_that_expects_100_continue_gets_it() -> None:
    async def check(client: Client) -> None:
        client.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-Continue\r\ncontent-length: 2\r\n\r\n")
        assert await client.read(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"{}")
        assert (await client.request())[1].body == b"{}"

    run(check)


@pytest.mark.parametrize("answered", [False, True])
def test_a_handler_is_abandoned_if_the_client_disconnects_before_the_answer(answered: bool) -> None:
    async def check(client: Client) -> None:
        client.writer.write(GET)
        connection, _ = await client.request()
        handler = connection.serving = Handler()
        if answered:
            connection.answer(200, b"{}")
        client.writer.transport.abort()
        while connection in client.server.connections:
            await asyncio.sleep(0)
        assert handler.abandoned is not answered
        connection.write(b"discarded")

    run(check)


@pytest.mark.parametrize("reads", [False, True])
def test_a_slow_client_pauses_the_handler_until_it_reads_or_disconnects(reads: bool) -> None:
    async def check(client: Client) -> None:
        client.writer.write(GET)
        connection, _ = await client.request()
        handler = connection.serving = Handler()
        stream = ResponseStream(connection, PLAIN)
        while not connection.paused:
            stream.write(b"x" * 1_000_000)
        assert not handler.room.is_set()
        if reads:
            rest = asyncio.ensure_future(client.rest())
            await asyncio.wait_for(handler.room.wait(), TIMEOUT_S)
            assert not connection.paused
            stream.cut()
            await rest
        else:
            client.writer.transport.abort()
            await asyncio.wait_for(handler.room.wait(), TIMEOUT_S)

    run(check)

"""HTTP on one connection of a server of ours: real sockets, and answers that the tests give by hand."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from pointsman.http.server import READ_AHEAD, Connection, ServerExchange, listen

PATIENCE_S = 10.0
GET = b"GET /it?never=read HTTP/1.1\r\nhost: here\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class Client:
    """One connection to a server whose requests nobody answers but the test."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[ServerExchange] = asyncio.Queue()
        self.open_ones: set[Connection] = set()
        """On the server's side."""
        self._reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def connect(self, port: int) -> None:
        self._reader, self.writer = await asyncio.open_connection("127.0.0.1", port)

    async def request(self) -> ServerExchange:
        return await asyncio.wait_for(self.asked.get(), PATIENCE_S)

    async def read(self, size: int) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(size), PATIENCE_S)

    async def rest(self) -> bytes:
        """All that comes until the server hangs up."""
        return await asyncio.wait_for(self._reader.read(), PATIENCE_S)


@asynccontextmanager
async def connected() -> AsyncIterator[Client]:
    client = Client()
    server, port = await listen("127.0.0.1", 0, client.asked.put_nowait, client.open_ones)
    await client.connect(port)
    try:
        yield client
    finally:
        client.writer.transport.abort()
        server.close()
        await server.wait_closed()


def play(scene: Callable[[Client], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with connected() as client:
            await scene(client)

    asyncio.run(whole())


def test_a_request_is_read_whole_and_the_connection_is_used_again() -> None:
    async def scene(client: Client) -> None:
        for body in (b"", b"some words", b"x" * 300_000):
            length = b"content-length: %d\r\n\r\n" % len(body)
            client.writer.write(b"POST /it?never=read HTTP/1.1\r\nX-Pointsman-Secret: Sesame\r\n" + length + body)
            exchange = await client.request()
            assert (exchange.method, exchange.path, exchange.body) == (b"POST", b"/it", body)
            assert exchange.headers[b"x-pointsman-secret"] == b"Sesame"
            assert exchange.asked == "POST /it"
            exchange.respond(200, b"{}")
            assert await client.read(len(OK)) == OK

    play(scene)


def test_what_one_request_said_is_not_taken_for_the_nexts() -> None:
    async def scene(client: Client) -> None:
        client.writer.write(b"POST /a HTTP/1.1\r\nmine: 1\r\ncontent-length: 1\r\n\r\nx" + GET)
        (await client.request()).respond(200, b"{}")
        second = await client.request()
        assert (second.path, second.headers, second.body) == (b"/it", {b"host": b"here"}, b"")

    play(scene)


def test_those_who_come_early_wait_their_turn() -> None:
    async def scene(client: Client) -> None:
        many = 3 * READ_AHEAD
        client.writer.write(b"".join(GET.replace(b"/it", b"/%d" % place) for place in range(many)))
        for place in range(many):
            exchange = await client.request()
            assert exchange.path == b"/%d" % place
            assert client.asked.empty(), "one at a time"
            exchange.respond(200, b"{}")
        assert await client.read(many * len(OK)) == many * OK

    play(scene)


def test_pieces_leave_as_they_are_added_and_held_ones_together() -> None:
    async def scene(client: Client) -> None:
        client.writer.write(GET)
        exchange = await client.request()
        exchange.open_stream("text/plain", b"own: 1\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\nown: 1\r\n\r\n"
        assert await client.read(len(head)) == head
        exchange.hold(b"held")
        exchange.add(b"")
        exchange.add(b"seventeen letters")
        assert await client.read(23) == b"11\r\nseventeen letters\r\n"
        exchange.flush()
        assert await client.read(9) == b"4\r\nheld\r\n"
        exchange.hold(b"one")
        exchange.end_stream(b"two")
        assert await client.read(21) == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        client.writer.write(GET)
        await client.request()

    play(scene)


@pytest.mark.parametrize("head", [b"GET / HTTP/1.0\r\n", b"GET / HTTP/1.1\r\nconnection: close\r\n"])
def test_who_wants_no_second_answer_is_told_and_hung_up_on(head: bytes) -> None:
    async def scene(client: Client) -> None:
        client.writer.write(head + b"\r\n")
        (await client.request()).respond(404, b"", "text/plain")
        told = await client.rest()
        assert told.startswith(b"HTTP/1.1 404 Not Found\r\n")
        assert b"connection: close\r\n" in told

    play(scene)


def test_a_stream_that_is_cut_has_no_end() -> None:
    async def scene(client: Client) -> None:
        client.writer.write(GET + GET)
        exchange = await client.request()
        exchange.open_stream("text/plain")
        exchange.add(b"part")
        exchange.cut()
        assert (await client.rest()).endswith(b"4\r\npart\r\n")
        assert client.asked.empty(), "nobody is there to answer"

    play(scene)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"not HTTP at all\r\n\r\n", b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", b""),
    ],
)
def test_what_is_not_understood_ends_the_connection(sent: bytes, told: bytes) -> None:
    async def scene(client: Client) -> None:
        client.writer.write(sent)
        assert await client.rest() == told

    play(scene)


def test_who_asks_whether_to_go_on_is_told_to() -> None:
    async def scene(client: Client) -> None:
        client.writer.write(b"POST / HTTP/1.1\r\nexpect: 100-Continue\r\ncontent-length: 2\r\n\r\n")
        assert await client.read(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"{}")
        assert (await client.request()).body == b"{}"

    play(scene)


@pytest.mark.parametrize("answered", [False, True])
def test_a_client_that_goes_is_missed_only_while_it_is_owed_an_answer(answered: bool) -> None:
    async def scene(client: Client) -> None:
        client.writer.write(GET)
        exchange = await client.request()
        missed = asyncio.Event()
        exchange.gone = missed.set
        if answered:
            exchange.respond(200, b"{}")
        (connection,) = client.open_ones
        client.writer.transport.abort()
        while connection in client.open_ones:
            await asyncio.sleep(0)
        assert missed.is_set() is not answered
        exchange.add(b"to nobody")

    play(scene)


@pytest.mark.parametrize("reads", [False, True])
def test_who_writes_waits_for_a_slow_client_until_it_reads_or_goes(reads: bool) -> None:
    async def scene(client: Client) -> None:
        client.writer.write(GET)
        exchange = await client.request()
        exchange.open_stream("text/plain")
        connection = exchange.connection
        await connection.room()
        while not connection.is_full:
            exchange.add(b"x" * 1_000_000)
        room = asyncio.ensure_future(connection.room())
        await asyncio.sleep(0)
        assert not room.done()
        if reads:
            exchange.cut()
            await client.rest()
        else:
            client.writer.transport.abort()
        await asyncio.wait_for(room, PATIENCE_S)
        assert not connection.is_full

    play(scene)

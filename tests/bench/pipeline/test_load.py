"""Clients against a real server that answers rightly, wrongly, in other framings, or not at all."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from bench.pipeline.load import BODY, Loaded, load, percentile

RIGHT = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n8"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n8\r\n0\r\n\r\n"
Answer = Callable[[int], bytes | None]
"""What the n-th request gets; None: the connection is closed."""


def loaded(answer: Answer, clients: int = 3) -> tuple[Loaded, int]:
    """What the clients saw, and how many requests the server did."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(len(BODY)) == BODY
                asked += 1
                response = answer(asked)
                if response is None:
                    return
                for part in (response[:30], response[30:]):
                    writer.write(part)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass
        finally:
            writer.close()

    async def both() -> tuple[Loaded, int]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await load(port, "/diamond", clients, 0.05, 0.1), asked

    return uvloop.run(both())


@pytest.mark.parametrize("right", [RIGHT, CHUNKED])
def test_right_answers_are_counted_and_timed(right: bytes) -> None:
    seen, asked = loaded(lambda _: right)
    assert (seen.errors, seen.complaint) == (0, "")
    assert 3 <= seen.requests < seen.asked == asked
    assert 0 < seen.p50_ms <= seen.p99_ms
    assert seen.seconds >= 0.1


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (RIGHT.replace(b"8", b"9"), "status 200: 9"),
        (RIGHT.replace(b"8", b"x"), "status 200: x"),
        (RIGHT.replace(b"200 OK", b"503 No"), "status 503: 8"),
        (None, "the connection was closed before an answer (no error)"),
    ],
)
def test_a_wrong_answer_is_an_error_and_no_figure(wrong: bytes | None, complaint: str) -> None:
    seen, _ = loaded(lambda number: RIGHT if number < 5 else wrong, clients=1)
    assert seen.errors
    assert seen.complaint == complaint
    assert seen.requests == 4


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_percentiles(share: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], share) == expected
    assert percentile([], share) == 0.0

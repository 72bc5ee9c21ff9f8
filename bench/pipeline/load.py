"""Clients of one server, in a separate process: `python -m bench.pipeline.load PORT PATH CLIENTS WARM_S SECONDS`.

Each keeps its connection and asks again as soon as it has its answer. Prints one line of JSON, a `Loaded`.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import cast

import httptools
import msgspec
import uvloop

BODY, ANSWER = b"[1, 2, 3]", 8
"""The request of every client, and the correct response: 1*1 + 2*2 + 3."""
PATIENCE_S = 20.0
"""Time after the end for responses that are still outstanding."""


class Loaded(msgspec.Struct, frozen=True):
    """The results of the clients."""

    requests: int
    asked: int
    """Including those of the warm-up."""
    errors: int
    complaint: str
    """The first wrong response."""
    seconds: float
    p50_ms: float
    p99_ms: float

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds


class LoadCounters:
    """The responses so far, and until when to send requests."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.errors = 0
        self.complaint = ""
        self.stop_at = 0.0

    def complain(self, what: str) -> None:
        self.errors += 1
        self.complaint = self.complaint or what

    def seen(self, seconds: float, before: int = 0) -> Loaded:
        times = sorted(self.times)
        return Loaded(
            requests=len(times),
            asked=len(times) + before,
            errors=self.errors,
            complaint=self.complaint,
            seconds=seconds,
            p50_ms=percentile(times, 0.5) * 1e3,
            p99_ms=percentile(times, 0.99) * 1e3,
        )


class Client(asyncio.Protocol):
    """One connection with one request in flight."""

    def __init__(self, request: bytes, counters: LoadCounters, done: Callable[["Client"], None]) -> None:
        self._request, self._done = request, done
        self.counters = counters
        self._begun: float | None = None
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self) -> None:
        self._body = b""
        self._begun = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        assert self._begun is not None
        now, status = time.perf_counter(), self._parser.get_status_code()
        if status == 200 and right(self._body):
            self.counters.times.append(now - self._begun)
        else:
            self.counters.complain(f"status {status}: {self._body[:150].decode(errors='replace')}")
        if now < self.counters.stop_at:
            self.ask()
        else:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if self._begun is not None:
            self.counters.complain(f"the connection was closed before an answer ({error or 'no error'})")
            self._end()

    def close(self) -> None:
        self._begun = None
        self._transport.close()

    def _end(self) -> None:
        self._begun = None
        self._done(self)


def right(body: bytes) -> bool:
    """Whether it is the correct response, as JSON."""
    try:
        return bool(msgspec.json.decode(body) == ANSWER)
    except msgspec.DecodeError:
        return False


def percentile(times: Sequence[float], share: float) -> float:
    """A percentile of sorted times; 0 if there are none."""
    return times[min(len(times) - 1, int(len(times) * share))] if times else 0.0


def request(path: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}"
    return f"{head}\r\n\r\n".encode() + BODY


async def load(port: int, path: str, clients: int, warm_s: float, seconds: float) -> Loaded:
    """The measurement after the warm-up, or what went wrong."""
    ended = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    connections = []
    for _ in range(clients):
        made = await loop.create_connection(
            lambda: Client(request(path), LoadCounters(), lambda _: ended.release()), "127.0.0.1", port
        )
        connections.append(made[1])

    async def ask(length: float, before: int) -> Loaded:
        counters, begun = LoadCounters(), time.perf_counter()
        counters.stop_at = begun + length
        for client in connections:
            client.counters = counters
            client.ask()
        async with asyncio.timeout(length + PATIENCE_S):
            for _ in connections:
                await ended.acquire()
        return counters.seen(time.perf_counter() - begun, before)

    seen = await ask(warm_s, 0)
    if not seen.errors:
        seen = await ask(seconds, seen.requests)
    for client in connections:
        client.close()
    return seen


def main() -> None:
    port, path, clients, warm_s, seconds = sys.argv[1:]
    try:
        found = uvloop.run(load(int(port), path, int(clients), float(warm_s), float(seconds)))
    except TimeoutError:
        sys.exit(f"requests got no answer within {PATIENCE_S:g} s after the end")
    except OSError as error:
        sys.exit(f"no connection to port {port}: {error}")
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()

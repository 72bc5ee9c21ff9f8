"""`python -m bench.request_path`: the cost of a request inside the gateway, without sockets, by part.

Clients and instances are transports that discard their data. Everything between them is real: parser, JSON, dispatcher
over 8 endpoints, records, upstream framing. `--profile` prints where the time goes.
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import time
from collections.abc import Callable, Mapping
from functools import partial

import uvloop

from bench.beside import Case
from pointsman.config import load_manifest
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import Gateway
from pointsman.http.pool import ClientConnection
from pointsman.render.text import text_table
from pointsman.routing.endpoints import Metrics
from pointsman.routing.events import Arrived, DispatcherCommand, DispatcherEvent, Ended, Send
from pointsman.types import ExecutionInstance, RequestMetadata

ENDPOINTS = [f"e{number}" for number in range(8)]
CONNECTIONS = 32
SCORERS = {"prefix-cache-scorer": 3, "queue-scorer": 2, "kv-cache-utilization-scorer": 2}
"""The same as in `bench.gateway`."""


def manifest(scorers: Mapping[str, int]) -> str:
    """`scorers` with their weights; empty: the default policy."""
    endpoints = [{"name": name, "url": f"http://127.0.0.1:{9000 + n}"} for n, name in enumerate(ENDPOINTS)]
    deployment: dict[str, object] = {"name": "chat", "model": "chat", "endpoints": endpoints}
    if scorers:
        names = [*scorers, "max-score-picker"]
        profile = {"name": "default", "plugins": [{"pluginRef": one, "weight": scorers.get(one)} for one in scorers]}
        profile["plugins"] += [{"pluginRef": "max-score-picker"}]  # type: ignore[operator]
        config = {"plugins": [{"type": name} for name in names], "schedulingProfiles": [profile]}
        deployment["scheduling"] = {"config": config}
    return json.dumps({"kind": "Pointsman", "deployments": [deployment]})


ANSWER = json.dumps(
    {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * 200}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 60, "completion_tokens": 40, "total_tokens": 100},
    }
).encode()
HTTP_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(ANSWER),
    ANSWER,
)


PIECES = 100
"""Events of a stream, each in its own chunk and read."""
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    event = b"data: %b\n\n" % data
    return b"%x\r\n%b\r\n" % (len(event), event)


PIECE = _chunk(
    b'{"id":"chatcmpl-1f6dd3f5","object":"chat.completion.chunk","created":1794967003,"model":"chat",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}'
)
STREAM_END = (
    _chunk(b'{"id":"chatcmpl-1f6dd3f5","choices":[],"usage":{"prompt_tokens":60,"completion_tokens":100}}')
    + _chunk(b"[DONE]")
    + b"0\r\n\r\n"
)


class NullTransport(asyncio.Transport):
    """Discards everything."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Harness:
    """A gateway with fake clients and instances."""

    def __init__(self, prompt_bytes: int, scorers: Mapping[str, int] = SCORERS) -> None:
        plan = load_manifest(manifest(scorers))
        self.gateway = Gateway(plan.gateway, asyncio.get_running_loop())
        self.gateway.traffic.configure(plan.deployments)
        for number, name in enumerate(ENDPOINTS):
            instance = ExecutionInstance(instance_id=name, host="127.0.0.1", port=9000 + number, model_name="chat")
            self.gateway.traffic.admit("chat", instance)
            self.gateway.traffic.measured("chat", name, Metrics(block_size=16, num_blocks=30_000))
            pool = self.gateway.upstream.pool_of(instance)
            for _ in range(CONNECTIONS):
                connection = ClientConnection(pool)
                connection.connection_made(NullTransport())
                pool.put_back(connection)
        self.clients = [GatewayConnection(self.gateway) for _ in range(CONNECTIONS)]
        for client in self.clients:
            client.connection_made(NullTransport())
        self.requests = [_request(number, prompt_bytes) for number in range(64)]
        self.streams = [_request(number, prompt_bytes, stream=True) for number in range(64)]
        self.prompts = [request[request.index(b"[") : request.rindex(b"]") + 1] for request in self.requests]

    def serve(self, rounds: int) -> None:
        """In each round every connection sends a request, then every request gets its response."""
        upstreams: list[ClientConnection] = []
        for number in range(rounds):
            for index, client in enumerate(self.clients):
                client.data_received(self.requests[(number + index) % 64])
            self._hand_over()
            upstreams += [client.serving._attempt for client in self.clients]  # type: ignore[union-attr]
            for connection in upstreams:
                connection.data_received(HTTP_ANSWER)
            self.gateway.outbox.flush()
            upstreams.clear()

    def stream(self, rounds: int, pieces: int = PIECES) -> None:
        """In each round every connection asks for a stream and gets it, piece by piece."""
        for number in range(rounds):
            for index, client in enumerate(self.clients):
                client.data_received(self.streams[(number + index) % 64])
            self._hand_over()
            upstreams = [client.serving._attempt for client in self.clients]  # type: ignore[union-attr]
            for piece in (STREAM_HEAD, *[PIECE] * pieces, STREAM_END):
                for connection in upstreams:
                    connection.data_received(piece)
                self.gateway.outbox.flush()

    def _hand_over(self) -> None:
        """Do at once what the loop does in its next turns."""
        while self.gateway.long_bodies:
            self.gateway.long_bodies._take_steps()
        self.gateway._arrivals.hand_over()
        self.gateway.outbox.flush()

    def dispatch(self, rounds: int) -> None:
        """The same requests through the dispatcher alone."""
        dispatcher = self.gateway.traffic.lanes["chat"].dispatcher
        prompts = self.prompts
        for number in range(rounds):
            now = time.monotonic()
            for index in range(CONNECTIONS):
                name = f"{number}-{index}"
                request = RequestMetadata(name, prompts[(number + index) % 64], 16, "chat", arrival_time=now)
                dispatcher.handle(Arrived((request,)), now)
            for index in range(CONNECTIONS):
                dispatcher.handle(Ended(f"{number}-{index}", 40, 60), now + 0.01)


class RoundRobin:
    """Replaces the dispatcher: selects the next endpoint."""

    def __init__(self, gateway: Gateway) -> None:
        lane = gateway.traffic.lanes["chat"]
        self.fleet, self.ledger = lane.dispatcher.fleet, lane.dispatcher.ledger
        self._endpoints = list(self.fleet.roster)
        self._sent = 0
        lane.dispatcher = self  # type: ignore[assignment]

    def handle(self, event: DispatcherEvent, now: float) -> list[DispatcherCommand]:
        if not isinstance(event, Arrived):
            return []
        self._sent += 1
        return [Send(event.requests[0], None, self._endpoints[self._sent % 8])]  # type: ignore[arg-type]


def cases() -> dict[str, Case]:
    """The cases for `bench.beside`."""
    found = {}
    for size, rounds in ((300, 6), (64 * 1024, 3), (256 * 1024, 1)):
        harness = Harness(size)
        found[f"request, {size:,} bytes"] = Case(partial(harness.serve, rounds), rounds * CONNECTIONS)
        found[f"dispatcher, {size:,} bytes"] = Case(partial(harness.dispatch, rounds), rounds * CONNECTIONS)
        if size == 300:
            found["piece of a stream"] = Case(partial(harness.stream, 1), PIECES * CONNECTIONS)
    default = Harness(300, {})
    found["request, default policy"] = Case(partial(default.serve, 2), 2 * CONNECTIONS)
    found["request, default policy, streamed"] = Case(partial(default.stream, 1, 10), CONNECTIONS)
    return found


def us_per_request(work: Callable[[int], None], runs: int = 150) -> float:
    """The minimum of many short runs, because other load on the machine only adds to it."""
    work(runs * 2 // 5)
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        work(2)
        best = min(best, time.perf_counter() - start)
    return best / 2 / CONNECTIONS * 1e6


async def measure(options: argparse.Namespace) -> None:
    rows = []
    for size, policy in ((300, SCORERS), (64 * 1024, SCORERS), (256 * 1024, SCORERS), (300, {})):
        harness = Harness(size, policy)
        dispatcher, whole = us_per_request(harness.dispatch), us_per_request(harness.serve)
        streamed = us_per_request(harness.stream, runs=20)
        if options.profile and size == 300:
            _profile(harness)
        RoundRobin(harness.gateway)
        http = us_per_request(harness.serve)
        times = [f"{us:.1f}" for us in (http, dispatcher, whole, streamed)]
        rows.append([f"{size:,}" if policy else f"{size:,}, default policy", *times, f"{streamed / PIECES:.2f}"])
        harness.gateway.close()
    columns = ["HTTP us", "dispatcher us", "together us", f"stream of {PIECES} us", "us per piece"]
    print(text_table(["bytes of prompt", *columns], rows))


def _profile(harness: Harness) -> None:
    profile = cProfile.Profile()
    profile.enable()
    harness.serve(100)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def _request(number: int, prompt_bytes: int, **fields: object) -> bytes:
    system = f"You are assistant {number % 16}. ".ljust(prompt_bytes, "abcdefgh ijklmnop"[number % 16])
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {number}"}]
    body = json.dumps({"model": "chat", "messages": messages, "max_tokens": 16, **fields}).encode()
    lines = ["host: localhost", "user-agent: bench", "accept: */*", "content-type: application/json"]
    head = "\r\n".join([*lines, f"content-length: {len(body)}"])
    return f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.request_path", description=__doc__)
    parser.add_argument("--profile", action="store_true", help="print a profile of small requests")
    uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

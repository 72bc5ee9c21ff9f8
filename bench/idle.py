"""`python -m bench.idle`: the CPU that a plane takes at rest, by the number of its endpoints.

One helper process serves all endpoints, and nothing sends requests. What the plane does then is probes of health, reads
of metrics and timers. A plane without endpoints is measured beside it, one after the other.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, cast

import uvloop

from bench.chaos.planes import LivePlane
from pointsman.render.text import text_table

METRICS = (
    b"".join(
        b'vllm:%b{model_name="chat"} %b\n' % line
        for line in (
            (b"num_requests_running", b"0"),
            (b"num_requests_waiting", b"0"),
            (b"kv_cache_usage_perc", b"0"),
            *(
                (b"request_success_total_%d" % number, b"17") for number in range(60)
            ),  # about as many as a real engine has
        )
    )
    + b'vllm:cache_config_info{block_size="16",num_gpu_blocks="30000"} 1\n'
)
COMPLETION = json.dumps({"choices": [{"text": "hm"}]}).encode()


class EndpointServer(asyncio.Protocol):
    """Answers every request at once, and counts them by path."""

    counts: ClassVar[Counter[str]] = Counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        path = data.split(b" ", 2)[1].decode()
        self.counts[path] += 1
        body = METRICS if path == "/metrics" else json.dumps(self.counts).encode() if path == "/counts" else COMPLETION
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


async def serve(count: int) -> None:
    """Serve `count` endpoints until the input ends; print their ports."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(EndpointServer, "127.0.0.1", 0, backlog=16) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


@contextmanager
def endpoints(count: int) -> Iterator[list[int]]:
    """The ports of `count` endpoints, all in one process."""
    command = [sys.executable, "-m", "bench.idle", "--serve", str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())
        finally:
            server.stdin.close()
            server.wait()


def manifest(ports: list[int], engine: str) -> str:
    """All endpoints in one deployment, with every setting at its default."""
    listed = [{"url": f"http://127.0.0.1:{port}", "engine": engine} for port in ports]
    deployments = [{"name": "chat", "model": "chat", "endpoints": listed}] if ports else []
    return json.dumps({"kind": "Pointsman", "deployments": deployments, "gateway": {"listen": "127.0.0.1:0"}})


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def at_rest(count: int, engine: str, seconds: float, settle_s: float) -> list[str]:
    """One row of the table."""
    with endpoints(count) as ports, tempfile.TemporaryDirectory() as folder:
        plane = LivePlane(Path(folder))
        try:
            plane.up(manifest(ports, engine))
            time.sleep(settle_s)
            before, began = cpu_s(plane.process.pid), time.monotonic()
            asked = sum(asked_of(ports).values())
            time.sleep(seconds)
            taken = cpu_s(plane.process.pid) - before
            rate = (sum(asked_of(ports).values()) - asked - 1) / (time.monotonic() - began)
            return [str(count), engine if count else "", f"{100 * taken / seconds:.1f}", f"{max(rate, 0.0):.0f}"]
        finally:
            plane.close()


def asked_of(ports: list[int]) -> dict[str, int]:
    """Requests to the endpoints so far, by path."""
    from pointsman.control.desired import Address
    from pointsman.http.client import fetch

    if not ports:
        return {}
    answer = asyncio.run(fetch(Address("127.0.0.1", ports[0], False), "GET", "/counts", timeout_s=10.0))
    counts: dict[str, int] = json.loads(answer.body)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.idle", description=__doc__)
    parser.add_argument("--endpoints", type=int, nargs="*", default=[0, 10, 100, 500])
    parser.add_argument("--engine", nargs="*", default=["openai", "vllm"], help="openai: without metrics")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each measurement")
    parser.add_argument("--settle", type=float, default=35.0, help="time at rest before it")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        uvloop.run(serve(args.serve))
        return
    rows = []
    for count in args.endpoints:
        for engine in args.engine[: None if count else 1]:
            rows.append(at_rest(count, engine, args.seconds, args.settle))
            print(f"measured {count} endpoints ({engine})", file=sys.stderr)
    print(text_table(["endpoints", "engine", "CPU % of a core", "probes and scrapes per s"], rows))


if __name__ == "__main__":
    main()

"""`python -m bench.gateway_processes`: requests/s that `gateway.processes: 2` has beside 1, on a core for each process.

Load and engines run on the same machine and are taken out of the count: what is measured is the CPU time of the gateway
processes, from /proc. A process can do no more than one CPU second per second, so the busiest one sets the limit:
requests of the run / CPU seconds of the busiest process. The owner of several processes serves no clients; what it
takes is shown beside, and the last column counts it too, as if it had to share the two cores.

`--quality`: what two and four processes lose by knowing less than one. Conversations with long common beginnings arrive
at random times on connections of their own; the caches of all engines together hold the beginnings, one engine's do
not. Shown are the share of prompt tokens found in caches, as engines report it, and of requests answered by a deadline.
In the last run the process of the plane is stopped (SIGSTOP), which cuts the link between the gateways.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

import uvloop

from bench.chaos.planes import LivePlane
from bench.gateway.cpu import cpu_ns
from pointsman.render.text import text_table

ENGINES = 8
BODY = json.dumps(
    {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "where does this train go? " * 12}]}
).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


class Run(NamedTuple):
    processes: int
    requests: int
    each_us: list[float]
    """CPU microseconds of each gateway process, per request of the run."""
    owner_us: float
    """CPU microseconds of the process of the plane, if it serves no clients."""

    @property
    def busiest_rps(self) -> float:
        return 1e6 / max(self.each_us)

    @property
    def all_rps(self) -> float:
        return 1e6 * self.processes / (sum(self.each_us) + self.owner_us)


def manifest(processes: int) -> str:
    engine = {"type": "simulated", "parameters": {"tokensPerSecond": 100000, "firstTokenMs": 0, "maxNumSeqs": 512}}
    deployment = {"name": "m", "model": "m", "replicas": ENGINES, "engine": engine}
    return json.dumps(
        {
            "kind": "Pointsman",
            "deployments": [deployment],
            "gateway": {"listen": "127.0.0.1:0", "processes": processes},
        }
    )


async def load(url: str, connections: int, seconds: float) -> int:
    """Send requests one after the other on each connection. Returns how many were answered."""
    where, until = urlsplit(url), time.monotonic() + seconds

    async def client() -> int:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        count = 0
        while time.monotonic() < until:
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            length = int(head.lower().split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
            await reader.readexactly(length)
            count += 1
        writer.close()
        return count

    return sum(await asyncio.gather(*(client() for _ in range(connections))))


def measured(processes: int, connections: int, seconds: float) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        plane = LivePlane(Path(folder))
        try:
            plane.up(manifest(processes))
            plane.until(lambda: plane.status()["ready"], "ready")
            status = plane.status()
            gateways = [one["pid"] for one in status["gateways"]] or [plane.process.pid]
            uvloop.run(load(status["url"], connections, 1.0))  # connections to engines, caches
            before = [cpu_ns([pid]) for pid in (*gateways, plane.process.pid)]
            count = uvloop.run(load(status["url"], connections, seconds))
            after = [cpu_ns([pid]) for pid in (*gateways, plane.process.pid)]
        finally:
            plane.close()
    *each, owner = [(end - start) / 1e3 / count for start, end in zip(before, after, strict=True)]
    return Run(processes, count, each, owner if processes > 1 else 0.0)


TOPICS, TOPIC_WORDS, OWN_WORDS = 48, 1200, 60
RATE, DEADLINE_S = 20.0, 0.4


class Quality(NamedTuple):
    """The results of requests that share beginnings."""

    processes: int
    is_cut: bool
    hit_rate: float
    """Share of prompt tokens."""
    attainment: float
    """Share of requests answered within `DEADLINE_S`."""
    failed: int


def sharing_manifest(processes: int) -> str:
    engine = {"type": "simulated", "parameters": {"kvTokens": 32_768, "maxNumSeqs": 32}}
    deployment = {"name": "m", "model": "m", "replicas": 4, "engine": engine}
    gateway = {"listen": "127.0.0.1:0", "processes": processes}
    return json.dumps({"kind": "Pointsman", "deployments": [deployment], "gateway": gateway})


async def conversations(url: str, requests: int) -> list[tuple[float, int, int]]:
    """For each answered request: seconds, prompt tokens, and cached prompt tokens. The same every time."""
    where, rng, loop = urlsplit(url), random.Random(7), asyncio.get_running_loop()
    topics = [" ".join(f"t{number}w{word}" for word in range(TOPIC_WORDS)) for number in range(TOPICS)]

    async def ask(prompt: str, tokens: int) -> tuple[float, int, int]:
        began = loop.time()
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": tokens}).encode()
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        writer.write(head + b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        answer = await reader.read()
        writer.close()
        said = json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]
        return loop.time() - began, said["prompt_tokens"], said["prompt_tokens_details"]["cached_tokens"]

    asked = []
    for number in range(requests):
        await asyncio.sleep(rng.expovariate(RATE))
        own = " ".join(f"r{number}w{word}" for word in range(OWN_WORDS))
        asked.append(loop.create_task(ask(f"{rng.choice(topics)} {own}", rng.randint(10, 50))))
    done = await asyncio.gather(*asked, return_exceptions=True)
    return [one for one in done if not isinstance(one, BaseException)]


def quality(processes: int, requests: int, *, is_cut: bool = False) -> Quality:
    with tempfile.TemporaryDirectory() as folder:
        plane = LivePlane(Path(folder))
        try:
            plane.up(sharing_manifest(processes))
            plane.until(lambda: plane.status()["ready"], "ready")
            url = plane.url
            if is_cut:
                os.kill(plane.process.pid, signal.SIGSTOP)
            answered = uvloop.run(conversations(url, requests))
        finally:
            if is_cut:
                os.kill(plane.process.pid, signal.SIGCONT)
            plane.close()
    cached, prompts = sum(one[2] for one in answered), sum(one[1] for one in answered)
    met = sum(one[0] <= DEADLINE_S for one in answered)
    return Quality(processes, is_cut, cached / max(prompts, 1), met / requests, requests - len(answered))


CASES = ((1, False), (2, False), (4, False), (4, True))
"""Number of processes, and whether the link between them is cut."""


def qualities(requests: int, rounds: int) -> list[Quality]:
    """The results of all cases, round by round."""
    return [quality(number, requests, is_cut=is_cut) for _ in range(rounds) for number, is_cut in CASES]


def quality_table(found: list[Quality]) -> str:
    def middle(case: tuple[int, bool], what: str) -> float:
        return float(median(getattr(one, what) for one in found if (one.processes, one.is_cut) == case))

    rows = [
        [
            f"{case[0]}{', link cut' if case[1] else ''}",
            f"{middle(case, 'hit_rate'):.3f}",
            f"{middle(case, 'hit_rate') / middle(CASES[0], 'hit_rate'):.2f}x",
            f"{middle(case, 'attainment'):.3f}",
            f"{middle(case, 'attainment') / middle(CASES[0], 'attainment'):.2f}x",
            str(sum(one.failed for one in found if (one.processes, one.is_cut) == case)),
        ]
        for case in CASES
    ]
    return text_table(["processes", "hit rate", "of one", "attainment", "of one", "failed"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quality", action="store_true", help="hit rate and attainment instead of requests/s")
    parser.add_argument("--requests", type=int, default=500, help="of each run with --quality")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=256)
    args = parser.parse_args()
    if args.quality:
        print(quality_table(qualities(args.requests, args.rounds)))
        return
    runs = [measured(number, args.connections, args.seconds) for _ in range(args.rounds) for number in (1, 2)]
    rows = [
        [
            str(one.processes),
            str(one.requests),
            " + ".join(f"{us:.0f}" for us in one.each_us),
            f"{one.owner_us:.1f}",
            f"{one.busiest_rps:,.0f}",
            f"{one.all_rps:,.0f}",
        ]
        for one in runs
    ]
    heads = ["processes", "requests", "us per request", "owner us", "requests/s, busiest", "requests/s, with the owner"]
    print(text_table(heads, rows))
    for what in ("busiest_rps", "all_rps"):
        one, two = (median(getattr(run, what) for run in runs if run.processes == number) for number in (1, 2))
        print(f"two processes beside one, {what}: {two / one:.2f}x")


if __name__ == "__main__":
    main()

"""`make bench-ray`: the Ray runtime beside Ray Serve and beside one machine, in one run, with a target for each figure.

- The diamond over HTTP: our gateway on the Ray runtime, Ray Serve by default, and Ray Serve with HAProxy. One runs at a
  time (`bench.pipeline`).
- Streams of simulated engines: a plane on Ray and one on the local runtime, both up, take short turns.
- `PointsmanRouter` beside Serve's default router (`bench.ray_serve`).
- Two gateway processes beside one: requests per CPU second, and what two and four lose by knowing less than one
  (`bench.gateway_processes`).
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

import msgspec
import uvloop

from bench.chaos.planes import LivePlane
from bench.gateway.cpu import cpu_ns
from bench.gateway_processes import CASES, measured, qualities, quality_table
from bench.pipeline.__main__ import ENVIRONMENT, FULL, QUICK, Run, progress, that_can_run
from bench.pipeline.report import CLIENTS, HANDED, RATE
from bench.pipeline.request_client import CHAIN, DIAMOND
from bench.pipeline.results import Results, of_diamond, of_handing
from bench.pipeline.servers import Pointsman, PointsmanOnRay, RayServe, RayServeTuned, ray_of_its_own
from bench.ray_serve import AGAIN, on_serve, ratios
from pointsman.render.text import text_table

STREAMS, TOKENS, TOKENS_PER_SECOND = 32, 50, 100
LOCAL, RAY = "local", "ray"
READY_S = 180.0
"""Time limit for a plane to start."""


class Pace(NamedTuple):
    """The amount of measurements of each part."""

    diamond: int
    """Rounds over the servers."""
    turns: int
    """Rounds of streams, on each runtime."""
    router: int
    """Rounds over the routers."""
    gateways: int
    """Rounds of one and two gateway processes."""
    seconds: float
    """Seconds of each turn of gateway processes."""
    shared: int
    """Requests of each run that shares prefixes."""


PACES = {"quick": Pace(1, 6, 4, 1, 3.0, 300), "full": Pace(3, 16, 15, 3, 5.0, 500)}


class Row(NamedTuple):
    """A figure and its target."""

    what: str
    values: Sequence[float]
    """Values, one per round."""
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        value = median(self.values)
        return value >= self.bound if self.at_least else value <= self.bound

    def cells(self) -> list[str]:
        if not self.values:
            return [self.what, "", "", "", "not measured"]
        spread = f"{min(self.values):.2f} to {max(self.values):.2f}"
        target = f"at {'least' if self.at_least else 'most'} {self.bound:.2f}"
        return [self.what, target, f"{median(self.values):.2f}", spread, "yes" if self.met else "NO"]


# The diamond


def diamond(pace: Pace, peers: Path, folder: Path) -> tuple[list[Row], str]:
    results = Results(versions={})
    serve, tuned, ours, local = RayServe(peers), RayServeTuned(peers), PointsmanOnRay(), Pointsman()
    how = msgspec.structs.replace(QUICK if pace.diamond == 1 else FULL, rounds=pace.diamond)
    Run(that_can_run([serve, tuned, ours], results), results, how, folder, (DIAMOND,)).all()
    rows, rates = [], {}
    for clients in CLIENTS:
        found = []
        for number, each in enumerate(results.rounds):
            rate = {one.name: of_diamond(one.name, clients, RATE)(each) for one in (serve, tuned, ours)}
            mine, theirs = rate[ours.name], [rate[serve.name], rate[tuned.name]]
            if mine:
                rates[number, clients] = mine
                found += [mine / max(filter(None, theirs))] if all(theirs) else []
        rows.append(Row(f"diamond, {clients} clients: requests/s / the better Ray Serve", found, 5.0, True))
    rounds = range(len(results.rounds))
    kept = [rates[one, 32] / rates[one, 8] for one in rounds if (one, 32) in rates and (one, 8) in rates]
    rows.append(Row("diamond on Ray: requests/s with 32 clients / with 8", kept, 0.8, True))
    arrays = Results(versions={})
    Run(that_can_run([local, ours], arrays), arrays, msgspec.structs.replace(how, rounds=1), folder, (CHAIN,)).all()
    results.missing |= arrays.missing
    handed = arrays.ratios(of_handing(ours.name, HANDED), of_handing(local.name, HANDED))
    rows.append(Row("10 MB to the next replica on one node / local runtime", handed, 1.25))
    complaints = [f"{name}: {why}" for name, why in {**results.missing, **results.complaints()}.items()]
    return rows, "\n".join([diamond_table(results), *complaints])


def diamond_table(results: Results) -> str:
    lines = []
    for name in results.versions:
        rates = [results.median(of_diamond(name, clients, RATE)) for clients in CLIENTS]
        lines.append([name, *("" if rate is None else f"{rate:,.0f}" for rate in rates)])
    return text_table(["diamond, requests/s", *(f"{clients} clients" for clients in CLIENTS)], lines)


# Streams


class Streamed(NamedTuple):
    """One turn of streams."""

    chunks_per_s: float
    first_ms: float
    """Time to the first token, median."""
    gateway_us: float
    """CPU time of the process of plane and gateway per chunk, all threads."""


def manifest() -> str:
    parameters = {"tokensPerSecond": TOKENS_PER_SECOND, "firstTokenMs": 0, "maxNumSeqs": 512}
    engine = {"type": "simulated", "parameters": parameters}
    return json.dumps(
        {
            "kind": "Pointsman",
            "deployments": [{"name": "m", "model": "m", "replicas": 2, "engine": engine}],
            "gateway": {"listen": "127.0.0.1:0"},
        }
    )


async def stream(url: str, rounds: int) -> tuple[int, list[float], float]:
    """Clients with several streams each, one after another: chunks, times to the first chunk, and total seconds."""
    body = json.dumps({"model": "m", "max_tokens": TOKENS, "stream": True, "prompt": "where does this train go?"})
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    request, where = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode(), urlsplit(url)
    firsts: list[float] = []

    async def client(number: int) -> int:
        """Clients begin one after another: the first token of one does not wait for those of all."""
        await asyncio.sleep(number / STREAMS * TOKENS / TOKENS_PER_SECOND)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        chunks = 0
        for _ in range(rounds):
            began = time.perf_counter()
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            ended, first = False, True
            while not ended:
                size = int(await reader.readuntil(b"\r\n"), 16)
                piece = await reader.readexactly(size + 2)
                if first:
                    firsts.append(time.perf_counter() - began)
                first, ended = False, size == 0
                chunks += piece.count(b"data: {")
        writer.close()
        return chunks

    began = time.perf_counter()
    count = sum(await asyncio.gather(*(client(number) for number in range(STREAMS))))
    return count, firsts, time.perf_counter() - began


def turn(plane: LivePlane, rounds: int = 2) -> Streamed:
    url, pids = plane.url, [plane.process.pid]
    before = cpu_ns(pids)
    chunks, firsts, seconds = uvloop.run(stream(url, rounds))
    assert chunks >= STREAMS * rounds * TOKENS, f"{chunks} chunks"
    return Streamed(chunks / seconds, median(firsts) * 1e3, (cpu_ns(pids) - before) / 1e3 / chunks)


def streams(pace: Pace, folder: Path) -> tuple[list[Row], str]:
    with ExitStack() as stack:
        planes = {}
        for name in (LOCAL, RAY):
            (folder / name).mkdir()
            plane = planes[name] = LivePlane(folder / name)
            if name == RAY:
                plane.flags = ["--runtime", "ray"]
                plane.environment |= ray_of_its_own(folder / name)
            stack.callback(plane.close)
            plane.up(manifest(), timeout_s=READY_S)
        found: dict[str, list[Streamed]] = {LOCAL: [], RAY: []}
        for plane in planes.values():
            turn(plane)  # connections and caches
        for number in range(pace.turns):
            for name in (LOCAL, RAY) if number % 2 else (RAY, LOCAL):
                found[name].append(turn(planes[name]))

    def beside(figure: Callable[[Streamed], float]) -> list[float]:
        return [figure(on_ray) / figure(local) for on_ray, local in zip(found[RAY], found[LOCAL], strict=True)]

    rows = [
        Row("streams on Ray: chunks/s / local runtime", beside(lambda one: one.chunks_per_s), 0.9, True),
        Row("streams on Ray: time to first token / local runtime", beside(lambda one: one.first_ms), 1.1),
        Row(
            "streams on Ray: CPU of plane and gateway per chunk / local runtime",
            beside(lambda one: one.gateway_us),
            1.1,
        ),
    ]
    lines = []
    for name, turns in found.items():
        rate, first, cpu = (median(one[part] for one in turns) for part in range(3))
        lines.append([name, f"{rate:,.0f}", f"{first:.2f}", f"{cpu:.1f}"])
    return rows, text_table(["runtime", "chunks/s", "first token ms", "us of CPU per chunk"], lines)


# Everything


def gateways(pace: Pace) -> list[Row]:
    runs = [(measured(1, 256, pace.seconds), measured(2, 256, pace.seconds)) for _ in range(pace.gateways)]
    return [
        Row(
            "gateway.processes: 2 / 1, requests per CPU second of the busiest process",
            [two.busiest_rps / one.busiest_rps for one, two in runs],
            1.7,
            True,
        )
    ]


def sharing(pace: Pace) -> tuple[list[Row], str]:
    """Rows of linked gateways; a gateway that is cut off only must not lose a request."""
    found = qualities(pace.shared, pace.gateways)
    one, *others = (found[place :: len(CASES)] for place in range(len(CASES)))
    rows = []
    for several in others:
        name = f"{several[0].processes} gateway processes{', link cut' * several[0].is_cut}"
        if several[0].is_cut:
            rows.append(Row(f"{name}: failed requests", [float(each.failed) for each in several], 0.0))
            continue
        for what in ("hit_rate", "attainment"):
            beside = [getattr(each, what) / getattr(of, what) for each, of in zip(several, one, strict=True)]
            rows.append(Row(f"{name}: {what.replace('_', ' ')} / one process", beside, 0.95, True))
    return rows, quality_table(found)


def router(pace: Pace) -> list[Row]:
    """The rows of a second deployment with Serve's own router show what chance does."""
    found = on_serve(pace.router, 0.5)
    names = {AGAIN: "Serve's router again"}
    return [
        Row(f"{names.get(name, f'PointsmanRouter {name}')}, {how}: time per request / Serve's router", values, 1.1)
        for (how, name), values in ratios(found).items()
    ]


Part: TypeAlias = Callable[[Pace, Path, Path], tuple[list[Row], str]]
"""The amount, the environment of Ray Serve, and a folder. Returns rows, and a table to print before them."""
PARTS: dict[str, Part] = {
    "diamond": diamond,
    "streams": lambda pace, _, folder: streams(pace, folder),
    "router": lambda pace, *_: (router(pace), ""),
    "gateways": lambda pace, *_: (gateways(pace), ""),
    "sharing": lambda pace, *_: sharing(pace),
}


def measured_part(name: str, pace: Pace, peers: Path, folder: Path) -> list[Row]:
    """The rows of a part. If one fails, it reports why, and the others are still measured."""
    progress(name)
    try:
        rows, table = PARTS[name](pace, peers, folder)
    except Exception as error:  # exceptions of Ray, of planes and of clients
        print(f"{name}: {type(error).__name__}: {error}\n")
        return [Row(name, [], 0.0)]
    if table:
        print(f"{table}\n")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ray_runtime", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few and short rounds, with more noise")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {' '.join(PARTS)}")
    parser.add_argument("--peers", type=Path, default=ENVIRONMENT, metavar="VENV", help="where Ray Serve is installed")
    options = parser.parse_args()
    pace, began = PACES["quick" if options.quick else "full"], time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="br-", ignore_cleanup_errors=True) as folder:
        for name in PARTS:
            if name in options.only:
                rows += measured_part(name, pace, options.peers.absolute(), Path(folder))
    print(text_table(["what", "target", "median", "rounds", "met"], [one.cells() for one in rows]))
    load = os.getloadavg()[1]
    progress(f"done in {time.monotonic() - began:.0f} s on {os.cpu_count()} cores; load over 5 minutes {load:.1f}")
    return 0 if all(one.values and one.met for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""How many requests per second and core a replay plays, and where the time goes.

    python -m bench.lab [--data FOLDER] [--requests 12031] [--speed 2] [--engines 16] [--tries 3] [--profile]

Without data the benchmark is skipped. Three things are timed on the same requests: the whole replay, as `pointsman lab`
makes it (plane, dispatcher, clock, engines, prompts, figures), the engines on the virtual clock without a dispatcher,
and the engines alone. The last two get every request where and when the dispatcher has sent it. Reading the recording
is not counted.
"""

import argparse
import cProfile
import gc
import os
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pointsman.lab.traffic import (
    Objectives,
    Recording,
    ReplayLoad,
    ReplaySetting,
    RunFigures,
    fleet_of,
    policy_of,
    recording_of_file,
)
from pointsman.lab.traffic.measures import RunCounters
from pointsman.lab.traffic.replay import Player, RequestOutcome
from pointsman.render.text import text_table
from pointsman.runtimes.simulation.engines import SimulatedEngine, SimulatedRequest
from pointsman.runtimes.simulation.processes import VirtualClock
from pointsman.simulator.continuous_batching import ContinuousBatching, Limits
from pointsman.simulator.performance import Job, hardware
from pointsman.types import RequestMetadata

VARIABLE = "POINTSMAN_TRACES"
FILE = "mooncake_conversation.jsonl"
HARDWARE = "70B|a100_sxm|vllm|tp8"
BLOCK = 512


class Variant(NamedTuple):
    policy: str
    scrape_interval_s: float | None


VARIANTS = (
    Variant("fifo", None),
    Variant("fifo", 0.5),
    Variant("pending-work", 0.5),
    Variant("default", None),
    Variant("default", 0.5),
)


class Trace:
    """The requests of a benchmark, in memory."""

    def __init__(self, file: Path, limit: int | None, speed: float, engines: int) -> None:
        requests = list(recording_of_file(file, limit))
        self.recording = Recording(file.name, lambda: requests)
        self.recording.survey()
        self.requests = len(requests)
        self.fleet = fleet_of(f"{engines}x{HARDWARE}")
        self.load = ReplayLoad(speed=speed)


class Sent(NamedTuple):
    """A request as the dispatcher has sent it."""

    at: float
    request: RequestMetadata
    output_tokens: int
    hashes: tuple[int, ...]


class Whole:
    """The whole replay, and where it has sent each request."""

    def __init__(self, trace: Trace, variant: Variant) -> None:
        self._counters = RunCounters(Objectives())
        setting = ReplaySetting(fleet=trace.fleet, load=trace.load, scrape_interval_s=variant.scrape_interval_s)
        self._player = Player(trace.recording, setting, policy_of(variant.policy), 0, self._counters.add)
        self.figures: RunFigures

    def run(self) -> None:
        replayed = self._player.play()
        self.figures = self._counters.figures(replayed, policy="", speed=1.0, seed=0)
        assert self.figures.rejected == 0, f"{self.figures.rejected:.1%} of the requests were refused"


def sent_by(trace: Trace, variant: Variant) -> dict[str, list[Sent]]:
    """The requests that the same replay sends to each instance."""
    found: dict[str, list[Sent]] = defaultdict(list)

    def note(one: RequestOutcome) -> None:
        request = RequestMetadata(f"{one.number}", prompt_tokens=one.request.input_length, arrival_time=one.at)
        tokens = max(one.request.output_length, 1)
        found[one.instance].append(Sent(one.sent_at, request, tokens, one.request.hash_ids))

    setting = ReplaySetting(fleet=trace.fleet, load=trace.load, scrape_interval_s=variant.scrape_interval_s)
    Player(trace.recording, setting, policy_of(variant.policy), 0, note).play()
    for each in found.values():
        each.sort(key=lambda one: one.at)
    return found


def pace() -> ContinuousBatching:
    return ContinuousBatching(hardware(HARDWARE), Limits(block_size=BLOCK), every_token=False)


def on_clock(sent: dict[str, list[Sent]]) -> Callable[[], None]:
    """The engines on a virtual clock, without a dispatcher."""
    clock, ended, total = VirtualClock(), [0], sum(map(len, sent.values()))

    def finished(*_: object) -> None:
        ended[0] += 1
        if ended[0] == total:
            clock.halt()

    def submit(engine: SimulatedEngine, one: Sent) -> None:
        # No lane: no decisions are made here.
        engine.submit(SimulatedRequest(None, one.request, one.output_tokens, one.hashes))  # type: ignore[arg-type]

    for name, each in sent.items():
        engine = SimulatedEngine(name, pace(), clock, lambda *_: None, finished)
        for one in each:
            clock.schedule(one.at, submit, engine, one)
    return lambda: clock.run_on(1e9)


def alone(sent: dict[str, list[Sent]]) -> Callable[[], None]:
    """The engines, without a clock."""
    engines = [(pace(), each) for each in sent.values()]

    def run() -> None:
        for engine, each in engines:
            for one in each:
                while (due := engine.next_at) is not None and due <= one.at:
                    engine.advance(due)
                engine.submit(Job(one.request.input_tokens, one.output_tokens, one.hashes), one.at)
            while (due := engine.next_at) is not None:
                engine.advance(due)

    return run


def seconds(run: Callable[[], None], profile: cProfile.Profile | None = None) -> float:
    gc.collect()
    gc.freeze()
    if profile is not None:
        profile.enable()
    start = time.process_time()
    run()
    took = time.process_time() - start
    if profile is not None:
        profile.disable()
    gc.unfreeze()
    return took


def row(trace: Trace, variant: Variant, tries: int, profile: cProfile.Profile | None) -> list[str]:
    times: list[tuple[float, float, float]] = []
    sent = sent_by(trace, variant)
    for number in range(tries):
        whole = Whole(trace, variant)
        took = seconds(whole.run, profile if number == tries - 1 else None)
        times.append((took, seconds(on_clock(sent)), seconds(alone(sent))))
    total, clocked, engine = (min(column) for column in zip(*times, strict=True))
    count = trace.requests
    return [
        variant.policy,
        "not read" if variant.scrape_interval_s is None else f"every {variant.scrape_interval_s:g} s",
        f"{count / total:,.0f}",
        f"{total / count * 1e6:.0f}",
        f"{engine / count * 1e6:.0f}",
        f"{(clocked - engine) / count * 1e6:.0f}",
        f"{(total - clocked) / count * 1e6:.0f}",
        f"{whole.figures.attainment:.3f}",
    ]


HEADS = ("policy", "metrics", "requests/s", "us/request", "engines", "clock", "dispatcher and rest", "in time")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lab")
    folder = os.environ.get(VARIABLE)
    parser.add_argument("--data", type=Path, default=Path(folder) if folder else None, help=f"default: {VARIABLE}")
    parser.add_argument("--requests", type=int, help="number of requests to take, from the first; default all")
    parser.add_argument("--speed", type=float, default=2.0, help="times the recorded speed")
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--tries", type=int, default=3, help="number of tries; the best counts")
    parser.add_argument("--profile", action="store_true", help="list the functions of the last row")
    options = parser.parse_args()
    if options.data is None or not (options.data / FILE).exists():
        print(f"skipped: no {FILE}; set {VARIABLE} or --data to the folder of the recordings")
        return
    trace = Trace(options.data / FILE, options.requests, options.speed, options.engines)
    table = []
    profile = cProfile.Profile() if options.profile else None
    for variant in VARIANTS:
        if sys.stderr.isatty():
            print(f"\r{variant}", end="", file=sys.stderr, flush=True)
        is_last = variant is VARIANTS[-1]
        table.append(row(trace, variant, options.tries, profile if is_last else None))
    print(f"{trace.requests:,} requests at {options.speed:g}x on {options.engines} engines {HARDWARE}, one core:")
    print(text_table(HEADS, table))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()

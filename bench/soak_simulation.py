"""Faults by the thousand: no request is lost or ends twice, and nothing is left behind.

    python -m bench.soak_simulation [--requests 1000000] [--faults 10000] [--first-seed 0] [--processes 2]
    python -m bench.soak_simulation --seed 17        # one run again, by its seed

Each run has a seed, from which everything follows: policy, traffic, faults and their targets.
"""

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from pointsman.config.revision import ManifestText
from pointsman.routing.routes import DispatcherSettings
from pointsman.runtimes.simulation.engines import SimulatedRequest
from pointsman.runtimes.simulation.faults import FaultInjector, RandomFaults
from pointsman.runtimes.simulation.simulation import SimulatedArrival, Simulation
from pointsman.simulator.continuous_batching import ContinuousBatching
from pointsman.types import RequestMetadata

PER_RUN = 10_000
PER_SECOND = 20.0
BEGIN_S = 5.0
TIMEOUT_S = 120.0
"""Time to live of a request in the queue."""
BLOCK = 16
POLICIES = ("fifo", "priority", "slo-aware", "adaptive", "power-of-two", "")
MANIFEST = """
deployments:
  - name: chat
    model: chat
    replicas: 6
    engine: {{type: simulated, parameters: {{maxNumSeqs: 32, kvTokens: 16000, blockSize: {block}}}}}
    {scheduling}
"""


class SoakRun(NamedTuple):
    seed: int
    requests: int
    happened: Counter[str]
    """Faults, by kind."""
    ends: Counter[str]
    wrong: list[str]


def traffic(seed: int, count: int, gateways: int) -> Iterator[SimulatedArrival]:
    rng, at = random.Random(seed), BEGIN_S
    for number in range(count):
        at += rng.expovariate(PER_SECOND)
        tokens, family = rng.randint(1, 3000), rng.randrange(8)
        shared = min(rng.randint(0, 80), tokens // BLOCK)
        own = range(shared, tokens // BLOCK)
        hashes = [family * 1000 + place for place in range(shared)]
        hashes += [1_000_000 + number * 1000 + place for place in own]
        request = RequestMetadata(
            f"r{number}",
            model_name="chat",
            prompt_tokens=tokens,
            arrival_time=at,
            timeout_s=TIMEOUT_S,
            priority=rng.choice((0, 0, 0, 1, -1)),
            slo_deadline_ms=rng.choice((None, 2000.0, 20_000.0)),
        )
        yield SimulatedArrival(at, request, rng.randint(1, 300), hashes, rng.randrange(gateways))


def soak(seed: int, requests: int = PER_RUN, faults: int = PER_RUN // 100) -> SoakRun:
    gateways = 2 if seed % 4 == 3 else 1
    policy = POLICIES[seed % len(POLICIES)]
    scheduling = f"scheduling: {{policy: {policy}}}" if policy else ""
    ends: Counter[str] = Counter()
    open_: dict[str, str] = {}
    wrong: list[str] = []

    def listen(at: float, what: str, one: SimulatedRequest, _where: str) -> None:
        """Track each request from state to state."""
        name = one.request.request_id
        before = open_.get(name)
        if what == "first-token" and before != "sent":
            wrong.append(f"{name}: first token while {before}, at {at:.3f}")
        if what in ("served", "refused"):
            ends[what] += 1
            expected = ("first-token",) if what == "served" else (None, "sent", "first-token", "failed")
            if before not in expected or before == "ended":
                wrong.append(f"{name}: {what} while {before}, at {at:.3f}")
            open_[name] = "ended"
        elif before == "ended":
            wrong.append(f"{name}: {what} after its end, at {at:.3f}")
        else:
            open_[name] = what

    simulation = Simulation(
        ManifestText(MANIFEST.format(block=BLOCK, scheduling=scheduling), "/"),
        settings=DispatcherSettings(seed=seed),
        gateways=gateways,
        listener=listen,
        stop_s=0.5,
    )
    last_s = BEGIN_S + requests / PER_SECOND
    injector = FaultInjector(simulation, seed)
    injector.schedule(RandomFaults(faults, end=last_s, begin=BEGIN_S).drawn(random.Random(seed)))
    simulation.play(traffic(seed, requests, gateways))
    if not simulation.run(last_s + 3600.0):
        wrong += [f"{name}: never ended" for name in list(simulation.engines.requests)[:10]]
    simulation.run_until(simulation.clock.now() + 60.0)
    if len(open_) != requests or set(open_.values()) != {"ended"}:
        wrong.append(f"{requests} requests arrived, {sum(one == 'ended' for one in open_.values())} ended")
    wrong += leftovers(simulation)
    return SoakRun(seed, requests, injector.happened, ends, wrong)


def leftovers(simulation: Simulation) -> list[str]:
    """What engines and dispatchers still hold after the end of every request."""
    found = []
    for engine in simulation.engines.each.values():
        pace = engine.pace
        used = pace.cache.used if isinstance(pace, ContinuousBatching) else 0
        if pace.running or pace.waiting or used or engine.requests:
            found.append(f"{engine.instance_id}: {pace.running} running, {pace.waiting} waiting, {used} blocks in use")
    each = [] if simulation.gateways is None else simulation.gateways.each
    for traffic_ in [simulation.traffic, *(one.traffic for one in each)]:
        found += [
            f"{lane.name}: {len(lane.dispatcher)} requests in its dispatcher"
            for lane in traffic_.lanes.values()
            if len(lane.dispatcher)
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak_simulation")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="one run, as it was")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    runs = -(-options.requests // PER_RUN)
    per_run = round(options.faults / runs * 1.35)  # some find no running instance, or no second gateway
    seeds = range(options.first_seed, options.first_seed + runs) if options.seed is None else [options.seed]
    began, ends, happened, failed = time.monotonic(), Counter[str](), Counter[str](), []
    done = 0
    with ProcessPoolExecutor(options.processes) as pool:
        for run in pool.map(soak, seeds, [PER_RUN] * len(seeds), [per_run] * len(seeds)):
            done += run.requests
            ends += run.ends
            happened += run.happened
            if run.wrong:
                failed.append(run)
                print(f"\nseed {run.seed}: " + "; ".join(run.wrong[:5]))
                sizes = f"--requests {options.requests} --faults {options.faults}"
                print(f"again: python -m bench.soak_simulation --seed {run.seed} {sizes}")
            if sys.stderr.isatty():
                print(f"\r{done:,} requests, {happened.total():,} faults", end="", file=sys.stderr, flush=True)
    took = time.monotonic() - began
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(happened.items()))
    print(f"{done:,} requests: {ends['served']:,} served, {ends['refused']:,} refused, {len(failed)} runs failed")
    print(f"{happened.total():,} faults: {kinds}; {took:.0f} s in {options.processes} processes")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

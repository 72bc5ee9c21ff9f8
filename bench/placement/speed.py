"""`python -m bench.placement.speed`: milliseconds per placement on fleets from 10 to 10,000 workers of 8 GPUs.

Beside it, in the same run, what the plainest placer would take that does the first of these: a loop over all GPUs for
the tightest that fits.
"""

import argparse
import random
import time
from collections.abc import Callable
from functools import partial

from pointsman.placement.asks import Arrangement, Ask, Claim, Need, Place, Tier
from pointsman.placement.fleet import FREE_BYTES, Fleet
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused
from pointsman.render.text import text_table
from pointsman.types import Gpu, Worker

GIB = 1 << 30
GPUS = 8
LAYERS = 80
SIZES = (10, 100, 1_000, 10_000)
TARGETS_MS = {"one GPU, binpack": 5, "one GPU, spread": 5, "several GPUs": 20, "several workers": 50, "refused": 50}
"""At 1,000 workers."""


def fleet_of(workers: int, seed: int = 1) -> Fleet:
    """Workers of eight H100s in racks of twenty, with four instances each on average, wherever chance put them."""
    dice = random.Random(seed)
    gpus = tuple(Gpu(index=index, memory_bytes=80 * GIB, model="H100", link="nvlink") for index in range(GPUS))
    fleet = Fleet(
        Worker(name=f"w{n}", cpus=128, memory_bytes=2048 * GIB, gpus=gpus, labels={"rack": f"r{n // 20}"})
        for n in range(workers)
    )
    for number in range(4 * workers):
        size = dice.choice([10, 20, 30]) * GIB
        claim = Claim(worker=f"w{dice.randrange(workers)}", gpu=dice.randrange(GPUS), gpu_bytes=size, memory_bytes=GIB)
        fleet.claim(f"i{number}", Place(tier=Tier.ONE_GPU, claims=(claim,)), f"d{number % 50}")
    return fleet


def ask(size: int, **facts: object) -> Ask:
    """A model of this size in GiB, weights and KV cache together."""
    need = Need(
        model="m",
        layer_bytes=(int(size * GIB * 0.8 / LAYERS),) * LAYERS,
        kv_layer_bytes=(int(size * GIB * 0.2 / LAYERS),) * LAYERS,
        kv_splits=8,
        overhead_bytes=GIB,
        host_bytes=GIB,
        context=8192,
        tensor_parallel_sizes=(1, 2, 4, 8),
    )
    return Ask(instance_id="new", deployment="d1", need=need, **facts)  # type: ignore[arg-type]


ASKS: dict[str, Ask] = {
    "one GPU, binpack": ask(24, arrangement=Arrangement.BINPACK),
    "one GPU, spread": ask(24, arrangement=Arrangement.SPREAD),
    "several GPUs": ask(250),
    "several workers": ask(1_200, several_workers=True),
    "refused": ask(10_000_000, several_workers=True, partial_offload=True, cpu=True),
}


def plainest(fleet: Fleet, needed: int) -> object:
    """The tightest GPU that fits, by looking at each."""
    best, least = None, float("inf")
    free = fleet.gpus.columns[FREE_BYTES]
    for device in fleet.gpus:
        room = float(free[device.row])
        if needed <= room < least:
            best, least = device, room
    return best


def least_ms(call: Callable[[], object], seconds: float = 0.4) -> float:
    """The best of many: what others do on the machine only ever adds."""
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until or best == float("inf"):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def decided(placer: Placer, wanted: Ask) -> Placed | Refused:
    """A decision; the reason of a refusal is rendered as text."""
    outcome = placer.place(wanted)
    if isinstance(outcome, Refused):
        str(outcome.reason)
    return outcome


def measure() -> str:
    """A table: one row per kind of ask, one column per size of the fleet."""
    rows: dict[str, list[str]] = {name: [] for name in ASKS}
    naive: list[str] = []
    needed = ASKS["one GPU, binpack"].need.gpu_bytes()
    for workers in SIZES:
        fleet = fleet_of(workers)
        placer = Placer(fleet)
        for name, wanted in ASKS.items():
            assert isinstance(decided(placer, wanted), Refused) is (name == "refused")
            rows[name].append(f"{least_ms(partial(decided, placer, wanted)):.2f}")
        naive.append(f"{least_ms(partial(plainest, fleet, needed)):.2f}")
    heads = ["ms per decision", *(f"{workers:,} workers" for workers in SIZES), "target at 1,000", "met"]
    at = SIZES.index(1_000)
    table = [
        [name, *row, f"{TARGETS_MS[name]} ms", "yes" if float(row[at]) <= TARGETS_MS[name] else "NO"]
        for name, row in rows.items()
    ]
    return text_table(heads, [*table, ["a plain loop, one GPU", *naive, "", ""]])


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.placement.speed", description=__doc__).parse_args()
    print(measure())


if __name__ == "__main__":
    main()

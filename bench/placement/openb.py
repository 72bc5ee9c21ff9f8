"""How much of a fleet's GPUs is allocated when demand exceeds supply: the openb cluster of Alibaba.

    python -m bench.placement.openb --data FOLDER [--seeds 10] [--methods random best-fit ...]

Pods come in random order until they ask for 1.3 times the GPUs of the fleet; one that does not fit is gone.
Printed are the share of GPU capacity that is allocated in the end, and the CPU time of a decision. The data stay where
they are.
"""

import argparse
import csv
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, pstdev

from bench.placement.methods import METHODS, USUAL, Setting, gpus_of, share_of
from pointsman.placement.asks import Ask, EngineAbility, Need
from pointsman.placement.fleet import Fleet
from pointsman.placement.fragmentation import PARTS, hole_values
from pointsman.render.text import text_table
from pointsman.types import Gpu, Worker

NODES, PODS = "openb_node_list_gpu_node.csv", "openb_pod_list_default.csv"
VARIABLE = "POINTSMAN_TRACES"
INFLATION = 1.3
GPU_BYTES = 16 << 30
"""Nominal: shares are all that counts here."""
MIB = 1 << 20


# Supply and demand


def workers_of(rows: Sequence[dict[str, str]]) -> list[Worker]:
    return [
        Worker(
            name=row["sn"],
            cpus=int(row["cpu_milli"]) / 1000,
            memory_bytes=int(row["memory_mib"]) * MIB,
            gpus=tuple(
                Gpu(index=index, memory_bytes=GPU_BYTES, model=row["model"], vendor="")
                for index in range(int(row["gpu"]))
            ),
        )
        for row in rows
    ]


def asks_of(rows: Sequence[dict[str, str]]) -> list[Ask]:
    engines = [EngineAbility(vendors=frozenset({""}), needs_gpu=needs_gpu) for needs_gpu in (False, True)]
    return [
        Ask(
            instance_id=row["name"],
            need=Need.fixed(host_bytes=int(row["memory_mib"]) * MIB, gpus=int(row["num_gpu"])),
            engine=engines[int(row["num_gpu"]) > 0],
            cpus=int(row["cpu_milli"]) / 1000,
            gpu_share=int(row["gpu_milli"]) / 1000,
            gpu_models=frozenset(filter(None, row["gpu_spec"].split("|"))),
        )
        for row in rows
    ]


def stream(asks: Sequence[Ask], gpus: float, seed: int) -> Iterator[Ask]:
    """The tasks in random order, repeated until they ask for this many GPUs."""
    rng, left = random.Random(seed), list(asks)
    while True:
        rng.shuffle(left)
        for ask in left:
            yield ask
            gpus -= share_of(ask)
            if gpus <= 0:
                return


def bound(asks: Sequence[Ask]) -> float:
    """The share of whole GPUs in use if all asks are packed onto as few GPUs as possible."""
    sizes: dict[int, float] = {}
    for ask in asks:
        if gpus_of(ask):
            size = round((ask.gpu_share or 0.0) * PARTS)
            sizes[size] = sizes.get(size, 0.0) + gpus_of(ask)
    values = hole_values(sizes)
    return sum(map(share_of, asks)) / sum(count * float(values[size]) for size, count in sizes.items())


# Measuring


class Run:
    """One stream of asks through one method."""

    def __init__(self, method: str, workers: Sequence[Worker], asks: Sequence[Ask], seed: int) -> None:
        fleet = Fleet(workers)
        capacity = len(fleet.gpus)
        start = time.process_time()
        choose = METHODS[method](Setting(fleet, asks, seed))
        decisions, allocated, first_refusal = 0, 0.0, None
        booking = 0.0
        for ask in stream(asks, INFLATION * capacity, seed):
            place = choose(ask)
            decisions += 1
            if place is None:
                first_refusal = allocated if first_refusal is None else first_refusal
                continue
            before = time.process_time()
            fleet.claim(str(decisions), place)
            booking += time.process_time() - before
            allocated += share_of(ask)
        self.share = allocated / capacity
        self.before_refusal = (allocated if first_refusal is None else first_refusal) / capacity
        self.decision_ms = (time.process_time() - start - booking) / decisions * 1000
        self.booking_ms = booking / decisions * 1000


def measure(methods: Sequence[str], workers: Sequence[Worker], asks: Sequence[Ask], seeds: int) -> list[list[str]]:
    rows = []
    for method in methods:
        runs = []
        for seed in range(seeds):
            print(f"\r{method}: seed {seed + 1} of {seeds} ", end="", file=sys.stderr, flush=True)
            runs.append(Run(method, workers, asks, seed))
        print(file=sys.stderr)
        shares = [100 * run.share for run in runs]
        rows.append(
            [
                method,
                f"{mean(shares):.2f}",
                f"{pstdev(shares):.2f}",
                f"{mean(100 * run.before_refusal for run in runs):.2f}",
                f"{mean(run.decision_ms for run in runs):.3f}",
                f"{mean(run.booking_ms for run in runs):.3f}",
            ]
        )
    return rows


HEADS = ("method", "allocated %", "+-", "before the first refusal %", "ms per decision", "ms to claim")


def folder_of(given: Path | None) -> Path | None:
    """Where the data are: as given, or in openb/ of the folder that the environment names."""
    if given is not None:
        return given
    traces = os.environ.get(VARIABLE)
    return Path(traces) / "openb" if traces else None


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


PRODUCT_HEADS = ("the product's own path", "allocated %", "+-", "% of the bound", "ms per decision, with reconciling")


def product_rows(workers: Sequence[Worker], asks: Sequence[Ask], seeds: int) -> list[list[str]]:
    """A new plane, and one that begins with the counts that the previous one has stored."""
    from bench.placement import product

    deployments = product.deployments_of(asks)
    first = [product.run(workers, asks, deployments, seed) for seed in range(seeds)]
    later = [product.run(workers, asks, deployments, seed + seeds, run.learned) for seed, run in enumerate(first)]
    rows = []
    for name, runs, offset in (("the first day", first, 0), ("after learning", later, seeds)):
        shares = [100 * run.share for run in runs]
        limits = [ceiling_of(workers, asks, seed + offset) for seed in range(seeds)]
        of_bound = [share / limit for share, limit in zip(shares, limits, strict=True) if limit]
        known = f"{mean(of_bound):.2f}" if of_bound else ""
        spent = f"{mean(run.decision_ms for run in runs):.3f}"
        rows.append([name, f"{mean(shares):.2f}", f"{pstdev(shares):.2f}", known, spent])
    return rows


def ceiling_of(workers: Sequence[Worker], asks: Sequence[Ask], seed: int) -> float | None:
    """The largest share that any placement of one stream allocates; None without the library that computes it."""
    try:
        from bench.placement.ceiling import ceiling
    except ImportError:
        return None
    capacity = sum(len(worker.gpus) for worker in workers)
    return ceiling(workers, list(stream(asks, INFLATION * capacity, seed)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Share of GPUs allocated on the openb cluster.")
    parser.add_argument("--data", type=Path, help=f"folder of the openb files (else openb/ in ${VARIABLE})")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=USUAL)
    options = parser.parse_args(arguments)
    folder = folder_of(options.data)
    if folder is None or not (folder / NODES).is_file() or not (folder / PODS).is_file():
        looked = f"{NODES} and {PODS} are not in {folder}" if folder else "no folder is named"
        print(f"openb: skipped: {looked}; name theirs with --data, or with {VARIABLE} the one that holds openb/")
        return 0
    workers, asks = workers_of(rows_of(folder / NODES)), asks_of(rows_of(folder / PODS))
    print(text_table(HEADS, measure(options.methods, workers, asks, options.seeds)))
    print(f"\n{text_table(PRODUCT_HEADS, product_rows(workers, asks, options.seeds))}")
    bounds = [ceiling_of(workers, asks, seed) for seed in range(options.seeds)]
    if None not in bounds:
        print(f"\nNo placement of these pods allocates more than {100 * mean(filter(None, bounds)):.2f} %.")
    else:
        print("\nbound: skipped: pip install scipy")
    print(f"\nCut out of as few GPUs as possible, with CPUs to spare, these asks would fill {100 * bound(asks):.2f} %.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The expected workload, and what of it a partly free GPU can run.

Enters: a sample of asks. Leaves: kinds of asks with their weights, and tables by make of GPU and free part of one.
Packing keeps room for what is likely to come.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from pointsman.placement.asks import Ask
from pointsman.placement.needs import Need
from pointsman.selection.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
else:
    Floats = Any

# The value of a hole in a GPU, by its size
#
# Cutting the demand out of as few whole GPUs as possible is the cutting-stock problem, and its linear program prices
# each size of ask: 81 % of a GPU costs a whole one if few asks are for 19 %. A hole is worth the most expensive asks
# that fit in it together; a hole that no ask fits in is worth nothing.

PARTS = 100
"""Sizes are counted in hundredths of a GPU."""
MAX_STEPS = 500
"""Enough for a hundred sizes; prices short of the optimum are good too."""
ROUNDING = 1e-9


def hole_values(demand: Mapping[int, float]) -> Floats:
    """Values of holes of 0, 1, ... PARTS hundredths, in GPUs, given the demand for each size in hundredths."""
    sizes = sorted(demand, reverse=True)
    wanted = np.array([demand[size] for size in sizes])
    # Columns are ways to fill a GPU, at first with one size each. A better way replaces one until there is none.
    ways = np.diag([float(PARTS // size) for size in sizes])
    values = np.zeros(PARTS + 1)
    for _ in range(MAX_STEPS if sizes else 0):
        prices: Floats = np.linalg.solve(ways.T, np.ones(len(sizes))).astype(np.float64)
        values = _highest_values(sizes, prices)
        if values[PARTS] <= 1 + ROUNDING:
            break
        better = _way(sizes, prices, values)
        used, change = np.linalg.solve(ways, np.stack([wanted, better], axis=1)).T
        lasts = np.full(len(sizes), np.inf)
        np.divide(used, change, out=lasts, where=change > ROUNDING)
        ways[:, int(np.argmin(lasts))] = better
    return values / max(1.0, float(values[PARTS]))


def _highest_values(sizes: Sequence[int], prices: Floats) -> Floats:
    """By size of a hole: the highest sum of prices that fits."""
    values = np.zeros(PARTS + 1)
    for size, price in zip(sizes, prices, strict=True):
        for _ in range(PARTS // size if price > 0 else 0):
            values[size:] = np.maximum(values[size:], values[:-size] + price)
    return values


def _way(sizes: Sequence[int], prices: Floats, values: Floats) -> Floats:
    """How often each size occurs in the most valuable filling of a whole GPU."""
    way = np.zeros(len(sizes))
    left = PARTS
    while left > 0:
        for index, size in enumerate(sizes):
            if size <= left and prices[index] > 0 and values[left - size] + prices[index] >= values[left] - ROUNDING:
                way[index] += 1
                left -= size
                break
        else:
            left -= 1
    return way


MAX_KINDS = 64
"""The most common kinds stand for all."""
UNLIMITED = 1e18
"""GPUs per CPU or byte for asks that need none; infinity times 0 would be NaN."""
SLACK = 1e-6
"""Shares and CPUs are fractions that were added and subtracted."""


class Make(msgspec.Struct, frozen=True):
    """GPUs that are the same to every ask."""

    model: str
    vendor: str
    memory_bytes: float


class AskKind(msgspec.Struct, frozen=True):
    """What equal asks have in common."""

    need: Need
    cpus: float
    gpu_share: float | None
    exclusive: bool
    gpu_models: frozenset[str]
    vendors: frozenset[str]

    @classmethod
    def of(cls, ask: Ask) -> "AskKind":
        return cls(ask.need, ask.cpus, ask.gpu_share, ask.exclusive, ask.gpu_models, ask.engine.vendors)

    def on(self, make: Make) -> tuple[int, float] | None:
        """(GPUs of this make, share of each) that it takes; None if it cannot have them."""
        if make.vendor not in self.vendors or (self.gpu_models and make.model not in self.gpu_models):
            return None
        for gpus in self.need.tensor_parallel_sizes:
            each = self.need.gpu_bytes(gpus)
            if each <= make.memory_bytes:
                share = each / make.memory_bytes if each else 0.0
                return gpus, 1.0 if self.exclusive else max(share, self.gpu_share or 0.0)
        return None


class Workload:
    """Kinds of asks with their weights, which add up to 1. Asks without GPUs are left out."""

    def __init__(self, asks: Iterable[Ask] = ()) -> None:
        counts = Counter(AskKind.of(ask) for ask in asks if max(ask.need.tensor_parallel_sizes, default=0) > 0)
        common = counts.most_common(MAX_KINDS)
        total = sum(count for _, count in common)
        self.kinds = tuple(kind for kind, _ in common)
        self.weights = tuple(count / total for _, count in common)


class Uses:
    """What the kinds of a workload can use of a GPU, by its make and the hundredths of it that are free."""

    def __init__(self, workload: Workload, makes: Sequence[Make]) -> None:
        self.kinds = wide = len(workload.kinds)
        self.weights = np.array(workload.weights, dtype=np.float64)
        self.cpus = np.array([kind.cpus - SLACK for kind in workload.kinds], dtype=np.float64)
        self.memory = np.array([kind.need.host_bytes for kind in workload.kinds], dtype=np.float64)
        self.gpus = np.full((len(makes), wide), np.inf)
        """By make and kind: the number of GPUs."""
        self.per_cpu = np.full((len(makes), wide), UNLIMITED)
        """By make and kind: GPUs used per CPU, and per byte of the machine's memory."""
        self.per_byte = np.full((len(makes), wide), UNLIMITED)
        self.table = np.zeros((len(makes), PARTS + 1, 2 * wide + 2))
        """By make and hundredths: the part that each kind can use, whether there is room for each kind, the free part,
        and the part that no mixture of kinds can use."""
        self.table[:, :, -2] = np.arange(PARTS + 1) / PARTS
        for row, make in enumerate(makes):
            self._fill(row, make, workload)

    def _fill(self, row: int, make: Make, workload: Workload) -> None:
        table, wide, free = self.table[row], self.kinds, np.arange(PARTS + 1)
        demand: dict[int, float] = {}
        for column, kind in enumerate(workload.kinds):
            taken = kind.on(make)
            if taken is None:
                continue
            gpus, share = taken
            part = min(max(math.ceil(share * PARTS - SLACK), 1), PARTS)
            demand[part] = demand.get(part, 0.0) + gpus * workload.weights[column]
            table[:, wide + column] = free >= part
            self.gpus[row, column] = gpus
            if kind.cpus > 0:
                self.per_cpu[row, column] = gpus * share / kind.cpus
            if kind.need.host_bytes > 0:
                self.per_byte[row, column] = gpus * share / kind.need.host_bytes
        table[:, :wide] = table[:, wide:-2] * table[:, -2:-1]
        table[:, -1] = table[:, -2] - hole_values(demand)

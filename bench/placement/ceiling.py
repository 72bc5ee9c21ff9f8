"""A true bound on how much of a fleet's GPUs can be allocated: a linear program over ways to fill one GPU of each type.

A configuration is a set of asks that one GPU can hold: whole asks for part of a GPU, or one of the GPUs of an ask for
several whole ones. Relaxed are: numbers need not be whole, the GPUs of an ask may be on different workers of a type,
and CPUs and memory are shared by all workers of a type instead of being on one. Every relaxation only raises the bound:
no placement, online or not, allocates more than this. New configurations are priced by a knapsack until none pays, so
that the program is solved over all configurations without listing them.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from bench.placement.methods import gpus_of
from pointsman.placement.asks import Ask
from pointsman.types import Worker

PARTS = 100
"""Shares are counted in hundredths of a GPU; a finer share is rounded down, which keeps the bound a bound."""
ROUNDING = 1e-9


class Kind(NamedTuple):
    part: int
    """Hundredths of a GPU, on each of its GPUs."""
    gpus: int
    cpus: float
    memory: float
    models: frozenset[str]


class GpuType(NamedTuple):
    """Workers with GPUs of one model, taken together."""

    model: str
    gpus: int
    cpus: float
    memory: float


def ceiling(workers: Sequence[Worker], asks: Sequence[Ask]) -> float:
    """The largest share of the fleet's GPUs that these asks can allocate, each at most once."""
    counts = Counter(
        Kind(
            int((ask.gpu_share or 0.0) * PARTS + ROUNDING), gpus_of(ask), ask.cpus, ask.need.host_bytes, ask.gpu_models
        )
        for ask in asks
        if gpus_of(ask)
    )
    kinds, types = list(counts), _types(workers)
    demand = np.array([counts[kind] for kind in kinds], dtype=np.float64)
    return _Program(kinds, demand, types).solved() / sum(one.gpus for one in types)


def _types(workers: Sequence[Worker]) -> list[GpuType]:
    found: dict[str, list[Worker]] = {}
    for worker in workers:
        if worker.gpus:
            found.setdefault(worker.gpus[0].model, []).append(worker)
    return [
        GpuType(
            model,
            sum(len(one.gpus) for one in mine),
            sum(one.cpus for one in mine),
            float(sum(one.memory_bytes for one in mine)),
        )
        for model, mine in found.items()
    ]


class _Program:
    """Maximise the allocation; rows are the demand of each kind, then GPUs, CPUs and memory of each type."""

    def __init__(self, kinds: list[Kind], demand: NDArray[np.float64], types: list[GpuType]) -> None:
        self._kinds, self._demand, self._types = kinds, demand, types
        self._columns: list[tuple[int, dict[int, int]]] = []
        """(type, how often each kind is on one GPU of it)"""
        for at, one in enumerate(types):
            for number, kind in enumerate(kinds):
                if self._suits(kind, one):
                    self._columns.append((at, {number: PARTS // kind.part}))

    @staticmethod
    def _suits(kind: Kind, one: GpuType) -> bool:
        return kind.part > 0 and (not kind.models or one.model in kind.models)

    def solved(self) -> float:
        while True:
            value, prices = self._solve()
            found = [way for at in range(len(self._types)) if (way := self._better(at, prices)) is not None]
            if not found:
                return value
            self._columns += found

    def _solve(self) -> tuple[float, NDArray[np.float64]]:
        wide, deep = len(self._kinds), len(self._types)
        rows, columns, values, worth = list[int](), list[int](), list[float](), list[float]()
        for number, (at, held) in enumerate(self._columns):
            cells = {wide + at: 1.0, wide + deep + at: 0.0, wide + 2 * deep + at: 0.0}
            for kind, times in held.items():
                share = times / self._kinds[kind].gpus
                cells[kind] = share
                cells[wide + deep + at] += share * self._kinds[kind].cpus
                cells[wide + 2 * deep + at] += share * self._kinds[kind].memory / 2**30
            rows += list(cells)
            columns += [number] * len(cells)
            values += list(cells.values())
            worth.append(sum(times * self._kinds[kind].part for kind, times in held.items()) / PARTS)
        limits = [*self._demand, *(one.gpus for one in self._types), *(one.cpus for one in self._types)]
        limits += [one.memory / 2**30 for one in self._types]
        matrix = csr_matrix((values, (rows, columns)), shape=(len(limits), len(self._columns)))
        found = linprog(-np.array(worth), A_ub=matrix, b_ub=np.array(limits), method="highs")
        if found.status != 0:
            raise RuntimeError(f"the linear program was not solved: {found.message}")
        return -float(found.fun), -np.asarray(found.ineqlin.marginals, dtype=np.float64)

    def _better(self, at: int, prices: NDArray[np.float64]) -> tuple[int, dict[int, int]] | None:
        """The configuration of one GPU of a type that pays best, if it pays: a knapsack of hundredths."""
        wide, deep = len(self._kinds), len(self._types)
        gains = {
            number: kind.part / PARTS
            - (
                prices[number]
                + kind.cpus * prices[wide + deep + at]
                + kind.memory / 2**30 * prices[wide + 2 * deep + at]
            )
            / kind.gpus
            for number, kind in enumerate(self._kinds)
            if self._suits(kind, self._types[at])
        }
        best, chosen = np.zeros(PARTS + 1), np.full(PARTS + 1, -1, dtype=int)
        useful = dict[int, int]()
        for number, gain in gains.items():  # of kinds of one size, only the best can pay
            part = self._kinds[number].part
            if gain > ROUNDING and (part not in useful or gain > gains[useful[part]]):
                useful[part] = number
        for room in range(1, PARTS + 1):
            best[room] = best[room - 1]
            for part, number in useful.items():
                if part <= room and best[room - part] + gains[number] > best[room] + ROUNDING:
                    best[room], chosen[room] = best[room - part] + gains[number], number
        if best[PARTS] <= prices[wide + at] + 1e-7:
            return None
        held, room = Counter[int](), PARTS
        while room > 0:
            if chosen[room] < 0:
                room -= 1
            else:
                held[int(chosen[room])] += 1
                room -= self._kinds[chosen[room]].part
        return at, dict(held)

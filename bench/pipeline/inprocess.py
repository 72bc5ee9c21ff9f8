"""Measurements without a server: the graph in this process compared to plain calls, and copies of an array."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from bench.measure import cpu_us
from bench.pipeline.request_client import COUNT
from bench.pipeline.results import Copying, InProcess

TIMES = 5_000
COPIES = 20


class Model:
    """The calls of the diamond, without a graph."""

    def __init__(self, val: int) -> None:
        self.val = val

    def forward(self, value: int) -> int:
        return self.val * value


def ensemble(a: int, b: int, c: int) -> int:
    return a + b + c


def in_process() -> InProcess:
    """Both ways, after checking their results; RuntimeError if the graph cannot be run."""
    try:
        from bench.pipeline.apps.diamond import dag
    except (ImportError, AttributeError, TypeError) as error:
        raise RuntimeError(f"the graph cannot be made: {error}") from error
    m1, m2 = Model(1), Model(2)

    def execute() -> int:
        total: int = dag.execute(1, 2, 3)
        return total

    def plain() -> int:
        return ensemble(m1.forward(1), m2.forward(2), 3)

    for way in (execute, plain):
        if way() != 8:
            raise RuntimeError(f"1*1 + 2*2 + 3 is {way()!r} ({way.__name__})")
    return InProcess(_each_us(execute), _each_us(plain))


def copying() -> Copying:
    """The array that replicas exchange, copied into allocated memory, and into new memory."""
    array = np.full(COUNT, 1.5)
    again = [_timed(array.copy)[0] for _ in range(COPIES)]
    kept = [_timed(array.copy) for _ in range(COPIES)]
    return Copying(median(again), median(ms for ms, _ in kept))


def _each_us(call: Callable[[], object]) -> float:
    def many() -> None:
        for _ in range(TIMES):
            call()

    return cpu_us(many, TIMES)


def _timed(call: Callable[[], object]) -> tuple[float, object]:
    """(milliseconds, result)"""
    begun = time.perf_counter()
    made = call()
    return (time.perf_counter() - begun) * 1e3, made

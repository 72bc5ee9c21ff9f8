"""Recorded load: requests per second in bins of equal length."""

import csv
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from pointsman.scaling.view import Rate


class Series:
    """Rates in bins of equal length. Within a bin the rate is constant: nothing finer was recorded."""

    def __init__(self, name: str, bin_s: float, rates: Sequence[float]) -> None:
        if not rates or bin_s <= 0:
            raise ValueError(f"{name}: a series has bins of more than 0 s, and at least one")
        self.name, self.bin_s, self.rates = name, bin_s, tuple(float(rate) for rate in rates)
        self._before = [0.0, *accumulate(rate * bin_s for rate in self.rates)]
        """Requests before each bin."""

    @property
    def seconds(self) -> float:
        return self.bin_s * len(self.rates)

    @property
    def requests(self) -> float:
        return self._before[-1]

    def rate(self, at: float) -> float:
        """At a moment, counted from the beginning."""
        return self.rates[min(max(int(at / self.bin_s + 1e-9), 0), len(self.rates) - 1)]

    def mean(self, start: float, end: float) -> float:
        """Requests per second between two moments; before the beginning there was nothing to measure."""
        start, end = max(start, 0.0), min(end, self.seconds)
        return (self._until(end) - self._until(start)) / (end - start) if end > start else self.rate(start)

    def needed(self, capacity: float) -> list[int]:
        """The fewest replicas that serve each bin."""
        return [math.ceil(rate / capacity - 1e-9) for rate in self.rates]

    def bins_before(self, at: float) -> int:
        """How many are over by then."""
        return min(int(at / self.bin_s + 1e-9), len(self.rates))

    def history(self, began: float) -> tuple[Rate, ...]:
        """All bins, on a clock on which the first began then."""
        return tuple(Rate(began + place * self.bin_s, rate) for place, rate in enumerate(self.rates))

    def _until(self, at: float) -> float:
        place = min(int(at / self.bin_s), len(self.rates) - 1)
        return self._before[place] + self.rates[place] * (at - place * self.bin_s)


def rates_of(lines: Iterable[str]) -> list[Series]:
    """Of a CSV with the columns model, t_s and rps; what is missing between two rows counts as nothing."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in csv.DictReader(lines):
        found.setdefault(row["model"], []).append((float(row["t_s"]), float(row["rps"])))
    series = []
    for name, rows in found.items():
        rows.sort()
        times = [at for at, _ in rows]
        bin_s = min((after - before for before, after in pairwise(times)), default=600.0)
        rates = [0.0] * (round((times[-1] - times[0]) / bin_s) + 1)
        for at, rate in rows:
            rates[round((at - times[0]) / bin_s)] = rate
        series.append(Series(name, bin_s, rates))
    return series


def arrivals_of(name: str, lines: Iterable[str], bin_s: float) -> Series:
    """Of a recording: JSON lines with a `timestamp` in milliseconds. A last bin that is cut short is left out."""
    times = sorted(json.loads(line)["timestamp"] / 1000 for line in lines if line.strip())
    edges = [times[0] + bin_s * place for place in range(int((times[-1] - times[0]) / bin_s) + 1)]
    before = [bisect_left(times, edge) for edge in edges]
    return Series(name, bin_s, [(after - first) / bin_s for first, after in pairwise(before)])

"""Recorded load: requests per second in bins of equal length."""

import math
from collections.abc import Sequence
from itertools import accumulate

from pointsman.scaling.view import Rate


class Series:
    """Rates in bins of equal length. Within a bin the rate is constant: nothing finer was recorded."""

    def __init__(self, name: str, bin_s: float, rates: Sequence[float], began: float = 0.0) -> None:
        if not rates or bin_s <= 0:
            raise ValueError(f"{name}: a series has bins of more than 0 s, and at least one")
        self.name, self.bin_s, self.rates = name, bin_s, tuple(float(rate) for rate in rates)
        self.began = began
        """The first bin, in seconds since the epoch; 0: nobody said."""
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

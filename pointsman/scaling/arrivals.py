"""How many came: over the last seconds, minutes and hour, and in bins as far back as a season is long."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pointsman.scaling.view import Rate

FINE_S = 5.0
"""What came lately is counted in bins of so many seconds; of the oldest one, the share that is in the window."""
DAY_S = 86400.0


class Recent:
    """How many there were per second, lately."""

    def __init__(self, keep_s: float = 3600.0) -> None:
        self.keep_s = keep_s
        self._bins: deque[tuple[int, float]] = deque()
        """(number of the bin, how many), the oldest first; bins without any are left out."""
        self.began: float | None = None

    def count(self, now: float, n: float = 1.0) -> None:
        """So many now."""
        if self.began is None:
            self.began = now
        if not n:
            return
        number = math.floor(now / FINE_S)
        if self._bins and self._bins[-1][0] >= number:
            last, before = self._bins.pop()
            self._bins.append((last, before + n))
        else:
            self._bins.append((number, n))
        while (self._bins[0][0] + 1) * FINE_S <= now - self.keep_s:
            self._bins.popleft()

    def per_second(self, seconds: float, now: float) -> float:
        """Over the last so many seconds, or since counting began if that is less."""
        return self.past(now)(seconds)

    def past(self, now: float) -> Callable[[float], float]:
        """Says how many there were per second in the last so many seconds before now, whatever comes afterwards."""
        bins, began = tuple(self._bins), self.began

        def per_second(seconds: float) -> float:
            if began is None:
                return 0.0
            start = now - seconds
            total = 0.0
            for number, n in reversed(bins):
                begin, end = number * FINE_S, (number + 1) * FINE_S
                if end <= start:
                    break
                total += n * min(1.0, (end - start) / FINE_S) if begin < start else n
            return total / min(seconds, max(now - began, FINE_S))

        return per_second


class Kept(msgspec.Struct):
    """What is saved of arrivals."""

    bin_s: float
    bins: list[tuple[int, float]]
    """(number of the bin, how many), the oldest first; bins without any are left out."""
    first: int | None = None
    """The first bin that was seen from its beginning."""


class Arrivals:
    """Counts requests as they come; tells rates of late, and the history."""

    def __init__(
        self, bin_s: float = 600.0, keep_s: float = 14 * DAY_S, saved: Mapping[str, Any] | None = None
    ) -> None:
        self.bin_s, self.keep_s = bin_s, keep_s
        self._recent = Recent()
        kept = _read(saved)
        # Bins of another length say nothing about these.
        self._kept = kept if kept is not None and kept.bin_s == bin_s else Kept(bin_s, [])
        self._told: tuple[int, tuple[Rate, ...]] | None = None

    def count(self, now: float, n: float = 1.0) -> None:
        """So many came; none: somebody looked, and nobody had come."""
        self._recent.count(now, n)
        kept, number = self._kept, math.floor(now / self.bin_s)
        if kept.first is None:
            kept.first = math.ceil(now / self.bin_s)
        if not n:
            return
        if kept.bins and kept.bins[-1][0] >= number:
            kept.bins[-1] = (kept.bins[-1][0], kept.bins[-1][1] + n)
            return
        kept.bins.append((number, n))
        oldest = number - math.ceil(self.keep_s / self.bin_s)
        if kept.bins[0][0] < oldest:
            kept.bins = [part for part in kept.bins if part[0] >= oldest]

    def per_second(self, seconds: float, now: float) -> float:
        """Over the last so many seconds."""
        return self._recent.per_second(seconds, now)

    def past(self, now: float) -> Callable[[float], float]:
        """As that of `Recent`."""
        return self._recent.past(now)

    def history(self, now: float) -> tuple[Rate, ...]:
        """Every bin that is over, the oldest first; one in which nobody came is a bin of zero."""
        current = math.floor(now / self.bin_s)
        if self._told is None or self._told[0] != current:  # made once per bin, and asked for every second
            self._told = (current, self._history(current))
        return self._told[1]

    def _history(self, current: int) -> tuple[Rate, ...]:
        if self._kept.first is None:
            return ()
        first = max(self._kept.first, current - math.ceil(self.keep_s / self.bin_s))
        counted = dict(self._kept.bins)
        return tuple(
            Rate(number * self.bin_s, counted.get(number, 0.0) / self.bin_s) for number in range(first, current)
        )

    def saved(self) -> dict[str, Any]:
        """Plain data, to go on from after a restart."""
        plain: dict[str, Any] = msgspec.to_builtins(self._kept)
        return plain


def _read(saved: Mapping[str, Any] | None) -> Kept | None:
    """What was saved, if it was saved by something like this."""
    try:
        return None if saved is None else msgspec.convert(saved, Kept)
    except msgspec.ValidationError:
        return None

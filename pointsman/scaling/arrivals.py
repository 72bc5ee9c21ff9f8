"""Arrival rates: over recent windows, and as a history in bins over days."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pointsman.scaling.view import Rate

FINE_S = 5.0
"""Length of the bins for recent arrivals. Of the oldest bin, the share within the window counts."""
DAY_S = 86400.0
BRIDGE_S = 3600.0
"""After a pause, the rate of this long before it stands for the pause."""


class Recent:
    """Arrivals per second over recent windows."""

    def __init__(self, keep_s: float = 3600.0) -> None:
        self.keep_s = keep_s
        self._bins: deque[tuple[int, float]] = deque()
        """(number of the bin, arrivals), oldest first; empty bins are left out."""
        self.began: float | None = None
        self._counted_at: float | None = None

    def count(self, now: float, n: float = 1.0) -> None:
        """Count arrivals since the last call."""
        if self.began is None or self._counted_at is None:
            self.began = self._counted_at = now
        since, self._counted_at = min(self._counted_at, now), max(self._counted_at, now)
        if not n:
            return
        for number in range(math.floor(since / FINE_S), math.floor(now / FINE_S) + 1):
            seconds = min((number + 1) * FINE_S, now) - max(number * FINE_S, since)
            self._add(number, n * seconds / (now - since) if now > since else n)
        while (self._bins[0][0] + 1) * FINE_S <= now - self.keep_s:
            self._bins.popleft()

    def _add(self, number: int, n: float) -> None:
        if self._bins and self._bins[-1][0] >= number:
            last, before = self._bins.pop()
            self._bins.append((last, before + n))
        elif n:
            self._bins.append((number, n))

    def per_second(self, seconds: float, now: float) -> float:
        """Over this long, or since counting began if that is less."""
        return self.past(now)(seconds)

    def past(self, now: float) -> Callable[[float], float]:
        """A function from the length of a window to its rate. It does not change when more is counted."""
        bins, began = tuple(self._bins), self.began

        def per_second(seconds: float) -> float:
            if began is None:
                return 0.0
            start = now - seconds
            total = 0.0
            for number, n in reversed(bins):
                # Counting may have begun within the first bin, and the last one is not over yet.
                begin, end = max(number * FINE_S, began), min((number + 1) * FINE_S, now)
                if begin >= start:
                    total += n
                elif end > start:
                    total += n * (end - start) / (end - begin)
                else:
                    break
            return total / min(seconds, max(now - began, FINE_S))

        return per_second


class Kept(msgspec.Struct):
    """The history, as it is saved."""

    bin_s: float
    bins: list[tuple[int, float]]
    """(number of the bin, arrivals), oldest first; empty bins are left out."""
    first: int | None = None
    """The first bin that was counted from its start."""
    until: float | None = None
    """When arrivals were last counted."""


class Arrivals:
    """Counts requests as they arrive."""

    def __init__(
        self, bin_s: float = 600.0, keep_s: float = 14 * DAY_S, saved: Mapping[str, Any] | None = None
    ) -> None:
        self.bin_s, self.keep_s = bin_s, keep_s
        self._recent = Recent()
        kept = _read(saved)
        # Bins of another length cannot be converted.
        self._kept = kept if kept is not None and kept.bin_s == bin_s else Kept(bin_s, [])
        self._cached: tuple[int, tuple[Rate, ...]] | None = None
        self._resumes = kept is not None

    def count(self, now: float, n: float = 1.0) -> None:
        """Count arrivals; 0 says that none came until now."""
        self._recent.count(now, n)
        kept = self._kept
        if kept.first is None:
            kept.first = math.ceil(now / self.bin_s)
        if self._resumes:
            self._resumes = False
            self._bridge(now)
        kept.until = now
        if n:
            self._add(math.floor(now / self.bin_s), n)

    def _add(self, number: int, n: float) -> None:
        kept = self._kept
        if kept.bins and kept.bins[-1][0] >= number:
            kept.bins[-1] = (kept.bins[-1][0], kept.bins[-1][1] + n)
            return
        kept.bins.append((number, n))
        oldest = number - math.ceil(self.keep_s / self.bin_s)
        if kept.bins[0][0] < oldest:
            kept.bins = [part for part in kept.bins if part[0] >= oldest]

    def _bridge(self, now: float) -> None:
        """Fill a pause of more than a bin, in which the plane did not run, with the rate before it."""
        kept, bin_s = self._kept, self.bin_s
        until, seen_from = kept.until, kept.first
        if until is None or seen_from is None or now - until <= bin_s:
            return
        first = max(math.floor((until - BRIDGE_S) / bin_s), seen_from)
        if until <= first * bin_s:
            return
        rate = sum(n for number, n in kept.bins if number >= first) / (until - first * bin_s)
        for number in range(math.floor(max(until, now - self.keep_s) / bin_s), math.floor(now / bin_s) + 1):
            seconds = min((number + 1) * bin_s, now) - max(number * bin_s, until)
            if rate and seconds > 0:
                self._add(number, rate * seconds)

    def per_second(self, seconds: float, now: float) -> float:
        """Over this long."""
        return self._recent.per_second(seconds, now)

    def past(self, now: float) -> Callable[[float], float]:
        """See `Recent.past`."""
        return self._recent.past(now)

    def history(self, now: float) -> tuple[Rate, ...]:
        """Every completed bin, oldest first, including empty ones."""
        current = math.floor(now / self.bin_s)
        if self._cached is None or self._cached[0] != current:  # read every second, changed once per bin
            self._cached = (current, self._history(current))
        return self._cached[1]

    def _history(self, current: int) -> tuple[Rate, ...]:
        if self._kept.first is None:
            return ()
        first = max(self._kept.first, current - math.ceil(self.keep_s / self.bin_s))
        counted = dict(self._kept.bins)
        return tuple(
            Rate(number * self.bin_s, counted.get(number, 0.0) / self.bin_s) for number in range(first, current)
        )

    def saved(self) -> dict[str, Any]:
        """Plain data, to continue from after a restart."""
        plain: dict[str, Any] = msgspec.to_builtins(self._kept)
        return plain


def _read(saved: Mapping[str, Any] | None) -> Kept | None:
    """None if it was saved by another version."""
    try:
        return msgspec.convert(saved, Kept)
    except msgspec.ValidationError:
        return None

"""Statistics over time windows in bounded memory: gauges hold until the next sample, events happen once."""

import math
import operator
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import TypeVar

import msgspec

from pointsman.scaling.policy import Window

T = TypeVar("T")
N = TypeVar("N", int, float)

COARSER_BY_AGE = 50.0
"""A bin may span at most this fraction (1/50) of its age: old samples are merged."""
SLICES = 30
"""Number of slices in which the events of a window are kept; the oldest slice is dropped as a whole."""
PRECISION = 0.01
"""Relative error of the percentiles of events. Means and maxima are exact."""


class Bin(msgspec.Struct, frozen=True):
    """A gauge over a span of time."""

    start: float
    end: float
    area: float
    """Value times seconds."""
    most: float
    count: int


class Gauge:
    """A quantity that holds until it is sampled again, such as requests in flight. Its mean is weighted by time."""

    def __init__(self, keep_s: float = 3600.0) -> None:
        self.keep_s = keep_s
        self._bins: deque[Bin] = deque()
        self._value: float | None = None
        self._since = 0.0
        self._times = 0
        """How often the value was sampled since that time."""
        self._crowded = 128

    def add(self, now: float, value: float | None) -> None:
        """Set the value from now on; None if unknown."""
        if value is not None and not math.isfinite(value):
            value = None
        if value is not None and value == self._value:
            self._times += 1
            return
        if self._value is not None and now > self._since:
            self._bins.append(self._open(now))
            if len(self._bins) > self._crowded:
                self._merge(now)
        if self._value is None or now > self._since:
            self._since = now
        self._value, self._times = value, 1

    def window(self, seconds: float, now: float) -> Window:
        return self.past(now).window(seconds)

    def past(self, now: float) -> "Past":
        """A snapshot from which windows can be computed later. Taking it is cheap."""
        bins = [self._open(now)] if self._value is not None and now > self._since else []
        bins.extend(reversed(self._bins))
        return Past(now, self._value, bins)

    def _open(self, now: float) -> Bin:
        """The span of the current value, until now."""
        assert self._value is not None
        return Bin(self._since, now, self._value * (now - self._since), self._value, self._times)

    def _merge(self, now: float) -> None:
        merged: deque[Bin] = deque()
        for seen in self._bins:
            last = merged[-1] if merged else None
            if seen.end <= now - self.keep_s:
                continue
            if last and last.end == seen.start and seen.end - last.start <= (now - seen.end) / COARSER_BY_AGE:
                most = max(last.most, seen.most)
                merged[-1] = Bin(last.start, seen.end, last.area + seen.area, most, last.count + seen.count)
            else:
                merged.append(seen)
        self._bins = merged
        self._crowded = max(128, 2 * len(merged))  # amortizes the cost of merging


class Past:
    """A gauge up to one moment: an immutable snapshot."""

    def __init__(self, now: float, value: float | None, bins: Sequence[Bin]) -> None:
        self._now, self._value, self._bins = now, value, bins
        """Newest first."""

    def window(self, seconds: float) -> Window:
        start = self._now - seconds
        bins = list(takewhile(lambda seen: seen.end > start, self._bins))
        if not bins:
            value = self._value
            return Window(seconds) if value is None else Window(seconds, value, value, value, value, value, value, 1)
        weights = [seen.end - seen.start for seen in bins]
        oldest = bins[-1]
        if oldest.start < start:
            weights[-1] = oldest.end - start
        means = [seen.area / (seen.end - seen.start) for seen in bins]
        p50, p90, p99 = _percentiles(means, weights)
        mean = sum(map(operator.mul, means, weights)) / sum(weights)
        most = max(seen.most for seen in bins)
        count = sum(seen.count for seen in bins[:-1])
        count += math.ceil(oldest.count * weights[-1] / (oldest.end - oldest.start))
        return Window(seconds, mean=mean, max=most, p50=p50, p90=p90, p99=p99, last=self._value, count=count)


class Slice(msgspec.Struct):
    """Events in a span of time, by size class."""

    number: int
    sizes: dict[int, int] = {}
    count: int = 0
    total: float = 0.0
    most: float = -math.inf


class Events:
    """Values that occur once, such as latencies: each counts the same."""

    def __init__(self, keep_s: float = 300.0) -> None:
        self.keep_s = keep_s
        self._slices: deque[Slice] = deque()
        self._last: float | None = None
        self._over: tuple[tuple[int, ...], Counter[int]] = ((), Counter())
        """Cached sum of the completed slices, and their numbers."""

    def add(self, now: float, value: float) -> None:
        if not math.isfinite(value):
            return
        number = math.floor(now / self._slice_s)
        if not self._slices or number > self._slices[-1].number:
            self._slices.append(Slice(number))
            while self._slices[0].number <= number - SLICES - 1:
                self._slices.popleft()
        part, size = self._slices[-1], _size(value)
        part.sizes[size] = part.sizes.get(size, 0) + 1
        part.count += 1
        part.total += value
        part.most = max(part.most, value)
        self._last = value

    def window(self, seconds: float, now: float) -> Window:
        """Statistics over the last `seconds`, to the nearest slice."""
        oldest = math.ceil((now - seconds) / self._slice_s)
        parts = [part for part in self._slices if part.number >= oldest]
        count = sum(part.count for part in parts)
        if not count:
            return Window(seconds)
        sizes = self._sizes(parts[:-1]).copy()
        sizes.update(parts[-1].sizes)
        most = max(part.most for part in parts)
        p50, p90, p99 = (min(_value(size), most) for size in _percentiles(sizes, sizes.values()))
        mean = sum(part.total for part in parts) / count
        return Window(seconds, mean=mean, max=most, p50=p50, p90=p90, p99=p99, last=self._last, count=count)

    def _sizes(self, parts: Sequence[Slice]) -> Counter[int]:
        which = tuple(part.number for part in parts)
        if which != self._over[0]:
            self._over = (which, Counter())
            for part in parts:
                self._over[1].update(part.sizes)
        return self._over[1]

    @property
    def _slice_s(self) -> float:
        return self.keep_s / SLICES


class LazyWindows(Mapping[float, T]):
    """A value for each length of window, computed on first access because most policies read few of them."""

    def __init__(self, lengths: Collection[float], make: Callable[[float], T]) -> None:
        """`make` must be pure, because a policy may cause a call on another thread."""
        self._lengths, self._make = lengths, make
        self._made: dict[float, T] = {}

    def __getitem__(self, seconds: float) -> T:
        if seconds not in self._lengths:
            raise KeyError(seconds)
        if seconds not in self._made:
            self._made[seconds] = self._make(seconds)
        return self._made[seconds]

    def __iter__(self) -> Iterator[float]:
        return iter(self._lengths)

    def __len__(self) -> int:
        return len(self._lengths)


def looking_back(windows: Mapping[float, Window], seconds: float) -> Window | None:
    """The longest window of at most `seconds`; None if there is no such window."""
    fitting = [length for length in windows if length <= seconds]
    return windows[max(fitting)] if fitting else None


_STEP = math.log1p(2 * PRECISION)
_SMALLEST = 1e-9


def _size(value: float) -> int:
    """Size class: logarithmic, so that the error is relative; ordered, including negative values."""
    if abs(value) < _SMALLEST:
        return 0
    return int(math.copysign(1 + math.floor(math.log(abs(value) / _SMALLEST) / _STEP), value))


def _value(size: int) -> float:
    """The value in the middle of a size class."""
    return math.copysign(_SMALLEST * math.exp((abs(size) - 0.5) * _STEP), size) if size else 0.0


def _percentiles(values: Iterable[N], weights: Iterable[float]) -> tuple[N, N, N]:
    """p50, p90 and p99, by weight."""
    ordered = sorted(zip(values, weights, strict=True))
    sums = list(accumulate(weight for _, weight in ordered))
    enough = (1 - 1e-12) * sums[-1]
    p50, p90, p99 = (ordered[bisect_left(sums, share * enough)][0] for share in (0.5, 0.9, 0.99))
    return p50, p90, p99

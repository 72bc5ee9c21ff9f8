"""Measurements over the last while, in bounded memory: gauges hold until the next one, events happen once."""

import math
import operator
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import TypeVar

import msgspec

from pointsman.scaling.view import Window

T = TypeVar("T")
N = TypeVar("N", int, float)

COARSER_BY_AGE = 50.0
"""A bin may be as wide as the 50th part of its age: old samples are merged, young ones are not."""
SLICES = 30
"""Events of one window are kept in so many slices; the oldest leaves as a whole."""
PRECISION = 0.01
"""Of percentiles of events, relative; means and maxima are exact."""


class Bin(msgspec.Struct, frozen=True):
    """A while in which a gauge was seen."""

    start: float
    end: float
    area: float
    """Value times seconds."""
    most: float
    count: int


class Gauge:
    """A quantity that holds until it is measured again, such as requests here: its mean is weighted by time."""

    def __init__(self, keep_s: float = 3600.0) -> None:
        self.keep_s = keep_s
        self._bins: deque[Bin] = deque()
        self._value: float | None = None
        self._since = 0.0
        self._times = 0
        """It was measured since then, and always was the same."""
        self._crowded = 128

    def add(self, now: float, value: float | None) -> None:
        """It is this from now on; None: nobody knows."""
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
        """What it was in the last so many seconds."""
        return self.past(now).window(seconds)

    def past(self, now: float) -> "Past":
        """All that is kept of it, as it is now; cheap."""
        bins = [self._open(now)] if self._value is not None and now > self._since else []
        bins.extend(reversed(self._bins))
        return Past(now, self._value, bins)

    def _open(self, now: float) -> Bin:
        """Since the value is what it is, until now."""
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
        self._crowded = max(128, 2 * len(merged))  # so that merging costs little per measurement


class Past:
    """What a gauge was until some moment. It does not change, whatever is measured afterwards."""

    def __init__(self, now: float, value: float | None, bins: Sequence[Bin]) -> None:
        self._now, self._value, self._bins = now, value, bins
        """The youngest first."""

    def window(self, seconds: float) -> Window:
        """What it was in the last so many seconds."""
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
        known_s = sum(weights)
        return Window(
            seconds,
            mean=sum(map(operator.mul, means, weights)) / known_s,
            max=max(seen.most for seen in bins),
            p50=p50,
            p90=p90,
            p99=p99,
            last=self._value,
            count=sum(seen.count for seen in bins[:-1])
            + math.ceil(oldest.count * weights[-1] / (oldest.end - oldest.start)),
        )


class Slice(msgspec.Struct):
    """Events of a while, by size."""

    number: int
    sizes: dict[int, int] = {}
    count: int = 0
    total: float = 0.0
    most: float = -math.inf


class Events:
    """Things that happen once, such as answers with their latency: every one counts the same."""

    def __init__(self, keep_s: float = 300.0) -> None:
        self.keep_s = keep_s
        self._slices: deque[Slice] = deque()
        self._last: float | None = None
        self._over: tuple[tuple[int, ...], Counter[int]] = ((), Counter())
        """The sizes of slices that are over, all together, and which these are: asked for every second, made rarely."""

    def add(self, now: float, value: float) -> None:
        """One happened."""
        if not math.isfinite(value):
            return
        number = math.floor(now / self._slice_s)
        if not self._slices or number > self._slices[-1].number:
            self._slices.append(Slice(number))
            while self._slices[0].number <= number - SLICES - 1:
                self._slices.popleft()
        part = self._slices[-1]
        size = _size(value)
        part.sizes[size] = part.sizes.get(size, 0) + 1
        part.count += 1
        part.total += value
        part.most = max(part.most, value)
        self._last = value

    def window(self, seconds: float, now: float) -> Window:
        """What happened in the last so many seconds, to the nearest slice."""
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
        """Of slices that are over."""
        which = tuple(part.number for part in parts)
        if which != self._over[0]:
            self._over = (which, Counter())
            for part in parts:
                self._over[1].update(part.sizes)
        return self._over[1]

    @property
    def _slice_s(self) -> float:
        return self.keep_s / SLICES


class WhenAsked(Mapping[float, T]):
    """Something for each of some lengths of time, made when somebody looks at it: most policies look at few."""

    def __init__(self, lengths: Collection[float], make: Callable[[float], T]) -> None:
        """`make`: gives the same whenever it is called, also on another thread."""
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
    """The longest window that does not look further back than this; None: there is none."""
    fitting = [length for length in windows if length <= seconds]
    return windows[max(fitting)] if fitting else None


_STEP = math.log1p(2 * PRECISION)
_SMALLEST = 1e-9


def _size(value: float) -> int:
    """Which size class it is in: logarithmic, so that the error is relative, and in order, also below zero."""
    if abs(value) < _SMALLEST:
        return 0
    return int(math.copysign(1 + math.floor(math.log(abs(value) / _SMALLEST) / _STEP), value))


def _value(size: int) -> float:
    """The middle of a size class."""
    return math.copysign(_SMALLEST * math.exp((abs(size) - 0.5) * _STEP), size) if size else 0.0


def _percentiles(values: Iterable[N], weights: Iterable[float]) -> tuple[N, N, N]:
    """The values below which half, nine tenths and 99 hundredths of the weight are."""
    ordered = sorted(zip(values, weights, strict=True))
    sums = list(accumulate(weight for _, weight in ordered))
    enough = (1 - 1e-12) * sums[-1]
    p50, p90, p99 = (ordered[bisect_left(sums, share * enough)][0] for share in (0.5, 0.9, 0.99))
    return p50, p90, p99

"""Measurements of one deployment over time, from which the view of its policy is made."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec

from pointsman.scaling.policy import DeploymentView, Rate, restored
from pointsman.scaling.windows import Events, Gauge, LazyWindows

# Arrival rates: over recent windows, and as a history in bins


FINE_S = 5.0
"""Length of the bins for recent arrivals. The oldest bin counts in proportion to its share within the window."""
RECENT_BIN_S = 30.0
"""Length of the bins in which a young history is replayed."""
DAY_S = 86400.0
BRIDGE_S = 3600.0
"""A pause is filled with the mean rate over this time before the pause."""


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
        """The rate over the last `seconds`, or since counting began if that is less."""
        return self.past(now)(seconds)

    def past(self, now: float) -> Callable[[float], float]:
        """A function that returns the rate for a length of window. Later counts do not change its results."""
        bins, began = tuple(self._bins), self.began

        def per_second(seconds: float) -> float:
            if began is None:
                return 0.0
            start, total = now - seconds, 0.0
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

    def in_bins(self, bin_s: float, now: float) -> tuple[Rate, ...]:
        """The last hour, or the time since counting began, in whole bins up to now, oldest first."""
        if self.began is None:
            return ()
        seen_s, rate = now - self.began, self.past(now)
        number = int(min(seen_s, self.keep_s) / bin_s + 1e-9)
        ends = [index * bin_s for index in range(number + 1)]
        came = [0.0, *(rate(end) * min(end, max(seen_s, FINE_S)) for end in ends[1:])]
        rates = [max(late - early, 0.0) / bin_s for early, late in pairwise(came)]
        return tuple(Rate(now - ends[index + 1], rates[index]) for index in reversed(range(number)))


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
        kept: Kept | None = restored(saved, Kept)
        # Bins of another length cannot be converted.
        self._kept = kept if kept is not None and kept.bin_s == bin_s else Kept(bin_s, [])
        self._cached: tuple[int, tuple[Rate, ...]] | None = None
        self._resumes = kept is not None

    def count(self, now: float, n: float = 1.0) -> None:
        """Count arrivals; 0 records that no request came until now."""
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
        """The rate over the last `seconds`."""
        return self._recent.per_second(seconds, now)

    def past(self, now: float) -> Callable[[float], float]:
        """See `Recent.past`."""
        return self._recent.past(now)

    def recent(self, now: float) -> tuple[Rate, ...]:
        """The last hour in bins of `RECENT_BIN_S`."""
        return self._recent.in_bins(RECENT_BIN_S, now)

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


WINDOWS = (30.0, 300.0, 3600.0)
"""Windows of gauges and rates, in seconds. Policies may add others."""
ENDED_S = 300.0
"""Window of latencies, tokens, deadlines, utilisation and custom metrics."""
MAX_METRICS = 100
"""Maximum number of custom metrics; beyond that, the least recently recorded metric is dropped."""
MAX_START_UPS = 20
"""Number of start-ups in the median."""


def windows_of(policies: Iterable[object]) -> tuple[float, ...]:
    """The usual windows, and those that these policies name in `windows`."""
    asked = {float(length) for policy in policies for length in getattr(policy, "windows", ())}
    return tuple(sorted(asked | set(WINDOWS)))


class Measurements:
    """Measurements of one deployment. Each method takes one kind of observation; `view` returns them all."""

    def __init__(
        self, windows: Iterable[float] = WINDOWS, *, bin_s: float = 600.0, saved: Mapping[str, Any] | None = None
    ) -> None:
        self.windows = tuple(windows)
        saved = saved or {}
        self.arrivals = Arrivals(bin_s, saved=saved.get("arrivals"))
        self._start_ups: deque[float] = deque(restored(saved.get("start_ups"), list[float]) or (), MAX_START_UPS)
        longest = max(self.windows, default=0.0)
        self._ongoing, self._queued = Gauge(longest), Gauge(longest)
        self._kv, self._gpu = Gauge(ENDED_S), Gauge(ENDED_S)
        self._ttft, self._tpot, self._latency, self._met = (Events(ENDED_S) for _ in range(4))
        self._tokens = Recent(ENDED_S)
        self._metrics: dict[str, Events] = {}
        self._load = (0.0, 0.0)
        self._busy_at: float | None = None

    def sample(
        self,
        now: float,
        *,
        ongoing: float,
        queued: float,
        kv_usage: float | None = None,
        gpu_usage: float | None = None,
    ) -> None:
        """Sample the requests that run and wait from now on, and the mean usage of KV caches and GPUs over replicas."""
        self.arrivals.count(now, 0)
        self._ongoing.add(now, ongoing)
        self._queued.add(now, queued)
        self._kv.add(now, kv_usage)
        self._gpu.add(now, gpu_usage)
        if sum(self._load) > 0 or ongoing + queued > 0:
            self._busy_at = now
        self._load = (ongoing, queued)

    def arrived(self, now: float, n: float = 1.0) -> None:
        self.arrivals.count(now, n)
        if n:
            self._busy_at = now

    def ended(
        self,
        now: float,
        *,
        latency_ms: float | None = None,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        met_slo: bool | None = None,
        tokens: float = 0.0,
    ) -> None:
        """Count a request that has ended. A value is None if it was not measured, or if there was no deadline."""
        for events, value in ((self._latency, latency_ms), (self._ttft, ttft_ms), (self._tpot, tpot_ms)):
            if value is not None:
                events.add(now, value)
        if met_slo is not None:
            self._met.add(now, float(met_slo))
        if tokens:
            self._tokens.count(now, tokens)

    def metric(self, now: float, name: str, value: float) -> None:
        events = self._metrics.pop(name, None) or Events(ENDED_S)
        self._metrics[name] = events  # the last entry is the most recent
        events.add(now, value)
        if len(self._metrics) > MAX_METRICS:
            del self._metrics[next(iter(self._metrics))]

    def started(self, seconds: float) -> None:
        """A replica became ready this long after its launch."""
        self._start_ups.append(seconds)

    @property
    def start_up_s(self) -> float | None:
        """Median of the last start-ups; None if no start-up was observed."""
        return median(self._start_ups) if self._start_ups else None

    def view(
        self,
        *,
        name: str,
        now: float,
        replicas: int,
        target: int,
        starting: int = 0,
        unplaced: int = 0,
        min_replicas: int = 0,
        max_replicas: int = 1,
        max_concurrency: int | None = None,
        cost_per_replica_hour: float | None = None,
        since_up_s: float | None = None,
        since_down_s: float | None = None,
        idle_s: float | None = None,
        state: MutableMapping[str, Any] | None = None,
    ) -> DeploymentView:
        """The view of the policy: these measurements, and the values that the caller adds."""
        ongoing, queued = self._load
        custom = {metric: events.window(ENDED_S, now) for metric, events in self._metrics.items()}
        if idle_s is None and ongoing + queued == 0 and self._busy_at is not None:
            idle_s = now - self._busy_at
        return DeploymentView(
            name=name,
            now=now,
            replicas=replicas,
            starting=starting,
            unplaced=unplaced,
            target=target,
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            max_concurrency=max_concurrency,
            ongoing=ongoing,
            queued=queued,
            ongoing_windows=LazyWindows(self.windows, self._ongoing.past(now).window),
            queued_windows=LazyWindows(self.windows, self._queued.past(now).window),
            arrivals_per_s=LazyWindows(self.windows, self.arrivals.past(now)),
            history=self.arrivals.history(now),
            bin_s=self.arrivals.bin_s,
            ttft_ms=self._ttft.window(ENDED_S, now),
            tpot_ms=self._tpot.window(ENDED_S, now),
            latency_ms=self._latency.window(ENDED_S, now),
            slo_attainment=self._met.window(ENDED_S, now).mean,
            kv_usage=self._kv.window(ENDED_S, now),
            gpu_usage=self._gpu.window(ENDED_S, now),
            tokens_per_s=None if self._tokens.began is None else self._tokens.per_second(ENDED_S, now),
            metrics={metric: window for metric, window in custom.items() if window.count},
            start_up_s=self.start_up_s,
            cost_per_replica_hour=cost_per_replica_hour,
            since_up_s=since_up_s,
            since_down_s=since_down_s,
            idle_s=idle_s,
            state={} if state is None else state,
        )

    def state(self) -> dict[str, Any]:
        """Measurements that take long to repeat, as plain data: the history of arrivals, and start-ups."""
        return {"arrivals": self.arrivals.saved(), "start_ups": list(self._start_ups)}

"""Measurements of one deployment over time, from which the view of its policy is made."""

from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping
from statistics import median
from typing import Any

import msgspec

from pointsman.scaling.arrivals import Arrivals, Recent
from pointsman.scaling.view import DeploymentView
from pointsman.scaling.windows import Events, Gauge, LazyWindows

WINDOWS = (30.0, 300.0, 3600.0)
"""Windows of gauges and rates, in seconds. Policies may add others."""
ENDED_S = 300.0
"""Window of latencies, tokens, deadlines, utilisation and custom metrics."""
MAX_METRICS = 100
"""Names of custom metrics; beyond that, the least recently recorded one is dropped."""
MAX_START_UPS = 20
"""Start-ups of which the median is taken."""


def windows_of(policies: Iterable[object]) -> tuple[float, ...]:
    """The usual windows, and those that these policies name in `windows`."""
    asked = {float(length) for policy in policies for length in getattr(policy, "windows", ())}
    return tuple(sorted(asked | set(WINDOWS)))


class Measurements:
    """Of one deployment. Each method takes one kind of observation; `view` returns them all."""

    def __init__(
        self, windows: Iterable[float] = WINDOWS, *, bin_s: float = 600.0, saved: Mapping[str, Any] | None = None
    ) -> None:
        self.windows = tuple(windows)
        saved = saved or {}
        self._arrivals = Arrivals(bin_s, saved=saved.get("arrivals"))
        self._start_ups: deque[float] = deque(_numbers(saved.get("start_ups")), maxlen=MAX_START_UPS)
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
        """Requests that run and wait from now on, and the usage of KV caches and GPUs, mean over replicas."""
        self._arrivals.count(now, 0)
        self._ongoing.add(now, ongoing)
        self._queued.add(now, queued)
        self._kv.add(now, kv_usage)
        self._gpu.add(now, gpu_usage)
        if sum(self._load) > 0 or ongoing + queued > 0:
            self._busy_at = now
        self._load = (ongoing, queued)

    def arrived(self, now: float, n: float = 1.0) -> None:
        """Requests have arrived."""
        self._arrivals.count(now, n)
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
        """A request has ended. None: not measured, or it had no deadline."""
        for events, value in ((self._latency, latency_ms), (self._ttft, ttft_ms), (self._tpot, tpot_ms)):
            if value is not None:
                events.add(now, value)
        if met_slo is not None:
            self._met.add(now, float(met_slo))
        if tokens:
            self._tokens.count(now, tokens)

    def metric(self, now: float, name: str, value: float) -> None:
        """A sample of a custom metric."""
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
        """Median of the last start-ups; None if none was seen."""
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
        """The view of the policy: these measurements, and what the caller adds."""
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
            arrivals_per_s=LazyWindows(self.windows, self._arrivals.past(now)),
            history=self._arrivals.history(now),
            bin_s=self._arrivals.bin_s,
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
        """What takes long to measure again, as plain data: the history of arrivals, and start-ups."""
        return {"arrivals": self._arrivals.saved(), "start_ups": list(self._start_ups)}


def _numbers(saved: object) -> list[float]:
    """Empty if it was saved by another version."""
    try:
        return msgspec.convert(saved, list[float])
    except msgspec.ValidationError:
        return []

"""What a policy would have seen at a moment of recorded load."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pointsman.lab.scaling.series import Series
from pointsman.scaling.guard import Guard
from pointsman.scaling.measuring import ENDED_S, WINDOWS
from pointsman.scaling.view import DeploymentView
from pointsman.scaling.windows import Gauge, WhenAsked

if TYPE_CHECKING:
    from pointsman.lab.scaling.replay import ReplicaPool, Setting

SHORT_S = 30.0
"""A look this short, or shorter, tells the rate of now."""


class Moment(msgspec.Struct, frozen=True):
    """A moment of a replay, for custom metrics."""

    now: float
    rate: float
    replicas: int
    starting: int
    ongoing: float
    queued: float


class MeasuredLoad:
    """Makes views, one after the other."""

    def __init__(self, series: Series, setting: "Setting", windows: Sequence[float] = WINDOWS) -> None:
        self._series, self._setting, self._windows = series, setting, windows
        self._bins = series.history(setting.began)
        self._told = self._bins[:0]
        self._ongoing, self._queued = Gauge(), Gauge()
        self._metrics = {name: Gauge() for name in setting.metrics}
        self._busy_at: float | None = None

    def view(self, at: float, pool: "ReplicaPool", guard: Guard) -> DeploymentView:
        """What is known so long after the beginning."""
        series, setting = self._series, self._setting
        now = setting.began + at
        rate = self._rate(at, SHORT_S)
        serves = pool.ready * setting.capacity
        ongoing, queued = min(rate, serves) * setting.request_s, max(pool.waiting, (rate - serves) * setting.request_s)
        moment = Moment(now, rate, pool.ready, pool.starting, ongoing, queued)
        self._ongoing.add(now, ongoing)
        self._queued.add(now, queued)
        for name, gauge in self._metrics.items():
            gauge.add(now, setting.metrics[name](moment))
        if rate > 0:
            self._busy_at = now
        if len(self._told) != series.bins_before(at):
            self._told = self._bins[: series.bins_before(at)]
        return DeploymentView(
            name=series.name,
            now=now,
            replicas=pool.ready,
            starting=pool.starting,
            target=guard.target,
            min_replicas=guard.limits.min_replicas,
            max_replicas=guard.limits.max_replicas,
            max_concurrency=max(1, round(setting.capacity * setting.request_s)),
            ongoing=ongoing,
            queued=queued,
            ongoing_windows=WhenAsked(self._windows, self._ongoing.past(now).window),
            queued_windows=WhenAsked(self._windows, self._queued.past(now).window),
            arrivals_per_s=WhenAsked(self._windows, lambda seconds: self._rate(at, seconds)),
            history=self._told,
            bin_s=series.bin_s,
            metrics={name: gauge.window(ENDED_S, now) for name, gauge in self._metrics.items()},
            start_up_s=setting.start_up_s,
            cost_per_replica_hour=setting.cost_per_replica_hour,
            since_up_s=guard.since_up_s(now),
            since_down_s=guard.since_down_s(now),
            idle_s=None if rate > 0 or self._busy_at is None else now - self._busy_at,
            state=guard.notes,
        )

    def _rate(self, at: float, seconds: float) -> float:
        """Over the last so many seconds; of now, if that is known at once."""
        if self._setting.at_once and seconds <= SHORT_S:
            return self._series.rate(at)
        return self._series.mean(at - seconds, at)

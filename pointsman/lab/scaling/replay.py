"""A policy on recorded load and virtual time, asked and guarded as it is live.

Replicas that are ordered cost from the order on and serve when their start-up is over; whoever is too many goes at
once, those that have not started yet first. Time is cut where something changes, so sums are exact.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from pointsman.lab.scaling.reading import Series
from pointsman.scaling.guard import Guard
from pointsman.scaling.limits import ScalingLimits
from pointsman.scaling.measurements import ENDED_S, WINDOWS, windows_of
from pointsman.scaling.policy import invoke, policy_name
from pointsman.scaling.records import ScalingRecord
from pointsman.scaling.view import DeploymentView
from pointsman.scaling.windows import Gauge, WhenAsked

# What a policy would have seen at a moment of recorded load.


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
            state=guard.policy_state,
        )

    def _rate(self, at: float, seconds: float) -> float:
        """Over the last so many seconds; of now, if that is known at once."""
        if self._setting.at_once and seconds <= SHORT_S:
            return self._series.rate(at)
        return self._series.mean(at - seconds, at)


TELL_EVERY = 500
"""Questions between two words about how far it is."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica can do, and how a policy is asked."""

    capacity: float
    """Requests per second that one replica serves."""
    start_up_s: float = 600.0
    interval_s: float = 60.0
    """How often the policy is asked."""
    at_once: bool = True
    """The rate of a bin is known when it begins, as a short look would tell. False: measured over the last 30 s."""
    queue_s: float = 0.0
    """So many seconds' worth of what replicas serve may wait; more than that goes unserved. 0: nobody waits."""
    request_s: float = 1.0
    """How long a request stays on a replica: ongoing requests are the rate times this."""
    began: float = 0.0
    """The first bin, in seconds since the epoch: schedules look at the clock."""
    cost_per_replica_hour: float | None = None
    metrics: Mapping[str, Callable[[Moment], float]] = {}
    """Custom ones, and what they would have been at a moment."""


class ReplayOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    hours: float
    """Replica-hours, those that were starting included."""
    ratio: float
    """To the clairvoyant minimum: what each bin needs, there at once."""
    unserved: float
    """Share of requests that came when ready replicas were busy with others."""
    changes: int
    most: int
    """The largest target."""
    problems: int
    """Answers of the policy that did not count."""
    line: list[tuple[float, int, int]]
    """(since when, target, ready), whenever one of both changed."""
    records: list[ScalingRecord]
    """Why the target was changed, each time."""


class Replay:
    """One series, one setting; any number of policies."""

    def __init__(self, series: Series, setting: Setting, limits: ScalingLimits | None = None) -> None:
        self.series, self.setting = series, setting
        # As free as can be, unless somebody wants to see what limits do.
        self.limits = limits or ScalingLimits(
            min_replicas=1,
            max_replicas=1_000_000,
            initial_replicas=max(series.needed(setting.capacity)[0], 1),
            down_delay_s=0.0,
            interval_s=setting.interval_s,
        )

    @property
    def times(self) -> int:
        """How often a policy is asked."""
        return int(self.series.seconds / self.setting.interval_s + 1e-9)

    def run(self, policy: object, name: str = "", tell: Callable[[float], None] | None = None) -> ReplayOutcome:
        """Ask it all the way through. `name`: what it is called in records; `tell`: is told now and then how much of it
        is done."""
        series, setting = self.series, self.setting
        guard = Guard(series.name, self.limits, name or policy_name(policy))
        pool = ReplicaPool(guard.target, setting, series)
        measured = MeasuredLoad(series, setting, windows_of([policy]))
        line, records = [(0.0, guard.target, guard.target)], []
        problems, most = 0, guard.target
        for step in range(self.times):
            now = step * setting.interval_s
            if tell is not None and step % TELL_EVERY == 0:
                tell(step / self.times)
            pool.advance(now)
            view = measured.view(now, pool, guard)
            record = guard.decide(view, invoke(policy, view))
            problems += bool(guard.problem)
            pool.order(guard.target)
            if record is not None:
                records.append(record)
            if line[-1][1:] != (guard.target, pool.ready):
                line.append((now, guard.target, pool.ready))
            most = max(most, guard.target)
        pool.advance(series.seconds)
        least = sum(series.needed(setting.capacity)) * series.bin_s
        return ReplayOutcome(
            hours=pool.replica_seconds / 3600,
            ratio=pool.replica_seconds / least if least else 1.0,
            unserved=pool.lost / series.requests if series.requests else 0.0,
            changes=sum(record.before != record.after for record in records),
            most=most,
            problems=problems,
            line=line,
            records=records,
        )


class ReplicaPool:
    """Replicas on virtual time: those that serve, and those that will."""

    def __init__(self, ready: int, setting: Setting, series: Series) -> None:
        self._setting, self._series = setting, series
        self.ready = ready
        self._starting: list[tuple[float, int]] = []
        """(when, how many), the next first."""
        self._now = 0.0
        self.waiting = 0.0
        self.replica_seconds = 0.0
        self.lost = 0.0

    @property
    def starting(self) -> int:
        return sum(count for _, count in self._starting)

    def order(self, target: int) -> None:
        """So many from now on."""
        more = target - self.ready - self.starting
        if more > 0:
            self._starting.append((self._now + self._setting.start_up_s, more))
            self._started()
        while more < 0 and self._starting:
            when, count = self._starting.pop()
            more += count
            if more > 0:
                self._starting.append((when, more))
        self.ready += min(more, 0)

    def advance(self, until: float) -> None:
        """Let time pass: to the next start or the next bin, whichever is first, again and again."""
        bin_s = self._series.bin_s
        while self._now < until:
            edge = (self._series.bins_before(self._now) + 1) * bin_s
            start = self._starting[0][0] if self._starting else until
            self._pass(min(edge, start, until))
            self._started()

    def _pass(self, until: float) -> None:
        seconds = until - self._now
        serves, comes = self.ready * self._setting.capacity, self._series.rate(self._now)
        self.replica_seconds += (self.ready + self.starting) * seconds
        waiting = max(self.waiting + (comes - serves) * seconds, 0.0)
        self.waiting = min(waiting, max(serves * self._setting.queue_s, min(self.waiting, waiting)))
        self.lost += waiting - self.waiting
        self._now = until

    def _started(self) -> None:
        while self._starting and self._starting[0][0] <= self._now:
            self.ready += self._starting.pop(0)[1]

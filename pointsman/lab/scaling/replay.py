"""Replays recorded load for a policy on virtual time, with the same guard as a plane.

A replica costs from the time of its order, and serves after its start-up. Surplus replicas stop at once; replicas that
are still starting stop first. Time advances from one change to the next, so that sums are exact.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from pointsman.lab.scaling.recording import Series
from pointsman.scaling.guard import Guard
from pointsman.scaling.limits import ScalingLimits
from pointsman.scaling.measurements import ENDED_S, WINDOWS, windows_of
from pointsman.scaling.policy import DeploymentView, invoke, policy_name
from pointsman.scaling.records import ScalingRecord
from pointsman.scaling.windows import Gauge, LazyWindows

SHORT_S = 30.0
"""Windows up to this length show the current rate."""
PROGRESS_STEPS = 500
"""Number of calls of the policy between two reports of progress."""


class Moment(msgspec.Struct, frozen=True):
    """The state at one moment of a replay, from which custom metrics are computed."""

    now: float
    rate: float
    replicas: int
    starting: int
    ongoing: float
    queued: float


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a replica, and how the policy is called."""

    capacity: float
    """Requests per second that one replica serves."""
    start_up_s: float = 600.0
    interval_s: float = 60.0
    """Time between two calls of the policy."""
    at_once: bool = True
    """Whether the rate of a bin is known when the bin begins. If not, the rate is measured over the last 30 s."""
    queue_s: float = 0.0
    """Length of the queue, as the time to serve it. Requests beyond it are unserved. 0 if there is no queue."""
    request_s: float = 1.0
    """How long a request stays on a replica. The number of ongoing requests is the rate times this duration."""
    began: float = 0.0
    """The start of the first bin, in seconds since the epoch, for policies that read the clock."""
    cost_per_replica_hour: float | None = None
    metrics: Mapping[str, Callable[[Moment], float]] = {}
    """Custom metrics by name. Each is computed from a moment."""

    @property
    def holds(self) -> int:
        """Number of requests that a replica takes at once."""
        return max(1, round(self.capacity * self.request_s))


class ReplayOutcome(msgspec.Struct, frozen=True, kw_only=True):
    hours: float
    """Replica-hours, including start-up."""
    ratio: float
    """Ratio of the hours to the clairvoyant minimum. The minimum has what each bin needs, and no start-up."""
    unserved: float
    """Share of requests that were not served, because all ready replicas were busy and the queue was full."""
    changes: int
    most: int
    """The largest target."""
    problems: int
    """Number of invalid answers from the policy."""
    line: list[tuple[float, int, int]]
    """Time, target and number of ready replicas, at each change of the target or of that number."""
    records: list[ScalingRecord]
    """One record for each change of the target, with the reason."""


class Replay:
    """A replay of one series with one setting, for any number of policies."""

    def __init__(self, series: Series, setting: Setting, limits: ScalingLimits | None = None) -> None:
        self.series, self.setting = series, setting
        # By default, there are hardly any limits.
        self.limits = limits or ScalingLimits(
            min_replicas=1,
            max_replicas=1_000_000,
            initial_replicas=max(series.needed(setting.capacity)[0], 1),
            down_delay_s=0.0,
            interval_s=setting.interval_s,
        )

    @property
    def times(self) -> int:
        """Number of calls of a policy."""
        return int(self.series.seconds / self.setting.interval_s + 1e-9)

    def run(self, policy: object, name: str = "", progress: Callable[[float], None] | None = None) -> ReplayOutcome:
        """Replay the whole series. `name` is used in records. `progress` is called with the finished share."""
        series, setting = self.series, self.setting
        guard = Guard(series.name, self.limits, name or policy_name(policy))
        pool = ReplicaPool(guard.target, setting, series)
        measured = MeasuredLoad(series, setting, windows_of([policy]))
        line, records = [(0.0, guard.target, guard.target)], []
        problems, most = 0, guard.target
        for step in range(self.times):
            now = step * setting.interval_s
            if progress is not None and step % PROGRESS_STEPS == 0:
                progress(step / self.times)
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


class MeasuredLoad:
    """Makes the views that a policy would have had."""

    def __init__(self, series: Series, setting: Setting, windows: Sequence[float] = WINDOWS) -> None:
        self._series, self._setting, self._windows = series, setting, windows
        self._bins = series.history(setting.began)
        self._ended_bins = self._bins[:0]
        self._ongoing, self._queued = Gauge(), Gauge()
        self._metrics = {name: Gauge() for name in setting.metrics}
        self._busy_at: float | None = None

    def view(self, at: float, pool: "ReplicaPool", guard: Guard) -> DeploymentView:
        """The view at a time in seconds since the beginning."""
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
        if len(self._ended_bins) != series.bins_before(at):
            self._ended_bins = self._bins[: series.bins_before(at)]
        return DeploymentView(
            name=series.name,
            now=now,
            replicas=pool.ready,
            starting=pool.starting,
            target=guard.target,
            min_replicas=guard.limits.min_replicas,
            max_replicas=guard.limits.max_replicas,
            max_concurrency=setting.holds,
            ongoing=ongoing,
            queued=queued,
            ongoing_windows=LazyWindows(self._windows, self._ongoing.past(now).window),
            queued_windows=LazyWindows(self._windows, self._queued.past(now).window),
            arrivals_per_s=LazyWindows(self._windows, lambda seconds: self._rate(at, seconds)),
            history=self._ended_bins,
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
        """The mean rate over the last seconds. For short windows, the current rate if it is known at once."""
        if self._setting.at_once and seconds <= SHORT_S:
            return self._series.rate(at)
        return self._series.mean(at - seconds, at)


class ReplicaPool:
    """Ready replicas and starting replicas, on virtual time."""

    def __init__(self, ready: int, setting: Setting, series: Series) -> None:
        self._setting, self._series = setting, series
        self.ready = ready
        self._starting: list[tuple[float, int]] = []
        """Time and count of each start, the next start first."""
        self._now = 0.0
        self.waiting = 0.0
        self.replica_seconds = 0.0
        self.lost = 0.0

    @property
    def starting(self) -> int:
        return sum(count for _, count in self._starting)

    def order(self, target: int) -> None:
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
        """Advance to a time. Each step ends at the next start or at the next bin."""
        while self._now < until:
            edge = (self._series.bins_before(self._now) + 1) * self._series.bin_s
            start = self._starting[0][0] if self._starting else until
            self._pass(min(edge, start, until))
            self._started()

    def _pass(self, until: float) -> None:
        seconds = until - self._now
        serves, arrives = self.ready * self._setting.capacity, self._series.rate(self._now)
        self.replica_seconds += (self.ready + self.starting) * seconds
        waiting = max(self.waiting + (arrives - serves) * seconds, 0.0)
        self.waiting = min(waiting, max(serves * self._setting.queue_s, min(self.waiting, waiting)))
        self.lost += waiting - self.waiting
        self._now = until

    def _started(self) -> None:
        while self._starting and self._starting[0][0] <= self._now:
            self.ready += self._starting.pop(0)[1]

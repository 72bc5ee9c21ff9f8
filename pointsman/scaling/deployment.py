"""One scaled deployment: observations in, a target and the record of each change out."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pointsman.reasons import Reason
from pointsman.scaling.guard import OURSELVES, Cap, Guard, within
from pointsman.scaling.limits import ScalingPlan
from pointsman.scaling.measurements import RECENT_BIN_S, Measurements, windows_of
from pointsman.scaling.policy import DeploymentView, StateTooLarge, TooSlow, Wish, copy_state, parse_answer
from pointsman.scaling.records import ReportThrottle, ScalingRecord

MAX_RECORDS = 200


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a deployment at one moment, and what its replicas can take."""

    running: int = 0
    waiting: int = 0
    arrived: int = 0
    """Number of requests that arrived since the runtime began to count."""
    kv_usage: float | None = None
    """Mean over replicas, 0 to 1; None if unknown. The same applies to `gpu_usage`."""
    gpu_usage: float | None = None
    max_concurrency: int | None = None
    """Requests that one replica runs at once; None if there is no limit."""
    start_timeout_s: float = 120.0


class ReplicaCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas there are. A replica of a sharded node is one instance of each shard."""

    ready: int = 0
    starting: int = 0
    """Number of replicas, including those that wait for a restart or for a place."""
    unplaced: int = 0
    trouble: Reason | None = None
    """Why an instance that should run does not run; None if all run."""
    is_final: bool = False
    """Whether that instance is not tried again."""
    start_ups: Mapping[tuple[str, str], float] = {}
    """Seconds from launch to ready, by instance and process."""


class Observations:
    """The known facts about one deployment: its replicas, its load, and measurements over time."""

    def __init__(self, plan: ScalingPlan, saved: Mapping[str, Any], used_at: float) -> None:
        self.replicas = ReplicaCounts()
        self.measurements = _measurements(plan, saved)
        self.loaded_at: float | None = None
        """The time since which at least one replica has been ready; None if no replica is ready."""
        self.used_at = used_at
        """When there last was a request."""
        self._counted_start_ups: set[tuple[str, str]] = set()
        self._arrived: int | None = None

    @property
    def start_up_s(self) -> float | None:
        """Median time from launch to ready; None if no start was observed."""
        return self.measurements.start_up_s

    def use_windows_of(self, plan: ScalingPlan) -> None:
        """Measure the windows that a policy reads."""
        self.measurements = _measurements(plan, self.measurements.state())

    def observe_replicas(self, replicas: ReplicaCounts, now: float) -> None:
        self.replicas = replicas
        self.loaded_at = None if not replicas.ready else now if self.loaded_at is None else self.loaded_at
        for process, seconds in replicas.start_ups.items():
            if process not in self._counted_start_ups:
                self.measurements.started(seconds)
        self._counted_start_ups = set(replicas.start_ups)

    def observe_load(self, load: Load, now: float) -> None:
        arrived = 0 if self._arrived is None else max(load.arrived - self._arrived, 0)
        self._arrived = load.arrived
        if arrived or load.running or load.waiting or not self.used_at:
            self.used_at = now
        self.measurements.arrived(now, arrived)
        self.measurements.sample(
            now, ongoing=load.running, queued=load.waiting, kv_usage=load.kv_usage, gpu_usage=load.gpu_usage
        )

    def loaded_for_s(self, now: float) -> float:
        """How long at least one replica has been ready; -1 if no replica is ready."""
        return -1.0 if self.loaded_at is None else now - self.loaded_at

    def idle_s(self, load: Load, now: float) -> float | None:
        """Time since a request could last have been served; None if there are requests now.

        While the first replica starts, the deployment is not idle: a client that gave up waiting may come back.
        """
        if load.running or load.waiting:
            return None
        idle_s = max(now - max(self.used_at, self.loaded_at or 0.0), 0.0)
        first_starts = not self.replicas.ready and self.replicas.starting and idle_s < load.start_timeout_s
        return 0.0 if first_starts else idle_s


class SavedDeployment(msgspec.Struct, kw_only=True):
    """What survives a restart: plain data."""

    recipe: str = ""
    """The recipe of the policy: another policy must not get its state."""
    guard: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    changes: int = 0
    errors: int = 0
    used_at: float = 0.0
    gave_way: bool = False


class ScaledDeployment:
    """The target of one deployment, and the reasons for it."""

    def __init__(
        self,
        name: str,
        plan: ScalingPlan,
        deciding: ScalingPlan,
        saved: SavedDeployment,
        records: Iterable[ScalingRecord] = (),
        running: int | None = None,
    ) -> None:
        """`deciding` is the plan with the policy: `plan` itself, or the plan of the application. The target begins at
        `running`, the number of instances that run already. If that is None, it begins as saved, or else as the limits
        say."""
        self.name = name
        self.followers: tuple[str, ...] = ()
        """Deployments that always have the same number of replicas: the other shards of a node."""
        self.plan, self.deciding = plan, deciding
        state = saved.guard or None if running is None else {"target": within(running, plan.limits)[0]}
        self.guard = Guard(name, plan.limits, deciding.policy_name, state)
        self.began_with = running
        """The running replicas at which scaling began, until that is recorded."""
        self.observed = Observations(deciding, saved.measured, saved.used_at)
        self.records: deque[ScalingRecord] = deque(records, maxlen=MAX_RECORDS)
        self.changes, self.errors = saved.changes, saved.errors
        self.wanted: int | None = None
        """The number in the last answer of the policy; None if that had no number."""
        self.reported_unplaced = 0
        """Instances without a place, as last recorded."""
        self.fits_never = False
        """Whether no worker, not even an empty one, could take one of these instances."""
        self.refuses = False
        """Whether the policy refuses replicas that the deployment needs, for example because the budget is spent."""
        self._gave_way = saved.gave_way
        """Whether it was evicted for another deployment, and stays at 0 until a request comes."""
        self._reported_trouble = ReportThrottle()
        if saved.recipe != deciding.recipe:
            self.guard.policy_state = {}

    @property
    def policy_name(self) -> str:
        return self.deciding.policy_name

    @property
    def target(self) -> int:
        return self.guard.target

    @property
    def members(self) -> tuple[str, ...]:
        """Its deployments: one, or one per shard."""
        return (self.name, *self.followers)

    def configure(self, plan: ScalingPlan, deciding: ScalingPlan) -> None:
        """Apply a new plan. The target and the state of an unchanged policy stay."""
        if deciding.recipe != self.deciding.recipe:
            self.observed.use_windows_of(deciding)
            self.guard.policy_state = {}
        self.plan, self.deciding = plan, deciding
        self.guard.limits, self.guard.policy_name = plan.limits, deciding.policy_name

    def view(self, load: Load, now: float) -> DeploymentView:
        guard, replicas = self.guard, self.observed.replicas
        return self.observed.measurements.view(
            name=self.name,
            now=now,
            replicas=replicas.ready,
            starting=replicas.starting,
            unplaced=replicas.unplaced,
            target=guard.target,
            min_replicas=guard.limits.min_replicas,
            max_replicas=guard.limits.max_replicas,
            max_concurrency=load.max_concurrency,
            cost_per_replica_hour=self.plan.cost_per_replica_hour,
            since_up_s=guard.since_up_s(now),
            since_down_s=guard.since_down_s(now),
            idle_s=self.observed.idle_s(load, now),
            state=copy_state(guard.policy_state),
        )

    def decide(self, view: DeploymentView, answer: object) -> ScalingRecord | None:
        """Apply the answer of the policy. Returns None if there is nothing to report."""
        parsed = parse_answer(answer, self.guard.limits.time_limit_s)
        if isinstance(answer, TooSlow | StateTooLarge):  # a call that still runs may write to the state it was given
            view = msgspec.structs.replace(view, state=self.guard.policy_state)
        self.wanted = parsed.replicas if isinstance(parsed, Wish) else None
        self.errors += isinstance(parsed, Reason)
        self.refuses = isinstance(parsed, Wish) and bool(parsed.refused) and not parsed.replicas
        self._gave_way = self._gave_way and view.load == 0
        replicas, cap = self.observed.replicas, None
        if self._gave_way:
            cap = Cap(0, Reason("gave-way"), replaces=True)
        elif replicas.trouble is not None and not replicas.ready:
            cap = Cap(max(self.target, 1), Reason("held-by-trouble", {"trouble": replicas.trouble}))
        return self.keep(self.guard.decide(view, answer, cap))

    def report_trouble(self, now: float) -> ScalingRecord | None:
        """A record if instances fail to run, or if they run again; None if that was reported before."""
        replicas = self.observed.replicas
        if not self._reported_trouble.is_due(replicas.trouble, now):
            return None
        if replicas.trouble is None:
            return self.note(Reason("all-run-again"), now) if replicas.ready else None
        return self.note(Reason("start-given-up" if replicas.is_final else "start-retried"), now, replicas.trouble)

    def keep(self, record: ScalingRecord | None) -> ScalingRecord | None:
        if record is not None:
            self.records.append(record)
            self.changes += record.after != record.before
        return record

    def note(self, why: Reason, now: float, failure: Reason | None = None) -> ScalingRecord:
        """A record that changes no target."""
        record = self.guard.record(self.target, now, why, OURSELVES, failure)
        self.keep(record)
        return record

    def give_way(self, why: Reason, now: float) -> ScalingRecord:
        """Scale to 0 at once, until a request comes."""
        self._gave_way = True
        record = self.guard.give_way(why, now)
        self.keep(record)
        return record

    def saved(self) -> SavedDeployment:
        return SavedDeployment(
            recipe=self.deciding.recipe,
            guard=self.guard.state(),
            measured=self.observed.measurements.state(),
            changes=self.changes,
            errors=self.errors,
            used_at=self.observed.used_at,
            gave_way=self._gave_way,
        )


def begin_records(deployments: Iterable[ScaledDeployment], now: float) -> list[ScalingRecord]:
    """One record for each deployment whose scaling has begun with the instances that ran."""
    records = []
    for one in deployments:
        running, one.began_with = one.began_with, None
        if running is not None:
            bounds, why = within(running, one.guard.limits)[1], Reason("scaling-began", {"running": running})
            records.append(one.guard.record(running, now, why, OURSELVES, None, tuple(bounds)))
            one.keep(records[-1])
    return records


def _measurements(plan: ScalingPlan, saved: Mapping[str, Any]) -> Measurements:
    windows = windows_of([plan.policy])
    try:
        return Measurements(windows, saved=saved)
    except (msgspec.MsgspecError, TypeError):  # another version has saved it: it will be measured again
        return Measurements(windows)


# As plain data: for status, `explain deployment` and rehearsals


def scaling_summary(one: ScaledDeployment) -> dict[str, Any]:
    """Plain data for the status of its deployment."""
    last = next((record for record in reversed(one.records) if record.after != record.before), None)
    return {
        "policy": one.policy_name,
        "desired": one.target,
        "wanted": one.wanted,
        "min": one.guard.limits.min_replicas,
        "max": one.guard.limits.max_replicas,
        "override": None if one.guard.override is None else msgspec.to_builtins(one.guard.override),
        "problem": "" if one.guard.problem is None else str(one.guard.problem),
        "last": None if last is None else last.as_dict(),
        "reasons": {"problem": None if one.guard.problem is None else one.guard.problem.as_dict()},
    }


def scaling_status(one: ScaledDeployment, load: Load, now: float) -> dict[str, Any]:
    """Plain data for `pointsman explain deployment`, and for external scalers."""
    override, replicas = one.guard.override, one.observed.replicas
    status = scaling_summary(one)
    status["reasons"]["trouble"] = None if replicas.trouble is None else replicas.trouble.as_dict()
    if override is not None:
        left = None if override.until is None else max(override.until - now, 0.0)
        status["override"] = {**status["override"], "for_s": left}
    return {
        "deployment": one.name,
        **status,
        "ongoing": load.running,
        "queued": load.waiting,
        "ready": replicas.ready,
        "starting": replicas.starting,
        "unplaced": replicas.unplaced,
        "start_up_s": one.observed.start_up_s,
        "trouble": "" if replicas.trouble is None else str(replicas.trouble),
        "limits": msgspec.to_builtins(one.guard.limits),
        "records": [record.as_dict() for record in one.records],
    }


def load_history(one: ScaledDeployment, load: Load, now: float) -> dict[str, Any]:
    """Past arrivals, and what else a rehearsal of a policy needs."""
    view = one.view(load, now)
    # A policy of an application sees all its nodes, and cannot be rehearsed on one.
    parameters = None if one.plan.policy is None else msgspec.json.decode(one.deciding.recipe)[1]
    return {
        "deployment": one.name,
        "bin_s": view.bin_s,
        "bins": msgspec.to_builtins(view.history),
        "recent": {"bin_s": RECENT_BIN_S, "bins": msgspec.to_builtins(one.observed.measurements.arrivals.recent(now))},
        "start_up_s": view.start_up_s,
        "request_s": _request_s(view),
        "max_concurrency": view.max_concurrency,
        "cost_per_replica_hour": view.cost_per_replica_hour,
        "limits": msgspec.to_builtins(one.guard.limits),
        "policy": one.policy_name,
        "parameters": parameters,
    }


def policy_problems(deployments: Iterable[ScaledDeployment]) -> list[Reason]:
    failing = [(one, one.guard.problem) for one in deployments if one.guard.problem is not None]
    return [
        Reason(
            "scaling-policy-fails",
            {"policy": one.policy_name, "deployment": one.name, "why": why, "target": one.target},
        )
        for one, why in failing
    ]


def _request_s(view: DeploymentView) -> float | None:
    """How long a request takes: the recent mean latency, or else the result of Little's law over the longest window
    with arrivals. None if no request came."""
    if view.latency_ms.mean:
        return view.latency_ms.mean / 1000
    for seconds in sorted(view.ongoing_windows, reverse=True):
        here, rate = view.ongoing_windows[seconds].mean, view.arrivals_per_s.get(seconds)
        if here and rate:
            return here / rate
    return None

"""One deployment that is scaled: what is measured of it, who decides, and what was decided."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pointsman.control import InstanceStatus
from pointsman.routing.records import Record
from pointsman.runtimes.local.scaling.presence import ReplicaCounts
from pointsman.runtimes.local.store import SCALING_HISTORY
from pointsman.runtimes.traffic import Lane
from pointsman.scaling.guard import OURSELVES, Guard
from pointsman.scaling.limits import ScalingPlan
from pointsman.scaling.measuring import Measurements, windows_of
from pointsman.scaling.policy import TooMuch, TooSlow, Wish, copied, understood
from pointsman.scaling.records import ReportThrottle, ScalingRecord
from pointsman.scaling.view import DeploymentView

GAVE_WAY = "it has made room for others, and nobody asks for it"


class Saved(msgspec.Struct, kw_only=True):
    """What must not be forgotten of it: plain data."""

    recipe: str = ""
    """Of the policy: the notes of another one are none of its business."""
    guard: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    changes: int = 0
    errors: int = 0
    used_at: float = 0.0
    gave_way: bool = False


class Scaled:
    """Measurements in, a target out."""

    def __init__(
        self,
        name: str,
        scaling: ScalingPlan,
        deciding: ScalingPlan,
        saved: Saved,
        records: Iterable[ScalingRecord],
    ) -> None:
        """`deciding`: has the policy that is asked; that of its application, if that decides about several at once."""
        self.name = name
        self.followers: tuple[str, ...] = ()
        """Deployments that always have as many: of a node, the other shards."""
        self._scaling, self._deciding = scaling, deciding
        self.guard = Guard(name, scaling.limits, deciding.policy_name, saved.guard or None)
        self.records: deque[ScalingRecord] = deque(records, maxlen=SCALING_HISTORY)
        self.changes, self.errors = saved.changes, saved.errors
        self.wanted: int | None = None
        """By the policy, when it was last asked; None: it did not say."""
        self.used_at = saved.used_at
        """When a request was last here."""
        self._gave_way = saved.gave_way
        """It made room for somebody else, and comes back when it is asked for."""
        self.presence = ReplicaCounts()
        self._told_trouble = ReportThrottle()
        self.told_unplaced = 0
        """Instances without a place that people know of."""
        if saved.recipe != deciding.recipe:
            self.guard.notes = {}
        self._measured = _measurements(deciding, saved.measured)
        self._arrived: int | None = None

    @property
    def policy_name(self) -> str:
        """Who decides about it."""
        return self._deciding.policy_name

    @property
    def parameters(self) -> dict[str, Any] | None:
        """Of its policy; None: that of its application decides, which sees all its nodes and cannot be asked of one."""
        if self._scaling.policy is None:
            return None
        given: dict[str, Any] = msgspec.json.decode(self._deciding.recipe)[1]
        return given

    @property
    def target(self) -> int:
        """What was decided."""
        return self.guard.target

    @property
    def members(self) -> tuple[str, ...]:
        """Its deployments: one, or one for each shard."""
        return (self.name, *self.followers)

    @property
    def start_up_s(self) -> float | None:
        """From launch to the first request, as seen so far; None: nobody has started yet."""
        return self._measured.start_up_s

    @property
    def may_rest(self) -> bool:
        """Whether it may have no instance at all."""
        return self.guard.limits.min_replicas == 0

    def configure(self, scaling: ScalingPlan, deciding: ScalingPlan) -> None:
        """Another manifest: its limits hold from now on, and its policy is asked if it is another."""
        if deciding.recipe != self._deciding.recipe:  # another policy may look at other windows
            self._measured = _measurements(deciding, self._measured.state())
            self.guard.notes = {}
        self._scaling, self._deciding = scaling, deciding
        self.guard.limits, self.guard.policy_name = scaling.limits, deciding.policy_name

    # Measuring

    def ended(self, record: Record, now: float) -> None:
        """A request has ended; one that was refused counts for deadlines only."""
        if record.ended_at is None or record.refusal is not None:
            self._measured.ended(now, met_slo=record.met_deadline)
            return
        latency_s = record.ended_at - record.arrived_at
        first_s = None if record.first_token_at is None else record.first_token_at - record.arrived_at
        tokens = record.output_tokens or 0
        per_token_ms = None
        if first_s is not None and tokens > 1:
            per_token_ms = (latency_s - first_s) * 1000 / (tokens - 1)
        self._measured.ended(
            now,
            latency_ms=latency_s * 1000,
            ttft_ms=None if first_s is None else first_s * 1000,
            tpot_ms=per_token_ms,
            met_slo=record.met_deadline,
            tokens=record.input_tokens + tokens,
        )

    def look(self, lane: Lane, instances: Iterable[InstanceStatus], now: float, gpu_usage: float | None = None) -> None:
        """Take in how things stand."""
        self.see(instances, now)
        lane.start_up_s = self.start_up_s
        dispatcher = lane.dispatcher
        running, here, arrived = dispatcher.running, len(dispatcher), dispatcher.counters.arrived
        came = 0 if self._arrived is None else max(arrived - self._arrived, 0)
        self._arrived = arrived
        if came or here or not self.used_at:
            self.used_at = now
        usages = [one.metrics.kv_cache_usage for one in dispatcher.fleet.roster if one.metrics is not None]
        usage = sum(usages) / len(usages) if usages else None
        self._measured.arrived(now, came)
        self._measured.sample(now, ongoing=running, queued=here - running, kv_usage=usage, gpu_usage=gpu_usage)

    def see(self, instances: Iterable[InstanceStatus], now: float) -> None:
        """Who is there, and how long it took to start whoever is ready by now."""
        for seconds in self.presence.see(instances, self.members, now):
            self._measured.started(seconds)

    def metric(self, name: str, value: float, now: float) -> None:
        """A number of somebody's own."""
        self._measured.metric(now, name, value)

    def view(self, lane: Lane, now: float) -> DeploymentView:
        """What its policy sees."""
        limits, guard = self.guard.limits, self.guard
        return self._measured.view(
            name=self.name,
            now=now,
            replicas=self.presence.ready,
            starting=self.presence.starting,
            unplaced=self.presence.unplaced,
            target=guard.target,
            min_replicas=limits.min_replicas,
            max_replicas=limits.max_replicas,
            max_concurrency=lane.plan.desired.max_concurrency or lane.plan.desired.engine_slots,
            cost_per_replica_hour=self._scaling.cost_per_replica_hour,
            since_up_s=guard.since_up_s(now),
            since_down_s=guard.since_down_s(now),
            idle_s=self._idle_s(lane, now),
            state=copied(guard.notes),
        )

    def _idle_s(self, lane: Lane, now: float) -> float | None:
        """Since somebody last could have been served: who waited for the first one and left may come again."""
        if len(lane.dispatcher):
            return None
        presence = self.presence
        idle_s = max(now - max(self.used_at, presence.loaded_at or 0.0), 0.0)
        on_its_way = not presence.ready and presence.starting and idle_s < lane.plan.desired.lifecycle.start_timeout_s
        return 0.0 if on_its_way else idle_s

    # Deciding

    def decide(self, view: DeploymentView, answer: object) -> ScalingRecord | None:
        """What becomes of an answer; a record if there is something to tell."""
        said = understood(answer, self.guard.limits.time_limit_s)
        if isinstance(answer, TooSlow | TooMuch):  # whoever is late may still write to the notes that it was given
            view = msgspec.structs.replace(view, state=self.guard.notes)
        self.wanted = said.replicas if isinstance(said, Wish) else None
        self.errors += isinstance(said, str)
        self._gave_way = self._gave_way and view.load == 0
        if self._gave_way and self.wanted:
            answer = Wish(0, GAVE_WAY)
        elif isinstance(said, Wish) and said.replicas > max(self.target, 1) and self._none_runs:
            answer = Wish(max(self.target, 1), f"{said.why}; not more while {self.presence.trouble}", said.refused)
        return self.keep(self.guard.decide(view, answer))

    def tell_trouble(self, now: float) -> ScalingRecord | None:
        """A record, if something new is to be told of instances that do not run."""
        trouble = self.presence.trouble
        if not self._told_trouble.is_news(trouble, now):
            return None
        if not trouble:
            return self.note("all of them run again", now) if self.presence.ready else None
        return self.note("it is tried again and again", now, trouble)

    @property
    def _none_runs(self) -> bool:
        """Somebody should, and does not: more would not either."""
        return bool(self.presence.trouble) and not self.presence.ready

    def keep(self, record: ScalingRecord | None) -> ScalingRecord | None:
        """Remember a record, if there is one."""
        if record is not None:
            self.records.append(record)
            self.changes += record.after != record.before
        return record

    def note(self, why: str, now: float, problem: str = "") -> ScalingRecord:
        """Something to know that changes no target."""
        target = self.target
        record = ScalingRecord(
            deployment=self.name,
            at=now,
            policy=self.policy_name,
            by=OURSELVES,
            before=target,
            after=target,
            why=why,
            problem=problem,
        )
        self.keep(record)
        return record

    def give_way(self, why: str, now: float) -> ScalingRecord:
        """None of it from now on, until somebody asks for it again."""
        self._gave_way = True
        record = self.guard.give_way(why, now)
        self.keep(record)
        return record

    def saved(self) -> Saved:
        """What must not be forgotten."""
        return Saved(
            recipe=self._deciding.recipe,
            guard=self.guard.state(),
            measured=self._measured.state(),
            changes=self.changes,
            errors=self.errors,
            used_at=self.used_at,
            gave_way=self._gave_way,
        )


def _measurements(deciding: ScalingPlan, saved: Mapping[str, Any]) -> Measurements:
    """With the windows that the policy looks at, and what is known from before."""
    windows = windows_of([deciding.policy])
    try:
        return Measurements(windows, saved=saved)
    except (msgspec.MsgspecError, TypeError):  # of another form: it is seen again in time
        return Measurements(windows)

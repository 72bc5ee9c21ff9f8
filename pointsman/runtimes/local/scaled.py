"""One deployment that is scaled: what is measured of it, who decides, and what was decided."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pointsman.config.plan import ScalingPlan
from pointsman.control import InstanceStatus, Phase
from pointsman.routing.records import Record
from pointsman.runtimes.local.store import SCALING_HISTORY
from pointsman.runtimes.traffic import Lane
from pointsman.scaling.answers import TooMuch, TooSlow, understood
from pointsman.scaling.guard import OURSELVES, Guard
from pointsman.scaling.measuring import Measurements, windows_of
from pointsman.scaling.news import News
from pointsman.scaling.notes import copied
from pointsman.scaling.policy import Wish
from pointsman.scaling.records import ScalingRecord
from pointsman.scaling.view import DeploymentView

STAY_S = 10.0
"""Who was just loaded stays as long as loading took, and need not stay longer than this."""
LOADS_PER_TURN = 5
"""Whoever is busy stays so many times as long as loading took, so that a machine does more than loading."""
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
        self.loaded_at: float | None = None
        """Since when there is an instance that takes requests; None: there is none."""
        self._gave_way = saved.gave_way
        """It made room for somebody else, and comes back when it is asked for."""
        self.ready = self.starting = self.homeless = 0
        self.trouble = ""
        """Why an instance that should run does not; empty: all do."""
        self._told_trouble = News()
        self.told_homeless = 0
        """Instances without a place that people know of."""
        if saved.recipe != deciding.recipe:
            self.guard.notes = {}
        self._measured = _measurements(deciding, saved.measured)
        self._arrived: int | None = None
        self._started: set[tuple[str, int | None]] = set()
        """Instances and processes whose start-up has been counted."""

    @property
    def policy_name(self) -> str:
        """Who decides about it."""
        return self._deciding.policy_name

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
        running, here, arrived = dispatcher.running, len(dispatcher), dispatcher.tally.arrived
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
        mine = [one for one in instances if one.deployment in self.members and one.endpoint is None]
        self.ready = min(self._count(mine, Phase.READY))
        self.starting = max(self._count(mine, Phase.STARTING, Phase.BACKING_OFF))
        self.homeless = max(self._count([one for one in mine if one.homeless], *Phase))
        on_their_way = [one for one in mine if one.phase in (Phase.STARTING, Phase.BACKING_OFF) and not one.homeless]
        self.trouble = next(
            (f"{one.id} does not run: {one.reason}" for one in on_their_way if one.has_failed and one.reason), ""
        )
        self._started &= {(one.id, one.pid) for one in mine}
        for one in mine:
            if one.phase is Phase.READY and one.start_up_s is not None and (one.id, one.pid) not in self._started:
                self._measured.started(one.start_up_s)
                self._started.add((one.id, one.pid))
        if not self.ready:
            self.loaded_at = None
        elif self.loaded_at is None:
            self.loaded_at = now

    def _count(self, instances: Iterable[InstanceStatus], *phases: Phase) -> list[int]:
        """Of each of its deployments, how many are in one of these phases."""
        counted = Counter(one.deployment for one in instances if one.phase in phases)
        return [counted[name] for name in self.members]

    def metric(self, name: str, value: float, now: float) -> None:
        """A number of somebody's own."""
        self._measured.metric(now, name, value)

    def view(self, lane: Lane, now: float) -> DeploymentView:
        """What its policy sees."""
        limits, guard = self.guard.limits, self.guard
        return self._measured.view(
            name=self.name,
            now=now,
            replicas=self.ready,
            starting=self.starting,
            homeless=self.homeless,
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
        idle_s = max(now - max(self.used_at, self.loaded_at or 0.0), 0.0)
        on_its_way = not self.ready and self.starting and idle_s < lane.plan.desired.lifecycle.start_timeout_s
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
        elif isinstance(said, Wish) and self.trouble and not self.ready and said.replicas > max(self.target, 1):
            answer = Wish(max(self.target, 1), f"{said.why}; not more while {self.trouble}", said.refused)
        return self.keep(self.guard.decide(view, answer))

    def tell_trouble(self, now: float) -> ScalingRecord | None:
        """A record, if something new is to be told of instances that do not run."""
        if not self._told_trouble.is_news(self.trouble, now):
            return None
        if not self.trouble:
            return self.note("all of them run again", now) if self.ready else None
        return self.note("it is tried again and again", now, self.trouble)

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

    def may_go(self, now: float) -> bool:
        """Whether all of it may be unloaded for somebody else, if nobody uses it."""
        return self.may_rest and self.target > 0 and self._is_settled(now)

    def spares(self, now: float) -> int:
        """How many of its instances may go for somebody else, although they are used: all but the fewest that it must
        have, and all when its turn is over."""
        if self.followers or not self._is_settled(now):
            return 0
        return self.ready if self.turn_is_over(now) else max(self.ready - max(self.guard.limits.min_replicas, 1), 0)

    def turn_is_over(self, now: float) -> bool:
        """Whether it had its place for as long as it may count on while it is busy."""
        turn_s = max(self.guard.limits.turn_s, LOADS_PER_TURN * (self.start_up_s or 0.0))
        return self.may_rest and self.loaded_at is not None and now - self.loaded_at >= turn_s

    def _is_settled(self, now: float) -> bool:
        """It has been there for a while, and nobody ordered it to stay."""
        stay_s = min(STAY_S, self.start_up_s or STAY_S)
        return self.guard.ordered is None and self.loaded_at is not None and now - self.loaded_at >= stay_s

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

    # For people

    def in_short(self) -> dict[str, Any]:
        """For the status of its deployment: plain data."""
        last = next((one for one in reversed(self.records) if one.after != one.before), None)
        return {
            "policy": self.policy_name,
            "desired": self.target,
            "wanted": self.wanted,
            "min": self.guard.limits.min_replicas,
            "max": self.guard.limits.max_replicas,
            "override": None if self.guard.ordered is None else msgspec.to_builtins(self.guard.ordered),
            "problem": self.guard.problem,
            "last": "" if last is None else last.in_words(),
        }

    def in_full(self, lane: Lane, now: float) -> dict[str, Any]:
        """For `pointsman explain deployment`, and for scalers of others: plain data."""
        ordered = self.guard.ordered
        told = self.in_short()
        if ordered is not None:
            left = None if ordered.until is None else max(ordered.until - now, 0.0)
            told["override"] = {**told["override"], "for_s": left}
        return {
            "deployment": self.name,
            **told,
            "ongoing": lane.dispatcher.running,
            "queued": len(lane.dispatcher) - lane.dispatcher.running,
            "ready": self.ready,
            "starting": self.starting,
            "homeless": self.homeless,
            "start_up_s": self.start_up_s,
            "trouble": self.trouble,
            "limits": msgspec.to_builtins(self.guard.limits),
            "records": msgspec.to_builtins(list(self.records)),
        }

    def load_seen(self, lane: Lane, now: float) -> dict[str, Any]:
        """What has come so far, and what it takes to rehearse a policy on it: plain data."""
        view, alone = self.view(lane, now), self._scaling.policy is not None
        return {
            "deployment": self.name,
            "bin_s": view.bin_s,
            "bins": msgspec.to_builtins(view.history),
            "start_up_s": view.start_up_s,
            "request_s": _request_s(view),
            "max_concurrency": view.max_concurrency,
            "cost_per_replica_hour": view.cost_per_replica_hour,
            "limits": msgspec.to_builtins(self.guard.limits),
            "policy": self.policy_name,
            # The policy of an application sees all its nodes, so that it cannot be asked about one.
            "parameters": msgspec.json.decode(self._deciding.recipe)[1] if alone else None,
        }


def _request_s(view: DeploymentView) -> float | None:
    """How long a request takes: of those that ended of late, else by how many came and were here in the longest window
    in which any came. None: nobody did."""
    if view.latency_ms.mean:
        return view.latency_ms.mean / 1000
    for seconds in sorted(view.ongoing_windows, reverse=True):
        here, rate = view.ongoing_windows[seconds].mean, view.arrivals_per_s.get(seconds)
        if here and rate:
            return here / rate
    return None


def _measurements(deciding: ScalingPlan, saved: Mapping[str, Any]) -> Measurements:
    """With the windows that the policy looks at, and what is known from before."""
    windows = windows_of([deciding.policy])
    try:
        return Measurements(windows, saved=saved)
    except (msgspec.MsgspecError, TypeError):  # of another form: it is seen again in time
        return Measurements(windows)

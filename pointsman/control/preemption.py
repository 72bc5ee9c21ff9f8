"""Preemption: which deployments make room for one that has requests and no instance.

Idle deployments are evicted first, beginning with the least recently used. Spare replicas of busy deployments follow,
and then the last replica of a busy deployment that has had its turn. Enters: instances, the fleet, and scaled
deployments. Leaves: evictions and records. The one rule: only the target of an idle deployment changes. Evicted
replicas of other deployments come back when there is room.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

import msgspec

from pointsman.control.controller import Controller
from pointsman.control.desired import DesiredDeployment
from pointsman.control.instances import InstanceStatus, Phase
from pointsman.placement.asks import Ask
from pointsman.placement.fleet import Fleet
from pointsman.placement.hints import hints, why_never
from pointsman.placement.moves import defragment
from pointsman.placement.placer import Placed, Placer
from pointsman.reasons import Reason
from pointsman.scaling.deployment import ScaledDeployment
from pointsman.scaling.records import ScalingRecord

MAX_MINIMUM_STAY_S = 10.0
"""A deployment that was just loaded stays for as long as loading took, but for at most this time."""
LOADS_PER_TURN = 5
"""A busy deployment stays this many times as long as loading took, so that the machine does more than loading."""
MAX_HINTS = 2
TRIAL = "a-trial"
"""The instance id under which a placement is tried."""


class Victim(msgspec.Struct, frozen=True):
    """An idle deployment with all its instances, or one instance of a busy one."""

    deployment: str
    instances: tuple[str, ...]
    busy: bool = False


class Preemption(msgspec.Struct, frozen=True):
    records: tuple[ScalingRecord, ...] = ()
    evictions: tuple[tuple[str, Reason], ...] = ()
    """The instances to evict, and why."""
    retarget: bool = False
    """Whether the target of another deployment has become 0."""


class Preemptor:
    """Finds room for scaled deployments whose instances have no place."""

    def __init__(self, controller: Controller, scaled: Mapping[str, ScaledDeployment]) -> None:
        self._controller = controller
        self._scaled = scaled

    def make_room(self, one: ScaledDeployment, used: Set[str], now: float) -> Preemption:
        """Make room for a deployment without a place. `used`: deployments that have requests, running or waiting."""
        instances = self._controller.instances()
        unplaced = [each for each in instances if each.deployment in one.members and each.unplaced]
        evictions: tuple[tuple[str, Reason], ...] = ()
        serving = {each.deployment for each in instances if each.in_service}
        if unplaced and not serving.issuperset(one.members) and not used.isdisjoint(one.members):
            victims = self._victims(one, unplaced[0].deployment, instances, used, now)
            if victims:
                return self._preempt(one, victims, now)
            why = Reason("place-awaited", {"deployment": one.name})  # the drain timeout applies to them from now on
            evictions = tuple((each.id, why) for each in instances if each.phase is Phase.DRAINING)
        more = len(unplaced) > one.reported_unplaced
        one.reported_unplaced = len(unplaced)
        return Preemption((self._no_room(one, unplaced, now),) if more else (), evictions)

    def may_make_room(self, one: ScaledDeployment) -> bool:
        """Whether another deployment may make room for its instances, now or after its turn."""
        ask = self._ask(one.name)
        return (
            ask is not None
            and not one.fits_never
            and any(
                other is not one
                and self._may_yield(other, ask)
                and other.guard.override is None
                and other.target > 0
                and (other.guard.limits.min_replicas == 0 or other.target > other.guard.limits.min_replicas)
                for other in self._scaled.values()
            )
        )

    def _victims(
        self, one: ScaledDeployment, deployment: str, instances: Sequence[InstanceStatus], used: Set[str], now: float
    ) -> list[Victim]:
        ask, fleet = self._ask(deployment), self._controller.places.taken
        if ask is None or fleet is None:
            return []
        others = [other for other in self._scaled.values() if other is not one and self._may_yield(other, ask)]
        idle = [other for other in others if may_unload(other, now) and used.isdisjoint(other.members)]
        idle.sort(key=lambda other: other.observed.used_at)
        candidates = [
            Victim(other.name, tuple(each.id for each in instances if each.deployment in other.members))
            for other in idle
        ]
        candidates += _spare_instances([other for other in others if other not in idle], instances, now)
        leaving = [each.id for each in instances if each.phase in (Phase.DRAINING, Phase.STOPPING)]
        return fewest_victims(ask, fleet, leaving, candidates)

    def _may_yield(self, other: ScaledDeployment, ask: Ask) -> bool:
        """A deployment never makes room for one of lower priority."""
        theirs = self._ask(other.name)
        return theirs is not None and theirs.priority <= ask.priority

    def _preempt(self, one: ScaledDeployment, victims: Sequence[Victim], now: float) -> Preemption:
        records: list[ScalingRecord] = []
        evictions = []
        for victim in victims:
            other = self._scaled[victim.deployment]
            if not victim.busy:
                records.append(other.give_way(Reason("unloaded-for", {"deployment": one.name}), now))
                records.append(one.note(Reason("room-from-idle", {"deployment": other.name}), now))
                continue
            [instance] = victim.instances
            why = Reason("evicted-for", {"instance": instance, "deployment": one.name})
            evictions.append((instance, why))
            records.append(other.note(why, now))
            code = "room-from-spare" if other.observed.replicas.ready > 1 else "room-from-turn"
            records.append(one.note(Reason(code, {"instance": instance, "deployment": other.name}), now))
        return Preemption(tuple(records), tuple(evictions), not all(victim.busy for victim in victims))

    def _no_room(self, one: ScaledDeployment, unplaced: Sequence[InstanceStatus], now: float) -> ScalingRecord:
        """Report how many instances have no place, why, and what would help, whenever their number grows."""
        ask, fleet = self._ask(unplaced[0].deployment), self._controller.places.taken
        helps: list[Reason] = []
        never = None
        if ask is not None and fleet is not None:
            desired = self._controller.desired
            helps = what_would_help(ask, fleet, desired.deployments.values() if desired else ())
            never = why_never(ask, fleet)
        one.fits_never = never is not None
        facts = {"unplaced": len(unplaced), "target": one.target, "why": in_the_way(unplaced[0].reason), "hints": helps}
        why = Reason("waits-for-room") if never is None else Reason("fits-no-worker", {"why": in_the_way(never)})
        return one.note(why, now, Reason("instances-unplaced", facts))

    def _ask(self, deployment: str) -> Ask | None:
        desired = self._controller.desired
        known = None if desired is None else desired.deployments.get(deployment)
        return None if known is None else known.ask


def in_the_way(refusal: Reason | None) -> Reason | str:
    """What is in the way; empty if unknown. The text continues a sentence about a missing place."""
    if refusal is None:
        return ""
    plain = refusal.plain()
    return Reason("in-the-way", plain.facts) if plain.code == "no-place" else plain


# Which instances may be evicted


def may_unload(one: ScaledDeployment, now: float) -> bool:
    return one.guard.limits.min_replicas == 0 and one.target > 0 and _has_stayed(one, now)


def spare_replicas(one: ScaledDeployment, now: float) -> int:
    """How many replicas of a busy deployment may be evicted: those above its minimum, or all of them after its turn.

    A sharded node has no spare replicas, because its shards would have to be evicted together.
    """
    if one.followers or not _has_stayed(one, now):
        return 0
    limits = one.guard.limits
    turn_s = max(limits.turn_s, LOADS_PER_TURN * (one.observed.start_up_s or 0.0))
    turn_is_over = limits.min_replicas == 0 and one.observed.loaded_for_s(now) >= turn_s
    return max(one.observed.replicas.ready - (0 if turn_is_over else max(limits.min_replicas, 1)), 0)


def _has_stayed(one: ScaledDeployment, now: float) -> bool:
    """Whether its minimum stay is over, and its target was not set by an operator."""
    minimum_s = min(MAX_MINIMUM_STAY_S, one.observed.start_up_s or MAX_MINIMUM_STAY_S)
    return one.guard.override is None and one.observed.loaded_for_s(now) >= minimum_s


def _spare_instances(
    others: Sequence[ScaledDeployment], instances: Sequence[InstanceStatus], now: float
) -> list[Victim]:
    """Instances of busy deployments. Those of deployments with the most replicas come first, then the oldest."""
    found: list[tuple[tuple[int, float], Victim]] = []
    for other in others:
        ready = [each.id for each in instances if each.deployment == other.name and each.phase is Phase.READY]
        for remaining in range(len(ready), len(ready) - min(spare_replicas(other, now), len(ready)), -1):
            victim = Victim(other.name, (ready[remaining - 1],), busy=True)
            found.append(((-remaining, other.observed.loaded_at or 0.0), victim))
    found.sort(key=lambda one: one[0])
    return [victim for _, victim in found]


def fewest_victims(ask: Ask, fleet: Fleet, leaving: Iterable[str], candidates: Sequence[Victim]) -> list[Victim]:
    """The fewest candidates, in their order, whose eviction makes a place. Tried on a copy of the fleet.

    Empty if there will be a place once those `leaving` have left, or if evicting all candidates would not help.
    """
    scratch = fleet.copy()
    for instance_id in leaving:
        scratch.release(instance_id)
    placer, ask = Placer(scratch), msgspec.structs.replace(ask, instance_id=TRIAL)
    gone: list[Victim] = []
    for candidate in candidates:
        if _fits(ask, placer):
            break
        for instance_id in candidate.instances:
            scratch.release(instance_id)
        gone.append(candidate)
    return _needed(ask, fleet, scratch, gone) if _fits(ask, placer) else []


def _needed(ask: Ask, fleet: Fleet, scratch: Fleet, gone: Sequence[Victim]) -> list[Victim]:
    """The candidates that must go. Those that can stay after all are left out; the last are tried first."""
    needed, placer = list(gone), Placer(scratch)
    for candidate in reversed(gone):
        back = {one: fleet.occupants[one].place for one in candidate.instances if one in fleet.occupants}
        for instance_id, place in back.items():
            scratch.claim(instance_id, place, candidate.deployment)
        if _fits(ask, placer):
            needed.remove(candidate)
        else:
            for instance_id in back:
                scratch.release(instance_id)
    return needed


def _fits(ask: Ask, placer: Placer) -> bool:
    return isinstance(placer.place(ask, traced=False), Placed)


def what_would_help(ask: Ask, fleet: Fleet, deployments: Iterable[DesiredDeployment]) -> list[Reason]:
    asks = {one.name: one.ask for one in deployments if one.ask is not None}
    movable = [
        msgspec.structs.replace(asks[one.deployment], instance_id=one.instance_id)
        for one in fleet.occupants.values()
        if one.deployment in asks
    ]
    ask = msgspec.structs.replace(ask, instance_id=TRIAL)
    helpful = [hint.reason.plain() for hint in hints(ask, Placer(fleet.copy())) if hint.ask is not None][:MAX_HINTS]
    found = defragment(ask, fleet, movable)
    if found is not None:
        moves = [
            {"instance": move.instance_id, "from": str(move.before), "to": str(move.after)} for move in found.moves
        ]
        helpful.append(Reason("room-after-moving", {"moves": moves}))
    return helpful

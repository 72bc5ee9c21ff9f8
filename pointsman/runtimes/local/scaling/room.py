"""Room for deployments that are scaled: whoever is waited for and has nobody gets it from others; lack of it is told.

Whom nobody uses makes room first, then whoever has several, then whoever is busy and has had its turn. A target never
changes for want of room, except that of whoever is not used: the others wait, and are started when there is some.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from pointsman.control import Controller, InstanceStatus, Phase
from pointsman.placement.asks import Ask
from pointsman.placement.hints import why_never
from pointsman.runtimes.local.scaling.scaled import Scaled
from pointsman.runtimes.local.scaling.staying import may_go, spares
from pointsman.runtimes.local.scaling.turns import MayGo, what_would_help, who_makes_room
from pointsman.runtimes.traffic import Traffic
from pointsman.scaling.records import ScalingRecord


class Seen(msgspec.Struct, frozen=True):
    """What came of a look."""

    records: tuple[ScalingRecord, ...] = ()
    somebody_rests: bool = False
    """The target of another has become 0."""


class RoomMaker:
    """Looks after deployments whose instances have no place."""

    def __init__(
        self,
        traffic: Traffic,
        controller: Controller,
        scaled: Mapping[str, Scaled],
        evict: Callable[[str, str], None],
    ) -> None:
        """`evict`: (instance, why) is called for instances that are used and make room."""
        self._traffic = traffic
        self._controller = controller
        self._scaled = scaled
        self._evict = evict

    def look(self, one: Scaled, now: float) -> Seen:
        """What is to be told of a deployment, and whether somebody makes room for it."""
        instances = self._controller.instances()
        unplaced = [each for each in instances if each.deployment in one.members and each.unplaced]
        if unplaced and self._is_waited_for(one, instances):
            going = self._who_goes(one, unplaced[0].deployment, instances, now)
            if going:
                records = [record for each in going for record in self._makes_room(each, one, now)]
                return Seen(tuple(records), any(not each.is_used for each in going))
            for each in instances:
                if each.phase is Phase.DRAINING:  # it may have been let to take its time
                    self._evict(each.id, f"{one.name} waits for its place")
        told = [self._no_room(one, unplaced, now)] if len(unplaced) > one.told_unplaced else []
        one.told_unplaced = len(unplaced)
        return Seen(tuple(told))

    def _is_waited_for(self, one: Scaled, instances: Sequence[InstanceStatus]) -> bool:
        serving = {each.deployment for each in instances if each.in_service}
        return not serving.issuperset(one.members) and self._is_used(one)

    def _is_used(self, one: Scaled) -> bool:
        return any(len(self._traffic.lanes[name].dispatcher) for name in one.members)

    def _who_goes(self, one: Scaled, deployment: str, instances: Sequence[InstanceStatus], now: float) -> list[MayGo]:
        """Who must go so that there is a place: nobody, if somebody is leaving already, or if it would not help."""
        ask, fleet = self._ask(deployment), self._controller.places.taken
        if ask is None or fleet is None:
            return []
        others = [other for other in self._scaled.values() if other is not one and self._may_yield(other, ask)]
        idle = [other for other in others if may_go(other, now) and not self._is_used(other)]
        idle.sort(key=lambda other: other.used_at)
        candidates = [
            MayGo(other.name, tuple(each.id for each in instances if each.deployment in other.members))
            for other in idle
        ]
        candidates += _of_the_busy([other for other in others if other not in idle], instances, now)
        leaving = [each.id for each in instances if each.phase in (Phase.DRAINING, Phase.STOPPING)]
        return who_makes_room(ask, fleet, leaving, candidates)

    def _may_yield(self, other: Scaled, ask: Ask) -> bool:
        """Nobody makes room for what is less important."""
        theirs = self._ask(other.name)
        return theirs is not None and theirs.priority <= ask.priority

    def _makes_room(self, going: MayGo, one: Scaled, now: float) -> tuple[ScalingRecord, ScalingRecord]:
        """One side of it, and the other."""
        other = self._scaled[going.deployment]
        if not going.is_used:
            why = f"makes room for {one.name}, for which a request waits; nobody was idle for longer"
            return other.give_way(why, now), one.note(f"{other.name}, which nobody uses, makes room for it", now)
        [instance] = going.instances
        reason = "has others" if other.presence.ready > 1 else "has had its turn"
        why = f"{instance} makes room for {one.name}, which has none and for which a request waits"
        self._evict(instance, why)
        return other.note(why, now), one.note(f"{instance} of {other.name}, which {reason}, makes room for it", now)

    def _no_room(self, one: Scaled, unplaced: Sequence[InstanceStatus], now: float) -> ScalingRecord:
        """How many have no place, why, and what would help. Told when they become more, and not all the time."""
        ask, fleet = self._ask(unplaced[0].deployment), self._controller.places.taken
        number = f"{len(unplaced)} of {one.target} {'has' if len(unplaced) == 1 else 'have'} no place"
        helps = never = ""
        if ask is not None and fleet is not None:
            desired = self._controller.desired
            helps = what_would_help(ask, fleet, desired.deployments.values() if desired else ())
            never = why_never(ask, fleet)
        why = unplaced[0].reason.removeprefix("no place: ")
        problem = "; ".join(filter(None, [f"{number}: {why}", helps]))
        in_vain = f"no worker could take it, even with nothing else there: {never}"
        return one.note(in_vain if never else "started as soon as there is room", now, problem)

    def _ask(self, deployment: str) -> Ask | None:
        return self._traffic.lanes[deployment].plan.desired.ask


def _of_the_busy(others: Sequence[Scaled], instances: Sequence[InstanceStatus], now: float) -> list[MayGo]:
    """Instances that may go although they are used: of those who have most first, then of whoever is there longest."""
    found: list[tuple[tuple[int, float], MayGo]] = []
    for other in others:
        ready = [each.id for each in instances if each.deployment == other.name and each.phase is Phase.READY]
        for remaining in range(len(ready), len(ready) - min(spares(other, now), len(ready)), -1):
            may_go = MayGo(other.name, (ready[remaining - 1],), is_used=True)
            found.append(((-remaining, other.presence.loaded_at or 0.0), may_go))
    found.sort(key=lambda one: one[0])
    return [may_go for _, may_go in found]

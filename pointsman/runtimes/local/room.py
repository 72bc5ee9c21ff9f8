"""Room for deployments that are scaled: whoever is waited for gets it from those who are not; lack of it is told.

A target never changes for want of room, except that of whoever makes room: the others wait, and are started when there
is some.
"""

from collections.abc import Mapping, Sequence

import msgspec

from pointsman.control import Controller, InstanceStatus, Phase
from pointsman.runtimes.local.scaled import Scaled
from pointsman.runtimes.local.turns import what_would_help, who_makes_room
from pointsman.runtimes.traffic import Lane, Traffic
from pointsman.scaling.records import ScalingRecord


class Seen(msgspec.Struct, frozen=True):
    """What came of a look."""

    records: tuple[ScalingRecord, ...] = ()
    somebody_goes: bool = False
    """The target of another has become 0."""


class Room:
    """Looks after deployments whose instances have no place."""

    def __init__(self, traffic: Traffic, controller: Controller, scaled: Mapping[str, Scaled]) -> None:
        self._traffic = traffic
        self._controller = controller
        self._scaled = scaled

    def look(self, one: Scaled, now: float) -> Seen:
        """What is to be told of a deployment, and whether somebody makes room for it."""
        instances = self._controller.instances()
        homeless = [each for each in instances if each.deployment == one.name and each.homeless]
        if homeless and self._is_waited_for(one, instances):
            going = self._who_goes(one, instances, now)
            if going:
                return Seen(tuple(record for other in going for record in _makes_room(other, one, now)), True)
        told = [self._no_room(one, homeless, now)] if len(homeless) > one.homeless else []
        one.homeless = len(homeless)
        return Seen(tuple(told))

    def _is_waited_for(self, one: Scaled, instances: Sequence[InstanceStatus]) -> bool:
        serving = any(each.deployment == one.name and each.in_service for each in instances)
        return not serving and len(self._lane(one).dispatcher) > 0

    def _who_goes(self, one: Scaled, instances: Sequence[InstanceStatus], now: float) -> list[Scaled]:
        """Who must go so that there is a place: nobody, if somebody is leaving already, or if it would not help."""
        ask, fleet = self._lane(one).plan.desired.ask, self._controller.places.taken
        if ask is None or fleet is None:
            return []
        idle = [
            other
            for other in self._scaled.values()
            if other is not one and other.may_go(now) and not len(self._lane(other).dispatcher)
        ]
        idle.sort(key=lambda other: other.used_at)
        theirs = [(other.name, [each.id for each in instances if each.deployment == other.name]) for other in idle]
        leaving = [each.id for each in instances if each.phase in (Phase.DRAINING, Phase.STOPPING)]
        return [self._scaled[name] for name in who_makes_room(ask, fleet, leaving, theirs)]

    def _no_room(self, one: Scaled, homeless: Sequence[InstanceStatus], now: float) -> ScalingRecord:
        """How many have no place, why, and what would help. Told when they become more, and not all the time."""
        plan, fleet = self._lane(one).plan, self._controller.places.taken
        number = f"{len(homeless)} of {one.target} {'has' if len(homeless) == 1 else 'have'} no place"
        helps = ""
        if plan.desired.ask is not None and fleet is not None:
            desired = self._controller.desired
            helps = what_would_help(plan.desired.ask, fleet, desired.deployments.values() if desired else ())
        why = homeless[0].reason.removeprefix("no place: ")
        problem = "; ".join(filter(None, [f"{number}: {why}", helps]))
        return one.note("started as soon as there is room", now, problem)

    def _lane(self, one: Scaled) -> Lane:
        return self._traffic.lanes[one.name]


def _makes_room(other: Scaled, one: Scaled, now: float) -> tuple[ScalingRecord, ScalingRecord]:
    """One side of it, and the other."""
    why = f"makes room for {one.name}, for which a request waits; nobody was idle for longer"
    return other.give_way(why, now), one.note(f"{other.name}, which nobody uses, makes room for it", now)

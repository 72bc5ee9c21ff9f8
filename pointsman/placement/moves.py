"""Plans that make room for an instance that does not fit now. Nothing here is carried out.

Preemption stops instances of negative priority, if the ask may do that. Defragmentation moves instances to other
places, with the fewest moves. Both are tried out on a copy of the fleet.
"""

from collections.abc import Sequence
from itertools import combinations

import msgspec

from pointsman.placement.asks import Ask, Place
from pointsman.placement.fleet import Fleet, Occupant
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused
from pointsman.reasons import Reason

MAX_MOVES = 3
"""The search stops at plans with this many moves."""
MAX_TRIES = 1_000
"""Sets of instances that are tried before the search gives up."""


class PreemptionPlan(msgspec.Struct, frozen=True, eq=False):
    """The place that an ask gets if these instances are stopped."""

    placed: Placed
    victims: tuple[str, ...]

    @property
    def reason(self) -> Reason:
        return Reason("fits-after-stopping", {"instances": self.victims, "on": self.placed.place.workers})


class Move(msgspec.Struct, frozen=True):
    """An instance that moves."""

    instance_id: str
    before: Place
    after: Place


class DefragmentationPlan(msgspec.Struct, frozen=True, eq=False):
    """The place that an ask gets after these moves, in this order."""

    placed: Placed
    moves: tuple[Move, ...]

    @property
    def reason(self) -> Reason:
        moves = [
            {"instance": move.instance_id, "from": move.before.reason, "to": move.after.reason} for move in self.moves
        ]
        return Reason("fits-after-moving", {"moves": moves, "on": self.placed.place.workers})


def preempt(ask: Ask, fleet: Fleet) -> PreemptionPlan | None:
    """The instances of lowest priority, as few as suffice, that would have to stop for this ask; None if it may not
    preempt, or if that would not help."""
    if not ask.preempts:
        return None
    sheddable = [one for one in fleet.occupants.values() if one.priority < min(0, ask.priority)]
    sheddable.sort(key=lambda one: one.priority)  # of equals the oldest first
    scratch = fleet.copy()
    placer = Placer(scratch)
    stopped: list[Occupant] = []
    for one in sheddable:
        scratch.release(one.instance_id)
        stopped.append(one)
        if isinstance(placer.place(ask, traced=False), Placed):
            break
    else:
        return None
    for one in list(stopped):  # an instance that need not go comes back
        scratch.claim(one.instance_id, one.place, one.deployment, one.priority)
        if isinstance(placer.place(ask, traced=False), Refused):
            scratch.release(one.instance_id)
        else:
            stopped.remove(one)
    placed = placer.place(ask)
    assert isinstance(placed, Placed)
    return PreemptionPlan(placed, tuple(one.instance_id for one in stopped))


def defragment(ask: Ask, fleet: Fleet, asks: Sequence[Ask]) -> DefragmentationPlan | None:
    """The fewest moves off one worker that make room for this ask; None if there are none, or if too many are needed.

    `asks`: those of the instances that may move; all other instances stay where they are.
    """
    scratch = fleet.copy()
    placer = Placer(scratch)
    movable = {one.instance_id: one for one in asks if one.instance_id in fleet.occupants}
    here = {
        str(host): [movable[one.instance_id] for one in fleet.occupants.on(str(host)) if one.instance_id in movable]
        for host in fleet.workers
    }
    tries = 0
    for count in range(1, MAX_MOVES + 1):
        for worker, residents in here.items():
            for movers in combinations(residents, count):
                tries += 1
                if tries > MAX_TRIES:
                    return None
                found = _moved(ask, worker, movers, scratch, placer)
                if found is not None:
                    return found
    return None


def _moved(ask: Ask, worker: str, movers: Sequence[Ask], scratch: Fleet, placer: Placer) -> DefragmentationPlan | None:
    """The plan in which these instances move off this worker; None if it fails. The fleet is left as it was."""
    before = {one.instance_id: scratch.occupants[one.instance_id].place for one in movers}
    for instance_id in before:
        scratch.release(instance_id)
    placed = placer.place(msgspec.structs.replace(ask, workers=frozenset({worker})))
    moves: list[Move] = []
    if isinstance(placed, Placed):
        scratch.claim(ask.instance_id, placed.place, ask.deployment, ask.priority)
        for one in movers:
            again = placer.place(one, traced=False)
            if isinstance(again, Refused):
                break
            scratch.claim(one.instance_id, again.place, one.deployment, one.priority)
            moves.append(Move(one.instance_id, before[one.instance_id], again.place))
    scratch.release(ask.instance_id)
    for one in movers:
        scratch.release(one.instance_id)
        scratch.claim(one.instance_id, before[one.instance_id], one.deployment, one.priority)
    if isinstance(placed, Refused) or len(moves) < len(movers):
        return None
    return DefragmentationPlan(msgspec.structs.replace(placed, ask=ask), tuple(moves))

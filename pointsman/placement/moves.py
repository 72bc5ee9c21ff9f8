"""Making room: which running instances would have to go, or to move, for one that does not fit now.

These are plans, never done unasked.

Preemption stops instances of negative priority for an ask that may do that. Defragmentation moves instances to other
places, so that nobody is stopped for good; it looks for the fewest moves. Both are tried out on a copy of the fleet.
"""

from collections.abc import Sequence
from itertools import combinations

import msgspec

from pointsman.placement.asks import Ask, Place
from pointsman.placement.fleet import Fleet
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused

MOST_MOVES = 3
"""Plans with more moves than this are not looked for."""
MOST_TRIES = 1_000
"""Sets of instances that are tried out before it is given up."""


class Preemption(msgspec.Struct, frozen=True, eq=False):
    """A place that there would be if these instances were stopped."""

    placed: Placed
    victims: tuple[str, ...]


class Move(msgspec.Struct, frozen=True):
    """An instance that would go elsewhere."""

    instance_id: str
    before: Place
    after: Place


class Defragmentation(msgspec.Struct, frozen=True, eq=False):
    """A place that there would be after these moves, in their order."""

    placed: Placed
    moves: tuple[Move, ...]


def preempt(ask: Ask, fleet: Fleet) -> Preemption | None:
    """The least important instances, as few as will do, that would have to stop for this ask; None: it may not, or it
    would not help."""
    if not ask.preempts:
        return None
    sheddable = [one for one in fleet.instances() if fleet.priority_of(one) < min(0, ask.priority)]
    sheddable.sort(key=fleet.priority_of)  # of equals the oldest first, until it is seen who can stay
    scratch = fleet.copy()
    placer = Placer(scratch)
    stopped: list[tuple[str, Place]] = []
    for instance_id in sheddable:
        place = scratch.place_of(instance_id)
        assert place is not None
        scratch.release(instance_id)
        stopped.append((instance_id, place))
        if isinstance(placer.place(ask, traced=False), Placed):
            break
    else:
        return None
    for instance_id, place in list(stopped):  # whoever need not go comes back, the most important first
        scratch.claim(instance_id, place, fleet.deployment_of(instance_id), fleet.priority_of(instance_id))
        if isinstance(placer.place(ask, traced=False), Refused):
            scratch.release(instance_id)
        else:
            stopped.remove((instance_id, place))
    placed = placer.place(ask)
    assert isinstance(placed, Placed)
    return Preemption(placed, tuple(instance_id for instance_id, _ in stopped))


def defragment(ask: Ask, fleet: Fleet, asks: Sequence[Ask]) -> Defragmentation | None:
    """The fewest moves, off one worker, that make room for this ask; None: there are none, or too many are needed.

    `asks`: what the instances that may move once asked for. Whoever is not among them stays where it is.
    """
    scratch = fleet.copy()
    placer = Placer(scratch)
    movable = {one.instance_id: one for one in asks if fleet.place_of(one.instance_id) is not None}
    here = {
        str(host): [movable[one] for one in fleet.instances_on(str(host)) if one in movable] for host in fleet.workers
    }
    tries = 0
    for count in range(1, MOST_MOVES + 1):
        for worker, residents in here.items():
            for movers in combinations(residents, count):
                tries += 1
                if tries > MOST_TRIES:
                    return None
                found = _moved(ask, worker, movers, scratch, placer)
                if found is not None:
                    return found
    return None


def _moved(ask: Ask, worker: str, movers: Sequence[Ask], scratch: Fleet, placer: Placer) -> Defragmentation | None:
    """What becomes of it if these move off this worker; the fleet is left as it was."""
    before = {one.instance_id: scratch.place_of(one.instance_id) for one in movers}
    for instance_id in before:
        scratch.release(instance_id)
    placed = placer.place(msgspec.structs.replace(ask, workers=frozenset({worker})))
    moves: list[Move] = []
    if isinstance(placed, Placed):
        scratch.claim(ask.instance_id, placed.place, ask.deployment, ask.priority)
        for one in movers:
            again, was = placer.place(one, traced=False), before[one.instance_id]
            if isinstance(again, Refused) or was is None:
                break
            scratch.claim(one.instance_id, again.place, one.deployment, one.priority)
            moves.append(Move(one.instance_id, was, again.place))
    scratch.release(ask.instance_id)
    for one in movers:
        was = before[one.instance_id]
        scratch.release(one.instance_id)
        assert was is not None
        scratch.claim(one.instance_id, was, one.deployment, one.priority)
    if isinstance(placed, Refused) or len(moves) < len(movers):
        return None
    return Defragmentation(msgspec.structs.replace(placed, ask=ask), tuple(moves))

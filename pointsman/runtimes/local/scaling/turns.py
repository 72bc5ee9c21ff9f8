"""Taking turns on a machine that is too small for all: who makes room for a deployment that is waited for.

Nothing is claimed or released here: what would help is tried out on a copy of the fleet.
"""

from collections.abc import Iterable, Sequence

import msgspec

from pointsman.control.desired import DesiredDeployment
from pointsman.placement.asks import Ask
from pointsman.placement.fleet import Fleet
from pointsman.placement.hints import hints
from pointsman.placement.moves import defragment
from pointsman.placement.placer import Placed, Placer

TRIAL = "a-trial"
MOST_HINTS = 2


class MayGo(msgspec.Struct, frozen=True):
    """A deployment that nobody uses, or one instance of a deployment that is used."""

    deployment: str
    instances: tuple[str, ...]
    is_used: bool = False


def who_makes_room(ask: Ask, fleet: Fleet, leaving: Iterable[str], candidates: Sequence[MayGo]) -> list[MayGo]:
    """The fewest that would have to go, of those that may, which stand in the order in which they would. Empty: nobody
    need go, as there will be room when those `leaving` have left; or it would not help."""
    scratch = fleet.copy()
    for instance_id in leaving:
        scratch.release(instance_id)
    placer, ask = Placer(scratch), msgspec.structs.replace(ask, instance_id=TRIAL)
    gone: list[MayGo] = []
    for candidate in candidates:
        if _fits(ask, placer):
            break
        for instance_id in candidate.instances:
            scratch.release(instance_id)
        gone.append(candidate)
    return _needed(ask, fleet, scratch, gone) if _fits(ask, placer) else []


def _needed(ask: Ask, fleet: Fleet, scratch: Fleet, gone: Sequence[MayGo]) -> list[MayGo]:
    """Without those who need not go after all: the last come back first."""
    needed, placer = list(gone), Placer(scratch)
    for candidate in reversed(gone):
        back = {one: place for one in candidate.instances if (place := fleet.place_of(one)) is not None}
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


def what_would_help(ask: Ask, fleet: Fleet, deployments: Iterable[DesiredDeployment]) -> str:
    """In a few words; empty: nothing that we know of."""
    asks = {one.name: one.ask for one in deployments if one.ask is not None}
    movable = [
        msgspec.structs.replace(asks[owner], instance_id=instance_id)
        for instance_id in fleet.instances()
        if (owner := fleet.deployment_of(instance_id)) in asks
    ]
    ask = msgspec.structs.replace(ask, instance_id=TRIAL)
    told = [hint.words for hint in hints(ask, Placer(fleet.copy())) if hint.ask is not None][:MOST_HINTS]
    found = defragment(ask, fleet, movable)
    if found is not None:
        moves = ", ".join(f"{move.instance_id} from {move.before} to {move.after}" for move in found.moves)
        told.append(f"there would be room if these moved: {moves}")
    return "; ".join(told)

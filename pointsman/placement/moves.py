"""Plans that make room for an instance that does not fit now. The plans are not carried out here.

Preemption stops instances of negative priority, if the ask allows that. Defragmentation moves instances to other
places, with the fewest moves. Both are tried out on a copy of the fleet.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import msgspec

from pointsman.placement.asks import Arrangement, Ask, Place, Tier
from pointsman.placement.fleet import INSTANCES, Fleet, Occupant
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused
from pointsman.reasons import Reason
from pointsman.selection import Cycle, Profile, ProfileFailure, Roster, Trace
from pointsman.selection.profile import Ranked

MAX_MOVES = 3
"""Maximum number of moves in a plan."""
MAX_TRIES = 1_000
"""Maximum number of sets of instances to try before the search gives up."""


class PreemptionPlan(msgspec.Struct, frozen=True, eq=False):
    """The place that an ask gets if these instances are stopped."""

    placed: Placed
    victims: tuple[str, ...]

    @property
    def reason(self) -> Reason:
        return Reason("fits-after-stopping", {"instances": self.victims, "on": self.placed.place.workers})


class Move(msgspec.Struct, frozen=True):
    instance_id: str
    before: Place
    after: Place


class DefragmentationPlan(msgspec.Struct, frozen=True, eq=False):
    """The place that an ask gets after these moves, in this order."""

    placed: Placed
    moves: tuple[Move, ...]

    @property
    def reason(self) -> Reason:
        moves = [{"instance": one.instance_id, "from": one.before.reason, "to": one.after.reason} for one in self.moves]
        return Reason("fits-after-moving", {"moves": moves, "on": self.placed.place.workers})


def preempt(ask: Ask, fleet: Fleet) -> PreemptionPlan | None:
    """The instances of lowest priority, as few as suffice, that would have to stop for this ask; None if the ask
    may not preempt, or if that would not help."""
    if not ask.preempts:
        return None
    sheddable = [one for one in fleet.occupants.values() if one.priority < min(0, ask.priority)]
    sheddable.sort(key=lambda one: one.priority)  # on a tie, the oldest comes first
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
    for one in list(stopped):  # put back instances that can stay
        scratch.claim(one.instance_id, one.place, one.deployment, one.priority)
        if isinstance(placer.place(ask, traced=False), Refused):
            scratch.release(one.instance_id)
        else:
            stopped.remove(one)
    placed = placer.place(ask)
    assert isinstance(placed, Placed)
    return PreemptionPlan(placed, tuple(one.instance_id for one in stopped))


def defragment(ask: Ask, fleet: Fleet, asks: Sequence[Ask]) -> DefragmentationPlan | None:
    """The fewest moves off one worker that make room for this ask; None if no moves help, or if too many are needed.

    `asks` has the asks of all instances that may move. All other instances stay where they are. So do instances that
    were put on workers or GPUs by hand. No instance moves to a worse tier.
    """
    scratch = fleet.copy()
    placer = Placer(scratch)
    pinned = ask.workers or {worker for worker, _ in ask.gpus}
    free_to_move = (one for one in asks if not one.workers and not one.gpus)
    movable = {one.instance_id: one for one in free_to_move if one.instance_id in fleet.occupants}
    here = {
        str(host): [movable[one.instance_id] for one in fleet.occupants.on(str(host)) if one.instance_id in movable]
        for host in fleet.workers
        if not pinned or str(host) in pinned
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
            if isinstance(again, Refused) or _rank(again.place) > _rank(before[one.instance_id]):
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


def _rank(place: Place) -> int:
    return list(Tier).index(place.tier)


# Which instances to stop when there are too many: the selection kernel with instances as candidates.
#
# Unhealthy instances go first, then those that are wholly or partly on a CPU, then those whose removal leaves a better
# fleet: when spreading, those on the most crowded worker; when packing, those on the emptiest. On a tie, the instance
# with the least in its cache goes, then the newest.


class Candidate(msgspec.Struct, frozen=True, eq=False):
    instance_id: str
    place: Place | None
    """The place of the instance; None if it was not placed."""
    healthy: bool
    warmth: float = 0.0
    """How much the instance has in its cache."""

    def __str__(self) -> str:
        return self.instance_id


Candidates = Roster[Candidate]
_SLOWNESS = {Tier.PARTIAL_OFFLOAD: 0.5, Tier.CPU: 1.0}


class IsUnhealthy:
    """Prefers instances that are not healthy."""

    bounded = True

    def scores(self, cycle: Cycle[Fleet], candidates: Candidates) -> list[float]:
        return [float(not one.healthy) for one in candidates]


class IsOffloaded:
    """Prefers instances that are not entirely on GPUs: they are the slowest."""

    bounded = True

    def scores(self, cycle: Cycle[Fleet], candidates: Candidates) -> list[float]:
        return [_SLOWNESS.get(one.place.tier, 0.0) if one.place is not None else 0.0 for one in candidates]


class IsCrowded:
    """Prefers instances on workers with many others or, with `emptiest`, with few."""

    bounded = True

    def __init__(self, *, emptiest: bool = False) -> None:
        self._emptiest = emptiest

    def scores(self, cycle: Cycle[Fleet], candidates: Candidates) -> list[float]:
        fleet = cycle.request
        counts = fleet.workers.columns[INSTANCES]
        crowds = [
            max((float(counts[fleet[name].row]) for name in one.place.workers), default=0.0)
            if one.place is not None
            else 0.0
            for one in candidates
        ]
        most = max(crowds, default=0.0) or 1.0
        return [1.0 - crowd / most if self._emptiest else crowd / most for crowd in crowds]


class IsCold:
    """Prefers instances with little in their caches."""

    bounded = True

    def scores(self, cycle: Cycle[Fleet], candidates: Candidates) -> list[float]:
        most = max((one.warmth for one in candidates), default=0.0)
        return [1.0 - one.warmth / most if most > 0 else 0.0 for one in candidates]


class NewestBest:
    """Picks the highest totals. On a tie, picks the last."""

    def __init__(self, count: int) -> None:
        self._count = count

    def pick(self, cycle: Cycle[Fleet], ranked: Ranked[Candidate]) -> Sequence[Candidate]:
        order = sorted(range(len(ranked)), key=lambda at: (-ranked.totals[at], -at))
        return [ranked.candidates[at] for at in order[: self._count]]


def victims(
    fleet: Fleet,
    instances: Sequence[str],
    count: int,
    *,
    unhealthy: Collection[str] = (),
    arrangement: Arrangement = Arrangement.BINPACK,
    warmth: Mapping[str, float] | None = None,
    trace: Trace | None = None,
) -> list[str]:
    """`count` of these instances, chosen one after the other. The instances are given with the oldest first."""
    left, gone = list(instances), list[str]()
    scratch = fleet.copy()
    crowded = IsCrowded(emptiest=arrangement is Arrangement.BINPACK)
    profile: Profile[Candidate] = Profile(
        "victims", (IsUnhealthy(), 100.0), (IsOffloaded(), 10.0), (crowded, 1.0), (IsCold(), 0.001), NewestBest(1)
    )
    for _ in range(min(count, len(left))):
        candidates = [
            Candidate(
                one,
                scratch.occupants[one].place if one in scratch.occupants else None,
                one not in unhealthy,
                (warmth or {}).get(one, 0.0),
            )
            for one in left
        ]
        run = profile.run(Cycle(scratch, trace=trace), Roster(candidates, arrays=False))
        assert not isinstance(run, ProfileFailure), "no filter rejects"
        victim = run.targets[0].instance_id
        scratch.release(victim)
        left.remove(victim)
        gone.append(victim)
    return gone

"""Which instances to stop when there are too many: the selection kernel with instances as candidates.

Unhealthy instances go first, then those on a CPU or partly on one, then those whose removal leaves the better fleet:
when spreading on the most crowded worker, when packing on the emptiest. Of equals the one with the least in its cache
goes, then the newest.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from pointsman.placement.asks import Arrangement, Place, Tier
from pointsman.placement.fleet import INSTANCES, Fleet
from pointsman.selection import Cycle, Profile, ProfileFailure, Roster, Trace
from pointsman.selection.profile import Ranked


class Candidate(msgspec.Struct, frozen=True, eq=False):
    """An instance that may be stopped."""

    instance_id: str
    place: Place | None
    """None if it was not placed."""
    healthy: bool
    warmth: float = 0.0
    """How much it has in its cache."""

    def __str__(self) -> str:
        return self.instance_id


Candidates = Roster[Candidate]


class IsUnhealthy:
    """Prefers instances that are not healthy."""

    bounded = True

    def scores(self, cycle: Cycle[Fleet], candidates: Candidates) -> list[float]:
        return [float(not one.healthy) for one in candidates]


class IsOffloaded:
    """Prefers instances that are not entirely on GPUs: they are the slowest."""

    bounded = True

    def scores(self, cycle: Cycle[Fleet], candidates: Candidates) -> list[float]:
        return [_SLOWNESS[one.place.tier] if one.place is not None else 0.0 for one in candidates]


class IsCrowded:
    """Prefers instances on workers with many others; with `emptiest`, with few."""

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
    """The highest totals; of equals the last."""

    def __init__(self, count: int) -> None:
        self._count = count

    def pick(self, cycle: Cycle[Fleet], ranked: Ranked[Candidate]) -> Sequence[Candidate]:
        order = sorted(range(len(ranked)), key=lambda at: (-ranked.totals[at], -at))
        return [ranked.candidates[at] for at in order[: self._count]]


_SLOWNESS = {
    Tier.ONE_GPU: 0.0,
    Tier.SEVERAL_GPUS: 0.0,
    Tier.SEVERAL_WORKERS: 0.0,
    Tier.PARTIAL_OFFLOAD: 0.5,
    Tier.CPU: 1.0,
}


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
    """`count` of these instances (given oldest first), chosen one after the other."""
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

"""Who goes when there should be fewer: the same kernel with instances as candidates.

Unhealthy ones first, those that are partly on a CPU before those that are not, then whoever leaves the better fleet
behind: when spreading the one on the most crowded worker, when packing the one on the emptiest. Of equals the one with
the least in its cache goes, and of those the newest.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from pointsman.placement.asks import Arrangement, Place, Tier
from pointsman.placement.fleet import INSTANCES, Fleet
from pointsman.selection import Cycle, Profile, ProfileFailure, Roster, Trace
from pointsman.selection.profile import Ranked


class Candidate(msgspec.Struct, frozen=True, eq=False):
    """An instance that might go."""

    instance_id: str
    place: Place | None
    """None: it has no place of ours."""
    healthy: bool
    warmth: float = 0.0
    """How much it has in its cache."""

    def __str__(self) -> str:
        return self.instance_id


Candidates = Roster[Candidate]


class IsUnhealthy:
    """Prefers to lose instances that serve nobody."""

    bounded = True

    def scores(self, cycle: Cycle[Fleet], candidates: Candidates) -> list[float]:
        return [float(not one.healthy) for one in candidates]


class IsOffloaded:
    """Prefers to lose instances that are not on GPUs as a whole: they are the slowest."""

    bounded = True

    def scores(self, cycle: Cycle[Fleet], candidates: Candidates) -> list[float]:
        return [_SLOWNESS[one.place.tier] if one.place is not None else 0.0 for one in candidates]


class IsCrowded:
    """Prefers to lose instances on workers with many others; or, turned round, with few."""

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
    """Prefers to lose instances with little in their caches."""

    bounded = True

    def scores(self, cycle: Cycle[Fleet], candidates: Candidates) -> list[float]:
        most = max((one.warmth for one in candidates), default=0.0)
        return [1.0 - one.warmth / most if most > 0 else 0.0 for one in candidates]


class NewestBest:
    """The highest totals; of equals the last."""

    def __init__(self, most: int) -> None:
        self.most = most

    def pick(self, cycle: Cycle[Fleet], ranked: Ranked[Candidate]) -> Sequence[Candidate]:
        order = sorted(range(len(ranked)), key=lambda at: (-ranked.totals[at], -at))
        return [ranked.candidates[at] for at in order[: self.most]]


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
    """So many of these instances (oldest first), chosen to go one after the other."""
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
        assert not isinstance(run, ProfileFailure), "nobody is turned away"
        victim = run.targets[0].instance_id
        scratch.release(victim)
        left.remove(victim)
        gone.append(victim)
    return gone

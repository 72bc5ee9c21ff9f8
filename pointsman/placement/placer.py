"""The placer turns an ask into a place or a refusal, with everything that was considered.

    labels -> status -> by hand -> engine -> room in a tier -> scores -> the best
                                               |
                                            no worker: the next tier

`place` claims nothing. The same fleet and the same ask give the same answer: on a tie, the first is taken.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from pointsman.placement.asks import Arrangement, Ask, Place
from pointsman.placement.devices import Devices, Mask
from pointsman.placement.filters import (
    ChosenByHand,
    IsReady,
    MatchesLabels,
    SuitsEngine,
    knows_a_choice,
    unknown_choice,
)
from pointsman.placement.fit import (
    FitsOnCpu,
    FitsOnOneGpu,
    FitsOnSeveralGpus,
    FitsOnSeveralWorkers,
    FitsPartly,
    ResourceFit,
    RoomInTier,
    TierFit,
)
from pointsman.placement.fleet import Fleet, Host
from pointsman.placement.fragmentation import Fragmentation, Workload
from pointsman.placement.overcommit import overcommitted
from pointsman.placement.refusals import Refused, RefusedTier
from pointsman.placement.scorers import (
    Apart,
    FilesAreThere,
    Fullest,
    LeastUsed,
    NearTo,
    SparesCapable,
    SpoilsLeast,
    TierQuality,
    TightFit,
)
from pointsman.placement.workload import LearnedWorkload
from pointsman.reasons import Reason
from pointsman.selection import Cycle, Profile, ProfileResult, RejectedEach, Trace, Weighted, plugin_name
from pointsman.selection.arrays import np
from pointsman.selection.profile import Ranked

TIERS: tuple[type[ResourceFit], ...] = (FitsOnOneGpu, FitsOnSeveralGpus, FitsOnSeveralWorkers, FitsPartly, FitsOnCpu)
RUNNER_UPS = 4
MAX_ASKED = 100_000
"""Maximum number of instances whose asks are remembered."""


class Placed(msgspec.Struct, frozen=True, eq=False):
    """A place for an ask, and the next best workers."""

    ask: Ask
    place: Place
    score: float
    runner_ups: tuple[tuple[str, float], ...] = ()
    """(worker, score) for the next best workers in the same tier."""
    overcommitted: Reason | None = None
    """If the instance was placed although it does not fit, the reason why it does not fit."""
    trace: Trace | None = None


class FirstBest:
    """Picks the candidate with the highest total. On a tie, picks the first."""

    def pick(self, cycle: Cycle[Any], ranked: Ranked[Host]) -> Sequence[Host]:
        return (ranked.candidates[int(np.argmax(ranked.totals))],)


class Placer:
    """Finds places in one fleet."""

    def __init__(self, fleet: Fleet, workload: Workload | None = None, learned: LearnedWorkload | None = None) -> None:
        """`workload` has the expected asks, for which packing keeps room. Without it, the workload is learned from the
        asks that are taken, and from the asks that `learned` has already counted."""
        self.fleet = fleet
        self.learned = LearnedWorkload() if learned is None and workload is None else learned
        self._given = workload
        self._asked: dict[str, None] = {}
        """Instances whose asks were counted, oldest first."""
        self._version = -1 if self.learned is None else self.learned.version
        self._fragmentation = self._fragmentation_of(self.workload)
        self._devices: Devices | None = None
        self._admission = Profile[Host](
            "admission", MatchesLabels(), IsReady(), ChosenByHand(), SuitsEngine(), FirstBest()
        )
        self._tiers = {kind: self._profiles(kind) for kind in Arrangement}

    def place(self, ask: Ask, *, traced: bool = True) -> Placed | Refused:
        """Where this instance should go in the present fleet. Nothing is claimed."""
        unknown = None if knows_a_choice(self.fleet, ask) else unknown_choice(self.fleet, ask)
        if unknown is not None:
            return self._unknown(ask, unknown)
        self._follow()
        admission = Trace()
        trace = admission if traced else None
        admitted = self._admission.run(Cycle(ask, trace=admission), self.fleet.workers)
        not_considered = [rejected for _, rejected in admission.profiles[0].stages]
        refused: list[RefusedTier] = []
        if isinstance(admitted, ProfileResult):
            candidates = admitted.ranked.candidates
            for tier, profile in self._in_order(ask):
                fit = tier.among(ask, candidates)
                run = profile.run(Cycle(fit, trace=trace), candidates)
                if isinstance(run, ProfileResult):
                    return _placed(fit, run, trace)
                [(_, rejected)] = run.stages
                refused.append(RefusedTier(tier.tier, rejected, fit.forbidden))
        outcome = Refused(ask, not_considered, refused, trace)
        place = overcommitted(ask, self.fleet, self.devices(), self.admitted(ask)) if ask.overcommit else None
        return outcome if place is None else Placed(ask, place, 0.0, (), outcome.reason, trace)

    @property
    def workload(self) -> Workload | None:
        """The workload that packing keeps room for; None if it is not known yet."""
        return self._given if self.learned is None else self.learned.workload

    def _fragmentation_of(self, workload: Workload | None) -> Fragmentation | None:
        return None if workload is None else Fragmentation(self.fleet, workload, self.devices)

    def _follow(self) -> None:
        """Switch to the newest learned workload."""
        if self.learned is not None and self.learned.version != self._version:
            self._version = self.learned.version
            self._fragmentation = self._fragmentation_of(self.learned.workload)
            self._tiers[Arrangement.BINPACK] = self._profiles(Arrangement.BINPACK)

    def _learn(self, ask: Ask) -> None:
        """Count the ask of an instance. If its placement is tried again, the ask is not counted again."""
        if self.learned is None or ask.instance_id in self._asked:
            return
        self._asked[ask.instance_id] = None
        if len(self._asked) > MAX_ASKED:
            del self._asked[next(iter(self._asked))]
        self.learned.saw(ask)

    def take(self, ask: Ask, missing: int = 1) -> Placed | Refused:
        """Find a place for this instance and claim it. If the ask is all or nothing, there must be room for all
        `missing` instances of its deployment, including this one. Every worker or GPU chosen by hand must exist or have
        existed. A wrong name is an error, even next to a correct name."""
        if ask.all_or_nothing and missing > 1:
            trial = Placer(self.fleet.copy(), self.workload)
            for number in range(missing):
                outcome = trial.take(msgspec.structs.replace(ask, instance_id=f"{number}", all_or_nothing=False))
                if isinstance(outcome, Refused):
                    return msgspec.structs.replace(outcome, ask=ask)
        self._learn(ask)
        unknown = unknown_choice(self.fleet, ask)
        outcome = self.place(ask) if unknown is None else self._unknown(ask, unknown)
        if isinstance(outcome, Placed):
            self.fleet.claim(ask.instance_id, outcome.place, ask.deployment, ask.priority)
        return outcome

    def _unknown(self, ask: Ask, why: Reason) -> Refused:
        return Refused(ask, [RejectedEach(self.fleet.workers, np.arange(len(self.fleet)), lambda _: why)])

    def admitted(self, ask: Ask) -> Mask:
        """The workers that the ask may be on, by row, whether or not they have room."""
        run = self._admission.run(Cycle(ask), self.fleet.workers)
        among = np.zeros(len(self.fleet), dtype=bool)
        if isinstance(run, ProfileResult):
            among[[host.row for host in run.ranked.candidates]] = True
        return among

    def devices(self) -> Devices:
        """The GPUs, in the present numbering of the fleet."""
        if self._devices is None or self._devices.generation != self.fleet.generation:
            self._devices = Devices(self.fleet)
        return self._devices

    def _in_order(self, ask: Ask) -> list[tuple[ResourceFit, Profile[Host]]]:
        """The tiers in the order that the ask lists. Unlisted tiers come last, with that as the reason."""
        usual, listed = self._tiers[ask.arrangement], ask.tiers
        if not listed:
            return usual
        return sorted(usual, key=lambda one: listed.index(one[0].tier) if one[0].tier in listed else len(listed))

    def _profiles(self, kind: Arrangement) -> list[tuple[ResourceFit, Profile[Host]]]:
        """The tiers in order, each with the profile that ranks the workers that fit."""
        fleet, fragmentation = self.fleet, self._fragmentation if kind is Arrangement.BINPACK else None
        # Each leading scorer outweighs all that follow. In `TierQuality` and `Apart`, the best lead by at least a half.
        # In `SpoilsLeast`, the smallest step among 10,000 workers is 1e-4.
        scorers: tuple[object, ...]
        if kind is Arrangement.SPREAD:
            scorers = (FilesAreThere(), 1.0), (TierQuality(), 200.0), (NearTo(fleet), 50.0)
            scorers = (*scorers, (Apart(fleet), 600.0), (LeastUsed(fleet), 10.0))
        else:
            scorers = (FilesAreThere(), 1.0), (TightFit(), 10.0), (Fullest(fleet), 0.01)
            if fragmentation is None:
                leading: tuple[object, ...] = (
                    (TierQuality(), 400.0),
                    (NearTo(fleet), 160.0),
                    (SparesCapable(fleet), 60.0),
                )
            else:
                leading = (NearTo(fleet), 1e10), (SparesCapable(fleet), 1e9), (TierQuality(), 1e6)
                leading = (*leading, (SpoilsLeast(fragmentation), 2e5))
            scorers = (*leading, *scorers)
        found = []
        for tier in (tier(fleet, self.devices, fragmentation) for tier in TIERS):
            room = Weighted(RoomInTier(), name=plugin_name(tier))
            found.append((tier, Profile[Host](tier.tier.value, room, *scorers, FirstBest())))
        return found


def _placed(fit: TierFit, run: ProfileResult[Host], trace: Trace | None) -> Placed:
    place = msgspec.structs.replace(fit.place(run.targets[0]), context=fit.ask.need.context)
    totals = np.asarray(run.ranked.totals)
    best, *others = np.argsort(-totals, kind="stable")[: RUNNER_UPS + 1].tolist()
    runner_ups = tuple((str(run.ranked.candidates[at]), float(totals[at])) for at in others)
    return Placed(fit.ask, place, float(totals[best]), runner_ups, trace=trace)

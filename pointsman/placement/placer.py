"""The placer: an ask in, a place or a refusal out, with everything that was considered.

    labels -> status -> by hand -> engine -> room in a tier -> scores -> the best
                                               |
                                            no worker: the next tier

`place` claims nothing. The same fleet and the same ask give the same answer: of equals the first is taken.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from pointsman.placement.asks import Arrangement, Ask, Claim, Place, Tier
from pointsman.placement.devices import Devices, Mask
from pointsman.placement.filters import ChosenByHand, IsReady, MatchesLabels, SuitsEngine
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
from pointsman.placement.fit.base import claims_of
from pointsman.placement.fleet import FREE_MEMORY, Fleet, Host
from pointsman.placement.fragmentation import Fragmentation, Workload
from pointsman.placement.refusals import Refused, RefusedTier
from pointsman.placement.scorers import (
    Apart,
    FilesAreThere,
    Fullest,
    LeastClaimed,
    NearTo,
    SpoilsLeast,
    TierQuality,
    TightFit,
)
from pointsman.reasons import Reason
from pointsman.selection import Cycle, Profile, ProfileResult, Trace, Weighted, plugin_name
from pointsman.selection.arrays import np
from pointsman.selection.profile import Ranked

TIERS: tuple[type[ResourceFit], ...] = (FitsOnOneGpu, FitsOnSeveralGpus, FitsOnSeveralWorkers, FitsPartly, FitsOnCpu)
RUNNER_UPS = 4


class Placed(msgspec.Struct, frozen=True, eq=False):
    """A place for an ask, and the next best workers."""

    ask: Ask
    place: Place
    score: float
    runner_ups: tuple[tuple[str, float], ...] = ()
    """(worker, score) of the next best in the same tier."""
    overcommitted: Reason | None = None
    """Why it does not fit, if it was placed nevertheless."""
    trace: Trace | None = None


class FirstBest:
    """The highest total; of equals the first."""

    def pick(self, cycle: Cycle[Any], ranked: Ranked[Host]) -> Sequence[Host]:
        return (ranked.candidates[int(np.argmax(ranked.totals))],)


class Placer:
    """Finds places in one fleet."""

    def __init__(self, fleet: Fleet, workload: Workload | None = None) -> None:
        """`workload`: the asks to expect; packing keeps room for them."""
        self.fleet = fleet
        self._fragmentation = None if workload is None else Fragmentation(fleet, workload, self.devices)
        self._devices: Devices | None = None
        self._admission = Profile[Host](
            "admission", MatchesLabels(), IsReady(), ChosenByHand(), SuitsEngine(), FirstBest()
        )
        self._tiers = {kind: self._profiles(kind) for kind in Arrangement}

    def place(self, ask: Ask, *, traced: bool = True) -> Placed | Refused:
        """Where this instance should go, as things stand. Nothing is claimed."""
        admission = Trace()
        trace = admission if traced else None
        admitted = self._admission.run(Cycle(ask, trace=admission), self.fleet.workers)
        not_considered = [rejected for _, rejected in admission.profiles[0].stages]
        refused: list[RefusedTier] = []
        if isinstance(admitted, ProfileResult):
            candidates = admitted.ranked.candidates
            for tier, profile in self._tiers[ask.arrangement]:
                fit = tier.among(ask, candidates)
                run = profile.run(Cycle(fit, trace=trace), candidates)
                if isinstance(run, ProfileResult):
                    return _placed(fit, run, trace)
                [(_, rejected)] = run.stages
                refused.append(RefusedTier(tier.tier, rejected, fit.forbidden))
        outcome = Refused(ask, not_considered, refused, trace)
        place = self._overcommitted(ask) if ask.overcommit else None
        return outcome if place is None else Placed(ask, place, 0.0, (), outcome.reason, trace)

    def take(self, ask: Ask, missing: int = 1) -> Placed | Refused:
        """A place for this instance, claimed. If the ask is all or nothing, there must be room for all `missing`
        instances of its deployment, this one included."""
        if ask.all_or_nothing and missing > 1:
            trial = Placer(self.fleet.copy())
            for number in range(missing):
                outcome = trial.take(msgspec.structs.replace(ask, instance_id=f"{number}", all_or_nothing=False))
                if isinstance(outcome, Refused):
                    return msgspec.structs.replace(outcome, ask=ask)
        outcome = self.place(ask)
        if isinstance(outcome, Placed):
            self.fleet.claim(ask.instance_id, outcome.place, ask.deployment, ask.priority)
        return outcome

    def admitted(self, ask: Ask) -> Mask:
        """The workers that it may be on, whether there is room or not, by row."""
        run = self._admission.run(Cycle(ask), self.fleet.workers)
        among = np.zeros(len(self.fleet), dtype=bool)
        if isinstance(run, ProfileResult):
            among[[host.row for host in run.ranked.candidates]] = True
        return among

    def devices(self) -> Devices:
        """The GPUs as they are numbered now."""
        if self._devices is None or self._devices.generation != self.fleet.generation:
            self._devices = Devices(self.fleet)
        return self._devices

    def _profiles(self, kind: Arrangement) -> list[tuple[ResourceFit, Profile[Host]]]:
        """The tiers in order, each with the profile that ranks the workers that fit."""
        fleet, fragmentation = self.fleet, self._fragmentation if kind is Arrangement.BINPACK else None
        # The best of `TierQuality` and of `Apart` lead by at least a half. With these weights no other score outweighs
        # a layer on the GPU, and when spreading not even that outweighs a worker without a sibling.
        scorers: tuple[object, ...] = (TierQuality(), 200.0), (NearTo(fleet), 50.0), (FilesAreThere(), 1.0)
        if kind is Arrangement.BINPACK:
            scorers = (*scorers, (TightFit(), 10.0), (Fullest(fleet), 2.0))
            if fragmentation is not None:
                # It ranks: the smallest step among 10,000 workers outweighs all but `TierQuality`.
                scorers = (*scorers[1:], (TierQuality(), 4e6), (SpoilsLeast(fragmentation), 1e6))
        else:
            scorers = (*scorers, (Apart(fleet), 600.0), (LeastClaimed(), 10.0))
        found = []
        for tier in (tier(fleet, self.devices, fragmentation) for tier in TIERS):
            room = Weighted(RoomInTier(), name=plugin_name(tier))
            found.append((tier, Profile[Host](tier.tier.value, room, *scorers, FirstBest())))
        return found

    def _overcommitted(self, ask: Ask) -> Place | None:
        """A place without enough room, on a worker that the ask may be on: on the GPUs with the most left, as few as
        possible, or on the worker with the most memory left. Exclusive GPUs stay exclusive. None if the ask may have no
        worker or GPU at all."""
        devices, admitted, fleet = self.devices(), self.admitted(ask), self.fleet
        able, free = devices.able(ask) & admitted[devices.workers], devices.free(ask)
        for size in ask.tensor_parallel_sizes[:1]:
            kinds = devices.kinds(able, mixed=ask.mixed_gpus)
            fullest = [-devices.by_worker.nth_smallest(np.where(kind, -free, np.inf), size) for kind in kinds]
            best = max(zip(fullest, kinds, strict=True), key=lambda option: float(option[0].max()), default=None)
            if best is None or not np.isfinite(best[0].max()):
                continue
            host = fleet.workers[int(np.argmax(best[0]))]
            mine = [device for device in host.devices if best[1][device.row]]
            chosen = sorted(mine, key=lambda device: (-float(free[device.row]), device.row))[:size]
            return Place(
                tier=Tier.ONE_GPU if size == 1 else Tier.SEVERAL_GPUS,
                claims=claims_of(ask, chosen, ask.need.gpu_bytes(size)),
                tensor_parallel_size=size,
                overcommitted=True,
            )
        if (ask.engine.needs_gpu and not ask.cpu) or not admitted.any():
            return None
        memory = np.where(admitted, fleet.workers.columns[FREE_MEMORY], -np.inf)
        claim = Claim(worker=str(fleet.workers[int(np.argmax(memory))]), cpus=ask.cpus, memory_bytes=ask.need.cpu_bytes)
        return Place(tier=Tier.CPU, claims=(claim,), gpu_layers=0, overcommitted=True)


def _placed(fit: TierFit, run: ProfileResult[Host], trace: Trace | None) -> Placed:
    place = msgspec.structs.replace(fit.place(run.targets[0]), context=fit.ask.need.context)
    totals = np.asarray(run.ranked.totals)
    best, *others = np.argsort(-totals, kind="stable")[: RUNNER_UPS + 1].tolist()
    runner_ups = tuple((str(run.ranked.candidates[at]), float(totals[at])) for at in others)
    return Placed(fit.ask, place, float(totals[best]), runner_ups, trace=trace)

"""The placer: an ask in, a place or a refusal out, with everything that was considered.

    labels -> status -> by hand -> engine -> room in a tier -> scores -> the best
                                               |
                                            nobody: the next tier

Nothing is claimed by looking. The same fleet and the same ask give the same answer: equals go to the first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from pointsman.placement.asks import Arrangement, Ask, Claim, Place, Tier
from pointsman.placement.devices import Devices
from pointsman.placement.filters import AskCycle, ChosenByHand, IsReady, MatchesLabels, SuitsEngine
from pointsman.placement.fit import (
    FIT,
    FitFilter,
    FitsOnCpu,
    FitsOnOneGpu,
    FitsOnSeveralGpus,
    FitsOnSeveralWorkers,
    FitsPartly,
)
from pointsman.placement.fit.base import Mask, claims_of
from pointsman.placement.fleet import FREE_MEMORY, Fleet, Host
from pointsman.placement.fragmentation import Fragmentation
from pointsman.placement.refusals import Refused
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
from pointsman.placement.workload import Workload
from pointsman.selection import (
    Cycle,
    FallbackProfileHandler,
    Profile,
    ProfileFailure,
    ProfileResult,
    Scheduler,
    SchedulingFailure,
    SchedulingResult,
    Trace,
)
from pointsman.selection.arrays import np
from pointsman.selection.profile import Ranked
from pointsman.selection.scheduler import failed

# A place although there is no room: only for who asks for it, and then it is said.


def overcommitted(ask: Ask, fleet: Fleet, devices: Devices, admitted: Mask) -> Place | None:
    """On the GPUs with the most left, as few as may be, or on the worker with the most memory left; of workers that it
    may be on. Who has a GPU alone keeps it; None: there is nothing that it may have."""
    able, free = devices.able(ask) & admitted[devices.workers], devices.free(ask)
    for size in ask.tensor_parallel_sizes[:1]:
        kinds = devices.kinds(able, mixed=ask.mixed_gpus)
        fullest = [-devices.nth_smallest(np.where(kind, -free, np.inf), size) for kind in kinds]
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


C = TypeVar("C")

TIERS: tuple[type[FitFilter], ...] = (
    FitsOnOneGpu,
    FitsOnSeveralGpus,
    FitsOnSeveralWorkers,
    FitsPartly,
    FitsOnCpu,
)
RUNNER_UPS = 4


class Placed(msgspec.Struct, frozen=True, eq=False):
    """A place for an ask, and who else might have had it."""

    ask: Ask
    place: Place
    score: float
    runner_ups: tuple[tuple[str, float], ...] = ()
    """(worker, score) of the next best in the same tier."""
    trace: Trace | None = None


class FirstBest:
    """The highest total; of equals the first."""

    def pick(self, cycle: Cycle[Any], ranked: Ranked[Host]) -> Sequence[Host]:
        return (ranked.candidates[int(np.argmax(ranked.totals))],)


class TierByTier(FallbackProfileHandler):
    """Tries the tiers in their order; if none will do, the failures of all of them are told."""

    def process_results(
        self, cycle: Cycle[Any], results: Mapping[str, ProfileResult[C] | ProfileFailure[C]]
    ) -> SchedulingResult[C] | SchedulingFailure[C]:
        failures = failed(results)
        return (
            super().process_results(cycle, results) if len(failures) < len(results) else SchedulingFailure("", failures)
        )


class Placer:
    """Finds places in one fleet."""

    def __init__(self, fleet: Fleet, workload: Workload | None = None) -> None:
        """`workload`: what is usually asked; with it, packing keeps the room whole that is good for that."""
        self.fleet = fleet
        self._fragmentation = None if workload is None else Fragmentation(fleet, workload, self.devices)
        self._devices: Devices | None = None
        self._demands = (MatchesLabels(), IsReady(), ChosenByHand(), SuitsEngine())
        self._schedulers = {kind: self._scheduler(kind) for kind in Arrangement}

    def place(self, ask: Ask, *, traced: bool = True) -> Placed | Refused:
        """Where this instance should go, as things stand."""
        trace = Trace() if traced else None
        cycle: AskCycle = Cycle(ask, trace=trace)
        result = self._schedulers[ask.arrangement].run(cycle, self.fleet.workers)
        if isinstance(result, SchedulingFailure):
            refused = Refused(ask, result, trace)
            place = overcommitted(ask, self.fleet, self.devices(), self.admitted(ask)) if ask.overcommit else None
            return refused if place is None else Placed(ask, place, 0.0, (), trace)
        run = result.results[result.primary]
        place = msgspec.structs.replace(cycle[FIT].place(result.target), context=ask.need.context)
        totals = np.asarray(run.ranked.totals)
        best, *others = np.argsort(-totals, kind="stable")[: RUNNER_UPS + 1].tolist()
        runner_ups = tuple((str(run.ranked.candidates[at]), float(totals[at])) for at in others)
        return Placed(ask, place, float(totals[best]), runner_ups, trace)

    def place_all(self, asks: Sequence[Ask], *, all_or_nothing: bool = False) -> list[Placed | Refused]:
        """Places for a whole set, claimed as they are found: as many as there is room for, or all or none."""
        found: list[Placed | Refused] = []
        for ask in asks:
            placed = self.place(ask)
            found.append(placed)
            if isinstance(placed, Placed):
                self.fleet.claim(ask.instance_id, placed.place, ask.deployment, ask.priority)
            elif all_or_nothing:
                for before in found[:-1]:
                    self.fleet.release(before.ask.instance_id)
                return [placed]
        return found

    def admitted(self, ask: Ask) -> Mask:
        """The workers that it may be on, whether there is room or not, by row."""
        run = Profile[Host]("admitted", *self._demands, FirstBest()).run(Cycle(ask), self.fleet.workers)
        among = np.zeros(len(self.fleet), dtype=bool)
        if isinstance(run, ProfileResult):
            among[[host.row for host in run.ranked.candidates]] = True
        return among

    def devices(self) -> Devices:
        """The GPUs as they are numbered now."""
        if self._devices is None or self._devices.generation != self.fleet.generation:
            self._devices = Devices(self.fleet)
        return self._devices

    def _scheduler(self, kind: Arrangement) -> Scheduler[Host]:
        fleet, fragmentation = self.fleet, self._fragmentation if kind is Arrangement.BINPACK else None
        # The best of `TierQuality` and of `Apart` lead by a half at least: with these weights nothing else makes up for
        # a layer less on the GPU, and not even that, when spreading, for a worker that has one already.
        scorers: tuple[object, ...] = (TierQuality(), 200.0), (NearTo(fleet), 50.0), (FilesAreThere(), 1.0)
        if kind is Arrangement.BINPACK:
            scorers = (*scorers, (TightFit(), 10.0), (Fullest(fleet), 2.0))
            if fragmentation is not None:  # it ranks: the smallest step among 10,000 outweighs all but the tier's own
                scorers = (*scorers[1:], (TierQuality(), 4e6), (SpoilsLeast(fragmentation), 1e6))
        else:
            scorers = (*scorers, (Apart(fleet), 600.0), (LeastClaimed(), 10.0))
        profiles = [
            Profile[Host](
                tier.tier.value, *self._demands, tier(fleet, self.devices, fragmentation), *scorers, FirstBest()
            )
            for tier in TIERS
        ]
        return Scheduler(profiles, TierByTier())

"""Scores from 0 to 1 for the workers that fit. The weights of scorers depend on the arrangement."""

from collections import Counter
from math import log

from pointsman.placement.devices import Floats
from pointsman.placement.filters import Hosts
from pointsman.placement.fit.base import FitCycle
from pointsman.placement.fleet import (
    FREE_BYTES,
    FREE_CPUS,
    FREE_MEMORY,
    FREE_SHARE,
    TENANTS,
    TOTAL_BYTES,
    TOTAL_MEMORY,
    WORKER,
    Fleet,
    Host,
)
from pointsman.placement.fragmentation import Fragmentation
from pointsman.placement.gpu_models import generation_rank
from pointsman.selection import PerMembers
from pointsman.selection.arrays import np

RACK = "rack"
"""The label that names a failure domain."""


class TightFit:
    """Prefers the place with the least room left over: large holes stay whole."""

    bounded = True

    def scores(self, cycle: FitCycle, candidates: Hosts) -> Floats:
        left = candidates.cut(cycle.request.free - cycle.request.needed)
        return 1.0 / (1.0 + np.maximum(left, 0.0) / (1 << 30))


class SpoilsLeast:
    """Prefers the place where fragmentation grows least for the expected workload.

    Scores are ranks. The best worker has 1, the others follow in equal steps, and equal workers have equal scores.
    """

    bounded = True

    def __init__(self, fragmentation: Fragmentation) -> None:
        self._fragmentation = fragmentation

    def scores(self, cycle: FitCycle, candidates: Hosts) -> Floats:
        gpus = cycle.request.gpus
        if gpus is None:
            return np.zeros(len(candidates))
        growth = np.asarray(candidates.cut(self._fragmentation.growth(cycle.request.ask, gpus).amount))
        kinds, ranks = np.unique(growth, return_inverse=True)
        return 1.0 - ranks / len(kinds)


class Fullest:
    """Prefers workers that have the fewest CPUs and GPUs free, so that others stay empty."""

    bounded = True

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def scores(self, cycle: FitCycle, candidates: Hosts) -> Floats:
        gpus, workers = self._fleet.gpus.columns, self._fleet.workers.columns
        free = np.minimum(gpus[FREE_SHARE], np.asarray(gpus[FREE_BYTES]) / np.maximum(gpus[TOTAL_BYTES], 1.0))
        rows = np.asarray(gpus[WORKER]).astype(np.intp)
        left = np.bincount(rows, weights=np.maximum(free, 0.0), minlength=len(self._fleet))
        left = left / max(left.max(initial=0.0), 1.0)
        cpus = np.maximum(workers[FREE_CPUS], 0.0)
        left += cpus / max(cpus.max(initial=0.0), 1.0)
        return 1.0 - np.asarray(candidates.cut(left)) / 2.0


class SparesCapable:
    """Prefers a GPU in use to an empty one, and of empty ones the least capable: the most valuable are kept for asks
    that need them. It applies to asks for memory of one GPU; shares of a GPU are packed by what they leave."""

    bounded = True

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._worth = PerMembers(_worth_of_gpus)

    def scores(self, cycle: FitCycle, candidates: Hosts) -> Floats:
        fit = cycle.request
        if fit.taken is None or not fit.needed:
            return np.zeros(len(candidates))
        taken = np.asarray(candidates.cut(fit.taken.astype(np.float64))).astype(np.intp)
        worth = self._worth.of(candidates)[taken]
        level = np.where(np.asarray(self._fleet.gpus.columns[TENANTS])[taken] > 0, 0.0, worth)
        most, least = level.max(initial=0.0), level.min(initial=np.inf)
        return np.asarray((most - level) / (most - least)) if most > least else np.zeros(len(level))


def _worth_of_gpus(hosts: Hosts) -> Floats:
    """A rank per GPU: 1 for the cheapest, 2 for the next, and so on. The rank follows the hourly price if every worker
    with GPUs has a price. Otherwise it follows the memory (sizes within a third are alike), then the generation."""
    devices = [device for host in hosts for device in host.devices]
    prices = [device.host.worker.price_per_gpu_hour for device in devices]
    if all(prices):
        worth = np.array(prices, dtype=np.float64)
    else:
        sizes = np.log([max(device.gpu.memory_bytes, 1) for device in devices]) / log(4 / 3)
        worth = np.floor(sizes) + np.array([generation_rank(device.gpu.model) for device in devices]) / 100.0
    return np.asarray(np.unique(worth, return_inverse=True)[1] + 1.0, dtype=np.float64)


class LeastClaimed:
    """Prefers the place with the most room, and workers with much free memory."""

    bounded = True

    def scores(self, cycle: FitCycle, candidates: Hosts) -> Floats:
        room = np.asarray(candidates.cut(cycle.request.free))
        most = room.max(initial=1.0)
        share = np.clip(room / most, 0.0, 1.0) if most > 0 else np.zeros(len(room))
        free = np.asarray(candidates.column(FREE_MEMORY)) / np.maximum(candidates.column(TOTAL_MEMORY), 1.0)
        return 0.8 * share + 0.2 * np.clip(free, 0.0, 1.0)


class LeastUsed(LeastClaimed):
    """Prefers the GPU with the fewest instances, then the one with the smallest claimed share, then the smallest
    hole that suffices, so that large ones remain for asks that need them. For asks that do not take exactly one GPU,
    the same as `LeastClaimed`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def scores(self, cycle: FitCycle, candidates: Hosts) -> Floats:
        fit = cycle.request
        if fit.taken is None:
            return super().scores(cycle, candidates)
        taken = np.asarray(candidates.cut(fit.taken.astype(np.float64))).astype(np.intp)
        gpus = self._fleet.gpus.columns
        left = np.minimum(np.asarray(gpus[FREE_BYTES]) / np.maximum(gpus[TOTAL_BYTES], 1.0), gpus[FREE_SHARE])[taken]
        hole = np.maximum(np.asarray(gpus[FREE_BYTES])[taken], 0.0)
        small = 1.0 - hole / max(hole.max(initial=0.0), 1.0)
        memory = np.asarray(candidates.column(FREE_MEMORY)) / np.maximum(candidates.column(TOTAL_MEMORY), 1.0)
        alone = 0.5 / (1.0 + np.asarray(gpus[TENANTS])[taken])
        total = alone + 0.45 * np.clip(left, 0.0, 1.0) + 0.04 * small + 0.01 * np.clip(memory, 0.0, 1.0)
        return np.asarray(total, dtype=np.float64)


class Apart:
    """Prefers workers with the fewest instances of the same deployment, then racks with the fewest.

    The best workers have 1, all others at most 0.5. So no scorer with less weight puts a second instance on a worker
    while another worker has fewer instances.
    """

    bounded = True

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._racks = PerMembers(_rows_by_rack)

    def scores(self, cycle: FitCycle, candidates: Hosts) -> Floats:
        siblings = _hosts_of(self._fleet, cycle.request.ask.deployment)
        if not siblings:
            return np.ones(len(candidates))
        on_worker, on_rack = np.zeros(len(candidates.whole)), np.zeros(len(candidates.whole))
        by_rack: Counter[str] = Counter()
        for host, count in siblings.items():
            on_worker[host.row] = count
            if RACK in host.labels:
                by_rack[host.labels[RACK]] += count
        racks = self._racks.of(candidates) if by_rack else {}
        for rack, count in by_rack.items():
            on_rack[racks[rack]] = count
        crowded = np.asarray(candidates.cut(on_worker * (1.0 + on_rack.max()) + on_rack))
        return np.asarray(1.0 / (1.0 + crowded - crowded.min()))


class FilesAreThere:
    """Prefers workers that have the model's files."""

    bounded = True

    def scores(self, cycle: FitCycle, candidates: Hosts) -> Floats | list[float]:
        model = cycle.request.ask.need.model
        if not model:
            return np.zeros(len(candidates))
        return [float(model in host.worker.files) for host in candidates]


class TierQuality:
    """Prefers what the tier ranks higher: linked GPUs, more layers on the GPU."""

    bounded = True

    def scores(self, cycle: FitCycle, candidates: Hosts) -> Floats:
        quality = cycle.request.quality
        return np.zeros(len(candidates)) if quality is None else np.asarray(candidates.cut(quality))


class NearTo:
    """Prefers workers with an instance of the deployment that `near` names; else their racks."""

    bounded = True

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def scores(self, cycle: FitCycle, candidates: Hosts) -> Floats | list[float]:
        hosts = _hosts_of(self._fleet, cycle.request.ask.near)
        if not hosts:
            return np.zeros(len(candidates))
        racks = {host.labels.get(RACK) for host in hosts} - {None}
        return [1.0 if host in hosts else 0.5 if host.labels.get(RACK) in racks else 0.0 for host in candidates]


def _hosts_of(fleet: Fleet, deployment: str) -> Counter[Host]:
    """The number of instances of a deployment on each worker. Empty for an instance that belongs to no deployment."""
    placed = fleet.occupants.of(deployment) if deployment else ()
    return Counter(fleet[worker] for one in placed for worker in one.place.workers)


def _rows_by_rack(hosts: Hosts) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for host in hosts:
        if RACK in host.labels:
            found.setdefault(host.labels[RACK], []).append(host.row)
    return found

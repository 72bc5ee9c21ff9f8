"""What the tiers have in common. The workers that fit are computed over columns; reasons and places are made when read.

A reason may be read after the fleet has changed. Its facts are therefore copied when the decision is made.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeAlias

import msgspec

from pointsman.placement.asks import Arrangement, Ask, Claim, Place, Tier
from pointsman.placement.devices import ABLE, OBSTACLES, Codes, Devices, Floats, Mask, Rows
from pointsman.placement.filters import Hosts, Rejections
from pointsman.placement.fleet import (
    FREE_BYTES,
    FREE_CPUS,
    FREE_MEMORY,
    FREE_SHARE,
    TENANTS,
    TOTAL_BYTES,
    Device,
    Fleet,
    Host,
)
from pointsman.placement.fragmentation import Fragmentation
from pointsman.reasons import Reason
from pointsman.selection import Cycle, RejectedEach
from pointsman.selection.arrays import np

BEHIND = 2.0**44
"""More bytes than any GPU has."""
STEPS = 200
"""Number of steps from 0 to 1 to which shares are rounded before they are compared."""
CPU_SLACK = 1e-9
"""Tolerance for rounding errors: fractions of CPUs are added and subtracted."""


class TierFit(msgspec.Struct, eq=False):
    """Which workers have room for an ask in one tier, and how tight the fit is. Arrays are by row of the worker."""

    ask: Ask
    fits: Mask
    free: Floats
    """Free bytes where the instance would go: in GPU memory or, on a CPU, in the machine's memory."""
    needed: float | Floats
    """Bytes that the instance would take there."""
    place: Callable[[Host], Place]
    """Returns the place of the instance on a worker that fits."""
    why: Callable[[Host], Reason]
    quality: Floats | None = None
    """How good each worker is in this tier, apart from the room: 1 for the best, at most 0.5 for all others."""
    gpus: int | None = None
    """Number of GPUs that the instance takes on one worker; None on several workers, or partly on the CPU."""
    taken: Rows | None = None
    """The row of the GPU that the instance would take; None if it takes several GPUs or no GPU."""
    forbidden: bool = False
    """Whether the ask rules this tier out, however much room there is."""


FitCycle: TypeAlias = Cycle[TierFit]


class RoomInTier:
    """Demands room in the tier that the cycle is about."""

    def rejections(self, cycle: FitCycle, candidates: Hosts) -> Rejections:
        fit = cycle.request
        fits = fit.fits if candidates.rows is None else fit.fits[np.asarray(candidates.rows)]
        rejected = np.flatnonzero(~fits)
        return RejectedEach(candidates, rejected, fit.why) if len(rejected) else ()


def nowhere(ask: Ask, workers: int, why: Callable[[Host], Reason], *, forbidden: bool = False) -> TierFit:
    """The result if no worker fits."""

    def place(host: Host) -> Place:
        raise AssertionError(f"{host} does not fit")

    return TierFit(ask, np.zeros(workers, dtype=bool), np.zeros(workers), 0.0, place, why, forbidden=forbidden)


class HostRoom:
    """Present CPUs and memory of the workers, and which workers have enough of both."""

    def __init__(self, fleet: Fleet, cpus: float, memory_bytes: float) -> None:
        self._needed_cpus, self._needed_bytes = cpus, memory_bytes
        self.cpus: Floats = np.array(fleet.workers.columns[FREE_CPUS])
        self.memory: Floats = np.array(fleet.workers.columns[FREE_MEMORY])
        self.enough: Mask = self.cpus >= cpus - CPU_SLACK
        if memory_bytes > 0:
            self.enough &= self.memory >= memory_bytes

    def lacking(self, host: Host) -> Reason | None:
        """The reason if a worker has too few CPUs or too little memory; None if it has enough."""
        cpus, memory = float(self.cpus[host.row]), float(self.memory[host.row])
        if cpus < self._needed_cpus - CPU_SLACK:
            return Reason("too-few-cpus", {"needed_cpus": self._needed_cpus, "free_cpus": cpus})
        if 0 < self._needed_bytes > memory:
            return Reason("too-little-memory", {"needed_bytes": self._needed_bytes, "free_bytes": memory})
        return None


class ResourceFit(ABC):
    """One tier: a way to fit an instance onto workers."""

    tier: ClassVar[Tier]

    def __init__(
        self, fleet: Fleet, devices: Callable[[], Devices], fragmentation: Fragmentation | None = None
    ) -> None:
        self.fleet = fleet
        self.devices = devices
        self.fragmentation = fragmentation
        """Decides which GPU of a worker gets the least fragmented. If None, the fullest GPU is taken."""

    def among(self, ask: Ask, candidates: Hosts) -> TierFit:
        """Which of these workers have room at present."""
        forbidden = not_listed(ask, self.tier) or self.forbidden(ask)
        if forbidden is not None:
            return nowhere(ask, len(candidates.whole), lambda _: forbidden, forbidden=True)
        mask = np.zeros(len(candidates.whole), dtype=bool)
        mask[slice(None) if candidates.rows is None else np.asarray(candidates.rows)] = True
        return self.fit(ask, mask)

    @abstractmethod
    def forbidden(self, ask: Ask) -> Reason | None:
        """Why the ask rules this tier out; None if it does not."""

    @abstractmethod
    def fit(self, ask: Ask, among: Mask) -> TierFit:
        """Which of the workers in the mask have room."""

    def in_order(self, ask: Ask, devices: list[Device], free: Floats) -> list[Device]:
        """GPUs of one worker in the order in which they are taken. When packing, GPUs in use come first, beginning with
        the fullest. When spreading, GPUs with the fewest instances of the same deployment come first, then the
        least used."""
        order = self.dislike(ask, free)
        if ask.arrangement is Arrangement.BINPACK or not devices:
            return sorted(devices, key=lambda device: (float(order[device.row]), device.row))
        siblings = self.fleet.occupants.on_gpus(ask.deployment, str(devices[0].host))
        return sorted(devices, key=lambda one: (siblings[one.gpu.index], float(order[one.row]), one.row))

    def dislike(self, ask: Ask, free: Floats) -> Floats:
        """A rank per GPU: the lowest is taken first. When packing, GPUs in use come before empty ones; among
        these, the GPU with the least room left comes first. When spreading, the GPU with the fewest instances comes
        first, then that with the smallest claimed share, then that with the most room left."""
        columns = self.fleet.gpus.columns
        tenants = np.asarray(columns[TENANTS])
        if ask.arrangement is Arrangement.BINPACK:
            return np.where(tenants > 0, free, free + BEHIND)
        total = np.maximum(columns[TOTAL_BYTES], 1.0)
        left = np.minimum(np.asarray(columns[FREE_BYTES]) / total, columns[FREE_SHARE])
        claimed = np.round((1.0 - np.clip(left, 0.0, 1.0)) * STEPS)
        return BEHIND * (tenants * (STEPS + 1) + claimed + 1.0) - free

    def taken_first(self, ask: Ask, room: Mask, free: Floats) -> Rows:
        """For each worker, the row of the GPU to take first from a set; -1 if it has none. Siblings are ignored."""
        devices = self.devices()
        order = np.where(room, self.dislike(ask, free), np.inf)
        least = devices.by_worker.smallest(order)
        rows = np.flatnonzero(room & (order <= least[devices.workers]))
        taken = np.full(len(self.fleet), -1, dtype=np.intp)
        taken[devices.workers[rows[::-1]]] = rows[::-1]  # on a tie, the first row wins
        return taken


def not_listed(ask: Ask, tier: Tier) -> Reason | None:
    """The reason if the ask lists its tiers and this tier is not among them; None otherwise."""
    if not ask.tiers or tier in ask.tiers:
        return None
    return Reason("tier-not-listed", {"tiers": [one.written for one in ask.tiers]})


def layers_elsewhere(ask: Ask) -> Reason | None:
    """The reason if the engine's settings leave some layers on the CPU; None otherwise."""
    layers = ask.gpu_layers
    if layers is None or layers >= ask.need.layers:
        return None
    return Reason("gpu-layers-set", {"gpu_layers": layers, "layers": ask.need.layers})


NO_GPU = "no-gpu"


def lacks_gpus(obstacles: Codes, host: Host) -> Reason | None:
    """Why the ask may have no GPU of a worker; None if it may have one."""
    if not host.devices:
        return Reason(NO_GPU)
    first = host.devices[0].row
    found = obstacles[first : first + len(host.devices)].tolist()
    if ABLE in found:
        return None
    return Reason("no-gpu-available", {name: found.count(code) for code, name in OBSTACLES.items() if code in found})


def claims_of(ask: Ask, devices: list[Device], gpu_bytes: int) -> tuple[Claim, ...]:
    """What the instance takes from each of these GPUs, and from the CPUs and memory of the first GPU's worker."""
    share = ask.gpu_utilization or 0.0
    return tuple(
        Claim(
            worker=str(device.host),
            gpu=device.gpu.index,
            gpu_bytes=max(gpu_bytes, int(device.gpu.memory_bytes * share)),
            gpu_total_bytes=device.gpu.memory_bytes,
            gpu_share=ask.gpu_share or 0.0,
            exclusive=ask.exclusive,
            cpus=ask.cpus if index == 0 else 0.0,
            memory_bytes=ask.need.host_bytes if index == 0 else 0,
        )
        for index, device in enumerate(devices)
    )

"""Placement methods, from random to our own: each is a function from ask to place."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pointsman.placement.asks import Ask, Claim, Place, Tier
from pointsman.placement.devices import Devices
from pointsman.placement.fleet import FREE_CPUS, FREE_MEMORY, FREE_SHARE, Device, Fleet
from pointsman.placement.fragmentation import LOST, MIXTURE, Fragmentation, Workload
from pointsman.placement.placer import Placed, Placer

Choose: TypeAlias = Callable[[Ask], Place | None]
Rows: TypeAlias = NDArray[np.intp]


class Setting(NamedTuple):
    """The inputs of a method."""

    fleet: Fleet
    asks: Sequence[Ask]
    """In no order."""
    seed: int


Method: TypeAlias = Callable[[Setting], Choose]


def gpus_of(ask: Ask) -> int:
    return ask.need.tensor_parallel_sizes[0]


def share_of(ask: Ask) -> float:
    """Total GPUs that it asks for."""
    return gpus_of(ask) * (ask.gpu_share or 0.0)


class Room:
    """Which workers have room for an ask, and its place there."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.devices = Devices(fleet)
        self._most_cpus = max(host.worker.cpus for host in fleet.workers)
        self._most_gpus = max(len(host.devices) for host in fleet.workers)

    def workers(self, ask: Ask) -> Rows:
        columns = self.fleet.workers.columns
        fits = np.asarray(columns[FREE_CPUS]) >= ask.cpus - 1e-9
        fits &= np.asarray(columns[FREE_MEMORY]) >= ask.need.host_bytes
        if gpus_of(ask):
            fits &= self.devices.by_worker.count(self.devices.able(ask)) >= gpus_of(ask)
        return np.flatnonzero(fits)

    def fullest(self, rows: Rows) -> int:
        """The worker with the fewest CPUs and GPUs free, each as a share of the largest worker's."""
        free = np.asarray(self.fleet.gpus.columns[FREE_SHARE])
        gpus = np.bincount(self.devices.workers, weights=free, minlength=len(self.fleet))[rows]
        left = np.asarray(self.fleet.workers.columns[FREE_CPUS])[rows] / self._most_cpus + gpus / self._most_gpus
        return int(rows[np.argmin(np.round(left, 9))])

    def fitting(self, ask: Ask, row: int) -> list[Device]:
        """GPUs of a worker that it may have, the fullest first."""
        free = self.fleet.gpus.columns[FREE_SHARE]
        able = self.devices.able(ask)
        devices = [device for device in self.fleet.workers[row].devices if able[device.row]]
        return sorted(devices, key=lambda device: (round(free[device.row], 6), device.row))

    def place(self, ask: Ask, row: int, devices: Sequence[Device]) -> Place:
        worker, share = str(self.fleet.workers[row]), ask.gpu_share or 0.0
        host = Claim(worker=worker, cpus=ask.cpus, memory_bytes=ask.need.host_bytes)
        gpus = tuple(Claim(worker=worker, gpu=device.gpu.index, gpu_share=share) for device in devices)
        return Place(tier=Tier.ONE_GPU if len(gpus) == 1 else Tier.SEVERAL_GPUS, claims=(host, *gpus))


def at_random(setting: Setting) -> Choose:
    """Any worker with room, any of its GPUs with room."""
    room, rng = Room(setting.fleet), random.Random(setting.seed)

    def choose(ask: Ask) -> Place | None:
        rows = room.workers(ask)
        if not len(rows):
            return None
        row = int(rows[rng.randrange(len(rows))])
        return room.place(ask, row, rng.sample(room.fitting(ask, row), gpus_of(ask)))

    return choose


def best_fit(setting: Setting) -> Choose:
    """The fullest worker with room, its fullest GPUs with room."""
    room = Room(setting.fleet)

    def choose(ask: Ask) -> Place | None:
        rows = room.workers(ask)
        if not len(rows):
            return None
        row = room.fullest(rows)
        return room.place(ask, row, room.fitting(ask, row)[: gpus_of(ask)])

    return choose


def least_growth(room: Room, fragmentation: Fragmentation, ask: Ask) -> Place | None:
    """Where fragmentation grows least; of equals the best fit."""
    growth = fragmentation.growth(ask, gpus_of(ask))
    least = growth.amount.min()
    if least == np.inf:
        return None
    row = room.fullest(np.flatnonzero(growth.amount == least))
    if gpus_of(ask) == 1:
        return room.place(ask, row, [room.fleet.gpus[int(growth.device[row])]])
    return room.place(ask, row, room.fitting(ask, row)[: gpus_of(ask)])


def packing(*, lost: float = LOST, mixture: float = MIXTURE) -> Method:
    """With the workload known in advance, as for the published method."""

    def method(setting: Setting) -> Choose:
        fleet, workload = setting.fleet, Workload(setting.asks)
        room = Room(fleet)
        fragmentation = Fragmentation(fleet, workload, lambda: room.devices, lost=lost, mixture=mixture)
        return lambda ask: least_growth(room, fragmentation, ask)

    return method


def placer(setting: Setting) -> Choose:
    """The placer of the product: every filter, tier and score, with the workload known in advance."""
    placing = Placer(setting.fleet, Workload(setting.asks))

    def choose(ask: Ask) -> Place | None:
        outcome = placing.place(ask, traced=False)
        return outcome.place if isinstance(outcome, Placed) else None

    return choose


def packing_while_learning(setting: Setting) -> Choose:
    """With a workload of the asks so far, rebuilt whenever their number has doubled."""
    fleet, seen = setting.fleet, list[Ask]()
    room = Room(fleet)
    fragmentation = Fragmentation(fleet, Workload(), lambda: room.devices)

    def choose(ask: Ask) -> Place | None:
        nonlocal fragmentation
        seen.append(ask)
        if len(seen) >= 16 and len(seen).bit_count() == 1:
            fragmentation = Fragmentation(fleet, Workload(seen), lambda: room.devices)
        return least_growth(room, fragmentation, ask)

    return choose


NO_LIMIT = 1e9
METHODS: dict[str, Method] = {
    "random": at_random,
    "best-fit": best_fit,
    "gradient-descent": packing(lost=0.0, mixture=NO_LIMIT),
    "binpack": placer,
    "binpack-alone": packing(),
    "binpack-learning": packing_while_learning,
    "binpack-without-holes": packing(lost=0.0),
    "binpack-without-cpus": packing(mixture=NO_LIMIT),
}
USUAL = list(METHODS)[:4]

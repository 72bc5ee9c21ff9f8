"""What the tiers have in common: who fits is worked out over columns; words and places are made when wanted."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from pointsman.placement.asks import Arrangement, Ask, Claim, Place, Tier
from pointsman.placement.devices import Devices
from pointsman.placement.filters import AskCycle, Hosts, Rejections, Worded
from pointsman.placement.fleet import FREE_CPUS, FREE_MEMORY, Device, Fleet, Host
from pointsman.placement.words import gib
from pointsman.selection import Key, Rejected
from pointsman.selection.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
    Mask: TypeAlias = NDArray[np.bool_]
else:
    Floats = Mask = Any


class Fit(msgspec.Struct, eq=False):
    """Who fits in one tier, by row of the worker, and how tightly."""

    fits: Mask
    free: Floats
    """Bytes free where it would be tightest, before it is there; of GPU memory, or of the machine's on a CPU."""
    needed: float
    """Bytes that it takes there."""
    place: Callable[[Host], Place]
    """The place that it would have on a worker that fits."""
    why: Callable[[Host], str]
    """Why another does not fit."""
    quality: Floats | None = None
    """What else makes one better than another in this tier, 0 to 1; None: nothing."""


FIT: Key[Fit] = Key("fit")


def nowhere(workers: int, why: Callable[[Host], str]) -> Fit:
    """Nobody fits."""

    def place(host: Host) -> Place:
        raise AssertionError(f"{host} does not fit")

    return Fit(np.zeros(workers, dtype=bool), np.zeros(workers), 0.0, place, why)


class FitFilter(ABC):
    """Demands room in one tier."""

    tier: ClassVar[Tier]

    def __init__(self, fleet: Fleet, devices: Callable[[], Devices]) -> None:
        self.fleet = fleet
        self.devices = devices

    def rejections(self, cycle: AskCycle, candidates: Hosts) -> Rejections:
        ask = cycle.request
        why_not = self.forbidden(ask)
        everybody = range(len(candidates))
        if why_not is not None:
            return Rejected(candidates, everybody, f"not allowed: {why_not}")
        rows = np.arange(len(candidates.whole)) if candidates.rows is None else np.asarray(candidates.rows)
        among = np.zeros(len(candidates.whole), dtype=bool)
        among[rows] = True
        fit = cycle.state[FIT] = self.fit(ask, among)
        others = np.flatnonzero(~fit.fits[rows])
        return Worded(candidates, others, fit.why) if len(others) else ()

    @abstractmethod
    def forbidden(self, ask: Ask) -> str | None:
        """Why this tier is not for this ask; None: it is."""

    @abstractmethod
    def fit(self, ask: Ask, among: Mask) -> Fit:
        """Who of these workers fits, as things stand."""

    # For all tiers

    def has_host_room(self, ask: Ask, memory_bytes: float) -> Mask:
        """The workers with CPUs and memory for it."""
        columns = self.fleet.workers.columns
        room: Mask = np.asarray(columns[FREE_CPUS]) >= ask.cpus - 1e-9
        if memory_bytes > 0:
            room &= np.asarray(columns[FREE_MEMORY]) >= memory_bytes
        return room

    def lacks_host_room(self, ask: Ask, memory_bytes: float, host: Host) -> str | None:
        """What of CPUs and memory a worker has too little of; None: nothing."""
        columns = self.fleet.workers.columns
        cpus, memory = float(columns[FREE_CPUS][host.row]), float(columns[FREE_MEMORY][host.row])
        if cpus < ask.cpus - 1e-9:
            return f"too few CPUs: needs {ask.cpus:g}, {cpus:g} free"
        if 0 < memory_bytes > memory:
            return f"too little memory: needs {gib(memory_bytes)}, {gib(memory)} free"
        return None

    def lacks_gpus(self, able: Mask, host: Host) -> str | None:
        """Why none of a worker's GPUs is for this ask; None: one is."""
        if not host.devices:
            return "no GPU"
        if not able[self.devices().of(host)].any():
            return "no GPU to be had: taken by others alone, of another kind, or with too small a share left"
        return None


def tightest_first(ask: Ask, devices: list[Device], free: Floats) -> list[Device]:
    """GPUs in the order in which they are taken: when packing the fullest first, when spreading the emptiest."""
    sign = 1 if ask.arrangement is Arrangement.BINPACK else -1
    return sorted(devices, key=lambda device: (sign * float(free[device.row]), device.row))


def claims_of(ask: Ask, devices: list[Device], gpu_bytes: int) -> tuple[Claim, ...]:
    """What it takes of these GPUs, and of the CPUs and the memory of the first one's worker."""
    return tuple(
        Claim(
            worker=str(device.host),
            gpu=device.gpu.index,
            gpu_bytes=gpu_bytes,
            gpu_share=ask.gpu_share or 0.0,
            exclusive=ask.exclusive,
            cpus=ask.cpus if place == 0 else 0.0,
            memory_bytes=ask.need.host_bytes if place == 0 else 0,
        )
        for place, device in enumerate(devices)
    )

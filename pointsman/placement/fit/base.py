"""What the tiers have in common: who fits is worked out over columns; words and places are made when wanted.

Words may be wanted later, when the fleet has moved on: whatever they tell is copied when it is decided.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from pointsman.placement.asks import Arrangement, Ask, Claim, Place, Tier
from pointsman.placement.devices import ABLE, OBSTACLES, Devices
from pointsman.placement.filters import AskCycle, Hosts, Rejections, Worded
from pointsman.placement.fleet import FREE_CPUS, FREE_MEMORY, Device, Fleet, Host
from pointsman.placement.fragmentation import Fragmentation
from pointsman.render.text import gib
from pointsman.selection import Key, Rejected
from pointsman.selection.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Codes: TypeAlias = NDArray[np.int8]
    Floats: TypeAlias = NDArray[np.float64]
    Mask: TypeAlias = NDArray[np.bool_]
else:
    Codes = Floats = Mask = Any

CPU_SLACK = 1e-9
"""CPUs are fractions that were added and taken away."""


class TierFit(msgspec.Struct, eq=False):
    """Who fits in one tier, by row of the worker, and how tightly."""

    fits: Mask
    free: Floats
    """Bytes free where it would be, before it is there; of GPU memory, or of the machine's on a CPU."""
    needed: float | Floats
    """Bytes that it takes there."""
    place: Callable[[Host], Place]
    """The place that it would have on a worker that fits."""
    why: Callable[[Host], str]
    """Why another does not fit."""
    quality: Floats | None = None
    """What else makes one better than another in this tier: 1 for the best, 0.5 at most for others; None: nothing."""
    gpus: int | None = None
    """How many of one worker it takes; None: on several workers, or partly on the CPU."""


FIT: Key[TierFit] = Key("fit")


def nowhere(workers: int, why: Callable[[Host], str]) -> TierFit:
    """Nobody fits."""

    def place(host: Host) -> Place:
        raise AssertionError(f"{host} does not fit")

    return TierFit(np.zeros(workers, dtype=bool), np.zeros(workers), 0.0, place, why)


class HostRoom:
    """CPUs and memory of the workers as they are now, and who has enough of both."""

    def __init__(self, fleet: Fleet, cpus: float, memory_bytes: float) -> None:
        self._needs_cpus, self._needs_memory = cpus, memory_bytes
        self.cpus: Floats = np.array(fleet.workers.columns[FREE_CPUS])
        self.memory: Floats = np.array(fleet.workers.columns[FREE_MEMORY])
        self.enough: Mask = self.cpus >= cpus - CPU_SLACK
        if memory_bytes > 0:
            self.enough &= self.memory >= memory_bytes

    def lacking(self, host: Host) -> str | None:
        """What a worker has too little of; None: nothing."""
        cpus, memory = float(self.cpus[host.row]), float(self.memory[host.row])
        if cpus < self._needs_cpus - CPU_SLACK:
            return f"too few CPUs: needs {self._needs_cpus:g}, {cpus:g} free"
        if 0 < self._needs_memory > memory:
            return f"too little memory: needs {gib(self._needs_memory)}, {gib(memory)} free"
        return None


class FitFilter(ABC):
    """Demands room in one tier."""

    tier: ClassVar[Tier]

    def __init__(
        self, fleet: Fleet, devices: Callable[[], Devices], fragmentation: Fragmentation | None = None
    ) -> None:
        self.fleet = fleet
        self.devices = devices
        self.fragmentation = fragmentation
        """Says which GPU of a worker is spoilt the least; None: the fullest is taken."""

    def rejections(self, cycle: AskCycle, candidates: Hosts) -> Rejections:
        ask = cycle.request
        why_not = self.forbidden(ask)
        if why_not is not None:
            return Rejected(candidates, range(len(candidates)), "text", text=f"not allowed: {why_not}")
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
    def fit(self, ask: Ask, among: Mask) -> TierFit:
        """Who of these workers fits, as things stand."""

    def in_order(self, ask: Ask, devices: list[Device], free: Floats) -> list[Device]:
        """GPUs of one worker in the order in which they are taken: when packing the fullest first; when spreading those
        with the fewest instances of the same deployment, then the emptiest."""
        if ask.arrangement is Arrangement.BINPACK or not devices:
            return sorted(devices, key=lambda device: (float(free[device.row]), device.row))
        siblings = self.fleet.siblings_on(ask.deployment, str(devices[0].host))
        return sorted(devices, key=lambda one: (siblings.get(one.gpu.index, 0), -float(free[one.row]), one.row))


def lacks_gpus(obstacles: Codes, host: Host) -> str | None:
    """Why none of a worker's GPUs is for this ask; None: one is."""
    if not host.devices:
        return "no GPU"
    first = host.devices[0].row
    found = obstacles[first : first + len(host.devices)].tolist()
    if ABLE in found:
        return None
    counts = [f"{found.count(kind)} {words}" for kind, words in OBSTACLES.items() if kind in found]
    return f"no GPU to be had: {', '.join(counts)}"


def claims_of(ask: Ask, devices: list[Device], gpu_bytes: int) -> tuple[Claim, ...]:
    """What it takes of these GPUs, and of the CPUs and the memory of the first one's worker."""
    return tuple(
        Claim(
            worker=str(device.host),
            gpu=device.gpu.index,
            gpu_bytes=gpu_bytes,
            gpu_total_bytes=device.gpu.memory_bytes,
            gpu_share=ask.gpu_share or 0.0,
            exclusive=ask.exclusive,
            cpus=ask.cpus if place == 0 else 0.0,
            memory_bytes=ask.need.host_bytes if place == 0 else 0,
        )
        for place, device in enumerate(devices)
    )

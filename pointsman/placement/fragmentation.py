"""Packing that keeps holes useful: how much fragmentation an ask would add, by worker.

Enters: a fleet and its expected workload. Leaves: for an ask, by worker, the growth of fragmentation if it went there,
and the GPU where it grows least. The one rule: a decision recomputes only the workers that have changed.

The fragmentation of a worker is the free part of its GPUs that a typical ask cannot use, because no GPU has room for it
(Weng et al., "Beware of Fragmentation", ATC'23), or because CPUs or memory do not suffice for all of that room. What is
lost for good weighs more: the part of each hole that no likely mixture of asks can fill (`hole_values`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from pointsman.placement.asks import Ask
from pointsman.placement.devices import Devices
from pointsman.placement.fleet import EXCLUSIVE, FREE_BYTES, FREE_CPUS, FREE_MEMORY, FREE_SHARE, TOTAL_BYTES, Fleet
from pointsman.placement.workload import PARTS, SLACK, Make, Uses, Workload
from pointsman.selection.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
    Rows: TypeAlias = NDArray[np.intp]
else:
    Floats = Rows = Any

LOST = 10.0
"""Weight of what is lost for good, relative to what one kind of ask cannot use: it decides, the other breaks ties."""
MIXTURE = 2.0
"""CPUs and memory suffice for this many times the asks of one kind, because asks that need many share workers with asks
that need few. Values from 1.5 to 3 hardly differ; bench/README.md has the figures."""
MAX_CACHED_PARTS = 256
"""Parts of asks whose growth is cached."""


class Growth(msgspec.Struct, eq=False):
    """How fragmentation grows with an ask, by row of the worker. Read only."""

    amount: Floats
    """In GPUs, less is better, often below 0; inf if it does not fit there."""
    device: Rows
    """The row of the GPU where it grows least; the first, if it takes several."""
    seen: "NDArray[np.int64]"
    """The count of changes of the worker that this was computed for."""


class GpuPart(msgspec.Struct, frozen=True):
    """What an ask takes of one worker."""

    gpus: int
    gpu_bytes: int
    """On each GPU."""
    gpu_share: float
    exclusive: bool
    cpus: float
    memory_bytes: int
    suits: tuple[frozenset[str], frozenset[str], frozenset[tuple[str, int]]]
    """Vendors, models and GPUs that it may have."""

    @classmethod
    def of(cls, ask: Ask, gpus: int) -> "GpuPart":
        return cls(
            gpus,
            ask.need.gpu_bytes(gpus) if gpus else 0,
            ask.gpu_share or 0.0,
            ask.exclusive,
            ask.cpus,
            ask.need.host_bytes if gpus else ask.need.cpu_bytes,
            (ask.engine.vendors, ask.gpu_models, ask.gpus),
        )


class Fragmentation:
    """Growth of fragmentation in one fleet, for one workload."""

    def __init__(
        self,
        fleet: Fleet,
        workload: Workload,
        devices: Callable[[], Devices],
        *,
        lost: float = LOST,
        mixture: float = MIXTURE,
    ) -> None:
        self._fleet = fleet
        self._workload = workload
        self._devices = devices
        self._lost = lost
        self._mixture = mixture
        self._generation = -1

    def growth(self, ask: Ask, gpus: int) -> Growth:
        """How fragmentation grows if it takes this many GPUs of one worker; 0: it is on the CPU."""
        if self._fleet.generation != self._generation:
            self._number()
        part = GpuPart.of(ask, gpus)
        growth = self._known.get(part)
        if growth is None:
            if len(self._known) >= MAX_CACHED_PARTS:
                del self._known[next(iter(self._known))]
            wide = len(self._fleet)
            growth = Growth(np.full(wide, np.inf), np.zeros(wide, dtype=np.intp), np.full(wide, -1, dtype=np.int64))
            self._known[part] = growth
        changes = self._fleet.changes
        stale = np.flatnonzero(growth.seen != changes)
        if len(stale):
            self._refresh(stale[self._seen[stale] != changes[stale]])
            self._compute(growth, stale, ask, part)
            growth.seen[stale] = changes[stale]
        return growth

    # With an ask

    def _compute(self, growth: Growth, rows: Rows, ask: Ask, part: GpuPart) -> None:
        columns = self._fleet.workers.columns
        cpus, memory = np.asarray(columns[FREE_CPUS]), np.asarray(columns[FREE_MEMORY])
        growth.amount[rows] = np.inf
        has_room = (cpus[rows] >= part.cpus - SLACK) & ((memory[rows] >= part.memory_bytes) | (part.memory_bytes <= 0))
        workers, slots = self._options(rows[has_room], ask, part)
        if not len(workers):
            return
        of_each = workers[:, None]
        devices, before = self._slots[of_each, slots], self._free[of_each, slots]
        after = self._left(devices, part)
        makes = self._makes[devices]
        sums = self._sums[workers] + (self._uses.table[makes, after] - self._uses.table[makes, before]).sum(axis=1)
        taken = part.memory_bytes + self._unified[workers] * (part.gpu_bytes * part.gpus)
        there = self._fragmentation(workers, sums, cpus[workers] - part.cpus, memory[workers] - taken)
        # Sums in another order differ in their last digits; equals must stay equal.
        spoilt = np.round(there - self._fragmented[workers], 9)
        order = np.lexsort((spoilt, workers))  # stable: of equals the first
        best = order[np.flatnonzero(np.diff(workers[order], prepend=-1))]
        growth.amount[workers[best]] = spoilt[best]
        if part.gpus:
            growth.device[workers[best]] = devices[best, 0]

    def _options(self, rows: Rows, ask: Ask, part: GpuPart) -> tuple[Rows, Rows]:
        """(worker, slots of its GPUs) of each way to place it: on any one GPU, or on the fullest that suffice."""
        if not part.gpus:
            return rows, np.zeros((len(rows), 0), dtype=np.intp)
        devices = self._devices()
        room = devices.able(ask) & (devices.free(ask) >= part.gpu_bytes)
        slots, free = self._slots[rows], self._free[rows]
        usable = room[slots] & self._real[rows]
        if part.gpus > 1:
            enough = np.flatnonzero(usable.sum(axis=1) >= part.gpus)
            fullest = np.argsort(np.where(usable, free, PARTS + 1)[enough], axis=1, kind="stable")
            return rows[enough], fullest[:, : part.gpus]
        # GPUs of a worker that look the same are one option.
        look = np.where(usable, self._makes[slots] * (PARTS + 1) + free, -1)
        repeated = ((look[:, :, None] == look[:, None, :]) & self._earlier).any(axis=2)
        option, slot = np.nonzero(usable & ~repeated)
        return rows[option], slot[:, None]

    def _left(self, devices: Rows, part: GpuPart) -> Rows:
        """Hundredths of GPUs that are left with the ask placed."""
        if part.exclusive:
            return np.zeros_like(devices)
        left = self._room(devices, part.gpu_share, part.gpu_bytes)
        return np.where(self._shareable[devices], left, 0)

    # As it is now

    def _fragmentation(self, workers: Rows, sums: Floats, cpus: Floats, memory: Floats) -> Floats:
        """In GPUs, of workers whose GPUs have these sums of the table."""
        uses, makes, kinds = self._uses, self._made[workers], self._uses.kinds
        # At least a little of both, so that an ask that needs none is not limited by them.
        some_cpus, some_memory = np.maximum(cpus, SLACK)[:, None], np.maximum(memory, 1.0)[:, None]
        lasts = np.minimum(some_cpus * uses.per_cpu[makes], some_memory * uses.per_byte[makes])
        runs = (sums[:, kinds:-2] >= uses.gpus[makes]) & (cpus[:, None] >= uses.cpus) & (memory[:, None] >= uses.memory)
        used = np.where(runs, np.minimum(sums[:, :kinds], self._mixture * lasts), 0.0) @ uses.weights
        return self._lost * sums[:, -1] + sums[:, -2] - used

    def _room(self, devices: Rows, share: float = 0.0, size: int = 0) -> Rows:
        """Hundredths of GPUs that are free, less a share and a size."""
        columns = self._fleet.gpus.columns
        room = (np.asarray(columns[FREE_BYTES])[devices] - size) / self._sizes[devices]
        room = np.minimum(room, np.asarray(columns[FREE_SHARE])[devices] - share)
        room = np.where(np.asarray(columns[EXCLUSIVE])[devices] > 0, 0.0, np.clip(room, 0.0, 1.0))
        return (room * PARTS + SLACK).astype(np.intp)

    def _refresh(self, rows: Rows) -> None:
        """Recompute the fragmentation of workers."""
        if not len(rows):
            return
        slots, columns = self._slots[rows], self._fleet.workers.columns
        free = np.where(self._real[rows], self._room(slots), 0)
        sums = self._uses.table[self._makes[slots], free].sum(axis=1)
        self._free[rows], self._sums[rows] = free, sums
        cpus, memory = np.asarray(columns[FREE_CPUS])[rows], np.asarray(columns[FREE_MEMORY])[rows]
        self._fragmented[rows] = self._fragmentation(rows, sums, cpus, memory)
        self._seen[rows] = self._fleet.changes[rows]

    def _number(self) -> None:
        """Start over after workers have come or gone."""
        hosts, devices = list(self._fleet.workers), list(self._fleet.gpus)
        most = max((len(host.devices) for host in hosts), default=0)
        self._slots = np.zeros((len(hosts), most), dtype=np.intp)
        """By worker: the rows of its GPUs."""
        self._real = np.zeros((len(hosts), most), dtype=bool)
        """Which slots are GPUs: workers have different numbers of them."""
        for host in hosts:
            self._slots[host.row, : len(host.devices)] = [device.row for device in host.devices]
            self._real[host.row, : len(host.devices)] = True
        self._earlier = np.tri(most, k=-1, dtype=bool)
        self._sizes = np.maximum(np.asarray(self._fleet.gpus.columns[TOTAL_BYTES]), 1.0)
        makes: dict[Make, int] = {}
        numbers = [
            makes.setdefault(Make(device.gpu.model, device.gpu.vendor, float(size)), len(makes))
            for device, size in zip(devices, self._sizes, strict=True)
        ]
        self._makes = np.array(numbers, dtype=np.intp)
        self._made = np.array([numbers[host.devices[0].row] if host.devices else 0 for host in hosts], dtype=np.intp)
        """By worker: the make of its first GPU, which stands for all."""
        self._shareable = np.array([device.gpu.shareable for device in devices], dtype=bool)
        self._unified = np.array([host.worker.unified_memory for host in hosts], dtype=np.float64)
        self._uses = Uses(self._workload, list(makes) or [Make("", "", 1.0)])
        self._free = np.zeros((len(hosts), most), dtype=np.intp)
        self._sums = np.zeros((len(hosts), self._uses.table.shape[2]))
        self._fragmented = np.zeros(len(hosts))
        self._seen = np.full(len(hosts), -1, dtype=np.int64)
        self._known: dict[GpuPart, Growth] = {}
        self._generation = self._fleet.generation

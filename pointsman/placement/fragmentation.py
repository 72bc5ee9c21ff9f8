"""Packing that keeps the free parts (holes) of GPUs useful: how much fragmentation an ask would add, by worker.

Enters: a fleet and its expected workload. Leaves: for an ask and each worker, the growth of fragmentation if the
instance went there, and the GPU where fragmentation grows least. The one rule: a decision recomputes only the workers
that have changed.

The fragmentation of a worker is the free part of its GPUs that a typical ask cannot use, because no GPU has room for it
(Weng et al., "Beware of Fragmentation", ATC'23), or because CPUs or memory do not suffice for all of that room. The
part of each hole that no likely mixture of asks can fill (`hole_values`) is lost for good, and weighs more.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from pointsman.placement.asks import Ask, Need
from pointsman.placement.devices import Devices, Floats, Rows
from pointsman.placement.fleet import EXCLUSIVE, FREE_BYTES, FREE_CPUS, FREE_MEMORY, FREE_SHARE, TOTAL_BYTES, Fleet
from pointsman.placement.gpu_models import is_model
from pointsman.selection.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The expected workload, and which part of that workload a partly free GPU can run.
#
# Enters: a sample of asks. Leaves: kinds of asks with their weights, and tables by make of GPU and by free part.
# Packing keeps room for asks that are likely to come.

# The value of a hole in a GPU, by its size
#
# Cutting the demand out of as few whole GPUs as possible is the cutting-stock problem, and its linear program prices
# each size of ask. For example, 81 % of a GPU costs a whole GPU if few asks are for 19 %. A hole is worth the most
# expensive asks that fit in it together. A hole in which no ask fits is worth nothing.

PARTS = 100
"""Sizes are counted in hundredths of a GPU."""
MAX_STEPS = 500
"""Maximum number of steps. It suffices for a hundred sizes, and prices slightly off the optimum are good enough."""
ROUNDING = 1e-9


def hole_values(demand: Mapping[int, float]) -> Floats:
    """Values, in GPUs, of holes of 0, 1, ... PARTS hundredths. `demand` is by size in hundredths."""
    sizes = sorted(demand, reverse=True)
    wanted = np.array([demand[size] for size in sizes])
    # Columns are ways to fill a GPU, at first with one size each. Better ways replace columns until there are none.
    ways = np.diag([float(PARTS // size) for size in sizes])
    values = np.zeros(PARTS + 1)
    for _ in range(MAX_STEPS if sizes else 0):
        prices: Floats = np.linalg.solve(ways.T, np.ones(len(sizes))).astype(np.float64)
        values = _highest_values(sizes, prices)
        if values[PARTS] <= 1 + ROUNDING:
            break
        better = _way(sizes, prices, values)
        used, change = np.linalg.solve(ways, np.stack([wanted, better], axis=1)).T
        lasts = np.full(len(sizes), np.inf)
        np.divide(used, change, out=lasts, where=change > ROUNDING)
        ways[:, int(np.argmin(lasts))] = better
    return values / max(1.0, float(values[PARTS]))


def _highest_values(sizes: Sequence[int], prices: Floats) -> Floats:
    """The highest sum of prices that fits into a hole, by size of the hole."""
    values = np.zeros(PARTS + 1)
    for size, price in zip(sizes, prices, strict=True):
        for _ in range(PARTS // size if price > 0 else 0):
            values[size:] = np.maximum(values[size:], values[:-size] + price)
    return values


def _way(sizes: Sequence[int], prices: Floats, values: Floats) -> Floats:
    """How often each size occurs in the most valuable filling of a whole GPU."""
    way = np.zeros(len(sizes))
    left = PARTS
    while left > 0:
        for index, size in enumerate(sizes):
            if size <= left and prices[index] > 0 and values[left - size] + prices[index] >= values[left] - ROUNDING:
                way[index] += 1
                left -= size
                break
        else:
            left -= 1
    return way


MAX_KINDS = 64
"""Maximum number of kinds of asks. The most common kinds represent all kinds."""
UNLIMITED = 1e18
"""GPUs per CPU or byte for asks that need no CPUs or no memory. It is finite, because infinity times 0 is NaN."""
SLACK = 1e-6
"""Tolerance for rounding errors: shares and CPUs are added and subtracted."""


class Make(msgspec.Struct, frozen=True):
    """GPUs that are the same to every ask."""

    model: str
    vendor: str
    memory_bytes: float


class AskKind(msgspec.Struct, frozen=True):
    """What equal asks have in common."""

    need: Need
    cpus: float
    gpu_share: float | None
    exclusive: bool
    gpu_models: frozenset[str]
    vendors: frozenset[str]

    @classmethod
    def of(cls, ask: Ask) -> "AskKind":
        return cls(ask.need, ask.cpus, ask.gpu_share, ask.exclusive, ask.gpu_models, ask.engine.vendors)

    def on(self, make: Make) -> tuple[int, float] | None:
        """(number of GPUs of this make, share of each) that an ask takes; None if it cannot have these GPUs."""
        if make.vendor not in self.vendors or (self.gpu_models and not is_model(make.model, self.gpu_models)):
            return None
        for gpus in self.need.tensor_parallel_sizes:
            each = self.need.gpu_bytes(gpus)
            if each <= make.memory_bytes:
                share = each / make.memory_bytes if each else 0.0
                return gpus, 1.0 if self.exclusive else max(share, self.gpu_share or 0.0)
        return None


class Workload:
    """Kinds of asks with their weights, which add up to 1. Asks without GPUs are left out."""

    def __init__(self, asks: Iterable[Ask] = ()) -> None:
        self._weigh(Counter(AskKind.of(ask) for ask in asks if max(ask.need.tensor_parallel_sizes, default=0) > 0))

    @classmethod
    def of_counts(cls, counts: "Counter[AskKind]") -> "Workload":
        made = cls()
        made._weigh(counts)
        return made

    def _weigh(self, counts: "Counter[AskKind]") -> None:
        common = counts.most_common(MAX_KINDS)
        total = sum(count for _, count in common)
        self.kinds = tuple(kind for kind, _ in common)
        self.weights = tuple(count / total for _, count in common)


class Uses:
    """The part of a GPU that the kinds in a workload can use, by make of the GPU and by free hundredths."""

    def __init__(self, workload: Workload, makes: Sequence[Make]) -> None:
        self.kinds = wide = len(workload.kinds)
        self.weights = np.array(workload.weights, dtype=np.float64)
        self.cpus = np.array([kind.cpus - SLACK for kind in workload.kinds], dtype=np.float64)
        self.memory = np.array([kind.need.host_bytes for kind in workload.kinds], dtype=np.float64)
        self.gpus = np.full((len(makes), wide), np.inf)
        """The number of GPUs that an ask takes, by make and kind."""
        self.per_cpu = np.full((len(makes), wide), UNLIMITED)
        """GPUs used per CPU, by make and kind. `per_byte` is the same per byte of the machine's memory."""
        self.per_byte = np.full((len(makes), wide), UNLIMITED)
        self.table = np.zeros((len(makes), PARTS + 1, 2 * wide + 2))
        """What a GPU offers, by its make and free hundredths: the part that each kind can use, whether there is room
        for each kind, the free part, and the part that no mixture of kinds can use."""
        self.table[:, :, -2] = np.arange(PARTS + 1) / PARTS
        for row, make in enumerate(makes):
            self._fill(row, make, workload)

    def _fill(self, row: int, make: Make, workload: Workload) -> None:
        table, wide, free = self.table[row], self.kinds, np.arange(PARTS + 1)
        demand: dict[int, float] = {}
        for column, kind in enumerate(workload.kinds):
            taken = kind.on(make)
            if taken is None:
                continue
            gpus, share = taken
            part = min(max(math.ceil(share * PARTS - SLACK), 1), PARTS)
            demand[part] = demand.get(part, 0.0) + gpus * workload.weights[column]
            table[:, wide + column] = free >= part
            self.gpus[row, column] = gpus
            if kind.cpus > 0:
                self.per_cpu[row, column] = gpus * share / kind.cpus
            if kind.need.host_bytes > 0:
                self.per_byte[row, column] = gpus * share / kind.need.host_bytes
        table[:, :wide] = table[:, wide:-2] * table[:, -2:-1]
        table[:, -1] = table[:, -2] - hole_values(demand)


LOST = 10.0
"""Weight of what is lost for good, relative to what one kind of ask cannot use. The first part decides, and the second
breaks ties."""
MIXTURE = 2.0
"""CPUs and memory are taken to suffice for this many times the asks of one kind, because asks that need much of them
share workers with asks that need little. Values from 1.5 to 3 hardly differ; bench/README.md has the figures."""
MAX_CACHED_PARTS = 256


class Growth(msgspec.Struct, eq=False):
    """How fragmentation grows if an ask is placed, by row of the worker. Read only."""

    amount: Floats
    """The growth in GPUs. Less is better; the growth is often below 0, and inf if the ask does not fit."""
    device: Rows
    """The row of the GPU where fragmentation grows least. If the ask takes several GPUs, the row of the first."""
    seen: "NDArray[np.int64]"
    """The worker's count of changes when the growth was computed."""


class GpuPart(msgspec.Struct, frozen=True):
    """What an ask takes from one worker."""

    gpus: int
    gpu_bytes: int
    """Bytes on each GPU."""
    gpu_share: float
    exclusive: bool
    cpus: float
    memory_bytes: int
    suits: tuple[frozenset[str], frozenset[str], frozenset[tuple[str, int]]]
    """Vendors, models and GPUs that the ask may have."""

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
    """Computes the growth of fragmentation in one fleet for one workload."""

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
        """How fragmentation grows if the ask takes `gpus` GPUs of one worker. 0 means that it is on the CPU."""
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
        # Sums in another order differ in the last digits, but equal workers must stay equal.
        spoilt = np.round(there - self._fragmented[workers], 9)
        order = np.lexsort((spoilt, workers))  # a stable sort: on a tie, the first wins
        best = order[np.flatnonzero(np.diff(workers[order], prepend=-1))]
        growth.amount[workers[best]] = spoilt[best]
        if part.gpus:
            growth.device[workers[best]] = devices[best, 0]

    def _options(self, rows: Rows, ask: Ask, part: GpuPart) -> tuple[Rows, Rows]:
        """(worker, slots of its GPUs) for each way to place the ask: on any one GPU, or on the fullest that suffice."""
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
        """Hundredths of each GPU that are left if the ask is placed."""
        if part.exclusive:
            return np.zeros_like(devices)
        return np.where(self._shareable[devices], self._room(devices, part.gpu_share, part.gpu_bytes), 0)

    # The present fragmentation

    def _fragmentation(self, workers: Rows, sums: Floats, cpus: Floats, memory: Floats) -> Floats:
        """The fragmentation of workers, in GPUs. `sums` has the sums of the table over the GPUs of each worker."""
        uses, makes, kinds = self._uses, self._made[workers], self._uses.kinds
        # At least a little of both, so that an ask that needs no CPUs or memory is not limited by them.
        some_cpus, some_memory = np.maximum(cpus, SLACK)[:, None], np.maximum(memory, 1.0)[:, None]
        lasts = np.minimum(some_cpus * uses.per_cpu[makes], some_memory * uses.per_byte[makes])
        runs = (sums[:, kinds:-2] >= uses.gpus[makes]) & (cpus[:, None] >= uses.cpus) & (memory[:, None] >= uses.memory)
        used = np.where(runs, np.minimum(sums[:, :kinds], self._mixture * lasts), 0.0) @ uses.weights
        return self._lost * sums[:, -1] + sums[:, -2] - used

    def _room(self, devices: Rows, share: float = 0.0, size: int = 0) -> Rows:
        """Hundredths of each GPU that are free, minus a share and a size."""
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
        """The rows of the GPUs of each worker."""
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
        """The make of the first GPU of each worker. It stands for all GPUs of the worker."""
        self._shareable = np.array([device.gpu.shareable for device in devices], dtype=bool)
        self._unified = np.array([host.worker.unified_memory for host in hosts], dtype=np.float64)
        self._uses = Uses(self._workload, list(makes) or [Make("", "", 1.0)])
        self._free = np.zeros((len(hosts), most), dtype=np.intp)
        self._sums = np.zeros((len(hosts), self._uses.table.shape[2]))
        self._fragmented = np.zeros(len(hosts))
        self._seen = np.full(len(hosts), -1, dtype=np.int64)
        self._known: dict[GpuPart, Growth] = {}
        self._generation = self._fleet.generation

"""The fleet as the placer sees it: workers and GPUs, how much is free on each, and the claims of instances.

Enters: observed workers, claims of instances. Leaves: rosters of workers and of GPUs whose columns are always current.
The one rule: a claim counts exactly once, from `claim` to `release`, and only while its worker exists.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from pointsman.errors import PointsmanError, UnknownName
from pointsman.placement.asks import Claim, Place
from pointsman.selection import Roster
from pointsman.selection.arrays import np
from pointsman.types import Gpu, Worker

# Columns of the roster of GPUs.
FREE_BYTES = "free_bytes"
"""Free memory. Below 0 if claims and other processes take more than the GPU has."""
TOTAL_BYTES = "total_bytes"
"""Total memory without the reserved part."""
FREE_SHARE = "free_share"
TENANTS = "tenants"
"""Number of instances on the GPU."""
EXCLUSIVE = "exclusive"
"""1 while the GPU has an exclusive instance, or has any instance and may not be shared. Otherwise 0."""
WORKER = "worker"
"""The row of the GPU's worker."""

# Columns of the roster of workers.
FREE_CPUS = "free_cpus"
FREE_MEMORY = "free_memory_bytes"
TOTAL_MEMORY = "total_memory_bytes"
INSTANCES = "instances"
"""Number of instances on the worker."""
GPUS = "gpus"


class Device:
    __slots__ = ("gpu", "host", "row")

    def __init__(self, gpu: Gpu, host: "Host", row: int) -> None:
        self.gpu = gpu
        self.host = host
        self.row = row

    @property
    def labels(self) -> Mapping[str, str]:
        return self.host.worker.labels

    def __str__(self) -> str:
        return f"{self.host}/gpu{self.gpu.index}"

    __repr__ = __str__


class Host:
    """One worker: a row of the fleet, and the rows of its GPUs."""

    __slots__ = ("devices", "row", "worker")

    def __init__(self, worker: Worker, row: int, first_device: int) -> None:
        self.worker = worker
        self.row = row
        self.devices = [Device(gpu, self, first_device + index) for index, gpu in enumerate(worker.gpus)]

    @property
    def labels(self) -> Mapping[str, str]:
        return self.worker.labels

    def __str__(self) -> str:
        return self.worker.name

    __repr__ = __str__


class Occupant(msgspec.Struct, frozen=True):
    """An instance that has a place."""

    instance_id: str
    place: Place
    deployment: str = ""
    priority: int = 0


class Snapshot(msgspec.Struct, frozen=True):
    """A fleet at one moment, to send or to keep."""

    workers: tuple[Worker, ...]
    occupants: tuple[Occupant, ...] = ()

    def fleet(self) -> "Fleet":
        fleet = Fleet(self.workers)
        for one in self.occupants:
            fleet.claim(one.instance_id, one.place, one.deployment, one.priority)
        return fleet


class Occupants(Mapping[str, Occupant]):
    """The instances that have a place, by id, in the order in which they were placed; also by worker or deployment."""

    def __init__(self) -> None:
        self._by_id: dict[str, Occupant] = {}
        self._by_worker: dict[str, dict[str, Occupant]] = {}
        self._by_deployment: dict[str, dict[str, Occupant]] = {}

    def __getitem__(self, instance_id: str) -> Occupant:
        return self._by_id[instance_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, one: Occupant) -> None:
        self._by_id[one.instance_id] = one
        self._by_deployment.setdefault(one.deployment, {})[one.instance_id] = one
        for worker in one.place.workers:
            self._by_worker.setdefault(worker, {})[one.instance_id] = one

    def remove(self, instance_id: str) -> Occupant | None:
        """The removed occupant; None if the instance has no place."""
        one = self._by_id.pop(instance_id, None)
        if one is not None:
            _discard(self._by_deployment, one.deployment, instance_id)
            for worker in one.place.workers:
                _discard(self._by_worker, worker, instance_id)
        return one

    def on(self, worker: str) -> list[Occupant]:
        """The occupants with a claim on a worker."""
        return list(self._by_worker.get(worker, {}).values())

    def of(self, deployment: str) -> list[Occupant]:
        return list(self._by_deployment.get(deployment, {}).values())

    def on_gpus(self, deployment: str, worker: str) -> Counter[int]:
        """The number of instances of a deployment on each GPU of a worker, by index of the GPU."""
        here = (one for one in self.on(worker) if one.deployment == deployment) if deployment else ()
        return Counter(gpu for one in here for name, gpu in one.place.gpus if name == worker)


def _discard(groups: dict[str, dict[str, Occupant]], key: str, instance_id: str) -> None:
    del groups[key][instance_id]
    if not groups[key]:
        del groups[key]


class Fleet:
    """All workers and all claims. Rows are renumbered when workers are added, changed or removed."""

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.occupants = Occupants()
        self.seen: dict[str, frozenset[int]] = {}
        """Present and former workers, with the indexes of their GPUs. A lost worker may come back."""
        self.generation = 0
        """A number that grows whenever rows are renumbered."""
        self._reset(map(_checked, workers))

    def __len__(self) -> int:
        return len(self._rows.hosts)

    def __contains__(self, worker: str) -> bool:
        return worker in self._rows.hosts

    def __getitem__(self, worker: str) -> Host:
        return self._rows.host(worker)

    def put(self, *workers: Worker) -> list[str]:
        """Add or update workers. Claims on them stay. Returns the instances with a claim on a GPU that is gone. Other
        claims of these instances stay until they are released."""
        found = {worker.name: _checked(worker) for worker in workers}
        gpus = {name: {None, *(gpu.index for gpu in worker.gpus)} for name, worker in found.items()}
        lost = self._forfeit(found, lambda claim: claim.gpu not in gpus.get(claim.worker, {claim.gpu}))
        self._reset(({host.worker.name: host.worker for host in self.workers} | found).values())
        return lost

    def remove(self, worker: str) -> list[str]:
        """Remove a worker. Returns the instances that had a claim on it. Their claims on other workers stay until
        they are released, because processes of these instances may run there."""
        gone = self[worker]
        lost = self._forfeit((worker,), lambda claim: claim.worker == worker)
        self._reset(host.worker for host in self.workers if host is not gone)
        return lost

    def claim(self, instance_id: str, place: Place, deployment: str = "", priority: int = 0) -> None:
        """Count what an instance takes. Raises if the instance already has a place."""
        if instance_id in self.occupants:
            raise PointsmanError(f'instance "{instance_id}" has a place already; release it first')
        for claim in place.claims:
            self._rows.device(claim)  # raises before anything is counted
        self.occupants.add(Occupant(instance_id, place, deployment, priority))
        self._rows.count(place, +1)

    def release(self, instance_id: str) -> bool:
        """Free everything that an instance claimed. Returns False if the instance had no place."""
        one = self.occupants.remove(instance_id)
        if one is not None:
            self._rows.count(one.place, -1)
        return one is not None

    def snapshot(self) -> Snapshot:
        return Snapshot(tuple(host.worker for host in self.workers), tuple(self.occupants.values()))

    def copy(self) -> "Fleet":
        """A separate fleet with the same workers and claims, for trials."""
        made = self.snapshot().fleet()
        made.seen = dict(self.seen)
        return made

    def _forfeit(self, workers: Iterable[str], is_gone: Callable[[Claim], bool]) -> list[str]:
        """Drop the claims on these workers for which `is_gone` is true. Returns the instances that had such a claim."""
        lost = [one for name in workers for one in self.occupants.on(name) if any(map(is_gone, one.place.claims))]
        for one in lost:
            left = tuple(claim for claim in one.place.claims if not is_gone(claim))
            if self.release(one.instance_id) and left:
                place = msgspec.structs.replace(one.place, claims=left)
                self.claim(one.instance_id, place, one.deployment, one.priority)
        return list(dict.fromkeys(one.instance_id for one in lost))

    def _reset(self, workers: Iterable[Worker]) -> None:
        """Renumber the rows of these workers, and count every claim again."""
        self._rows = FleetRows(workers)
        for host in self._rows.hosts.values():
            self.seen[host.worker.name] = frozenset(gpu.index for gpu in host.worker.gpus)
        self.workers: Roster[Host] = Roster(list(self._rows.hosts.values()), self._rows.worker_columns, arrays=True)
        """All workers, with live columns."""
        self.gpus: Roster[Device] = Roster(self._rows.devices, self._rows.gpu_columns, arrays=True)
        self.changes = self._rows.changes
        """The number of claims and releases on each worker so far, by row of the worker."""
        self.generation += 1
        for one in self.occupants.values():
            self._rows.count(one.place, +1)


class FleetRows:
    """One numbering of the workers and GPUs, with columns that say what is free on each."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.hosts: dict[str, Host] = {}
        self.devices: list[Device] = []
        for worker in workers:
            host = self.hosts[worker.name] = Host(worker, len(self.hosts), len(self.devices))
            self.devices += host.devices
        devices, hosts = self.devices, list(self.hosts.values())
        total = [device.gpu.memory_bytes - device.host.worker.reserved_gpu_bytes for device in devices]
        self.gpu_columns = {
            TOTAL_BYTES: np.array(total, dtype=np.float64),
            FREE_BYTES: np.array(
                [size - device.gpu.used_bytes for size, device in zip(total, devices, strict=True)], dtype=np.float64
            ),
            FREE_SHARE: np.ones(len(devices)),
            TENANTS: np.zeros(len(devices)),
            EXCLUSIVE: np.zeros(len(devices)),
            WORKER: np.array([device.host.row for device in devices], dtype=np.float64),
        }
        memory = [host.worker.memory_bytes - host.worker.reserved_memory_bytes for host in hosts]
        self.worker_columns = {
            TOTAL_MEMORY: np.array(memory, dtype=np.float64),
            FREE_MEMORY: np.array(
                [size - host.worker.used_memory_bytes for size, host in zip(memory, hosts, strict=True)],
                dtype=np.float64,
            ),
            FREE_CPUS: np.array([host.worker.cpus for host in hosts], dtype=np.float64),
            INSTANCES: np.zeros(len(hosts)),
            GPUS: np.array([len(host.devices) for host in hosts], dtype=np.float64),
        }
        self.changes = np.zeros(len(hosts), dtype=np.int64)

    def host(self, worker: str) -> Host:
        try:
            return self.hosts[worker]
        except KeyError:
            raise UnknownName("worker", worker, self.hosts) from None

    def device(self, claim: Claim) -> tuple[Host, Device | None]:
        """The worker and the GPU of a claim. The GPU is None if the claim takes no GPU."""
        host = self.host(claim.worker)
        if claim.gpu is None:
            return host, None
        device = next((one for one in host.devices if one.gpu.index == claim.gpu), None)
        if device is None:
            raise UnknownName(
                f'GPU of worker "{claim.worker}"', str(claim.gpu), [str(g.index) for g in host.worker.gpus]
            )
        return host, device

    def count(self, place: Place, sign: int) -> None:
        """Add the claims of a place or, if `sign` is -1, subtract them."""
        gpus, workers = self.gpu_columns, self.worker_columns
        counted: set[str] = set()
        for claim in place.claims:
            host, device = self.device(claim)
            workers[FREE_CPUS][host.row] -= sign * claim.cpus
            memory = claim.memory_bytes + (claim.gpu_bytes if host.worker.unified_memory else 0)
            workers[FREE_MEMORY][host.row] -= sign * memory
            if claim.worker not in counted:
                counted.add(claim.worker)
                self.changes[host.row] += 1
                workers[INSTANCES][host.row] += sign
            if not workers[INSTANCES][host.row]:  # rounding errors must not remain
                workers[FREE_CPUS][host.row] = host.worker.cpus
            if device is not None:
                row = device.row
                gpus[FREE_BYTES][row] -= sign * claim.gpu_bytes
                gpus[FREE_SHARE][row] -= sign * claim.gpu_share
                gpus[TENANTS][row] += sign
                gpus[EXCLUSIVE][row] += sign * (claim.exclusive or not device.gpu.shareable)
                if not gpus[TENANTS][row]:
                    gpus[FREE_SHARE][row] = 1.0


def _checked(worker: Worker) -> Worker:
    if len({gpu.index for gpu in worker.gpus}) < len(worker.gpus):
        raise PointsmanError(f'worker "{worker.name}" has two GPUs with the same index; give them different indexes')
    return worker

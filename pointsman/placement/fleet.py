"""The fleet as the placer sees it: workers and GPUs with what is free of them, and who has claimed what.

Enters: workers as they are observed, claims of instances. Leaves: rosters of workers and of GPUs whose columns are
always current. The one rule: a claim is counted from `claim` to `release`, exactly once, and no longer than its worker
is there.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pointsman.errors import PointsmanError, UnknownName
from pointsman.placement.asks import Claim, Place
from pointsman.selection import Roster
from pointsman.selection.arrays import np
from pointsman.types import Gpu, Worker

# Columns of the roster of GPUs.
FREE_BYTES = "free_bytes"
"""Below 0: more is claimed or used by others than there is."""
TOTAL_BYTES = "total_bytes"
"""Without what is reserved."""
FREE_SHARE = "free_share"
TENANTS = "tenants"
"""Instances that have a part of it."""
EXCLUSIVE = "exclusive"
"""1 while somebody has it alone, or if it may not be shared and somebody has it."""
WORKER = "worker"
"""The row of its worker."""

# Columns of the roster of workers.
FREE_CPUS = "free_cpus"
FREE_MEMORY = "free_memory_bytes"
TOTAL_MEMORY = "total_memory_bytes"
INSTANCES = "instances"
"""Instances that have a part of it."""
GPUS = "gpus"


class Device:
    """One GPU: a row of the fleet."""

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
        self.devices = [Device(gpu, self, first_device + place) for place, gpu in enumerate(worker.gpus)]

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
    """A fleet at one moment, to be passed on or kept."""

    workers: tuple[Worker, ...]
    occupants: tuple[Occupant, ...] = ()

    def fleet(self) -> "Fleet":
        """A fleet of its own each time."""
        fleet = Fleet(self.workers)
        for one in self.occupants:
            fleet.claim(one.instance_id, one.place, one.deployment, one.priority)
        return fleet


class Fleet:
    """All workers and all claims."""

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self._claims: dict[str, Place] = {}
        self._deployments: dict[str, str] = {}
        self._priorities: dict[str, int] = {}
        self._by_deployment: dict[str, dict[str, None]] = {}
        self._workers: dict[str, Worker] = {}
        self._on: dict[str, dict[str, None]] = {}
        """By worker, the instances with a part of it."""
        self.generation = 0
        """Raised whenever rows are numbered anew."""
        self._reset(map(_checked, workers))

    # Members

    def __len__(self) -> int:
        return len(self._workers)

    def __contains__(self, worker: str) -> bool:
        return worker in self._workers

    def __getitem__(self, worker: str) -> Host:
        try:
            return self._hosts[worker]
        except KeyError:
            raise UnknownName("worker", worker, self._workers) from None

    def put(self, *workers: Worker) -> list[str]:
        """Workers have come, or something about them has changed; claims on them stay. The instances that had a GPU
        which is gone: whatever they had claimed is free, as if the worker were gone."""
        told = {worker.name: _checked(worker) for worker in workers}
        lost = list(dict.fromkeys(one for worker in told.values() for one in self._without_their_gpus(worker)))
        for instance_id in lost:
            self.release(instance_id)
        self._reset({**self._workers, **told}.values())
        return lost

    def remove(self, worker: str) -> list[str]:
        """A worker is gone. The instances that had a part of it: whatever they had claimed, also elsewhere, is free."""
        if worker not in self._workers:
            raise UnknownName("worker", worker, self._workers)
        lost = list(self._on[worker])
        for instance_id in lost:
            self.release(instance_id)
        self._reset([one for name, one in self._workers.items() if name != worker])
        return lost

    # Claims

    def claim(self, instance_id: str, place: Place, deployment: str = "", priority: int = 0) -> None:
        """Count what an instance takes. One that has a place already is a broken contract."""
        if instance_id in self._claims:
            raise PointsmanError(f'instance "{instance_id}" has a place already; release it first')
        for claim in place.claims:
            self._device(claim)  # raises before anything is counted
        self._claims[instance_id] = place
        self._deployments[instance_id] = deployment
        self._priorities[instance_id] = priority
        self._by_deployment.setdefault(deployment, {})[instance_id] = None
        for name in place.workers:
            self._on[name][instance_id] = None
        self._count(place, +1)

    def release(self, instance_id: str) -> bool:
        """What it had is free. False: it had nothing, and nothing has changed."""
        place = self._claims.pop(instance_id, None)
        if place is None:
            return False
        deployment = self._deployments.pop(instance_id)
        del self._priorities[instance_id]
        siblings = self._by_deployment[deployment]
        del siblings[instance_id]
        if not siblings:
            del self._by_deployment[deployment]
        for name in place.workers:
            del self._on[name][instance_id]
        self._count(place, -1)
        return True

    def place_of(self, instance_id: str) -> Place | None:
        """Where an instance is."""
        return self._claims.get(instance_id)

    def deployment_of(self, instance_id: str) -> str:
        return self._deployments[instance_id]

    def priority_of(self, instance_id: str) -> int:
        return self._priorities[instance_id]

    def snapshot(self) -> Snapshot:
        """The workers and claims as they are now."""
        return Snapshot(
            tuple(self._workers.values()),
            tuple(
                Occupant(instance_id, place, self._deployments[instance_id], self._priorities[instance_id])
                for instance_id, place in self._claims.items()
            ),
        )

    def copy(self) -> "Fleet":
        """The same workers and claims, to try things out on."""
        return self.snapshot().fleet()

    def instances(self) -> Mapping[str, Place]:
        """Everybody who has a place, in the order in which they got it."""
        return self._claims

    def instances_on(self, worker: str) -> Sequence[str]:
        """Those with a part of a worker, in the order in which they came."""
        return list(self._on[worker])

    def hosts_of(self, deployment: str) -> Mapping[Host, int]:
        """Where instances of a deployment are, and how many of them on each worker."""
        counts: dict[Host, int] = {}
        for instance_id in self._by_deployment.get(deployment, ()):
            for name in self._claims[instance_id].workers:
                host = self._hosts[name]
                counts[host] = counts.get(host, 0) + 1
        return counts

    def rows_by_label(self, key: str) -> Mapping[str, list[int]]:
        """The rows of the workers with each value of a label."""
        found = self._labels.get(key)
        if found is None:
            found = self._labels[key] = {}
            for host in self._hosts.values():
                value = host.labels.get(key)
                if value is not None:
                    found.setdefault(value, []).append(host.row)
        return found

    def siblings_on(self, deployment: str, worker: str) -> Mapping[int, int]:
        """How many instances of a deployment are on each GPU of a worker, by its index."""
        counts: dict[int, int] = {}
        for instance_id in self._on[worker] if deployment else ():
            if self._deployments[instance_id] == deployment:
                for name, gpu in self._claims[instance_id].gpus:
                    if name == worker:
                        counts[gpu] = counts.get(gpu, 0) + 1
        return counts

    # The numbers

    def _without_their_gpus(self, worker: Worker) -> list[str]:
        """Instances that have a GPU of this worker which it has no longer."""
        indexes = {gpu.index for gpu in worker.gpus}
        return [
            instance_id
            for instance_id in self._on.get(worker.name, ())
            if any(name == worker.name and gpu not in indexes for name, gpu in self._claims[instance_id].gpus)
        ]

    def _reset(self, workers: Iterable[Worker]) -> None:
        """Begin anew with these workers and count everything again."""
        self._workers = {worker.name: worker for worker in workers}
        hosts: list[Host] = []
        devices: list[Device] = []
        for row, worker in enumerate(self._workers.values()):
            host = Host(worker, row, len(devices))
            hosts.append(host)
            devices += host.devices
        self._hosts = {str(host): host for host in hosts}
        self._labels: dict[str, dict[str, list[int]]] = {}
        self._on = {name: self._on.get(name, {}) for name in self._workers}
        reserved = [device.host.worker.reserved_gpu_bytes for device in devices]
        total = [device.gpu.memory_bytes - kept for device, kept in zip(devices, reserved, strict=True)]
        self._gpu_columns = {
            TOTAL_BYTES: np.array(total, dtype=np.float64),
            FREE_BYTES: np.array(
                [size - device.gpu.used_bytes for size, device in zip(total, devices, strict=True)], dtype=np.float64
            ),
            FREE_SHARE: np.ones(len(devices)),
            TENANTS: np.zeros(len(devices)),
            EXCLUSIVE: np.zeros(len(devices)),
            WORKER: np.array([device.host.row for device in devices], dtype=np.float64),
        }
        memory = [worker.memory_bytes - worker.reserved_memory_bytes for worker in self._workers.values()]
        self._worker_columns = {
            TOTAL_MEMORY: np.array(memory, dtype=np.float64),
            FREE_MEMORY: np.array(
                [size - host.worker.used_memory_bytes for size, host in zip(memory, hosts, strict=True)],
                dtype=np.float64,
            ),
            FREE_CPUS: np.array([worker.cpus for worker in self._workers.values()], dtype=np.float64),
            INSTANCES: np.zeros(len(hosts)),
            GPUS: np.array([len(host.devices) for host in hosts], dtype=np.float64),
        }
        self.workers: Roster[Host] = Roster(hosts, self._worker_columns, arrays=True)
        """Everybody, with live columns."""
        self.gpus: Roster[Device] = Roster(devices, self._gpu_columns, arrays=True)
        self.generation += 1
        self.changes = np.zeros(len(hosts), dtype=np.int64)
        """By row of the worker: how often something was claimed there or released."""
        for place in self._claims.values():
            self._count(place, +1)

    def _device(self, claim: Claim) -> tuple[Host, Device | None]:
        host = self[claim.worker]
        if claim.gpu is None:
            return host, None
        device = next((one for one in host.devices if one.gpu.index == claim.gpu), None)
        if device is None:
            raise UnknownName(
                f'GPU of worker "{claim.worker}"', str(claim.gpu), [str(g.index) for g in host.worker.gpus]
            )
        return host, device

    def _count(self, place: Place, sign: int) -> None:
        gpus, workers = self._gpu_columns, self._worker_columns
        counted: set[str] = set()
        for claim in place.claims:
            host, device = self._device(claim)
            workers[FREE_CPUS][host.row] -= sign * claim.cpus
            memory = claim.memory_bytes + (claim.gpu_bytes if host.worker.unified_memory else 0)
            workers[FREE_MEMORY][host.row] -= sign * memory
            if claim.worker not in counted:
                counted.add(claim.worker)
                self.changes[host.row] += 1
                workers[INSTANCES][host.row] += sign
            if not workers[INSTANCES][host.row]:  # fractions must not leave a residue
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
        raise PointsmanError(f'worker "{worker.name}" has two GPUs with the same index; number them apart')
    return worker

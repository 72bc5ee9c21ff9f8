"""The second tier: tensor parallel on GPUs of one worker, as few as suffice."""

from collections.abc import Callable
from functools import reduce

from pointsman.placement.asks import Arrangement, Ask, Place, Tier
from pointsman.placement.devices import ABLE, Codes, Devices, Floats, Mask
from pointsman.placement.fit.base import HostRoom, ResourceFit, TierFit, claims_of, lacks_gpus, nowhere
from pointsman.placement.fleet import Device, Host
from pointsman.reasons import Reason
from pointsman.selection.arrays import np

NEARNESS: tuple[Callable[[Device], object], ...] = (
    lambda device: device.gpu.link or None,
    lambda device: device.gpu.pcie or None,
    lambda device: device.gpu.numa,
)
"""What the GPUs of an instance should have in common, best first."""


class FitsOnSeveralGpus(ResourceFit):
    """Demands several GPUs of one worker, of one model unless mixed, each with room for its part."""

    tier = Tier.SEVERAL_GPUS

    def forbidden(self, ask: Ask) -> Reason | None:
        if max(ask.need.tensor_parallel_sizes, default=0) < 2:
            return Reason("cannot-be-divided")
        if not ask.several_gpus:
            return Reason("several-gpus-off")
        return None if ask.engine.tensor_parallel else Reason("engine-has-no-tensor-parallelism")

    def fit(self, ask: Ask, among: Mask) -> TierFit:
        devices = self.devices()
        obstacles, free, machine = devices.obstacles(ask), devices.free(ask), devices.machine_free(ask)
        hosts = HostRoom(self.fleet, ask.cpus, ask.need.host_bytes)
        sizes = [size for size in ask.need.tensor_parallel_sizes if size > 1]
        for size in sizes:
            needed = ask.need.gpu_bytes(size)
            room = (obstacles == ABLE) & (free >= needed) & (machine >= needed * size)[devices.workers]
            kinds = devices.kinds(room, mixed=ask.mixed_gpus)
            counts = reduce(np.maximum, map(devices.by_worker.count, kinds), np.zeros(len(self.fleet)))
            fits = (counts >= size) & hosts.enough & among
            if fits.any():
                return self._found(ask, devices, size, kinds, room, fits, free, hosts)
        return self._nowhere(ask, sizes, obstacles, free, hosts)

    def _found(
        self,
        ask: Ask,
        devices: Devices,
        size: int,
        kinds: list[Mask],
        room: Mask,
        fits: Mask,
        free: Floats,
        hosts: HostRoom,
    ) -> TierFit:
        needed = ask.need.gpu_bytes(size)
        sign = 1.0 if ask.arrangement is Arrangement.BINPACK else -1.0
        taken = [devices.by_worker.nth_smallest(np.where(kind, sign * free, np.inf), size) for kind in kinds]
        last = sign * reduce(np.minimum, taken)  # of the last GPU taken, with the best model of each worker
        linked = reduce(np.maximum, map(devices.by_worker.count_linked, kinds)) >= size

        def place(host: Host) -> Place:
            chosen = self._chosen(ask, [device for device in host.devices if room[device.row]], free, size)
            return Place(tier=self.tier, claims=claims_of(ask, chosen, needed), tensor_parallel_size=size)

        def why(host: Host) -> Reason:
            with_room = int(room[devices.of(host)].sum())
            wanted = {"gpus": size, "gpu_bytes": needed, "one_model": with_room >= size}
            return hosts.lacking(host) or Reason("too-few-gpus", {**wanted, "with_room": with_room})

        return TierFit(ask, fits, last, float(needed), place, why, linked.astype(np.float64), gpus=size)

    def _nowhere(self, ask: Ask, sizes: list[int], obstacles: Codes, free: Floats, hosts: HostRoom) -> TierFit:
        largest = self.devices().by_worker.largest(np.where(obstacles == ABLE, free, -np.inf))
        each = {size: ask.need.gpu_bytes(size) for size in sizes}

        def why(host: Host) -> Reason:
            lacking = lacks_gpus(obstacles, host) or hosts.lacking(host)
            if lacking is not None:
                return lacking
            most = max((size for size in sizes if size <= len(host.devices)), default=sizes[0])
            wanted = {"gpus": most, "gpu_bytes": each[most], "one_model": not ask.mixed_gpus}
            here = {"found_gpus": len(host.devices), "largest_free_bytes": float(largest[host.row])}
            return Reason("too-few-gpus", {**wanted, **here})

        return nowhere(ask, len(self.fleet), why)

    def _chosen(self, ask: Ask, fitting: list[Device], free: Floats, size: int) -> list[Device]:
        """Linked GPUs if there are enough, else of one PCIe switch, else of one NUMA node; one model unless mixed."""
        options = _groups(fitting, lambda device: None if ask.mixed_gpus else device.gpu.model, size)
        for shared in NEARNESS:
            near = [
                group
                for option in options
                for group in _groups([device for device in option if shared(device) is not None], shared, size)
            ]
            if near:
                options = near
                break
        rows = [self.in_order(ask, group, free)[:size] for group in options]
        sign = 1 if ask.arrangement is Arrangement.BINPACK else -1
        return min(rows, key=lambda row: sign * sum(float(free[device.row]) for device in row))


def _groups(devices: list[Device], key: Callable[[Device], object], size: int) -> list[list[Device]]:
    """Groups with the same key that have at least `size` members, in the order of their first members."""
    groups: dict[object, list[Device]] = {}
    for device in devices:
        groups.setdefault(key(device), []).append(device)
    return [group for group in groups.values() if len(group) >= size]

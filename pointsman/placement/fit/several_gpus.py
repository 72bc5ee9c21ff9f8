"""The second tier: as few GPUs of one worker as suffice. The model is divided by tensor parallelism, or by layers if
the engine divides models by layers or if stages are demanded."""

from collections.abc import Callable
from functools import reduce

from pointsman.placement.asks import Arrangement, Ask, Place, Tier
from pointsman.placement.devices import ABLE, Codes, Devices, Floats, Mask, alike
from pointsman.placement.fit.base import (
    HostRoom,
    ResourceFit,
    TierFit,
    claims_of,
    lacks_gpus,
    layers_elsewhere,
    nowhere,
)
from pointsman.placement.fit.stages import Split, StagesOnOneWorker, staged_claims
from pointsman.placement.fleet import Device, Host
from pointsman.reasons import Reason
from pointsman.selection.arrays import np

NEARNESS: tuple[Callable[[Device], object], ...] = (
    lambda device: device.gpu.link or None,
    lambda device: device.gpu.pcie or None,
    lambda device: device.gpu.numa,
)
"""What the GPUs of an instance should have in common, with the best first."""


class FitsOnSeveralGpus(ResourceFit):
    """Demands several GPUs of one worker, of one model unless mixed, each with room for its part."""

    tier = Tier.SEVERAL_GPUS

    def forbidden(self, ask: Ask) -> Reason | None:
        sizes, several = ask.need.tensor_parallel_sizes, ask.engine.tensor_parallel
        by_layers = ask.engine.layer_split or (several and (ask.pipeline_parallel_size or 1) > 1)
        if max(sizes, default=0) < 2 and not (by_layers and sizes and ask.need.layers > 1) and ask.demanded_gpus < 2:
            return Reason("cannot-be-divided")
        if not ask.open_to(self.tier):
            return Reason("several-gpus-off")
        if not several and not ask.engine.layer_split:
            return Reason("engine-has-no-tensor-parallelism")
        if ask.gpu_count == 1:
            return Reason("demands-gpus", {"gpus": 1})
        if ask.tensor_parallel_size is not None and ask.tensor_parallel_size not in sizes:
            return Reason("size-does-not-divide", {"size": ask.tensor_parallel_size, "sizes": list(sizes)})
        return layers_elsewhere(ask)

    def fit(self, ask: Ask, among: Mask) -> TierFit:
        devices = self.devices()
        obstacles, free, machine = devices.obstacles(ask), devices.free(ask), devices.machine_free(ask)
        hosts = HostRoom(self.fleet, ask.cpus, ask.need.host_bytes)
        sizes = [size for size in ask.tensor_parallel_sizes if size > 0]
        undivided = [size for size in sizes if ask.stages_of(size) in (None, 1) and size * ask.data_parallel_size > 1]
        for size in undivided:
            needed, count = ask.need.gpu_bytes(size), size * ask.data_parallel_size
            room = (obstacles == ABLE) & (free >= needed) & (machine >= needed * count)[devices.workers]
            kinds = devices.kinds(room, mixed=ask.mixed_gpus)
            counts = reduce(np.maximum, map(devices.by_worker.count, kinds), np.zeros(len(self.fleet)))
            fits = (counts >= count) & hosts.enough & among
            if fits.any():
                return self._found(ask, devices, size, kinds, room, fits, free, hosts)
        by_layers = sizes if ask.engine.layer_split else [size for size in sizes if (ask.stages_of(size) or 0) > 1]
        for size in reversed(by_layers):
            found = StagesOnOneWorker(ask, devices, size).splits(self.fleet, obstacles == ABLE, hosts.enough & among)
            if found:
                return self._staged(ask, found, free, hosts)
        return self._nowhere(ask, undivided or by_layers, obstacles, free, hosts)

    def _staged(self, ask: Ask, splits: dict[int, Split], free: Floats, hosts: HostRoom) -> TierFit:
        fits, left = np.zeros(len(self.fleet), dtype=bool), np.zeros(len(self.fleet))
        gpus = np.full(len(self.fleet), np.inf)
        for row, split in splits.items():
            fits[row] = True
            left[row] = min(stage.free_bytes for stage in split.stages)
            gpus[row] = split.cost[1]

        def place(host: Host) -> Place:
            split = splits[host.row]
            return Place(
                tier=self.tier,
                claims=staged_claims(ask, split),
                tensor_parallel_size=split.tensor_parallel_size,
                pipeline_parallel_size=len(split.stages),
                stage_layers=split.layers,
            )

        needed = ask.need.weight_bytes + ask.need.kv_bytes
        facts = {"needed_bytes": needed, "one_model": not ask.mixed_gpus}

        def why(host: Host) -> Reason:
            here = float(free[self.devices().of(host)].clip(0.0).sum())
            return hosts.lacking(host) or Reason("too-little-room-in-all", {**facts, "free_bytes": here})

        fewest = 1.0 / (1.0 + np.where(fits, gpus - gpus.min(), 1.0))
        return TierFit(ask, fits, left, 0.0, place, why, fewest)

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
        needed, copies = ask.need.gpu_bytes(size), ask.data_parallel_size
        size, each = size * copies, size
        sign = 1.0 if ask.arrangement is Arrangement.BINPACK else -1.0
        taken = [devices.by_worker.nth_smallest(np.where(kind, sign * free, np.inf), size) for kind in kinds]
        last = sign * reduce(np.minimum, taken)  # bytes on the last GPU taken, for the best GPU model of each worker
        linked = reduce(np.maximum, map(devices.by_worker.count_linked, kinds)) >= size

        def place(host: Host) -> Place:
            chosen = self._chosen(ask, [device for device in host.devices if room[device.row]], free, size)
            return Place(tier=self.tier, claims=claims_of(ask, chosen, needed), tensor_parallel_size=each)

        def why(host: Host) -> Reason:
            with_room = int(room[devices.of(host)].sum())
            wanted = {"gpus": size, "gpu_bytes": needed, "one_model": with_room >= size}
            return hosts.lacking(host) or Reason("too-few-gpus", {**wanted, "with_room": with_room})

        return TierFit(ask, fits, last, float(needed), place, why, linked.astype(np.float64), gpus=size)

    def _nowhere(self, ask: Ask, sizes: list[int], obstacles: Codes, free: Floats, hosts: HostRoom) -> TierFit:
        largest = self.devices().by_worker.largest(np.where(obstacles == ABLE, free, -np.inf))
        copies = ask.data_parallel_size
        sizes = sizes or [ask.demanded_gpus]
        each = {size * copies: ask.need.gpu_bytes(size) for size in sizes}
        sizes = list(each)

        def why(host: Host) -> Reason:
            lacking = lacks_gpus(obstacles, host) or hosts.lacking(host)
            if lacking is not None:
                return lacking
            if ask.engine.layer_split:
                whole = ask.need.weight_bytes + ask.need.kv_bytes
                facts = {"needed_bytes": whole, "free_bytes": float(free[self.devices().of(host)].clip(0.0).sum())}
                return Reason("too-little-room-in-all", {**facts, "one_model": not ask.mixed_gpus})
            most = max((size for size in sizes if size <= len(host.devices)), default=sizes[0])
            wanted = {"gpus": most, "gpu_bytes": each[most], "one_model": not ask.mixed_gpus}
            here = {"found_gpus": len(host.devices), "largest_free_bytes": float(largest[host.row])}
            return Reason("too-few-gpus", {**wanted, **here})

        return nowhere(ask, len(self.fleet), why)

    def _chosen(self, ask: Ask, fitting: list[Device], free: Floats, size: int) -> list[Device]:
        """Linked GPUs if there are enough, else GPUs on one PCIe switch or NUMA node. All of one model unless mixed."""
        options = _groups(fitting, lambda device: alike(device, ask.mixed_gpus), size)
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

"""The first tier: the whole instance on one GPU."""

from pointsman.placement.asks import Ask, Place, Tier
from pointsman.placement.devices import ABLE, Mask
from pointsman.placement.fit.base import HostRoom, ResourceFit, TierFit, claims_of, lacks_gpus, layers_elsewhere
from pointsman.placement.fleet import TENANTS, Device, Host
from pointsman.reasons import Reason
from pointsman.selection.arrays import np


class FitsOnOneGpu(ResourceFit):
    """Demands a GPU with room for the whole instance."""

    tier = Tier.ONE_GPU

    def forbidden(self, ask: Ask) -> Reason | None:
        sizes = ask.need.tensor_parallel_sizes
        if ask.demanded_gpus > 1 and sizes:
            return Reason("demands-gpus", {"gpus": ask.demanded_gpus})
        if 1 in sizes:
            return layers_elsewhere(ask)
        return Reason("needs-several-gpus" if max(sizes, default=0) > 1 else "uses-no-gpu")

    def fit(self, ask: Ask, among: Mask) -> TierFit:
        devices, needed = self.devices(), ask.need.gpu_bytes(1)
        obstacles, free = devices.obstacles(ask), devices.free(ask)
        able = obstacles == ABLE
        room = able & (free >= needed)
        taken = self.taken_first(ask, room, free)
        best = np.where(taken >= 0, free[taken], np.inf) if len(free) else np.full(len(taken), np.inf)
        hosts = HostRoom(self.fleet, ask.cpus, ask.need.host_bytes)
        largest = devices.by_worker.largest(np.where(able, free, -np.inf))

        in_use = np.array(self.fleet.gpus.columns[TENANTS]) > 0

        def alike(one: Device, other: Device) -> bool:
            """Whether a GPU may replace another that would be fragmented more. An ask for memory keeps to GPUs in use
            and to the smallest GPUs."""
            same = one.gpu.memory_bytes == other.gpu.memory_bytes and in_use[one.row] == in_use[other.row]
            return not needed or same

        def place(host: Host) -> Place:
            chosen = self.in_order(ask, [device for device in host.devices if room[device.row]], free)[:1]
            if self.fragmentation is not None:
                spoilt_least = self.fleet.gpus[int(self.fragmentation.growth(ask, 1).device[host.row])]
                chosen = [spoilt_least] if room[spoilt_least.row] and alike(spoilt_least, chosen[0]) else chosen
            return Place(tier=self.tier, claims=claims_of(ask, chosen, needed))

        def why(host: Host) -> Reason:
            lacking, most = lacks_gpus(obstacles, host), float(largest[host.row])
            if lacking is None and most < needed:
                lacking = Reason("no-room-on-one-gpu", {"needed_bytes": needed, "largest_free_bytes": most})
            return lacking or hosts.lacking(host) or Reason("no-room")

        return TierFit(ask, (taken >= 0) & hosts.enough & among, best, needed, place, why, gpus=1, taken=taken)

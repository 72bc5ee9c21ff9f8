"""The fourth tier: as many layers as possible on one GPU, the rest on the CPU of the same worker."""

import msgspec

from pointsman.placement.asks import Ask, Place, Tier
from pointsman.placement.devices import ABLE, Mask
from pointsman.placement.fit.base import HostRoom, ResourceFit, TierFit, claims_of, lacks_gpus
from pointsman.placement.fleet import Host
from pointsman.reasons import Reason
from pointsman.selection.arrays import np


class FitsPartly(ResourceFit):
    """Demands a GPU with room for at least one layer, and memory for the rest."""

    tier = Tier.PARTIAL_OFFLOAD

    def forbidden(self, ask: Ask) -> Reason | None:
        if not ask.partial_offload:
            return Reason("partial-offload-off")
        if not ask.engine.partial_offload:
            return Reason("engine-cannot-offload", {"engine": ask.engine.name})
        return None if ask.need.layers > 1 else Reason("one-layer-only")

    def fit(self, ask: Ask, among: Mask) -> TierFit:
        devices, need = self.devices(), ask.need
        obstacles, free = devices.obstacles(ask), devices.free(ask)
        largest = devices.by_worker.largest(np.where(obstacles == ABLE, free, -np.inf))
        splits = [need.offloaded(layers) for layers in range(need.layers + 1)]
        on_gpu, on_host = np.array(splits, dtype=np.float64).T  # on_gpu grows with the layers, on_host falls
        most = np.searchsorted(on_gpu, largest, side="right") - 1
        taken, rest = on_gpu[most], on_host[most]
        hosts = HostRoom(self.fleet, ask.cpus, 0)
        # Fewer layers on the GPU never need less memory of the machine, even if it is unified.
        memory = np.where(devices.unified, rest + taken, rest)
        fits = (most >= 1) & (hosts.memory >= memory) & hosts.enough & among

        def place(host: Host) -> Place:
            layers = int(most[host.row])
            gpu_bytes, host_bytes = splits[layers]
            fitting = [one for one in host.devices if obstacles[one.row] == ABLE and free[one.row] >= gpu_bytes]
            [claim] = claims_of(ask, self.in_order(ask, fitting, free)[:1], gpu_bytes)
            claim = msgspec.structs.replace(claim, memory_bytes=host_bytes)
            return Place(tier=self.tier, claims=(claim,), gpu_layers=layers)

        def why(host: Host) -> Reason:
            lacking = lacks_gpus(obstacles, host) or hosts.lacking(host)
            if lacking is not None:
                return lacking
            layers, has = int(most[host.row]), float(hosts.memory[host.row])
            if layers < 1:
                room = {"needed_bytes": float(on_gpu[1]), "largest_free_bytes": float(largest[host.row])}
                return Reason("no-room-for-a-layer", room)
            facts = {"gpu_layers": layers, "needed_bytes": float(memory[host.row]), "free_bytes": has}
            return Reason("too-little-memory-for-the-rest", facts)

        fewer = most[fits].max(initial=0) - most
        return TierFit(ask, fits, largest, taken, place, why, 1.0 / (1.0 + np.clip(fewer, 0, None)))

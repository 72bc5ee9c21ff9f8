"""The fourth tier: as many layers as possible on one GPU, the others on the CPU of the same worker."""

import msgspec

from pointsman.placement.asks import Ask, Place, Tier
from pointsman.placement.devices import ABLE
from pointsman.placement.fit.base import FitFilter, HostRoom, Mask, TierFit, claims_of, lacks_gpus
from pointsman.placement.fleet import Host
from pointsman.render.text import gib
from pointsman.selection.arrays import np


class FitsPartly(FitFilter):
    """Demands a GPU with room for at least one layer, and memory for the others."""

    tier = Tier.PARTIAL_OFFLOAD

    def forbidden(self, ask: Ask) -> str | None:
        if not ask.partial_offload:
            return "it must be on GPUs as a whole (partial offload is off)"
        if not ask.engine.partial_offload:
            return f"the engine {ask.engine.name} cannot offload a part".replace("  ", " ")
        return None if ask.need.layers > 1 else "it cannot be divided by layers"

    def fit(self, ask: Ask, among: Mask) -> TierFit:
        devices, need = self.devices(), ask.need
        obstacles, free = devices.obstacles(ask), devices.free(ask)
        largest = devices.largest(np.where(obstacles == ABLE, free, -np.inf))
        splits = [need.offloaded(layers) for layers in range(need.layers + 1)]
        on_gpu, on_host = np.array(splits, dtype=np.float64).T  # the one grows with the layers, the other falls
        most = np.searchsorted(on_gpu, largest, side="right") - 1
        taken, rest = on_gpu[most], on_host[most]
        hosts = HostRoom(self.fleet, ask.cpus, 0)
        # Fewer layers never need less of the machine, also if its GPUs use its memory.
        memory = np.where(devices.unified, rest + taken, rest)
        fits = (most >= 1) & (hosts.memory >= memory) & hosts.enough & among

        def place(host: Host) -> Place:
            layers = int(most[host.row])
            gpu_bytes, host_bytes = splits[layers]
            fitting = [one for one in host.devices if obstacles[one.row] == ABLE and free[one.row] >= gpu_bytes]
            [claim] = claims_of(ask, self.in_order(ask, fitting, free)[:1], gpu_bytes)
            claim = msgspec.structs.replace(claim, memory_bytes=host_bytes)
            return Place(tier=self.tier, claims=(claim,), gpu_layers=layers)

        def why(host: Host) -> str:
            lacking = lacks_gpus(obstacles, host) or hosts.lacking(host)
            if lacking is not None:
                return lacking
            layers, has = int(most[host.row]), gib(hosts.memory[host.row])
            if layers < 1:
                return f"no room for a layer: needs {gib(on_gpu[1])}, the largest free is {gib(largest[host.row])}"
            needed = gib(memory[host.row])
            return f"too little memory for the rest: with {layers} layers on a GPU needs {needed}, {has} free"

        fewer = most[fits].max(initial=0) - most
        return TierFit(fits, largest, taken, place, why, 1.0 / (1.0 + np.clip(fewer, 0, None)))

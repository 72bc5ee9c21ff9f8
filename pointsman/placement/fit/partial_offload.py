"""The fourth tier: as many layers as possible on one GPU, the others on the CPU of the same worker."""

from pointsman.placement.asks import Ask, Claim, Place, Tier
from pointsman.placement.fit.base import Fit, FitFilter, Mask
from pointsman.placement.fleet import FREE_MEMORY, Host
from pointsman.placement.words import gib
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

    def fit(self, ask: Ask, among: Mask) -> Fit:
        devices, need = self.devices(), ask.need
        able, free = devices.able(ask), devices.free(ask)
        largest = devices.largest(np.where(able, free, -np.inf))
        splits = [need.offloaded(layers) for layers in range(need.layers)]
        on_gpu = np.array([gpu for gpu, _ in splits], dtype=np.float64)  # grows with the layers
        on_host = np.array([host for _, host in splits], dtype=np.float64)  # falls
        most = np.searchsorted(on_gpu, largest, side="right") - 1
        memory = np.asarray(self.fleet.workers.columns[FREE_MEMORY])
        least = need.layers - np.searchsorted(on_host[::-1], memory, side="right")
        fits = (most >= 1) & (most >= least) & among & self.has_host_room(ask, 0)
        quality = np.clip(most, 0, None) / need.layers

        def place(host: Host) -> Place:
            layers = int(most[host.row])
            gpu_bytes, host_bytes = splits[layers]
            device = max((one for one in host.devices if able[one.row]), key=lambda one: (free[one.row], -one.row))
            claim = Claim(
                worker=str(host),
                gpu=device.gpu.index,
                gpu_bytes=gpu_bytes,
                gpu_share=ask.gpu_share or 0.0,
                exclusive=ask.exclusive,
                cpus=ask.cpus,
                memory_bytes=host_bytes,
            )
            return Place(tier=self.tier, claims=(claim,), gpu_layers=layers)

        def why(host: Host) -> str:
            lacking = self.lacks_gpus(able, host) or self.lacks_host_room(ask, 0, host)
            if lacking is not None:
                return lacking
            if most[host.row] < 1:
                return f"no room for a layer: needs {gib(on_gpu[1])}, the largest free is {gib(largest[host.row])}"
            layers = int(most[host.row])
            needed, free_memory = gib(on_host[layers]), gib(memory[host.row])
            return f"too little memory for the rest: with {layers} layers on a GPU needs {needed}, {free_memory} free"

        return Fit(fits, largest, float(on_gpu[1]), place, why, quality)

"""A place although there is no room: only for who asks for it, and then it is said."""

from pointsman.placement.asks import Ask, Claim, Place, Tier
from pointsman.placement.devices import Devices
from pointsman.placement.fit.base import Mask, claims_of
from pointsman.placement.fleet import FREE_MEMORY, Fleet
from pointsman.selection.arrays import np


def overcommitted(ask: Ask, fleet: Fleet, devices: Devices, admitted: Mask) -> Place | None:
    """On the GPUs with the most left, as few as may be, or on the worker with the most memory left; of workers that it
    may be on. Who has a GPU alone keeps it; None: there is nothing that it may have."""
    able, free = devices.able(ask) & admitted[devices.workers], devices.free(ask)
    for size in ask.tensor_parallel_sizes[:1]:
        kinds = devices.kinds(able, mixed=ask.mixed_gpus)
        fullest = [-devices.nth_smallest(np.where(kind, -free, np.inf), size) for kind in kinds]
        best = max(zip(fullest, kinds, strict=True), key=lambda option: float(option[0].max()), default=None)
        if best is None or not np.isfinite(best[0].max()):
            continue
        host = fleet.workers[int(np.argmax(best[0]))]
        mine = [device for device in host.devices if best[1][device.row]]
        chosen = sorted(mine, key=lambda device: (-float(free[device.row]), device.row))[:size]
        return Place(
            tier=Tier.ONE_GPU if size == 1 else Tier.SEVERAL_GPUS,
            claims=claims_of(ask, chosen, ask.need.gpu_bytes(size)),
            tensor_parallel_size=size,
            overcommitted=True,
        )
    if (ask.engine.needs_gpu and not ask.cpu) or not admitted.any():
        return None
    memory = np.where(admitted, fleet.workers.columns[FREE_MEMORY], -np.inf)
    claim = Claim(worker=str(fleet.workers[int(np.argmax(memory))]), cpus=ask.cpus, memory_bytes=ask.need.cpu_bytes)
    return Place(tier=Tier.CPU, claims=(claim,), gpu_layers=0, overcommitted=True)

"""A place without enough room, for an ask that overcommits."""

from collections.abc import Sequence

import msgspec

from pointsman.placement.asks import Ask, Claim, Cuts, Place, Tier
from pointsman.placement.devices import Devices, Floats, Mask
from pointsman.placement.fit.base import claims_of
from pointsman.placement.fit.stages import Split, Stage, staged_claims
from pointsman.placement.fleet import FREE_MEMORY, Fleet
from pointsman.selection.arrays import np


def overcommitted(ask: Ask, fleet: Fleet, devices: Devices, admitted: Mask) -> Place | None:
    """A place on a worker that the ask may be on. It takes as few GPUs as possible, those with the most room left, but
    all that were chosen by hand. Without GPUs, it is on the worker with the most memory left. Exclusive GPUs stay
    exclusive. None if the ask may have no worker or GPU at all."""
    able = devices.able(ask) & admitted[devices.workers]
    free = devices.free(msgspec.structs.replace(ask, gpu_utilization=None))
    kinds = devices.kinds(able, mixed=ask.mixed_gpus)
    picked = int(max((devices.by_worker.count(kind).max() for kind in kinds), default=0)) if ask.gpus else 1
    on_gpus = ask.open_to(Tier.ONE_GPU, Tier.SEVERAL_GPUS)
    if on_gpus and ask.engine.layer_split and max(picked, ask.demanded_gpus) > 1:
        return _by_layers(ask, fleet, devices, kinds, free, max(picked, ask.demanded_gpus))
    sizes = ask.tensor_parallel_sizes
    usable = [size for size in sizes if size <= picked] or sizes[:1]
    for size in usable[-1:] if on_gpus else ():
        count = size * ask.data_parallel_size
        fullest = [-devices.by_worker.nth_smallest(np.where(kind, -free, np.inf), count) for kind in kinds]
        best = max(zip(fullest, kinds, strict=True), key=lambda option: float(option[0].max()), default=None)
        if best is None or not np.isfinite(best[0].max()):
            continue
        host = fleet.workers[int(np.argmax(best[0]))]
        mine = [device for device in host.devices if best[1][device.row]]
        chosen = sorted(mine, key=lambda device: (-float(free[device.row]), device.row))[:count]
        return Place(
            tier=Tier.ONE_GPU if count == 1 else Tier.SEVERAL_GPUS,
            claims=claims_of(ask, chosen, ask.need.gpu_bytes(size)),
            tensor_parallel_size=size,
            overcommitted=True,
        )
    if not ask.open_to(Tier.CPU) or not admitted.any():
        return None
    memory = np.where(admitted, fleet.workers.columns[FREE_MEMORY], -np.inf)
    claim = Claim(worker=str(fleet.workers[int(np.argmax(memory))]), cpus=ask.cpus, memory_bytes=ask.need.cpu_bytes)
    return Place(tier=Tier.CPU, claims=(claim,), gpu_layers=0, overcommitted=True)


def _by_layers(
    ask: Ask, fleet: Fleet, devices: Devices, kinds: Sequence[Mask], free: Floats, count: int
) -> Place | None:
    """A place on `count` GPUs of one worker. The layers are in proportion to the memory left on each GPU."""
    for host in sorted(fleet.workers, key=lambda one: -float(free[devices.of(one)].sum())):
        for kind in kinds:
            mine = [device for device in host.devices if kind[device.row]]
            if len(mine) < count or count > ask.need.layers:
                continue
            chosen = sorted(mine, key=lambda one: (-float(free[one.row]), one.row))[:count]
            scale = 1.0 + ask.need.gpu_bytes(1) * count / max(sum(float(free[one.row]) for one in chosen), 1.0)
            stages = tuple(Stage((one,), max(float(free[one.row]), 1.0) * scale) for one in chosen)
            layers = Cuts(ask.need, 1).evened([stage.free_bytes for stage in stages])
            if layers is not None:
                return Place(
                    tier=Tier.SEVERAL_GPUS,
                    claims=staged_claims(ask, Split(1, stages, layers)),
                    pipeline_parallel_size=count,
                    stage_layers=layers,
                    overcommitted=True,
                )
    return None

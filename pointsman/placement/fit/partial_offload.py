"""The fourth tier: as many layers as possible on GPUs of one worker, and the rest on its CPU.

An engine that assigns whole layers to GPUs gets several GPUs if they hold more layers than one. Other engines get one.
"""

import msgspec

from pointsman.placement.asks import Ask, Claim, Place, Tier
from pointsman.placement.devices import ABLE, Codes, Floats, Mask
from pointsman.placement.fit.base import HostRoom, ResourceFit, TierFit, claims_of, lacks_gpus, nowhere
from pointsman.placement.fit.stages import Split, offloaded_stages
from pointsman.placement.fleet import Host
from pointsman.reasons import Reason
from pointsman.selection.arrays import np


class FitsPartly(ResourceFit):
    """Demands GPUs with room for at least one layer, and memory for the rest."""

    tier = Tier.PARTIAL_OFFLOAD

    def forbidden(self, ask: Ask) -> Reason | None:
        if not ask.open_to(self.tier):
            return Reason("partial-offload-off")
        if not ask.engine.partial_offload:
            return Reason("engine-cannot-offload", {"engine": ask.engine.name})
        if ask.gpu_layers is not None and not 0 < ask.gpu_layers < ask.need.layers:
            return Reason("gpu-layers-set", {"gpu_layers": ask.gpu_layers, "layers": ask.need.layers})
        return None if ask.need.layers > 1 else Reason("one-layer-only")

    def fit(self, ask: Ask, among: Mask) -> TierFit:
        devices = self.devices()
        obstacles, free = devices.obstacles(ask), devices.free(ask)
        if ask.engine.layer_split and ask.open_to(Tier.SEVERAL_GPUS) and ask.gpu_count != 1:
            able = (obstacles == ABLE) & among[devices.workers]
            if (devices.by_worker.count(able) > 1).any():
                return self._over_several(ask, obstacles, free, able)
        return self._on_one(ask, obstacles, free, among)

    def _on_one(self, ask: Ask, obstacles: Codes, free: Floats, among: Mask) -> TierFit:
        devices, need = self.devices(), ask.need
        largest = devices.by_worker.largest(np.where(obstacles == ABLE, free, -np.inf))
        splits = [need.offloaded(layers) for layers in range(need.layers + 1)]
        on_gpu, on_host = np.array(splits, dtype=np.float64).T  # with more layers, on_gpu grows and on_host shrinks
        most = np.searchsorted(on_gpu, largest, side="right") - 1
        if ask.gpu_layers is not None:
            most = np.where(most >= ask.gpu_layers, ask.gpu_layers, 0)
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

    def _over_several(self, ask: Ask, obstacles: Codes, free: Floats, able: Mask) -> TierFit:
        devices, need = self.devices(), ask.need
        hosts, wide = HostRoom(self.fleet, ask.cpus, 0), len(self.fleet)
        splits: dict[int, tuple[int, Split, int]] = {}
        """(layers on GPUs, their stages, bytes of the machine's memory), by row of the worker."""
        short: dict[int, Reason] = {}
        for kind in devices.kinds(able & hosts.enough[devices.workers], mixed=ask.mixed_gpus):
            for row in np.unique(devices.workers[kind]).tolist():
                host = self.fleet.workers[row]
                mine = [device for device in host.devices if kind[device.row]]
                mine = sorted(mine, key=lambda one: (-float(free[one.row]), one.row))[: ask.gpu_count]
                split = offloaded_stages(need, mine, free, ask.gpu_layers)
                if split is None or (row in splits and splits[row][0] >= sum(split.layers)):
                    continue
                layers = sum(split.layers)
                on_host = need.offloaded(layers)[1]
                on_gpus = sum(_stage_sizes(ask, split)) if devices.unified[row] else 0
                if float(hosts.memory[row]) < on_host + on_gpus:
                    facts = {"gpu_layers": layers, "needed_bytes": float(on_host + on_gpus)}
                    short[row] = Reason(
                        "too-little-memory-for-the-rest", {**facts, "free_bytes": float(hosts.memory[row])}
                    )
                    continue
                splits[row] = layers, split, on_host
        largest = devices.by_worker.largest(np.where(obstacles == ABLE, free, -np.inf))

        def why(host: Host) -> Reason:
            lacking = lacks_gpus(obstacles, host) or hosts.lacking(host) or short.get(host.row)
            room = {"needed_bytes": float(need.offloaded(1)[0]), "largest_free_bytes": float(largest[host.row])}
            return lacking or Reason("no-room-for-a-layer", room)

        if not splits:
            return nowhere(ask, wide, why)

        def place(host: Host) -> Place:
            layers, split, on_host = splits[host.row]
            return Place(
                tier=self.tier,
                claims=_offloaded_claims(ask, split, on_host),
                gpu_layers=layers,
                pipeline_parallel_size=len(split.stages),
                stage_layers=split.layers if len(split.stages) > 1 else (),
            )

        fits, most = np.zeros(wide, dtype=bool), np.zeros(wide)
        for row, (layers, _, _) in splits.items():
            fits[row], most[row] = True, layers
        fewer = most.max() - most
        return TierFit(ask, fits, largest, 0.0, place, why, 1.0 / (1.0 + fewer))


def _stage_sizes(ask: Ask, split: Split) -> list[int]:
    """For each stage, the bytes on its GPU."""
    need, start, sizes = ask.need, ask.need.layers - sum(split.layers), list[int]()
    for layers in split.layers:
        held = sum(need.layer_bytes[start : start + layers]) + sum(need.kv_layer_bytes[start : start + layers])
        sizes.append(held + need.activation_bytes + need.overhead_bytes)
        start += layers
    return sizes


def _offloaded_claims(ask: Ask, split: Split, host_bytes: int) -> tuple[Claim, ...]:
    claims = list[Claim]()
    for stage, size in zip(split.stages, _stage_sizes(ask, split), strict=True):
        [claim] = claims_of(ask, list(stage.devices), size)
        first = not claims
        claims.append(
            msgspec.structs.replace(claim, cpus=claim.cpus if first else 0.0, memory_bytes=host_bytes if first else 0)
        )
    return tuple(claims)

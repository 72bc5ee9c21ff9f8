"""What one instance of a model needs, and how that divides over GPUs, stages and the memory of the machine.

Enters: sizes of parts, from the model's files or from the manifest. Leaves: bytes per GPU for any way to split it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import msgspec


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one instance, part by part. Weights and KV cache are per layer, so that any split has a size."""

    model: str = ""
    layer_bytes: tuple[int, ...] = ()
    """Weights of each layer."""
    first_bytes: int = 0
    """Weights before the first layer: embeddings, vision and audio parts."""
    last_bytes: int = 0
    """Weights after the last layer: norm, output."""
    kv_layer_bytes: tuple[int, ...] = ()
    """The KV cache of each layer, for the requested context and concurrency."""
    kv_splits: int = 1
    """Into how many parts tensor parallelism can divide the KV cache: the KV heads; beyond that they are replicated."""
    activation_bytes: int = 0
    """On each GPU, for the activations of one step."""
    overhead_bytes: int = 0
    """On each GPU, for the engine itself."""
    host_bytes: int = 0
    """Memory of the machine, wherever the model is."""
    context: int = 0
    """Tokens per request that the KV cache is sized for; 0 without a KV cache."""
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    """Numbers of GPUs that its heads and its vocabulary can be divided among, ascending."""

    @classmethod
    def fixed(cls, gpu_bytes: int = 0, host_bytes: int = 0, gpus: int = 1, model: str = "") -> "Need":
        """`gpu_bytes` on each of `gpus` GPUs, which cannot be divided otherwise."""
        return cls(
            model=model,
            layer_bytes=(gpu_bytes * gpus,),
            kv_layer_bytes=(0,),
            host_bytes=host_bytes,
            tensor_parallel_sizes=(gpus,),
        )

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)

    @property
    def weight_bytes(self) -> int:
        return self.first_bytes + sum(self.layer_bytes) + self.last_bytes

    @property
    def kv_bytes(self) -> int:
        return sum(self.kv_layer_bytes)

    def stage_bytes(self, start: int, stop: int, tp: int = 1) -> int:
        """Bytes on each of `tp` GPUs that together hold the layers from `start` up to `stop`."""
        weights = sum(self.layer_bytes[start:stop])
        if start == 0:
            weights += self.first_bytes
        if stop == self.layers:
            weights += self.last_bytes
        kv = sum(self.kv_layer_bytes[start:stop])
        return -(-weights // tp) + -(-kv // min(tp, self.kv_splits)) + self.activation_bytes + self.overhead_bytes

    def gpu_bytes(self, tp: int = 1) -> int:
        """Bytes on each GPU if `tp` of them hold the model together."""
        return self.stage_bytes(0, self.layers, tp)

    def with_context(self, context: int) -> "Need":
        """The same for another context, with a KV cache in proportion: an approximation if layers have windows."""
        scale = [-(-size * context // self.context) if self.context else size for size in self.kv_layer_bytes]
        return msgspec.structs.replace(self, context=context, kv_layer_bytes=tuple(scale))

    def staged(self, tp: int, free_bytes: Sequence[int]) -> tuple[int, ...] | None:
        """Layers of each pipeline stage, in this order, of `tp` GPUs with `free_bytes` on each: as even as the room
        allows. None if they do not hold the model with at least one layer each."""
        return Cuts(self, tp).evened(free_bytes)

    def offloaded(self, gpu_layers: int) -> tuple[int, int]:
        """(GPU bytes, bytes of the machine's memory) with the last `gpu_layers` layers on one GPU and the others, with
        their KV cache, on the CPU. The output is on the GPU if all layers are."""
        start = self.layers - gpu_layers
        if gpu_layers == 0:
            gpu = 0
        else:
            gpu = sum(self.layer_bytes[start:]) + sum(self.kv_layer_bytes[start:])
            gpu += self.activation_bytes + self.overhead_bytes
        host = self.first_bytes + sum(self.layer_bytes[:start]) + sum(self.kv_layer_bytes[:start]) + self.host_bytes
        if gpu_layers == self.layers:
            gpu += self.last_bytes
        else:
            host += self.last_bytes + self.activation_bytes
        return gpu, host

    @property
    def cpu_bytes(self) -> int:
        """Memory of the machine if no GPU is used."""
        return self.offloaded(0)[1]


class Cuts:
    """Cuts the layers of a need into stages of `tp` GPUs each. Sums are computed once."""

    def __init__(self, need: Need, tp: int) -> None:
        self.layers = need.layers
        self._weights = [0, *(need.first_bytes + size for size in accumulate(need.layer_bytes))]
        self._weights[-1] += need.last_bytes
        kv = need.kv_layer_bytes or (0,) * need.layers
        self._kv = [0, *accumulate(kv)]
        self._tp, self._kv_parts = tp, min(tp, need.kv_splits)
        self.fixed_bytes = need.activation_bytes + need.overhead_bytes
        """On each GPU of any stage."""
        each = zip(accumulate(sorted(need.layer_bytes)), accumulate(sorted(kv)), strict=True)
        self.least_bytes = [self.fixed_bytes + weights / tp + part / self._kv_parts for weights, part in each]
        """Minimum bytes on each GPU of a stage of one, two, three... layers, whichever layers they are."""

    def stage_bytes(self, start: int, stop: int) -> int:
        """As `Need.stage_bytes`."""
        weights, kv = self._weights[stop] - self._weights[start], self._kv[stop] - self._kv[start]
        return -(-weights // self._tp) + -(-kv // self._kv_parts) + self.fixed_bytes

    def reach(self, start: int, room: float) -> int:
        """Where a stage ends that starts here and takes as many layers as its room allows; `start` if none fits."""
        stops = range(start + 1, self.layers + 1)
        return start + bisect_right(stops, room, key=lambda stop: self.stage_bytes(start, stop))

    def filled(self, rooms: Sequence[float]) -> tuple[int, ...] | None:
        """Layers per stage if each takes as many as it can and leaves at least one for each that follows."""
        start, taken = 0, []
        for following in range(len(rooms) - 1, -1, -1):
            stop = min(self.reach(start, rooms[-1 - following]), self.layers - following)
            if stop <= start:
                return None
            taken.append(stop - start)
            start = stop
        return tuple(taken) if start == self.layers else None

    def evened(self, rooms: Sequence[float]) -> tuple[int, ...] | None:
        """Layers per stage that minimise how full the fullest stage is, as a share of its room."""
        best = self.filled(rooms)
        low, high = 0.0, 1.0
        for _ in range(20 if best else 0):
            share = (low + high) / 2
            found = self.filled([room * share for room in rooms])
            if found is None:
                low = share
            else:
                best, high = found, share
        return best

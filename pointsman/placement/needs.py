"""What one instance of a model needs, and how that divides over GPUs, stages and the memory of the machine.

Enters: sizes of parts, from the model's own files or as somebody said. Leaves: bytes per GPU for any way to split it.
"""

from collections.abc import Sequence

import msgspec


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one instance, part by part. Weights and KV cache are per layer: any number of layers has a size."""

    model: str = ""
    layer_bytes: tuple[int, ...] = ()
    """Weights of each layer."""
    first_bytes: int = 0
    """Weights before the first layer (embeddings) and after the last (norm, output); parts for images and sound too."""
    last_bytes: int = 0
    kv_layer_bytes: tuple[int, ...] = ()
    """The KV cache of each layer, for the context and concurrency that are asked for."""
    kv_splits: int = 1
    """Into how many parts tensor parallelism can divide the KV cache: the KV heads; beyond that they are repeated."""
    activation_bytes: int = 0
    """On each GPU, for what is computed at once."""
    overhead_bytes: int = 0
    """On each GPU, for the engine itself."""
    host_bytes: int = 0
    """Of the machine's memory, wherever the model is."""
    context: int = 0
    """Tokens that the KV cache is for, of each of its requests; 0: there is none."""
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    """Numbers of GPUs that its heads and its vocabulary can be divided among, ascending."""

    @classmethod
    def fixed(cls, gpu_bytes: int = 0, host_bytes: int = 0, gpus: int = 1, model: str = "") -> "Need":
        """So much on each of so many GPUs, and it cannot be divided otherwise."""
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
        """What each of `tp` GPUs takes that together hold the layers from `start` up to `stop`."""
        weights = sum(self.layer_bytes[start:stop])
        if start == 0:
            weights += self.first_bytes
        if stop == self.layers:
            weights += self.last_bytes
        kv = sum(self.kv_layer_bytes[start:stop])
        return -(-weights // tp) + -(-kv // min(tp, self.kv_splits)) + self.activation_bytes + self.overhead_bytes

    def gpu_bytes(self, tp: int = 1) -> int:
        """What each GPU takes if `tp` of them hold the model together."""
        return self.stage_bytes(0, self.layers, tp)

    def context_within(self, free_bytes: float, tp: int = 1) -> int:
        """The largest context for which each of `tp` GPUs takes no more than this, about; 0: none."""
        kv = -(-self.kv_bytes // min(tp, self.kv_splits))
        left = free_bytes - (self.gpu_bytes(tp) - kv)
        if not kv or left <= 0:
            return 0
        return int(self.context * min(left / kv, 1.0)) // 256 * 256

    def staged(self, tp: int, free_bytes: Sequence[int]) -> tuple[int, ...] | None:
        """Pipeline stages in this order, of `tp` GPUs each, with so much free on each GPU of a stage: how many layers
        each takes, as even as their room allows; None: it does not fit."""
        stages = len(free_bytes)
        if stages > self.layers:
            return None
        most = self._most_layers(tp, free_bytes)
        return None if most is None else _evened(self, tp, free_bytes)

    def _most_layers(self, tp: int, free_bytes: Sequence[int]) -> tuple[int, ...] | None:
        """Layers per stage if each takes as many as it can, and leaves at least one for each that follows."""
        start, taken = 0, []
        for stage, free in enumerate(free_bytes):
            last = stage == len(free_bytes) - 1
            stop = start
            limit = self.layers - (len(free_bytes) - stage - 1)
            while stop < limit and self.stage_bytes(start, stop + 1, tp) <= free:
                stop += 1
            if stop == start or (last and stop < self.layers):
                return None
            taken.append(stop - start)
            start = stop
        return tuple(taken)

    def offloaded(self, gpu_layers: int) -> tuple[int, int]:
        """(GPU bytes, bytes of the machine's memory) with so many layers, the last ones, on one GPU and the others,
        with their KV cache, on the CPU; the output is on the GPU if all layers are."""
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
        """Of the machine's memory, if no GPU takes part."""
        return self.offloaded(0)[1]


def _evened(need: Need, tp: int, free_bytes: Sequence[int]) -> tuple[int, ...]:
    """The layers per stage for which the fullest stage, as a share of its room, is least full."""
    low, high = 0.0, 1.0
    best = need._most_layers(tp, free_bytes)
    assert best is not None
    for _ in range(20):
        share = (low + high) / 2
        found = need._most_layers(tp, [int(free * share) for free in free_bytes])
        if found is None:
            low = share
        else:
            best, high = found, share
    return best

"""Requests to the placer. Each describes an instance that needs a place, and where the instance may be."""

from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate
from typing import Any, Literal

import msgspec

from pointsman.parameters import Amount, Count
from pointsman.reasons import Reason
from pointsman.selection import LabelSelector

# What one instance of a model needs, and how that need divides among GPUs, stages and the memory of the machine.
#
# Enters: sizes of parts, from the model's files or from the manifest. Leaves: bytes per GPU for any way to split it.


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
    """Number of parts into which tensor parallelism can divide the KV cache: its KV heads. More GPUs hold copies."""
    activation_bytes: int = 0
    """Bytes on each GPU for the activations of one step."""
    overhead_bytes: int = 0
    """Bytes on each GPU for the engine itself."""
    host_bytes: int = 0
    """Bytes of the machine's memory that are needed even if the model is on GPUs."""
    context: int = 0
    """Tokens per request that the KV cache is sized for; 0 without a KV cache."""
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    """Numbers of GPUs among which the heads and the vocabulary can be divided, ascending."""

    @classmethod
    def fixed(cls, gpu_bytes: int = 0, host_bytes: int = 0, gpus: int = 1, model: str = "", stages: int = 1) -> "Need":
        """A need of `gpu_bytes` on each of `gpus` GPUs in each stage, which cannot be divided in another way."""
        return cls(
            model=model,
            layer_bytes=(gpu_bytes * gpus,) * stages,
            kv_layer_bytes=(0,) * stages,
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
        """The need for another context. The KV cache changes in proportion: an approximation if layers have windows."""
        scale = [-(-size * context // self.context) if self.context else size for size in self.kv_layer_bytes]
        return msgspec.structs.replace(self, context=context, kv_layer_bytes=tuple(scale))

    def staged(self, tp: int, free_bytes: Sequence[int]) -> tuple[int, ...] | None:
        """Layers in each pipeline stage, as even as the room allows. A stage has `tp` GPUs. `free_bytes` is the room on
        each of its GPUs, stage by stage. None if the stages do not hold the model with at least one layer each."""
        return Cuts(self, tp).evened(free_bytes)

    def offloaded(self, gpu_layers: int) -> tuple[int, int]:
        """(GPU bytes, bytes of the machine's memory) if the last `gpu_layers` layers are on one GPU. The other layers
        and their KV cache are on the CPU. The output is on the GPU only if all layers are."""
        start = self.layers - gpu_layers
        gpu = sum(self.layer_bytes[start:]) + sum(self.kv_layer_bytes[start:])
        gpu += self.activation_bytes + self.overhead_bytes if gpu_layers else 0
        host = self.first_bytes + sum(self.layer_bytes[:start]) + sum(self.kv_layer_bytes[:start]) + self.host_bytes
        if gpu_layers == self.layers:
            gpu += self.last_bytes
        else:
            host += self.last_bytes + self.activation_bytes
        return gpu, host

    @property
    def cpu_bytes(self) -> int:
        """Bytes of the machine's memory if no GPU is used."""
        return self.offloaded(0)[1]


class Cuts:
    """Cuts the layers of a need into stages with `tp` GPUs each. Sums are computed once."""

    def __init__(self, need: Need, tp: int) -> None:
        self.layers = need.layers
        self._weights = [0, *(need.first_bytes + size for size in accumulate(need.layer_bytes))]
        self._weights[-1] += need.last_bytes
        kv = need.kv_layer_bytes or (0,) * need.layers
        self._kv = [0, *accumulate(kv)]
        self._tp, self._kv_parts = tp, min(tp, need.kv_splits)
        self.fixed_bytes = need.activation_bytes + need.overhead_bytes
        """Bytes that every stage needs on each GPU, regardless of its layers."""
        each = zip(accumulate(sorted(need.layer_bytes)), accumulate(sorted(kv)), strict=True)
        self.least_bytes = [self.fixed_bytes + weights / tp + part / self._kv_parts for weights, part in each]
        """Minimum bytes on each GPU of a stage with one, two, three... layers, whichever layers these are."""

    def stage_bytes(self, start: int, stop: int) -> int:
        """Computes the same as `Need.stage_bytes`."""
        weights, kv = self._weights[stop] - self._weights[start], self._kv[stop] - self._kv[start]
        return -(-weights // self._tp) + -(-kv // self._kv_parts) + self.fixed_bytes

    def reach(self, start: int, room: float) -> int:
        """The end of a stage that begins at `start` and takes all layers that fit in `room`; `start` if none fits."""
        stops = range(start + 1, self.layers + 1)
        return start + bisect_right(stops, room, key=lambda stop: self.stage_bytes(start, stop))

    def filled(self, rooms: Sequence[float]) -> tuple[int, ...] | None:
        """Layers per stage if each stage takes as many as it can, but leaves one for each later stage."""
        start, taken = 0, []
        for following in range(len(rooms) - 1, -1, -1):
            stop = min(self.reach(start, rooms[-1 - following]), self.layers - following)
            if stop <= start:
                return None
            taken.append(stop - start)
            start = stop
        return tuple(taken) if start == self.layers else None

    def evened(self, rooms: Sequence[float]) -> tuple[int, ...] | None:
        """The layers per stage that keep the fullest stage as empty as possible, as a share of its room."""
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


class Tier(Enum):
    """Ways to fit, in the default order in which the placer tries them."""

    ONE_GPU = "one GPU"
    SEVERAL_GPUS = "several GPUs of one worker"
    SEVERAL_WORKERS = "several workers"
    PARTIAL_OFFLOAD = "partly on a GPU, partly on the CPU"
    CPU = "CPU"

    @property
    def written(self) -> str:
        """The name of the tier in documents: one-gpu, several-gpus..."""
        return self.name.lower().replace("_", "-")


TierName = Literal["one-gpu", "several-gpus", "several-workers", "partial-offload", "cpu"]
GENERATIONS = "generations"
"""The value of `mixed_gpus` that also allows GPUs of different generations in one instance."""


class Arrangement(Enum):
    """How instances are laid out over the fleet."""

    SPREAD = "spread"
    """Use many workers, so that the loss of a worker costs little."""
    BINPACK = "binpack"
    """Use few GPUs and workers, so that large free parts stay whole."""


class EngineAbility(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do with machines."""

    name: str = ""
    vendors: frozenset[str] = frozenset({"nvidia", "amd"})
    """Vendors of the GPUs that the engine runs on."""
    needs_gpu: bool = True
    tensor_parallel: bool = True
    layer_split: bool = False
    """Whether the engine assigns whole layers to each GPU of a worker."""
    distributed: bool = True
    """Whether one instance may span several workers."""
    partial_offload: bool = False


class EngineDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an instance's place that the parameters of its engine determine."""

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int = 1
    stage_layers: tuple[int, ...] = ()
    """Number of layers in each stage."""
    stage_shares: tuple[float, ...] = ()
    """An alternative to `stage_layers`: shares of the layers, one share for each GPU."""
    gpu_utilization: float | None = None
    gpu_layers: int | None = None
    host_bytes: int = 0
    """Bytes of the machine's memory in addition to what the model needs there: swap space, a KV cache in memory."""
    host_bytes_per_gpu: int = 0


class PlacementRules(msgspec.Struct, frozen=True, kw_only=True):
    """Where an instance may be, and which place is best. The `placement` section of a document has the same fields."""

    arrangement: Arrangement = Arrangement.BINPACK
    workers: frozenset[str] = frozenset()
    """Names of workers that were chosen by hand. If empty, any worker."""
    gpu_models: frozenset[str] = frozenset()
    """GPU models that the instance may have. If empty, any model."""
    several_gpus: bool = True
    """Whether the instance may be divided among GPUs of one worker."""
    several_workers: bool = False
    """Whether the instance may be divided among workers."""
    partial_offload: bool = False
    """Whether some layers may be on the CPU. An explicit `false` also forbids having all layers on the CPU."""
    cpu: bool = False
    """Whether the instance may run without a GPU if its engine usually has one. An explicit `false` forbids it."""
    mixed_gpus: bool | Literal["generations"] = False
    """Whether an instance may have different GPU models of one vendor, either of one generation or of any."""
    tensor_parallel_size: Count | None = None
    """Number of GPUs that hold each layer together. If None, as few as suffice."""
    pipeline_parallel_size: Count | None = None
    """Number of stages. If None, as few as suffice."""
    gpu_count: Count | None = None
    """Number of GPUs of the instance. If None, as few as suffice."""
    exclusive: bool = False
    """Whether no other instance may be on the GPUs of this instance."""
    all_or_nothing: bool = False
    """Whether the missing instances of the deployment get places only if there is room for all of them."""
    near: str = ""
    """Another deployment, whose instances should be close to this instance."""
    priority: int = 0
    preempts: bool = False
    """Whether instances of negative priority may be stopped to make room."""
    overcommit: bool = False
    """Whether to place the instance even if it does not fit. The outcome then says so."""
    cpus: Amount = 0.0


class Ask(PlacementRules, frozen=True, kw_only=True):
    """One instance that needs a place."""

    instance_id: str
    deployment: str = ""
    """The deployment that the instance belongs to, whose instances are spread; empty if it belongs to none."""
    need: Need
    engine: EngineAbility = EngineAbility()
    gpu_share: float | None = None
    """Share of each GPU that the instance takes, 0 to 1, in addition to memory; None if only memory counts."""
    selector: LabelSelector = LabelSelector()
    gpus: frozenset[tuple[str, int]] = frozenset()
    """(worker, index) of each GPU that was chosen by hand. If empty, any GPU."""
    gpu_only: bool = False
    """Whether the instance must have a GPU, even if its engine could run without a GPU."""
    tiers: tuple[Tier, ...] = ()
    """The ways to fit to try, in order. If empty, all ways that the rules allow, in the default order."""
    data_parallel_size: int = 1
    """Number of copies of the model in one instance, each with its own GPUs."""
    gpu_utilization: float | None = None
    """Share of each GPU that the engine takes regardless of the need. If None, it takes what the instance needs."""
    gpu_layers: int | None = None
    """Number of layers on GPUs that the settings of the engine demand. If None, as many as possible."""
    stage_layers: tuple[int, ...] = ()
    """Layers in each stage that the settings of the engine demand. If empty, as even as the room allows."""

    @property
    def tensor_parallel_sizes(self) -> list[int]:
        """Numbers of GPUs of one worker among which it may be divided, ascending. 1 means undivided."""
        divides = self.engine.tensor_parallel or self.engine.layer_split
        several = divides and self.open_to(Tier.SEVERAL_GPUS, Tier.SEVERAL_WORKERS)
        several = several and (self.several_gpus or bool(self.tiers))
        wanted = self.tensor_parallel_size
        sizes = (size for size in self.need.tensor_parallel_sizes if size == 1 or (size > 1 and several))
        return [size for size in sizes if wanted in (None, size)]

    @property
    def means_gpus(self) -> bool:
        """Whether a setting makes sense only on GPUs, so that the instance must have a GPU."""
        sized = self.gpu_share or self.gpu_utilization or self.gpu_count or self.demanded_gpus > 1
        return bool(self.gpu_only or self.gpus or self.gpu_models or self.gpu_layers or sized)

    @property
    def demanded_gpus(self) -> int:
        """The minimum number of GPUs that the instance needs."""
        stages = self.pipeline_parallel_size or len(self.stage_layers) or 1
        split = (self.tensor_parallel_size or 1) * stages * self.data_parallel_size
        return max(split, self.gpu_count or 0, 1)

    def stages_of(self, size: int) -> int | None:
        """Number of stages if each has `size` GPUs. None means as few as suffice; 0 means that it is impossible."""
        stages, copies = self.pipeline_parallel_size or len(self.stage_layers) or None, self.data_parallel_size
        if self.gpu_count is None:
            return stages
        fits = self.gpu_count % (size * copies) == 0 and stages in (None, self.gpu_count // (size * copies))
        return self.gpu_count // (size * copies) if fits else 0

    def open_to(self, *tiers: Tier) -> bool:
        """Whether the rules allow one of these tiers, regardless of the engine."""
        return any(map(self._is_open, tiers))

    def _is_open(self, tier: Tier) -> bool:
        if self.tiers:
            return tier in self.tiers
        match tier:
            case Tier.ONE_GPU:
                return True
            case Tier.SEVERAL_GPUS:
                return self.several_gpus
            case Tier.SEVERAL_WORKERS:
                return self.several_workers
            case Tier.PARTIAL_OFFLOAD:
                return self.partial_offload
            case Tier.CPU:
                return self.cpu or (not self.engine.needs_gpu and not self.means_gpus)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance takes from one worker, and from at most one GPU of that worker."""

    worker: str
    gpu: int | None = None
    """Index of the GPU; None if the claim is only for CPUs and memory."""
    gpu_bytes: int = 0
    gpu_total_bytes: int = 0
    """Total memory of the GPU, for engines whose setting is a share of it; 0 if it is not known."""
    gpu_share: float = 0.0
    exclusive: bool = False
    cpus: float = 0.0
    memory_bytes: int = 0


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an instance goes, and how the instance is split there."""

    tier: Tier
    claims: tuple[Claim, ...]
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    stage_layers: tuple[int, ...] = ()
    """Layers in each pipeline stage, if there are several stages."""
    gpu_layers: int | None = None
    """Number of layers on GPUs; None if all layers are on GPUs."""
    overcommitted: bool = False
    context: int = 0
    """Tokens per request that the KV cache has room for; 0 if this is not known."""

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers, each once, in the order of the claims."""
        return tuple(dict.fromkeys(claim.worker for claim in self.claims))

    @property
    def home(self) -> str:
        """The worker that runs the process of the instance."""
        return self.claims[0].worker

    @property
    def largest_gpu_share(self) -> float | None:
        """The largest share of a GPU's memory that is claimed; None if there is no GPU, or if sizes are not known."""
        shares = [claim.gpu_bytes / claim.gpu_total_bytes for claim in self.claims if claim.gpu_total_bytes]
        return max(shares, default=0.0) or None

    @property
    def gpus(self) -> tuple[tuple[str, int], ...]:
        """(worker, index) of each GPU."""
        return tuple((claim.worker, claim.gpu) for claim in self.claims if claim.gpu is not None)

    def __str__(self) -> str:
        """w1: gpu0, gpu1 (40.1 GiB each), 4 CPUs, 2.0 GiB of memory"""
        return str(self.reason)

    @property
    def reason(self) -> Reason:
        """What the instance takes from each worker, as data that can be rendered."""
        return Reason("place", {"workers": [self._taken_of(worker) for worker in self.workers]})

    def _taken_of(self, worker: str) -> dict[str, Any]:
        claims = [claim for claim in self.claims if claim.worker == worker]
        gpus = [claim for claim in claims if claim.gpu is not None]
        return {
            "worker": worker,
            "gpus": [claim.gpu for claim in gpus],
            "gpu_bytes": [claim.gpu_bytes for claim in gpus],
            "cpus": sum(claim.cpus for claim in claims),
            "memory_bytes": sum(claim.memory_bytes for claim in claims),
        }

"""What is asked of the placer: an instance that needs a place, and where it may be."""

from enum import Enum
from typing import Any

import msgspec

from pointsman.parameters import Amount
from pointsman.placement.needs import Need
from pointsman.reasons import Reason
from pointsman.selection import LabelSelector


class Tier(Enum):
    """Ways to fit, in the order in which the placer tries them."""

    ONE_GPU = "one GPU"
    SEVERAL_GPUS = "several GPUs of one worker"
    SEVERAL_WORKERS = "several workers"
    PARTIAL_OFFLOAD = "partly on a GPU, partly on the CPU"
    CPU = "CPU"


class Arrangement(Enum):
    """How instances are laid out over the fleet."""

    SPREAD = "spread"
    """Over many, so that the loss of one costs little."""
    BINPACK = "binpack"
    """On few GPUs and workers, so that large holes stay whole."""


class EngineAbility(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do with machines."""

    name: str = ""
    vendors: frozenset[str] = frozenset({"nvidia", "amd"})
    """Vendors of the GPUs that it runs on."""
    needs_gpu: bool = True
    tensor_parallel: bool = True
    distributed: bool = True
    """One instance over several workers."""
    partial_offload: bool = False


class PlacementRules(msgspec.Struct, frozen=True, kw_only=True):
    """Where an instance may be, and which place is best. The `placement` section of a document has the same fields."""

    arrangement: Arrangement = Arrangement.BINPACK
    workers: frozenset[str] = frozenset()
    """Chosen by hand; empty: any."""
    gpu_models: frozenset[str] = frozenset()
    """Models of GPUs that it may have; empty: any."""
    several_gpus: bool = True
    """It may be divided among GPUs of one worker."""
    several_workers: bool = False
    """It may be divided among workers."""
    partial_offload: bool = False
    """Some of its layers may be on the CPU."""
    cpu: bool = False
    """It may do without a GPU, also if its engine usually has one."""
    mixed_gpus: bool = False
    """One instance may have GPUs of different models."""
    exclusive: bool = False
    """No other instance may be on its GPUs."""
    all_or_nothing: bool = False
    """All missing instances of its deployment get a place, or none does."""
    near: str = ""
    """A deployment; its instances should be close."""
    priority: int = 0
    preempts: bool = False
    """Instances of negative priority may be stopped to make room."""
    overcommit: bool = False
    """Place it even if it does not fit; the outcome says so."""
    cpus: Amount = 0.0


class Ask(PlacementRules, frozen=True, kw_only=True):
    """One instance that needs a place."""

    instance_id: str
    deployment: str = ""
    """Its instances are spread; empty if the instance belongs to none."""
    need: Need
    engine: EngineAbility = EngineAbility()
    gpu_share: float | None = None
    """Share of each of its GPUs, 0 to 1, in addition to the memory; None if only the memory counts."""
    selector: LabelSelector = LabelSelector()
    gpus: frozenset[tuple[str, int]] = frozenset()
    """(worker, index), chosen by hand; empty: any."""

    @property
    def tensor_parallel_sizes(self) -> list[int]:
        """Numbers of GPUs of one worker that it may be divided among, ascending; 1 means undivided."""
        several = self.several_gpus and self.engine.tensor_parallel
        return [size for size in self.need.tensor_parallel_sizes if size == 1 or (size > 1 and several)]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance takes of one worker and one of its GPUs."""

    worker: str
    gpu: int | None = None
    """Index of the GPU; None if it takes only CPUs and memory."""
    gpu_bytes: int = 0
    gpu_total_bytes: int = 0
    """Total memory of that GPU, for engines that need their share of it as a setting; 0: not known."""
    gpu_share: float = 0.0
    exclusive: bool = False
    cpus: float = 0.0
    memory_bytes: int = 0


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an instance goes, and how it is split there."""

    tier: Tier
    claims: tuple[Claim, ...]
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage, if there are several stages."""
    gpu_layers: int | None = None
    """Layers on the GPU; None if all layers are on GPUs."""
    overcommitted: bool = False
    context: int = 0
    """Tokens per request that the KV cache has room for; 0: not known."""

    @property
    def workers(self) -> tuple[str, ...]:
        """In the order of the claims, each once."""
        return tuple(dict.fromkeys(claim.worker for claim in self.claims))

    @property
    def largest_gpu_share(self) -> float | None:
        """The largest share of the memory of a GPU that it has; None if it has no GPU, or if sizes are not known."""
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
        """What it takes of each worker, as data that can be rendered."""
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

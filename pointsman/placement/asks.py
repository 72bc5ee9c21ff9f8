"""What is asked of the placer: an instance that needs a place, and where it may be."""

from enum import Enum
from typing import Any

import msgspec

from pointsman.parameters import Amount
from pointsman.placement.needs import Need
from pointsman.reasons import Reason
from pointsman.selection import LabelSelector


class Tier(Enum):
    """Ways to fit, in the order in which they are tried."""

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
    """Of the GPUs it runs on."""
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
    """GPUs that it may have; empty: any."""
    several_gpus: bool = True
    """It may be divided among GPUs of one worker."""
    several_workers: bool = False
    """It may be divided among workers."""
    partial_offload: bool = False
    """Some of its layers may be on the CPU."""
    cpu: bool = False
    """It may do without a GPU, also if its engine usually has one."""
    mixed_gpus: bool = False
    """GPUs of different models may be in one instance."""
    exclusive: bool = False
    """No other instance may be on its GPUs."""
    all_or_nothing: bool = False
    """It is of no use without the other instances of its deployment: all of them have a place, or none gets one."""
    near: str = ""
    """A deployment whose instances it should be near to."""
    priority: int = 0
    preempts: bool = False
    """Instances of negative priority may be stopped to make room."""
    overcommit: bool = False
    """It is placed although it does not fit; that is said."""
    cpus: Amount = 0.0


class Ask(PlacementRules, frozen=True, kw_only=True):
    """One instance that needs a place."""

    instance_id: str
    deployment: str = ""
    """Whose instances are spread; empty: it stands alone."""
    need: Need
    engine: EngineAbility = EngineAbility()
    gpu_share: float | None = None
    """Of each of its GPUs, 0 to 1, beside the memory; None: the memory it needs is all that counts."""
    selector: LabelSelector = LabelSelector()
    gpus: frozenset[tuple[str, int]] = frozenset()
    """(worker, index), chosen by hand; empty: any."""

    @property
    def tensor_parallel_sizes(self) -> list[int]:
        """Numbers of GPUs of one worker that it may be divided among, ascending; 1: it need not be."""
        several = self.several_gpus and self.engine.tensor_parallel
        return [size for size in self.need.tensor_parallel_sizes if size == 1 or (size > 1 and several)]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance takes of one worker and one of its GPUs."""

    worker: str
    gpu: int | None = None
    """Index of the GPU; None: it takes CPUs and memory only."""
    gpu_bytes: int = 0
    gpu_total_bytes: int = 0
    """Of that GPU in all, for engines that must be told their share of it; 0: not known."""
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
    """Layers of each pipeline stage, if there are several."""
    gpu_layers: int | None = None
    """Of a partial offload; None: all of them, or none on a CPU."""
    overcommitted: bool = False
    context: int = 0
    """Tokens of a request that there is room for, if it was worked out for so many; 0: it was not."""

    @property
    def workers(self) -> tuple[str, ...]:
        """In the order of the claims, each once."""
        return tuple(dict.fromkeys(claim.worker for claim in self.claims))

    @property
    def largest_gpu_share(self) -> float | None:
        """Of the memory of a GPU, the largest share that it has; None: it has no GPU, or sizes are not known."""
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

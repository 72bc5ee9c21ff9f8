"""The five ways to fit, one file each, tried in this order until one yields candidates.

Enters: an ask and the fleet as it stands. Leaves: the workers that have room in this tier, each with the place it would
be, and for the others the reason. The one rule: a worker with room is never turned away.
"""

from pointsman.placement.fit.base import NO_GPU, HasRoom, ResourceFit, TierFit
from pointsman.placement.fit.cpu import FitsOnCpu
from pointsman.placement.fit.one_gpu import FitsOnOneGpu
from pointsman.placement.fit.partial_offload import FitsPartly
from pointsman.placement.fit.several_gpus import FitsOnSeveralGpus
from pointsman.placement.fit.several_workers import FitsOnSeveralWorkers

__all__ = [
    "ResourceFit", "TierFit", "HasRoom", "NO_GPU",
    "FitsOnOneGpu", "FitsOnSeveralGpus", "FitsOnSeveralWorkers", "FitsPartly", "FitsOnCpu",
]  # fmt: skip

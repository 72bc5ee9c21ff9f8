"""The five ways to fit (tiers), one file each. The placer tries them in this order until a worker fits.

Enters: an ask and the present fleet. Leaves: a place for each worker that has room in the tier, and a reason for each
other worker. The one rule: a worker with room is never rejected.
"""

from pointsman.placement.fit.base import NO_GPU, ResourceFit, RoomInTier, TierFit
from pointsman.placement.fit.cpu import FitsOnCpu
from pointsman.placement.fit.one_gpu import FitsOnOneGpu
from pointsman.placement.fit.partial_offload import FitsPartly
from pointsman.placement.fit.several_gpus import FitsOnSeveralGpus
from pointsman.placement.fit.several_workers import FitsOnSeveralWorkers

__all__ = [
    "ResourceFit", "TierFit", "RoomInTier", "NO_GPU",
    "FitsOnOneGpu", "FitsOnSeveralGpus", "FitsOnSeveralWorkers", "FitsPartly", "FitsOnCpu",
]  # fmt: skip

"""Placement: what an instance needs, where it fits, which place is best, and why.

Enters: a fleet (workers, GPUs, claims) and asks. Leaves: places, or refusals with a reason for every worker. The one
rule: a claim is what the instance really needs, and the fleet has room for each claim unless the ask overcommits.
"""

from pointsman.placement.asks import Arrangement, Ask, Claim, EngineAbility, Need, Place, Tier
from pointsman.placement.fleet import Fleet
from pointsman.placement.moves import DefragmentationPlan, Move, PreemptionPlan, defragment, preempt, victims
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused

__all__ = [
    "Need", "Ask", "EngineAbility", "Arrangement", "Tier",
    "Fleet", "Claim", "Place",
    "Placer", "Placed", "Refused",
    "victims", "preempt", "PreemptionPlan", "defragment", "DefragmentationPlan", "Move",
]  # fmt: skip

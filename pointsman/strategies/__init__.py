"""Strategies: enter requests and instances, leave decisions with reasons. Users subclass `SchedulingPolicy`.

The one rule: inputs are never modified, and no instance gets more requests than its limit.
"""

from pointsman.strategies.adaptive import AdaptivePolicy
from pointsman.strategies.base import Rule, SchedulingPolicy, Strategy, rule
from pointsman.strategies.cost_optimized import CostOptimizedPolicy
from pointsman.strategies.fifo import FIFOPolicy
from pointsman.strategies.power_of_two import PowerOfTwoPolicy
from pointsman.strategies.prefix import PrefixPolicy
from pointsman.strategies.priority import PriorityPolicy
from pointsman.strategies.slo_aware import SLOAwarePolicy

__all__ = [
    "SchedulingPolicy", "Strategy", "Rule", "rule",
    "FIFOPolicy", "PriorityPolicy", "SLOAwarePolicy", "CostOptimizedPolicy", "AdaptivePolicy",
    "PowerOfTwoPolicy", "PrefixPolicy",
]  # fmt: skip

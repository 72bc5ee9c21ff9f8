"""Strategies: enter requests and instances, leave decisions with reasons. Users subclass `SchedulingPolicy`.

The one rule: inputs are never modified, and no instance gets more requests than its limit.
"""

from pointsman.strategies.adaptive import AdaptiveStrategy
from pointsman.strategies.base import Rule, SchedulingPolicy, Strategy, rule
from pointsman.strategies.cost_optimized import CostOptimizedStrategy
from pointsman.strategies.fifo import FifoStrategy
from pointsman.strategies.priority import PriorityStrategy
from pointsman.strategies.slo_aware import SloAwareStrategy

__all__ = [
    "SchedulingPolicy", "Strategy", "Rule", "rule",
    "FifoStrategy", "PriorityStrategy", "SloAwareStrategy", "CostOptimizedStrategy", "AdaptiveStrategy",
]  # fmt: skip

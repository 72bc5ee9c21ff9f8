"""Scorers: enter a cycle and its candidates, leave one value in [0, 1] for each, in their order.

The one rule: a scorer prefers and never excludes; how much its word weighs is the profile's business.
"""

from pointsman.routing.scorers.attribute import EndpointAttributeScorer
from pointsman.routing.scorers.context_length import ContextLengthAware
from pointsman.routing.scorers.labels import HeaderLabelAffinityScorer
from pointsman.routing.scorers.latency import LatencyScorer
from pointsman.routing.scorers.load import (
    ActiveRequestScorer,
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
    TokenLoadScorer,
)
from pointsman.routing.scorers.lora import LoraAffinityScorer
from pointsman.routing.scorers.no_hit_lru import NoHitLruScorer
from pointsman.routing.scorers.prefix import PrefixCacheScorer
from pointsman.routing.scorers.session import SessionAffinityScorer
from pointsman.routing.scorers.speed import Cheapest, Fastest, LeastLoaded
from pointsman.routing.scorers.topology import TopologyAffinity

__all__ = [
    "QueueScorer", "RunningRequestsSizeScorer", "KvCacheUtilizationScorer",
    "TokenLoadScorer", "ActiveRequestScorer", "LoadAwareScorer",
    "PrefixCacheScorer", "NoHitLruScorer", "LoraAffinityScorer", "SessionAffinityScorer",
    "LatencyScorer", "ContextLengthAware", "HeaderLabelAffinityScorer", "EndpointAttributeScorer",
    "LeastLoaded", "Fastest", "Cheapest", "TopologyAffinity",
]  # fmt: skip

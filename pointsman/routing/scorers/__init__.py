"""Scorers. Enters: a cycle and its candidates. Leaves: one value in [0, 1] per candidate, in their order.

The one rule: a scorer prefers and never excludes. Its weight belongs to the profile.
"""

from pointsman.routing.scorers.attribute import EndpointAttributeScorer
from pointsman.routing.scorers.context_length import ContextLengthAware
from pointsman.routing.scorers.labels import HeaderLabelAffinityScorer
from pointsman.routing.scorers.latency import LatencyScorer
from pointsman.routing.scorers.load import (
    ActiveRequestScorer,
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    PendingWorkScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
    TokenLoadScorer,
)
from pointsman.routing.scorers.lora import LoraAffinityScorer
from pointsman.routing.scorers.no_hit_lru import NoHitLruScorer
from pointsman.routing.scorers.prefix import MmEmbeddingsCacheScorer, PrefixCacheScorer
from pointsman.routing.scorers.session import SessionAffinityScorer
from pointsman.routing.scorers.slo_misses import SloMissScorer
from pointsman.routing.scorers.speed import Cheapest, Fastest, LeastLoaded
from pointsman.routing.scorers.topology import TopologyAffinity, TopologyAffinityScorer

__all__ = [
    "QueueScorer", "RunningRequestsSizeScorer", "KvCacheUtilizationScorer",
    "TokenLoadScorer", "ActiveRequestScorer", "LoadAwareScorer",
    "PrefixCacheScorer", "NoHitLruScorer", "LoraAffinityScorer", "SessionAffinityScorer",
    "MmEmbeddingsCacheScorer",
    "LatencyScorer", "ContextLengthAware", "HeaderLabelAffinityScorer", "EndpointAttributeScorer",
    "PendingWorkScorer", "SloMissScorer", "LeastLoaded", "Fastest", "Cheapest",
    "TopologyAffinity", "TopologyAffinityScorer",
]  # fmt: skip

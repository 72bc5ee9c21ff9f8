"""Producers: enter a cycle and its candidates, leave facts about them in the cycle's state.

The one rule: a producer never decides; if it raises, the cycle continues without its facts.
"""

from pointsman.routing.producers.burst import BurstPrefixCacheProducer
from pointsman.routing.producers.inflight import InflightLoadProducer
from pointsman.routing.producers.latency import PredictedLatencyProducer
from pointsman.routing.producers.media import MmEmbeddingsCacheProducer
from pointsman.routing.producers.prefix import ApproxPrefixCacheProducer

__all__ = [
    "ApproxPrefixCacheProducer",
    "BurstPrefixCacheProducer",
    "InflightLoadProducer",
    "MmEmbeddingsCacheProducer",
    "PredictedLatencyProducer",
]

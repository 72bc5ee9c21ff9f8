"""What producers tell the other plugins about the candidates of one cycle. All columns are as long as the fleet."""

import msgspec

from pointsman.routing.endpoints import Endpoint
from pointsman.selection import Column, Key


class PrefixMatch(msgspec.Struct, frozen=True):
    """How much of the prompt each endpoint probably has in its cache. One entry per row of the whole roster."""

    match: Column
    """Blocks, from the first on without a gap; weighted by cache tier where tiers are known."""
    total: Column
    """Blocks of the prompt in this endpoint's block size."""
    block_size: Column
    """Tokens per block."""
    cached: Column
    """Blocks, unweighted; the same as `match` unless tiers are weighted."""


class LatencyPrediction(msgspec.Struct, frozen=True):
    """What is expected if this request goes to one endpoint. Headroom is SLO minus prediction."""

    ttft: float
    tpot: float
    ttft_headroom: float
    tpot_headroom: float
    ttft_valid: bool = True
    tpot_valid: bool = True
    dispatched_requests: int = 0


NEAR: Key[Endpoint] = Key("near")
"""The endpoint that the one to be chosen should be near to, as when one prefills for another."""
PREFIX_MATCH: Key[PrefixMatch] = Key("prefix-match")
UNCACHED_REQUEST_TOKENS: Key[Column] = Key("uncached-request-tokens")
"""Tokens of this request that each endpoint would have to compute."""
LATENCY_PREDICTIONS: Key[dict[str, LatencyPrediction]] = Key("latency-predictions")
"""By endpoint id; an endpoint without prediction is absent."""

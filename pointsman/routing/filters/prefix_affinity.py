"""The filter that keeps prompts on endpoints that have their prefix cached, unless that would be too slow."""

from math import inf
from typing import Annotated, Literal

from pointsman.parameters import Spelled
from pointsman.routing.endpoints import IN_FLIGHT_TOKENS
from pointsman.routing.plugins import LATENCY_PREDICTIONS, PREFIX_MATCH, Endpoints, Rejections, RequestCycle
from pointsman.selection import Column, Positions, Rejected
from pointsman.selection.columns import column_of, linear, ratio, smallest, take, where_at_least, where_below


class PrefixCacheAffinityFilter:
    """Demands endpoints that hold at least `affinity_threshold` of the prompt, if there are any (0 turns it off).

    All endpoints pass if the best of these would send its first token more than `max_ttft_penalty_ms` after the best of
    the rest (0 means no limit). All also pass at random, with `exploration_probability`. The time to first token is
    predicted, or estimated from the tokens in flight and `peak_prefill_throughput`. An endpoint without a prediction
    counts as infinitely slow.
    """

    def __init__(
        self,
        affinity_threshold: float = 0.80,
        exploration_probability: float = 0.0,
        max_ttft_penalty_ms: Annotated[float, Spelled("maxTTFTPenaltyMs")] = 18000.0,
        ttft_source: Literal["prefillThroughput", "latencyPredictor"] = "prefillThroughput",
        peak_prefill_throughput: float = 15928.0,
    ) -> None:
        if affinity_threshold > 1:
            raise ValueError(f"affinityThreshold is {affinity_threshold:g}; it must be at most 1")
        if not 0 <= exploration_probability <= 1:
            raise ValueError(f"explorationProbability is {exploration_probability:g}; it must be from 0 to 1")
        if max_ttft_penalty_ms < 0:
            raise ValueError(f"maxTTFTPenaltyMs is {max_ttft_penalty_ms:g}; it must be 0 or more")
        if ttft_source not in ("prefillThroughput", "latencyPredictor"):
            raise ValueError(f'ttftSource is "{ttft_source}"; it must be prefillThroughput or latencyPredictor')
        self.predicted = ttft_source == "latencyPredictor"
        needed = not self.predicted and max_ttft_penalty_ms > 0
        if peak_prefill_throughput < 0 or (needed and not peak_prefill_throughput):
            raise ValueError(f"peakPrefillThroughput is {peak_prefill_throughput:g}; it must be above 0")
        self.threshold = affinity_threshold
        self.exploration = exploration_probability
        self.penalty_ms = max_ttft_penalty_ms
        self.throughput = peak_prefill_throughput

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        found = cycle.get(PREFIX_MATCH)
        if found is None or len(candidates) <= 1 or self.threshold <= 0:
            return ()
        if self.exploration and cycle.rng.random() < self.exploration:
            return ()
        share = ratio(candidates.cut(found.match), candidates.cut(found.total))
        cached, rest = where_at_least(share, self.threshold), where_below(share, self.threshold)
        if not len(cached) or not len(rest) or self._too_slow(cycle, candidates, cached, rest):
            return ()
        return Rejected(candidates, rest, "prompt-not-cached", cached=share)

    def _too_slow(self, cycle: RequestCycle, candidates: Endpoints, cached: Positions, rest: Positions) -> bool:
        if not self.penalty_ms:
            return False
        ttft_ms = self._ttft_ms(cycle, candidates)
        return smallest(take(ttft_ms, cached)) - smallest(take(ttft_ms, rest)) > self.penalty_ms

    def _ttft_ms(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        if not self.predicted:
            return linear(candidates.column(IN_FLIGHT_TOKENS), 1000 / self.throughput, 0.0)
        known = cycle.get(LATENCY_PREDICTIONS) or {}
        return column_of([known[e.id].ttft if e.id in known else inf for e in candidates], candidates.arrays)

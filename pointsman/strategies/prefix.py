"""A prompt goes where the most of it is cached, unless that instance is much busier than another."""

from math import inf

from pointsman.routing.endpoints import LOAD, Endpoint
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.filters.demands import Demands
from pointsman.routing.plugins import PREFIX_MATCH, Endpoints, Rejections, RequestCycle
from pointsman.routing.producers.prefix import ApproxPrefixCacheProducer
from pointsman.routing.scorers.prefix import PrefixCacheScorer
from pointsman.routing.scorers.speed import LeastLoaded
from pointsman.selection import FallbackProfileHandler, MaxScorePicker, Profile, Rejected, Scheduler
from pointsman.selection.columns import linear, ratio, smallest, where_above, where_below
from pointsman.strategies.base import Rule, Strategy, arrival
from pointsman.types import RequestMetadata


class MuchCached:
    """Demands endpoints that hold at least `min_match` of the prompt."""

    def __init__(self, min_match: float) -> None:
        self._min_match = min_match

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        found = cycle.get(PREFIX_MATCH)
        if found is None:
            return Rejected[Endpoint](candidates, list(range(len(candidates))), "prompt-not-cached", cached=0.0)
        share = ratio(candidates.cut(found.match), candidates.cut(found.total))
        return Rejected[Endpoint](candidates, where_below(share, self._min_match), "prompt-not-cached", cached=share)


class NotMuchBusier:
    """Demands at most `max_imbalance` requests more than the candidate with the fewest has."""

    def __init__(self, max_imbalance: float) -> None:
        self._max_imbalance = max_imbalance

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        load = candidates.column(LOAD)
        least = smallest(load)
        busier = where_above(linear(load, 1.0, -least), self._max_imbalance)
        return Rejected[Endpoint](candidates, busier, "much-busier", load=load, least=least) if len(busier) else ()


class PrefixPolicy(Strategy):
    """Highest priority first, then arrival; the instance that has the most of the prompt cached, while it has room.

    An instance counts if it holds at least `min_match` of the prompt, and has at most `max_imbalance` requests more
    than the instance with the fewest (None means no limit). If no instance counts, the least loaded one takes the
    request, and holds its prompt from then on. A dispatcher remembers what it has sent where; `schedule` remembers
    nothing between calls.
    """

    def __init__(
        self,
        min_match: float = 0.1,
        max_imbalance: int | None = 16,
        price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR,
    ) -> None:
        if not 0.0 < min_match <= 1.0:
            raise ValueError(f"minMatch is {min_match:g}; it must be above 0 and at most 1")
        if max_imbalance is not None and max_imbalance < 0:
            raise ValueError(f"maxImbalance is {max_imbalance}; it must not be negative")
        self.price_per_gpu_hour = price_per_gpu_hour
        must, words = Demands(price_per_gpu_hour), "prefix, else least loaded"
        busier = NotMuchBusier(inf if max_imbalance is None else max_imbalance)
        longest = [(PrefixCacheScorer(), 4.0), (LeastLoaded(), 1.0)]
        cached: Profile[Endpoint] = Profile("prefix", must, busier, MuchCached(min_match), *longest, MaxScorePicker())
        lightest: Profile[Endpoint] = Profile("least loaded", must, LeastLoaded(), MaxScorePicker())
        memory = ApproxPrefixCacheProducer()
        self.plugins = (memory,)
        self._rule = Rule(words, Scheduler([cached, lightest], FallbackProfileHandler(), [memory]))

    def order(self, request: RequestMetadata) -> tuple[int, float]:
        return -request.priority, arrival(request)

    def rule_for(self, cycle: RequestCycle, endpoints: Endpoints) -> Rule:
        return self._rule

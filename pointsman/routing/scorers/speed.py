"""Scorers for load, speed and cost, as owners declare them for their instances, or as learned here."""

from pointsman.routing.endpoints import LIGHTNESS
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR, CostRates, latency_ms
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Column
from pointsman.selection.columns import best_over, share_of_best


class LeastLoaded:
    """Prefers the endpoint with the lowest load relative to its limit: 1 when idle, 0.5 at the limit.

    The load is the number of requests in flight there, and any more that the instance reported. An unknown limit counts
    as 256.
    """

    bounded = True

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        return candidates.column(LIGHTNESS)


class Fastest:
    """Prefers the endpoint that would answer soonest: 1 for the fastest, 0.5 for one that takes twice as long.

    An endpoint that was never measured scores 0. If none was measured, the scores are those of least-loaded.
    """

    bounded = True

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        scores = best_over(latency_ms(cycle.request, candidates))
        return candidates.column(LIGHTNESS) if scores is None else scores


class Cheapest:
    """Prefers the endpoint where the request costs least: 1 for the cheapest, 0.5 for one that costs twice as much.

    An endpoint of unknown cost (no throughput) scores 0. If no cost is known, the scores are those of least-loaded.
    """

    bounded = True

    def __init__(self, price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR) -> None:
        self._rates = CostRates(price_per_gpu_hour)

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        scores = share_of_best(self._rates.cheapness(candidates))
        return candidates.column(LIGHTNESS) if scores is None else scores

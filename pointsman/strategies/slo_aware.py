"""The nearest deadline first, on an instance that makes it."""

from math import inf

from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.filters.deadline import MeetsDeadline
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.scorers.speed import Fastest, LeastLoaded
from pointsman.strategies.base import Rule, Strategy, arrival, rule
from pointsman.types import RequestMetadata

URGENT_BELOW_MS = 1000.0


class SLOAwarePolicy(Strategy):
    """Nearest deadline first, requests without one last; the fastest instance for urgent requests.

    A request is urgent when less than `urgent_below_ms` or less than `urgent_share` of its time remains. Other requests
    go to the least loaded instance of those that are expected to make the deadline, or of all if none is.
    """

    def __init__(
        self,
        urgent_below_ms: float = URGENT_BELOW_MS,
        urgent_share: float = 0.5,
        price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR,
    ) -> None:
        self._urgent_below_ms = urgent_below_ms
        self._urgent_share = urgent_share
        self.price_per_gpu_hour = price = price_per_gpu_hour
        self._fastest = rule("urgent, fastest", Fastest(), price=price)
        self._in_time = rule("in time, least loaded", LeastLoaded(), price=price, first=[MeetsDeadline()])
        self._least_loaded = rule("no deadline, least loaded", LeastLoaded(), price=price)

    def order(self, request: RequestMetadata) -> tuple[float, float]:
        deadline = request.deadline
        return inf if deadline is None else deadline, arrival(request)

    def rule_for(self, cycle: RequestCycle, endpoints: Endpoints) -> Rule:
        deadline, allowed_ms = cycle.request.deadline, cycle.request.slo_deadline_ms
        if deadline is None or allowed_ms is None:
            return self._least_loaded
        left_ms = (deadline - cycle.now) * 1000
        urgent = left_ms < self._urgent_below_ms or left_ms < self._urgent_share * allowed_ms
        return self._fastest if urgent else self._in_time

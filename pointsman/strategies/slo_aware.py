"""The nearest deadline first, on an instance that meets it."""

from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.filters.deadline import MeetsDeadline
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.scorers.speed import Fastest, LeastLoaded
from pointsman.strategies.base import Rule, Strategy, arrival, rule
from pointsman.types import RequestMetadata

URGENT_BELOW_MS = 1000.0


class SLOAwarePolicy(Strategy):
    """Nearest deadline first, then those that are overdue, then those without one; the fastest instance if urgent.

    An overdue request can no longer be in time, so it does not displace a request that can. With `overdue_first` it is
    ordered by its deadline like the others, and so goes ahead of them.

    A request is urgent when less than `urgent_below_ms` or less than `urgent_share` of its time remains. Other requests
    go to the least loaded instance among those that are expected to meet the deadline. If there are none, they go to
    the least loaded of all.
    """

    def __init__(
        self,
        urgent_below_ms: float = URGENT_BELOW_MS,
        urgent_share: float = 0.5,
        overdue_first: bool = False,
        price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR,
    ) -> None:
        self._urgent_below_ms = urgent_below_ms
        self._urgent_share = urgent_share
        self._overdue_first = overdue_first
        self.price_per_gpu_hour = price = price_per_gpu_hour
        self._fastest = rule("urgent, fastest", Fastest(), price=price)
        self._in_time = rule("in time, least loaded", LeastLoaded(), price=price, first=[MeetsDeadline()])
        self._least_loaded = rule("no deadline, least loaded", LeastLoaded(), price=price)

    def order(self, request: RequestMetadata) -> tuple[int, float, float]:
        deadline = request.deadline
        return (2, 0.0, arrival(request)) if deadline is None else (0, deadline, arrival(request))

    def order_at(self, request: RequestMetadata, now: float) -> tuple[int, float, float]:
        deadline = request.deadline
        if deadline is None or now <= deadline or self._overdue_first:
            return self.order(request)
        return 1, deadline, arrival(request)

    def rule_for(self, cycle: RequestCycle, endpoints: Endpoints) -> Rule:
        deadline, allowed_ms = cycle.request.deadline, cycle.request.slo_deadline_ms
        if deadline is None or allowed_ms is None:
            return self._least_loaded
        left_ms = (deadline - cycle.now) * 1000
        urgent = left_ms < self._urgent_below_ms or left_ms < self._urgent_share * allowed_ms
        return self._fastest if urgent else self._in_time

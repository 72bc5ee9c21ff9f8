"""The cheapest instance that meets the requirements."""

from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.filters.deadline import MeetsDeadline
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.scorers.speed import Cheapest
from pointsman.strategies.base import Rule, Strategy, arrival, rule
from pointsman.types import RequestMetadata


class CostOptimizedPolicy(Strategy):
    """Arrival order; the cheapest instance of those within budget and expected to meet the deadline.

    The cost of a request is the price of the instance's GPUs, at `price_per_gpu_hour` or the instance's own price, for
    the time it takes to generate the request's tokens. An instance of unknown cost is never the cheapest, and never
    within a budget. If no instance is expected to meet the deadline, the policy chooses the cheapest of all.
    """

    def __init__(self, price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR) -> None:
        if not price_per_gpu_hour > 0:
            raise ValueError(f"pricePerGpuHour must be positive, found {price_per_gpu_hour}")
        self.price_per_gpu_hour = price_per_gpu_hour
        cheapest = Cheapest(price_per_gpu_hour)
        self._cheapest = rule("cheapest", cheapest, price=price_per_gpu_hour)
        self._in_time = rule("in time, cheapest", cheapest, price=price_per_gpu_hour, first=[MeetsDeadline()])

    def order(self, request: RequestMetadata) -> float:
        return arrival(request)

    def rule_for(self, cycle: RequestCycle, endpoints: Endpoints) -> Rule:
        deadline = cycle.request.deadline
        return self._cheapest if deadline is None or deadline <= cycle.now else self._in_time

"""First come, first served, by the least loaded instance."""

from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.scorers.speed import LeastLoaded
from pointsman.strategies.base import Rule, Strategy, arrival, rule
from pointsman.types import RequestMetadata


class FIFOPolicy(Strategy):
    """Arrival order; the least loaded instance."""

    def __init__(self, price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR) -> None:
        self.price_per_gpu_hour = price_per_gpu_hour
        self._least_loaded = rule("least loaded", LeastLoaded(), price=price_per_gpu_hour)

    def order(self, request: RequestMetadata) -> float:
        return arrival(request)

    def rule_for(self, cycle: RequestCycle, endpoints: Endpoints) -> Rule:
        return self._least_loaded

"""First come, first served, by the less loaded of two random instances: the default of Ray Serve."""

from pointsman.routing.endpoints import Endpoint
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.filters.demands import Demands
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.scorers.speed import LeastLoaded
from pointsman.selection import PowerOfTwoPicker, Profile, Scheduler
from pointsman.strategies.base import Rule, Strategy, arrival
from pointsman.types import RequestMetadata


class PowerOfTwoPolicy(Strategy):
    """Arrival order; the less loaded of two random instances."""

    def __init__(self, price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR) -> None:
        self.price_per_gpu_hour = price_per_gpu_hour
        words = "less loaded of two"
        of_two: Profile[Endpoint] = Profile(words, Demands(price_per_gpu_hour), LeastLoaded(), PowerOfTwoPicker())
        self._rule = Rule(words, Scheduler([of_two]))

    def order(self, request: RequestMetadata) -> float:
        return arrival(request)

    def rule_for(self, cycle: RequestCycle, endpoints: Endpoints) -> Rule:
        return self._rule

"""First come, first served, by whoever has most room."""

from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.scorers.speed import LeastLoaded
from pointsman.strategies.base import Rule, Strategy, arrival, rule
from pointsman.types import RequestMetadata


class FifoStrategy(Strategy):
    """Arrival order; the least loaded instance."""

    def __init__(self) -> None:
        self._least_loaded = rule("least loaded", LeastLoaded())

    def order(self, request: RequestMetadata) -> float:
        return arrival(request)

    def rule_for(self, cycle: RequestCycle, endpoints: Endpoints) -> Rule:
        return self._least_loaded

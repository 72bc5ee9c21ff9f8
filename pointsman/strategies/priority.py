"""The most important requests first, on the fastest instances."""

from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.scorers.speed import Fastest, LeastLoaded
from pointsman.strategies.base import Rule, Strategy, arrival, rule
from pointsman.types import RequestMetadata, RequestPriority


class PriorityPolicy(Strategy):
    """Highest priority first, then arrival; the fastest instance for CRITICAL and HIGH, the least loaded for the rest.

    `fast_from` is the lowest priority that gets the fastest instance. With `aging_s`, each `aging_s` seconds of waiting
    raise a request by one priority, so that later arrivals do not overtake it forever. Without it, priority is strict.
    """

    def __init__(
        self,
        fast_from: int = RequestPriority.HIGH,
        aging_s: float | None = None,
        price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR,
    ) -> None:
        if aging_s is not None and aging_s <= 0:
            raise ValueError(f"agingS must be positive, found {aging_s}")
        self._fast_from = fast_from
        self._aging_s = aging_s
        self.price_per_gpu_hour = price_per_gpu_hour
        self._fastest = rule("fastest", Fastest(), price=price_per_gpu_hour)
        self._least_loaded = rule("least loaded", LeastLoaded(), price=price_per_gpu_hour)

    def order(self, request: RequestMetadata) -> tuple[float, float]:
        if self._aging_s is None:
            return -request.priority, arrival(request)
        return arrival(request) - request.priority * self._aging_s, 0.0

    def rule_for(self, cycle: RequestCycle, endpoints: Endpoints) -> Rule:
        return self._fastest if cycle.request.priority >= self._fast_from else self._least_loaded

"""Lets one of the other strategies decide, by load, deadlines and priorities."""

from collections.abc import Sequence
from math import inf

from pointsman.routing.endpoints import ACCEPTS, LIMIT, LOAD
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.strategies.base import Rule, Strategy
from pointsman.strategies.cost_optimized import CostOptimizedPolicy
from pointsman.strategies.priority import PriorityPolicy
from pointsman.strategies.slo_aware import URGENT_BELOW_MS, SLOAwarePolicy
from pointsman.types import RequestMetadata, RequestPriority


class AdaptivePolicy(Strategy):
    """High priority present: priority. High load and deadlines: SLO-aware. Low load: cost. Otherwise: SLO-aware.

    The policy judges a batch as a whole. In a live queue it judges each request by itself, and the order is fixed: high
    priorities first, then nearest deadlines, then arrival.
    """

    def __init__(
        self,
        high_load: float = 0.8,
        low_load: float = 0.3,
        high_priority: int = RequestPriority.HIGH,
        price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR,
        urgent_below_ms: float = URGENT_BELOW_MS,
        overdue_first: bool = False,
    ) -> None:
        if not 0 <= low_load <= high_load:
            raise ValueError(f"lowLoad must be between 0 and highLoad, found {low_load} and {high_load}")
        self._high_load, self._low_load, self._high_priority = high_load, low_load, high_priority
        self.price_per_gpu_hour = price_per_gpu_hour
        self._priority = PriorityPolicy(fast_from=high_priority, price_per_gpu_hour=price_per_gpu_hour)
        self._slo_aware = SLOAwarePolicy(
            urgent_below_ms, overdue_first=overdue_first, price_per_gpu_hour=price_per_gpu_hour
        )
        self._cost = CostOptimizedPolicy(price_per_gpu_hour)
        for part in (self._priority, self._slo_aware, self._cost):
            part.name = f"{self.name}, {part.name}"

    def for_batch(self, requests: Sequence[RequestMetadata], endpoints: Endpoints) -> Strategy:
        if any(request.priority >= self._high_priority for request in requests):
            return self._priority
        load = load_share(endpoints)
        if load >= self._high_load and any(request.slo_deadline_ms is not None for request in requests):
            return self._slo_aware
        return self._cost if load <= self._low_load else self._slo_aware

    def order(self, request: RequestMetadata) -> tuple[float, ...]:
        return -self._importance(request), *self._slo_aware.order(request)

    def order_at(self, request: RequestMetadata, now: float) -> tuple[float, ...]:
        return -self._importance(request), *self._slo_aware.order_at(request, now)

    def _importance(self, request: RequestMetadata) -> int:
        return request.priority if request.priority >= self._high_priority else self._high_priority - 1

    def rule_for(self, cycle: RequestCycle, endpoints: Endpoints) -> Rule:
        return self.for_batch([cycle.request], endpoints).rule_for(cycle, endpoints)


def load_share(endpoints: Endpoints) -> float:
    """Running requests divided by the sum of limits, over all instances that accept requests. 0 if a limit is unknown,
    1 if no instance accepts requests."""
    accepts, load, limits = (endpoints.column(name) for name in (ACCEPTS, LOAD, LIMIT))
    room = sum(limit for open_, limit in zip(accepts, limits, strict=True) if open_)
    busy = sum(running for open_, running in zip(accepts, load, strict=True) if open_)
    if room == inf:
        return 0.0
    return float(busy / room) if room else 1.0

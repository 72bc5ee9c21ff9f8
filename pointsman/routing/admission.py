"""Admitters, which may deny requests of negative priority before any scheduling.

Enters: a request and the fleet. Leaves: the reason for a denial, or None. The one rule: requests of priority 0 and
above pass.
"""

from pointsman.reasons import Reason
from pointsman.routing.endpoints import KV_USAGE, MEASURED_AT, RUNNING, WAITING
from pointsman.routing.plugins import LATENCY_PREDICTIONS, Endpoints, RequestCycle
from pointsman.routing.producers.latency import objective_ms
from pointsman.selection.columns import filled, larger, linear, mean, placed, smallest, take, where_finite

__all__ = ["LatencySloAdmitter", "ProbabilisticAdmitter"]

COLD_KV_USAGE = 0.02


class ProbabilisticAdmitter:
    """Denies requests with probability saturation^`power` * `k`.

    Saturation is the mean over endpoints of the waiting queue or the KV cache relative to its threshold, whichever is
    higher. An endpoint that was never measured counts as 1. Without endpoints all requests are admitted, and are
    refused later.
    """

    def __init__(
        self,
        queue_depth_threshold: float = 5.0,
        kv_cache_util_threshold: float = 0.8,
        power: float = 5.0,
        k: float = 300.0,
    ) -> None:
        given = {"queueDepthThreshold": queue_depth_threshold, "kvCacheUtilThreshold": kv_cache_util_threshold}
        for parameter, value in {**given, "power": power, "k": k}.items():
            if value <= 0:
                raise ValueError(f"{parameter} is {value:g}; it must be above 0")
        self.queue_limit, self.kv_limit = queue_depth_threshold, kv_cache_util_threshold
        self.power, self.k = power, k

    def denial(self, cycle: RequestCycle, endpoints: Endpoints) -> Reason | None:
        if cycle.request.priority >= 0 or not len(endpoints):
            return None
        saturation = self.pressure(endpoints)
        odds = self.odds(saturation)
        if cycle.rng.random() >= odds:
            return None
        return Reason("shed", {"priority": cycle.request.priority, "saturation": saturation, "odds": odds})

    def pressure(self, endpoints: Endpoints) -> float:
        """The saturation of the endpoints; it is 1 at the thresholds."""
        queue = linear(endpoints.column(WAITING), 1 / self.queue_limit, 0.0)
        fullest = larger(queue, linear(endpoints.column(KV_USAGE), 1 / self.kv_limit, 0.0))
        measured = where_finite(endpoints.column(MEASURED_AT))
        return mean(placed(filled(1.0, queue), measured, take(fullest, measured)))

    def odds(self, saturation: float) -> float:
        try:
            return min(float(saturation**self.power) * self.k, 1.0)
        except OverflowError:
            return 1.0


class LatencySloAdmitter:
    """Denies requests that no endpoint is predicted to serve in time, unless one is idle or its KV cache nearly empty.

    It applies to requests with an objective in `x-llm-d-slo-ttft-ms` or `x-llm-d-slo-tpot-ms`. Without predictions all
    requests are admitted. An endpoint that was never measured counts as idle.
    """

    def denial(self, cycle: RequestCycle, endpoints: Endpoints) -> Reason | None:
        if cycle.request.priority >= 0 or not any(objective_ms(cycle.request, kind) for kind in ("ttft", "tpot")):
            return None
        known = cycle.get(LATENCY_PREDICTIONS) or {}
        predictions = [known[endpoint.id] for endpoint in endpoints if endpoint.id in known]
        if not predictions or any(prediction.ttft_valid and prediction.tpot_valid for prediction in predictions):
            return None
        if smallest(endpoints.column(RUNNING)) <= 0 or smallest(endpoints.column(KV_USAGE)) < COLD_KV_USAGE:
            return None
        return Reason("would-be-late", {"endpoints": len(predictions)})

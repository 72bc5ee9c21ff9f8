"""How full a pool is: 1.0 is full, more is overload. A detector is also a filter that rejects full endpoints."""

from collections.abc import Set
from typing import Literal, Protocol, runtime_checkable

from pointsman.parameters import Duration
from pointsman.reasons import Reason
from pointsman.routing.endpoints import (
    HOLDS_UNTIL,
    IN_FLIGHT_REQUESTS,
    IN_FLIGHT_TOKENS,
    KV_USAGE,
    MEASURED_AT,
    SENT_SINCE_MEASURED,
    WAITING,
)
from pointsman.routing.filters.roles import ROLE, DecodeFilter, PrefillFilter
from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.selection import Column, Positions, Rejected
from pointsman.selection.arrays import np
from pointsman.selection.columns import larger, linear, mean, where_above, where_at_least

_COLUMNS = {"requests": IN_FLIGHT_REQUESTS, "tokens": IN_FLIGHT_TOKENS}


@runtime_checkable
class SaturationDetector(Protocol):
    """Measures how full a pool of endpoints is."""

    def saturation(self, endpoints: Endpoints, now: float) -> float:
        """0 for an idle pool, 1 or more for a full one. An empty pool is full."""
        ...


class UtilizationDetector:
    """Saturation by what engines report: their waiting queues and KV caches. Stale measurements count as full.

    Several requests may leave the queue between two measurements. So requests that were sent to an endpoint since it
    was last measured count as waiting there; otherwise one free slot would be used many times over. As a filter it
    rejects endpoints above a threshold or with stale measurements, unless that would reject all of them.
    """

    def __init__(
        self,
        queue_depth_threshold: float = 5.0,
        kv_cache_util_threshold: float = 0.8,
        metrics_staleness_threshold: Duration = 0.2,
        headroom: float = 0.0,
    ) -> None:
        _check_above_zero("queueDepthThreshold", queue_depth_threshold)
        _check_above_zero("kvCacheUtilThreshold", kv_cache_util_threshold)
        _check_above_zero("metricsStalenessThreshold", metrics_staleness_threshold)
        _check_headroom(headroom)
        if kv_cache_util_threshold > 1:
            raise ValueError(f"kvCacheUtilThreshold is {kv_cache_util_threshold:g}; it must be at most 1")
        self.queue_limit = queue_depth_threshold
        self.kv_limit = kv_cache_util_threshold
        self.oldest_s = metrics_staleness_threshold
        self.filter_queue_limit = queue_depth_threshold * (1 + headroom)
        self.filter_kv_limit = kv_cache_util_threshold * (1 + headroom)

    def allow_age(self, oldest_s: float) -> None:
        """Treat measurements up to this age as current, whatever the parameter says: there are no newer ones."""
        self.oldest_s = max(self.oldest_s, oldest_s)

    def saturation(self, endpoints: Endpoints, now: float) -> float:
        waiting, sent = endpoints.column(WAITING), endpoints.column(SENT_SINCE_MEASURED)
        kv_usage, current_at = endpoints.column(KV_USAGE), _current_at(endpoints)
        if not len(endpoints):
            return 1.0
        queue_limit, kv_limit, oldest_s = self.queue_limit, self.kv_limit, self.oldest_s
        if isinstance(waiting, list):
            total = 0.0
            for queued, extra, used, at in zip(waiting, sent, kv_usage, current_at, strict=True):
                total += 1.0 if now - at > oldest_s else max((queued + extra) / queue_limit, used / kv_limit)
            return total / len(waiting)
        fullest = np.maximum((waiting + sent) / queue_limit, np.asarray(kv_usage) / kv_limit)
        return float(np.where(now - np.asarray(current_at) > oldest_s, 1.0, fullest).mean())

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        waiting, kv_usage = candidates.column(WAITING), candidates.column(KV_USAGE)
        age_s = linear(candidates.column(MEASURED_AT), -1.0, cycle.now)
        full = _any_of(
            where_at_least(waiting, self.filter_queue_limit),
            where_at_least(kv_usage, self.filter_kv_limit),
            where_above(linear(_current_at(candidates), -1.0, cycle.now), self.oldest_s),
        )
        if not full or len(full) == len(candidates):
            return ()
        return Rejected(
            candidates,
            full,
            "saturated",
            waiting=waiting,
            kv_usage=kv_usage,
            age_s=age_s,
            max_waiting=self.filter_queue_limit,
            max_kv_usage=self.filter_kv_limit,
            max_age_s=self.oldest_s,
        )


def _current_at(endpoints: Endpoints) -> Column:
    """When the age of measurements begins to count: when they were made, but for idle engines when the next is due."""
    return larger(endpoints.column(MEASURED_AT), endpoints.column(HOLDS_UNTIL))


class ConcurrencyDetector:
    """Saturation by what was sent and has not ended: requests, tokens, or the fuller of the two (`hybrid`). As a filter
    it rejects full endpoints, even if that is all of them.
    """

    def __init__(
        self,
        max_concurrency: int = 100,
        max_token_concurrency: int = 1_000_000,
        headroom: float = 0.0,
        concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests",
    ) -> None:
        _check_above_zero("maxConcurrency", max_concurrency)
        _check_above_zero("maxTokenConcurrency", max_token_concurrency)
        _check_headroom(headroom)
        most = {"requests": max_concurrency, "tokens": max_token_concurrency}
        if concurrency_mode not in (*most, "hybrid"):
            raise ValueError(f'concurrencyMode is "{concurrency_mode}"; it must be requests, tokens or hybrid')
        modes = list(most) if concurrency_mode == "hybrid" else [concurrency_mode]
        self._limits = [(_COLUMNS[mode], most[mode]) for mode in modes]
        self._filter_limits = {mode: float(int(most[mode] * (1 + headroom))) for mode in modes}

    def saturation(self, endpoints: Endpoints, now: float) -> float:
        if not len(endpoints):
            return 1.0
        columns = [endpoints.column(name) for name, _ in self._limits]
        if len(columns) == 1:
            return mean(columns[0]) / self._limits[0][1]
        return mean(larger(*(_divided(column, most) for column, (_, most) in zip(columns, self._limits, strict=True))))

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        columns = {mode: candidates.column(_COLUMNS[mode]) for mode in self._filter_limits}
        full = _any_of(*map(where_at_least, columns.values(), self._filter_limits.values()))
        return Rejected(candidates, full, "concurrency-limit", limits=self._filter_limits, **columns) if full else ()


def _any_of(*positions: Positions) -> list[int]:
    """The union of positions, in order."""
    return sorted({int(position) for some in positions for position in some})


def _divided(column: Column, by: float) -> Column:
    # A division, not a product with the reciprocal: a full endpoint must yield exactly 1.
    return [value / by for value in column] if isinstance(column, list) else column / by


def _check_above_zero(parameter: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{parameter} is {value:g}; it must be above 0")


def _check_headroom(headroom: float) -> None:
    if not headroom >= 0:
        raise ValueError(f"headroom is {headroom:g}; it must be 0 or more")


class PoolSaturation:
    """The saturation of the fuller of two sub-pools: the endpoints that may prefill, and those that may decode.

    An endpoint without a role may decode; one with a mixed role is in both. An empty sub-pool does not count.
    """

    def __init__(self, detector: SaturationDetector) -> None:
        self.detector = detector
        self._roles = (PrefillFilter().roles, DecodeFilter().roles)
        self._split: Endpoints | None = None
        self._sub_pools: list[Endpoints] = []

    def of(self, endpoints: Endpoints, now: float) -> float:
        """How full these endpoints are; 1.0 if there are no endpoints."""
        if endpoints is not self._split:  # the roster is the same until its members change
            self._split, self._sub_pools = endpoints, self._split_by_role(endpoints)
        return max(self.detector.saturation(sub_pool, now) for sub_pool in self._sub_pools)

    def _split_by_role(self, endpoints: Endpoints) -> list[Endpoints]:
        if not any(ROLE in endpoint.labels for endpoint in endpoints):
            return [endpoints]
        sub_pools = [_having(roles, endpoints) for roles in self._roles]
        return [sub_pool for sub_pool in sub_pools if len(sub_pool)] or sub_pools


class LegacyAdmission:
    """Without flow control, requests of negative priority are refused while the pool is full.

    With `waits`, neither an empty pool nor an instance that was never measured counts as full, and other requests wait
    for a first instance and its first report. This is because a plane has engines without metrics, and starts
    instances on demand.
    """

    def __init__(self, detector: SaturationDetector, *, waits: bool = False) -> None:
        self._pool = PoolSaturation(detector)
        self._waits = waits
        self._needs_reports = waits and isinstance(detector, UtilizationDetector)

    def denial(self, cycle: RequestCycle, endpoints: Endpoints) -> Reason | None:
        priority = cycle.request.priority
        if priority >= 0:
            return None
        if self._needs_reports:
            endpoints = _measured(endpoints)
        if self._waits and not len(endpoints):
            return None
        saturation = self._pool.of(endpoints, cycle.now)
        if saturation < 1.0:
            return None
        return Reason("shed-by-priority", {"priority": priority, "saturation": saturation})


def _measured(endpoints: Endpoints) -> Endpoints:
    """The endpoints that have been measured; the same roster if all of them have."""
    unmeasured = [i for i, endpoint in enumerate(endpoints) if endpoint.metrics is None]
    return endpoints.without(unmeasured) if unmeasured else endpoints


def _having(roles: Set[str | None], endpoints: Endpoints) -> Endpoints:
    return endpoints.without([i for i, endpoint in enumerate(endpoints) if endpoint.labels.get(ROLE) not in roles])

"""The filter for endpoints that are too busy by one of several metrics."""

from collections.abc import Sequence
from functools import reduce
from typing import Literal

from pointsman.errors import did_you_mean
from pointsman.parameters import Parameters
from pointsman.routing.endpoints import IN_FLIGHT_REQUESTS, KV_USAGE, RUNNING, WAITING
from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.selection import Rejected
from pointsman.selection.columns import larger, linear, where_above

COLUMNS = {
    "active-requests": IN_FLIGHT_REQUESTS,
    "running-requests": RUNNING,
    "waiting-queue": WAITING,
    "kv-cache-utilization": KV_USAGE,
}


class Condition(Parameters, frozen=True):
    """The maximum of one metric."""

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: float

    def check(self) -> None:
        """Raise ValueError if the metric is unknown or its maximum impossible."""
        if self.metric not in COLUMNS:
            raise ValueError(f'conditions: metric "{self.metric}" is unknown{did_you_mean(self.metric, COLUMNS)}')
        if self.max_value < 0:
            raise ValueError(f"conditions: maxValue of {self.metric} is {self.max_value:g}; it must be 0 or more")
        if self.metric == "kv-cache-utilization" and self.max_value > 1:
            raise ValueError(f"conditions: maxValue of {self.metric} is {self.max_value:g}; it must be at most 1")


class UtilizationFilter:
    """Demands that an endpoint is at or below `maxValue` for all `conditions`.

    If no endpoint passes, all are rejected; with `fallback_on_empty`, all pass. A metric that was never measured counts
    as 0.
    """

    def __init__(self, conditions: Sequence[Condition], fallback_on_empty: bool = False) -> None:
        if not conditions:
            raise ValueError("conditions is empty; it needs at least one {metric, maxValue}")
        for condition in conditions:
            condition.check()
        self.limits = {condition.metric: condition.max_value for condition in conditions}
        self.fallback = fallback_on_empty

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        columns = {metric: candidates.column(COLUMNS[metric]) for metric in self.limits}
        excess = [linear(columns[metric], 1.0, -limit) for metric, limit in self.limits.items()]
        over = where_above(reduce(larger, excess), 0.0)
        if not len(over) or (self.fallback and len(over) == len(candidates)):
            return ()
        return Rejected(candidates, over, "too-busy", limits=self.limits, **columns)

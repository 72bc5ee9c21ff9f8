"""The scorer for any metric or attribute of endpoints."""

from collections.abc import Callable
from math import nan
from typing import Any, Literal, TypeAlias, get_args

from pointsman.parameters import Parameters
from pointsman.routing.endpoints import KV_USAGE, MEASURED_AT, RUNNING, WAITING, Attribute, Endpoint, Metrics
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Column
from pointsman.selection.columns import clipped, column_of, falling, filled, linear, placed, take, where_finite

Direction: TypeAlias = Literal["linear_lower_is_better", "linear_higher_is_better"]

CORE_METRICS = "core-metrics-extractor"
MEASURED = (WAITING, RUNNING, KV_USAGE)
"""Columns that are 0 for an endpoint never measured; others are nan then."""


class FixedRange(Parameters, frozen=True):
    """The values that map to 0 and 1; values outside are clamped."""

    min: float
    max: float


class AdaptiveRange(Parameters, frozen=True):
    """From the smallest to the largest value among the candidates."""


class Normalization(Parameters, frozen=True):
    """How a value becomes a score: one of the two, by default adaptive."""

    fixed_range: FixedRange | None = None
    adaptive_range: AdaptiveRange | None = None


class Algorithm(Parameters, frozen=True):
    """Which direction is better."""

    type: Direction
    normalization: Normalization = Normalization()


class EndpointAttributeScorer:
    """Prefers endpoints by one number: a column of the fleet, a metric that engines report, or an observed attribute.

    An endpoint whose value is missing or not a number scores 0 and does not widen the adaptive range. The age of values
    is ignored.
    """

    def __init__(self, attribute_key: str, algorithm: Algorithm, producer: str = "") -> None:
        if not attribute_key:
            raise ValueError("attributeKey is empty; it must name a metric or an attribute")
        if "/" in attribute_key and not producer:
            raise ValueError(f'producer is missing; attributeKey "{attribute_key}" has a "/", so it must be named')
        if algorithm.type not in get_args(Direction):
            raise ValueError(f'algorithm.type is "{algorithm.type}"; it must be {" or ".join(get_args(Direction))}')
        self.fixed = algorithm.normalization.fixed_range
        if self.fixed is not None:
            if algorithm.normalization.adaptive_range is not None:
                raise ValueError("algorithm.normalization has fixedRange and adaptiveRange; only one is allowed")
            if self.fixed.min >= self.fixed.max:
                raise ValueError(
                    f"algorithm.normalization.fixedRange is {self.fixed.min:g} to {self.fixed.max:g}; "
                    "its min must be below its max"
                )
        self.lower_is_better = algorithm.type == "linear_lower_is_better"
        self.key = attribute_key
        self.core = producer in ("", CORE_METRICS)
        self._attribute: Attribute[Any] = Attribute(attribute_key)

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        values = self._values(candidates)
        known = where_finite(values)
        return placed(filled(0.0, values), known, self._scaled(take(values, known)))

    def _scaled(self, values: Column) -> Column:
        if self.fixed is None:
            return falling(values if self.lower_is_better else linear(values, -1.0, 0.0))
        span = self.fixed.max - self.fixed.min
        rising = clipped(linear(values, 1 / span, -self.fixed.min / span), 0.0, 1.0)
        return linear(rising, -1.0, 1.0) if self.lower_is_better else rising

    def _values(self, candidates: Endpoints) -> Column:
        if not self.core:
            return self._each(self._observed, candidates)
        if self.key in MEASURED:
            reported = candidates.column(self.key)
            measured = where_finite(candidates.column(MEASURED_AT))
            return placed(filled(nan, reported), measured, take(reported, measured))
        if self.key in Metrics.__struct_fields__:
            return self._each(self._reported, candidates)
        try:
            return candidates.column(self.key)
        except KeyError:
            return self._each(self._observed, candidates)

    def _each(self, read: Callable[[Endpoint], float], candidates: Endpoints) -> Column:
        return column_of([read(endpoint) for endpoint in candidates], candidates.arrays)

    def _reported(self, endpoint: Endpoint) -> float:
        return nan if endpoint.metrics is None else _number(getattr(endpoint.metrics, self.key))

    def _observed(self, endpoint: Endpoint) -> float:
        seen = endpoint.observed(self._attribute)
        return nan if seen is None else _number(seen.value)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else nan

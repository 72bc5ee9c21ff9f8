"""The scorer for any metric or attribute of endpoints."""

from typing import Literal, TypeAlias, get_args

from pointsman.parameters import Parameters
from pointsman.routing.attributes import AttributeColumn
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Column
from pointsman.selection.columns import clipped, falling, filled, linear, placed, take, where_finite

Direction: TypeAlias = Literal["linear_lower_is_better", "linear_higher_is_better"]


class FixedRange(Parameters, frozen=True):
    """The values that map to 0 and 1; values outside are clamped."""

    min: float
    max: float


class AdaptiveRange(Parameters, frozen=True):
    """The range from the smallest to the largest value among the candidates."""


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

    An endpoint whose value is missing or not a number scores 0, and does not widen the adaptive range. The age of
    values is ignored.
    """

    bounded = True

    def __init__(self, attribute_key: str, algorithm: Algorithm, producer: str = "") -> None:
        self.attribute = AttributeColumn("attributeKey", attribute_key, producer)
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
        self.steady = self.attribute.steady

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        values = self.attribute.of(candidates)
        known = where_finite(values)
        return placed(filled(0.0, values), known, self._scaled(take(values, known)))

    def _scaled(self, values: Column) -> Column:
        if self.fixed is None:
            return falling(values if self.lower_is_better else linear(values, -1.0, 0.0))
        span = self.fixed.max - self.fixed.min
        rising = clipped(linear(values, 1 / span, -self.fixed.min / span), 0.0, 1.0)
        return linear(rising, -1.0, 1.0) if self.lower_is_better else rising

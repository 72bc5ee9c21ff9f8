"""The filter for any metric or attribute of endpoints."""

from collections.abc import Callable
from math import ceil
from typing import Any, Literal

from pointsman.parameters import Parameters
from pointsman.routing.attributes import AttributeColumn
from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.selection import Column, Positions, Rejected
from pointsman.selection.columns import column_of, filled, placed, take, where_finite, where_zero

Operator = Literal["LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"]

COMPARE: dict[str, Callable[[float, float], bool]] = {
    "LessThan": lambda value, limit: value < limit,
    "LessThanOrEqual": lambda value, limit: value <= limit,
    "GreaterThan": lambda value, limit: value > limit,
    "GreaterThanOrEqual": lambda value, limit: value >= limit,
    "Equal": lambda value, limit: value == limit,
    "NotEqual": lambda value, limit: value != limit,
}


class Threshold(Parameters, frozen=True):
    """Compares with one value."""

    operator: Operator
    value: float

    def keeps(self, values: list[float]) -> list[bool]:
        compare = COMPARE[self.operator]
        return [compare(value, self.value) for value in values]


class ValueRange(Parameters, frozen=True):
    """The range from `min` to `max`, both included."""

    min: float
    max: float

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"range is {self.min:g} to {self.max:g}; its min must not be above its max")

    def keeps(self, values: list[float]) -> list[bool]:
        return [self.min <= value <= self.max for value in values]


class TopK(Parameters, frozen=True):
    """The `k` best; among equal ones, those that come first."""

    k: int
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"topK.k is {self.k}; it must be at least 1")

    def keeps(self, values: list[float]) -> list[bool]:
        sign = -1.0 if self.higher_is_better else 1.0
        best = set(sorted(range(len(values)), key=lambda index: sign * values[index])[: self.k])
        return [index in best for index in range(len(values))]


class Percentile(Parameters, frozen=True):
    """Values at least as good as the one at a percentile, which is one of the values (nearest rank)."""

    percentile: float
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.percentile <= 100:
            raise ValueError(f"percentile.percentile is {self.percentile:g}; it must be from 0 to 100")

    def keeps(self, values: list[float]) -> list[bool]:
        if not values:
            return []
        cutoff = sorted(values)[max(ceil(self.percentile / 100 * len(values)), 1) - 1]
        return [value >= cutoff if self.higher_is_better else value <= cutoff for value in values]


class FilterAlgorithm(Parameters, frozen=True):
    """The way in which values are judged, with its parameters."""

    type: Literal["threshold", "range", "topK", "percentile"]
    threshold: Threshold | None = None
    range: ValueRange | None = None
    top_k: TopK | None = None
    percentile: Percentile | None = None

    @property
    def chosen(self) -> Threshold | ValueRange | TopK | Percentile | None:
        ways = {"threshold": self.threshold, "range": self.range, "topK": self.top_k, "percentile": self.percentile}
        return ways[self.type]


class EndpointAttributeFilter:
    """Demands endpoints by one number: below or above a threshold, in a range, among the best few or a percentile.

    `on_missing` says whether endpoints without the number pass. If no endpoint passes, all are rejected; with
    `fallback_on_empty`, all pass.
    """

    def __init__(
        self,
        attribute: str,
        algorithm: FilterAlgorithm,
        producer: str = "",
        on_missing: Literal["Pass", "Fail"] = "Pass",
        fallback_on_empty: bool = False,
    ) -> None:
        self.attribute = AttributeColumn("attribute", attribute, producer)
        way = algorithm.chosen
        if way is None:
            raise ValueError(f"algorithm.{algorithm.type} is missing; algorithm.type says so")
        self._way = way
        self._demand: dict[str, Any] = {"type": algorithm.type} | {
            name: getattr(way, name) for name in way.__struct_fields__
        }
        self._passes_missing = on_missing == "Pass"
        self._fallback = fallback_on_empty
        self._judged: Column | None = None
        self._rejected: Positions = ()
        """The positions rejected for the last values. They stay the same between measurements."""

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        values = self.attribute.of(candidates)
        if values is self._judged and self.attribute.steady:
            rejected = self._rejected
        else:
            rejected = self._rejected = self._failing(values, candidates.arrays)
            self._judged = values
        if not len(rejected) or (self._fallback and len(rejected) == len(candidates)):
            return ()
        demand = self._demand
        return Rejected(candidates, rejected, "attribute-differs", name=self.attribute.key, found=values, demand=demand)

    def _failing(self, values: Column, arrays: bool) -> Positions:
        known = where_finite(values)
        kept = self._way.keeps([float(value) for value in take(values, known)])
        passes = placed(filled(float(self._passes_missing), values), known, column_of([*map(float, kept)], arrays))
        return where_zero(passes)

"""Columns: one number per candidate, as a list for a short roster and as an array for a long one.

Plain lists win below a few dozen candidates, arrays above. A plugin that is written with these functions need not
know which of the two it has. Nothing here changes its argument.
"""

from collections.abc import Sequence
from itertools import compress
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Column: TypeAlias = list[float] | Array
Positions: TypeAlias = Sequence[int] | NDArray[np.intp]

ARRAYS_FROM = 40
"""Rosters this long keep their columns as arrays (measured: `make bench-scheduling`)."""


def column_of(values: Sequence[float] | Array, arrays: bool) -> Column:
    """The values as a column of the wanted kind."""
    if arrays:
        return np.asarray(values, dtype=np.float64)
    return values if isinstance(values, list) else [float(value) for value in values]


def filled(value: float, like: Column) -> Column:
    """A column of one value, as long as another."""
    if isinstance(like, list):
        return [value] * len(like)
    return np.full(len(like), value)


def take(column: Column, positions: Positions) -> Column:
    """The values at some positions, as a column of their own."""
    if isinstance(column, list):
        return [column[position] for position in positions]
    return column[positions]


def falling(column: Column) -> Column:
    """1 for the smallest value, 0 for the largest, linear between; all 1 when they are equal."""
    if isinstance(column, list):
        if not column:
            return column
        high, low = max(column), min(column)
        if high == low:
            return [1.0] * len(column)
        scale = 1 / (high - low)
        return [(high - value) * scale for value in column]
    if not len(column):
        return column
    high, low = np.maximum.reduce(column), np.minimum.reduce(column)
    if high == low:
        return np.ones(len(column))
    return (high - column) / (high - low)  # type: ignore[no-any-return]


def linear(column: Column, slope: float, start: float) -> Column:
    """start + slope * value."""
    if isinstance(column, list):
        return [start + slope * value for value in column]
    return start + slope * column


def plus(one: Column, other: Column) -> Column:
    """The sum of two columns."""
    if isinstance(one, list):
        return [a + b for a, b in zip(one, other, strict=True)]
    return one + other


def clipped(column: Column, low: float, high: float) -> Column:
    """Each value, but at least `low` and at most `high`."""
    if isinstance(column, list):
        return [low if value < low else high if value > high else value for value in column]
    return np.minimum(np.maximum(column, low), high)


def ratio(one: Column, other: Column) -> Column:
    """one / other, and 0 where other is 0."""
    if isinstance(one, list):
        return [a / b if b else 0.0 for a, b in zip(one, other, strict=True)]
    return np.divide(one, other, out=np.zeros(len(one)), where=np.asarray(other) != 0)


def where_at_least(column: Column, limit: float | Column) -> Positions:
    """Positions whose value is not below the limit."""
    if isinstance(column, list):
        if isinstance(limit, float | int):
            return [] if max(column, default=0.0) < limit else [i for i, v in enumerate(column) if v >= limit]
        return [i for i, (value, bound) in enumerate(zip(column, limit, strict=True)) if value >= bound]
    return np.flatnonzero(column >= np.asarray(limit))


def where_zero(column: Column) -> Positions:
    """Positions whose value is 0."""
    if isinstance(column, list):
        return [i for i, value in enumerate(column) if not value] if 0.0 in column else []
    return () if column.all() else np.flatnonzero(column == 0.0)


def where_largest(column: Column) -> Positions:
    """Positions of the largest value, in order."""
    if isinstance(column, list):
        best = max(column)
        if column.count(best) == 1:
            return [column.index(best)]
        return list(compress(range(len(column)), [value == best for value in column]))
    return np.flatnonzero(column == np.maximum.reduce(column))

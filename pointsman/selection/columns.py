"""Columns: one number per candidate, as a list for a short roster and as an array for a long one.

Lists are faster for fewer than a few dozen candidates, arrays for more. A plugin written with these functions works
with both. No function changes its arguments.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from math import copysign, floor, inf, isfinite, nan
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, overload

from pointsman.selection.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float64]
    Column: TypeAlias = list[float] | Array
    Positions: TypeAlias = Sequence[int] | NDArray[np.intp]
else:
    Array = Column = Positions = Any

ARRAYS_FROM = 64
"""Rosters of at least this length keep their columns as arrays; docs/rejected-designs.md has the measurements."""


def column_of(values: Sequence[float] | Array, arrays: bool) -> Column:
    if arrays:
        return np.asarray(values, dtype=np.float64)
    return values if isinstance(values, list) else [float(value) for value in values]


def array(column: Column) -> Array:
    return np.asarray(column, dtype=np.float64)


def _where(true: "NDArray[np.bool_]") -> "NDArray[np.intp]":
    return true.nonzero()[0]  # np.flatnonzero does the same and takes twice as long


def filled(value: float, like: Column) -> Column:
    """A column of one value, as long as another."""
    if isinstance(like, list):
        return [value] * len(like)
    return np.full(len(like), value)


def take(column: Column, positions: Positions, arrays: bool | None = None) -> Column:
    """The values at some positions: a list if the column is a list or `arrays` is False, else an array."""
    if isinstance(column, list):
        return list(map(column.__getitem__, positions))
    return column[positions] if arrays is not False else [float(column[position]) for position in positions]


def falling(column: Column) -> Column:
    """1 for the smallest value, 0 for the largest, linear between; 1 for all if all values are equal."""
    if isinstance(column, list):
        if not column:
            return column
        high, low = max(column), min(column)
        if high == low:
            return [1.0] * len(column)
        span = high - low
        return [(high - value) / span for value in column]
    if not len(column):
        return column
    high, low = np.maximum.reduce(column), np.minimum.reduce(column)
    if high == low:
        return np.ones(len(column))
    return (high - column) / (high - low)  # type: ignore[no-any-return]


def linear(column: Column, slope: float, start: float) -> Column:
    if isinstance(column, list):
        if not start:
            return [slope * value for value in column]
        return [start + slope * value for value in column]
    return start + slope * column


def plus(one: Column, other: Column) -> Column:
    if isinstance(one, list):
        return [a + b for a, b in zip(one, other, strict=True)]
    return one + other


def times(one: Column, other: Column) -> Column:
    if isinstance(one, list):
        return [a * b for a, b in zip(one, other, strict=True)]
    return one * other


def larger(one: Column, other: Column) -> Column:
    if isinstance(one, list):
        return [a if a > b else b for a, b in zip(one, other, strict=True)]
    return np.maximum(one, other)


def clipped(column: Column, low: float, high: float) -> Column:
    if isinstance(column, list):
        return [low if value < low else high if value > high else value for value in column]
    return np.minimum(np.maximum(column, low), high)


def quotient(one: Column, other: Column) -> Column:
    """one / other; infinite where only other is 0, nan where both are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.divide(one, other)
    return found.tolist() if isinstance(one, list) else found


def ratio(one: Column, other: Column) -> Column:
    """one / other, and 0 where other is 0."""
    if isinstance(one, list):
        return [a / b if a and b else 0.0 for a, b in zip(one, other)]  # noqa: B905 (one column, one length)
    divisors = array(other)
    if divisors.all():  # the usual case, in half the time
        return one / divisors
    return np.divide(one, divisors, out=np.zeros(len(one)), where=divisors != 0)


def rounded(column: Column, digits: int) -> Column:
    """Rounded to `digits` decimals, halves away from zero."""
    scale = 10.0**digits
    if isinstance(column, list):
        return [copysign(floor(abs(value) * scale + 0.5) / scale, value) for value in column]
    return np.copysign(np.floor(np.abs(column) * scale + 0.5) / scale, column)


def placed(column: Column, positions: Positions, values: float | Column) -> Column:
    """A copy of the column with other values at some positions: one value for all, or one for each."""
    copy = column.copy()
    if isinstance(copy, list):
        each = [values] * len(positions) if isinstance(values, float | int) else values
        for position, value in zip(positions, each, strict=True):
            copy[position] = value
    elif len(positions):
        copy[positions] = values
    return copy


def largest(column: Column) -> float:
    """The largest value; 0 for an empty column."""
    if isinstance(column, list):
        return max(column, default=0.0)
    return float(np.maximum.reduce(column)) if len(column) else 0.0


def smallest(column: Column) -> float:
    """The smallest value; inf for an empty column."""
    if isinstance(column, list):
        return min(column, default=inf)
    return float(np.minimum.reduce(column)) if len(column) else inf


def mean(column: Column) -> float:
    """The mean of a column that is not empty."""
    return sum(column) / len(column) if isinstance(column, list) else float(column.mean())


def where_below(column: Column, limit: float) -> Positions:
    if isinstance(column, list):
        return [position for position, value in enumerate(column) if value < limit]
    return _where(column < limit)


def where_finite(column: Column) -> Positions:
    """Positions whose value is a number: neither nan nor infinite."""
    if isinstance(column, list):
        return [i for i, value in enumerate(column) if isfinite(value)]
    return _where(np.isfinite(column))


def where_at_least(column: Column, limit: float) -> Positions:
    if isinstance(column, list):
        if max(column, default=-inf) < limit:
            return []
        return [position for position, value in enumerate(column) if value >= limit]
    return _where(column >= limit)


def where_zero(column: Column) -> Positions:
    if isinstance(column, list):
        return [i for i, value in enumerate(column) if not value] if 0.0 in column else []
    return () if column.all() else _where(column == 0.0)


def where_set(column: Column) -> Positions:
    """Positions whose value is not 0."""
    if isinstance(column, list):
        return list(compress(range(len(column)), column))
    return _where(column != 0.0) if column.any() else ()


def where_largest(column: Column) -> Positions:
    """Positions of the largest value, in order."""
    if isinstance(column, list):
        best = max(column)
        if column.count(best) == 1:
            return [column.index(best)]
        return [position for position, value in enumerate(column) if value == best]
    return _where(column == np.maximum.reduce(column))


def where_above(column: Column, limit: float) -> Positions:
    if isinstance(column, list):
        if max(column, default=limit) <= limit:
            return []
        return [position for position, value in enumerate(column) if value > limit]
    return _where(column > limit)


def or_else(column: Column, value: float) -> Column:
    """The column with `value` where it is nan."""
    if isinstance(column, list):
        return [number if number == number else value for number in column]
    return np.where(np.isnan(column), value, column)


def share_of_best(column: Column) -> Column | None:
    """Each value divided by the largest: 1 for the best, 0.5 for one half as large. None if no value is above 0.

    If the best is infinite, it is 1 and everything else 0.
    """
    best = largest(column)
    if best <= 0:
        return None
    if best == inf:
        return placed(filled(0.0, column), where_at_least(column, inf), 1.0)
    return [value / best for value in column] if isinstance(column, list) else column / best


def best_over(column: Column) -> Column | None:
    """The smallest value divided by each: 1 for the best, 0.5 for one twice as large, 0 for nan. None if all are nan.

    If the best is 0, it is 1 and everything else 0.
    """
    if isinstance(column, list):
        best = min(column, default=nan)
        if best != best:  # min() returns a nan that comes first
            best = min((value for value in column if value == value), default=nan)
        if best != best:
            return None
        if best <= 0:
            return [float(value == best) for value in column]
        return [best / value if value == value else 0.0 for value in column]
    best = float(np.fmin.reduce(column)) if len(column) else nan
    if best != best:
        return None
    if best <= 0:
        return np.where(column == best, 1.0, 0.0)
    return np.nan_to_num(best / column, copy=False, nan=0.0)


# The candidates of one choice, with their numbers in columns


C = TypeVar("C")
T = TypeVar("T")


class Roster(Sequence[C], Generic[C]):
    """A sequence of candidates with named columns: one number per candidate.

    Filtering makes a smaller roster, which shares members and columns with the whole roster and keeps the rows that are
    left. Columns belong to the maker of the roster; plugins only read them.
    """

    __slots__ = ("_reader", "_whole_arrays", "arrays", "columns", "rows", "stamp", "whole")

    def __init__(
        self,
        candidates: Sequence[C],
        columns: Mapping[str, Column] | None = None,
        *,
        rows: Positions | None = None,
        arrays: bool | None = None,
        whole_arrays: bool | None = None,
        stamp: list[int] | None = None,
    ) -> None:
        self.whole = candidates
        """All members of the roster from which this one was cut. This stays the same object as long as the members are
        the same. So a plugin can use its identity as the key for what it has computed about the members."""
        self.columns: Mapping[str, Column] = columns if columns is not None else {}
        """Columns by name, for all members of the whole roster. Read only."""
        self.rows = rows
        """The rows of the whole roster that are left; None if all are left."""
        self.arrays = len(candidates) >= ARRAYS_FROM if arrays is None else arrays
        """Whether the columns of this roster are arrays; otherwise they are lists."""
        self.stamp = stamp
        """A list of one number that changes with every measurement: the key for values that are computed from
        measurements alone. None if it is not maintained."""
        self._whole_arrays = self.arrays if whole_arrays is None else whole_arrays
        self._reader: itemgetter[tuple[float, ...]] | None = None

    def __len__(self) -> int:
        return len(self.whole) if self.rows is None else len(self.rows)

    @overload
    def __getitem__(self, position: int) -> C: ...
    @overload
    def __getitem__(self, position: slice) -> list[C]: ...
    def __getitem__(self, position: int | slice) -> C | list[C]:
        if isinstance(position, slice):
            return list(self)[position]
        return self.whole[position if self.rows is None else self.rows[position]]

    def __iter__(self) -> Iterator[C]:
        if self.rows is None:
            return iter(self.whole)
        return map(self.whole.__getitem__, self.rows)

    def column(self, name: str) -> Column:
        """The column of this name, one number per candidate of this roster. Read only."""
        column = self.columns[name]
        return column if self.rows is None else self.cut(column)

    def cut(self, whole: Column) -> Column:
        """A column made for the whole roster, cut to the rows that are left."""
        if self.rows is None:
            return whole
        if not isinstance(whole, list) or len(self.rows) < 2:
            return take(whole, self.rows, self.arrays)
        if self._reader is None:  # cached: most rosters are cut for several columns
            self._reader = itemgetter(*self.rows)
        return list(self._reader(whole))

    def uncut(self) -> "Roster[C]":
        """The whole roster: its positions are the rows."""
        return self if self.rows is None else Roster(self.whole, self.columns, arrays=self._whole_arrays)

    def members(self) -> "Roster[C]":
        """The same candidates without columns. To keep this roster does not keep the columns alive."""
        return Roster(self.whole, rows=self.rows, arrays=self.arrays)

    def only(self, row: int) -> "Roster[C]":
        """A roster of the one candidate in this row of the whole roster; its columns are lists."""
        return Roster(self.whole, self.columns, rows=(row,), arrays=False, whole_arrays=self._whole_arrays)

    def without(self, positions: Positions) -> "Roster[C]":
        """The roster without the candidates at these positions."""
        rows: Positions
        if self.arrays:
            kept = np.ones(len(self), dtype=bool)
            kept[np.asarray(positions, dtype=np.intp)] = False
            rows = np.flatnonzero(kept) if self.rows is None else np.asarray(self.rows)[kept]
        else:
            rows = list(range(len(self.whole)) if self.rows is None else self.rows)
            for position in sorted(positions, reverse=True):
                del rows[position]
        return Roster(self.whole, self.columns, rows=rows, arrays=self.arrays, whole_arrays=self._whole_arrays)


class PerMembers(Generic[C, T]):
    """A value computed from the members of a roster, cached until the members change."""

    __slots__ = ("_compute", "_members", "_value")

    def __init__(self, compute: Callable[[Roster[C]], T]) -> None:
        self._compute = compute
        self._members: Sequence[C] | None = None
        self._value: T

    def of(self, candidates: Roster[C]) -> T:
        """The value for the whole roster from which these candidates were cut."""
        if candidates.whole is not self._members:
            self._value = self._compute(candidates.uncut())
            self._members = candidates.whole
        return self._value

"""The candidates of one choice, with their numbers in columns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Generic, TypeVar, overload

from pointsman.selection.arrays import np
from pointsman.selection.columns import ARRAYS_FROM, Column, Positions, take

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
        """All members of the roster that this one was cut from. It is the same object as long as the members are the
        same, so that a plugin can key what it computed about them by its identity."""
        self.columns: Mapping[str, Column] = columns if columns is not None else {}
        """By name, for all members of the whole roster. Read only."""
        self.rows = rows
        """The rows of the whole roster that are left; None if all are."""
        self.arrays = len(candidates) >= ARRAYS_FROM if arrays is None else arrays
        """Whether columns of this roster are arrays; else lists."""
        self.stamp = stamp
        """One number that changes with every measurement, as the key of what is computed from measurements alone.
        None if it is not maintained."""
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
        """The same candidates without columns, to be kept without keeping the columns alive."""
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
        """The value for the whole roster that these candidates were cut from."""
        if candidates.whole is not self._members:
            self._value = self._compute(candidates.uncut())
            self._members = candidates.whole
        return self._value

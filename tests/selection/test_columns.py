"""Functions of columns give the same for lists and for arrays."""

from collections.abc import Callable
from math import inf, isnan, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.selection import Roster
from pointsman.selection import columns as c

NUMBERS = st.lists(st.floats(0, 1e6), min_size=1, max_size=30)
MAYBE = st.lists(st.one_of(st.floats(1e-3, 1e6), st.just(nan)), min_size=1, max_size=30)


def both(function: Callable[..., Any], *columns: list[float], **rest: Any) -> list[float]:
    """The result, after checking that lists and arrays agree on it."""
    from_lists = function(*columns, **rest)
    from_arrays = function(*[np.array(column) for column in columns], **rest)
    assert (from_lists is None) == (from_arrays is None)
    if from_lists is not None:
        np.testing.assert_allclose(np.asarray(from_lists, float), np.asarray(from_arrays, float), rtol=1e-9, atol=1e-12)
    return list(from_lists) if from_lists is not None else []


@given(NUMBERS)
def test_falling_spans_zero_to_one(column: list[float]) -> None:
    scores = both(c.falling, column)
    assert all(0 <= score <= 1 for score in scores)
    assert scores[column.index(min(column))] == 1.0
    if min(column) < max(column):
        assert scores[column.index(max(column))] == 0.0


@given(MAYBE)
def test_best_over_gives_unknowns_nothing(column: list[float]) -> None:
    scores = both(c.best_over, column)
    known = [value for value in column if not isnan(value)]
    assert bool(scores) == bool(known)
    for value, score in zip(column, scores, strict=False):
        assert score == (0.0 if isnan(value) else min(known) / value)


@given(st.lists(st.one_of(st.floats(0, 1e6), st.just(inf)), min_size=1, max_size=30))
def test_share_of_best_is_one_for_the_best_also_if_it_is_infinite(column: list[float]) -> None:
    scores = both(c.share_of_best, column)
    assert bool(scores) == (max(column) > 0)
    for value, score in zip(column, scores, strict=False):
        assert score == (float(value == inf) if max(column) == inf else value / max(column))


@given(NUMBERS, st.floats(0, 1e6))
def test_positions_are_the_same_in_both_kinds(column: list[float], limit: float) -> None:
    assert both(c.where_at_least, column, limit=limit) == [i for i, v in enumerate(column) if v >= limit]
    assert both(c.where_above, column, limit=limit) == [i for i, v in enumerate(column) if v > limit]
    assert both(c.where_zero, column) == [i for i, v in enumerate(column) if v == 0]
    assert both(c.where_set, column) == [i for i, v in enumerate(column) if v != 0]
    assert both(c.where_largest, column) == [i for i, v in enumerate(column) if v == max(column)]


@given(NUMBERS)
def test_arithmetic_is_the_same_in_both_kinds(column: list[float]) -> None:
    both(c.linear, column, slope=-0.5, start=1.0)
    both(c.plus, column, column)
    both(c.clipped, column, low=1.0, high=5.0)
    both(c.ratio, column, [value - column[0] for value in column])
    both(c.or_else, [*column, nan], value=7.0)


@pytest.mark.parametrize("arrays", [False, True])
@given(st.lists(st.integers(0, 9), max_size=5, unique=True), st.lists(st.integers(0, 4), max_size=3, unique=True))
def test_a_cut_roster_reads_its_own_rows(arrays: bool, first: list[int], second: list[int]) -> None:
    whole = [float(value) for value in range(10)]
    roster = Roster([f"c{i}" for i in range(10)], {"n": np.array(whole) if arrays else whole}, arrays=arrays)
    left = roster.without(first).without(second)
    names = [f"c{i}" for i in range(10) if i not in first]
    names = [name for place, name in enumerate(names) if place not in second]
    assert list(left) == names == [left[i] for i in range(len(left))]
    assert [f"c{int(value)}" for value in left.column("n")] == names
    assert left.whole is roster.whole
    assert list(roster.only(7)) == ["c7"]
    assert roster.only(7).column("n") == [7.0]
    assert roster.only(7).uncut().arrays is left.uncut().arrays is arrays

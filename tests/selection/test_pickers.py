"""Pickers: which candidates they choose, how often, and that the same seed repeats it."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.selection import (
    Cycle,
    MaxScorePicker,
    PowerOfTwoPicker,
    RandomPicker,
    Ranked,
    Roster,
    WeightedRandomPicker,
)

PICKERS: list[Any] = [
    MaxScorePicker(),
    MaxScorePicker(3),
    RandomPicker(),
    RandomPicker(3),
    WeightedRandomPicker(),
    WeightedRandomPicker(3),
    PowerOfTwoPicker(),
]


def ranked(totals: list[float], arrays: bool = False) -> Ranked[int]:
    return Ranked(Roster(range(len(totals)), arrays=arrays), np.array(totals) if arrays else totals)


def picks(picker: Any, totals: list[float], times: int = 4000) -> Counter[int]:
    return Counter(picker.pick(Cycle("r", seed=seed), ranked(totals))[0] for seed in range(times))


@pytest.mark.parametrize("picker", PICKERS)
@given(totals=st.lists(st.floats(0, 9), min_size=1, max_size=80), seed=st.integers(0, 2**64 - 1))
def test_picks_are_not_empty_have_no_duplicates_and_repeat_with_the_seed(
    picker: Any, totals: list[float], seed: int
) -> None:
    chosen = picker.pick(Cycle("r", seed=seed), ranked(totals))
    assert 1 <= len(chosen) == len(set(chosen)) <= len(totals)
    assert list(picker.pick(Cycle("r", seed=seed), ranked(totals, arrays=True))) == list(chosen)


@given(totals=st.lists(st.floats(0, 9), min_size=1, max_size=80), most=st.integers(-1, 5))
def test_max_score_takes_the_highest_first(totals: list[float], most: int) -> None:
    chosen = MaxScorePicker(most).pick(Cycle("r", seed=1), ranked(totals))
    assert [totals[who] for who in chosen] == sorted(totals, reverse=True)[: most if most > 0 else 1]


def test_ties_are_broken_evenly() -> None:
    assert picks(MaxScorePicker(), [1.0, 0.5, 1.0, 1.0]).keys() == {0, 2, 3}
    assert min(picks(MaxScorePicker(), [1.0, 0.5, 1.0, 1.0]).values()) > 4000 / 3 * 0.85
    assert min(picks(RandomPicker(), [1.0, 0.5, 1.0, 0.0]).values()) > 4000 / 4 * 0.85


def test_weighted_random_follows_the_totals_and_falls_back_without_any() -> None:
    chosen = picks(WeightedRandomPicker(), [3.0, 1.0, 0.0])
    assert set(chosen) == {0, 1}
    assert chosen[0] / chosen[1] == pytest.approx(3.0, rel=0.15)
    assert picks(WeightedRandomPicker(), [0.0, 0.0]).keys() == {0, 1}


def test_power_of_two_never_takes_the_worst_of_many() -> None:
    chosen = picks(PowerOfTwoPicker(), [0.1, 0.2, 0.9])
    assert set(chosen) == {1, 2}
    assert chosen[2] > chosen[1]

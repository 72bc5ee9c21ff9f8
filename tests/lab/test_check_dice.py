"""Whoever throws the program's own dice is seen to throw something else the second time."""

import random

import pytest

from pointsman.lab.check.dice import SEEDS, loaded


@pytest.mark.parametrize("sides", range(2, 9))
def test_the_first_throw_is_another_one(sides: int) -> None:
    seen = []
    for seed in SEEDS:
        with loaded(seed):
            order = random.sample(range(sides), sides)
        with loaded(seed):
            seen.append((order[0], random.randrange(sides)))
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]


def test_the_dice_are_put_back() -> None:
    before = random.getstate()
    with loaded(1):
        random.random()
    assert random.getstate() == before

"""A policy that draws from the global generator gets other numbers the second time."""

import random

import pytest

from pointsman.lab.check.cases import SEEDS, global_seed


@pytest.mark.parametrize("sides", range(2, 9))
def test_the_first_number_differs_between_the_seeds(sides: int) -> None:
    seen = []
    for seed in SEEDS:
        with global_seed(seed):
            order = random.sample(range(sides), sides)
        with global_seed(seed):
            seen.append((order[0], random.randrange(sides)))
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]


def test_the_global_generator_is_restored() -> None:
    before = random.getstate()
    with global_seed(1):
        random.random()
    assert random.getstate() == before

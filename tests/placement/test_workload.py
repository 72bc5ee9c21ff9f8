from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.placement.fragmentation import PARTS, hole_values

DEMANDS = st.dictionaries(st.integers(1, PARTS), st.floats(0.1, 1000), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("demand", "worth"),
    [
        ({100: 1.0}, {0: 0.0, 99: 0.0, 100: 1.0}),
        ({50: 1.0}, {49: 0.0, 50: 0.5, 99: 0.5, 100: 1.0}),
        ({81: 1.0}, {19: 0.0, 80: 0.0, 81: 1.0}),
        ({81: 10.0, 19: 1.0}, {19: 0.0, 81: 1.0}),  # most holes of 19 stay empty
        ({81: 1.0, 19: 10.0}, {19: 0.2, 81: 0.8}),  # five of 19 fill a GPU if they must
        ({65: 1.0, 32: 9.0, 47: 5.0}, {32: 1 / 3, 47: 0.5, 65: 2 / 3, 53: 0.5, 35: 1 / 3, 21: 0.0}),
    ],
)
def test_a_hole_is_worth_what_is_likely_to_fill_it(demand: dict[int, float], worth: dict[int, float]) -> None:
    values = hole_values(demand)
    assert {size: float(values[size]) for size in worth} == pytest.approx(worth)


def test_without_demand_holes_have_no_value() -> None:
    assert not hole_values({}).any()


@given(DEMANDS)
def test_no_filling_is_worth_more_than_the_gpu_it_fills(demand: dict[int, float]) -> None:
    values = hole_values(demand)
    assert len(values) == PARTS + 1
    assert (values[1:] >= values[:-1] - 1e-9).all()
    for size in range(1, PARTS):
        assert values[size] + values[PARTS - size] <= values[PARTS] + 1e-9
    assert values[PARTS] == pytest.approx(1.0)


@given(st.dictionaries(st.integers(20, PARTS), st.integers(1, 40), min_size=1, max_size=4))
def test_prices_are_a_bound_on_the_gpus_that_any_packing_takes(demand: dict[int, int]) -> None:
    values = hole_values({size: float(count) for size, count in demand.items()})
    worth = sum(count * float(values[size]) for size, count in demand.items())
    assert sum(size * count for size, count in demand.items()) / PARTS <= worth + 1e-6
    assert worth <= best_fit_decreasing(demand) + 1e-6
    ways = [
        way
        for items in range(1, PARTS // 20 + 1)
        for way in combinations_with_replacement(sorted(demand), items)
        if sum(way) <= PARTS
    ]
    assert max(sum(float(values[size]) for size in way) for way in ways) <= 1 + 1e-9


def best_fit_decreasing(demand: dict[int, int]) -> int:
    holes: list[int] = []
    for size in sorted(demand, reverse=True):
        for _ in range(demand[size]):
            roomy = [hole for hole in holes if hole >= size]
            hole = min(roomy, default=PARTS)
            if roomy:
                holes.remove(hole)
            holes.append(hole - size)
    return len(holes)

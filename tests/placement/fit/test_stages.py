"""Which stages, in which order, hold all layers."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.placement.asks import Cuts, Need
from pointsman.placement.fit.stages import in_any_order, largest_first
from tests.properties import examples


def filled(cuts: Cuts, rooms: list[float]) -> bool:
    """Whether stages in this order hold all layers, each as many as it can, some perhaps none."""
    start = 0
    for room in rooms:
        start = cuts.reach(start, room) if start < cuts.layers else start
    return start == cuts.layers


@pytest.mark.parametrize(
    ("need", "rooms", "found"),
    [
        (Need(layer_bytes=(10,) * 4), [40], [0]),
        (Need(layer_bytes=(10,) * 4), [20, 20, 20], [0, 1]),
        (Need(layer_bytes=(10,) * 4), [10, 30, 10], [1, 0]),
        (Need(layer_bytes=(10,) * 4), [10, 20], None),
        (Need(layer_bytes=(10,) * 4, last_bytes=30), [20, 50], [0, 1]),
        (Need(layer_bytes=(10,) * 4, first_bytes=30), [20, 50], [1, 0]),
        (Need(layer_bytes=(10,) * 4, first_bytes=30, last_bytes=20), [10, 40, 40], [1, 0, 2]),
        (Need(layer_bytes=(10,) * 4), [], None),
    ],
)
def test_an_order_that_holds_all_layers(need: Need, rooms: list[float], found: list[int] | None) -> None:
    cuts = Cuts(need, 1)
    for indexes in (largest_first(cuts, rooms), in_any_order(cuts, rooms)):
        assert (indexes is None) is (found is None)
        if indexes is not None and found is not None:
            assert len(indexes) == len(found)
            assert filled(cuts, [rooms[index] for index in indexes])
            assert len(set(indexes)) == len(indexes)


def test_uneven_layers_may_need_another_order() -> None:
    need = Need(layer_bytes=(10, 10, 25, 10))
    rooms = [20.0, 25.0, 10.0]
    assert largest_first(Cuts(need, 1), rooms) is None
    assert in_any_order(Cuts(need, 1), rooms) == [0, 1, 2]


uneven = st.builds(
    Need,
    layer_bytes=st.lists(st.integers(1, 6), min_size=1, max_size=6).map(tuple),
    first_bytes=st.integers(0, 5),
    last_bytes=st.integers(0, 5),
    activation_bytes=st.integers(0, 1),
)


@given(uneven, st.lists(st.integers(1, 12).map(float), max_size=5), st.sampled_from([1, 2]))
@settings(max_examples=examples(400))
def test_no_order_is_overlooked(need: Need, rooms: list[float], tp: int) -> None:
    cuts = Cuts(need, tp)
    possible = [
        order
        for number in range(1, len(rooms) + 1)
        for order in permutations(range(len(rooms)), number)
        if filled(cuts, [rooms[index] for index in order])
    ]
    found = in_any_order(cuts, rooms)
    assert (found is not None) is bool(possible)
    if found is not None:
        assert tuple(found) in possible
        assert len(found) == min(map(len, possible))
    quick = largest_first(cuts, rooms)
    assert quick is None or tuple(quick) in possible


def test_of_many_sizes_the_largest_are_searched() -> None:
    cuts = Cuts(Need(layer_bytes=(10, 10, 25, 10)), 1)
    assert in_any_order(cuts, [20.0, 25.0, 10.0], max_sets=4) is None
    assert in_any_order(cuts, [1.0, 2.0, 45.0, 10.0, 3.0], max_sets=4) == [2, 3]

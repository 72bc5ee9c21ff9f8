"""How what an instance needs divides over GPUs, stages and the memory of the machine."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.placement.asks import Cuts, Need
from tests.placement.situations import needs

NEED = Need(
    layer_bytes=(10, 20, 30, 40),
    first_bytes=5,
    last_bytes=7,
    kv_layer_bytes=(1, 2, 3, 4),
    kv_splits=2,
    activation_bytes=100,
    overhead_bytes=1000,
    host_bytes=50,
    context=1000,
)


@pytest.mark.parametrize(
    ("start", "stop", "tp", "each"),
    [
        (0, 4, 1, 5 + 100 + 7 + 10 + 1100),
        (0, 1, 1, 5 + 10 + 1 + 1100),
        (1, 3, 1, 20 + 30 + 5 + 1100),
        (3, 4, 1, 40 + 7 + 4 + 1100),
        (0, 4, 2, 56 + 5 + 1100),
        (0, 4, 4, 28 + 5 + 1100),  # the KV cache is divided in two at most
        (1, 2, 3, 7 + 1 + 1100),  # every part is rounded up
    ],
)
def test_a_stage(start: int, stop: int, tp: int, each: int) -> None:
    assert NEED.stage_bytes(start, stop, tp) == each
    assert Cuts(NEED, tp).stage_bytes(start, stop) == each


@pytest.mark.parametrize(
    ("gpu_layers", "gpu", "host"),
    [
        (0, 0, 5 + 100 + 10 + 50 + 7 + 100),
        (1, 40 + 4 + 1100, 5 + 60 + 6 + 50 + 7 + 100),
        (3, 90 + 9 + 1100, 5 + 10 + 1 + 50 + 7 + 100),
        (4, 100 + 10 + 1100 + 7, 5 + 50),
    ],
)
def test_a_part_on_the_gpu(gpu_layers: int, gpu: int, host: int) -> None:
    assert NEED.offloaded(gpu_layers) == (gpu, host)


def test_on_the_cpu_all_is_in_memory_but_what_the_engine_takes_on_a_gpu() -> None:
    assert NEED.cpu_bytes == NEED.weight_bytes + NEED.kv_bytes + 100 + 50


def test_a_fixed_need_is_the_same_on_each_gpu() -> None:
    need = Need.fixed(gpu_bytes=7, host_bytes=3, gpus=4)
    assert need.gpu_bytes(4) == 7
    assert (need.host_bytes, need.tensor_parallel_sizes, need.layers) == (3, (4,), 1)


def test_another_context_has_a_cache_in_proportion_and_never_less() -> None:
    assert NEED.with_context(500).kv_layer_bytes == (1, 1, 2, 2)
    assert NEED.with_context(500).context == 500
    assert NEED.with_context(1000) == NEED
    assert Need(layer_bytes=(1,), kv_layer_bytes=(9,)).with_context(10).kv_layer_bytes == (9,), "none was told"


EVEN = Need(layer_bytes=(10,) * 8)


@pytest.mark.parametrize(
    ("rooms", "layers"),
    [
        ([80], (8,)),
        ([79], None),
        ([80, 80], (4, 4)),
        ([20, 60], (2, 6)),
        ([60, 20], (6, 2)),
        ([120, 40], (6, 2)),
        ([30, 30, 20], (3, 3, 2)),
        ([30, 30, 10], None),
        ([80] * 8, (1,) * 8),
        ([80] * 9, None),
        ([80, 9], None),  # one layer in each at least
    ],
)
def test_stages_are_as_even_as_their_room_allows(rooms: list[int], layers: tuple[int, ...] | None) -> None:
    assert EVEN.staged(1, rooms) == layers


def test_ends_make_room_for_fewer_layers() -> None:
    need = Need(layer_bytes=(10,) * 4, first_bytes=10, last_bytes=20)
    assert need.staged(1, [30, 30]) is None
    assert need.staged(1, [30, 40]) == (2, 2)
    assert need.staged(1, [20, 50]) == (1, 3)


@given(needs(), st.lists(st.integers(0, 20), min_size=1, max_size=4), st.sampled_from([1, 2, 3]))
def test_stages_hold_what_they_are_given(need: Need, rooms: list[int], tp: int) -> None:
    found = need.staged(tp, rooms)
    if found is not None:
        assert fits(need, rooms, tp, found)
    same = Need(layer_bytes=(3,) * need.layers, kv_layer_bytes=(1,) * need.layers, first_bytes=2, last_bytes=4)
    found = same.staged(tp, rooms)
    assert (found is not None) is any(fits(same, rooms, tp, one) for one in compositions(need.layers, len(rooms)))


def fits(need: Need, rooms: list[int], tp: int, layers: tuple[int, ...]) -> bool:
    ends = [sum(layers[:place]) for place in range(len(layers) + 1)]
    parts = zip(ends, ends[1:], rooms, strict=False)
    whole = ends[-1] == need.layers and min(layers) > 0 and len(layers) == len(rooms)
    return whole and all(need.stage_bytes(start, stop, tp) <= room for start, stop, room in parts)


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to cut so many layers into so many stages."""
    cuts = combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, total), strict=True)) for cut in cuts]


@given(needs(), st.integers(0, 3), st.integers(0, 30), st.sampled_from([1, 2, 3]))
def test_how_far_a_stage_reaches(need: Need, start: int, room: int, tp: int) -> None:
    cuts = Cuts(need, tp)
    if start < need.layers:
        stops = [s for s in range(start + 1, need.layers + 1) if need.stage_bytes(start, s, tp) <= room]
        assert cuts.reach(start, room) == max(stops, default=start)
        assert all(cuts.least_bytes[s - start - 1] <= need.stage_bytes(start, s, tp) for s in stops)

"""The extremes within a delay agree with a full list, with few entries."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pointsman.scaling.guard import Stabilization

SAID = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 10.0, 60.0]), st.integers(0, 6)), min_size=1, max_size=60)


@given(SAID, st.sampled_from([0.0, 5.0, 30.0, 300.0]), st.sampled_from([0.0, 5.0, 30.0, 300.0]))
def test_the_extremes_within_a_delay(said: list[tuple[float, int]], up_s: float, down_s: float) -> None:
    wants, now, before = Stabilization(), 1000.0, 3
    told = [(-1e9, before)]
    for step, wanted in said:
        now += step
        wants.add(now, wanted, before)
        told.append((now, wanted))
        assert wants.smallest(now, up_s) == min(held(told, now, up_s))
        assert wants.largest(now, down_s) == max(held(told, now, down_s))
        for notes, falls in ((wants.falling, True), (wants.rising, False)):
            numbers = [note.replicas for note in notes]
            assert numbers == sorted(set(numbers), reverse=falls), "one entry per number"


def held(told: list[tuple[float, int]], now: float, delay_s: float) -> list[int]:
    """Every number wanted within the delay, including now."""
    spans = [(start, end, wanted) for (start, wanted), (end, _) in pairwise(told)]
    return [*(wanted for _, end, wanted in spans if end > now - delay_s), told[-1][1]]


def test_a_clock_that_is_set_back() -> None:
    wants = Stabilization()
    for now, wanted in ((1_000_000.0, 9), (1_000_010.0, 4), (1_000_020.0, 5), (50.0, 5), (120.0, 5)):
        wants.add(now, wanted, 1)
    assert wants.largest(120.0, 60.0) == 5
    assert wants.smallest(120.0, 60.0) == 5

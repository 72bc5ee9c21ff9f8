"""Windows in bounded memory agree with a list of all samples."""

from itertools import pairwise
from math import ceil, inf, nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.scaling.policy import Window
from pointsman.scaling.windows import Events, Gauge, LazyWindows, looking_back
from tests.properties import examples

STEPS = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 7.0]), st.integers(0, 30).map(float)), min_size=1, max_size=60)


def naive_gauge(samples: list[tuple[float, float]], seconds: float, now: float) -> tuple[float, float]:
    """Mean by time, and maximum."""
    held = [(start, end, value) for (start, value), (end, _) in pairwise([*samples, (now, 0.0)])]
    parts = [(min(end, now) - max(start, now - seconds), value) for start, end, value in held]
    parts = [(length, value) for length, value in parts if length > 0]
    total = sum(length for length, _ in parts)
    return sum(length * value for length, value in parts) / total, max(value for _, value in parts)


@given(STEPS, st.sampled_from([3.0, 30.0, 300.0]))
def test_a_gauge_is_weighted_by_time(steps: list[tuple[float, float]], seconds: float) -> None:
    gauge, samples, now = Gauge(), [], 1000.0
    for step, value in steps:
        gauge.add(now, value)
        samples.append((now, value))
        now += step
    window = gauge.window(seconds, now)
    assert window.mean is not None
    mean, most = naive_gauge(samples, seconds, now)
    assert window.mean == pytest.approx(mean)
    assert window.max == most
    assert window.last == steps[-1][1]
    assert window.p50 is not None
    assert window.p99 is not None
    assert min(value for _, value in steps) <= window.p50 <= window.p99 <= most


@settings(max_examples=examples(10))
@given(st.integers(0, 1000), st.sampled_from([30.0, 300.0, 3600.0]))
def test_merged_samples_are_nearly_the_same(seed: int, seconds: float) -> None:
    gauge, samples, chance = Gauge(3600.0), [], Random(seed)
    for second in range(8000):
        value = 10 + 5 * (second // 600 % 3) + chance.random() if second != 6000 else 40.0
        gauge.add(float(second), value)
        samples.append((float(second), value))
    mean, most = naive_gauge(samples, seconds, 8000.0)
    window = gauge.window(seconds, 8000.0)
    assert window.mean == pytest.approx(mean, rel=0.02)
    assert window.max == pytest.approx(most, rel=0.05)
    assert window.count == pytest.approx(seconds, rel=0.02)
    assert len(gauge._bins) < 700, "memory is bounded"
    assert gauge._bins[0].end > 8000 - 3600 - 700, "and what is too old goes"


def test_percentiles_of_a_gauge_are_weighted_by_time() -> None:
    gauge = Gauge()
    gauge.add(0.0, 1.0)
    gauge.add(60.0, 5.0)
    gauge.add(95.0, 100.0)
    window = gauge.window(100.0, 100.0)
    assert (window.p50, window.p90, window.p99) == (1.0, 5.0, 100.0)


def test_a_value_that_ended_before_the_window_is_left_out() -> None:
    gauge = Gauge()
    gauge.add(0.0, 9.0)
    gauge.add(10.0, 1.0)
    assert gauge.window(10.0, 20.0).max == 1.0


def test_of_two_samples_at_one_moment_the_last_counts() -> None:
    gauge = Gauge()
    for now, value in ((20.0, 1.0), (30.0, 8.0), (30.0, 2.0), (25.0, 3.0)):
        gauge.add(now, value)
    assert gauge.window(60.0, 32.0).mean == pytest.approx((10 * 1.0 + 2 * 3.0) / 12)


def test_an_unknown_gauge_has_no_value() -> None:
    gauge = Gauge()
    assert gauge.window(30.0, 5.0) == Window(30.0)
    gauge.add(0.0, 4.0)
    assert gauge.window(30.0, 0.0) == Window(30.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 1)
    gauge.add(10.0, None)
    window = gauge.window(30.0, 20.0)
    assert (window.mean, window.last) == (4.0, None), "of the time in which it was known"
    gauge.add(20.0, nan)
    assert gauge.window(5.0, 30.0) == Window(5.0)


def test_a_repeated_value_takes_no_memory() -> None:
    gauge = Gauge()
    for second in range(1000):
        gauge.add(float(second), 3.0)
    assert len(gauge._bins) == 0
    assert gauge.window(30.0, 1000.0).count == 30


def test_samples_of_the_oldest_bin_count_in_part() -> None:
    gauge = Gauge()
    for second in range(20, 30):
        gauge.add(float(second), 3.0)
    gauge.add(30.0, 5.0)
    gauge.add(31.0, 6.0)
    gauge.add(31.5, 6.0)
    assert gauge.window(5.0, 32.0).count == 3 + 1 + 2
    assert gauge.window(4.5, 32.0).count == 3 + 1 + 2


@given(st.lists(st.floats(0.001, 100_000) | st.sampled_from([0.0, -5.0]), min_size=1, max_size=300))
def test_events_have_plain_means_and_percentiles_within_a_hundredth(values: list[float]) -> None:
    events = Events(300.0)
    for place, value in enumerate(values):
        events.add(1000.0 + place * 0.1, value)
    window = events.window(300.0, 1000.0 + len(values) * 0.1)
    assert window.count == len(values)
    assert window.mean == pytest.approx(sum(values) / len(values))
    assert window.max == max(values)
    ordered = sorted(values)
    for share, told in ((0.5, window.p50), (0.9, window.p90), (0.99, window.p99)):
        exact = ordered[max(ceil(share * len(values) * (1 - 1e-12)), 1) - 1]
        assert told == pytest.approx(exact, rel=0.0101, abs=1e-9)


def test_events_leave_the_window() -> None:
    events = Events(300.0)
    events.add(0.0, 1000.0)
    events.add(290.0, 10.0)
    assert events.window(300.0, 295.0).count == 2
    assert events.window(300.0, 330.0).max == 10.0
    assert events.window(300.0, 1000.0) == Window(300.0)
    events.add(1000.0, 0.0)
    assert events.window(300.0, 1000.0).p50 == 0.0
    events.add(1300.0, inf)
    assert events.window(300.0, 1301.0) == Window(300.0), "what is no number never happened"


def test_events_stay_as_long_as_their_slice() -> None:
    events = Events(300.0)
    events.add(5.0, 1.0)
    assert events.window(300.0, 300.0).count == 1
    assert events.window(300.0, 300.1).count == 0, "never what is older"
    events.add(300.0, 2.0)
    assert events.window(300.0, 300.0).count == 2


def test_very_many_events_take_little_memory() -> None:
    events = Events(300.0)
    for number in range(100_000):
        events.add(number * 0.01, float(number % 1000))
    assert len(events._slices) <= 32
    assert max(len(part.sizes) for part in events._slices) < 700


def test_windows_are_computed_once_and_on_access() -> None:
    made: list[float] = []

    def make(seconds: float) -> float:
        made.append(seconds)
        return 2 * seconds

    asked = LazyWindows((30.0, 300.0, 3600.0), make)
    assert (list(asked), len(asked), made) == ([30.0, 300.0, 3600.0], 3, [])
    assert [asked[300.0], asked[300.0], asked.get(60.0)] == [600.0, 600.0, None]
    assert made == [300.0]


@pytest.mark.parametrize(("seconds", "found"), [(30.0, 30.0), (45.0, 30.0), (6.0, None), (9999.0, 300.0)])
def test_the_longest_window_of_at_most_this_length(seconds: float, found: float | None) -> None:
    windows = {30.0: Window(30.0), 300.0: Window(300.0)}
    window = looking_back(windows, seconds)
    assert (None if window is None else window.seconds) == found

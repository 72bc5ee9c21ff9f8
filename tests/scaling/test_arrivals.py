"""Recent rates, and the history in bins."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.scaling.measurements import Arrivals, Recent
from pointsman.scaling.policy import Rate

ARRIVALS = st.lists(st.tuples(st.floats(0.1, 20), st.integers(0, 5)), min_size=5, max_size=80)


@given(ARRIVALS, st.sampled_from([30.0, 300.0, 3600.0]))
def test_rates_agree_with_a_list_of_all_arrivals(steps: list[tuple[float, int]], seconds: float) -> None:
    arrivals, now, came = Arrivals(), 6000.0, []
    began = None
    for step, n in steps:
        now += step
        began = now if began is None else began
        arrivals.count(now, n)
        came.append((now, n))
    known_s = min(seconds, max(now - (began or now), 5.0))
    exact = sum(n for at, n in came if at > now - seconds) / known_s
    edge = sum(n for at, n in came if abs(at - (now - seconds)) <= 25.0) / known_s  # they came since the one before
    assert arrivals.per_second(seconds, now) == pytest.approx(exact, abs=edge + 1e-9)


def test_the_oldest_bin_counts_in_part() -> None:
    arrivals = Arrivals()
    for second in range(101):
        arrivals.count(float(second))
    assert arrivals.per_second(32.0, 100.0) == pytest.approx(1.0)


@pytest.mark.parametrize("seconds", [1.0, 2.0, 6.0, 30.0])
def test_short_windows_are_right_with_rare_samples(seconds: float) -> None:
    recent = Recent()
    for second in range(61):
        recent.count(1_700_000_000.3 + second, 20 if second else 0)
        if second > seconds:
            assert recent.per_second(seconds, 1_700_000_000.3 + second) == pytest.approx(20.0)


def test_recent_arrivals_are_kept_for_an_hour() -> None:
    recent = Recent()
    for second in range(8001):
        recent.count(second / 2, 0.5)
    assert recent.per_second(3600.0, 4000.0) == pytest.approx(1.0)
    assert len(recent._bins) <= 3600 / 5 + 1, "memory is bounded"


def test_the_history_has_whole_bins_and_gaps_are_zero() -> None:
    arrivals = Arrivals(bin_s=600.0)
    arrivals.count(1200.0, 60)
    arrivals.count(1799.0, 60)
    arrivals.count(3100.0, 30)
    assert arrivals.history(3100.0) == (Rate(1200.0, 0.2), Rate(1800.0, 0.0), Rate(2400.0, 0.0))
    assert arrivals.history(3600.0)[-1] == Rate(3000.0, 0.05)
    assert arrivals.history(3600.0) is arrivals.history(3700.0), "made once for each bin"


def test_a_pause_is_filled_with_the_rate_before_it() -> None:
    before = Arrivals(bin_s=600.0)
    for minute in range(125):
        before.count(minute * 60.0, 120.0 if minute else 0.0)  # two a second
    after = Arrivals(bin_s=600.0, saved=json.loads(json.dumps(before.saved())))
    after.count(5 * 3600.0 + 60.0, 0.0)  # three hours later
    told = [one.per_second for one in after.history(5 * 3600.0 + 60.0)]
    assert told == pytest.approx([1.8] + [2.0] * 29, rel=0.15)
    after.count(5 * 3600.0 + 600.0, 0.0)
    last = after.history(5 * 3600.0 + 600.0)[-1].per_second
    assert last == pytest.approx(0.2, rel=0.05), "only the first minute had arrivals"
    young = Arrivals(saved=Arrivals().saved())
    young.count(1e6, 3.0)
    assert young.history(1e6 + 1200.0)[-1].per_second == 0.0


def test_a_bin_that_was_counted_in_part_is_left_out() -> None:
    arrivals = Arrivals(bin_s=600.0)
    arrivals.count(900.0, 1000)
    arrivals.count(1300.0, 6)
    assert arrivals.history(1800.0) == (Rate(1200.0, 0.01),)


def test_old_bins_are_dropped() -> None:
    arrivals = Arrivals(bin_s=10.0, keep_s=100.0)
    for second in range(1000):
        arrivals.count(float(second))
    history = arrivals.history(1000.0)
    assert [rate.began for rate in history] == [900.0 + 10 * place for place in range(10)]
    assert len(arrivals.saved()["bins"]) <= 11


def test_two_weeks_of_ten_minutes_are_kept_and_empty_bins_take_no_memory() -> None:
    arrivals = Arrivals()
    for hour in range(20 * 24):
        arrivals.count(hour * 3600.0, 0)
    arrivals.count(20 * 86400.0, 5)
    history = arrivals.history(20 * 86400.0)
    assert (len(history), history[0].began) == (14 * 144, 6 * 86400.0)
    assert len(arrivals.saved()["bins"]) == 1


@given(ARRIVALS)
def test_restored_arrivals_continue(steps: list[tuple[float, int]]) -> None:
    one, now = Arrivals(bin_s=30.0), 1000.0
    other = Arrivals(bin_s=30.0, saved=json.loads(json.dumps(one.saved())))
    for step, n in steps:
        now += step
        one.count(now, n)
        other = Arrivals(bin_s=30.0, saved=json.loads(json.dumps(other.saved())))
        other.count(now, n)
    assert one.history(now) == other.history(now)


@pytest.mark.parametrize("saved", [{}, {"bins": "?"}, Arrivals(bin_s=60.0).saved()])
def test_state_of_another_form_is_ignored(saved: dict[str, object]) -> None:
    arrivals = Arrivals(bin_s=600.0, saved=saved)
    arrivals.count(0.0, 6)
    assert arrivals.history(600.0) == (Rate(0.0, 0.01),)


def test_the_last_hour_in_bins() -> None:
    recent = Recent()
    recent.count(0.0, 0)
    for second in range(1, 96):
        recent.count(float(second), 2.0 if second <= 35 else 0.0)
    bins = recent.in_bins(30.0, 95.0)
    assert [one.began for one in bins] == [5.0, 35.0, 65.0]
    assert [one.per_second for one in bins] == pytest.approx([2.0, 0.0, 0.0])
    assert Recent().in_bins(30.0, 95.0) == ()

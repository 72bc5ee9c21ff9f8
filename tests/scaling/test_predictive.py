"""Forecasts: what is learned from the past, and how it is applied."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.scaling.policies.predictive import (
    DAY_S,
    MAX_OVER_PEAK,
    SHAPES,
    UNSETTLED,
    WEEK_S,
    Predictive,
    Shape,
    before,
    following,
    highest,
    learn,
    levels,
    rate_now,
    seasonal_change,
    smallest_margin,
    spread,
)
from pointsman.scaling.policy import DeploymentView, Rate, Window, Wish

BIN_S = 600.0
DAY = 144
RATES = st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=200)


def view_of(rates: Sequence[float], now: float, **more: Any) -> DeploymentView:
    """With this history, and this rate now."""
    given: dict[str, Any] = {
        "arrivals_per_s": {30.0: now, 300.0: now, 3600.0: now},
        "start_up_s": 600.0,
        "replicas": 1,
        "target": 1,
        "state": {},
    } | more
    history = tuple(Rate(place * BIN_S, rate) for place, rate in enumerate(rates))
    return DeploymentView(name="chat", now=len(rates) * BIN_S, history=history, bin_s=BIN_S, **given)


def wish(rates: Sequence[float], now: float, policy: Predictive | None = None, **more: Any) -> Wish:
    return (policy or Predictive(10.0)).desired_replicas(view_of(rates, now, **more))


def noisy(bins: int, seed: int = 1, size: float = 0.1) -> list[float]:
    rng = random.Random(seed)
    return [200.0 * math.exp(rng.gauss(0, size)) for _ in range(bins)]


@given(RATES, st.floats(0.0, 1000.0), st.sampled_from([1.0, 30.0, 600.0, 3000.0]))
def test_the_target_is_between_the_present_load_and_the_peak(rates: list[float], now: float, start_up_s: float) -> None:
    wanted = wish(rates, now, start_up_s=start_up_s).replicas
    assert wanted >= math.ceil(now / 10 - 1e-9)
    if len(rates) >= UNSETTLED + 4 * 5 and len(rates) >= 36:
        assert wanted <= math.ceil(MAX_OVER_PEAK * max(now, *rates) / 10)


@given(RATES, st.integers(1, 5), st.data())
def test_forecasts_use_no_later_bins(rates: list[float], ahead: int, data: st.DataObject) -> None:
    until = data.draw(st.integers(1, len(rates)))
    everything, then = np.array(rates), np.array(rates[:until])
    assert np.allclose(spread(everything)[:until], spread(then))
    for shape in SHAPES:
        # A season of 20 bins, so that there are some.
        bin_s = shape.season_s / 20 or BIN_S
        assert np.allclose(levels(everything, shape, ahead, bin_s)[:until], levels(then, shape, ahead, bin_s))


@given(st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=40), st.integers(1, 4), st.sampled_from([1, 2, 5, 12]))
def test_forecasts_agree_with_a_loop_over_bins(rates: list[float], ahead: int, bins: int) -> None:
    everything = np.array(rates)
    moved = [0.0, *(abs(after - first) for first, after in pairwise(rates))]
    for now in range(len(rates)):
        seen, late, coming = now + 1, moved[max(0, now - 11) : now + 1], rates[now + 1 : now + 1 + ahead]
        assert highest(everything, bins)[now] == max(rates[max(0, now + 1 - bins) : now + 1])
        assert following(everything, ahead)[now] == max(coming, default=rates[now])
        mean_moves = sum(late) / len(late) + sum(moved[:seen]) / seen
        assert spread(everything)[now] == pytest.approx(mean_moves + 0.05 * sum(rates[:seen]) / seen, abs=1e-6)
        assert spread(everything)[now] > 0, "never nothing"
        ago = [then for then in range(now - bins, max(now - 7 * bins, 0) - 1, -bins) if bins > ahead]
        went = [rates[then + ahead] - rates[then] for then in ago]
        assert seasonal_change(everything, bins, ahead)[now] == pytest.approx(sum(went) / max(len(went), 1), abs=1e-6)
        then = now + ahead - bins
        assert before(everything, bins, ahead)[now] == (rates[then] if bins > ahead and then >= 0 else 0.0)


def test_the_parts_of_a_level() -> None:
    rates = np.array([1.0, 9.0, 4.0, 2.0])
    two_bins = WEEK_S / 2
    assert list(levels(rates, Shape(), 1, two_bins)) == [1, 9, 4, 2]
    assert list(levels(rates, Shape(3, 0.5), 1, two_bins)) == [1, 9, 6.5, 5.5]
    assert list(levels(rates, Shape(season_s=WEEK_S, season=0.5), 1, two_bins)) == [1, 9, 8, 0], "never below 0"
    assert list(levels(rates, Shape(before_s=WEEK_S), 1, two_bins)) == [1, 9, 9, 4], "at least as a week before"


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(), "the present rate"),
        (Shape(12, 0.5), "50% of the maximum in 12 bins"),
        (Shape(season_s=DAY_S, season=1.0), "100% of the change on other days"),
        (Shape(3, 0.3, WEEK_S, 0.5), "30% of the maximum in 3 bins and 50% of the change on other weeks"),
        (Shape(before_s=WEEK_S), "at least the rate of a week before"),
        (Shape(3, 0.3, before_s=DAY_S), "30% of the maximum in 3 bins and at least the rate of a day before"),
    ],
)
def test_a_shape_as_text(shape: Shape, words: str) -> None:
    assert str(shape) == words


@given(
    st.lists(st.tuples(st.floats(-5.0, 5.0), st.floats(0.1, 10.0)), min_size=1, max_size=50),
    st.floats(0.0, 50.0),
)
def test_the_margin_is_the_smallest_possible(errors: list[tuple[float, float]], allowed: float) -> None:
    scores, weights = (np.array(part) for part in zip(*errors, strict=True))
    margin = smallest_margin(scores, weights, allowed)

    def short(margin: float) -> float:
        return float((weights * np.maximum(scores - margin, 0)).sum())

    assert short(margin) <= allowed + 1e-6
    assert margin == 0 or short(margin - 1e-3) > allowed - 1e-6


def test_the_learned_margin_would_have_been_enough() -> None:
    rates = np.array(noisy(2 * DAY))
    lesson = learn(rates, 1, 0.002, BIN_S)
    planned = levels(rates, SHAPES[lesson.shape], 1, BIN_S) + lesson.margin * spread(rates)
    short = np.maximum(rates[1:] - planned[:-1], 0)[UNSETTLED:].sum() / rates[1:][UNSETTLED:].sum()
    assert short == pytest.approx(0.002, rel=0.01)


@pytest.mark.parametrize(
    ("learn_bins", "start_up_s", "enough"), [(36, 600.0, 36), (12, 600.0, 12), (4, 600.0, 12), (12, 3000.0, 26)]
)
def test_the_headroom_holds_while_there_is_little_history(learn_bins: int, start_up_s: float, enough: int) -> None:
    policy = Predictive(10.0, learn_bins=learn_bins)
    for bins, replicas in ((0, 15), (enough - 1, 15), (enough, 10)):
        assert wish([100.0] * bins, 100.0, policy, start_up_s=start_up_s).replicas == replicas


def test_predictive_gives_its_reason() -> None:
    said = wish([100.0] * 36, 100.0)
    assert (
        said.why
        == "100/s arrive now, 100/s expected within 630 s (100: the present rate; margin 0); a replica serves 10/s"
    )

    said = wish([], 100.0, start_up_s=None)
    assert "150/s expected within 90 s (1.5 times the present rate, as there is little history)" in said.why


def test_the_margin_counts_the_exposed_part_of_a_bin() -> None:
    rates = noisy(DAY)
    lesson = learn(np.array(rates), 1, 0.75 * 0.002 / (630 / 600), BIN_S)
    so_far = np.array([*rates, 260.0])
    level, moves = levels(so_far, SHAPES[lesson.shape], 1, BIN_S)[-1], spread(so_far)[-1]
    assert lesson.margin > 0
    assert wish(rates, 260.0, Predictive(0.1)).replicas == math.ceil((level + lesson.margin * moves) / 0.1 - 1e-9)


def test_a_forecast_is_bounded_by_the_peak() -> None:
    wild = ([0.1] * 9 + [1000.0]) * 6
    assert wish(wild, 1000.0).replicas == 120


def test_it_learns_once_per_bin() -> None:
    notes: dict[str, Any] = {}
    calm, wild = noisy(DAY, size=0.01), noisy(DAY, size=0.3)
    wish(calm, 200.0, state=notes)
    assert wish(calm + wild, 200.0, state=notes) == wish(calm + wild, 200.0)
    assert wish(calm + wild, 200.0, state=notes, start_up_s=1800.0) == wish(calm + wild, 200.0, start_up_s=1800.0)
    notes["margin"] = 0.0
    assert "margin 0)" in wish(calm + wild, 200.0, state=notes, start_up_s=1800.0).why


def test_a_start_up_of_zero() -> None:
    assert wish([100.0] * 36, 100.0, Predictive(10.0, react_s=0.0), start_up_s=0.0).replicas == 10


def test_a_variable_load_has_a_larger_margin() -> None:
    calm, wild = (wish(noisy(DAY, size=size), 200.0).replicas for size in (0.02, 0.2))
    assert 20 <= calm < wild


def test_a_longer_start_has_a_larger_margin() -> None:
    rates = noisy(3 * DAY)
    wanted = [
        wish(rates, 200.0, Predictive(1.0, react_s=0.0), start_up_s=start).replicas for start in (10, 60, 200, 600)
    ]
    assert wanted == sorted(wanted)
    assert wanted[0] < wanted[-1]


def test_a_larger_share_has_a_smaller_margin() -> None:
    rates = noisy(3 * DAY)
    strict, loose = (wish(rates, 200.0, Predictive(1.0, unserved=share)).replicas for share in (0.0005, 0.02))
    assert loose < strict


def test_replicas_are_ready_before_a_daily_increase() -> None:
    """The load triples at nine every morning: after some days replicas are ready before it."""
    day = [100.0 if place < 54 or place >= 108 else 300.0 for place in range(DAY)]
    before, at_nine = day * 9 + day[:53], day[53]
    assert wish(before, at_nine).replicas >= 30
    much_earlier = day * 9 + day[:40]
    assert wish(much_earlier, day[40]).replicas <= 15


def test_the_rate_of_a_replica_follows_from_the_duration_of_requests() -> None:
    """200 arrive per second and 400 are in flight: each takes 2 s, so 8 at once are 4 per second."""
    windows = {300.0: Window(300.0, mean=400.0)}
    said = wish([], 200.0, Predictive(ongoing_per_replica=8.0), ongoing_windows=windows)
    assert said.replicas == math.ceil(1.5 * 200 / 4)
    known = wish([], 200.0, Predictive(), ongoing_windows=windows, max_concurrency=8)
    assert known.replicas == said.replicas


def test_without_a_rate_the_present_requests_count() -> None:
    assert wish([], 0.0, Predictive(ongoing_per_replica=4.0), ongoing=9.0).replicas == 3
    assert wish([], 0.0, Predictive(), ongoing=9.0, max_concurrency=8).replicas == 2
    assert wish([], 0.0, Predictive(), ongoing=9.0).replicas == 9


def test_a_hundred_arrivals_are_enough_for_the_duration() -> None:
    windows = {100.0: Window(100.0, mean=2.0)}
    enough, few = (
        wish([], 0.0, Predictive(ongoing_per_replica=4.0), ongoing_windows=windows, arrivals_per_s={100.0: rate})
        for rate in (1.0, 0.99)
    )
    assert "a replica serves 2/s" in enough.why
    assert "no rate is known yet" in few.why


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({30.0: 10.0, 300.0: 8.0, 3600.0: 7.0}, 10.0),
        ({30.0: 2.0, 300.0: 1.0, 3600.0: 1.5}, 1.0),  # 60 in 30 s may be chance, 600 in 300 s are not
        ({30.0: 0.0, 300.0: 90.0, 3600.0: 100.0}, 0.0),  # no arrivals where 3,000 were expected
        ({30.0: 1.0, 100.0: 0.5, 3600.0: 0.7}, 0.5),  # a hundred are enough
        ({30.0: 0.0, 300.0: 0.0, 3600.0: 0.01}, 0.01),
        ({}, 0.0),
    ],
)
def test_the_present_rate_uses_the_shortest_sufficient_window(rates: dict[float, float], expected: float) -> None:
    assert rate_now(view_of([], 0.0, arrivals_per_s=rates)) == expected


def test_predictive_state_is_plain() -> None:
    rates, notes = noisy(DAY), dict[str, Any]()
    first = wish(rates, 200.0, state=notes)
    saved = msgspec.json.decode(msgspec.json.encode(notes))
    assert saved == notes
    assert wish(rates, 200.0, state=saved) == first == wish(rates, 200.0)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"replica_per_s": 0}, "replicaPerSecond must be above 0, found 0"),
        ({"ongoing_per_replica": -1.0}, "ongoingPerReplica must be above 0, found -1"),
        ({"caution": 0.0}, "caution must be above 0, found 0"),
        ({"unserved": 0.0}, "unserved must be a share between 0 and 1, such as 0.002, found 0.0"),
        ({"unserved": 1.0}, "unserved must be a share between 0 and 1, such as 0.002, found 1.0"),
        ({"headroom": 0.5}, "headroom must be 1 or more, found 0.5"),
    ],
)
def test_invalid_predictive_parameters_are_errors(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Predictive(**parameters)

import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.scaling.forecast import SHAPES, UNSETTLED, learn, levels, smallest_margin, spread
from pointsman.scaling.policy import Wish
from pointsman.scaling.predictive import BEYOND, Predictive, rate_now
from pointsman.scaling.view import DeploymentView, Rate, Window

BIN_S = 600.0
DAY = 144
RATES = st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=200)


def view_of(rates: Sequence[float], now: float, **more: Any) -> DeploymentView:
    """After so many bins, with this rate now."""
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
def test_never_fewer_than_the_load_of_now_and_never_far_beyond_what_was_seen(
    rates: list[float], now: float, start_up_s: float
) -> None:
    wanted = wish(rates, now, start_up_s=start_up_s).replicas
    assert wanted >= math.ceil(now / 10 - 1e-9)
    if len(rates) >= UNSETTLED + 4 * 5 and len(rates) >= 36:
        assert wanted <= math.ceil(BEYOND * max(now, *rates) / 10)


@given(RATES, st.integers(1, 5), st.data())
def test_nothing_is_made_from_what_came_later(rates: list[float], ahead: int, data: st.DataObject) -> None:
    until = data.draw(st.integers(1, len(rates)))
    everything, then = np.array(rates), np.array(rates[:until])
    assert np.allclose(spread(everything)[:until], spread(then))
    for shape in SHAPES:
        # A season of 20 bins, so that there are some.
        bin_s = shape.season_s / 20 or BIN_S
        assert np.allclose(levels(everything, shape, ahead, bin_s)[:until], levels(then, shape, ahead, bin_s))


@given(
    st.lists(st.tuples(st.floats(-5.0, 5.0), st.floats(0.1, 10.0)), min_size=1, max_size=50),
    st.floats(0.0, 50.0),
)
def test_the_margin_is_the_smallest_that_leaves_no_more_than_allowed(
    errors: list[tuple[float, float]], allowed: float
) -> None:
    scores, weights = (np.array(part) for part in zip(*errors, strict=True))
    margin = smallest_margin(scores, weights, allowed)

    def short(margin: float) -> float:
        return float((weights * np.maximum(scores - margin, 0)).sum())

    assert short(margin) <= allowed + 1e-6
    assert margin == 0 or short(margin - 1e-3) > allowed - 1e-6


def test_what_was_learned_would_have_left_no_more_than_allowed() -> None:
    rates = np.array(noisy(2 * DAY))
    lesson = learn(rates, 1, 0.002, BIN_S)
    planned = levels(rates, SHAPES[lesson.shape], 1, BIN_S) + lesson.margin * spread(rates)
    short = np.maximum(rates[1:] - planned[:-1], 0)[UNSETTLED:].sum() / rates[1:][UNSETTLED:].sum()
    assert short == pytest.approx(0.002, rel=0.01)


def test_a_headroom_holds_while_there_is_little_history() -> None:
    assert wish([], 100.0).replicas == 15
    assert wish([100.0] * 35, 100.0).replicas == 15
    said = wish([100.0] * 36, 100.0)
    assert said.replicas == 10
    assert (
        said.why
        == "100/s come now; be ready for 100/s within 630 s (100: what comes now; margin 0); a replica serves 10/s"
    )


def test_a_load_that_moves_more_has_a_larger_margin() -> None:
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


def test_it_is_there_before_the_load_that_comes_every_day() -> None:
    """At nine every morning the load trebles: after some days the replicas are there one start-up earlier."""
    day = [100.0 if place < 54 or place >= 108 else 300.0 for place in range(DAY)]
    before, at_nine = day * 9 + day[:53], day[53]
    assert wish(before, at_nine).replicas >= 30
    much_earlier = day * 9 + day[:40]
    assert wish(much_earlier, day[40]).replicas <= 15


def test_what_a_replica_serves_is_learned_from_how_long_requests_take() -> None:
    """200 come per second and 400 are here: each stays for 2 s, so that 8 at once are 4 per second."""
    windows = {300.0: Window(300.0, mean=400.0)}
    said = wish([], 200.0, Predictive(ongoing_per_replica=8.0), ongoing_windows=windows)
    assert said.replicas == math.ceil(1.5 * 200 / 4)
    known = wish([], 200.0, Predictive(), ongoing_windows=windows, max_concurrency=8)
    assert known.replicas == said.replicas


def test_without_any_rate_the_requests_that_are_here_count() -> None:
    assert wish([], 0.0, Predictive(ongoing_per_replica=4.0), ongoing=9.0).replicas == 3


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({30.0: 10.0, 300.0: 8.0, 3600.0: 7.0}, 10.0),
        ({30.0: 2.0, 300.0: 1.0, 3600.0: 1.5}, 1.0),  # 60 in 30 s may be chance, 600 in 300 s are not
        ({30.0: 0.0, 300.0: 90.0, 3600.0: 100.0}, 0.0),  # nobody came where 3,000 would have
        ({30.0: 0.0, 300.0: 0.0, 3600.0: 0.01}, 0.01),
        ({}, 0.0),
    ],
)
def test_the_rate_of_now_is_that_of_the_shortest_window_that_says_anything(
    rates: dict[float, float], expected: float
) -> None:
    assert rate_now(view_of([], 0.0, arrivals_per_s=rates)) == expected


def test_its_notes_are_plain_and_it_goes_on_from_them() -> None:
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
        ({"unserved": 0.0}, "unserved must be a share between 0 and 1, such as 0.002, found 0.0"),
        ({"headroom": 0.5}, "headroom must be 1 or more, found 0.5"),
    ],
)
def test_bad_parameters_are_told(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Predictive(**parameters)

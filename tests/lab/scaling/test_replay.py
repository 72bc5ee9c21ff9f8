from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.lab.scaling import Reactive, Replay, ReplayOutcome, Series, Setting, clairvoyant, static_peak
from pointsman.lab.scaling.replay import ReplicaPool
from pointsman.scaling.limits import ScalingLimits
from pointsman.scaling.policies.predictive import Predictive
from pointsman.scaling.policy import DeploymentView, Wish
from tests.lab.scaling.made_up import BIN_S, DAY, daily, moody, steps

LOADS = st.lists(st.integers(0, 200).map(float), min_size=2, max_size=12).filter(any)


def run(series: Series, policy: object, **setting: Any) -> ReplayOutcome:
    return Replay(series, Setting(**{"capacity": 10.0, "interval_s": 60.0} | setting)).run(policy)


@pytest.mark.parametrize(
    ("setting", "unserved", "bins"),
    [
        # One replica serves 10/s. The load trebles for one bin: 20/s are too many until the two have started.
        ({"start_up_s": 0.0}, 0.0, 1 + 3 + 1),
        ({"start_up_s": 30.0}, 20 * 30 / 600, 1 + 3 + 1),
        ({"start_up_s": 200.0}, 20 * 200 / 600, 1 + 3 + 1),
        ({"start_up_s": 600.0}, 20.0, 1 + 3 + 1),
        # The last 30 s tell it a minute later, and that it is over as well.
        ({"start_up_s": 200.0, "at_once": False}, 20 * 260 / 600, 1 + 3 + 1),
        # Asked once in two bins, it never learns of it.
        ({"start_up_s": 0.0, "interval_s": 1200.0}, 20.0, 1 + 1 + 1),
    ],
)
def test_one_step_by_hand(setting: dict[str, Any], unserved: float, bins: float) -> None:
    found = run(steps(10, 30, 10), Reactive(10.0, 1.0), **setting)
    assert found.unserved == pytest.approx(unserved / 50)
    assert found.hours == pytest.approx(bins * BIN_S / 3600)
    assert found.ratio == pytest.approx(bins / 5)


def test_outcomes() -> None:
    found = run(steps(10, 30, 10), Reactive(10.0, 1.0), start_up_s=120.0)
    assert (found.changes, found.most, found.problems) == (2, 3, 0)
    assert found.line == [(0.0, 1, 1), (600.0, 3, 1), (720.0, 3, 3), (1200.0, 1, 1)]
    assert [str(record) for record in found.records] == ["steps: 1 -> 3: 1 times 30/s", "steps: 3 -> 1: 1 times 10/s"]


@pytest.mark.parametrize(("queue_s", "unserved"), [(0.0, 20 * 300.0), (60.0, 20 * 300.0 - 600.0), (1e6, 0.0)])
def test_queued_requests_are_served_later(queue_s: float, unserved: float) -> None:
    found = run(steps(10, 30, 10, 0, 0), Reactive(10.0, 1.0), start_up_s=300.0, queue_s=queue_s)
    assert found.unserved * 50 * BIN_S == pytest.approx(unserved)


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(1.0, 900.0)), max_size=12))
def test_ordered_replicas_are_ready_or_starting(orders: list[tuple[int, float]]) -> None:
    series = steps(*[50.0] * 20)
    pool = ReplicaPool(1, Setting(capacity=10.0, start_up_s=200.0), series)
    now, cost = 0.0, 0.0
    for target, seconds in orders:
        pool.order(target)
        assert pool.ready + pool.starting == target
        now, cost = now + seconds, cost + target * seconds
        pool.advance(now)
        assert pool.starting == 0 or seconds < 200
    assert pool.replica_seconds == pytest.approx(cost)


def test_views_by_hand() -> None:
    """A replica serves 2/s, and each request stays for 2 s; there is no queue, but arrivals are seen."""
    seen: list[DeploymentView] = []
    metrics = {"load": lambda moment: moment.rate}
    series = steps(0, 8, 0.5, 0)

    def one(view: DeploymentView) -> int:
        seen.append(view)
        return 1

    run(series, one, capacity=2.0, request_s=2.0, interval_s=300.0, metrics=metrics)
    assert [view.ongoing for view in seen] == [0, 0, 4, 4, 1, 1, 0, 0]
    assert [view.queued for view in seen] == [0, 0, 12, 12, 0, 0, 0, 0]
    assert [view.idle_s for view in seen] == [None] * 6 + [300, 600]
    assert [view.metrics["load"].last for view in seen] == [0, 0, 8, 8, 0.5, 0.5, 0, 0]
    assert {view.metrics["load"].seconds for view in seen} == {300.0}
    assert {view.max_concurrency for view in seen} == {4}
    assert seen[6].ongoing_windows[3600.0].mean == pytest.approx((4 + 1) / 3)
    assert seen[6].queued_windows[3600.0].mean == pytest.approx(12 / 3)
    assert [rate.per_second for rate in seen[6].history] == [0, 8, 0.5]
    run(series, one, capacity=0.1)
    assert seen[-1].max_concurrency == 1


class Watching:
    """Keeps what it saw, as it was."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def desired_replicas(self, view: DeploymentView) -> int:
        windows = [dict(view.ongoing_windows), dict(view.queued_windows)]
        plain = msgspec.structs.replace(view, ongoing_windows={}, queued_windows={})
        self.seen.append(msgspec.json.encode([plain, windows]))
        return round(view.arrivals_per_s[30.0] / 10)


@given(LOADS, LOADS, st.booleans())
def test_a_policy_never_sees_the_future(past: list[float], future: list[float], at_once: bool) -> None:
    seen = []
    for rates in ([*past, *future], [*past, *reversed(future), 1.0]):
        watching = Watching()
        run(steps(*rates), watching, interval_s=200.0, at_once=at_once)
        seen.append(watching.seen[: 3 * len(past)])
    assert seen[0] == seen[1]


@given(LOADS, st.sampled_from([0.0, 30.0, 600.0, 900.0]))
def test_no_policy_serves_everything_for_less_than_the_clairvoyant(rates: list[float], start_up_s: float) -> None:
    series, setting = steps(*rates), Setting(capacity=10.0, start_up_s=start_up_s, interval_s=100.0)
    bound = clairvoyant(series, setting)
    assert 1.0 - 1e-9 <= bound.ratio <= static_peak(series, setting).ratio + 1e-9
    plan = {int(since / BIN_S): target for since, target, _ in bound.line}

    def follow(view: DeploymentView) -> int:
        return max(plan[int(view.now / BIN_S + 1e-9)], 1)

    first = ScalingLimits(min_replicas=0, max_replicas=100, initial_replicas=plan[0], down_delay_s=0.0)
    if start_up_s % BIN_S == 0:  # then its orders are made when bins begin, and a policy can follow them
        found = Replay(series, setting, first).run(follow)
        assert found.unserved == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("start_up_s", "bins", "replicas"),
    [
        (0.0, 6.0, [1, 1, 3, 1]),
        # Two more are ordered in the middle of the bin before, and cost from then on.
        (300.0, 7.0, [1, 3, 3, 1]),
        (600.0, 8.0, [1, 3, 3, 1]),
        (900.0, 9.0, [3, 3, 3, 1]),
    ],
)
def test_the_clairvoyant_by_hand(start_up_s: float, bins: float, replicas: list[int]) -> None:
    found = clairvoyant(steps(10, 10, 30, 10), Setting(capacity=10.0, start_up_s=start_up_s))
    assert found.ratio == pytest.approx(bins / 6)
    assert found.hours == pytest.approx(bins * BIN_S / 3600)
    assert found.line == [(place * BIN_S, count, count) for place, count in enumerate(replicas)]
    assert found.changes == sum(before != after for before, after in pairwise(replicas))
    assert found.most == 3


def test_the_peak_all_the_time_and_a_load_of_nothing() -> None:
    found = static_peak(steps(10, 10, 30, 10), Setting(capacity=10.0))
    assert (found.ratio, found.hours, found.changes, found.most) == (2.0, 2.0, 0, 3)
    assert {count for _, count, _ in found.line} == {3}
    assert found.unserved == 0.0
    assert static_peak(steps(0, 0), Setting(capacity=10.0)).ratio == 1.0


def test_a_clairvoyant_without_start_up_is_the_least() -> None:
    setting = Setting(capacity=5.0, start_up_s=0.0)
    assert clairvoyant(daily(2), setting).ratio == pytest.approx(1.0)
    early = [clairvoyant(daily(2), Setting(capacity=5.0, start_up_s=seconds)).ratio for seconds in (0, 30, 600, 1500)]
    assert early == sorted(early)
    assert len(set(early)) == 4


def raises(view: DeploymentView) -> int:
    raise RuntimeError("no idea")


@pytest.mark.parametrize("policy", [raises, lambda view: -3, lambda view: "many"], ids=["raises", "-3", "many"])
def test_a_wrong_policy_is_contained(policy: Callable[[DeploymentView], Any]) -> None:
    found = run(steps(30, 30, 30), policy)
    assert (found.changes, found.most, found.problems) == (0, 3, 30)
    assert found.unserved == 0


def test_without_load_one_replica_stays() -> None:
    found = run(steps(0, 0, 0), lambda view: 0)
    assert (found.hours, found.ratio, found.unserved, found.line) == (0.5, 1.0, 0.0, [(0.0, 1, 1)])


def test_limits_hold_in_a_replay() -> None:
    limits = ScalingLimits(min_replicas=2, max_replicas=4, down_delay_s=1200.0)
    found = Replay(steps(10, 90, 10, 10, 10), Setting(capacity=10.0, start_up_s=0.0), limits).run(Reactive(10.0, 1.0))
    assert [(since, target) for since, target, _ in found.line] == [(0.0, 2), (600.0, 4), (2400.0, 2)]


def test_the_state_of_a_policy_is_kept() -> None:
    def counts(view: DeploymentView) -> Wish:
        view.state["times"] = view.state.get("times", 0) + 1
        return Wish(view.state["times"])

    assert run(steps(10, 10), counts).most == 20


def test_predictive_costs_no_more_than_a_headroom_that_serves_as_much() -> None:
    series = moody(8)
    predictive = run(series, Predictive(5.0, react_s=0.0), capacity=5.0, interval_s=BIN_S)
    assert predictive.problems == 0
    assert predictive.unserved < 0.003
    for hundredths in range(110, 160, 5):
        reactive = run(series, Reactive(5.0, hundredths / 100), capacity=5.0, interval_s=BIN_S)
        if reactive.unserved <= predictive.unserved:
            assert predictive.ratio < reactive.ratio
            break
    else:
        pytest.fail("no headroom serves as much")


def test_predictive_finds_the_capacity_of_a_replica() -> None:
    """It learns that from how long requests stay, also while more come than are served."""
    known, learned = (
        run(moody(4), Predictive(serves, react_s=0.0), capacity=5.0, interval_s=BIN_S, request_s=3.0)
        for serves in (5.0, None)
    )
    assert learned.ratio == pytest.approx(known.ratio, rel=0.01)
    assert learned.unserved == pytest.approx(known.unserved, abs=0.0005)


def test_a_policy_sees_the_windows_that_it_needs() -> None:
    seen: set[float] = set()

    def policy(view: DeploymentView) -> int:
        seen.update(view.ongoing_windows, view.arrivals_per_s)
        assert view.arrivals_per_s[7.0] == 10.0
        return 1

    policy.windows = (7.0,)  # type: ignore[attr-defined]
    assert run(steps(10.0), policy, capacity=5.0).problems == 0
    assert seen == {7.0, 30.0, 300.0, 3600.0}


def test_predictive_scales_up_before_the_daily_load() -> None:
    day = [100.0 if place < 54 or place >= 108 else 300.0 for place in range(DAY)]
    predictive, reactive = (
        run(steps(*day * 10), policy, capacity=5.0, interval_s=BIN_S)
        for policy in (Predictive(5.0, react_s=0.0), Reactive(5.0, 1.5))
    )
    assert predictive.unserved < 0.35 * reactive.unserved
    assert predictive.ratio < reactive.ratio


def test_the_same_replay_twice_is_the_same() -> None:
    first, again = (run(daily(2), Predictive(5.0), capacity=5.0, interval_s=BIN_S) for _ in range(2))
    assert first == again

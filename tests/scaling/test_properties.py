"""For any load and any policy: limits hold, a constant load settles, and state survives."""

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.scaling import (
    SCALING_POLICIES,
    Budget,
    DeploymentView,
    Guard,
    MaxOf,
    MinOf,
    Panic,
    Predictive,
    QueueDepth,
    ScalingLimits,
    Scheduled,
    ScheduleEntry,
    SloAttainment,
    TargetOngoing,
    TokenThroughput,
    TooSlow,
    Wish,
    invoke,
)
from tests.properties import examples
from tests.scaling.views import NOON, flat, view
from tests.scaling.worlds import World

BUILT_IN: dict[str, Callable[[], Any]] = {
    "target-ongoing": TargetOngoing,
    "queue-depth": QueueDepth,
    "slo-attainment": SloAttainment,
    "slo-attainment by latency": lambda: SloAttainment(ttft_ms=60.0, latency_ms=250.0),
    "token-throughput": lambda: TokenThroughput(1500.0),
    "panic": Panic,
    "scheduled": lambda: Scheduled([ScheduleEntry("0 0 * * *", 4)]),
    "predictive": lambda: Predictive(ongoing_per_replica=3.0),
    "budget": lambda: Budget(TargetOngoing(), per_hour=5.0, per_month=3000.0),
    "max-of": lambda: MaxOf([QueueDepth(), SloAttainment(), Panic()]),
    "min-of": lambda: MinOf([TargetOngoing(), TokenThroughput()]),
}

LIMITS = st.builds(
    ScalingLimits,
    min_replicas=st.integers(0, 3),
    max_replicas=st.integers(3, 12),
    initial_replicas=st.none() | st.integers(0, 15),
    up_delay_s=st.sampled_from([0.0, 7.0, 30.0]),
    down_delay_s=st.sampled_from([0.0, 7.0, 60.0]),
    up_factor=st.sampled_from([0.3, 1.0]),
    down_factor=st.sampled_from([0.3, 1.0]),
    max_step=st.none() | st.integers(1, 3),
    cooldown_s=st.sampled_from([0.0, 20.0]),
    idle_timeout_s=st.sampled_from([0.0, 30.0]),
)
ANSWERS = st.integers(0, 15) | st.sampled_from([-1, "many", None, TooSlow(2.0), ValueError("?"), Wish(5, "five")])
TALES = st.lists(
    st.tuples(st.sampled_from([1.0, 5.0, 13.0]), ANSWERS, st.sampled_from([0.0, 0.0, 2.0])), min_size=1, max_size=50
)


def test_every_built_in_policy_is_here() -> None:
    assert SCALING_POLICIES.keys() <= BUILT_IN.keys()


@settings(max_examples=examples(150))
@given(LIMITS, TALES)
def test_limits_hold_for_any_answers(limits: ScalingLimits, tale: Any) -> None:
    guard = Guard("chat", limits, "any")
    now, wanted, changed_at = NOON, [(-1e18, guard.target)], None
    for step, answer, load in tale:
        now, before = now + step, guard.target
        made = guard.decide(view(now=now, target=before, ongoing=load), answer)
        after = guard.target
        good = answer.replicas if isinstance(answer, Wish) else answer
        sensible = isinstance(good, int) and good >= 0
        asked = min(max(good if sensible else before, limits.min_replicas), limits.max_replicas)
        woken = before == 0 and load > 0
        wanted.append((now, max(asked, 1) if woken else asked))
        assert limits.min_replicas <= after <= limits.max_replicas
        if after == before:
            continue
        assert made is not None
        assert (made.before, made.after) == (before, after), "every change has a record"
        if before > 0:
            assert limits.cooldown_s == 0.0 or changed_at is None or now - changed_at >= limits.cooldown_s
        if limits.max_step is not None and before > 0:
            assert abs(after - before) <= limits.max_step
        if after > before > 0:
            assert all(said >= after for said in held(wanted, now, limits.up_delay_s))
        if after < before > 1:
            assert all(said <= after or after == 1 for said in held(wanted, now, limits.down_delay_s))
        assert sensible or woken, "nonsense changes nothing"
        assert after > 0 or load == 0.0, "the last replica stays while there are requests"
        changed_at = now


def held(wanted: list[tuple[float, int]], now: float, delay_s: float) -> list[int]:
    """What was wanted at any time within the delay."""
    ends = [*(start for start, _ in wanted[1:]), now]
    spans = zip(wanted, ends, strict=True)
    return [*(said for (_, said), end in spans if end > now - delay_s), wanted[-1][1]]


@given(LIMITS, TALES, st.integers(0, 50))
def test_a_restored_guard_continues(limits: ScalingLimits, tale: Any, place: int) -> None:
    one = Guard("chat", limits, "any")
    other, now = one, NOON
    for number, (step, answer, load) in enumerate(tale):
        now += step
        if number == place:
            one.set_override(5, now + 20.0, "alice", now)
            other = Guard("chat", limits, "any", json.loads(json.dumps(one.state())))
        seen = view(now=now, target=one.target, ongoing=load)
        first = one.decide(seen, answer)
        if one is not other:
            assert first == other.decide(seen, answer)
            assert one.state() == other.state()


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=examples(3))
@given(
    load=st.sampled_from([0.0, 0.3, 1.0, 6.0, 7.9, 13.0, 40.0]),
    concurrency=st.sampled_from([2, 4]),
    start_up_s=st.sampled_from([0.0, 45.0]),
    down_delay_s=st.sampled_from([0.0, 300.0]),
)
def test_a_constant_load_settles(
    name: str, load: float, concurrency: int, start_up_s: float, down_delay_s: float
) -> None:
    limits = ScalingLimits(min_replicas=0, max_replicas=16, down_delay_s=down_delay_s, idle_timeout_s=60.0)
    world = World(BUILT_IN[name](), limits, concurrency=concurrency, start_up_s=start_up_s, tick_s=10.0)
    world.run(3 * 3600.0, lambda now: load)
    settled = {target for at, target in world.targets if at > world.now - 3600.0}
    assert len(settled) == 1, world.changes
    assert len(world.changes) <= 16, "and it does not go to and fro before"
    assert (settled == {0}) == (load == 0.0 and name != "scheduled")
    assert world.guard.problem is None


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=examples(3))
@given(seed=st.integers(0, 99), limits=LIMITS)
def test_any_load_keeps_any_policy_within_bounds(name: str, seed: int, limits: ScalingLimits) -> None:
    dice = Random(seed)
    world = World(BUILT_IN[name](), limits, start_up_s=20.0, tick_s=5.0)
    for _ in range(6):
        height = dice.choice([0.0, 0.5, 3.0, 20.0, 200.0])
        world.run(dice.choice([30.0, 300.0]), lambda now, height=height: height * dice.random())  # type: ignore[misc]
    assert all(limits.min_replicas <= target <= limits.max_replicas for _, target in world.targets)
    assert world.guard.problem is None


NUMBERS = st.none() | st.floats(0, 5000)
VIEWS = st.builds(
    view,
    replicas=st.integers(0, 9),
    starting=st.integers(0, 3),
    target=st.integers(0, 9),
    ongoing=st.floats(0, 50),
    queued=st.floats(0, 500),
    max_concurrency=st.none() | st.integers(1, 8),
    ongoing_windows=st.none() | st.floats(0, 50),
    ttft_ms=NUMBERS,
    latency_ms=NUMBERS,
    slo_attainment=st.none() | st.floats(0, 1),
    kv_usage=st.none() | st.floats(0, 1),
    tokens_per_s=NUMBERS,
    cost_per_replica_hour=st.floats(0.1, 10),
    since_up_s=st.none() | st.floats(0, 1000),
    start_up_s=st.none() | st.floats(0, 600),
    arrivals_per_s=st.dictionaries(st.sampled_from([30.0, 300.0]), st.floats(0, 100)),
)


def filled(seen: DeploymentView) -> DeploymentView:
    """Replaces drawn numbers by windows."""
    given = {name: getattr(seen, name) for name in ("ttft_ms", "latency_ms", "kv_usage")}
    windows: dict[str, Any] = {name: flat(value) for name, value in given.items() if value is not None}
    windows |= {name: msgspec.structs.replace(view().ttft_ms) for name, value in given.items() if value is None}
    mean: Any = seen.ongoing_windows
    return msgspec.structs.replace(seen, **windows, ongoing_windows={} if mean is None else {30.0: flat(mean, 30.0)})


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=examples(50))
@given(seen=VIEWS.map(filled))
def test_policies_change_only_their_state_and_are_deterministic(name: str, seen: DeploymentView) -> None:
    policy = BUILT_IN[name]()
    before = copy.deepcopy(seen)
    answer = invoke(policy, seen)
    assert isinstance(answer, Wish), answer
    assert answer.replicas >= 0
    assert answer.why
    assert msgspec.structs.replace(seen, state={}) == msgspec.structs.replace(before, state={})
    json.dumps(seen.state)
    assert invoke(BUILT_IN[name](), before) == answer, "nothing is kept in the object"

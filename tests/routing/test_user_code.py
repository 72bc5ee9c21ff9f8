"""Containment of users' policies and plugins: what they do wrong is counted, and costs only their own deployment."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from pointsman.reasons import Reason
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.events import Arrived, Ended, Joined, Send
from pointsman.routing.plugins import RequestCycle
from pointsman.routing.queue import FlowControl
from pointsman.routing.routes import ConfiguredRoute, DispatchPlan
from pointsman.routing.user_code import FIRST_PAUSE_S, MAX_PAUSE_S, STRIKES, Containment, Misconduct, Stalled
from pointsman.selection import MaxScorePicker, Profile, Scheduler
from pointsman.strategies import FIFOPolicy, SchedulingPolicy
from pointsman.strategies.dispatching import plan_for
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision


class Hand:
    """A watch set by hand: what calls take, and whether they block."""

    def __init__(self) -> None:
        self.at, self.takes_s, self.inside, self.blocks = 100.0, 0.0, False, False
        self.calls: list[str] = []

    def now(self) -> float:
        return self.at

    def call(self, limit_s: float, method: Callable[..., Any], about: tuple[Any, ...]) -> tuple[Any, float]:
        self.calls.append(method.__name__)
        if self.blocks:
            raise Stalled
        self.inside = True
        try:
            answer = method(*about)
            return list(answer) if isinstance(answer, Iterator) else answer, self.takes_s
        finally:
            self.inside = False


class Raises(SchedulingPolicy):
    broken = True

    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        if self.broken:
            raise KeyError("no such model")
        return [SchedulingDecision(one.request_id, "b") for one in self.prioritize(requests)]

    def prioritize(self, requests: list[RequestMetadata]) -> list[RequestMetadata]:
        return requests


class World:
    """A dispatcher with two instances and contained code."""

    def __init__(self, plan: DispatchPlan, *code: object, limit: int = 99) -> None:
        self.watch = Hand()
        self.containment = Containment(self.watch)
        self.containment.contain(code)
        self.dispatcher = Dispatcher(plan)
        self.count = 0
        for name in "ab":
            joined = Joined(ExecutionInstance(instance_id=name, model_name="m", max_concurrency=limit))
            self.dispatcher.handle(joined, self.watch.at)

    def send(self, **facts: Any) -> str:
        """The instance that the next request goes to; empty if it waits."""
        self.count += 1
        request = RequestMetadata(f"r{self.count}", model_name="m", **facts)
        commands = self.dispatcher.handle(Arrived((request,)), self.watch.at)
        return next((one.decision.target_instance_id for one in commands if isinstance(one, Send)), "")

    def record(self) -> Any:
        return self.dispatcher.records.get(f"r{self.count}")

    @property
    def told(self) -> Misconduct:
        [told] = self.containment.members
        return told


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "returned None from schedule(), not a list of decisions"),
        (42, "returned 42 from schedule(), not a list of decisions"),
        ({"r1": "a"}, "returned {'r1': 'a'} from schedule(), not a list of decisions"),
        ([None], "returned None among its decisions"),
        (["a"], "returned 'a' among its decisions"),
    ],
)
@pytest.mark.parametrize("contained", [True, False])
def test_a_policy_that_returns_something_else_is_reported(answer: Any, told: str, contained: bool) -> None:
    class Forgetful(SchedulingPolicy):
        def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> Any:
            return answer

    policy = Forgetful()
    world = World(plan_for(policy), *([policy] if contained else []))
    for _ in range(STRIKES):
        assert world.send() in "ab"
        assert str(world.record().dropped) == f"fifo decided, not forgetful, which {told}"
    if contained:
        assert (world.told.count, str(world.told.cause)) == (STRIKES, told)
        assert world.told.suspended_until is not None


class Short:
    """A scorer whose scores are not those of the candidates."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def scores(self, cycle: RequestCycle, candidates: Any) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "told"),
    [([1.0], 'plugin "short" gave 1 scores for 2 candidates'), (None, "TypeError: object of type 'NoneType' has no ")],
)
def test_answers_of_plugins_that_cannot_be_used_are_counted_until_another_plan(answer: Any, told: str) -> None:
    def plan(scorer: Short) -> DispatchPlan:
        scheduler: Scheduler[Any] = Scheduler([Profile("default", scorer, MaxScorePicker())])
        return DispatchPlan(ConfiguredRoute(scheduler, "own"), FlowControl, plugins=(scorer,), stand_in=FIFOPolicy())

    wrong, right = Short(answer), Short([1.0, 0.5])
    world = World(plan(wrong), wrong)
    assert world.send() in "ab"
    assert world.dispatcher.counters.useless.count == 1
    assert world.dispatcher.counters.useless.last.startswith(told)
    world.dispatcher.reconfigure(plan(right), world.watch.at)
    assert world.send() == "a"
    assert world.dispatcher.counters.useless.count == 0


def test_a_policy_that_raises_is_suspended_and_tried_again_after_a_growing_pause() -> None:
    policy = Raises()
    world = World(plan_for(policy), policy)
    for _ in range(STRIKES):
        assert world.send() in "ab"
    assert str(world.record().dropped) == "fifo decided, not raises, which raised KeyError: 'no such model'"
    assert world.record().strategy == "fifo"
    assert world.told.suspended_until == world.watch.at + FIRST_PAUSE_S
    called = len(world.watch.calls)
    assert world.send() in "ab"
    assert len(world.watch.calls) == called, "it is not called while it is suspended"
    assert str(world.record().dropped) == (
        "fifo decided, not raises, which is suspended for another 1 s, as it raised KeyError: 'no such model'"
    )
    world.watch.at += FIRST_PAUSE_S
    world.send()
    assert world.told.suspended_until == world.watch.at + 2 * FIRST_PAUSE_S
    world.watch.at += 2 * FIRST_PAUSE_S
    policy.broken = False
    assert world.send() == "b"
    assert world.record().dropped is None
    assert world.record().strategy == "raises"
    assert world.containment.report()[0]["suspended_s"] is None
    assert world.told.count == STRIKES + 1


def test_the_pause_has_a_maximum_and_starts_again_after_long_good_conduct() -> None:
    told, cause, now = Misconduct("p"), Reason("policy-slow", {}), 0.0
    for _ in range(20):
        told.went_wrong(cause, now, suspend=True)
        assert told.suspended_until is not None
        now = told.suspended_until
    assert told.pause_s == MAX_PAUSE_S
    told.went_well(now)
    told.went_wrong(cause, now + MAX_PAUSE_S + 1, suspend=True)
    assert told.pause_s == FIRST_PAUSE_S


def test_a_policy_that_blocks_is_suspended_at_once() -> None:
    policy = Raises()
    world = World(plan_for(policy), policy)
    world.watch.blocks = True
    assert world.send() in "ab"
    assert str(world.record().dropped) == "fifo decided, not raises, which was interrupted after 50 ms"
    assert world.told.suspended_until is not None


def test_a_slow_policy_decides_until_it_was_slow_repeatedly() -> None:
    policy = Raises()
    policy.broken = False
    world = World(plan_for(policy), policy)
    world.watch.takes_s = 0.006
    assert [world.send() for _ in range(STRIKES)] == ["b"] * STRIKES
    assert world.send() == "a"
    assert world.record().strategy == "fifo"
    [problem] = world.containment.problems("chat")
    assert str(problem) == (
        f'deployment "chat": raises took 6 ms; it may take 5 ms (timeLimit) ({STRIKES} times, last 0 s ago); a '
        "stand-in decides, and it is tried again in 1 s"
    )
    assert world.containment.report() == [
        {
            "policy": "raises",
            "count": STRIKES,
            "message": "took 6 ms; it may take 5 ms (timeLimit)",
            "last_s": 0.0,
            "suspended_s": 1.0,
        }
    ]


def test_a_call_now_and_then_that_is_slow_suspends_nothing() -> None:
    policy = Raises()
    policy.broken = False
    world = World(plan_for(policy), policy)
    for _ in range(10):
        world.watch.takes_s = 0.006
        world.send()
        world.watch.takes_s = 0.001
        assert world.send() == "b"
    assert world.told.suspended_until is None
    assert world.told.count == 10


class ByLength(FIFOPolicy):
    """Its order and its rule are its own; a queue keeps the order."""

    broken = ""

    def order(self, request: RequestMetadata) -> Any:
        if self.broken == "order":
            raise ValueError("no order")
        return -len(str(request.prompt))

    def rule_for(self, cycle: RequestCycle, endpoints: Any) -> Any:
        if self.broken == "rule_for":
            raise ValueError("no rule")
        return super().rule_for(cycle, endpoints)


def test_requests_that_cannot_be_ordered_go_by_arrival_behind_the_others() -> None:
    policy = ByLength()
    world = World(plan_for(policy), policy, limit=1)
    assert [world.send(), world.send()] == ["a", "b"]
    world.send(prompt="short")
    policy.broken = "order"
    world.send(prompt="very very long")
    world.send(prompt="even much longer than that")
    policy.broken = ""
    world.send(prompt="very long")
    assert [one.request_id for one in world.dispatcher.waiting()] == ["r6", "r3", "r4", "r5"]


def test_fifo_decides_where_the_rule_of_a_strategy_raises() -> None:
    policy = ByLength()
    world = World(plan_for(policy), policy)
    policy.broken = "rule_for"
    assert world.send() in "ab"
    assert world.record().strategy == "fifo"
    assert str(world.record().dropped) == "fifo decided, not by-length, which raised ValueError: no rule"
    assert world.dispatcher.counters.policy_errors == {"by-length: raised ValueError: no rule": 1}


class Plugin:
    """A filter, a scorer, a picker and a producer; one of its methods may raise."""

    def __init__(self, broken: str) -> None:
        self.broken = broken

    def _maybe(self, name: str) -> None:
        if self.broken == name:
            raise RuntimeError("out of ideas")

    def rejections(self, cycle: RequestCycle, candidates: Any) -> Iterator[tuple[Any, str]]:
        self._maybe("rejections")
        yield from ()

    def scores(self, cycle: RequestCycle, candidates: Any) -> list[float]:
        self._maybe("scores")
        return [float(str(one) == "b") for one in candidates]

    def pick(self, cycle: RequestCycle, ranked: Any) -> Any:
        self._maybe("pick")
        return [ranked[0].candidate]


@pytest.mark.parametrize("broken", ["rejections", "scores", "pick"])
def test_fifo_decides_where_a_plugin_of_a_profile_raises(broken: str) -> None:
    plugin = Plugin(broken)
    scheduler: Scheduler[Any] = Scheduler([Profile("default", plugin)])
    plan = DispatchPlan(ConfiguredRoute(scheduler), FlowControl, plugins=(plugin,), stand_in=FIFOPolicy())
    world = World(plan, plugin)
    assert world.send() == "a"
    assert str(world.record().dropped) == "fifo decided, not plugin, which raised RuntimeError: out of ideas"
    plugin.broken = ""
    assert world.send() == "b"
    assert (world.record().strategy, world.record().dropped) == (plan.strategy, None)


@dataclass(frozen=True, slots=True)
class Frozen:
    wanted: str = "b"

    def scores(self, cycle: RequestCycle, candidates: Any) -> list[float]:
        return [float(str(one) == self.wanted) for one in candidates]


class Static:
    @staticmethod
    def scores(_: RequestCycle, candidates: Any) -> list[float]:
        return [float(str(one) == "b") for one in candidates]


class Unguarded(msgspec.Struct, frozen=True):
    def scores(self, cycle: RequestCycle, candidates: Any) -> list[float]:
        return [0.5 for _ in candidates]


def test_a_class_that_allows_no_guard_is_a_problem() -> None:
    containment = Containment(Hand())
    containment.contain([Unguarded()])
    [problem] = containment.problems("chat")
    assert str(problem) == ('deployment "chat": calls of unguarded cannot be timed; write it as an ordinary class')


@pytest.mark.parametrize("scorer", [Static(), Frozen()])
def test_every_kind_of_class_is_guarded(scorer: Any) -> None:
    scheduler: Scheduler[Any] = Scheduler([Profile("default", scorer, MaxScorePicker())])
    world = World(DispatchPlan(ConfiguredRoute(scheduler), FlowControl, stand_in=FIFOPolicy()), scorer)
    assert world.send() == "b"
    assert world.watch.calls
    world.watch.blocks = True
    assert world.send() == "a"


def test_built_in_plugins_are_not_touched() -> None:
    policy = FIFOPolicy()
    world = World(plan_for(policy), policy)
    assert world.send() in "ab"
    assert (world.containment.members, world.watch.calls, type(policy)) == ([], [], FIFOPolicy)


def test_a_request_whose_policy_failed_ends_like_any_other() -> None:
    policy = Raises()
    world = World(plan_for(policy), policy)
    world.send()
    world.dispatcher.handle(Ended("r1", 5), world.watch.at + 1)
    assert world.record().state == "served"
    assert "fifo decided, not raises" in str(world.record())
    assert world.record().as_dict()["dropped"]["code"] == "stand-in-decided"

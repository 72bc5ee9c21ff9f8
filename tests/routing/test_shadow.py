"""Candidates beside the policy in force: they see the same, change nothing, and cost what they may."""

from collections.abc import Callable
from typing import Any

import pytest

from pointsman.routing.canary import Canary, Watcher
from pointsman.routing.candidates import CandidatePolicy
from pointsman.routing.dispatcher import Dispatcher, watch
from pointsman.routing.endpoints import EndpointTable
from pointsman.routing.events import Arrived, Ended, FirstToken, Joined, Left, Send
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.producers import ApproxPrefixCacheProducer
from pointsman.routing.queue import FlowControl
from pointsman.routing.routes import ConfiguredRoute, DispatchPlan
from pointsman.routing.scorers import LeastLoaded
from pointsman.routing.shadow import MIN_LEARNED, FirstTokenModel, Shadow, suspensions
from pointsman.routing.user_code import Containment
from pointsman.selection import MaxScorePicker, Profile, Scheduler
from pointsman.strategies import FIFOPolicy, SchedulingPolicy
from pointsman.strategies.dispatching import plan_for
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision
from tests.routing.test_user_code import Hand


class Herd(SchedulingPolicy):
    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        return [SchedulingDecision(one.request_id, "a") for one in requests]


class Broken(SchedulingPolicy):
    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        raise LookupError("no idea")


class ToB:
    """A scorer of the instance b."""

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> list[float]:
        return [float(str(one) == "b") for one in candidates]


def picker(*plugins: Any, name: str = "picker") -> DispatchPlan:
    producers = [one for one in plugins if hasattr(one, "produce")]
    scorers = [one for one in plugins if hasattr(one, "scores")]
    profile: Profile[Any] = Profile("default", *scorers, MaxScorePicker())
    route = ConfiguredRoute(Scheduler([profile], producers=producers), name)
    return DispatchPlan(route, FlowControl, plugins=plugins)


class Bench:
    """A dispatcher with two instances, and its candidates. Each reading of the timer takes a microsecond."""

    def __init__(self, plan: DispatchPlan, budget: float = 100.0, **candidates: DispatchPlan) -> None:
        self.watch, self.due = Hand(), list[Callable[[], None]]()
        self.reading = 0.0
        made = []
        for name, one in candidates.items():
            guard = Containment(self.watch)
            guard.contain([*one.plugins, *([] if one.policy is None else [one.policy])])
            made.append(CandidatePolicy(name, one, self._timer, self.now, guard))
        self.shadow = Shadow(made, budget, self._timer, self)
        self.watcher = Watcher(self.shadow)
        self.dispatcher = Dispatcher(plan)
        for name in ("a", "b"):
            self.dispatcher.handle(Joined(ExecutionInstance(instance_id=name, max_concurrency=99)), 100.0)
        watch(self.dispatcher, self.watcher)

    def _timer(self) -> float:
        self.reading += 1e-6
        return self.reading

    def now(self) -> float:
        return self.watch.at

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self.due.append(call)

    def work(self) -> None:
        while self.due:
            self.due.pop(0)()

    def ask(self, number: int, *, prompt: str = "hello", ttft_s: Callable[[str], float] | None = None) -> str:
        """Where a request is sent; it is served at once, if it is said how fast."""
        name = f"r{number}"
        request = RequestMetadata(name, prompt.encode(), arrival_time=self.now())
        [sent] = [one for one in self.dispatcher.handle(Arrived((request,)), self.now()) if isinstance(one, Send)]
        self.work()
        target = str(sent.endpoint)
        if ttft_s is not None:
            self.watch.at += ttft_s(target)
            self.dispatcher.handle(FirstToken(name), self.now())
            self.dispatcher.handle(Ended(name, 10), self.now())
        return target


def test_a_candidate_decides_with_the_load_that_the_policy_in_force_saw() -> None:
    bench = Bench(plan_for(FIFOPolicy()), same=plan_for(FIFOPolicy()))
    sent = [bench.ask(number) for number in range(20)]  # nothing ends: each changes the load of the next
    counts = bench.shadow.told().candidates[0]
    assert set(sent) == {"a", "b"}
    assert (counts.decided, counts.agreed) == (20, 20)


def test_candidates_run_after_the_decision_is_out() -> None:
    bench = Bench(plan_for(FIFOPolicy()), same=plan_for(FIFOPolicy()))
    bench.dispatcher.handle(Arrived((RequestMetadata("r", arrival_time=100.0),)), 100.0)
    assert bench.shadow.told().candidates[0].decided == 0
    bench.work()
    assert bench.shadow.told().candidates[0].decided == 1


@pytest.mark.parametrize("plan", [plan_for(Herd()), picker(ToB(), name="to-b")], ids=["batch", "picker"])
def test_a_policy_of_any_kind_can_be_in_force_or_a_candidate(plan: DispatchPlan) -> None:
    bench = Bench(plan, herd=plan_for(Herd()), fifo=plan_for(FIFOPolicy()))
    for number in range(10):
        bench.ask(number)
    assert [one.decided for one in bench.shadow.told().candidates] == [10, 10]


def test_a_candidate_that_raises_is_suspended_and_changes_nothing() -> None:
    bench = Bench(plan_for(FIFOPolicy()), broken=plan_for(Broken()))
    alone = Bench(plan_for(FIFOPolicy()), fifo=plan_for(FIFOPolicy()))
    assert [bench.ask(number) for number in range(20)] == [alone.ask(number) for number in range(20)]
    counts = bench.shadow.told().candidates[0]
    assert counts.errors == 3
    assert "LookupError" in counts.problem
    [problem] = suspensions(bench.shadow, "chat")
    assert problem.code == "candidate-suspended"


def test_a_candidate_that_blocks_is_suspended_at_once() -> None:
    bench = Bench(plan_for(FIFOPolicy()), slow=plan_for(Herd()))
    bench.watch.blocks = True
    for number in range(5):
        bench.ask(number)
    assert bench.shadow.told().candidates[0].errors == 1


def test_candidates_stay_within_their_budget() -> None:
    bench = Bench(plan_for(FIFOPolicy()), budget=0.5, fifo=plan_for(FIFOPolicy()))
    for number in range(2000):
        bench.ask(number, ttft_s=lambda _: 0.001)
    report = bench.shadow.told().report()
    assert 0 < report["sampled"] < 1000
    assert report["cpu_share"] == pytest.approx(0.5, rel=0.2)


def test_expectations_are_learned_from_what_happened() -> None:
    """The instance b is slower by 100 ms, which the policy in force does not know."""
    bench = Bench(picker(ToB(), name="to-b"), fifo=plan_for(FIFOPolicy()), same=picker(ToB()))
    for number in range(200):
        bench.ask(number, ttft_s=lambda name: 0.15 if name == "b" else 0.05)
    fifo, same = bench.shadow.told().report()["candidates"]
    assert same["agreement"] == 1.0
    assert same["ttft_ms"]["mean"] == pytest.approx(same["in_force_ttft_ms"]["mean"], rel=0.02)
    assert fifo["outcomes"] > 100
    assert all(one["request_id"] in bench.dispatcher.records._by_id for one in fifo["differences"])


def test_the_model_tells_instances_apart() -> None:
    model = FirstTokenModel()
    assert model.expected(1000, 1, "a") is None
    for number in range(10 * MIN_LEARNED):
        tokens, load = 100.0 * (number % 20), float(number % 5)
        model.learn(tokens, load, "a", 0.02 + tokens * 1e-4 + load * 0.01)
        model.learn(tokens, load, "b", 0.12 + tokens * 1e-4 + load * 0.01)
    fast, slow = model.expected(1000, 2, "a"), model.expected(1000, 2, "b")
    assert fast is not None
    assert slow is not None
    assert slow - fast == pytest.approx(0.1, rel=0.3)


def test_a_prefix_producer_with_the_same_settings_is_shared() -> None:
    acting = ApproxPrefixCacheProducer()
    bench = Bench(
        picker(acting, LeastLoaded()),
        same=picker(ApproxPrefixCacheProducer(), LeastLoaded()),
        other=picker(ApproxPrefixCacheProducer(block_size_tokens=256), LeastLoaded()),
    )
    assert [one.has_own_state for one in bench.shadow.candidates] == [False, True]
    for number in range(5):
        bench.ask(number, prompt="x" * 4096)
    assert acting.prompt_tokens == 5 * 1024  # each request was counted once


def test_an_instance_that_leaves_is_forgotten() -> None:
    own = ApproxPrefixCacheProducer(block_size_tokens=256)
    bench = Bench(picker(LeastLoaded()), own=picker(own, LeastLoaded()))
    for number in range(4):
        bench.ask(number, prompt="x" * 4096, ttft_s=lambda _: 0.01)
    known = set(own.index.servers)
    bench.dispatcher.handle(Left("a"), 101.0)
    assert own.index.servers == known - {"/a"}


def canary_of(bench: Bench, share: float) -> Canary:
    canary = bench.watcher.canary = Canary("run", bench.shadow.candidates[0], share)
    bench.dispatcher.listen(canary.ended, "canary")
    return canary


@pytest.mark.parametrize("plan", [plan_for(FIFOPolicy()), plan_for(Herd())], ids=["route", "batch"])
def test_a_canary_decides_about_its_share(plan: DispatchPlan) -> None:
    bench = Bench(plan, to_b=picker(ToB()))
    canary = canary_of(bench, 0.3)
    for number in range(1000):
        bench.ask(number, ttft_s=lambda name: 0.02)
    counts = canary.counts
    assert counts.candidate.requests + counts.in_force.requests == 1000
    assert counts.candidate.requests == pytest.approx(300, abs=60)
    mine = [one for one in bench.dispatcher.records.newest() if one.instance == "b"]
    assert len(mine) >= counts.candidate.requests


def test_sessions_stay_on_one_side() -> None:
    canary = Canary("run", CandidatePolicy("c", plan_for(FIFOPolicy()), lambda: 0.0, lambda: 0.0), 0.5)
    sides = {canary.takes(RequestMetadata(f"r{number}", headers={"x-session-id": "one"})) for number in range(50)}
    assert len(sides) == 1


def test_where_the_canary_fails_the_policy_in_force_decides() -> None:
    bench = Bench(plan_for(FIFOPolicy()), broken=plan_for(Broken()))
    canary = canary_of(bench, 0.9)
    for number in range(50):
        bench.ask(number, ttft_s=lambda _: 0.001)
    assert canary.counts.failures >= 3
    assert canary.counts.candidate.errors == canary.counts.in_force.errors == 0
    assert "LookupError" in canary.counts.problem


def test_without_a_watcher_the_route_is_the_plans_own() -> None:
    plan = plan_for(FIFOPolicy())
    dispatcher = Dispatcher(plan)
    assert dispatcher._chooser.route is plan.route
    assert isinstance(dispatcher.fleet, EndpointTable)

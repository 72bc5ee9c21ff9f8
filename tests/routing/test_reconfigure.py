"""A dispatcher whose plan changes under load: no request is lost or counted twice."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pointsman.reasons import Reason
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.endpoints import IN_FLIGHT_REQUESTS, IN_FLIGHT_TOKENS, LATENCY_MS, LOAD, Metrics
from pointsman.routing.events import (
    Arrived,
    Cancelled,
    Changed,
    DispatcherCommand,
    Ended,
    Failed,
    FirstToken,
    Joined,
    Left,
    Measured,
    Outcome,
    Refusal,
    Refuse,
    Revoke,
    Send,
    TimerFired,
    WakeAt,
)
from pointsman.routing.queue import (
    BandSettings,
    FairnessPolicy,
    FlowControl,
    GlobalStrictFairnessPolicy,
    InFlightEviction,
    RoundRobinFairnessPolicy,
    VirtualTokenCounterFairnessPolicy,
)
from pointsman.routing.routes import DispatcherSettings, DispatchPlan
from pointsman.strategies import (
    AdaptivePolicy,
    CostOptimizedPolicy,
    FIFOPolicy,
    PowerOfTwoPolicy,
    PrefixPolicy,
    PriorityPolicy,
    SchedulingPolicy,
    SLOAwarePolicy,
)
from pointsman.strategies.dispatching import plan_for
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision
from tests.properties import examples


class FirstFit(SchedulingPolicy):
    """A user's policy, which is passed all waiting requests."""

    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        loads = {one.instance_id: one.current_load for one in instances}
        made = []
        for request in self.prioritize(requests):
            for one in instances:
                if one.max_concurrency is None or loads[one.instance_id] < one.max_concurrency:
                    loads[one.instance_id] += 1
                    made.append(SchedulingDecision(request.request_id, one.instance_id))
                    break
        return made


def fair(fairness: FairnessPolicy, *, evicts: bool = False) -> DispatchPlan:
    band = BandSettings(fairness=fairness)
    return DispatchPlan(
        FIFOPolicy(),
        lambda: FlowControl([band], default_band=band),
        make_eviction=InFlightEviction if evicts else None,
    )


PLANS: dict[str, Callable[[], DispatchPlan]] = {
    "fifo": lambda: plan_for(FIFOPolicy()),
    "priority": lambda: plan_for(PriorityPolicy()),
    "slo-aware": lambda: plan_for(SLOAwarePolicy()),
    "cost-optimized": lambda: plan_for(CostOptimizedPolicy()),
    "adaptive": lambda: plan_for(AdaptivePolicy()),
    "power-of-two": lambda: plan_for(PowerOfTwoPolicy()),
    "prefix": lambda: plan_for(PrefixPolicy()),
    "first-fit": lambda: plan_for(FirstFit()),
    "strict": lambda: fair(GlobalStrictFairnessPolicy()),
    "round robin": lambda: fair(RoundRobinFairnessPolicy()),
    "token counter": lambda: fair(VirtualTokenCounterFairnessPolicy(default_output_tokens=10)),
    "evicting": lambda: fair(GlobalStrictFairnessPolicy(), evicts=True),
}
OURS = [name for name in PLANS if name != "first-fit"]
"""Plans that exclude instances that have failed a request; a user's policy does not know them."""


def instance(name: str, limit: int | None = 2, **facts: Any) -> ExecutionInstance:
    return ExecutionInstance(instance_id=name, model_name="m", max_concurrency=limit, **facts)


def request(name: str, **facts: Any) -> RequestMetadata:
    return RequestMetadata(name, "hello " * 10, model_name="m", **facts)


def sent(commands: list[DispatcherCommand]) -> list[str]:
    return [command.request.request_id for command in commands if isinstance(command, Send)]


def busy(plan: str) -> Dispatcher:
    """Two instances with two slots each: four requests run, two of them with the first token out, five wait."""
    dispatcher = Dispatcher(PLANS[plan]())
    for name in ("i", "j"):
        dispatcher.handle(Joined(instance(name)), 0.0)
    for number in range(9):
        one = request(f"r{number}", user_id=f"u{number % 3}", priority=number % 2, slo_deadline_ms=1e6)
        dispatcher.handle(Arrived((one,)), float(number))
    for name in ("r0", "r1"):
        dispatcher.handle(FirstToken(name), 10.0)
    assert (dispatcher.running, len(dispatcher)) == (4, 9)
    return dispatcher


def columns(dispatcher: Dispatcher, *names: str) -> dict[str, list[float]]:
    return {name: [float(value) for value in dispatcher.fleet.roster.column(name)] for name in names}


def drained(dispatcher: Dispatcher, running: list[str], now: float) -> Counter[str]:
    """End all requests, one after the other; how often each ended."""
    ended: Counter[str] = Counter()
    while running:
        name = running.pop(0)
        ended[name] += 1
        running += sent(dispatcher.handle(Ended(name, 3), now))
    return ended


@pytest.mark.parametrize("after", PLANS)
@pytest.mark.parametrize("before", PLANS)
def test_every_request_and_reservation_stays(before: str, after: str) -> None:
    dispatcher = busy(before)
    running = [name for name in (f"r{n}" for n in range(9)) if name in dispatcher.ledger]
    held = {name: dispatcher.ledger.holds(name) for name in running}
    loads = columns(dispatcher, LOAD, IN_FLIGHT_REQUESTS, IN_FLIGHT_TOKENS)
    records, arrived = dispatcher.records, dispatcher.counters.arrived
    commands = dispatcher.reconfigure(PLANS[after](), 11.0)
    assert sent(commands) == [], "there was no room before, and there is none now"
    assert [command for command in commands if isinstance(command, Refuse | Revoke)] == []
    assert (dispatcher.running, len(dispatcher)) == (4, 9)
    assert {name: dispatcher.ledger.holds(name) for name in running} == held
    assert columns(dispatcher, LOAD, IN_FLIGHT_REQUESTS, IN_FLIGHT_TOKENS) == loads
    assert dispatcher.records is records
    assert dispatcher.counters.arrived == arrived == 9
    assert drained(dispatcher, running, 12.0) == Counter({f"r{n}": 1 for n in range(9)})
    assert (len(dispatcher), len(dispatcher.ledger)) == (0, 0)
    assert columns(dispatcher, LOAD, IN_FLIGHT_REQUESTS, IN_FLIGHT_TOKENS) == {
        LOAD: [0.0, 0.0], IN_FLIGHT_REQUESTS: [0.0, 0.0], IN_FLIGHT_TOKENS: [0.0, 0.0]
    }  # fmt: skip
    assert dispatcher.counters.outcomes == {"served": 9}
    assert {record.state for record in dispatcher.records.newest()} == {"served"}
    assert dispatcher.counters.policy_errors == {}


@pytest.mark.parametrize("after", PLANS)
def test_waiting_requests_take_the_order_of_the_new_policy(after: str) -> None:
    dispatcher = busy("fifo")
    waiting = {"r4", "r5", "r6", "r7", "r8"}
    fresh = Dispatcher(PLANS[after]())
    for name in ("i", "j"):
        fresh.handle(Joined(instance(name, limit=0)), 0.0)
    for one in dispatcher.waiting():
        fresh.handle(Arrived((one,)), 11.0)
    dispatcher.reconfigure(PLANS[after](), 11.0)
    assert {one.request_id for one in dispatcher.waiting()} == waiting
    if after not in ("round robin", "token counter"):  # their order depends on past turns
        assert [one.request_id for one in dispatcher.waiting()] == [one.request_id for one in fresh.waiting()]


@pytest.mark.parametrize("after", PLANS)
def test_requests_that_fit_are_sent_at_once(after: str) -> None:
    """Under the old plan there was no instance; under the new one there is room."""
    dispatcher = Dispatcher(plan_for(FIFOPolicy()))
    for number in range(3):
        dispatcher.handle(Arrived((request(f"r{number}"),)), 0.0)
    dispatcher.fleet.add(instance("i", limit=None))  # without an event, so nothing is placed yet
    assert sorted(sent(dispatcher.reconfigure(PLANS[after](), 1.0))) == ["r0", "r1", "r2"]
    assert (dispatcher.running, len(dispatcher)) == (3, 3)


@pytest.mark.parametrize("after", OURS)
@pytest.mark.parametrize("before", OURS)
def test_tries_that_failed_before_count_after(before: str, after: str) -> None:
    """A request that failed on two instances is sent once more, to the third, and then refused."""
    dispatcher = Dispatcher(PLANS[before](), DispatcherSettings(max_tries=3))
    for name in "ijk":
        dispatcher.handle(Joined(instance(name)), 0.0)
    dispatcher.handle(Arrived((request("r"),)), 1.0)
    for _ in range(2):
        dispatcher.handle(Failed("r", Reason("oops")), 2.0)
    failed = [name for name, _ in dispatcher.records.newest()[0].failures]
    assert len(set(failed)) == 2
    dispatcher.reconfigure(PLANS[after](), 3.0)
    [record] = dispatcher.records.newest()
    assert record.instance not in failed
    commands = dispatcher.handle(Failed("r", Reason("oops again")), 4.0)
    [refusal] = [command.refusal for command in commands if isinstance(command, Refuse)]
    assert refusal.outcome is Outcome.EVICTED_OTHER
    assert "try 3 of 3" in str(refusal.reason)
    assert len(dispatcher) == 0


@pytest.mark.parametrize("after", PLANS)
def test_a_request_whose_answer_has_begun_is_not_sent_again(after: str) -> None:
    dispatcher = busy("fifo")
    dispatcher.reconfigure(PLANS[after](), 11.0)
    commands = dispatcher.handle(Failed("r0", Reason("cut off")), 12.0)
    assert "r0" not in sent(commands)
    assert [command.request.request_id for command in commands if isinstance(command, Refuse)] == ["r0"]
    commands = dispatcher.handle(Failed("r2", Reason("refused")), 13.0)
    assert not [command for command in commands if isinstance(command, Refuse)]
    assert "r2" in dispatcher.records.newest()[-3].request_id


@pytest.mark.parametrize("after", PLANS)
def test_no_request_waits_longer_because_the_policy_changed(after: str) -> None:
    """The time to live does not restart, however often policies change."""
    dispatcher = busy("fifo")
    waiting = [one.request_id for one in dispatcher.waiting()]
    for at in (11.0, 30.0, 50.0):
        dispatcher.reconfigure(PLANS[after](), at)
    refused = [
        (command.request.request_id, command.refusal.outcome)
        for command in dispatcher.handle(TimerFired(), 69.0)  # they arrived from 4 to 8 seconds
        if isinstance(command, Refuse)
    ]
    assert sorted(refused) == [(name, Outcome.EVICTED_TTL) for name in sorted(waiting)]
    waited = [record for record in dispatcher.records.newest() if record.request_id in waiting]
    assert all(record.ended_at is not None and record.ended_at - record.arrived_at >= 60.0 for record in waited)


def test_waiting_requests_stay_in_a_smaller_queue() -> None:
    dispatcher = busy("fifo")
    commands = dispatcher.reconfigure(plan_for(FIFOPolicy(), max_waiting=2), 11.0)
    assert not [command for command in commands if isinstance(command, Refuse)]
    assert len(dispatcher) == 9


@pytest.mark.parametrize("after", PLANS)
def test_the_timer_stays_set_while_the_first_deadline_is_the_same(after: str) -> None:
    dispatcher = busy("fifo")
    commands = dispatcher.reconfigure(PLANS[after](), 11.0)
    assert [command for command in commands if isinstance(command, WakeAt)] == []


def test_the_timer_is_set_again_for_another_deadline() -> None:
    dispatcher = busy("fifo")  # the first waiting request arrived at 4.0
    assert dispatcher.reconfigure(plan_for(FIFOPolicy(), ttl_s=20.0), 11.0) == [WakeAt(24.0)]


@pytest.mark.parametrize("after", PLANS)
def test_what_was_measured_and_learned_is_kept(after: str) -> None:
    dispatcher = busy("fifo")
    metrics = Metrics(waiting_queue_size=5, running_requests_size=3, kv_cache_usage=0.5)
    dispatcher.handle(Measured("i", metrics), 10.0)
    dispatcher.handle(Ended("r0", 5), 10.5)
    learned = columns(dispatcher, LATENCY_MS)
    dispatcher.reconfigure(PLANS[after](), 11.0)
    assert dispatcher.fleet["i"].metrics == metrics
    assert dispatcher.fleet.load.metrics_age(dispatcher.fleet["i"], 12.0) == 2.0
    assert dispatcher.fleet["j"].metrics is None
    assert repr(columns(dispatcher, LATENCY_MS)) == repr(learned)
    dispatcher.handle(Changed(instance("i", can_accept_request=False)), 12.0)
    dispatcher.handle(Left("j", Reason("crashed")), 13.0)
    assert [str(endpoint) for endpoint in dispatcher.fleet.roster] == ["i"]


def test_a_revoked_request_stays_revoked() -> None:
    dispatcher = Dispatcher(PLANS["evicting"]())
    dispatcher.handle(Joined(instance("i", limit=1)), 0.0)
    dispatcher.handle(Arrived((request("low", priority=-1),)), 0.0)
    dispatcher._table.revoke("low", Refusal(Outcome.EVICTED_IN_FLIGHT, Reason("stopped-for-priority")), [])
    dispatcher.reconfigure(PLANS["evicting"](), 1.0)
    dispatcher.handle(Cancelled("low"), 2.0)
    [record] = dispatcher.records.newest()
    assert record.refusal is not None
    assert record.refusal.outcome is Outcome.EVICTED_IN_FLIGHT


class Reconfigurations(RuleBasedStateMachine):
    """Anything may happen in between, and every request still leaves exactly once."""

    @initialize(plan=st.sampled_from(sorted(PLANS)))
    def start(self, plan: str) -> None:
        self.dispatcher = Dispatcher(PLANS[plan]())
        self.now = 0.0
        self.arrived = 0
        self.running: set[str] = set()
        self.left: Counter[str] = Counter()
        self.names = 0

    def carry_out(self, commands: list[DispatcherCommand]) -> None:
        for command in commands:
            if isinstance(command, Send):
                self.running.add(command.request.request_id)
            elif isinstance(command, Refuse):
                self.running.discard(command.request.request_id)
                self.left[command.request.request_id] += 1
            elif isinstance(command, Revoke):
                self.carry_out(self.dispatcher.handle(Cancelled(command.request.request_id), self.now))
                self.running.discard(command.request.request_id)
                self.left[command.request.request_id] += 1

    def tell(self, event: Any) -> None:
        self.now += 0.5
        self.carry_out(self.dispatcher.handle(event, self.now))

    @rule(plan=st.sampled_from(sorted(PLANS)))
    def reconfigure(self, plan: str) -> None:
        self.carry_out(self.dispatcher.reconfigure(PLANS[plan](), self.now))

    @rule(count=st.integers(1, 3), priority=st.integers(-2, 2), user=st.sampled_from("xyz"))
    def arrive(self, count: int, priority: int, user: str) -> None:
        names = [f"r{self.arrived + number}" for number in range(count)]
        self.arrived += count
        self.tell(Arrived(tuple(request(name, priority=priority, user_id=user, max_tokens=20) for name in names)))

    @rule(limit=st.sampled_from([1, 2, None]))
    def join(self, limit: int | None) -> None:
        if len(self.dispatcher.fleet) < 3:
            self.names += 1
            self.tell(Joined(instance(f"i{self.names}", limit)))

    @precondition(lambda self: len(self.dispatcher.fleet) > 0)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(list(self.dispatcher.fleet.roster)))
        self.running -= set(self.dispatcher.ledger.on(gone))
        self.tell(Left(str(gone)))

    @precondition(lambda self: len(self.dispatcher.fleet) > 0)
    @rule(data=st.data(), waiting=st.integers(0, 9))
    def measure(self, data: st.DataObject, waiting: int) -> None:
        name = str(data.draw(st.sampled_from(list(self.dispatcher.fleet.roster))))
        self.tell(Measured(name, Metrics(waiting_queue_size=waiting)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), what=st.sampled_from(["token", "end", "fail", "cancel"]))
    def happen(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        if what == "token":
            self.tell(FirstToken(name))
            return
        self.running.discard(name)
        if what == "fail":
            self.tell(Failed(name, Reason("oops")))
            return
        self.left[name] += 1
        self.tell(Ended(name, 5) if what == "end" else Cancelled(name))

    @rule()
    def time_passes(self) -> None:
        self.now += 25.0
        self.tell(TimerFired())

    @invariant()
    def every_request_is_somewhere(self) -> None:
        waiting = [one.request_id for one in self.dispatcher.waiting()]
        assert len(waiting) == len(set(waiting)) == len(self.dispatcher) - self.dispatcher.running
        assert self.dispatcher.running == len(self.running) == len(self.dispatcher.ledger)
        assert set(self.left.values()) <= {1}
        assert len(self.left) + len(self.running) + len(waiting) == self.arrived
        assert sum(columns(self.dispatcher, IN_FLIGHT_REQUESTS)[IN_FLIGHT_REQUESTS]) == len(self.running)
        assert self.dispatcher.counters.arrived == self.arrived
        assert self.dispatcher.counters.policy_errors == {}

    def teardown(self) -> None:
        if hasattr(self, "dispatcher"):
            self.tell(Joined(instance("last", None)))
            while self.running:
                name = self.running.pop()
                self.left[name] += 1
                self.tell(Ended(name, 1))
            assert len(self.dispatcher) == 0
            assert sum(self.left.values()) == self.arrived


TestReconfigurations = Reconfigurations.TestCase
TestReconfigurations.settings = settings(max_examples=examples(60), stateful_step_count=30)

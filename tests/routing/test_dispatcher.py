"""The dispatcher: every request leaves exactly once, whatever happens in between."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pointsman.reasons import Reason
from pointsman.routing.decisions import Choice
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.endpoints import LOAD, MEASURED_AT, METRICS, WAITING, Attribute, Endpoint, Metrics
from pointsman.routing.events import (
    Arrived,
    Cancelled,
    Changed,
    DispatcherCommand,
    DispatcherEvent,
    Ended,
    Failed,
    FirstToken,
    Joined,
    Left,
    Measured,
    Outcome,
    Refuse,
    Rested,
    Scraped,
    Send,
    ShuttingDown,
    TimerFired,
    WakeAt,
    Watch,
)
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.queue import FlowControl
from pointsman.routing.routes import DispatcherSettings, DispatchPlan
from pointsman.selection import SchedulingFailure
from pointsman.strategies import FIFOPolicy, SchedulingPolicy
from pointsman.strategies.dispatching import plan_for
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision
from tests.properties import examples


def instance(name: str, limit: int | None = 1, model: str = "m", **facts: Any) -> ExecutionInstance:
    return ExecutionInstance(instance_id=name, model_name=model, max_concurrency=limit, **facts)


def request(name: str, model: str = "m", **facts: Any) -> RequestMetadata:
    return RequestMetadata(name, "hello", model_name=model, **facts)


def fifo(*instances: ExecutionInstance, max_tries: int = 3, seed: int = 0, **queue: Any) -> Dispatcher:
    dispatcher = Dispatcher(plan_for(FIFOPolicy(), **queue), DispatcherSettings(max_tries=max_tries, seed=seed))
    for each in instances:
        dispatcher.handle(Joined(each), 0.0)
    return dispatcher


def sent(commands: list[DispatcherCommand]) -> list[tuple[str, str]]:
    return [(c.request.request_id, c.decision.target_instance_id) for c in commands if isinstance(c, Send)]


def refused(commands: list[DispatcherCommand]) -> list[tuple[str, Outcome]]:
    return [(c.request.request_id, c.refusal.outcome) for c in commands if isinstance(c, Refuse)]


def arrive(dispatcher: Dispatcher, *names: str, now: float = 0.0, **facts: Any) -> list[DispatcherCommand]:
    return dispatcher.handle(Arrived(tuple(request(name, **facts) for name in names)), now)


def test_requests_that_fit_are_sent_and_the_rest_wait_in_order() -> None:
    dispatcher = fifo(instance("i", limit=2))
    assert sent(arrive(dispatcher, "a", "b", "c", "d")) == [("a", "i"), ("b", "i")]
    assert sent(dispatcher.handle(Ended("a"), 1.0)) == [("c", "i")]
    assert sent(dispatcher.handle(Ended("b"), 1.0)) == [("d", "i")]


def test_an_instance_that_joins_takes_as_many_requests_as_fit() -> None:
    dispatcher = fifo()
    assert sent(arrive(dispatcher, *"abcd")) == []
    assert sent(dispatcher.handle(Joined(instance("i", limit=3)), 1.0)) == [("a", "i"), ("b", "i"), ("c", "i")]


def test_no_model_holds_up_another() -> None:
    dispatcher = fifo(instance("x", model="x"), instance("y", model="y"))
    assert sent(dispatcher.handle(Arrived(tuple(request(f"x{n}", "x") for n in range(99))), 0.0)) == [("x0", "x")]
    assert sent(dispatcher.handle(Arrived((request("y0", "y"),)), 0.0)) == [("y0", "y")]


def test_a_request_that_no_instance_can_take_does_not_hold_up_those_behind_it() -> None:
    dispatcher = fifo(instance("i", limit=9))
    commands = dispatcher.handle(Arrived((request("broke", cost_budget=0.0), request("rich"))), 0.0)
    assert sent(commands) == [("rich", "i")]


def test_any_number_of_parked_requests_let_others_pass() -> None:
    dispatcher = fifo(instance("i", limit=2))
    dispatcher.handle(Arrived(tuple(request(f"broke{n}", cost_budget=0.0) for n in range(100))), 0.0)
    assert sent(arrive(dispatcher, "rich", now=1.0)) == [("rich", "i")]
    assert len(dispatcher.waiting()) == 100
    assert sent(arrive(dispatcher, "second", now=2.0)) == [("second", "i")]
    assert sent(arrive(dispatcher, "third", now=3.0)) == []
    assert sent(dispatcher.handle(Ended("rich"), 4.0)) == [("third", "i")]


def test_parked_requests_are_tried_again_before_later_arrivals() -> None:
    dispatcher = fifo(instance("dear", limit=9))
    thrifty = tuple(request(f"r{n}", cost_budget=1.0, max_tokens=10) for n in range(5))
    assert sent(dispatcher.handle(Arrived(thrifty), 0.0)) == []
    cheap = instance("cheap", limit=1, throughput_tokens_per_sec=1000)
    assert sent(dispatcher.handle(Joined(cheap), 1.0)) == [("r0", "cheap")]
    later = request("later", cost_budget=1.0, max_tokens=10)
    assert sent(dispatcher.handle(Arrived((later,)), 2.0)) == []
    order = [sent(dispatcher.handle(Ended(name), 3.0)) for name in ("r0", "r1", "r2", "r3", "r4")]
    assert [name for [(name, _)] in order] == ["r1", "r2", "r3", "r4", "later"]


def test_a_failed_try_goes_elsewhere_at_once_until_tries_run_out() -> None:
    dispatcher = fifo(instance("i"), instance("j"), instance("k"), max_tries=2)
    [(_, first)] = sent(arrive(dispatcher, "a"))
    [(_, second)] = sent(dispatcher.handle(Failed("a", Reason("connection refused")), 1.0))
    assert first != second
    [gone] = [c for c in dispatcher.handle(Failed("a", Reason("reset")), 2.0) if isinstance(c, Refuse)]
    assert gone.refusal.status == 500
    assert str(gone.refusal.reason) == f'"{second}" failed at try 2 of 2: reset'
    record = dispatcher.explain("a", 3.0)
    assert record is not None
    assert record.failures == ((first, Reason("connection refused")), (second, Reason("reset")))


def test_a_failure_on_this_side_is_neither_a_try_nor_a_failure_of_the_instance() -> None:
    dispatcher = fifo(instance("i"), instance("j"), instance("k"), max_tries=3)
    arrive(dispatcher, "a")
    tried = []
    for _ in range(2):
        [(_, to)] = sent(dispatcher.handle(Failed("a", Reason("too many open files"), local="files"), 1.0))
        tried.append(to)
    assert len(set(tried)) == 2
    assert dispatcher.counters.retries == {}
    for _ in range(2):
        assert sent(dispatcher.handle(Failed("a", Reason("reset")), 2.0)), "it has all its tries"
    assert sum(dispatcher.counters.retries.values()) == 2


def test_an_instance_that_was_full_is_no_try_and_may_be_asked_again() -> None:
    dispatcher = fifo(instance("i", 2), max_tries=1)
    assert sent(arrive(dispatcher, "a")) == [("a", "i")]
    dispatcher.handle(Measured("i", Metrics(running_requests_size=3.0)), 1.0)
    assert sent(dispatcher.handle(Failed("a", Reason("it is full"), full=True), 2.0)) == []
    assert sent(dispatcher.handle(Measured("i", Metrics(running_requests_size=1.0)), 3.0)) == [("a", "i")]
    assert dispatcher.counters.retries == {}


def test_a_request_that_cannot_be_sent_is_refused_with_the_cause() -> None:
    dispatcher = fifo(instance("i"), max_tries=3)
    arrive(dispatcher, "a")
    for _ in range(2):
        assert sent(dispatcher.handle(Failed("a", Reason("too many open files"), local="files"), 1.0)) == [("a", "i")]
    [gone] = [
        c
        for c in dispatcher.handle(Failed("a", Reason("too many open files"), local="files"), 2.0)
        if isinstance(c, Refuse)
    ]
    assert (gone.refusal.outcome, gone.refusal.status) == (Outcome.EVICTED_NOT_SENT, 503)
    assert (gone.refusal.reason.code, gone.refusal.reason.facts["cause"]) == ("not-sent", "files")
    assert len(dispatcher) == 0
    assert sent(arrive(dispatcher, "b")) == [("b", "i")]


def test_an_instance_that_rests_is_watched_again_with_its_first_request() -> None:
    dispatcher = fifo(instance("i"), instance("j", limit=3))
    for name in "ij":
        dispatcher.handle(Rested(name, 100.0), 0.0)
    commands = arrive(dispatcher, "a", "b")
    assert [command.instance_id for command in commands if isinstance(command, Watch)] == ["i", "j"]
    assert not any(isinstance(command, Watch) for command in arrive(dispatcher, "c", now=1.0))
    dispatcher.handle(Ended("a"), 2.0)
    i, j = dispatcher.fleet["i"], dispatcher.fleet["j"]
    assert (i.requests, i.worked_at, j.requests, j.worked_at) == (1, 2.0, 2, float("-inf"))
    dispatcher.handle(Rested("i", None), 3.0)
    dispatcher.handle(Rested("j", None), 3.0)
    assert (i.rests, j.rests) == (True, False), "requests are on j"
    dispatcher.handle(Left("i", Reason("gone")), 4.0)
    assert not any(isinstance(command, Watch) for command in arrive(dispatcher, "d", now=5.0))


def test_a_failed_request_keeps_its_position() -> None:
    dispatcher = fifo(instance("i"), instance("j"))
    arrive(dispatcher, "a", "b", "c")
    assert sent(dispatcher.handle(Failed("a", Reason("reset")), 1.0)) == [("c", "i")], "i failed a, and is free for c"
    assert sent(dispatcher.handle(Ended("b"), 2.0)) == [("a", "j")]


def test_nothing_is_sent_twice_once_the_answer_has_begun() -> None:
    dispatcher = fifo(instance("i"), instance("j"))
    arrive(dispatcher, "a")
    dispatcher.handle(FirstToken("a"), 0.5)
    commands = dispatcher.handle(Failed("a", Reason("reset")), 1.0)
    assert (sent(commands), refused(commands)) == ([], [("a", Outcome.EVICTED_OTHER)])


def test_the_requests_of_a_lost_instance_go_back_to_the_queue() -> None:
    dispatcher = fifo(instance("i", limit=2))
    arrive(dispatcher, "a", "b", "c")
    dispatcher.handle(FirstToken("b"), 0.5)
    commands = dispatcher.handle(Left("i", Reason("it crashed")), 1.0)
    assert refused(commands) == [("b", Outcome.EVICTED_OTHER)]
    assert [waiting.request_id for waiting in dispatcher.waiting()] == ["a", "c"]
    assert sent(dispatcher.handle(Joined(instance("j", limit=2)), 2.0)) == [("a", "j"), ("c", "j")]


def test_a_cancelled_request_frees_its_slot() -> None:
    dispatcher = fifo(instance("i"))
    arrive(dispatcher, "a", "b", "c")
    assert dispatcher.handle(Cancelled("b"), 1.0)[0:0] == []
    assert sent(dispatcher.handle(Cancelled("a"), 1.0)) == [("c", "i")]
    assert dispatcher.counters.outcomes == {"EvictedContextCancelled": 2}


def test_an_expired_request_is_refused_with_a_reason_for_every_instance() -> None:
    dispatcher = fifo(instance("i"), instance("j", can_accept_request=False), instance("k", model="other"), ttl_s=10)
    arrive(dispatcher, "a")
    commands = arrive(dispatcher, "b", now=1.0)
    assert [c.at for c in commands if isinstance(c, WakeAt)] == [11.0]
    [gone] = dispatcher.handle(TimerFired(), 11.0)
    assert isinstance(gone, Refuse)
    assert (gone.refusal.status, gone.refusal.drop_reason) == (429, "rejected-ttl-expired")
    assert str(gone.refusal.reason).endswith(
        '(no instance can take "m": 3 instances: 1 serving another model, 1 not accepting requests, 1 full)'
    )
    record = dispatcher.explain("b", 12.0)
    assert record is not None
    assert record.reasons() == {
        "i": Reason("full", {"load": 1.0, "limit": 1.0}),
        "j": Reason("not-accepting"),
        "k": Reason("other-model"),
    }
    assert record.as_dict()["rejected"]["i"] == {"filter": "has-room", "reason": record.reasons()["i"].as_dict()}
    assert all(name in str(record) for name in ("i ", "j ", "k ", "refused (EvictedTTL)"))


def test_a_full_queue_refuses_with_a_reason() -> None:
    dispatcher = fifo(instance("i"), max_waiting=2)
    commands = arrive(dispatcher, *"abcd")
    assert refused(commands) == [("c", Outcome.REJECTED_CAPACITY), ("d", Outcome.REJECTED_CAPACITY)]
    assert dispatcher.explain("c", 0.0).refusal.status == 429  # type: ignore[union-attr]


def test_an_id_in_flight_is_refused_and_the_first_request_continues() -> None:
    dispatcher = fifo(instance("i"))
    assert refused(arrive(dispatcher, "a", "a")) == [("a", Outcome.REJECTED_OTHER)]
    assert dispatcher.explain("a", 0.0).state == "running"  # type: ignore[union-attr]


def test_shutting_down_refuses_waiting_requests_and_lets_running_ones_end() -> None:
    dispatcher = fifo(instance("i"))
    arrive(dispatcher, "a", "b")
    assert refused(dispatcher.handle(ShuttingDown(), 1.0)) == [("b", Outcome.EVICTED_SHUTTING_DOWN)]
    assert refused(arrive(dispatcher, "c", now=2.0)) == [("c", Outcome.EVICTED_SHUTTING_DOWN)]
    assert dispatcher.handle(Ended("a"), 3.0) == []
    assert len(dispatcher) == 0


def test_an_instance_that_accepts_again_takes_waiting_requests() -> None:
    dispatcher = fifo(instance("i", can_accept_request=False))
    assert sent(arrive(dispatcher, "a")) == []
    assert sent(dispatcher.handle(Changed(instance("i")), 1.0)) == [("a", "i")]


def test_speed_is_learned_from_served_requests() -> None:
    dispatcher = fifo(instance("i", limit=4))
    arrive(dispatcher, "a")
    dispatcher.handle(Ended("a", 10), 2.0)
    assert dispatcher.fleet.instances()[0].avg_latency_ms == 2000.0


class Reads:
    """An extractor that raises on unknown sources."""

    def extract(self, source: Any, endpoint: Endpoint) -> Iterator[tuple[Attribute[Any], Any]]:
        yield METRICS, Metrics(waiting_queue_size=source["queue"])


def test_extractors_read_a_data_source_and_one_that_raises_is_counted() -> None:
    dispatcher = Dispatcher(DispatchPlan(FIFOPolicy(), FlowControl, plugins=(Reads(),)))
    dispatcher.handle(Joined(instance("i")), 0.0)
    dispatcher.handle(Scraped("i", {"queue": 3}), 1.0)
    assert dispatcher.handle(Scraped("i", {}), 2.0) == []
    roster = dispatcher.fleet.roster
    assert (roster.column(WAITING)[0], roster.column(MEASURED_AT)[0]) == (3, 1.0)
    assert dispatcher.counters.policy_errors == {"Reads: KeyError: 'queue'": 1}


class Raises:
    name = "raises"

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        raise KeyError("oops")


def test_a_route_that_raises_refuses_the_request_and_nothing_else() -> None:
    broken = Dispatcher(DispatchPlan(Raises(), plan_for(FIFOPolicy()).make_queue))
    assert refused(arrive(broken, "a")) == [("a", Outcome.REJECTED_OTHER)]
    assert len(broken) == 0


class Wild(SchedulingPolicy):
    """Breaks its contract in every way, or raises."""

    raising = False

    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        if self.raising:
            raise RuntimeError("no idea")
        instances[0].current_load = 99
        first = requests[-1]
        requests.clear()
        return [
            SchedulingDecision(first.request_id, instances[0].instance_id),
            SchedulingDecision(first.request_id, instances[0].instance_id),
            SchedulingDecision("ghost", instances[0].instance_id),
            SchedulingDecision("a", "nowhere"),
        ]


def test_decisions_of_a_user_policy_are_checked() -> None:
    dispatcher = Dispatcher(plan_for(Wild()))
    dispatcher.handle(Joined(instance("i")), 0.0)
    assert sent(arrive(dispatcher, "a", "b", "c")) == [("c", "i")]
    assert [waiting.request_id for waiting in dispatcher.waiting()] == ["a", "b"]
    assert dispatcher.counters.broken_promises == {"unknown-request": 2, "unknown-instance": 1}


def test_fifo_decides_when_a_policy_raises() -> None:
    policy = Wild()
    policy.raising = True
    dispatcher = Dispatcher(plan_for(policy))
    dispatcher.handle(Joined(instance("i")), 0.0)
    assert sent(arrive(dispatcher, "a", "b")) == [("a", "i")]
    assert dispatcher.counters.policy_errors == {"wild: RuntimeError: no idea": 1}


def test_the_same_seed_gives_the_same_log() -> None:
    def log(seed: int) -> list[DispatcherCommand]:
        dispatcher = fifo(*(instance(f"i{n}", limit=4) for n in range(5)), seed=seed)
        commands = arrive(dispatcher, *(f"r{n}" for n in range(30)))
        for n in range(20):
            commands += dispatcher.handle(Ended(f"r{n}"), n + 1.0)
        return [command for command in commands if not isinstance(command, WakeAt)]

    def choices(commands: list[DispatcherCommand]) -> list[tuple[str, str]]:
        return sent(commands)

    assert choices(log(1)) == choices(log(1))
    assert choices(log(1)) != choices(log(2)), "ties are broken by the dice"


class Fire(RuleBasedStateMachine):
    """Arrivals, ends, failures, cancellations, and instances that come, go and misreport, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.outcomes: Counter[str] = Counter()
        self.running: dict[str, str] = {}
        self.limits: dict[str, int] = {}

    @initialize(policy=st.sampled_from(["fifo", "batch"]), waiting=st.integers(1, 20))
    def start(self, policy: str, waiting: int) -> None:
        chosen = FIFOPolicy() if policy == "fifo" else Wild()
        self.dispatcher = Dispatcher(plan_for(chosen, max_waiting=waiting, ttl_s=20), DispatcherSettings(max_tries=2))

    def tell(self, event: DispatcherEvent) -> None:
        for command in self.dispatcher.handle(event, self.now):
            if isinstance(command, Send):
                name = command.request.request_id
                assert name not in self.running, "sent twice"
                assert name not in self.outcomes, "sent after its end"
                self.running[name] = command.decision.target_instance_id
            elif isinstance(command, Refuse):
                assert command.request.request_id not in self.running, "refused while it runs"
                self.outcomes[command.request.request_id] += 1

    @rule(
        number=st.integers(1, 5),
        model=st.sampled_from("mx"),
        priority=st.integers(-2, 2),
        budget=st.sampled_from([None, None, 0.0, 0.01]),
        timeout_s=st.sampled_from([None, 4.0]),
    )
    def arrive(self, number: int, model: str, priority: int, budget: float | None, timeout_s: float | None) -> None:
        names = [f"r{self.count + n}" for n in range(number)]
        self.count += number
        facts = {"priority": priority, "cost_budget": budget, "timeout_s": timeout_s}
        self.tell(Arrived(tuple(request(name, model, **facts) for name in names)))

    @rule(
        name=st.sampled_from("ijk"),
        limit=st.integers(0, 3),
        model=st.sampled_from("mx"),
        speed=st.sampled_from([None, 1.0, 1000.0]),
    )
    def come_or_change(self, name: str, limit: int, model: str, speed: float | None) -> None:
        known = name in self.limits
        self.limits[name] = limit
        changed = instance(name, limit, model, throughput_tokens_per_sec=speed)
        self.tell(Changed(changed) if known else Joined(changed))

    @precondition(lambda self: self.limits)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.limits)))
        del self.limits[name]
        self.running = {request: target for request, target in self.running.items() if target != name}
        self.tell(Left(name, Reason("gone")))

    @precondition(lambda self: self.limits)
    @rule(data=st.data(), running=st.integers(0, 3))
    def measure(self, data: st.DataObject, running: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.limits)))
        self.tell(Measured(name, Metrics(running_requests_size=running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["end", "fail", "fail for good", "cancel", "begin"]))
    def run(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        if how == "begin":
            self.tell(FirstToken(name))
            return
        del self.running[name]
        if how in ("end", "cancel"):
            self.outcomes[name] += 1
        events: dict[str, DispatcherEvent] = {
            "end": Ended(name, 5),
            "cancel": Cancelled(name),
            "fail": Failed(name, Reason("reset")),
            "fail for good": Failed(name, Reason("reset"), retry=False),
        }
        self.tell(events[how])

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.tell(TimerFired())

    @invariant()
    def everybody_is_in_exactly_one_place(self) -> None:
        if self.count:
            assert max(self.outcomes.values(), default=0) <= 1, "ended twice"
            waiting = {waiting.request_id for waiting in self.dispatcher.waiting()}
            assert not waiting & self.running.keys()
            assert not (waiting | self.running.keys()) & self.outcomes.keys()
            assert len(waiting) + len(self.running) + len(self.outcomes) == self.count
            assert len(self.dispatcher) == len(waiting) + len(self.running)
            assert len(self.dispatcher.ledger) == len(self.running)

    @invariant()
    def loads_are_what_runs(self) -> None:
        if self.count:
            mine = Counter(self.running.values())
            for endpoint in self.dispatcher.fleet.roster:
                load = self.dispatcher.fleet.roster.column(LOAD)[endpoint.row]
                assert load >= mine[str(endpoint)]

    def teardown(self) -> None:
        if self.count:
            for name in list(self.running):
                self.running.pop(name)
                self.outcomes[name] += 1
                self.tell(Ended(name))
            self.now += 1000
            self.tell(TimerFired())
            while self.running:
                name, _ = self.running.popitem()
                self.outcomes[name] += 1
                self.tell(Ended(name))
            self.tell(ShuttingDown())
            assert sum(self.outcomes.values()) == len(self.outcomes) == self.count, "a request never left"


TestFire = Fire.TestCase
TestFire.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("limit", [1, 3])
def test_no_instance_is_filled_beyond_its_limit(limit: int) -> None:
    dispatcher = fifo(*(instance(f"i{n}", limit) for n in range(4)))
    running: Counter[str] = Counter()
    where: dict[str, str] = {}
    for n in range(200):
        commands = arrive(dispatcher, f"r{n}", now=float(n))
        if n % 3 and where:
            name, target = where.popitem()
            running[target] -= 1
            commands += dispatcher.handle(Ended(name), float(n))
        for name, target in sent(commands):
            where[name] = target
            running[target] += 1
        assert max(running.values()) <= limit

"""The manager with policies of all kinds, with callbacks, and with anything in any order."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pointsman.errors import ConfigError
from pointsman.routing.events import Outcome, Refusal
from pointsman.runtimes.inprocess import ControlPlaneManager
from pointsman.strategies import FIFOPolicy, SchedulingPolicy
from pointsman.types import ExecutionInstance, RequestMetadata, RequestPriority, SchedulingDecision
from tests.properties import examples
from tests.runtimes.planes import Plane, instance, sent

# Policies


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fifi", 'there is no scheduling policy "fifi"; did you mean "fifo"?'),
        ("slo_aware", 'did you mean "slo-aware"'),
        ("no.such.module:Policy", 'there is no module "no'),
        ("pointsman.strategies:FIFOPolic", 'has no "FIFOPolic"; did you mean "FIFOPolicy"'),
        ("pointsman.types:RequestPriority", "is not a scheduling policy"),
    ],
)
def test_an_unknown_policy_is_an_error_that_names_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ControlPlaneManager(name)
    assert message in str(caught.value)


def test_parameters_are_those_of_configuration() -> None:
    manager = ControlPlaneManager("slo-aware", parameters={"urgentBelowMs": 5})
    assert manager.policy.name == "slo-aware"
    with pytest.raises(ConfigError, match="urgentBelowMs"):
        ControlPlaneManager("slo-aware", parameters={"urgentBelow": 5})


@pytest.mark.parametrize("name", ["fifo", "priority", "slo-aware", "cost-optimized", "adaptive"])
def test_every_built_in_policy_serves_and_has_nothing_to_note(name: str) -> None:
    plane = Plane(name, instance("i", limit=2))
    assert plane.submit("a", "b", "c") == [("a", "i"), ("b", "i")]
    assert sent(plane.manager.completed("a")) == [("c", "i")]
    assert plane.manager.notes == []


@pytest.mark.parametrize("policy", ["slo-aware", "adaptive"])
@pytest.mark.parametrize(
    ("overdue_first", "expected"), [(False, ["later", "soon", "never"]), (True, ["soon", "later"])]
)
def test_an_overdue_request_takes_no_place_from_one_that_can_be_saved(
    policy: str, overdue_first: bool, expected: list[str]
) -> None:
    plane = Plane(policy, instance("i"), parameters={"overdueFirst": overdue_first})
    plane.submit("running")
    plane.submit("never")
    plane.submit("soon", slo_deadline_ms=1000.0)
    plane.submit("later", slo_deadline_ms=60_000.0)
    plane.clock.now += 5
    went = [name for name, _ in sent(plane.manager.completed("running"))]
    for _ in expected[1:]:
        went += [name for name, _ in sent(plane.manager.completed(went[-1]))]
    assert went == expected


OWN = """
from pointsman.strategies import SchedulingPolicy
from pointsman.types import SchedulingDecision


class LastComeFirst(SchedulingPolicy):
    def __init__(self, most: int = 1) -> None:
        self.most = most

    def schedule(self, requests, instances):
        free = [one for one in instances if one.current_load < one.max_concurrency]
        pairs = zip(list(reversed(requests))[: self.most], free)
        return [SchedulingDecision(request.request_id, one.instance_id, reason="last") for request, one in pairs]
"""


@pytest.fixture
def own_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_manager_policies.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_manager_policies:LastComeFirst"
    sys.modules.pop("my_manager_policies", None)


def test_a_user_policy_by_name(own_policy: str) -> None:
    plane = Plane(own_policy, instance("i"), instance("j"), parameters={"most": 2})
    assert plane.manager.policy.name == "last-come-first"
    assert [name for name, _ in plane.submit("a", "b", "c")] == ["c", "b"]
    [note] = plane.manager.notes
    assert note.startswith('policy "last-come-first" has its own schedule() or prioritize()')
    assert [name for name, _ in sent(plane.manager.completed("c"))] == ["a"]
    metrics = plane.manager.metrics()
    assert metrics["decisions_by_strategy"] == {"last-come-first": 3}
    assert (metrics["broken_promises"], metrics["policy_errors"]) == ({}, {})
    assert plane.manager.explain("a").strategy == "last-come-first"


class ShortestFirst(FIFOPolicy):
    """Its own order of the waiting requests; FIFO chooses the instance."""

    def prioritize(self, requests: list[RequestMetadata]) -> list[RequestMetadata]:
        return sorted(requests, key=lambda request: request.prompt_bytes)


def test_a_user_order() -> None:
    plane = Plane(ShortestFirst(), instance("i"))
    plane.submit("first", prompt="x")
    plane.submit("long", prompt="x" * 100)
    plane.submit("short", prompt="x" * 10)
    assert sent(plane.manager.completed("first")) == [("short", "i")]
    assert sent(plane.manager.completed("short")) == [("long", "i")]
    assert len(plane.manager.notes) == 1


class ByDeadline(FIFOPolicy):
    """Its key is None for some requests, and cannot be compared."""

    def order(self, request: RequestMetadata) -> Any:
        return request.slo_deadline_ms


def test_an_order_that_cannot_be_compared_refuses_only_that_request() -> None:
    plane = Plane(ByDeadline(), instance("i"))
    plane.submit("a")
    plane.submit("b")
    plane.submit("c", slo_deadline_ms=5.0)
    assert plane.refused() == [("c", Outcome.REJECTED_OTHER)]
    assert sent(plane.manager.completed("a")) == [("b", "i")]
    assert plane.manager.completed("b") == []
    assert plane.manager.metrics()["outcomes"] == {"RejectedOther": 1, "served": 2}


class Herding(SchedulingPolicy):
    """Sends every request to the first instance, full or not, and ignores budgets."""

    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        return [SchedulingDecision(one.request_id, instances[0].instance_id) for one in requests]


def test_a_policy_that_breaks_its_contract_does_no_harm() -> None:
    plane = Plane(Herding(), instance("i", limit=2), instance("j", limit=2))
    assert plane.submit("a", "b", "c") == [("a", "i"), ("b", "i"), ("c", "j")]
    assert plane.manager.metrics()["broken_promises"] == {"full": 1}
    assert plane.waiting() == []


def test_a_burst_leaves_no_instance_idle_whatever_the_policy_counts() -> None:
    plane = Plane(Herding(), instance("i", limit=4), instance("j", limit=4))
    made = plane.submit(*(f"r{n}" for n in range(8)))
    assert [where for _, where in made] == ["i"] * 4 + ["j"] * 4
    assert plane.waiting() == []


def test_explain_shows_the_dropped_decision_and_what_decided_instead() -> None:
    plane = Plane(Herding(), instance("i", limit=1), instance("j", limit=1))
    plane.submit("a", "b")
    record = plane.manager.explain("b")
    assert (record.strategy, record.instance) == ("fifo", "j")
    dropped = record.as_dict()["dropped"]
    assert (dropped["code"], dropped["facts"]["policy"], dropped["facts"]["instance"]) == (
        "decision-dropped", "herding", "i",
    )  # fmt: skip
    assert 'policy "herding" chose "i", which was not carried out' in str(record)
    assert plane.manager.explain("a").dropped is None


def test_explain_of_a_waiting_request_shows_no_table_of_another_policy() -> None:
    plane = Plane(Herding(), instance("i", limit=1))
    plane.submit("a", "b")
    record = plane.manager.explain("b")
    assert (record.state, record.trace) == ("waiting", None)
    assert record.reasons()["i"].code == "full"
    assert "fifo" not in str(record)


class Idler(SchedulingPolicy):
    """Sends nothing."""

    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        return []


def test_explain_says_that_a_policy_left_a_request_waiting() -> None:
    plane = Plane(Idler(), instance("i"))
    plane.submit("a")
    assert plane.waiting() == ["a"]
    assert 'policy "idler" left it waiting, although an instance could take it' in str(plane.manager.explain("a"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (FIFOPolicy, "scheduling_policy is the class FIFOPolicy; make an object of it: FIFOPolicy()"),
        (int, "scheduling_policy: expected a SchedulingPolicy or the name of one, found the class int"),
        (42, "scheduling_policy: expected a SchedulingPolicy or the name of one, found 42"),
        (None, "scheduling_policy: expected a SchedulingPolicy or the name of one, found None"),
    ],
)
def test_objects_that_are_no_policies_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ControlPlaneManager(wrong)
    assert message in str(caught.value)
    manager = ControlPlaneManager("fifo")
    with pytest.raises(ConfigError):
        manager.update_policy(wrong)
    assert manager.policy.name == "fifo", "bad input loses nothing"


def test_objects_that_are_no_requests_or_instances_are_refused() -> None:
    manager = ControlPlaneManager("fifo")
    with pytest.raises(TypeError, match="expected a RequestMetadata, found a str"):
        manager.submit("a")  # type: ignore[arg-type]
    for call in (manager.register_instance, manager.update_instance):
        with pytest.raises(TypeError, match="expected an ExecutionInstance, found a dict"):
            call({"instance_id": "i"})  # type: ignore[arg-type]


def test_the_policy_changes_live_and_keeps_requests_and_records() -> None:
    plane = Plane("fifo", instance("i", limit=1))
    plane.submit("a", "b")
    plane.submit("c", priority=RequestPriority.CRITICAL)
    assert plane.manager.update_policy("priority") == []
    assert plane.manager.policy.name == "priority"
    assert plane.waiting() == ["c", "b"]
    assert plane.manager.explain("a").state == "running"
    assert sent(plane.manager.completed("a")) == [("c", "i")]


def test_a_policy_that_sends_more_sends_at_once_when_it_takes_over() -> None:
    plane = Plane(Idler(), instance("i"))
    plane.submit("a")
    assert sent(plane.manager.update_policy(FIFOPolicy())) == [("a", "i")]


def test_fifo_decides_while_a_policy_raises() -> None:
    plane = Plane(Herding())
    plane.submit("a")
    assert plane.manager.metrics()["policy_errors"] == {"herding: IndexError: list index out of range": 1}
    plane.manager.register_instance(instance("i"))
    assert sent(plane.manager.decisions()) == [("a", "i")]


def test_the_time_and_the_seed_of_a_policy_are_set_for_each_call() -> None:
    seen: list[tuple[float | None, int]] = []

    class Curious(SchedulingPolicy):
        def schedule(
            self, requests: list[RequestMetadata], instances: list[ExecutionInstance]
        ) -> list[SchedulingDecision]:
            seen.append((self.now, self.seed))
            return []

    plane = Plane(Curious(), instance("i"))
    plane.submit("a")
    plane.clock.now += 5
    plane.submit("b")
    assert [now for now, _ in seen] == [1000.0, 1005.0]
    assert seen[0][1] != seen[1][1]


# Callbacks


def test_a_callback_may_report_the_end_at_once_however_many_requests_wait() -> None:
    """A program that serves each request in its callback."""
    served: list[str] = []

    def serve(made: SchedulingDecision) -> None:
        served.append(made.request_id)
        plane.manager.completed(made.request_id)

    plane = Plane("fifo", on_decision=serve)
    names = [f"r{number}" for number in range(2000)]
    plane.submit(*names)
    plane.manager.register_instance(instance("i"))
    assert served == names
    assert plane.manager.metrics()["outcomes"] == {"served": 2000}


def test_a_callback_that_raises_loses_no_other_decision() -> None:
    delivered: list[str] = []

    def hear(made: SchedulingDecision) -> None:
        delivered.append(made.request_id)
        if made.request_id == "b":
            raise RuntimeError("no connection")

    plane = Plane("fifo", instance("i", limit=9), on_decision=hear)
    with pytest.raises(RuntimeError, match="no connection"):
        plane.submit("a", "b", "c")
    plane.manager.tick()
    assert delivered == ["a", "b", "c"]


# Anything in any order


class Lives(RuleBasedStateMachine):
    """Requests, failures, removals and time in any order: each request ends exactly once."""

    @initialize(policy=st.sampled_from(["fifo", "priority", "slo-aware", "adaptive", "own order", "own schedule"]))
    def start(self, policy: str) -> None:
        own: dict[str, SchedulingPolicy] = {"own order": ShortestFirst(), "own schedule": Herding()}
        self.running: dict[str, str] = {}
        self.ended: Counter[str] = Counter()
        self.limits: dict[str, int] = {}
        self.count = 0
        self.plane = Plane(
            own.get(policy, policy),
            on_decision=self.decided,
            on_refusal=self.refused,
            max_waiting=6,
            ttl_s=20,
            max_tries=2,
        )
        self.manager = self.plane.manager

    def decided(self, made: SchedulingDecision) -> None:
        assert made.request_id not in self.running, "sent twice"
        assert not self.ended[made.request_id], "sent after its end"
        self.running[made.request_id] = made.target_instance_id

    def refused(self, who: RequestMetadata, why: Refusal) -> None:
        assert who.request_id not in self.running, "refused while it runs"
        assert str(why.reason)
        self.ended[who.request_id] += 1

    @rule(
        number=st.integers(1, 4),
        priority=st.sampled_from(list(RequestPriority)),
        model=st.sampled_from(["", "m", "x"]),
        slo_ms=st.none() | st.sampled_from([0.0, 5000.0]),
        budget=st.none() | st.sampled_from([0.0, 10.0]),
    )
    def submit(self, number: int, priority: int, model: str, slo_ms: float | None, budget: float | None) -> None:
        names = [f"r{self.count + n}" for n in range(number)]
        self.count += number
        facts = {"priority": priority, "model_name": model, "slo_deadline_ms": slo_ms, "cost_budget": budget}
        self.plane.submit(*names, **facts)

    @rule(name=st.sampled_from("ijk"), limit=st.integers(0, 3), model=st.sampled_from("mx"), healthy=st.booleans())
    def register_or_update(self, name: str, limit: int, model: str, healthy: bool) -> None:
        told = instance(name, limit, model_name=model, can_accept_request=healthy, throughput_tokens_per_sec=100)
        known, self.limits[name] = name in self.limits, limit
        (self.manager.update_instance if known else self.manager.register_instance)(told)

    @precondition(lambda self: self.limits)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.limits)))
        del self.limits[name]
        self.running = {request: target for request, target in self.running.items() if target != name}
        self.manager.remove_instance(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["complete", "fail", "fail for good", "cancel", "begin"]))
    def run(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        if how == "begin":
            self.manager.first_token(name)
            return
        del self.running[name]
        if how == "complete":
            self.ended[name] += 1
            self.manager.completed(name, 5)
        elif how == "cancel":
            self.ended[name] += 1
            self.manager.cancel(name)
        else:
            self.manager.failed(name, "reset", retry=how == "fail")

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def cancel_what_waits(self, data: st.DataObject) -> None:
        waiting = self.plane.waiting()
        if waiting:
            name = data.draw(st.sampled_from(waiting))
            self.ended[name] += 1
            self.manager.cancel(name)

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds: float) -> None:
        self.plane.clock.now += seconds
        self.manager.tick()

    @invariant()
    def everybody_is_in_exactly_one_place(self) -> None:
        if not hasattr(self, "plane"):
            return
        assert max(self.ended.values(), default=0) <= 1, "ended twice"
        metrics = self.manager.metrics()
        ended = sum(self.ended.values())
        assert metrics["requests_arrived"] == self.count == metrics["waiting"] + metrics["running"] + ended
        assert metrics["running"] == len(self.running)
        assert sum(metrics["outcomes"].values()) == ended
        told = Counter(self.manager.explain(f"r{number}").state for number in range(self.count))
        assert told["waiting"] == metrics["waiting"]
        assert told["running"] == metrics["running"]

    def teardown(self) -> None:
        if not hasattr(self, "plane"):
            return
        self.manager.shut_down()
        for name in list(self.running):
            del self.running[name]
            self.ended[name] += 1
            self.manager.completed(name)
        assert sum(self.ended.values()) == len(self.ended) == self.count, "a request never ended"
        assert all(one.current_load == 0 for one in self.manager.instances())


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)

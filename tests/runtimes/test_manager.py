"""The manager, end to end, on a clock that is moved by hand."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pointsman.errors import ConfigError, UnknownName
from pointsman.routing.endpoints import Metrics
from pointsman.routing.outcomes import Outcome, Refusal
from pointsman.routing.topology import Nearness
from pointsman.runtimes.inprocess import ControlPlaneManager
from pointsman.strategies import FifoStrategy, SchedulingPolicy
from pointsman.types import ExecutionInstance, Priority, RequestMetadata, SchedulingDecision


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Plane:
    """A manager, its clock, and short ways to talk to it."""

    def __init__(self, policy: SchedulingPolicy | str = "fifo", *instances: ExecutionInstance, **settings: Any) -> None:
        self.clock = Clock()
        self.manager = ControlPlaneManager(policy, clock=self.clock, **settings)
        for one in instances:
            self.manager.register_instance(one)

    def submit(self, *names: str, **facts: Any) -> list[tuple[str, str]]:
        return sent(self.manager.submit(*(request(name, **facts) for name in names)))

    def refused(self) -> list[tuple[str, Outcome]]:
        return [(who.request_id, refusal.outcome) for who, refusal in self.manager.refusals()]

    def waiting(self) -> list[str]:
        return [unplaced.request.request_id for unplaced in self.manager.pending()]


def instance(name: str, limit: int | None = 1, **facts: Any) -> ExecutionInstance:
    told: dict[str, Any] = {"instance_id": name, "max_concurrency": limit, "model_name": "m"} | facts
    return ExecutionInstance(**told)


def request(name: str, **facts: Any) -> RequestMetadata:
    told: dict[str, Any] = {"request_id": name, "prompt": "hello", "model_name": "m"} | facts
    return RequestMetadata(**told)


def sent(decisions: list[SchedulingDecision]) -> list[tuple[str, str]]:
    return [(made.request_id, made.target_instance_id) for made in decisions]


# Decisions


def test_a_batch_is_decided_at_once_and_the_rest_when_there_is_room() -> None:
    plane = Plane("fifo", instance("i"), instance("j"))
    assert [name for name, _ in plane.submit("a", "b", "c")] == ["a", "b"]
    assert {where for _, where in sent(plane.manager.decisions())} == {"i", "j"}
    assert plane.manager.decisions() == [], "each is handed over once"
    [(name, _)] = sent(plane.manager.completed("a", output_tokens=3))
    assert name == "c"
    assert [name for name, _ in sent(plane.manager.decisions())] == ["c"]


def test_decisions_go_to_the_callback_if_there_is_one() -> None:
    heard: list[SchedulingDecision] = []
    refusals: list[tuple[str, Refusal]] = []
    plane = Plane(
        "fifo",
        instance("i"),
        on_decision=heard.append,
        on_refusal=lambda who, why: refusals.append((who.request_id, why)),
        max_waiting=1,
    )
    returned = plane.manager.submit(request("a"), request("b"))
    assert heard == returned
    assert plane.manager.decisions() == []
    assert [(name, why.outcome) for name, why in refusals] == [("b", Outcome.REJECTED_CAPACITY)]
    assert plane.manager.refusals() == []


def test_the_arrival_is_filled_in_unless_it_is_given() -> None:
    plane = Plane("fifo")
    plane.submit("a")
    plane.submit("b", arrival_time=990.0)
    assert [plane.manager.explain(name).arrived_at for name in "ab"] == [1000.0, 990.0]


def test_nothing_submitted_nothing_decided() -> None:
    plane = Plane("fifo", instance("i"))
    assert plane.manager.submit() == []
    assert plane.manager.tick() == []
    assert plane.manager.pending() == []


def test_news_of_requests_that_nobody_knows_changes_nothing() -> None:
    plane = Plane("fifo", instance("i"))
    manager = plane.manager
    before = manager.metrics()
    assert manager.completed("ghost") == manager.failed("ghost", "?") == manager.cancel("ghost") == []
    manager.first_token("ghost")
    assert manager.metrics() == before


def test_the_end_of_a_request_is_heard_once() -> None:
    plane = Plane("fifo", instance("i", limit=2))
    plane.submit("a")
    for _ in range(3):
        plane.manager.completed("a")
        plane.manager.failed("a", "late news")
        plane.manager.cancel("a")
    assert plane.manager.metrics()["outcomes"] == {"served": 1}
    assert plane.manager.instances()[0].current_load == 0


# Failures


def test_what_fails_goes_elsewhere_and_is_refused_when_it_has_failed_too_often() -> None:
    plane = Plane("fifo", instance("i"), instance("j"), instance("k"), max_tries=2)
    [(_, first)] = plane.submit("a")
    [(_, second)] = sent(plane.manager.failed("a", "connection refused"))
    assert first != second
    assert plane.manager.failed("a", "reset") == []
    [(who, refusal)] = plane.manager.refusals()
    assert (who.request_id, refusal.outcome, refusal.status) == ("a", Outcome.EVICTED_OTHER, 500)
    assert refusal.why == f'"{second}" failed at try 2 of 2: reset'
    told = plane.manager.explain("a")
    assert told.failures == [(first, "connection refused"), (second, "reset")]
    assert all(text in str(told) for text in (f"tried {first}: connection refused", f"tried {second}: reset"))
    assert plane.manager.metrics()["retries_by_instance"] == {first: 1, second: 1}


def test_what_must_not_be_tried_again_is_refused_at_once_and_says_so() -> None:
    plane = Plane("fifo", instance("i"), instance("j"))
    [(_, where)] = plane.submit("a")
    assert plane.manager.failed("a", "bad request", retry=False) == []
    [(_, refusal)] = plane.manager.refusals()
    assert refusal.why == f'"{where}" failed and must not be sent again: bad request'
    [(_, where)] = plane.submit("b")
    plane.manager.first_token("b")
    plane.manager.failed("b", "reset")
    [(_, refusal)] = plane.manager.refusals()
    assert refusal.why == f'"{where}" failed after part of the answer was out: reset'


def test_the_requests_of_a_removed_instance_keep_their_places() -> None:
    plane = Plane("fifo", instance("i", limit=2))
    plane.submit("a", "b", "c")
    plane.manager.remove_instance("i", "it crashed")
    assert plane.waiting() == ["a", "b", "c"]
    plane.manager.register_instance(instance("i", limit=2))
    assert sent(plane.manager.decisions())[2:] == [("a", "i"), ("b", "i")], "nobody else is there to take them"
    assert plane.waiting() == ["c"]
    plane.manager.completed("a")
    assert plane.manager.instances()[0].current_load == 2, "the new one counts only what is its own"


def test_the_requests_of_a_removed_instance_go_to_another_at_once() -> None:
    plane = Plane("fifo", instance("i"))
    plane.submit("a")
    plane.manager.register_instance(instance("j"))
    plane.manager.decisions()
    plane.manager.remove_instance("i")
    assert sent(plane.manager.decisions()) == [("a", "j")]


def test_waiting_too_long_is_noticed_when_time_passes() -> None:
    plane = Plane("fifo", instance("i"), ttl_s=30)
    plane.submit("a", "b")
    plane.clock.now += 29.9
    plane.manager.tick()
    assert plane.refused() == []
    plane.clock.now += 0.1
    plane.manager.tick()
    assert plane.refused() == [("b", Outcome.EVICTED_TTL)]
    assert plane.waiting() == []


def test_nobody_came() -> None:
    plane = Plane("fifo", ttl_s=30)
    plane.submit("a")
    plane.clock.now += 30
    plane.manager.tick()
    assert plane.refused() == [("a", Outcome.EVICTED_NO_ENDPOINTS)]


def test_shutting_down_refuses_what_waits_and_what_comes_and_lets_the_rest_end() -> None:
    plane = Plane("fifo", instance("i"))
    plane.submit("a", "b")
    plane.manager.shut_down()
    plane.submit("c")
    assert plane.refused() == [("b", Outcome.EVICTED_SHUTTING_DOWN), ("c", Outcome.EVICTED_SHUTTING_DOWN)]
    plane.manager.completed("a")
    assert plane.manager.metrics()["outcomes"] == {"EvictedShuttingDown": 2, "served": 1}


# Instances


def test_an_instance_that_is_registered_twice_is_an_error_and_nothing_is_lost() -> None:
    plane = Plane("fifo", instance("i"), ttl_s=10)
    plane.submit("a", "b")
    plane.clock.now += 10
    with pytest.raises(ConfigError, match="must be unique; given twice: i"):
        plane.manager.register_instance(instance("i", limit=99))
    assert plane.manager.instances()[0].max_concurrency == 1
    plane.manager.tick()
    assert plane.refused() == [("b", Outcome.EVICTED_TTL)], "its time was over when the error was found"


@pytest.mark.parametrize("what", ["update", "remove", "report", "nearness"])
def test_an_instance_that_nobody_knows_is_an_error_that_names_the_nearest(what: str) -> None:
    manager = Plane("fifo", instance("llama-0")).manager
    calls: dict[str, Any] = {
        "update": lambda: manager.update_instance(instance("lama-0")),
        "remove": lambda: manager.remove_instance("lama-0"),
        "report": lambda: manager.report_metrics("lama-0", Metrics()),
        "nearness": lambda: manager.nearness("llama-0", "lama-0"),
    }
    with pytest.raises(UnknownName, match='unknown instance "lama-0"; did you mean "llama-0"'):
        calls[what]()


def test_what_the_owner_and_the_engine_say_counts_at_once() -> None:
    plane = Plane("fifo", instance("i", can_accept_request=False))
    plane.submit("a", "b")
    plane.manager.update_instance(instance("i", limit=2))
    assert sent(plane.manager.decisions()) == [("a", "i"), ("b", "i")]
    plane.submit("c")
    plane.manager.completed("a")
    plane.manager.completed("b")
    plane.manager.completed("c")
    plane.manager.report_metrics("i", Metrics(running_requests_size=2))
    assert plane.submit("d") == []
    plane.manager.report_metrics("i", Metrics())
    assert sent(plane.manager.decisions())[-1] == ("d", "i")


def test_copies_of_the_instances_have_their_load() -> None:
    mine = instance("i", limit=4)
    plane = Plane("fifo", mine)
    plane.submit("a", "b")
    [copy] = plane.manager.instances()
    assert (copy.current_load, mine.current_load) == (2, 0)


def test_topology() -> None:
    labels = {"pointsman/rack": "r"}
    plane = Plane(
        "fifo",
        instance("a", host="h1", labels=labels | {"pointsman/nvlink-domain": "0"}),
        instance("b", host="h1", labels=labels | {"pointsman/nvlink-domain": "0"}),
        instance("c", host="h2", labels=labels),
    )
    assert plane.manager.topology() == {"r": {"h1": {"nvlink 0": ["a", "b"]}, "h2": {"(unknown)": ["c"]}}}
    assert plane.manager.nearness("a", "b") is Nearness.SAME_NVLINK
    assert plane.manager.nearness("a", "c") is Nearness.SAME_RACK


# Why


def test_what_waits_says_why() -> None:
    plane = Plane("fifo", instance("i"), instance("other", model_name="x"))
    plane.submit("a", "b")
    plane.submit("c", model_name="unheard-of")
    b, c = plane.manager.pending()
    assert b.request.request_id == "b"
    assert b.why == 'no instance can take "m": 2 instances: 1 serving another model, 1 full'
    assert b.reasons() == {"i": "full: 1 of 1 requests", "other": "serving another model"}
    assert c.why == 'no instance can take "unheard-of": 2 instances: 2 serving another model'


def test_what_waits_although_somebody_could_take_it_does_not_say_that_nobody_can() -> None:
    class Patient(SchedulingPolicy):
        def schedule(
            self, requests: list[RequestMetadata], instances: list[ExecutionInstance]
        ) -> list[SchedulingDecision]:
            return []

    plane = Plane(Patient(), instance("i"))
    plane.submit("a")
    [unplaced] = plane.manager.pending()
    assert unplaced.reasons() == {}
    assert "no instance can take" not in unplaced.why
    assert "next" in unplaced.why


def test_a_refused_request_names_every_instance_and_its_reason() -> None:
    plane = Plane(
        "fifo",
        instance("busy"),
        instance("closed", can_accept_request=False),
        instance("other", model_name="x"),
        instance("dear", limit=5, throughput_tokens_per_sec=1, price_per_gpu_hour=100),
        ttl_s=5,
    )
    plane.manager.report_metrics("busy", Metrics(running_requests_size=1))
    assert plane.submit("a", cost_budget=0.01, max_tokens=100) == []
    plane.clock.now += 5
    plane.manager.tick()
    told = plane.manager.explain("a")
    assert told.state == "refused"
    assert told.reasons() == {
        "busy": "has-room: full: 1 of 1 requests",
        "closed": "is-healthy: not accepting requests",
        "other": "serves-model: serving another model",
        "dear": "within-budget: over budget: would cost 2.83 of 0.01 (inf: unknown)",
    }
    lines = str(told).splitlines()
    for name, why in told.reasons().items():
        assert any(line.startswith(name) and why in line for line in lines), name
    data = told.as_dict()
    assert data["rejected"] == told.reasons()
    assert json.loads(json.dumps(data)) == data


def test_a_served_request_says_where_and_why() -> None:
    plane = Plane("fifo", instance("i", avg_latency_ms=100), instance("j", current_load=1, limit=4))
    plane.submit("a")
    plane.manager.completed("a", output_tokens=9)
    told = plane.manager.explain("a")
    assert (told.state, told.output_tokens) == ("served", 9)
    assert "sent to i: fifo: least loaded of 2 (0 of 1 running, about 100 ms)" in str(told)
    assert "least-loaded x1" in str(told)


def test_a_request_that_nobody_knows_is_an_error_that_names_the_nearest() -> None:
    plane = Plane("fifo")
    plane.submit("request-1")
    with pytest.raises(UnknownName, match='unknown request "reqest-1"; did you mean "request-1"'):
        plane.manager.explain("reqest-1")


def test_every_metric() -> None:
    plane = Plane("fifo", instance("i"), instance("j"), instance("x", model_name="x"), max_tries=2, ttl_s=60)
    [(_, first), (_, second)] = plane.submit("a", "b", slo_deadline_ms=1500.0)
    plane.submit("late", "gone", slo_deadline_ms=2000.0)
    plane.clock.now += 1
    plane.manager.completed("a", 5)  # the place goes to "late"
    plane.clock.now += 1
    plane.manager.completed("b", 5)  # too late by half a second; the place goes to "gone"
    plane.manager.failed("gone", "reset")  # the other instance is taken: it waits
    plane.submit("w1", "w2")  # the first takes the place that failed the other
    plane.manager.cancel("w1")  # and the second takes it then
    plane.submit("w2")  # an id that is under way
    buckets = {"0.001": 4, "0.005": 4, "0.01": 4, "0.05": 4, "0.1": 4, "0.5": 4, "1.0": 5, "5.0": 6, "10.0": 6}
    by_instance = plane.manager.metrics()["waiting_seconds_by_instance"]
    assert {name: (waited["count"], waited["sum"]) for name, waited in by_instance.items()} == {
        first: (2, 1.0),
        second: (4, 2.0),
    }
    assert plane.manager.metrics() == {
        "requests_arrived": 7,
        "decisions": 6,
        "decisions_by_strategy": {"fifo": 6},
        "decisions_by_instance": {first: 2, second: 4},
        "outcomes": {"served": 2, "EvictedContextCancelled": 1, "RejectedOther": 1},
        "retries_by_instance": {second: 1},
        "waiting_seconds": {
            "fifo": {"count": 6, "sum": 3.0, "buckets": {**buckets, "30.0": 6, "60.0": 6, "+Inf": 6}},
        },
        "waiting_seconds_by_instance": by_instance,
        "slo_attainment": 0.5,
        "slo_attainment_by_strategy": {"fifo": 0.5},
        "slo_attainment_by_instance": {first: 1.0, second: 0.0},
        "broken_promises": {},
        "policy_errors": {},
        "waiting": 1,
        "running": 2,
        "instances": 3,
    }
    json.dumps(plane.manager.metrics())


# Policies


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fifi", 'there is no scheduling policy "fifi"; did you mean "fifo"?'),
        ("slo_aware", 'did you mean "slo-aware"'),
        ("no.such.module:Policy", 'there is no module "no'),
        ("pointsman.strategies:FifoStrat", 'has no "FifoStrat"; did you mean "FifoStrategy"'),
        ("pointsman.types:Priority", "is not a scheduling policy"),
    ],
)
def test_a_policy_that_nobody_has_is_an_error_that_names_the_nearest(name: str, message: str) -> None:
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


def test_a_policy_of_ones_own_by_name(own_policy: str) -> None:
    plane = Plane(own_policy, instance("i"), instance("j"), parameters={"most": 2})
    assert plane.manager.policy.name == "last-come-first"
    assert [name for name, _ in plane.submit("a", "b", "c")] == ["c", "b"]
    [note] = plane.manager.notes
    assert note.startswith('policy "last-come-first" has a schedule() or prioritize() of its own')
    assert [name for name, _ in sent(plane.manager.completed("c"))] == ["a"]
    metrics = plane.manager.metrics()
    assert metrics["decisions_by_strategy"] == {"last-come-first": 3}
    assert (metrics["broken_promises"], metrics["policy_errors"]) == ({}, {})
    assert plane.manager.explain("a").strategy == "last-come-first"


class ShortestFirst(FifoStrategy):
    """Its own order of everything that waits; who takes it, FIFO says."""

    def prioritize(self, requests: list[RequestMetadata]) -> list[RequestMetadata]:
        return sorted(requests, key=lambda request: request.prompt_bytes)


def test_an_order_of_ones_own() -> None:
    plane = Plane(ShortestFirst(), instance("i"))
    plane.submit("first", prompt="x")
    plane.submit("long", prompt="x" * 100)
    plane.submit("short", prompt="x" * 10)
    assert sent(plane.manager.completed("first")) == [("short", "i")]
    assert sent(plane.manager.completed("short")) == [("long", "i")]
    assert len(plane.manager.notes) == 1


class ByDeadline(FifoStrategy):
    """Forgets that a request may have none, and nothing can be compared with that."""

    def order(self, request: RequestMetadata) -> Any:
        return request.slo_deadline_ms


def test_an_order_that_cannot_be_compared_refuses_the_request_and_nothing_else() -> None:
    plane = Plane(ByDeadline(), instance("i"))
    plane.submit("a")
    plane.submit("b")
    plane.submit("c", slo_deadline_ms=5.0)
    assert plane.refused() == [("c", Outcome.REJECTED_OTHER)]
    assert sent(plane.manager.completed("a")) == [("b", "i")]
    assert plane.manager.completed("b") == []
    assert plane.manager.metrics()["outcomes"] == {"RejectedOther": 1, "served": 2}


class Herding(SchedulingPolicy):
    """Sends everything to the first instance, full or not, and knows no budget."""

    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        return [SchedulingDecision(one.request_id, instances[0].instance_id) for one in requests]


def test_a_policy_that_breaks_its_promises_does_no_harm() -> None:
    plane = Plane(Herding(), instance("i", limit=2), instance("j", limit=2))
    assert plane.submit("a", "b", "c") == [("a", "i"), ("b", "i")]
    assert plane.manager.metrics()["broken_promises"] == {
        'instance "i" may not be chosen: full: 2 of 2 requests': 1,
    }
    assert plane.waiting() == ["c"]


def test_fifo_stands_in_while_a_policy_raises() -> None:
    plane = Plane(Herding())
    plane.submit("a")
    assert plane.manager.metrics()["policy_errors"] == {"herding: IndexError: list index out of range": 1}
    plane.manager.register_instance(instance("i"))
    assert sent(plane.manager.decisions()) == [("a", "i")]


def test_the_time_and_the_dice_of_a_policy_are_set_for_each_call() -> None:
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


def test_a_callback_may_report_the_end_at_once_however_much_waits() -> None:
    """A program that serves requests one after the other in its callback."""
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


def test_a_callback_that_raises_loses_nobody_elses_decision() -> None:
    heard: list[str] = []

    def hear(made: SchedulingDecision) -> None:
        heard.append(made.request_id)
        if made.request_id == "b":
            raise RuntimeError("no connection")

    plane = Plane("fifo", instance("i", limit=9), on_decision=hear)
    with pytest.raises(RuntimeError, match="no connection"):
        plane.submit("a", "b", "c")
    plane.manager.tick()
    assert heard == ["a", "b", "c"]


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
        assert why.why
        self.ended[who.request_id] += 1

    @rule(
        number=st.integers(1, 4),
        priority=st.sampled_from(list(Priority)),
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
        assert sum(self.ended.values()) == len(self.ended) == self.count, "somebody never left"
        assert all(one.current_load == 0 for one in self.manager.instances())


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

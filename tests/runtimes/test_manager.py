"""The manager, end to end, on a clock that is moved by hand."""

import json
from typing import Any

import pytest

from pointsman.errors import ConfigError, UnknownName
from pointsman.routing.endpoints import Metrics
from pointsman.routing.events import Outcome, Refusal
from pointsman.routing.topology import Nearness
from pointsman.strategies import SchedulingPolicy
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision
from tests.runtimes.planes import Plane, instance, request, sent

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
    delivered: list[SchedulingDecision] = []
    refusals: list[tuple[str, Refusal]] = []
    plane = Plane(
        "fifo",
        instance("i"),
        on_decision=delivered.append,
        on_refusal=lambda request, why: refusals.append((request.request_id, why)),
        max_waiting=1,
    )
    returned = plane.manager.submit(request("a"), request("b"))
    assert delivered == returned
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


def test_events_of_unknown_requests_change_nothing() -> None:
    plane = Plane("fifo", instance("i"))
    manager = plane.manager
    before = manager.metrics()
    assert manager.completed("ghost") == manager.failed("ghost", "?") == manager.cancel("ghost") == []
    manager.first_token("ghost")
    assert manager.metrics() == before


def test_the_end_of_a_request_counts_once() -> None:
    plane = Plane("fifo", instance("i", limit=2))
    plane.submit("a")
    for _ in range(3):
        plane.manager.completed("a")
        plane.manager.failed("a", "late news")
        plane.manager.cancel("a")
    assert plane.manager.metrics()["outcomes"] == {"served": 1}
    assert plane.manager.instances()[0].current_load == 0


# Failures


def test_a_failed_request_goes_elsewhere_until_tries_run_out() -> None:
    plane = Plane("fifo", instance("i"), instance("j"), instance("k"), max_tries=2)
    [(_, first)] = plane.submit("a")
    [(_, second)] = sent(plane.manager.failed("a", "connection refused"))
    assert first != second
    assert plane.manager.failed("a", "reset") == []
    [(refused, refusal)] = plane.manager.refusals()
    assert (refused.request_id, refusal.outcome, refusal.status) == ("a", Outcome.EVICTED_OTHER, 500)
    assert str(refusal.reason) == f'"{second}" failed at try 2 of 2: reset'
    record = plane.manager.explain("a")
    told = [(one, str(why)) for one, why in record.failures]
    assert told == [(first, "connection refused"), (second, "reset")]
    assert all(text in str(record) for text in (f"tried {first}: connection refused", f"tried {second}: reset"))
    assert plane.manager.metrics()["retries_by_instance"] == {first: 1, second: 1}


def test_a_request_that_must_not_be_retried_is_refused_with_a_reason() -> None:
    plane = Plane("fifo", instance("i"), instance("j"))
    [(_, where)] = plane.submit("a")
    assert plane.manager.failed("a", "bad request", retry=False) == []
    [(_, refusal)] = plane.manager.refusals()
    assert str(refusal.reason) == f'"{where}" failed and must not be sent again: bad request'
    [(_, where)] = plane.submit("b")
    plane.manager.first_token("b")
    plane.manager.failed("b", "reset")
    [(_, refusal)] = plane.manager.refusals()
    assert str(refusal.reason) == f'"{where}" failed after part of the answer had been sent: reset'


def test_the_requests_of_a_removed_instance_keep_their_positions() -> None:
    plane = Plane("fifo", instance("i", limit=2))
    plane.submit("a", "b", "c")
    plane.manager.remove_instance("i", "it crashed")
    assert plane.waiting() == ["a", "b", "c"]
    plane.manager.register_instance(instance("i", limit=2))
    assert sent(plane.manager.decisions()) == [("a", "i"), ("b", "i")], "there is no other instance"
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


def test_a_tick_expires_requests_that_waited_too_long() -> None:
    plane = Plane("fifo", instance("i"), ttl_s=30)
    plane.submit("a", "b")
    plane.clock.now += 29.9
    plane.manager.tick()
    assert plane.refused() == []
    plane.clock.now += 0.1
    plane.manager.tick()
    assert plane.refused() == [("b", Outcome.EVICTED_TTL)]
    assert plane.waiting() == []


def test_a_request_without_instances_expires() -> None:
    plane = Plane("fifo", ttl_s=30)
    plane.submit("a")
    plane.clock.now += 30
    plane.manager.tick()
    assert plane.refused() == [("a", Outcome.EVICTED_NO_ENDPOINTS)]


def test_shutting_down_refuses_waiting_and_new_requests_and_lets_the_rest_end() -> None:
    plane = Plane("fifo", instance("i"))
    plane.submit("a", "b")
    plane.manager.shut_down()
    plane.submit("c")
    assert plane.refused() == [("b", Outcome.EVICTED_SHUTTING_DOWN), ("c", Outcome.EVICTED_SHUTTING_DOWN)]
    plane.manager.completed("a")
    assert plane.manager.metrics()["outcomes"] == {"EvictedShuttingDown": 2, "served": 1}


# Instances


def test_registering_an_instance_twice_is_an_error_and_loses_nothing() -> None:
    plane = Plane("fifo", instance("i"), ttl_s=10)
    plane.submit("a", "b")
    plane.clock.now += 10
    with pytest.raises(ConfigError, match="must be unique; given twice: i"):
        plane.manager.register_instance(instance("i", limit=99))
    assert plane.manager.instances()[0].max_concurrency == 1
    plane.manager.tick()
    assert plane.refused() == [("b", Outcome.EVICTED_TTL)], "its time was over when the error was found"


@pytest.mark.parametrize("what", ["update", "remove", "report", "nearness"])
def test_an_unknown_instance_is_an_error_that_names_the_nearest(what: str) -> None:
    manager = Plane("fifo", instance("llama-0")).manager
    calls: dict[str, Any] = {
        "update": lambda: manager.update_instance(instance("lama-0")),
        "remove": lambda: manager.remove_instance("lama-0"),
        "report": lambda: manager.report_metrics("lama-0", Metrics()),
        "nearness": lambda: manager.nearness("llama-0", "lama-0"),
    }
    with pytest.raises(UnknownName, match='unknown instance "lama-0"; did you mean "llama-0"'):
        calls[what]()


def test_updates_and_metrics_count_at_once() -> None:
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


def test_pending_requests_say_why() -> None:
    plane = Plane("fifo", instance("i"), instance("other", model_name="x"))
    plane.submit("a", "b")
    plane.submit("c", model_name="unheard-of")
    b, c = plane.manager.pending()
    assert b.request.request_id == "b"
    assert str(b.why) == 'no instance can take "m": 2 instances: 1 serving another model, 1 full'
    assert {name: str(why) for name, why in b.reasons().items()} == {
        "i": "full: 1 of 1 requests",
        "other": "serving another model",
    }
    assert str(c.why) == 'no instance can take "unheard-of": 2 instances: 2 serving another model'


def test_a_pending_request_that_an_instance_could_take_does_not_claim_otherwise() -> None:
    class Patient(SchedulingPolicy):
        def schedule(
            self, requests: list[RequestMetadata], instances: list[ExecutionInstance]
        ) -> list[SchedulingDecision]:
            return []

    plane = Plane(Patient(), instance("i"))
    plane.submit("a")
    [unplaced] = plane.manager.pending()
    assert unplaced.reasons() == {}
    assert str(unplaced.why) == 'policy "patient" left it waiting, although an instance could take it'


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
    record = plane.manager.explain("a")
    assert record.state == "refused"
    assert {name: str(why) for name, why in record.reasons().items()} == {
        "busy": "full: 1 of 1 requests",
        "closed": "not accepting requests",
        "other": "serving another model",
        "dear": "over budget: would cost 2.83, the budget is 0.01",
    }
    lines = str(record).splitlines()
    for name, why in record.reasons().items():
        assert any(line.startswith(name) and str(why) in line for line in lines), name
    data = record.as_dict()
    assert {name: one["filter"] for name, one in data["rejected"].items()} == {
        "busy": "has-room",
        "closed": "is-healthy",
        "other": "serves-model",
        "dear": "within-budget",
    }
    assert data["rejected"]["busy"]["reason"] == {
        "code": "full",
        "facts": {"load": 1.0, "limit": 1.0},
        "text": "full: 1 of 1 requests",
    }
    assert json.loads(json.dumps(data)) == data


def test_a_served_request_says_where_and_why() -> None:
    plane = Plane("fifo", instance("i", avg_latency_ms=100), instance("j", current_load=1, limit=4))
    plane.submit("a")
    plane.manager.completed("a", output_tokens=9)
    record = plane.manager.explain("a")
    assert (record.state, record.output_tokens) == ("served", 9)
    assert "sent to i: fifo: least loaded of 2 (0 of 1 running, about 100 ms)" in str(record)
    assert "least-loaded x1" in str(record)


def test_an_unknown_request_is_an_error_that_names_the_nearest() -> None:
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


def test_decisions_and_refusals_that_are_not_taken_are_bounded() -> None:
    plane = Plane("fifo", instance("i"))
    for number in range(1000):
        plane.submit(f"r{number}")
        plane.manager.completed(f"r{number}")
    plane.submit("last")
    assert sent(plane.manager.decisions()) == [("last", "i")]


def test_a_decision_for_a_removed_instance_is_withdrawn() -> None:
    plane = Plane("fifo", instance("i"))
    plane.submit("a")
    plane.manager.remove_instance("i")
    assert plane.manager.decisions() == []
    plane.manager.register_instance(instance("j"))
    assert sent(plane.manager.decisions()) == [("a", "j")]

"""The story of each request, and the sums of all of them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.reasons import Reason
from pointsman.routing.endpoints import Endpoint, EndpointTable
from pointsman.routing.events import Outcome, Refusal
from pointsman.routing.filters.demands import Demands
from pointsman.routing.records import WAITING_BOUNDS_S, Counters, Histogram, Record, Records
from pointsman.selection import Cycle, MaxScorePicker, Profile, Scheduler, SchedulingFailure, Trace
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision

LATE = Refusal(Outcome.EVICTED_TTL, Reason("late", {"text": "waited too long"}))
BROKEN = Refusal(Outcome.EVICTED_OTHER, Reason("late", {"text": "the instance failed"}))
GONE = Refusal(Outcome.EVICTED_CANCELLED, Reason("client-gone"))
WHY = "fifo: least loaded of 1 (0 running)"
SENT = SchedulingDecision("r", "i", reason=WHY)


def record(**facts: Any) -> Record:
    """A record of a request that arrived at 10."""
    told = Records().open(RequestMetadata("r", model_name="m", slo_deadline_ms=facts.pop("deadline_ms", None)), 10.0)
    for name, value in facts.items():
        setattr(told, name, value)
    return told


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, "waiting"),
        ({"made": SENT, "sent_at": 11.0}, "running"),
        ({"made": SENT, "ended_at": 12.0}, "served"),
        ({"made": SENT, "ended_at": 12.0, "status": 400}, "failed"),
        ({"refusal": LATE, "ended_at": 12.0}, "refused"),
        ({"made": SENT, "refusal": LATE, "ended_at": 12.0, "first_token_at": 11.0}, "failed"),
        ({"refusal": BROKEN, "ended_at": 12.0}, "failed"),
        ({"made": SENT, "refusal": GONE, "ended_at": 12.0}, "abandoned"),
        ({"failures": [("i", Reason("reset"))], "sent_at": 11.0}, "waiting"),
    ],
)
def test_state(facts: dict[str, Any], state: str) -> None:
    told = record(**facts)
    assert told.state == state
    assert str(told).startswith(f'request "r" is {state}')


@pytest.mark.parametrize(
    ("facts", "met"),
    [
        ({"deadline_ms": None, "ended_at": 11.0}, None),
        ({"deadline_ms": 1000.0}, None),
        ({"deadline_ms": 1000.0, "ended_at": 11.0}, True),
        ({"deadline_ms": 1000.0, "ended_at": 11.001}, False),
        ({"deadline_ms": 1000.0, "ended_at": 10.5, "refusal": GONE}, False),
        ({"deadline_ms": 0.0, "ended_at": 10.0}, True),
        ({"deadline_ms": 1000.0, "ended_at": 10.5, "status": 400}, False),
    ],
)
def test_whether_the_deadline_was_met(facts: dict[str, Any], met: bool | None) -> None:
    assert record(**facts).met_deadline is met


def test_as_plain_data() -> None:
    told = record(
        made=SENT,
        strategy="fifo",
        sent_at=10.25,
        first_token_at=10.5,
        ended_at=12.0,
        output_tokens=7,
        failures=[("j", Reason("connection-reset"))],
        deadline_ms=5000.0,
    )
    assert told.as_dict() == {
        "request_id": "r",
        "model": "m",
        "tenant": "",
        "priority": 0,
        "state": "served",
        "status": None,
        "strategy": "fifo",
        "instance": "i",
        "tries": 2,
        "decision": {
            "request_id": "r",
            "target_instance_id": "i",
            "parallelism_strategy": "none",
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "estimated_latency_ms": None,
            "estimated_cost": None,
            "confidence": 1.0,
            "metadata": {},
            "reason": {"code": "policy", "facts": {"text": WHY}, "text": WHY},
        },
        "waited_ms": 250.0,
        "first_token_ms": 500.0,
        "total_ms": 2000.0,
        "input_tokens": 0,
        "cached_tokens": None,
        "output_tokens": 7,
        "deadline_ms": 5000.0,
        "met_deadline": True,
        "cost": None,
        "dropped": None,
        "predicted": None,
        "failed_tries": [
            {
                "instance": "j",
                "why": "the connection was reset",
                "reason": Reason("connection-reset").as_dict(),
            }
        ],
        "refusal": None,
        "unplaced": None,
        "rejected": {},
        "trace": None,
    }
    assert json.loads(json.dumps(told.as_dict())) == told.as_dict()
    assert str(told).splitlines() == [
        'request "r" is served',
        "sent to i: fifo: least loaded of 1 (0 running)",
        "tried j: the connection was reset",
        "waited 250.0 ms; first token after 500.0 ms; ended after 2000.0 ms; 0 tokens in, 7 out; "
        "met its deadline of 5000 ms",
    ]


def test_a_refused_request_has_a_reason_for_every_instance() -> None:
    fleet = EndpointTable(
        [
            ExecutionInstance(instance_id="full", model_name="m", max_concurrency=1, current_load=1),
            ExecutionInstance(instance_id="other", model_name="x"),
        ]
    )
    told, trace = record(refusal=LATE, ended_at=15.0), Trace()
    scheduler: Scheduler[Endpoint] = Scheduler([Profile("p", Demands(), MaxScorePicker())])
    failure = scheduler.run(Cycle(told.request, trace=trace), fleet.roster)
    assert isinstance(failure, SchedulingFailure)
    told.failure, told.trace = failure, trace
    assert told.reasons() == {
        "other": Reason("other-model"),
        "full": Reason("full", {"load": 1.0, "limit": 1.0}),
    }
    fleet.load.reserve(fleet["full"], 1.0)
    assert str(told.reasons()["full"]) == "full: 1 of 1 requests", "a reason stays as it was"
    data = told.as_dict()
    assert data["rejected"] == {
        "other": {
            "filter": "serves-model",
            "reason": {"code": "other-model", "facts": {}, "text": "serving another model"},
        },
        "full": {"filter": "has-room", "reason": told.reasons()["full"].as_dict()},
    }
    assert data["refusal"] == {
        "outcome": "EvictedTTL",
        "reason": {"code": "late", "facts": {"text": "waited too long"}, "text": "waited too long"},
    }
    assert data["waited_ms"] == data["total_ms"] == 5000.0
    assert json.loads(json.dumps(data)) == data
    text = str(told)
    assert "refused (EvictedTTL): waited too long" in text
    assert 'no instance can take "m": 2 instances: 1 serving another model, 1 full' in text
    assert all(
        any(name in line and str(why) in line for line in text.splitlines()) for name, why in told.reasons().items()
    )


# Records


def test_the_newest_are_kept() -> None:
    records = Records(limit=3)
    for number in range(5):
        records.open(RequestMetadata(f"r{number}"), float(number))
    assert len(records) == 3
    assert [told.request.request_id for told in records.newest()] == ["r4", "r3", "r2"]
    assert records.get("r0") is None
    kept = records.get("r2")
    assert kept is not None
    assert kept.arrived_at == 2.0


def test_an_id_used_again_is_a_new_story_and_the_newest() -> None:
    records = Records(limit=3)
    first = records.open(RequestMetadata("a"), 0.0)
    records.open(RequestMetadata("b"), 1.0)
    again = records.open(RequestMetadata("a"), 2.0)
    assert records.get("a") is again is not first
    assert sorted(told.request_id for told in records.newest()) == ["a", "a", "b"], "both were requests"
    records.open(RequestMetadata("c"), 3.0)
    assert records.get("a") is again
    assert len(records) == 3


def test_nothing_is_kept_if_nothing_may_be() -> None:
    records = Records(limit=0)
    assert records.open(RequestMetadata("a"), 0.0).state == "waiting"
    assert (len(records), records.get("a"), records.newest()) == (0, None, [])


def test_an_arrival_that_was_given_counts() -> None:
    assert Records().open(RequestMetadata("a", arrival_time=3.0), 5.0).arrived_at == 3.0
    assert Records().open(RequestMetadata("a", arrival_time=0.0), 5.0).arrived_at == 0.0


# Counters


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1.0, 5.0))
    for value in (0.0, 1.0, 1.5, 5.0, 5.1, 100.0):
        histogram.add(value)
    assert histogram.as_dict() == {
        "count": 6,
        "sum": pytest.approx(112.6),
        "buckets": {"1.0": 2, "5.0": 4, "+Inf": 6},
    }
    assert Histogram().as_dict()["count"] == 0


@given(st.lists(st.floats(0, 100)))
def test_buckets_only_grow_to_the_count(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    told = histogram.as_dict()
    buckets = list(told["buckets"].values())
    assert buckets == sorted(buckets)
    assert buckets[-1] == told["count"] == len(values)
    for bound, count in zip(WAITING_BOUNDS_S, buckets, strict=False):
        assert count == sum(value <= bound for value in values)


def test_prompts_are_not_kept() -> None:
    records = Records()
    record = records.open(RequestMetadata("r", "secret " * 1000, token_ids=tuple(range(9))), 1.0)
    assert (record.request.prompt, record.request.token_ids, record.request.input_tokens) == ("", None, 9)


def test_counters_of_nothing() -> None:
    assert Counters().as_dict() == {
        "requests_arrived": 0,
        "decisions": 0,
        "decisions_by_strategy": {},
        "decisions_by_instance": {},
        "outcomes": {},
        "retries_by_instance": {},
        "waiting_seconds": {},
        "waiting_seconds_by_instance": {},
        "slo_attainment": None,
        "slo_attainment_by_strategy": {},
        "slo_attainment_by_instance": {},
        "broken_promises": {},
        "policy_errors": {},
    }


def test_counters_add_up_by_strategy_and_by_instance() -> None:
    counters = Counters()
    for strategy, instance, waited in (("fifo", "i", 0.0), ("fifo", "j", 2.0), ("cost", "i", 0.5)):
        counters.dispatched(strategy, instance, waited)
    counters.ended("fifo", "i", "served", True)
    counters.ended("fifo", "j", "served", None)
    counters.ended("fifo", "", "EvictedTTL", False)
    counters.ended("cost", "i", "served", True)
    told = counters.as_dict()
    assert told["decisions"] == 3
    assert told["decisions_by_strategy"] == {"cost": 1, "fifo": 2}
    assert told["decisions_by_instance"] == {"i": 2, "j": 1}
    assert told["outcomes"] == {"served": 3, "EvictedTTL": 1}
    assert told["slo_attainment"] == pytest.approx(2 / 3)
    assert told["slo_attainment_by_strategy"] == {"cost": 1.0, "fifo": 0.5}
    assert told["slo_attainment_by_instance"] == {"i": 1.0}, "a request that was never sent counts for no instance"
    assert {name: waited["sum"] for name, waited in told["waiting_seconds"].items()} == {"fifo": 2.0, "cost": 0.5}
    assert {n: waited["sum"] for n, waited in told["waiting_seconds_by_instance"].items()} == {"i": 0.5, "j": 2.0}
    assert json.loads(json.dumps(told)) == told


def test_instances_that_have_left_are_counted_together() -> None:
    counters = Counters()
    for number in range(500):
        counters.dispatched("fifo", f"i{number}", 1.0)
        counters.ended("fifo", f"i{number}", "served", True)
        counters.retries[f"i{number}"] += 1
        counters.departed(f"i{number}")
    told = counters.as_dict()
    assert told["decisions_by_instance"] == told["retries_by_instance"] == {"(departed)": 500}
    assert told["slo_attainment_by_instance"] == {"(departed)": 1.0}
    assert told["waiting_seconds_by_instance"]["(departed)"]["sum"] == 500.0
    assert len(counters.accounts) == 1


def test_errors_are_counted_together_past_some_number_of_texts() -> None:
    counters = Counters()
    for number in range(500):
        counters.policy_error(f"KeyError: r{number}")
    assert len(counters.policy_errors) == 101
    assert counters.policy_errors["(others)"] == 400


def test_broken_promises_are_counted_by_code() -> None:
    counters = Counters()
    for number in range(500):
        counters.broken_promise(Reason("unknown-request", {"request_id": f"r{number}"}))
    counters.broken_promise(Reason("instance-not-allowed", {"instance": "i", "cause": Reason("full")}))
    assert counters.broken_promises == {"unknown-request": 500, "full": 1}

"""Decisions in numbers and words, and how those of a user's policy are checked."""

from typing import Any

import pytest

from pointsman.reasons import Reason
from pointsman.routing.decisions import Unplaced, decide, no_instance, vet
from pointsman.routing.endpoints import IN_FLIGHT_TOKENS, LOAD, Endpoint, EndpointTable
from pointsman.routing.filters.demands import Demands
from pointsman.selection import (
    Cycle,
    MaxScorePicker,
    Profile,
    ProfileFailure,
    Scheduler,
    SchedulingFailure,
)
from pointsman.types import ExecutionInstance, ParallelismType, RequestMetadata, SchedulingDecision


def instance(name: str, limit: int | None = 2, **facts: Any) -> ExecutionInstance:
    told: dict[str, Any] = {"instance_id": name, "model_name": "m", "max_concurrency": limit} | facts
    return ExecutionInstance(**told)


def request(name: str, **facts: Any) -> RequestMetadata:
    told: dict[str, Any] = {"request_id": name, "prompt": "x" * 40, "model_name": "m", "max_tokens": 10} | facts
    return RequestMetadata(**told)


def goes(name: str, where: str) -> SchedulingDecision:
    return SchedulingDecision(name, where)


FLEET = [
    instance("i"),
    instance("full", limit=1, current_load=1),
    instance("closed", can_accept_request=False),
    instance("other", model_name="x", adapters=frozenset({"tuned"})),
    instance("dear", throughput_tokens_per_sec=1, gpu_count=8, price_per_gpu_hour=100),
]


@pytest.mark.parametrize(
    ("made", "broken"),
    [
        (goes("a", "i"), None),
        (goes("ghost", "i"), 'request "ghost" was not waiting, or was decided before'),
        (goes("a", "nowhere"), 'there is no instance "nowhere"'),
        (goes("a", "full"), 'instance "full" may not be chosen: full: 1 of 1 requests'),
        (goes("a", "closed"), 'instance "closed" may not be chosen: not accepting requests'),
        (goes("a", "other"), 'instance "other" may not be chosen: serving another model'),
        (goes("any", "other"), None),
        (goes("tuned", "other"), None),
        (
            goes("poor", "i"),
            'instance "i" may not be chosen: over budget: its cost is not known, and the budget is 0.5',
        ),
        (goes("poor", "dear"), 'instance "dear" may not be chosen: over budget: would cost 4.44, the budget is 0.5'),
        (goes("rich", "dear"), None),
    ],
)
def test_each_promise(made: SchedulingDecision, broken: str | None) -> None:
    waiting = [
        request("a"),
        request("any", model_name=""),
        request("tuned", model_name="tuned"),
        request("poor", cost_budget=0.5),
        request("rich", cost_budget=5.0),
    ]
    good, bad = vet([made], waiting, EndpointTable(FLEET))
    assert good == ([made] if broken is None else [])
    assert [(one, str(why)) for one, why in bad] == ([] if broken is None else [(made, broken)])


def test_load_adds_up_and_the_fleet_counts_what_was_good() -> None:
    fleet = EndpointTable([instance("i", limit=2), instance("j", limit=1)])
    asked = [goes("a", "i"), goes("b", "i"), goes("c", "i"), goes("d", "j")]
    good, bad = vet(asked, [request(name) for name in "abcd"], fleet)
    assert good == [asked[0], asked[1], asked[3]]
    assert [(one, str(why)) for one, why in bad] == [
        (asked[2], 'instance "i" may not be chosen: full: 2 of 2 requests')
    ]
    assert list(fleet.roster.column(LOAD)) == [2, 1]
    assert list(fleet.roster.column(IN_FLIGHT_TOKENS)) == [20, 10]


def test_a_request_is_decided_once() -> None:
    good, bad = vet([goes("a", "i"), goes("a", "j")], [request("a")], EndpointTable([instance("i"), instance("j")]))
    assert [made.target_instance_id for made in good] == ["i"]
    assert [made.target_instance_id for made, _ in bad] == ["j"]


def test_nothing_decided_about_nothing() -> None:
    assert vet([], [], EndpointTable()) == ([], [])
    good, bad = vet([goes("a", "i")], [request("a")], EndpointTable())
    assert (good, bad) == ([], [(goes("a", "i"), Reason("unknown-instance", {"instance": "i"}))])


def test_an_instance_of_a_large_fleet_is_checked_by_itself() -> None:
    fleet = EndpointTable([instance(f"i{n}", limit=1, current_load=n % 2) for n in range(100)])
    good, bad = vet([goes("a", "i98"), goes("b", "i99")], [request("a"), request("b")], fleet)
    assert [made.request_id for made in good] == ["a"]
    assert str(bad[0][1]) == 'instance "i99" may not be chosen: full: 1 of 1 requests'


# In words


def failure(*instances: ExecutionInstance, **facts: Any) -> tuple[RequestMetadata, SchedulingFailure[Endpoint]]:
    asked = request("a", **facts)
    scheduler: Scheduler[Endpoint] = Scheduler([Profile("p", Demands(), MaxScorePicker())])
    result = scheduler.run(Cycle(asked), EndpointTable(instances).roster)
    assert isinstance(result, SchedulingFailure)
    return asked, result


@pytest.mark.parametrize(
    ("instances", "model", "text"),
    [
        ([], "m", 'no instance can take "m": there are no instances'),
        ([], "", "no instance can take this request: there are no instances"),
        (
            FLEET[1:4],
            "m",
            'no instance can take "m": 3 instances: 1 serving another model, 1 not accepting requests, 1 full',
        ),
        ([FLEET[1]] * 1, "", "no instance can take this request: 1 instance: 1 full"),
    ],
)
def test_why_no_instance_can_take_it(instances: list[ExecutionInstance], model: str, text: str) -> None:
    asked, why = failure(*instances, model_name=model)
    assert str(Unplaced(asked, why).why) == text


def test_every_instance_has_its_reason() -> None:
    unplaced = Unplaced(*failure(*FLEET, cost_budget=0.001))
    assert {name: str(why) for name, why in unplaced.reasons().items()} == {
        "i": "over budget: its cost is not known, and the budget is 0.001",
        "full": "full: 1 of 1 requests",
        "closed": "not accepting requests",
        "other": "serving another model",
        "dear": "over budget: would cost 4.44, the budget is 0.001",
    }


def test_a_failure_of_several_profiles_tells_them_all() -> None:
    none: ProfileFailure[Endpoint] = ProfileFailure("p", 0, [])
    assert str(no_instance(request("a"), SchedulingFailure("", {"p": none, "q": none}))) == (
        'no instance can take "m": there are no instances; there are no instances'
    )


def test_a_decision_says_what_is_expected_and_why() -> None:
    busy = instance(
        "i",
        limit=4,
        current_load=2,
        avg_latency_ms=100,
        throughput_tokens_per_sec=10,
        gpu_count=4,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
    )
    fleet = EndpointTable([instance("j"), busy])
    made = decide(
        request("a"), fleet["i"], fleet.roster.without([0]), 3.0, ("best-by-rule", "fifo", "least loaded", 1)
    ).decision
    assert (made.request_id, made.target_instance_id) == ("a", "i")
    assert made.parallelism_strategy is ParallelismType.HYBRID
    assert (made.tensor_parallel_size, made.pipeline_parallel_size) == (2, 2)
    assert made.estimated_latency_ms == pytest.approx(150.0)
    assert made.estimated_cost == pytest.approx(3 * 4 * 20 / 3600 / 10)
    assert str(made.reason) == "fifo: least loaded of 1 (2 of 4 running, about 150 ms)"


def test_a_decision_about_an_instance_of_which_nothing_is_known() -> None:
    fleet = EndpointTable([instance("i", limit=None)])
    made = decide(request("a"), fleet["i"], fleet.roster, 3.0, ("best-by-rule", "mine", "lightest", 1)).decision
    assert (made.estimated_latency_ms, made.estimated_cost, str(made.reason)) == (
        None,
        None,
        "mine: lightest of 1 (0 running)",
    )
    assert made.parallelism_strategy is ParallelismType.NONE

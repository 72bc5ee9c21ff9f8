"""What each strategy prefers, and what all of them promise."""

import copy
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.lab.check.cases import RequestCase, equal_case, random_case
from pointsman.routing.decisions import vet
from pointsman.routing.endpoints import EndpointTable
from pointsman.routing.filters.demands import Demands
from pointsman.routing.plugins import RequestCycle
from pointsman.selection import Cycle
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
from pointsman.types import ExecutionInstance, ParallelismType, RequestMetadata, RequestPriority
from tests.properties import examples

ALL: list[type[SchedulingPolicy]] = [
    FIFOPolicy,
    PriorityPolicy,
    SLOAwarePolicy,
    CostOptimizedPolicy,
    AdaptivePolicy,
    PowerOfTwoPolicy,
    PrefixPolicy,
]

FAST = ExecutionInstance(
    instance_id="fast",
    max_concurrency=8,
    current_load=4,
    avg_latency_ms=50,
    throughput_tokens_per_sec=2000,
    gpu_count=8,
)
IDLE = ExecutionInstance(
    instance_id="idle", max_concurrency=8, avg_latency_ms=400, throughput_tokens_per_sec=1500, gpu_count=4
)
CHEAP = ExecutionInstance(
    instance_id="cheap",
    max_concurrency=8,
    current_load=6,
    avg_latency_ms=900,
    throughput_tokens_per_sec=900,
    gpu_count=1,
)
FLEET = [FAST, IDLE, CHEAP]


def request(number: int = 0, **facts: object) -> RequestMetadata:
    return RequestMetadata(**{"request_id": f"r{number}", "max_tokens": 100, "arrival_time": float(number)} | facts)  # type: ignore[arg-type]


def target(policy: SchedulingPolicy, *requests: RequestMetadata) -> str:
    return policy.schedule(list(requests), FLEET)[0].target_instance_id


def order(policy: SchedulingPolicy, *requests: RequestMetadata) -> list[str]:
    return [ordered.request_id for ordered in policy.prioritize(list(requests))]


def test_fifo_takes_arrivals_in_order_and_the_least_loaded() -> None:
    assert order(FIFOPolicy(), request(2, priority=RequestPriority.CRITICAL), request(1), request(3)) == [
        "r1",
        "r2",
        "r3",
    ]
    assert target(FIFOPolicy(), request()) == "idle"


def test_power_of_two_takes_the_less_loaded_of_two_at_random() -> None:
    policy, taken = PowerOfTwoPolicy(), set()
    for policy.seed in range(50):
        taken.add(target(policy, request()))
    assert taken == {"idle", "fast"}, "of any two, the most loaded of all is never the less loaded"
    assert order(policy, request(2, priority=RequestPriority.CRITICAL), request(1)) == ["r1", "r2"]


@pytest.mark.parametrize(
    ("priority", "expected"),
    [
        (RequestPriority.CRITICAL, "fast"),
        (RequestPriority.HIGH, "fast"),
        (RequestPriority.NORMAL, "idle"),
        (RequestPriority.LOW, "idle"),
        (RequestPriority.BACKGROUND, "idle"),
    ],
)
def test_priority_gives_the_fastest_to_important_requests(priority: RequestPriority, expected: str) -> None:
    assert target(PriorityPolicy(), request(priority=priority)) == expected


def test_priority_goes_highest_first_then_by_arrival() -> None:
    requests = [request(n, priority=p) for n, p in enumerate([0, 2, -1, 2, 1])]
    assert order(PriorityPolicy(), *requests) == ["r1", "r3", "r4", "r0", "r2"]


def test_priority_with_aging_lets_old_requests_overtake() -> None:
    old_and_low, new_and_high = request(0, priority=-1), request(100, priority=1)
    assert order(PriorityPolicy(), old_and_low, new_and_high) == ["r100", "r0"]
    assert order(PriorityPolicy(aging_s=10), old_and_low, new_and_high) == ["r0", "r100"]


def test_slo_aware_goes_nearest_deadline_first_and_those_without_last() -> None:
    requests = [request(0), request(1, slo_deadline_ms=9000), request(2, slo_deadline_ms=100)]
    assert order(SLOAwarePolicy(), *requests) == ["r2", "r1", "r0"]


def test_slo_aware_puts_overdue_requests_behind_those_that_can_be_saved() -> None:
    requests = [
        request(0),
        request(1, slo_deadline_ms=9000),
        request(2, slo_deadline_ms=100),
        request(3, slo_deadline_ms=50),
    ]
    for policy, expected in (
        (SLOAwarePolicy(), ["r1", "r2", "r3", "r0"]),
        (SLOAwarePolicy(overdue_first=True), ["r2", "r3", "r1", "r0"]),
    ):
        policy.now = 5.0
        assert order(policy, *requests) == expected


@pytest.mark.parametrize(
    ("facts", "now", "expected", "words"),
    [
        ({"slo_deadline_ms": 500}, 0.0, "fast", "urgent, fastest"),
        ({"slo_deadline_ms": 10_000}, 0.0, "idle", "in time, least loaded"),
        ({"slo_deadline_ms": 10_000}, 6.0, "fast", "urgent, fastest"),
        ({}, 0.0, "idle", "no deadline, least loaded"),
    ],
)
def test_slo_aware_gives_the_fastest_to_urgent_requests(
    facts: dict[str, object], now: float, expected: str, words: str
) -> None:
    policy = SLOAwarePolicy()
    policy.now = now
    [decision] = policy.schedule([request(0, **facts)], FLEET)
    assert decision.target_instance_id == expected
    assert words in str(decision.reason)


def test_slo_aware_avoids_instances_that_would_be_late() -> None:
    policy = SLOAwarePolicy(urgent_below_ms=100, urgent_share=0.1)
    policy.now = 0.0
    assert policy.schedule([request(slo_deadline_ms=300)], FLEET)[0].target_instance_id == "fast"


def test_cost_takes_the_cheapest_that_meets_the_requirements() -> None:
    policy = CostOptimizedPolicy(price_per_gpu_hour=3.6)
    assert target(policy, request()) == "cheap"
    assert target(policy, request(slo_deadline_ms=500)) == "idle"
    [decision] = policy.schedule([request(prompt="x" * 400)], FLEET)
    assert decision.estimated_cost == pytest.approx(3.6 / 3600 * 1 * 200 / 900)


def test_an_instance_never_measured_is_neither_the_fastest_nor_the_cheapest() -> None:
    unknown = ExecutionInstance(instance_id="unknown", max_concurrency=8)
    for policy in (PriorityPolicy(), CostOptimizedPolicy()):
        [decision] = policy.schedule([request(priority=RequestPriority.CRITICAL)], [unknown, CHEAP])
        assert decision.target_instance_id == "cheap"
    [alone] = PriorityPolicy().schedule([request(priority=RequestPriority.CRITICAL)], [unknown])
    assert (alone.target_instance_id, alone.estimated_latency_ms, alone.estimated_cost) == ("unknown", None, None)


def test_zero_is_not_a_measurement() -> None:
    zero = ExecutionInstance(instance_id="zero", max_concurrency=8, avg_latency_ms=0, throughput_tokens_per_sec=0)
    assert PriorityPolicy().schedule([request(priority=2)], [zero, CHEAP])[0].target_instance_id == "cheap"


def test_a_budget_excludes_expensive_and_unknown_instances() -> None:
    unknown = ExecutionInstance(instance_id="unknown")
    policy = FIFOPolicy()
    budget = 0.0001
    [decision] = policy.schedule([request(cost_budget=budget)], [*FLEET, unknown])
    assert decision.target_instance_id == "cheap"
    assert decision.estimated_cost is not None
    assert decision.estimated_cost <= budget
    assert policy.schedule([request(cost_budget=0.0)], [*FLEET, unknown]) == []
    assert set(policy.unplaced[0].reasons()) == {"fast", "idle", "cheap", "unknown"}
    assert str(policy.unplaced[0].why) == "no instance can take this request: 4 instances: 4 over budget"


@pytest.mark.parametrize(
    ("loads", "requests", "expected"),
    [
        ([0, 0], [request(priority=RequestPriority.HIGH), request(1)], "adaptive, priority"),
        ([7, 8], [request(slo_deadline_ms=900)], "adaptive, slo-aware: urgent"),
        ([7, 8], [request()], "adaptive, slo-aware: no deadline"),
        ([1, 1], [request(slo_deadline_ms=90_000)], "adaptive, cost-optimized"),
        ([4, 4], [request(slo_deadline_ms=90_000)], "adaptive, slo-aware: in time"),
    ],
)
def test_adaptive_delegates_to_another_strategy(
    loads: list[int], requests: list[RequestMetadata], expected: str
) -> None:
    fleet = [
        ExecutionInstance(instance_id=f"i{n}", max_concurrency=8, current_load=load, avg_latency_ms=100)
        for n, load in enumerate(loads)
    ]
    policy = AdaptivePolicy()
    policy.now = 0.0
    assert str(policy.schedule(requests, fleet)[0].reason).startswith(expected)


def test_decisions_say_how_the_instance_is_split() -> None:
    split = {(1, 1): "none", (2, 1): "tensor", (1, 2): "pipeline", (2, 2): "hybrid"}
    for (tensor, pipeline), expected in split.items():
        instance = ExecutionInstance(instance_id="i", tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
        [decision] = FIFOPolicy().schedule([request()], [instance])
        assert decision.parallelism_strategy is ParallelismType(expected)
        assert (decision.tensor_parallel_size, decision.pipeline_parallel_size) == (tensor, pipeline)


def test_the_reasons_of_a_refusal_name_every_instance() -> None:
    instances = [
        ExecutionInstance(instance_id="other", model_name="x"),
        ExecutionInstance(instance_id="sick", model_name="m", can_accept_request=False),
        ExecutionInstance(instance_id="full", model_name="m", current_load=2, max_concurrency=2),
    ]
    policy = FIFOPolicy()
    assert policy.schedule([request(model_name="m")], instances) == []
    [unplaced] = policy.unplaced
    assert {name: str(why) for name, why in unplaced.reasons().items()} == {
        "other": "serving another model",
        "sick": "not accepting requests",
        "full": "full: 2 of 2 requests",
    }
    assert str(unplaced.why) == (
        'no instance can take "m": 3 instances: 1 serving another model, 1 not accepting requests, 1 full'
    )


@pytest.mark.parametrize("strategy", ALL)
def test_a_batch_spreads_over_equal_instances(strategy: type[SchedulingPolicy]) -> None:
    case = equal_case(32, 4)
    targets = Counter(d.target_instance_id for d in strategy().schedule(case.requests, case.instances))
    assert set(targets) == {"i0", "i1", "i2", "i3"}
    assert max(targets.values()) <= 16


@pytest.mark.parametrize("strategy", ALL)
@given(case=st.integers().map(lambda seed: random_case(Random(seed))), seed=st.integers(0, 99))
@settings(max_examples=examples(60))
def test_the_contract_holds_in_every_case(strategy: type[SchedulingPolicy], case: RequestCase, seed: int) -> None:
    policy, again = strategy(), strategy()
    policy.now = again.now = 100.0
    policy.seed = again.seed = seed
    requests, instances = copy.deepcopy((case.requests, case.instances))
    decisions = policy.schedule(requests, instances)
    assert (requests, instances) == (case.requests, case.instances), "inputs are modified"
    assert decisions == again.schedule(requests, instances), "same seed, other decisions"
    assert vet(decisions, requests, fleet := EndpointTable(instances)).bad == [], "a promise is broken"
    decided = {decision.request_id for decision in decisions}
    assert len(decided) == len(decisions), "decided twice"
    left = {unplaced.request.request_id for unplaced in policy.unplaced}
    assert decided | left == {request.request_id for request in requests}, "neither placed nor reported"
    for unplaced in policy.unplaced:
        if unplaced.request.request_id not in decided:
            assert not takers(unplaced.request, fleet), "left waiting although an instance has room"


def takers(request: RequestMetadata, fleet: EndpointTable) -> list[str]:
    """Who could take it, after everything that was decided."""
    cycle: RequestCycle = Cycle(request)
    rejected = {endpoint.row for demand in Demands().filters for endpoint, _ in demand.rejections(cycle, fleet.roster)}
    return [str(endpoint) for endpoint in fleet.roster if endpoint.row not in rejected]

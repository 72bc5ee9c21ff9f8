"""Code for the strategies' published interface runs here with its import lines changed: its names, fields and calls."""

import time
from typing import Any

import pytest

from pointsman import ControlPlaneManager
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.events import Arrived, Joined, Send
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
from pointsman.types import (
    ExecutionInstance,
    ParallelismType,
    RequestMetadata,
    RequestPriority,
    SchedulingDecision,
)


class ByArrival(SchedulingPolicy):
    """Uses each part of the interface that its documentation names: it does not count its own decisions."""

    def __init__(self) -> None:
        super().__init__("ByArrival")

    def prioritize(self, requests: list[RequestMetadata]) -> list[RequestMetadata]:
        return sorted(requests, key=lambda one: (-one.priority.value, one.arrival_time))  # type: ignore[attr-defined]

    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        made = []
        for request in self.prioritize(requests):
            open_ones = [one for one in instances if one.can_accept_request]
            if not open_ones:
                continue
            least = min(open_ones, key=lambda one: one.current_load)
            important = request.priority in (RequestPriority.CRITICAL, RequestPriority.HIGH)
            made.append(
                SchedulingDecision(
                    request_id=request.request_id,
                    target_instance_id=least.instance_id,
                    parallelism_strategy=ParallelismType.TENSOR_PARALLEL,
                    estimated_latency_ms=least.avg_latency_ms,
                    estimated_cost=0.0,
                    tensor_parallel_size=least.tensor_parallel_size,
                    pipeline_parallel_size=least.pipeline_parallel_size,
                    reason=f"priority {request.priority.name}",  # type: ignore[attr-defined]
                    confidence=0.9 if important else 0.5,
                )
            )
            made[-1].metadata["important"] = important
        return made


def request(number: int, **more: Any) -> RequestMetadata:
    return RequestMetadata(request_id=f"req-{number}", prompt="Test", max_tokens=10, model_name="llama", **more)


def instance(name: str, **more: Any) -> ExecutionInstance:
    return ExecutionInstance(
        instance_id=name, host="localhost", port=8000, model_name="llama", tensor_parallel_size=1, gpu_count=1, **more
    )


def test_a_policy_of_the_published_interface_decides() -> None:
    policy = ByArrival()
    assert policy.name == "ByArrival"
    one, two = request(1), request(2, priority=RequestPriority.HIGH)
    assert policy.prioritize([one, two]) == [two, one]
    first, second = policy.schedule([one, two], [instance("inst-1")])
    assert (first.request_id, first.target_instance_id) == ("req-2", "inst-1")
    assert (first.confidence, second.confidence) == (0.9, 0.5)
    assert first.metadata == {"important": True}
    assert first.parallelism_strategy is ParallelismType.TENSOR_PARALLEL


def test_the_manager_runs_it_and_explain_shows_what_it_said() -> None:
    manager = ControlPlaneManager(scheduling_policy=ByArrival())
    manager.register_instance(instance("inst-1"))
    [made] = manager.submit(request(1, priority=RequestPriority.LOW))
    assert made.metadata == {"important": False}
    record = manager.explain("req-1")
    assert record.as_dict()["decision"]["confidence"] == 0.5
    assert record.as_dict()["decision"]["metadata"] == {"important": False}
    assert "sent to inst-1: priority LOW\nconfidence 0.5, important False" in str(record)


def test_metadata_may_hold_anything() -> None:
    class Odd(FIFOPolicy):
        def schedule(
            self, requests: list[RequestMetadata], instances: list[ExecutionInstance]
        ) -> list[SchedulingDecision]:
            return [SchedulingDecision(one.request_id, "i", metadata={"why": complex(1, 2)}) for one in requests]

    manager = ControlPlaneManager(Odd())
    manager.register_instance(instance("i"))
    manager.submit(request(1))
    assert manager.explain("req-1").as_dict()["decision"]["metadata"] == {"why": "(1+2j)"}


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (FIFOPolicy, "fifo"),
        (PriorityPolicy, "priority"),
        (SLOAwarePolicy, "slo-aware"),
        (CostOptimizedPolicy, "cost-optimized"),
        (AdaptivePolicy, "adaptive"),
        (PowerOfTwoPolicy, "power-of-two"),
        (PrefixPolicy, "prefix"),
    ],
)
def test_the_published_names_are_the_built_in_policies(policy: type[SchedulingPolicy], name: str) -> None:
    assert policy().name == name
    manager = ControlPlaneManager(scheduling_policy=policy())
    manager.register_instance(instance("i"))
    assert len(manager.submit(request(1))) == 1


def test_a_name_given_to_init_is_the_name_of_one_policy_only() -> None:
    class Named(FIFOPolicy):
        def __init__(self, name: str) -> None:
            SchedulingPolicy.__init__(self, name)

    assert (Named("a").name, Named("b").name, Named.name) == ("a", "b", "named")


def test_arrival_time_is_set_when_a_request_is_made() -> None:
    before = time.time()
    made = [request(1), request(2)]
    times = [one.arrival_time or 0.0 for one in made]
    assert before <= times[0] <= times[1] <= time.time()


@pytest.mark.parametrize(
    ("given", "arrival"),
    [({}, 7.0), ({"arrival_time": None}, 7.0), ({"arrival_time": 3.0}, 3.0), ({"arrival_time": 3}, 3.0)],
)
def test_a_dispatcher_uses_its_own_clock_for_requests_that_do_not_say_when_they_arrived(
    given: dict[str, Any], arrival: float
) -> None:
    dispatcher = Dispatcher(plan_for(FIFOPolicy()))
    dispatcher.handle(Joined(instance("i", max_concurrency=1)), 5.0)
    commands = dispatcher.handle(Arrived((request(1, **given), request(2, **given))), 7.0)
    assert [one.request.arrival_time for one in commands if isinstance(one, Send)] == [arrival]
    assert [one.arrival_time for one in dispatcher.waiting()] == [arrival]


@pytest.mark.parametrize(("number", "name"), [(2, "CRITICAL"), (-1, "LOW"), (7, "7"), (-40, "-40")])
def test_every_whole_number_is_a_priority_with_a_name(number: int, name: str) -> None:
    priority = RequestPriority(number)
    assert (priority.name, priority.value, priority == number) == (name, number, True)
    assert len(RequestPriority) == 5


def test_text_that_is_no_number_is_no_priority() -> None:
    with pytest.raises(ValueError, match="high"):
        RequestPriority("high")  # type: ignore[arg-type]

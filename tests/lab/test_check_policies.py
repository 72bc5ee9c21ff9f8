"""Each promise of a policy is broken once, and found with a small example; what keeps them all is let through."""

import itertools
import random

import msgspec
import pytest

from pointsman.lab.check import check
from pointsman.lab.check.cases import equal_case
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
from pointsman.types import ExecutionInstance, RequestMetadata, RequestPriority, SchedulingDecision
from tests.lab.findings import found, lines

Requests = list[RequestMetadata]
Instances = list[ExecutionInstance]
Decisions = list[SchedulingDecision]


class FirstFit(SchedulingPolicy):
    """A decent policy to spoil: the least loaded instance that may take the request, arrivals in order."""

    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        load = {one.instance_id: one.current_load for one in instances}
        decisions: dict[str, SchedulingDecision] = {}
        for request in self.prioritize(requests):
            able = [one for one in instances if self.takes(one, request, load[one.instance_id])]
            if able and request.request_id not in decisions:
                best = min(able, key=lambda one: load[one.instance_id])
                load[best.instance_id] += 1
                decisions[request.request_id] = SchedulingDecision(request.request_id, best.instance_id)
        return list(decisions.values())

    def takes(self, one: ExecutionInstance, request: RequestMetadata, load: int) -> bool:
        return (
            one.can_accept_request
            and request.model_name == one.model_name
            and (one.max_concurrency is None or load < one.max_concurrency)
            and self.affordable(one, request)
        )

    def affordable(self, one: ExecutionInstance, request: RequestMetadata) -> bool:
        if request.cost_budget is None:
            return True
        if not one.throughput_tokens_per_sec:
            return False
        tokens = request.input_tokens + (256 if request.max_tokens is None else request.max_tokens)
        cost = self.price_per_gpu_hour * tokens / 3600 * (one.gpu_count / one.throughput_tokens_per_sec)
        return cost <= request.cost_budget


def test_a_users_valid_policy_keeps_every_promise() -> None:
    report = check(FirstFit, 25)
    assert report.ok, str(report)
    assert report.roles == ["scheduling policy"]
    assert len(report.kept) == 8
    assert str(report).splitlines()[-1] == "this scheduling policy keeps all its promises"


class Sorts(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        requests.sort(key=lambda request: -request.priority)
        return super().schedule(requests, instances)


def test_sorting_the_list_that_was_given() -> None:
    broken = found(Sorts, "leaves its inputs alone")
    assert broken.what.startswith("the list of requests was changed")
    assert len(lines(broken)) == 2, "two requests, and not even an instance"


class Counts(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        decisions = super().schedule(requests, instances)
        for made in decisions:
            next(one for one in instances if one.instance_id == made.target_instance_id).current_load += 1
        return decisions


def test_counting_load_in_the_instances_that_were_given() -> None:
    broken = found(Counts, "leaves its inputs alone")
    assert "current_load from 0 to 1; count load in a copy" in broken.what
    assert len(lines(broken)) == 2


class Tags(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        for request in requests:
            request.headers["x-seen"] = "yes"  # type: ignore[index]
        return super().schedule(requests, instances)


def test_writing_into_the_headers_of_a_request() -> None:
    broken = found(Tags, "leaves its inputs alone")
    assert "a request was changed" in broken.what
    assert "headers" in broken.what
    assert len(lines(broken)) == 1


class AnyModel(FirstFit):
    def takes(self, one: ExecutionInstance, request: RequestMetadata, load: int) -> bool:
        return super().takes(one, msgspec.structs.replace(request, model_name=one.model_name), load)


class AnyLoad(FirstFit):
    def takes(self, one: ExecutionInstance, request: RequestMetadata, load: int) -> bool:
        return super().takes(msgspec.structs.replace(one, max_concurrency=None), request, load)


class AnyHealth(FirstFit):
    def takes(self, one: ExecutionInstance, request: RequestMetadata, load: int) -> bool:
        return super().takes(msgspec.structs.replace(one, can_accept_request=True), request, load)


class AnyPrice(FirstFit):
    def affordable(self, one: ExecutionInstance, request: RequestMetadata) -> bool:
        return True


class Twice(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return super().schedule(requests, instances) * 2


class Ghosts(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return [*super().schedule(requests, instances), SchedulingDecision("ghost", "i0")]


class Nowhere(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return [SchedulingDecision(request.request_id, "nowhere") for request in requests]


@pytest.mark.parametrize(
    ("policy", "what", "rows"),
    [
        (AnyModel, "serving another model", 2),
        (AnyLoad, "may not be chosen: full", 2),
        (AnyHealth, "not accepting requests", 2),
        (AnyPrice, "over budget", 2),
        (Twice, "was not waiting, or was decided before", 2),
        (Ghosts, 'request "ghost" was not waiting', 0),
        (Nowhere, 'there is no instance "nowhere"', 1),
    ],
)
def test_invalid_decisions(policy: type[SchedulingPolicy], what: str, rows: int) -> None:
    broken = found(policy, "decides only what may be done", examples=100)
    assert what in broken.what
    assert len(lines(broken)) == rows, broken.example


class Herds(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        load = {one.instance_id: one.current_load for one in instances}
        decisions: dict[str, SchedulingDecision] = {}
        for request in requests:
            for one in instances:  # the first that may, whatever it has already
                if request.request_id not in decisions and self.takes(one, request, load[one.instance_id]):
                    decisions[request.request_id] = SchedulingDecision(request.request_id, one.instance_id)
                    load[one.instance_id] += 1
        return list(decisions.values())


def test_herding() -> None:
    broken = found(Herds, "spreads a batch over equal instances")
    assert broken.what.startswith("12 of 12 requests went to i0 while 2 of 3 equal instances stayed idle")


class NeverLow(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return super().schedule([request for request in requests if request.priority != RequestPriority.LOW], instances)


def test_starving() -> None:
    broken = found(NeverLow, "starves no request", examples=150)
    assert "waited through 2 rounds although an idle instance could take it each time" in broken.what
    assert len(lines(broken)) == 2


class NeedsSomebody(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        instances[0].instance_id  # noqa: B018
        return super().schedule(requests, instances)


class NeedsWork(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        max(request.priority for request in requests)
        return super().schedule(requests, instances)


class Silent(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return None  # type: ignore[return-value]


class Pairs(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return [(request.request_id, "i0") for request in requests]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        (NeedsSomebody, "schedule() raised IndexError: list index out of range"),
        (NeedsWork, "schedule() raised ValueError: max()"),
        (Silent, "schedule() returned a NoneType, not a list of SchedulingDecision"),
        (Pairs, "among its decisions"),
    ],
)
def test_a_policy_that_cannot_answer_breaks_one_promise_only(policy: type[SchedulingPolicy], what: str) -> None:
    broken = found(policy, "answers in every situation")
    assert what in broken.what
    assert len(check(policy, 10).broken) == 1
    assert len(lines(broken)) <= 1


class Loses(FirstFit):
    def prioritize(self, requests: Requests) -> Requests:
        return super().prioritize(requests)[:3]


class Doubles(FirstFit):
    def prioritize(self, requests: Requests) -> Requests:
        return requests * 2


class SortsInPlace(FirstFit):
    def prioritize(self, requests: Requests) -> Requests:
        requests.sort(key=lambda request: -request.priority)
        return requests

    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return super().schedule(list(requests), instances)


class CannotOrder(FirstFit):
    """Only its own queue calls prioritize(), so schedule() does not fail."""

    def prioritize(self, requests: Requests) -> Requests:
        return sorted(requests, key=lambda request: request.slo_deadline_ms)  # type: ignore[arg-type,return-value]

    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return FIFOPolicy().schedule(requests, instances)


@pytest.mark.parametrize(
    ("policy", "what", "rows"),
    [
        (Loses, "prioritize() lost", 4),
        (Doubles, "and added", 1),
        (SortsInPlace, "prioritize() changed the list it was given", 2),
        (CannotOrder, "prioritize() raised TypeError: '<' not supported", 2),
    ],
)
def test_prioritize(policy: type[SchedulingPolicy], what: str, rows: int) -> None:
    broken = found(policy, "prioritize() keeps every request")
    assert what in broken.what
    assert len(lines(broken)) == rows


class BreaksEverything(FirstFit):
    """It raises where there are no instances, changes its inputs, herds, and loses requests."""

    def prioritize(self, requests: Requests) -> Requests:
        return requests[1:]

    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        first = instances[0]
        first.current_load += 1
        return [SchedulingDecision(one.request_id, first.instance_id) for one in requests]


def test_all_broken_promises_are_reported() -> None:
    report = check(BreaksEverything, 50)
    assert [one.promise for one in report.broken] == [
        "answers in every situation",
        "leaves its inputs alone",
        "prioritize() keeps every request",
        "decides only what may be done",
        "spreads a batch over equal instances",
    ]
    assert "decides the same with the same seed" in report.kept


class ByChance(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return super().schedule(requests, random.sample(instances, len(instances)))


class BySystemChance(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        dice = random.SystemRandom()
        return super().schedule(requests, dice.sample(instances, len(instances)))


class ByTurns(FirstFit):
    turns = itertools.count()

    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        start = next(self.turns) % max(1, len(instances))
        return super().schedule(requests, instances[start:] + instances[:start])


@pytest.mark.parametrize("policy", [ByChance, BySystemChance, ByTurns])
def test_decisions_that_cannot_be_repeated(policy: type[SchedulingPolicy]) -> None:
    broken = found(policy, "decides the same with the same seed", examples=200)
    assert broken.what.startswith("two fresh policies with the same seed decided differently")


class OnlyOnce(FirstFit):
    """Its second call finds what the first one left behind."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        again = self.seen & {request.request_id for request in requests}
        if again:
            raise KeyError(min(again))
        self.seen |= {request.request_id for request in requests}
        return super().schedule(requests, instances)


def test_raising_when_it_is_called_again() -> None:
    broken = found(OnlyOnce, "starves no request")
    assert broken.what == "schedule() raised KeyError when it was called again: 'r0'"


class Burns(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        if len(requests) == 100:  # only where it is timed: the other situations would take as long
            sum(number * number for number in range(4_000_000))
        return super().schedule(requests, instances)


def test_burning_processor_time() -> None:
    broken = found(Burns, "takes at most 1 ms per decision", examples=1)
    assert "ms per decision; a request waits for every one of them" in broken.what


@pytest.mark.parametrize(
    "strategy",
    [FIFOPolicy, PriorityPolicy, SLOAwarePolicy, CostOptimizedPolicy, AdaptivePolicy, PowerOfTwoPolicy, PrefixPolicy],
)
def test_the_built_in_strategies_keep_all(strategy: type[SchedulingPolicy]) -> None:
    report = check(strategy, 15)
    assert report.ok, str(report)


def test_the_case_that_is_timed_is_equal_idle_and_measured() -> None:
    case = equal_case(100, 50)
    assert (len(case.requests), len(case.instances)) == (100, 50)
    assert all(one.current_load == 0 for one in case.instances)
    assert all(metrics is not None for metrics in case.metrics)

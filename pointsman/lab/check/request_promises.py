"""Promises about decisions on requests, for scheduling policies, filters, scorers, pickers and profile handlers."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, TypeAlias

import msgspec

from pointsman.lab.check.cases import SEEDS, RequestCase, global_seed
from pointsman.reasons import Reason
from pointsman.routing.decisions import vet
from pointsman.routing.endpoints import EndpointTable
from pointsman.routing.filters.demands import Demands
from pointsman.selection import (
    Cycle,
    MaxScorePicker,
    Profile,
    ProfileFailure,
    ProfileResult,
    Ranked,
    Scheduler,
    SchedulingFailure,
    SchedulingResult,
)
from pointsman.strategies import SchedulingPolicy
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision

NOW = 100.0

Build: TypeAlias = Callable[[], Any]
RequestPromise: TypeAlias = Callable[[Build, RequestCase], str | None]
"""A function that returns in words what is broken in a case, or None if the promise is kept."""


# Scheduling policies


def decided(build: Build, case: RequestCase) -> list[SchedulingDecision]:
    """The decisions of a fresh policy. It gets copies of the case, which it may change."""
    return _fresh(build, case.seed).schedule(list(case.requests), copy.deepcopy(case.instances))


def answers(build: Build, case: RequestCase) -> str | None:
    try:
        decisions = decided(build, case)
    except Exception as error:
        return f"schedule() raised {type(error).__name__}: {error}"
    if not isinstance(decisions, list):
        return f"schedule() returned a {type(decisions).__name__}, not a list of SchedulingDecision"
    for decision in decisions:
        if type(decision) is not SchedulingDecision:
            return f"schedule() returned {decision!r} among its decisions"
    return None


def leaves_inputs_alone(build: Build, case: RequestCase) -> str | None:
    requests, instances = copy.deepcopy(case.requests), copy.deepcopy(case.instances)
    _fresh(build, case.seed).schedule(requests, instances)
    if [request.request_id for request in requests] != [request.request_id for request in case.requests]:
        return "the list of requests was changed: sort or filter a copy, sorted(requests, ...)"
    if requests != case.requests:
        return f"a request was changed: {', '.join(_changes(case.requests, requests))}; others read it too"
    if instances != case.instances:
        changed = _changes(case.instances, instances)
        return f"an instance was changed: {', '.join(changed) or 'the list has other members'}; count load in a copy"
    return None


def orders_all(build: Build, case: RequestCase) -> str | None:
    """prioritize() returns each of its requests exactly once, and does not change the list that it gets."""
    requests = list(case.requests)
    try:
        ordered = list(_fresh(build, 0).prioritize(requests))
    except Exception as error:
        return f"prioritize() raised {type(error).__name__}: {error}"
    if requests != case.requests:
        return "prioritize() changed the list it was given: return sorted(requests, ...)"
    given, returned = Counter(r.request_id for r in requests), Counter(r.request_id for r in ordered)
    if given == returned:
        return None
    return f"prioritize() lost {dict(given - returned)} and added {dict(returned - given)}"


def decides_validly(build: Build, case: RequestCase) -> str | None:
    """Decisions name known requests and instances, and each request at most once. The chosen instance serves the model,
    is healthy, has room, and is within the budget."""
    price = build().price_per_gpu_hour
    vetted = vet(decided(build, case), case.requests, EndpointTable(case.instances), price)
    if not vetted.bad:
        return None
    decision, why = vetted.bad[0]
    return f'"{decision.request_id}" was sent to "{decision.target_instance_id}": {why}'


def decides_the_same(build: Build, case: RequestCase) -> str | None:
    decisions = []
    for seed in SEEDS:
        with global_seed(seed):
            decisions.append(decided(build, case))
    if decisions[0] == decisions[1]:
        return None
    return "two fresh policies with the same seed decided differently: draw from a generator seeded with self.seed"


def starves_no_request(build: Build, case: RequestCase) -> str | None:
    """If no further request arrives and all sent requests end, every request that an instance could take is sent."""
    policy = build()
    idle = [msgspec.structs.replace(instance, current_load=0) for instance in case.instances]
    waiting = list({request.request_id: request for request in case.requests}.values())
    rounds = len(waiting) + 1
    for number in range(rounds):
        if not waiting:
            return None
        policy.now, policy.seed = NOW + number, case.seed + number
        try:
            sent = {decision.request_id for decision in policy.schedule(list(waiting), copy.deepcopy(idle))}
        except Exception as error:
            if not number:
                raise  # another promise reports that
            return f"schedule() raised {type(error).__name__} when it was called again: {error}"
        waiting = [request for request in waiting if request.request_id not in sent]
    starved = [request.request_id for request in waiting if _can_be_taken(request, idle, policy)]
    if not starved:
        return None
    return f"{', '.join(starved)} waited through {rounds} rounds although an idle instance could take it each time"


def spreads(build: Build, case: RequestCase) -> str | None:
    """A batch does not all go to one instance while equal instances stay idle."""
    decisions = decided(build, case)
    instances, requests = len(case.instances), len(case.requests)
    targets = Counter(decision.target_instance_id for decision in decisions)
    if instances < 2 or not targets or len(decisions) < 2 * instances:
        return None
    [(busiest, most)] = targets.most_common(1)
    if most <= len(decisions) // 2 or len(targets) == instances:
        return None
    return (
        f"{most} of {requests} requests went to {busiest} while {instances - len(targets)} of {instances} equal "
        "instances stayed idle: count the load that your own decisions add"
    )


def _fresh(build: Build, seed: int) -> SchedulingPolicy:
    policy: SchedulingPolicy = build()
    policy.now, policy.seed = NOW, seed
    return policy


def _changes(before: Sequence[msgspec.Struct], after: Sequence[msgspec.Struct]) -> list[str]:
    return [
        f"{getattr(old, old.__struct_fields__[0])}.{name} from {getattr(old, name)} to {getattr(new, name)}"
        for old, new in zip(before, after, strict=False)
        for name in old.__struct_fields__
        if getattr(old, name) != getattr(new, name)
    ]


def _can_be_taken(request: RequestMetadata, idle: Iterable[ExecutionInstance], policy: SchedulingPolicy) -> bool:
    candidates = EndpointTable(list(idle)).roster
    for demand in Demands(policy.price_per_gpu_hour).filters:
        rejected = {endpoint.row for endpoint, _ in demand.rejections(Cycle(request), candidates)}
        candidates = candidates.without([i for i, endpoint in enumerate(candidates) if endpoint.row in rejected])
    return len(candidates) > 0


POLICY_PROMISES: dict[str, RequestPromise] = {
    "answers in every situation": answers,
    "leaves its inputs alone": leaves_inputs_alone,
    "prioritize() keeps every request": orders_all,
    "decides only what may be done": decides_validly,
    "decides the same with the same seed": decides_the_same,
    "starves no request": starves_no_request,
}


# Plugins


def cycle_of(case: RequestCase) -> Cycle[RequestMetadata]:
    """A cycle for the first request."""
    request = case.requests[0] if case.requests else RequestMetadata("r0", arrival_time=0.0)
    return Cycle(request, now=NOW, seed=case.seed)


def filters_properly(build: Build, case: RequestCase) -> str | None:
    """A filter rejects only candidates, gives a reason for each, and does not raise."""
    roster = case.fleet().roster
    try:
        rejected = list(build().rejections(cycle_of(case), roster))
    except Exception as error:
        return f"rejections() raised {type(error).__name__}: {error}"
    for entry in rejected:
        if not (isinstance(entry, tuple) and len(entry) == 2):
            return f"rejections() gave {entry!r}, not a pair of a candidate and a reason"
        rejected_one, why = entry
        if not any(rejected_one is candidate for candidate in roster):
            return f"rejections() named {rejected_one!r}, which is not a candidate"
        if not isinstance(why, str | Reason) or not str(why).strip():
            return f"rejections() turned {rejected_one} away without a reason"
    return None


def scores_properly(build: Build, case: RequestCase) -> str | None:
    """A scorer gives each candidate, even if it was never measured, a number in [0, 1], and does not raise."""
    roster = case.fleet().roster
    try:
        scores = list(build().scores(cycle_of(case), roster))
    except Exception as error:
        return f"scores() raised {type(error).__name__}: {error}"
    if len(scores) != len(roster):
        return f"scores() gave {len(scores)} scores for {len(roster)} candidates"
    for endpoint, score in zip(roster, scores, strict=True):
        if not (isinstance(score, Real) and 0 <= float(score) <= 1):
            measured = "" if endpoint.metrics is not None else ", which was never measured"
            return f"scores() gave {score} to {endpoint}{measured}; it must be from 0 to 1"
    return None


def picks_properly(build: Build, case: RequestCase) -> str | None:
    """A picker returns at least one candidate, returns no candidate twice, and does not raise."""
    roster = case.fleet().roster
    if not len(roster):
        return None
    totals = [float((number * 7 + case.seed) % 3) for number in range(len(roster))]
    try:
        chosen = list(build().pick(cycle_of(case), Ranked(roster, totals)))
    except Exception as error:
        return f"pick() raised {type(error).__name__}: {error}"
    if not chosen:
        return f"pick() chose none of {len(roster)} candidates"
    if len({id(one) for one in chosen}) != len(chosen):
        return f"pick() chose a candidate twice: {chosen}"
    stranger = next((one for one in chosen if not any(one is candidate for candidate in roster)), None)
    return None if stranger is None else f"pick() chose {stranger!r}, which is not a candidate"


class _RejectAll:
    def rejections(self, cycle: Cycle[Any], candidates: Any) -> list[tuple[Any, str]]:
        return [(candidate, "rejected by the check") for candidate in candidates]


def handles_properly(build: Build, case: RequestCase) -> str | None:
    """Whichever profiles fail, a handler asks only for known profiles, ends, and returns a result."""
    names = ("decode", "prefill", "default")[: 1 + case.seed % 3]
    failing = case.seed // 2
    profiles = [
        Profile[Any](name, *([_RejectAll()] if index < failing else []), MaxScorePicker())
        for index, name in enumerate(names)
    ]
    try:
        outcome = Scheduler(profiles, build()).run(cycle_of(case), case.fleet().roster)
    except Exception as error:
        return f"with profiles {', '.join(names)}: {type(error).__name__}: {error}"
    if isinstance(outcome, SchedulingFailure):
        return None
    if not isinstance(outcome, SchedulingResult):
        return f"process_results() returned a {type(outcome).__name__}"
    primary: ProfileResult[Any] | ProfileFailure[Any] | None = outcome.results.get(outcome.primary)
    if not isinstance(primary, ProfileResult):
        return f'process_results() named "{outcome.primary}" as primary, which chose no endpoint'
    return None


def repeats(method: str) -> RequestPromise:
    def promise(build: Build, case: RequestCase) -> str | None:
        returned = []
        for seed in SEEDS:
            roster = case.fleet().roster
            if method == "pick" and not len(roster):
                return None
            candidates = Ranked(roster, [1.0] * len(roster)) if method == "pick" else roster
            with global_seed(seed):
                answer = getattr(build(), method)(cycle_of(case), candidates)
                returned.append([str(part) for part in answer])
        if returned[0] == returned[1]:
            return None
        return f"{method}() answered differently with the same seed: draw from cycle.rng"

    return promise


PLUGIN_PROMISES: dict[str, dict[str, RequestPromise]] = {
    "filter": {"names candidates with reasons": filters_properly, "repeats with the same seed": repeats("rejections")},
    "scorer": {"gives each candidate 0 to 1": scores_properly, "repeats with the same seed": repeats("scores")},
    "picker": {"picks from those it is given": picks_properly, "repeats with the same seed": repeats("pick")},
    "profile handler": {"runs profiles to an end": handles_properly},
}

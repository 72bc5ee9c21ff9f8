"""The promises of a scheduling policy."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from pointsman.lab.check.dice import SEEDS, loaded
from pointsman.lab.check.situations import Situation
from pointsman.routing.decisions import vet
from pointsman.routing.endpoints import EndpointTable
from pointsman.routing.filters.demands import Demands
from pointsman.selection import Cycle
from pointsman.strategies import SchedulingPolicy
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision

Build: TypeAlias = Callable[[], SchedulingPolicy]
Promise: TypeAlias = Callable[[Build, Situation], str | None]


def decided(build: Build, situation: Situation) -> list[SchedulingDecision]:
    """What a fresh policy decides; the situation is its own to spoil."""
    policy = build()
    policy.now, policy.seed = 100.0, situation.seed
    return policy.schedule(list(situation.requests), copy.deepcopy(situation.instances))


def answers(build: Build, situation: Situation) -> str | None:
    """It returns a list of decisions, whatever comes."""
    try:
        decisions = decided(build, situation)
    except Exception as error:
        return f"schedule() raised {type(error).__name__}: {error}"
    if not isinstance(decisions, list):
        return f"schedule() returned a {type(decisions).__name__}, not a list of SchedulingDecision"
    for made in decisions:
        if type(made) is not SchedulingDecision:
            return f"schedule() returned {made!r} among its decisions"
    return None


def leaves_inputs_alone(build: Build, situation: Situation) -> str | None:
    """It does not modify what it was given."""
    policy = build()
    policy.now, policy.seed = 100.0, situation.seed
    requests, instances = copy.deepcopy(situation.requests), copy.deepcopy(situation.instances)
    policy.schedule(requests, instances)
    if [request.request_id for request in requests] != [request.request_id for request in situation.requests]:
        return "the list of requests was changed: sort or filter a copy, sorted(requests, ...)"
    if requests != situation.requests:
        return f"a request was changed: {', '.join(_changes(situation.requests, requests))}; others read it too"
    if instances != situation.instances:
        changed = _changes(situation.instances, instances)
        return f"an instance was changed: {', '.join(changed) or 'the list has other members'}; count load in a copy"
    return None


def _changes(before: Sequence[msgspec.Struct], after: Sequence[msgspec.Struct]) -> list[str]:
    return [
        f"{getattr(old, old.__struct_fields__[0])}.{name} from {getattr(old, name)} to {getattr(new, name)}"
        for old, new in zip(before, after, strict=False)
        for name in old.__struct_fields__
        if getattr(old, name) != getattr(new, name)
    ]


def orders_all(build: Build, situation: Situation) -> str | None:
    """prioritize() returns the requests it was given, each once, and leaves the list alone."""
    requests = list(situation.requests)
    policy = build()
    policy.now = 100.0
    try:
        ordered = list(policy.prioritize(requests))
    except Exception as error:
        return f"prioritize() raised {type(error).__name__}: {error}"
    if requests != situation.requests:
        return "prioritize() changed the list it was given: return sorted(requests, ...)"
    given, returned = Counter(r.request_id for r in requests), Counter(r.request_id for r in ordered)
    if given == returned:
        return None
    return f"prioritize() lost {dict(given - returned)} and added {dict(returned - given)}"


def decides_validly(build: Build, situation: Situation) -> str | None:
    """Known requests and instances, each request once, the right model, healthy, with room, within budget."""
    price = build().price_per_gpu_hour
    vetted = vet(decided(build, situation), situation.requests, EndpointTable(situation.instances), price)
    if not vetted.bad:
        return None
    made, why = vetted.bad[0]
    return f'"{made.request_id}" was sent to "{made.target_instance_id}": {why}'


def repeats(build: Build, situation: Situation) -> str | None:
    """With the same seed, the same decisions."""
    made = []
    for seed in SEEDS:
        with loaded(seed):
            made.append(decided(build, situation))
    if made[0] == made[1]:
        return None
    return "two fresh policies with the same seed decided differently: draw from a generator seeded with self.seed"


def starves_nobody(build: Build, situation: Situation) -> str | None:
    """If nothing new comes and everything that was sent ends, every request that some instance could take is sent."""
    policy = build()
    idle = [msgspec.structs.replace(instance, current_load=0) for instance in situation.instances]
    waiting = list({request.request_id: request for request in situation.requests}.values())
    rounds = len(waiting) + 1
    for turn in range(rounds):
        policy.now, policy.seed = 100.0 + turn, situation.seed + turn
        try:
            sent = {made.request_id for made in policy.schedule(list(waiting), copy.deepcopy(idle))}
        except Exception as error:
            return f"schedule() raised {type(error).__name__} when it was called again: {error}"
        waiting = [request for request in waiting if request.request_id not in sent]
    starved = [request.request_id for request in waiting if _takers(request, idle, policy)]
    if not starved:
        return None
    return f"{', '.join(starved)} waited through {rounds} rounds although an idle instance could take it each time"


def _takers(request: RequestMetadata, idle: Iterable[ExecutionInstance], policy: SchedulingPolicy) -> bool:
    fleet = EndpointTable(list(idle))
    candidates = fleet.roster
    for demand in Demands(policy.price_per_gpu_hour).filters:
        gone = {endpoint.row for endpoint, _ in demand.rejections(Cycle(request), candidates)}
        candidates = candidates.without([i for i, endpoint in enumerate(candidates) if endpoint.row in gone])
    return len(candidates) > 0


def spreads(build: Build, situation: Situation) -> str | None:
    """A batch does not land on one instance while equal ones stay idle."""
    decisions = decided(build, situation)
    instances, requests = len(situation.instances), len(situation.requests)
    targets = Counter(made.target_instance_id for made in decisions)
    if instances < 2 or not targets or len(decisions) < 2 * instances:
        return None
    [(busiest, most)] = targets.most_common(1)
    if most <= len(decisions) // 2 or len(targets) == instances:
        return None
    return (
        f"{most} of {requests} requests went to {busiest} while {instances - len(targets)} of {instances} equal "
        "instances stayed idle: count the load that your own decisions add"
    )


PROMISES: dict[str, Promise] = {
    "answers in every situation": answers,
    "leaves its inputs alone": leaves_inputs_alone,
    "prioritize() keeps every request": orders_all,
    "decides only what may be done": decides_validly,
    "decides the same with the same seed": repeats,
    "starves nobody": starves_nobody,
}

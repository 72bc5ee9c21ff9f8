"""How requests find their instances, as the dispatcher sees it: one by one, or all that wait at once."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from pointsman.reasons import Reason
from pointsman.routing.decisions import Choice, Vetted, decide, vet
from pointsman.routing.endpoints import Endpoint, EndpointTable
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.queue import Queued
from pointsman.selection import Cycle, Scheduler, SchedulingFailure, Trace, mixed
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision


class Route(Protocol):
    """Finds an instance for one request: a strategy, or a configured scheduler."""

    @property
    def name(self) -> str: ...

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        """As things stand; nothing is reserved yet."""
        ...


class BatchPolicy(Protocol):
    """Finds instances for all waiting requests at once: a user's own `schedule`."""

    now: float | None
    seed: int
    price_per_gpu_hour: float

    @property
    def name(self) -> str: ...

    def schedule(
        self, requests: list[RequestMetadata], instances: list[ExecutionInstance]
    ) -> Iterable[SchedulingDecision]: ...


class ConfiguredRoute:
    """A scheduler put together from plugins."""

    def __init__(
        self,
        scheduler: Scheduler[Endpoint],
        name: str = "configured",
        price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR,
    ) -> None:
        self.name = name
        self._scheduler = scheduler
        self._price = price_per_gpu_hour

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        result = self._scheduler.run(cycle, endpoints)
        if isinstance(result, SchedulingFailure):
            return result
        primary = result.primary
        run = result.results[primary]
        how = ("best-of-profile", self.name, primary, len(run.ranked.totals))
        return Choice(result, decide(cycle.request, run.targets[0], endpoints, self._price, how))


# Finding instances: for one waiting request through a route, or for all of them through a user's policy.


POOL_WIDE = frozenset({"other-model", "not-accepting", "full"})
"""Codes of rejections for what an instance is, not for what this request wants beyond its model."""


APART = 0xD1342543DE82EF95
"""How far the dice of one choice are from those of the next: odd, and unlike the steps that dice themselves make."""

_64_BITS = (1 << 64) - 1


class Chooser:
    """Asks the route or the policy, each time with dice of their own, so that any choice can be repeated."""

    def __init__(self, route: Route, fleet: EndpointTable, *, traced: bool, seed: int) -> None:
        self.route = route
        self._fleet = fleet
        self._traced = traced
        self._dice = mixed(seed, 0)

    def cycle(self, request: RequestMetadata, now: float, *, traced: bool = False) -> RequestCycle:
        """A cycle for this request, with a trace if traces are kept or this one is wanted."""
        trace = Trace() if traced or self._traced else None
        seed = self._dice = (self._dice + APART) & _64_BITS  # dice are spread when they are thrown
        return Cycle(request, now, seed, trace)

    def choose(self, cycle: RequestCycle, item: Queued) -> Choice | SchedulingFailure[Endpoint]:
        """An instance for this request. Those that failed it are left out, as long as another serves its model."""
        endpoints = self._fleet.roster
        if item.excluded:
            endpoints = self._others(endpoints, item)
            if cycle.trace is not None:
                cycle.trace.note(Reason("failed-before", {"instances": tuple(sorted(item.excluded))}))
        return self.route.choose(cycle, endpoints)

    def choose_by(self, policy: BatchPolicy, requests: Sequence[RequestMetadata], now: float) -> Vetted:
        """What a policy decides about all of these requests, held against its promises. It may raise what it likes."""
        policy.now = now
        policy.seed = self._dice = (self._dice + APART) & _64_BITS
        decisions = policy.schedule(list(requests), self._fleet.instances())
        return vet(decisions, requests, EndpointTable(self._fleet.instances()), policy.price_per_gpu_hour)

    def _others(self, endpoints: Endpoints, item: Queued) -> Endpoints:
        others = endpoints.without([endpoint.row for endpoint in endpoints if str(endpoint) in item.excluded])
        serves = any(endpoint.serves(item.request.model_name) for endpoint in others)
        return others if serves else endpoints


def pool_wide(failure: SchedulingFailure[Endpoint]) -> bool:
    """Whether the next request for the same model would fare no better."""
    runs = failure.failures.values()
    return bool(runs) and all(run.all_of(POOL_WIDE) for run in runs)

"""Finding instances: for one waiting request through a route, or for all of them through a user's policy."""

from collections.abc import Sequence

from pointsman.routing.decisions import Choice, Vetted, vet
from pointsman.routing.endpoints import Endpoint, EndpointTable
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.queue import Queued
from pointsman.routing.routes import BatchPolicy, Route
from pointsman.selection import Cycle, SchedulingFailure, Trace, mixed
from pointsman.types import RequestMetadata

NOT_ABOUT_THE_REQUEST = frozenset({"serves-model", "is-healthy", "has-room"})
"""Filters that turn an endpoint away for what it is, not for what this request wants beyond its model."""


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
                cycle.trace.note(f"failed it before: {', '.join(sorted(item.excluded))}")
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
    return bool(runs) and all(run.counts.keys() <= NOT_ABOUT_THE_REQUEST for run in runs)

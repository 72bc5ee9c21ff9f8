"""Choosing instances: for one request through a route, or for all waiting requests through a user's policy."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from pointsman.errors import PluginError
from pointsman.reasons import Reason
from pointsman.routing.decisions import Choice, Vetted, decide, vet
from pointsman.routing.endpoints import Endpoint, EndpointTable
from pointsman.routing.estimates import UNKNOWN_PRICE
from pointsman.routing.filters.budget import WithinBudget
from pointsman.routing.plugins import Admitter, Endpoints, RequestCycle
from pointsman.routing.queue import FlowControl, InFlightEviction, Queued, SaturationDetector
from pointsman.routing.user_code import UserCodeFailed, decisions_in, what_it_did
from pointsman.selection import Cycle, Scheduler, SchedulingFailure, Trace, mixed
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision


class Route(Protocol):
    """Chooses an instance for one request: a strategy, or a configured scheduler."""

    @property
    def name(self) -> str: ...

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        """Choose an instance for the present state, without reserving anything."""
        ...


class BatchPolicy(Protocol):
    """Chooses instances for all waiting requests at once: a user's own `schedule`."""

    now: float | None
    seed: int
    price_per_gpu_hour: float

    @property
    def name(self) -> str: ...

    def schedule(
        self, requests: list[RequestMetadata], instances: list[ExecutionInstance]
    ) -> Iterable[SchedulingDecision]: ...


class ConfiguredRoute:
    """A scheduler configured from plugins."""

    def __init__(
        self,
        scheduler: Scheduler[Endpoint],
        name: str = "endpoint picker",
        price_per_gpu_hour: float = UNKNOWN_PRICE,
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self._price = price_per_gpu_hour

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        result = self.scheduler.run(cycle, endpoints)
        if isinstance(result, SchedulingFailure):
            return result
        primary = result.primary
        run = result.results[primary]
        how = ("best-of-profile", self.name, primary, len(run.ranked.totals))
        return Choice(result, decide(cycle.request, run.targets[0], endpoints, self._price, how))


POOL_WIDE = frozenset({"other-model", "not-accepting", "paused", "silent", "ejected", "full"})
"""Codes of rejections that apply to every request for the same model."""

SEED_STEP = 0xD1342543DE82EF95
"""The step between the seeds of two choices. It is odd, and different from the step of the generator."""

_64_BITS = (1 << 64) - 1


class Chooser:
    """Runs the route or the policy with a seed for each choice, so that any choice can be repeated."""

    def __init__(self, route: Route, fleet: EndpointTable, *, traced: bool, seed: int) -> None:
        self.route = route
        self.stand_in: Route | None = None
        """Chooses if the route raises. If None, the caller gets the exception."""
        self.failed: Callable[[Exception], None] = lambda _: None
        """Called when the stand-in has to choose."""
        self._fleet = fleet
        self._traced = traced
        self._seed = mixed(seed, 0)

    def cycle(self, request: RequestMetadata, now: float, *, traced: bool = False) -> RequestCycle:
        """A cycle for this request, with a trace if `traced` or if all cycles are traced."""
        trace = Trace() if traced or self._traced else None
        seed = self._seed = (self._seed + SEED_STEP) & _64_BITS  # the generator mixes it
        return Cycle(request, now, seed, trace)

    def choose(self, cycle: RequestCycle, item: Queued) -> Choice | SchedulingFailure[Endpoint]:
        """Choose an instance for this request, without those on which it failed if another one serves its model."""
        endpoints = self._fleet.roster
        if item.excluded:
            rest = endpoints.without([endpoint.row for endpoint in endpoints if str(endpoint) in item.excluded])
            if any(endpoint.serves(item.request.model_name) for endpoint in rest):
                endpoints = rest
            if cycle.trace is not None:
                cycle.trace.note(Reason("failed-before", {"instances": tuple(sorted(item.excluded))}))
        try:
            return self.route.choose(cycle, endpoints)
        except Exception as error:
            if self.stand_in is None:
                raise
            return self._choose_instead(self.stand_in, cycle, endpoints, error)

    def _choose_instead(
        self, stand_in: Route, cycle: RequestCycle, endpoints: Endpoints, error: Exception
    ) -> Choice | SchedulingFailure[Endpoint]:
        self.failed(error)
        cycle.state.clear()
        if cycle.trace is not None:  # the trace of the route does not explain this choice
            cycle.trace = Trace()
        choice = stand_in.choose(cycle, endpoints)
        if isinstance(choice, Choice):
            choice.stood_in = stood_in(stand_in.name, self.route.name, error)
        return choice

    def choose_by(self, policy: BatchPolicy, requests: Sequence[RequestMetadata], now: float) -> Vetted:
        """The checked decisions of a policy for these requests. Raises any exception that the policy raises."""
        policy.now = now
        policy.seed = self._seed = (self._seed + SEED_STEP) & _64_BITS
        decisions = decisions_in(policy.schedule(list(requests), self._fleet.instances()))
        return vet(decisions, requests, EndpointTable(self._fleet.instances()), policy.price_per_gpu_hour)


def stood_in(stand_in: str, policy: str, error: Exception) -> Reason:
    """The reason that says why the stand-in decided, and not the policy."""
    if isinstance(error, UserCodeFailed):
        return Reason("stand-in-decided", {"stand_in": stand_in, "policy": error.plugin, "cause": error.why})
    broken = error.broken if isinstance(error, PluginError) else what_it_did(error)
    name = error.plugin if isinstance(error, PluginError) else policy
    cause = Reason("policy-failed", {"error": broken})
    return Reason("stand-in-decided", {"stand_in": stand_in, "policy": name, "cause": cause})


def pool_wide(failure: SchedulingFailure[Endpoint]) -> bool:
    """Whether every other request for the same model would fail too."""
    runs = failure.failures.values()
    return bool(runs) and all(run.all_of(POOL_WIDE) for run in runs)


# What a dispatcher is built from


class DispatcherSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a dispatcher, whatever its plan is. Their defaults are declared only here."""

    max_tries: int = 5
    """How often a request is sent, in total, before it is refused."""
    keep_records: int = 10_000
    """How many of the newest decision records are kept."""
    traced: bool = True
    """Whether the reasons for every decision are kept."""
    seed: int = 0


DEFAULT_SETTINGS = DispatcherSettings()


class DispatchPlan(msgspec.Struct, frozen=True):
    """How requests are admitted, ordered and placed."""

    route: Route
    make_queue: Callable[[], FlowControl]
    """Makes the queue of one model."""
    policy: BatchPolicy | None = None
    """Decides on batches of requests; `route` decides when the policy raises."""
    stand_in: Route | None = None
    """Decides if users' code in `route` fails. If None, the request is refused."""
    plugins: tuple[Any, ...] = ()
    """The plugins. Each is called in all roles whose methods it has."""
    detector: SaturationDetector | None = None
    """Holds waiting requests back while it finds the pool saturated. If None, requests wait only for full instances."""
    shedding: Admitter | None = None
    """The last admitter, which denies only requests of negative priority."""
    make_eviction: Callable[[], InFlightEviction] | None = None
    """Makes what stops running requests of negative priority for more important ones. If None, none are stopped."""
    budget: WithinBudget | None = None
    """Refuses a request at once if no instance could keep its budget. If None, such requests wait."""
    waits: bool = True
    """Whether requests may wait. If not, a request that cannot be sent at once is refused."""

    @property
    def strategy(self) -> str:
        return self.route.name if self.policy is None else self.policy.name

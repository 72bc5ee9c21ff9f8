"""The interface that users subclass, and the loop that the built-in strategies share.

Enters: the waiting requests and the instances; neither is ever modified. Leaves: a decision for each request that can
be placed. The one rule: a strategy is an ordering plus a rule for choosing; the loop does the rest.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from pointsman.reasons import Reason
from pointsman.routing.decisions import Choice, Unplaced, decide
from pointsman.routing.endpoints import Endpoint, EndpointTable
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.filters.demands import Demands
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import (
    Cycle,
    FallbackProfileHandler,
    MaxScorePicker,
    Profile,
    Scheduler,
    SchedulingFailure,
    Scorer,
)
from pointsman.selection.plugins import kebab_case
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision


class SchedulingPolicy(ABC):
    """Decides which waiting requests go to which instances.

    Subclass it and write `schedule`; `prioritize` is for policies that order first and then choose. The contract: the
    arguments are not modified, every decision names a request and an instance from the arguments, each request is named
    at most once, and no instance exceeds its `max_concurrency`, counting the decisions from the same call. The
    dispatcher checks every decision. It drops a decision that breaks the contract, and FIFO decides at once instead.
    """

    name: str
    """The name in reasons and metrics; by default the class name in kebab case, without `-policy`."""
    now: float | None = None
    """The time of this call, set by the caller. If None, the time of the latest arrival is used."""
    seed: int = 0
    """The random seed: with the same seed, the same calls give the same decisions."""
    price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR
    """The price for instances without a price of their own, to check budgets."""
    unplaced: Sequence[Unplaced] = ()
    """The requests that `schedule` has not placed, each with the reason. Policies need not set this."""

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = kebab_case(cls.__name__).removesuffix("-policy").removesuffix("-strategy")

    def __init__(self, name: str = "") -> None:
        """`name` replaces the name of the class. A subclass need not call this."""
        if name:
            self.name = name

    def prioritize(self, requests: list[RequestMetadata]) -> list[RequestMetadata]:
        """The same requests, in the order in which they should be placed. Default: order of arrival."""
        return sorted(requests, key=arrival)

    @abstractmethod
    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        """A decision for each request that can be placed now. The others keep waiting."""

    def time_of(self, requests: Sequence[RequestMetadata]) -> float:
        return self.now if self.now is not None else max(map(arrival, requests), default=0.0)


def arrival(request: RequestMetadata) -> float:
    """When a request arrived; 0 if unknown."""
    return request.arrival_time if request.arrival_time is not None else 0.0


class Rule(NamedTuple):
    """A way to choose an instance, and its description."""

    words: str
    scheduler: Scheduler[Endpoint]


def rule(
    words: str,
    *scorers: Scorer[Endpoint] | tuple[Scorer[Endpoint], float],
    price: float = DEFAULT_PRICE_PER_GPU_HOUR,
    first: Sequence[Any] = (),
) -> Rule:
    """A rule that picks the best instance by these scorers, among those that can serve the request.

    `first`: filters that instances should pass. If no instance passes them, the rule ignores them.
    """
    must = Demands(price)
    any_instance: Profile[Endpoint] = Profile(words, must, *scorers, MaxScorePicker())
    if not first:
        return Rule(words, Scheduler([any_instance]))
    preferred: Profile[Endpoint] = Profile(f"{words}, preferred", must, *first, *scorers, MaxScorePicker())
    return Rule(words, Scheduler([preferred, any_instance], FallbackProfileHandler()))


class Strategy(SchedulingPolicy):
    """An ordering plus a rule per request: the base of the built-in strategies. Write `order` and `rule_for`.

    `order` depends on the request alone, so that a queue can keep it. Overriding `prioritize` instead costs a sort of
    all waiting requests on every dispatch.
    """

    plugins: tuple[Any, ...] = ()
    """Plugins that the rules read. A dispatcher notifies them of what it sends where, and of instances that leave."""

    @abstractmethod
    def order(self, request: RequestMetadata) -> Any:
        """A sort key. The request with the smallest key goes first; equal keys stay in the order given."""

    def order_at(self, request: RequestMetadata, now: float) -> Any:
        """The key at this time, if it depends on time; by default it does not.

        A queue calls this when the request is about to go, and moves the request to where the new key belongs. Keys may
        only grow.
        """
        return self.order(request)

    @classmethod
    def order_changes(cls) -> bool:
        """Whether the order depends on time. Then one class defines both methods, so that their keys compare."""
        own, at = (next(one for one in cls.__mro__ if name in vars(one)) for name in ("order", "order_at"))
        return own is at and cls is not Strategy

    @abstractmethod
    def rule_for(self, cycle: RequestCycle, endpoints: Endpoints) -> Rule:
        """How to choose an instance for this request, given the current state of the endpoints."""

    def for_batch(self, requests: Sequence[RequestMetadata], endpoints: Endpoints) -> "Strategy":
        """The strategy that decides on these requests; by default this one."""
        return self

    def prioritize(self, requests: list[RequestMetadata]) -> list[RequestMetadata]:
        if not self.order_changes():
            return sorted(requests, key=self.order)
        now = self.time_of(requests)
        return sorted(requests, key=lambda request: self.order_at(request, now))

    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        fleet = EndpointTable(instances)
        now = self.time_of(requests)
        deciding = self.for_batch(requests, fleet.roster)
        placed: dict[str, SchedulingDecision] = {}
        unplaced: list[Unplaced] = []
        for turn, request in enumerate(deciding.prioritize(requests)):
            if request.request_id in placed:
                unplaced.append(Unplaced(request, SchedulingFailure(Reason("same-id-placed"), {})))
                continue
            choice = deciding.choose(Cycle(request, now=now, seed=self.seed + turn), fleet.roster)
            if isinstance(choice, SchedulingFailure):
                unplaced.append(Unplaced(request, choice))
            else:
                placed[request.request_id] = choice.decision
                # Reserve now: later requests of this batch must see the load.
                fleet.load.reserve(choice.result.target, request.input_tokens)
        self.unplaced = unplaced
        return list(placed.values())

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        """Choose an instance for one request, without reserving it."""
        how = self.rule_for(cycle, endpoints)
        result = how.scheduler.run(cycle, endpoints)
        if isinstance(result, SchedulingFailure):
            return result
        best_of = ("best-by-rule", self.name, how.words, len(result.results[result.primary].ranked))
        return Choice(result, decide(cycle.request, result.target, endpoints, self.price_per_gpu_hour, best_of))

"""A scheduling policy as a dispatcher's plan: a queue keeps its order, and its choices are made request by request."""

from typing import Any

from pointsman.routing.queue import REQUEST_TTL_S, BandSettings, FlowControl, Queued
from pointsman.routing.routes import DispatchPlan
from pointsman.strategies.base import SchedulingPolicy, Strategy
from pointsman.strategies.fifo import FIFOPolicy

MAX_WAITING = 10_000
"""Maximum number of requests that may wait for one model."""


class StrategyOrder:
    """The order of a strategy, kept by a queue: the key of each request is computed once."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.key_at = self._key_at if strategy.order_changes() else None

    def key(self, item: Queued) -> Any:
        return self._strategy.order(item.request)

    def _key_at(self, item: Queued, now: float) -> Any:
        return self._strategy.order_at(item.request, now)


def keeps_its_order(policy: SchedulingPolicy) -> bool:
    """Whether a queue can keep the policy's order. If not, each dispatch passes it all waiting requests.

    A user's `schedule` or `prioritize` may look at all requests at once. So each dispatch calls it again, and costs at
    least a sort of the waiting requests. `order` and `rule_for` of a `Strategy` cost the same, however many wait.
    """
    return (
        isinstance(policy, Strategy)
        and type(policy).schedule is Strategy.schedule
        and type(policy).prioritize is Strategy.prioritize
    )


def plan_for(
    policy: SchedulingPolicy,
    *,
    max_waiting: int = MAX_WAITING,
    ttl_s: float = REQUEST_TTL_S,
    first_wait_s: float | None = None,
) -> DispatchPlan:
    """A plan whose queue is in the policy's order and whose choices are the policy's.

    At most `max_waiting` requests wait per model. Each waits at most `ttl_s` seconds; while there is no instance, at
    most `first_wait_s`, if that is given. FIFO decides if a user's policy fails.
    """
    strategy = policy if isinstance(policy, Strategy) else FIFOPolicy()
    band = BandSettings(max_requests=max_waiting, max_bytes=None, ordering=StrategyOrder(strategy))
    return DispatchPlan(
        strategy,
        lambda: FlowControl([band], single_band=True, default_request_ttl_s=ttl_s, first_wait_s=first_wait_s),
        policy=None if keeps_its_order(policy) else policy,
        plugins=strategy.plugins,
        stand_in=FIFOPolicy(),
    )

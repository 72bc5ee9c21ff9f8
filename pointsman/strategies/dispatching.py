"""A policy at work: the dispatcher that carries a scheduling policy out on a live queue."""

from typing import Any

from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.queue import BandSettings, FlowControl, Queued
from pointsman.strategies.base import SchedulingPolicy, Strategy
from pointsman.strategies.fifo import FifoStrategy


class StrategyOrder:
    """The order of a strategy, kept by a queue: each request's place is worked out once."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def key(self, item: Queued) -> Any:
        return self._strategy.order(item.request)


def keeps_its_order(policy: SchedulingPolicy) -> bool:
    """Whether a queue can keep the policy's order. If not, each dispatch hands it everything that waits.

    A `schedule` or `prioritize` of the user's own may look at all requests at once, so it is asked anew each time: that
    costs at least a sort of what waits. `order` and `rule_for` of a `Strategy` cost the same however much waits.
    """
    return (
        isinstance(policy, Strategy)
        and type(policy).schedule is Strategy.schedule
        and type(policy).prioritize is Strategy.prioritize
    )


def dispatcher_for(
    policy: SchedulingPolicy,
    *,
    max_waiting: int = 10_000,
    ttl_s: float = 60.0,
    first_wait_s: float | None = None,
    max_tries: int = 3,
    traced: bool = True,
    keep_records: int = 10_000,
    seed: int = 0,
) -> Dispatcher:
    """A dispatcher whose queue is in the policy's order and whose choices are the policy's.

    `max_waiting` requests may wait per model, each for `ttl_s` seconds; for `first_wait_s`, if that is given, while
    there is no instance. FIFO decides while a policy of the user's own raises.
    """
    strategy = policy if isinstance(policy, Strategy) else FifoStrategy()
    band = BandSettings(max_requests=max_waiting, max_bytes=None, ordering=StrategyOrder(strategy))
    return Dispatcher(
        strategy,
        lambda: FlowControl([band], single_band=True, default_request_ttl_s=ttl_s, first_wait_s=first_wait_s),
        policy=None if keeps_its_order(policy) else policy,
        max_tries=max_tries,
        traced=traced,
        keep_records=keep_records,
        seed=seed,
    )

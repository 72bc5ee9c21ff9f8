"""One queue per model, so that no model's requests hold up another's, and what is known of requests under way."""

from collections.abc import Callable

import msgspec

from pointsman.routing.endpoints import Endpoint, EndpointTable
from pointsman.routing.events import Refusal
from pointsman.routing.queue import FlowControl, InFlightEviction, Queued

MOST_POOLS = 1_000
"""With this many models asked for, requests for one more are refused unless somebody serves it."""


class Sent(msgspec.Struct, eq=False):
    """A request on an instance."""

    item: Queued
    pool: "Pool"
    endpoint: Endpoint
    strategy: str
    lightness: float
    """Of the endpoint, just before."""
    begun: bool = False
    """Part of the answer is out: it must not be sent again."""
    revoked: Refusal | None = None
    """It is being stopped for more important work."""


class Pool:
    """The requests for one model."""

    __slots__ = ("_fleet", "eviction", "model", "queue", "sent")

    def __init__(self, model: str, queue: FlowControl, eviction: InFlightEviction | None, fleet: EndpointTable) -> None:
        self.model = model
        self.queue = queue
        self.eviction = eviction
        """Stops running work for more important work of the same model; None: nothing is stopped."""
        self.sent = 0
        """Requests that were sent and have not ended."""
        self._fleet = fleet

    def started(self, item: Queued) -> None:
        """It was sent."""
        self.sent += 1
        if self.eviction is not None:
            self.eviction.started(item)

    def ended(self, item: Queued, now: float) -> None:
        """It has left its instance, whatever the reason."""
        self.sent -= 1
        if self.eviction is not None:
            self.eviction.ended(item, now)

    @property
    def is_empty(self) -> bool:
        """Whether nobody serves the model."""
        return not len(self._fleet.serving(self.model))


class Pools:
    """The pool of each model. Names come from clients, without end: those that nobody serves are bounded."""

    def __init__(
        self,
        make_queue: Callable[[], FlowControl],
        make_eviction: Callable[[], InFlightEviction] | None,
        fleet: EndpointTable,
    ) -> None:
        self._make_queue = make_queue
        self._make_eviction = make_eviction
        self._fleet = fleet
        self._by_model: dict[str, Pool] = {}
        self.busy: dict[str, Pool] = {}
        """At least those in which somebody waits."""

    def of(self, model: str) -> Pool | None:
        """The pool of this model; None if too many models are waited for that nobody serves."""
        pool = self._by_model.get(model)
        if pool is None:
            if len(self._by_model) >= MOST_POOLS and not len(self._fleet.serving(model)) and not self._forget():
                return None
            eviction = None if self._make_eviction is None else self._make_eviction()
            pool = self._by_model[model] = Pool(model, self._make_queue(), eviction, self._fleet)
        self.busy[model] = pool
        return pool

    def go_on_from(self, other: "Pools") -> None:
        """A pool for every one of another's, whose requests are taken over one by one."""
        for model, pool in other._by_model.items():
            eviction = None if self._make_eviction is None else self._make_eviction()
            successor = self._by_model[model] = Pool(model, self._make_queue(), eviction, self._fleet)
            successor.queue.go_on_from(pool.queue)

    def idle(self, model: str) -> Pool | None:
        """The pool of this model if nobody waits there, and nobody who does not wait would upset the turns."""
        pool = self._by_model.get(model)
        return pool if pool is not None and pool.queue.is_open else None

    def _forget(self) -> int:
        """Forget the pools of models that nobody serves and nobody asks for; how many they were."""
        idle = [m for m, pool in self._by_model.items() if not len(pool.queue) and not pool.sent and pool.is_empty]
        for model in idle:
            del self._by_model[model]
        return len(idle)

    def waiting(self) -> list[Pool]:
        """Those in which somebody waits."""
        if not self.busy:
            return []
        waiting = [pool for pool in self.busy.values() if len(pool.queue)]
        if len(waiting) < len(self.busy):
            self.busy = {pool.model: pool for pool in waiting}
        return waiting

    def members_changed(self, now: float) -> None:
        """Instances have come, gone or changed."""
        for pool in self._by_model.values():
            pool.queue.pool_changed(pool.is_empty, now)

    def with_expired(self, now: float) -> list[Pool]:
        """Those in which somebody has waited too long."""
        return [pool for pool in self.waiting() if (due := pool.queue.next_expiry()) is not None and due <= now]

    def next_expiry(self) -> float | None:
        """When somebody will have waited too long; None: never, as things stand."""
        waiting = self.waiting()
        if not waiting:
            return None
        return min((due for pool in waiting if (due := pool.queue.next_expiry()) is not None), default=None)

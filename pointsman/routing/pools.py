"""One queue per model, so that no model's requests hold up another's, and what is known of requests under way."""

from collections.abc import Callable

from pointsman.routing.endpoints import Endpoint, Fleet
from pointsman.routing.outcomes import Refusal
from pointsman.routing.queue import FlowControl, Queued

MOST_UNSERVED = 1_000
"""Models that may be waited for although nobody serves them."""


class Sent:
    """A request on an instance."""

    __slots__ = ("at", "begun", "endpoint", "item", "lightness", "pool", "revoked", "strategy")

    def __init__(
        self, item: Queued, pool: "Pool", endpoint: Endpoint, strategy: str, at: float, lightness: float
    ) -> None:
        self.item = item
        self.pool = pool
        self.endpoint = endpoint
        self.strategy = strategy
        self.at = at
        self.lightness = lightness
        """Of the endpoint, just before."""
        self.begun = False
        """Part of the answer is out: it must not be sent again."""
        self.revoked: Refusal | None = None
        """It is being stopped for more important work."""


class Pool:
    """The requests for one model that wait."""

    __slots__ = ("_fleet", "model", "queue")

    def __init__(self, model: str, queue: FlowControl, fleet: Fleet) -> None:
        self.model = model
        self.queue = queue
        self._fleet = fleet

    @property
    def is_empty(self) -> bool:
        """Whether nobody serves the model."""
        return not len(self._fleet.serving(self.model))


class Pools:
    """The pool of each model. Names come from clients, without end: those that nobody serves are bounded."""

    def __init__(self, make_queue: Callable[[], FlowControl], fleet: Fleet) -> None:
        self._make_queue = make_queue
        self._fleet = fleet
        self._by_model: dict[str, Pool] = {}
        self._busy: dict[str, Pool] = {}
        """At least those in which somebody waits."""

    def of(self, model: str) -> Pool | None:
        """The pool of this model; None if too many models are waited for that nobody serves."""
        pool = self._by_model.get(model)
        if pool is None:
            if len(self._by_model) >= MOST_UNSERVED and not len(self._fleet.serving(model)) and not self._forget():
                return None
            pool = self._by_model[model] = Pool(model, self._make_queue(), self._fleet)
        self._busy[model] = pool
        return pool

    def _forget(self) -> int:
        """Forget the pools that nobody serves and nobody waits in; how many they were."""
        idle = [model for model, pool in self._by_model.items() if not len(pool.queue) and pool.is_empty]
        for model in idle:
            del self._by_model[model]
        return len(idle)

    def waiting(self) -> list[Pool]:
        """Those in which somebody waits."""
        waiting = [pool for pool in self._busy.values() if len(pool.queue)]
        if len(waiting) < len(self._busy):
            self._busy = {pool.model: pool for pool in waiting}
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
        return min((due for pool in self.waiting() if (due := pool.queue.next_expiry()) is not None), default=None)

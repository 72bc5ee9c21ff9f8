"""When each waiting request has waited too long.

It may wait `ttl_s` while instances are running and `no_endpoint_ttl_s` while none are, counted from its arrival or from
the last change between the two, whichever is later. One change moves all deadlines at once; nobody walks over them.
"""

from math import inf

from pointsman.routing.queue.items import Queued
from pointsman.routing.queue.lazy_heap import LazyHeap


class Deadlines:
    """Waiting requests by the time at which they expire. A budget of 0 or less: never."""

    def __init__(self, no_endpoint_ttl_s: float) -> None:
        self.no_endpoint_ttl_s = no_endpoint_ttl_s
        self.pool_is_empty: bool | None = None
        """None: nobody has said yet."""
        self._changed_at = -inf
        self._by_due: LazyHeap[Queued] = LazyHeap()
        """By deadline while instances run, as of some time in the past: a change of the pool only ever moves it on."""
        self._by_arrival: LazyHeap[Queued] = LazyHeap()
        """While there are none, all have the same budget, and who came first expires first."""

    def add(self, item: Queued) -> None:
        if item.ttl_s is not None:
            self._by_due.put(item, self._due(item, item.ttl_s), item.seq)
        if self.no_endpoint_ttl_s > 0:
            self._by_arrival.put(item, item.enqueued_at, item.seq)

    def discard(self, item: Queued) -> None:
        self._by_due.discard(item)
        self._by_arrival.discard(item)

    def pool_changed(self, is_empty: bool, now: float) -> None:
        """Whether there is anybody to serve; only a change is news."""
        if is_empty is not self.pool_is_empty:
            self.pool_is_empty = is_empty
            self._changed_at = now

    def go_on_from(self, other: "Deadlines") -> None:
        """What was true of the pool for another is true here."""
        self.pool_is_empty, self._changed_at = other.pool_is_empty, other._changed_at

    def first(self) -> tuple[Queued, float] | None:
        """Who expires first, and when; None if nobody ever will."""
        if self.pool_is_empty:
            item = self._by_arrival.first()
            return None if item is None else (item, self._due(item, self.no_endpoint_ttl_s))
        while (item := self._by_due.first()) is not None:
            assert item.ttl_s is not None
            due = self._due(item, item.ttl_s)
            if due <= self._by_due.first_key():
                return item, due
            self._by_due.put(item, due, item.seq)
        return None

    def _due(self, item: Queued, budget_s: float) -> float:
        start = item.enqueued_at if item.enqueued_at > self._changed_at else self._changed_at
        return start + budget_s


def shorter_ttl(default_s: float, own_s: float | None) -> float | None:
    """How long a request may wait: the queue's limit, or its own if that is less. None: for ever."""
    if own_s is None or own_s <= 0:
        return default_s if default_s > 0 else None
    return min(default_s, own_s) if default_s > 0 else own_s

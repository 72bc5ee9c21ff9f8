"""When each waiting request has waited too long.

It may wait `ttl_s` while instances are running and `no_endpoint_ttl_s` while none are, or what it said itself if that
is less, counted from its arrival or from the last change between the two, whichever is later. One change moves all
deadlines at once; nobody walks over them.
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
        self._served: LazyHeap[Queued] = LazyHeap()
        """By deadline while instances run, as of some time in the past: a change of the pool only ever moves it on."""
        self._alone: LazyHeap[Queued] = LazyHeap()
        """The same while there are none."""

    def add(self, item: Queued) -> None:
        if item.ttl_s is not None:
            self._served.put(item, self._due(item, item.ttl_s), item.seq)
        alone_s = self.budget_s(item, True)
        if alone_s is not None:
            self._alone.put(item, self._due(item, alone_s), item.seq)

    def discard(self, item: Queued) -> None:
        self._served.discard(item)
        self._alone.discard(item)

    def budget_s(self, item: Queued, pool_is_empty: bool) -> float | None:
        """How long it may wait; None: for ever."""
        return shorter_ttl(self.no_endpoint_ttl_s, item.request.timeout_s) if pool_is_empty else item.ttl_s

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
        is_empty = bool(self.pool_is_empty)
        heap = self._alone if is_empty else self._served
        while (item := heap.first()) is not None:
            budget_s = self.budget_s(item, is_empty)
            assert budget_s is not None, "else it would not be there"
            due = self._due(item, budget_s)
            if due <= heap.first_key():
                return item, due
            heap.put(item, due, item.seq)
        return None

    def _due(self, item: Queued, budget_s: float) -> float:
        start = item.enqueued_at if item.enqueued_at > self._changed_at else self._changed_at
        return start + budget_s


def shorter_ttl(default_s: float, own_s: float | None) -> float | None:
    """How long a request may wait: the queue's limit, or its own if that is less. None: for ever."""
    if own_s is None or own_s <= 0:
        return default_s if default_s > 0 else None
    return min(default_s, own_s) if default_s > 0 else own_s

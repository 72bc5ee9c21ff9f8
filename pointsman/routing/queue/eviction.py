"""Eviction of work in flight: a sheddable request is stopped when more important work could not start otherwise."""

from math import ceil, inf

from pointsman.routing.events import Refusal
from pointsman.routing.queue import refusals
from pointsman.routing.queue.items import Blocked, Queued
from pointsman.routing.queue.lazy_heap import LazyHeap

# When each waiting request has waited too long.
#
# It may wait `ttl_s` while instances are running and `no_endpoint_ttl_s` while none are, or what it said itself if that
# is less, counted from its arrival or from the last change between the two, whichever is later. One change moves all
# deadlines at once; nobody walks over them.


class Deadlines:
    """Waiting requests by the time at which they expire. A budget of 0 or less: never."""

    def __init__(self, no_endpoint_ttl_s: float) -> None:
        self.no_endpoint_ttl_s = no_endpoint_ttl_s
        self.pool_is_empty: bool | None = None
        """None: nobody has said yet."""
        self.changed_at = -inf
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
            self.changed_at = now

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
        start = item.enqueued_at if item.enqueued_at > self.changed_at else self.changed_at
        return start + budget_s


def shorter_ttl(default_s: float, own_s: float | None) -> float | None:
    """How long a request may wait: the queue's limit, or its own if that is less. None: for ever."""
    if own_s is None or own_s <= 0:
        return default_s if default_s > 0 else None
    return min(default_s, own_s) if default_s > 0 else own_s


# Waiting work that may be evicted for more important work: everything of negative priority.


class Sheddable:
    """Who has to go first: the lowest priority, and of that the newest."""

    def __init__(self) -> None:
        self._order: LazyHeap[Queued] = LazyHeap()
        self._held: dict[int, tuple[int, int]] = {}
        """Priority -> requests and bytes."""

    def add(self, item: Queued) -> None:
        if item.priority < 0:
            self._order.put(item, item.priority, -item.seq)
            requests, size_bytes = self._held.get(item.priority, (0, 0))
            self._held[item.priority] = requests + 1, size_bytes + item.size_bytes

    def discard(self, item: Queued) -> None:
        if item.priority < 0 and self._order.discard(item):
            requests, size_bytes = self._held.pop(item.priority)
            if requests > 1:
                self._held[item.priority] = requests - 1, size_bytes - item.size_bytes

    def first(self) -> Queued | None:
        """Who goes first; None when nobody may be evicted."""
        return self._order.first()

    def below(self, priority: int) -> tuple[int, int]:
        """Requests and bytes that could be evicted for work of this priority."""
        lower = [held for other, held in self._held.items() if other < priority]
        return sum(requests for requests, _ in lower), sum(size_bytes for _, size_bytes in lower)


class InFlightEviction:
    """Chooses whom to stop: of negative priority, the lowest first, and of those the newest.

    It stops a few and then waits to see what that has brought: until all of them have ended (or have not in
    `confirmation_s`), and `cooling_s` longer. Those that are late are still expected to end, and count as room to come.
    """

    def __init__(self, confirmation_s: float = 10.0, cooling_s: float = 0.5, most_at_once: int = 2) -> None:
        self._confirmation_s = confirmation_s
        self._cooling_s = cooling_s
        self._most_at_once = most_at_once
        self._in_flight = 0
        self._started = 0
        self._sheddable: LazyHeap[Queued] = LazyHeap()
        self._stopping: set[Queued] = set()
        self._stopped_at = -inf
        self._confirmed_at = -inf

    def started(self, item: Queued) -> None:
        """It was dispatched."""
        self._in_flight += 1
        self._started += 1
        if item.priority < 0:
            self._sheddable.put(item, item.priority, -self._started)

    def ended(self, item: Queued, now: float) -> None:
        """It has left its instance, whatever the reason."""
        self._in_flight -= 1
        self._sheddable.discard(item)
        if item in self._stopping:
            self._stopping.discard(item)
            self._confirmed_at = now

    def victims(self, now: float, saturation: float, blocked: Blocked | None) -> list[tuple[Queued, Refusal]]:
        """Who is to be stopped now, for the band that flow control could not let through."""
        if blocked is None or blocked.ceiling <= 0 or self._must_wait(now):
            return []
        victims: list[tuple[Queued, Refusal]] = []
        wanted = 0
        while (first := self._sheddable.first()) is not None and first.priority < blocked.priority:
            wanted = wanted or self._wanted(saturation, blocked.ceiling)
            if len(victims) == wanted:
                break
            victims.append((self._sheddable.pop(), refusals.evicted_in_flight(first, blocked.priority)))
        if victims:
            self._stopping.update(victim for victim, _ in victims)
            self._stopped_at = now
        return victims

    def _must_wait(self, now: float) -> bool:
        unconfirmed = bool(self._stopping) and now < self._stopped_at + self._confirmation_s
        return unconfirmed or now < self._confirmed_at + self._cooling_s

    def _wanted(self, saturation: float, ceiling: float) -> int:
        """How many of equal size would bring saturation down to the ceiling."""
        each = saturation / self._in_flight
        to_come = len(self._stopping) * each
        return min(max(1, ceil((saturation - ceiling - to_come) / each)), self._most_at_once)

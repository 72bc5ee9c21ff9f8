"""The backlog of a queue: the requests that wait or are held, with their order, their bounds and their deadlines."""

from collections.abc import Iterator
from math import inf

from pointsman.routing.events import Refusal
from pointsman.routing.queue.bands import Band, Bands, Occupancy, displaced
from pointsman.routing.queue.items import Queued, QueueStage
from pointsman.routing.queue.lazy_heap import LazyHeap


def shorter_ttl(default_s: float, own_s: float | None) -> float | None:
    """How long a request may wait: the queue's limit, or its own limit if that is less. None if there is no limit."""
    if own_s is None or own_s <= 0:
        return default_s if default_s > 0 else None
    return min(default_s, own_s) if default_s > 0 else own_s


class Deadlines:
    """Waiting requests by the time at which they expire.

    A request may wait `ttl_s` while instances run, and `no_endpoint_ttl_s` while none runs; or its own timeout, if that
    is shorter. The time counts from its arrival, or from when the first instance came or the last one left, whichever
    is later. A limit of 0 or less means no limit. A change of the pool moves all deadlines without visiting them.
    """

    def __init__(self, no_endpoint_ttl_s: float) -> None:
        self.no_endpoint_ttl_s = no_endpoint_ttl_s
        self.pool_is_empty: bool | None = None
        """None if not known yet."""
        self.changed_at = -inf
        self._served: LazyHeap[Queued] = LazyHeap()
        """Requests by their deadline while instances run. The deadlines may be out of date but are never too late: a
        change of the pool only postpones them."""
        self._alone: LazyHeap[Queued] = LazyHeap()
        """Requests by their deadline while no instance runs."""

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
        """How long a request may wait; None if there is no limit."""
        return shorter_ttl(self.no_endpoint_ttl_s, item.request.timeout_s) if pool_is_empty else item.ttl_s

    def pool_changed(self, is_empty: bool, now: float) -> None:
        if is_empty is not self.pool_is_empty:
            self.pool_is_empty = is_empty
            self.changed_at = now

    def first(self) -> tuple[Queued, float] | None:
        """The request that expires first, and when; None if none ever expires."""
        is_empty = bool(self.pool_is_empty)
        heap = self._alone if is_empty else self._served
        while (item := heap.first()) is not None:
            budget_s = self.budget_s(item, is_empty)
            assert budget_s is not None, "requests without a limit are not in the heap"
            due = self._due(item, budget_s)
            if due <= heap.first_key():
                return item, due
            heap.put(item, due, item.seq)
        return None

    def _due(self, item: Queued, budget_s: float) -> float:
        start = item.enqueued_at if item.enqueued_at > self.changed_at else self.changed_at
        return start + budget_s


class Sheddable:
    """Waiting requests of negative priority, in the order in which others displace them: the lowest priority first, and
    within a priority the newest first."""

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
        """The request to displace first; None if there is none."""
        return self._order.first()

    def below(self, priority: int) -> tuple[int, int]:
        """(requests, bytes) that a request of this priority could displace."""
        lower = [held for other, held in self._held.items() if other < priority]
        return sum(requests for requests, _ in lower), sum(size_bytes for _, size_bytes in lower)


class Backlog:
    """Requests that wait or are held. They take up room in both stages, but are in the order only while they wait."""

    def __init__(self, bands: Bands, total: Occupancy, deadlines: Deadlines) -> None:
        self.bands = bands
        self.total = total
        self.deadlines = deadlines
        self.by_id: dict[str, Queued] = {}
        self._sheddable = Sheddable()

    def fits(self, item: Queued, band: Band) -> bool:
        return band.room.fits(item.size_bytes) and self.total.fits(item.size_bytes)

    def shortage(self, item: Queued, band: Band) -> Occupancy | None:
        """The bound that a request would break even if it displaced all requests that it may; None if it would fit."""
        requests, size_bytes = self._sheddable.below(item.priority)
        in_band = (requests, size_bytes) if self.bands.single else (0, 0)
        if not band.room.fits_without(item.size_bytes, *in_band):
            return band.room
        return None if self.total.fits_without(item.size_bytes, requests, size_bytes) else self.total

    def displace(self, item: Queued, band: Band) -> list[tuple[Queued, Refusal]]:
        """Remove sheddable requests until this request fits. Returns the removed requests with their refusals."""
        gone = []
        for room in (band.room, self.total):
            while not room.fits(item.size_bytes):
                victim = self._sheddable.first()
                assert victim is not None
                gone.append((victim, displaced(victim, item, room.shortage(item.size_bytes))))
                self.remove(victim)
        return gone

    def enter(self, item: Queued) -> None:
        """Let a request take up room."""
        self.by_id[item.request.request_id] = item
        item.band.room.enter(item.size_bytes)
        self.total.enter(item.size_bytes)

    def leave(self, item: Queued, stage: QueueStage) -> None:
        """Release the room of a held request."""
        item.stage = stage
        del self.by_id[item.request.request_id]
        item.band.room.leave(item.size_bytes)
        self.total.leave(item.size_bytes)

    def wait(self, item: Queued) -> None:
        """Let a request wait that is in its band already. From now on it may expire or be displaced."""
        item.stage = QueueStage.WAITING
        self.deadlines.add(item)
        self._sheddable.add(item)

    def hold(self, item: Queued, now: float) -> Queued:
        """Move a request from waiting to held."""
        item.band.take(item)
        self.deadlines.discard(item)
        self._sheddable.discard(item)
        item.stage, item.taken_at = QueueStage.HELD, now
        return item

    def remove(self, item: Queued) -> None:
        """Remove a waiting request."""
        item.band.discard(item)
        self.deadlines.discard(item)
        self._sheddable.discard(item)
        self.leave(item, QueueStage.LEFT)

    def waiting(self) -> Iterator[Queued]:
        for band in self.bands.high_to_low:
            yield from band.in_order()

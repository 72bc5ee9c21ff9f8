"""Waiting work that may be evicted for more important work: everything of negative priority."""

from pointsman.routing.queue.items import Queued
from pointsman.routing.queue.lazy_heap import LazyHeap


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

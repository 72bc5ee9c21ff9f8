"""Requests that nobody can take now, for reasons of their own: they wait beside the order, and hold up nobody."""

from collections import OrderedDict
from collections.abc import Iterator

from pointsman.routing.queue.items import Queued
from pointsman.routing.queue.lazy_heap import LazyHeap


class Parked:
    """Looked at again a few at a time: who stands first in the order each time, and the others by turns.

    So whoever waits for room that is scarce gets it in order, and none of many is looked at never again.
    """

    __slots__ = ("_in_order", "_in_turn")

    def __init__(self) -> None:
        self._in_order: LazyHeap[Queued] = LazyHeap()
        self._in_turn: OrderedDict[Queued, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._in_turn)

    def __contains__(self, item: Queued) -> bool:
        return item in self._in_turn

    def __iter__(self) -> Iterator[Queued]:
        return self._in_order.in_order()

    def add(self, item: Queued) -> None:
        self._in_order.put(item, item.order_key, item.seq)
        self._in_turn[item] = None

    def remove(self, item: Queued) -> None:
        self._in_order.discard(item)
        del self._in_turn[item]

    def first(self) -> Queued:
        """Who stands first in the order. There must be one."""
        first = self._in_order.first()
        assert first is not None
        return first

    def longest_unseen(self) -> Queued:
        """Who was not looked at for longest. There must be one."""
        return next(iter(self._in_turn))

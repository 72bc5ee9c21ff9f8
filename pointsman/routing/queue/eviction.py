"""Eviction of running requests (by default of negative priority) when more important ones could not start otherwise."""

from math import ceil, inf
from typing import Any, Protocol, runtime_checkable

from pointsman.routing.events import Refusal
from pointsman.routing.queue.bands import evicted_in_flight
from pointsman.routing.queue.items import Blocked, Queued
from pointsman.routing.queue.lazy_heap import LazyHeap


@runtime_checkable
class EvictionFilter(Protocol):
    """Decides which running requests may be stopped at all."""

    def evictable(self, item: Queued) -> bool: ...


@runtime_checkable
class EvictionOrder(Protocol):
    """Decides which running request is stopped first."""

    def eviction_key(self, item: Queued, number: int) -> Any:
        """The position of a request in the order, smaller first. `number` counts the requests sent, from 1."""
        ...


class SheddableEvictionFilter:
    """Only requests of negative priority may be stopped."""

    def evictable(self, item: Queued) -> bool:
        return item.priority < 0


class PriorityThenTimeEvictionOrderPolicy:
    """The lowest priority is stopped first, and within a priority the newest, because it loses the least work."""

    def eviction_key(self, item: Queued, number: int) -> tuple[int, int]:
        return item.priority, -number


class InFlightEviction:
    """Chooses requests to stop: those that `may_stop` allows, in this `order`, for a blocked band of higher priority.

    It stops a few requests, waits until all of them have ended (at most `confirmation_s`), and then waits `cooling_s`
    longer. Requests that are late to end are still expected to end, and count as future room.
    """

    def __init__(
        self,
        may_stop: EvictionFilter | None = None,
        order: EvictionOrder | None = None,
        *,
        confirmation_s: float = 10.0,
        cooling_s: float = 0.5,
        max_at_once: int = 2,
    ) -> None:
        self._may_stop = may_stop or SheddableEvictionFilter()
        self._order = order or PriorityThenTimeEvictionOrderPolicy()
        self._confirmation_s = confirmation_s
        self._cooling_s = cooling_s
        self._max_at_once = max_at_once
        self._in_flight = 0
        self._started = 0
        self._sheddable: LazyHeap[Queued] = LazyHeap()
        self._stopping: set[Queued] = set()
        self._stopped_at = -inf
        self._confirmed_at = -inf

    def started(self, item: Queued) -> None:
        """Note that a request was sent."""
        self._in_flight += 1
        self._started += 1
        if self._may_stop.evictable(item):
            self._sheddable.put(item, self._order.eviction_key(item, self._started), -self._started)

    def ended(self, item: Queued, now: float) -> None:
        """Note that a request has left its instance, for whatever reason."""
        self._in_flight -= 1
        self._sheddable.discard(item)
        if item in self._stopping:
            self._stopping.discard(item)
            self._confirmed_at = now

    def victims(self, now: float, saturation: float, blocked: Blocked | None) -> list[tuple[Queued, Refusal]]:
        """The requests to stop now, each with its refusal, for the band that flow control has blocked."""
        if blocked is None or blocked.ceiling <= 0 or self._must_wait(now):
            return []
        victims: list[tuple[Queued, Refusal]] = []
        wanted = 0
        while (first := self._sheddable.first()) is not None and first.priority < blocked.priority:
            wanted = wanted or self._wanted(saturation, blocked.ceiling)
            if len(victims) == wanted:
                break
            victims.append((self._sheddable.pop(), evicted_in_flight(first, blocked.priority)))
        if victims:
            self._stopping.update(victim for victim, _ in victims)
            self._stopped_at = now
        return victims

    def _must_wait(self, now: float) -> bool:
        unconfirmed = bool(self._stopping) and now < self._stopped_at + self._confirmation_s
        return unconfirmed or now < self._confirmed_at + self._cooling_s

    def _wanted(self, saturation: float, ceiling: float) -> int:
        """How many requests of equal size would bring saturation down to the ceiling."""
        each = saturation / self._in_flight
        to_come = len(self._stopping) * each
        return min(max(1, ceil((saturation - ceiling - to_come) / each)), self._max_at_once)

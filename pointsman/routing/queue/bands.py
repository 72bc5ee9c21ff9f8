"""Priority bands: each has its bounds, its flows with their order, and the turns of those flows."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import msgspec

from pointsman.errors import ConfigError
from pointsman.routing.queue.fairness import FairnessPolicy, GlobalStrictFairnessPolicy
from pointsman.routing.queue.items import Queued
from pointsman.routing.queue.lazy_heap import LazyHeap
from pointsman.routing.queue.ordering import FcfsOrderingPolicy, OrderingPolicy

# How much may wait in one place, and how much does.


def check_bounds(max_requests: int | None, max_bytes: int | None) -> None:
    """Raises ConfigError for bounds that would let nobody in."""
    problems = [
        f"{name} must be at least 1, it is {bound}; leave it out for the default"
        for name, bound in (("maxRequests", max_requests), ("maxBytes", max_bytes))
        if bound is not None and bound < 1
    ]
    if problems:
        raise ConfigError(problems)


class Occupancy:
    """Bounds in requests and in bytes, with what fills them. None: unlimited."""

    __slots__ = ("_place", "_setting", "max_bytes", "max_requests", "requests", "size_bytes")

    def __init__(self, max_requests: int | None, max_bytes: int | None, place: str, setting: str) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.requests = 0
        self.size_bytes = 0
        self._place = place
        """Where this is, as a part of a sentence: at priority 0."""
        self._setting = setting
        """What to change in the configuration for more room."""

    def fits(self, size_bytes: int) -> bool:
        """Whether one more request of this size may wait here."""
        return (self.max_requests is None or self.requests < self.max_requests) and (
            self.max_bytes is None or self.size_bytes + size_bytes <= self.max_bytes
        )

    def enter(self, size_bytes: int) -> None:
        self.requests += 1
        self.size_bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        self.requests -= 1
        self.size_bytes -= size_bytes

    def fits_without(self, size_bytes: int, fewer_requests: int, fewer_bytes: int) -> bool:
        """Whether it would fit if this much left."""
        return (self.max_requests is None or self.requests - fewer_requests < self.max_requests) and (
            self.max_bytes is None or self.size_bytes - fewer_bytes + size_bytes <= self.max_bytes
        )

    def shortage(self, size_bytes: int) -> dict[str, Any]:
        """Which bound one more request of this size would break, and where it is set: facts of a reason."""
        if self.max_requests is not None and self.requests >= self.max_requests:
            facts = {"waiting": self.requests, "limit": self.max_requests, "setting": f"{self._setting}.maxRequests"}
        else:
            facts = {"waiting": self.size_bytes, "limit": self.max_bytes, "setting": f"{self._setting}.maxBytes"}
            facts["size_bytes"] = size_bytes
        return facts | {"where": self._place}


# Requests that nobody can take now, for reasons of their own: they wait beside the order, and hold up nobody.


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


MOST_DYNAMIC_BANDS = 64
"""Priorities come from clients. Beyond this many bands made on demand, empty ones go and then band 0 takes the rest."""


class BandSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a band is made from."""

    priority: int = 0
    max_requests: int | None = 5_000
    max_bytes: int | None = 1_000_000_000
    fairness: FairnessPolicy = msgspec.field(default_factory=GlobalStrictFairnessPolicy)
    ordering: OrderingPolicy = msgspec.field(default_factory=FcfsOrderingPolicy)

    def __post_init__(self) -> None:
        check_bounds(self.max_requests, self.max_bytes)


class Band:
    """The waiting work of one priority: flows, each in order, and whose turn it is."""

    __slots__ = ("flows", "in_flight", "ordering", "parked", "priority", "room", "turns")

    def __init__(
        self, priority: int, settings: BandSettings, *, place: str = "", setting: str = "priorityBands[]"
    ) -> None:
        self.priority = priority
        self.ordering = settings.ordering
        self.turns = settings.fairness.for_band()
        self.flows: dict[str, LazyHeap[Queued]] = {}
        """Only those with waiting work."""
        self.parked = Parked()
        self.in_flight = 0
        """Requests served and not ended; turns may want to hear of their end."""
        place = place or f"at priority {priority}"
        self.room = Occupancy(settings.max_requests, settings.max_bytes, place, f"flowControl.{setting}")

    def put(self, item: Queued) -> None:
        """It waits now, or again."""
        flow = self.flows.get(item.flow)
        if flow is None:
            flow = self.flows[item.flow] = LazyHeap()
        flow.put(item, item.order_key, item.seq)
        if flow.first() is item:
            try:
                self.turns.waits(item.flow, item)
            except Exception:
                self.discard(item)
                raise

    def next(self) -> Queued:
        """The head of the flow whose turn it is. There must be one."""
        name = self.turns.next()
        assert name is not None
        head = self.flows[name].first()
        assert head is not None
        return head

    def take(self, item: Queued) -> None:
        """It goes to be served."""
        if item in self.parked:
            self.parked.remove(item)
            self.put(item)  # so that it has its turn like everybody
        flow = self.flows[item.flow]
        flow.discard(item)
        self.turns.taken(item)
        self._head_changed(item.flow, flow)

    def discard(self, item: Queued) -> None:
        """It leaves without having had its turn."""
        if item in self.parked:
            self.parked.remove(item)
            return
        flow = self.flows[item.flow]
        was_head = flow.first() is item
        flow.discard(item)
        if was_head:
            self._head_changed(item.flow, flow)

    def in_order(self) -> Iterator[Queued]:
        """Everybody, as they would be taken if nobody came or went. Tried out on a copy of the turns; for display."""
        yield from self.parked
        turns = deepcopy(self.turns)
        left = {name: deque(flow.in_order()) for name, flow in self.flows.items()}
        while (name := turns.next()) is not None:
            flow = left[name]
            item = flow.popleft()
            turns.taken(item)
            if flow:
                turns.waits(name, flow[0])
            else:
                turns.leaves(name)
            yield item

    def _head_changed(self, name: str, flow: LazyHeap[Queued]) -> None:
        head = flow.first()
        if head is not None:
            self.turns.waits(name, head)
        else:
            del self.flows[name]
            self.turns.leaves(name)


class Bands:
    """All bands, highest priority first.

    Band 0 always exists. A priority that nobody provisioned gets a band made from `default` (`default_negative` below
    zero, if there is one), and without those it goes to band 0. A single band takes all priorities.
    """

    def __init__(
        self,
        provisioned: Sequence[BandSettings] = (),
        default: BandSettings | None = None,
        default_negative: BandSettings | None = None,
        *,
        single: bool = False,
    ) -> None:
        settings = {band.priority: band for band in provisioned}
        if len(settings) != len(provisioned):
            raise ConfigError(["flowControl.priorityBands: two bands have the same priority"])
        self.single = single
        self._default = None if single else default
        self._default_negative = None if single else default_negative
        self._dynamic: set[int] = set()
        self._by_priority: dict[int, Band] = {}
        self.high_to_low: list[Band] = []
        self.priorities: list[int] = []
        self.looks = self._looks_allowed = 0
        """How many more parked requests may be looked at again."""
        self.forget_turns = True
        """Whether in all of them who went before makes no difference once nobody waits."""
        setting = "priorityBands[]" if 0 in settings else "defaultPriorityBand"
        zero = settings.pop(0, default) or BandSettings()
        self._zero = self._add(Band(0, zero, place="in all" if single else "", setting=setting))
        for band in () if single else settings.values():
            self._add(Band(band.priority, band))

    def of(self, priority: int) -> Band:
        """The band that takes work of this priority."""
        band = self._by_priority.get(priority)
        if band is not None:
            return band
        template, setting = self._default, "defaultPriorityBand"
        if priority < 0 and self._default_negative is not None:
            template, setting = self._default_negative, "defaultNegativePriorityBand"
        if template is None or not self._may_grow():
            return self._zero
        self._dynamic.add(priority)
        return self._add(Band(priority, template, setting=setting))

    def look_again(self, number: int) -> None:
        """Let at most this many parked requests be looked at again."""
        self.looks = self._looks_allowed = min(number, sum(len(band.parked) for band in self.high_to_low))

    def parked_of(self, band: Band) -> Queued:
        """The parked request of a band to look at: first the first in order, then those not looked at for longest."""
        first_look = self.looks == self._looks_allowed
        self.looks -= 1
        return band.parked.first() if first_look else band.parked.longest_unseen()

    def _may_grow(self) -> bool:
        if len(self._dynamic) >= MOST_DYNAMIC_BANDS:
            bands = [self._by_priority[priority] for priority in self._dynamic]
            for band in bands:
                if not band.room.requests and not band.in_flight:
                    self._dynamic.discard(band.priority)
                    del self._by_priority[band.priority]
            self._reorder()
        return len(self._dynamic) < MOST_DYNAMIC_BANDS

    def _add(self, band: Band) -> Band:
        self._by_priority[band.priority] = band
        self._reorder()
        return band

    def _reorder(self) -> None:
        self.priorities = sorted(self._by_priority, reverse=True)
        self.high_to_low = [self._by_priority[priority] for priority in self.priorities]
        self.forget_turns = all(band.turns.forgets for band in self.high_to_low)

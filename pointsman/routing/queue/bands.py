"""Priority bands: each has its bounds, its flows with their order, and the turns of those flows."""

from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy

import msgspec

from pointsman.errors import ConfigError
from pointsman.routing.queue.aside import Parked
from pointsman.routing.queue.fairness import FairnessPolicy, GlobalStrictFairnessPolicy
from pointsman.routing.queue.items import Queued
from pointsman.routing.queue.lazy_heap import LazyHeap
from pointsman.routing.queue.ordering import FcfsOrderingPolicy, OrderingPolicy
from pointsman.routing.queue.room import Occupancy, check_bounds

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

    __slots__ = ("aside", "flows", "in_flight", "ordering", "priority", "room", "turns")

    def __init__(
        self, priority: int, settings: BandSettings, *, place: str = "", setting: str = "priorityBands[]"
    ) -> None:
        self.priority = priority
        self.ordering = settings.ordering
        self.turns = settings.fairness.for_band()
        self.flows: dict[str, LazyHeap[Queued]] = {}
        """Only those with waiting work."""
        self.aside = Parked()
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
        if item in self.aside:
            self.aside.remove(item)
            self.put(item)  # so that it has its turn like everybody
        flow = self.flows[item.flow]
        flow.discard(item)
        self.turns.taken(item)
        self._head_changed(item.flow, flow)

    def discard(self, item: Queued) -> None:
        """It leaves without having had its turn."""
        if item in self.aside:
            self.aside.remove(item)
            return
        flow = self.flows[item.flow]
        was_head = flow.first() is item
        flow.discard(item)
        if was_head:
            self._head_changed(item.flow, flow)

    def in_order(self) -> Iterator[Queued]:
        """Everybody, as they would be taken if nobody came or went. Tried out on a copy of the turns; for display."""
        yield from self.aside
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

"""Priority bands: each has bounds, flows with their order, and the turns of those flows."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import msgspec

from pointsman.errors import ConfigError
from pointsman.reasons import Reason
from pointsman.routing.events import Outcome, Refusal
from pointsman.routing.queue.fairness import FairnessPolicy, GlobalStrictFairnessPolicy
from pointsman.routing.queue.items import Queued
from pointsman.routing.queue.lazy_heap import LazyHeap
from pointsman.routing.queue.ordering import FcfsOrderingPolicy, OrderingPolicy
from pointsman.types import RequestMetadata


def check_bounds(max_requests: int | None, max_bytes: int | None) -> None:
    """Raise ConfigError for bounds that would refuse every request."""
    problems = [
        f"{name} must be at least 1, it is {bound}; leave it out for the default"
        for name, bound in (("maxRequests", max_requests), ("maxBytes", max_bytes))
        if bound is not None and bound < 1
    ]
    if problems:
        raise ConfigError(problems)


class Occupancy:
    """Bounds in requests and in bytes, and how full they are. A bound of None means unlimited."""

    __slots__ = ("_place", "_setting", "max_bytes", "max_requests", "requests", "size_bytes")

    def __init__(self, max_requests: int | None, max_bytes: int | None, place: str, setting: str) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.requests = 0
        self.size_bytes = 0
        self._place = place
        """The scope of the bounds, as part of a sentence: "at priority 0"."""
        self._setting = setting
        """The setting that raises the bounds."""

    def fits(self, size_bytes: int) -> bool:
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
        """Whether a request of this size would fit if so many other requests, with so many bytes, left."""
        return (self.max_requests is None or self.requests - fewer_requests < self.max_requests) and (
            self.max_bytes is None or self.size_bytes - fewer_bytes + size_bytes <= self.max_bytes
        )

    def shortage(self, size_bytes: int) -> dict[str, Any]:
        """Which bound one more request of this size would break, and where the bound is set, as facts for a reason."""
        if self.max_requests is not None and self.requests >= self.max_requests:
            facts = {"waiting": self.requests, "limit": self.max_requests, "setting": f"{self._setting}.maxRequests"}
        else:
            facts = {"waiting": self.size_bytes, "limit": self.max_bytes, "setting": f"{self._setting}.maxBytes"}
            facts["size_bytes"] = size_bytes
        return facts | {"where": self._place}


class Parked:
    """Requests that no instance can take now, for reasons of their own. They wait outside the order and block nothing.

    A few at a time are tried again: the first in order every time, and the others in turn. So these requests get scarce
    room in order, and none of them is left out.
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
        """The first request in order. There must be one."""
        first = self._in_order.first()
        assert first is not None
        return first

    def longest_untried(self) -> Queued:
        """The request whose last try was longest ago. There must be one."""
        return next(iter(self._in_turn))


MAX_DYNAMIC_BANDS = 64
"""Maximum number of bands made on demand, because clients choose priorities. Beyond it, empty bands are removed. If no
band is empty, further priorities go to band 0."""


class BandSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a band."""

    priority: int = 0
    max_requests: int | None = 5_000
    max_bytes: int | None = 1_000_000_000
    fairness: FairnessPolicy = msgspec.field(default_factory=GlobalStrictFairnessPolicy)
    ordering: OrderingPolicy = msgspec.field(default_factory=FcfsOrderingPolicy)
    flow_of: Callable[[RequestMetadata], str] | None = None
    """Names the flow of a request. If None, the flow is its fairness header, or else its user."""

    def __post_init__(self) -> None:
        check_bounds(self.max_requests, self.max_bytes)


class Band:
    """The waiting requests of one priority: flows, each in order, and the turns of the flows."""

    __slots__ = ("_key_at", "flow_of", "flows", "in_flight", "ordering", "parked", "priority", "room", "turns")

    def __init__(
        self, priority: int, settings: BandSettings, *, place: str = "", setting: str = "priorityBands[]"
    ) -> None:
        self.priority = priority
        self.ordering = settings.ordering
        self.flow_of = settings.flow_of
        self._key_at = getattr(settings.ordering, "key_at", None)
        self.turns = settings.fairness.for_band()
        self.flows: dict[str, LazyHeap[Queued]] = {}
        """The flows with waiting requests."""
        self.parked = Parked()
        self.in_flight = 0
        """Number of requests that were served and have not ended."""
        place = place or f"at priority {priority}"
        self.room = Occupancy(settings.max_requests, settings.max_bytes, place, f"flowControl.{setting}")

    def put(self, item: Queued) -> None:
        """Add a request that waits, or waits again."""
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

    def next(self, now: float) -> Queued:
        """The head of the flow whose turn it is. There must be one."""
        head = self._head()
        if self._key_at is not None:
            for _ in range(self.room.requests):  # each is tried at most once, whatever keys a user's code returns
                key = self._key_at(head, now)
                if key == head.order_key:
                    break
                self.discard(head)
                head.order_key = key
                self.put(head)
                head = self._head()
        return head

    def _head(self) -> Queued:
        name = self.turns.next()
        assert name is not None
        head = self.flows[name].first()
        assert head is not None
        return head

    def take(self, item: Queued) -> None:
        """Note that a request is taken, to be served."""
        if item in self.parked:
            self.parked.remove(item)
            self.put(item)  # so that its flow is charged as for any other request
        flow = self.flows[item.flow]
        flow.discard(item)
        self.turns.taken(item)
        self._head_changed(item.flow, flow)

    def discard(self, item: Queued) -> None:
        """Remove a request that has not been taken."""
        if item in self.parked:
            self.parked.remove(item)
            return
        flow = self.flows[item.flow]
        was_head = flow.first() is item
        flow.discard(item)
        if was_head:
            self._head_changed(item.flow, flow)

    def in_order(self) -> Iterator[Queued]:
        """All requests in the order in which they would be taken, found with a copy of the turns; for display."""
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

    Band 0 always exists. A priority without a band gets a new band made from `default`, or from `default_negative` if
    it is below zero and there is one. Without these settings it goes to band 0. A single band takes all priorities.
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
        self.retries = self._retries_allowed = 0
        """How many more parked requests may be tried again."""
        self.forget_turns = True
        """Whether the turns of all bands forget past turns once no request waits."""
        setting = "priorityBands[]" if 0 in settings else "defaultPriorityBand"
        zero = settings.pop(0, default) or BandSettings()
        self._zero = self._add(Band(0, zero, place="in all" if single else "", setting=setting))
        for band in () if single else settings.values():
            self._add(Band(band.priority, band))

    def of(self, priority: int) -> Band:
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

    def retry_parked(self, number: int) -> None:
        """Let at most this many parked requests be tried again."""
        self.retries = self._retries_allowed = min(number, sum(len(band.parked) for band in self.high_to_low))

    def next_parked(self, band: Band) -> Queued:
        """The parked request of a band to try next: at first the first in order, then those not tried for longest."""
        is_first = self.retries == self._retries_allowed
        self.retries -= 1
        return band.parked.first() if is_first else band.parked.longest_untried()

    def _may_grow(self) -> bool:
        if len(self._dynamic) >= MAX_DYNAMIC_BANDS:
            for band in [self._by_priority[priority] for priority in self._dynamic]:
                if not band.room.requests and not band.in_flight:
                    self._dynamic.discard(band.priority)
                    del self._by_priority[band.priority]
            self._reorder()
        return len(self._dynamic) < MAX_DYNAMIC_BANDS

    def _add(self, band: Band) -> Band:
        self._by_priority[band.priority] = band
        self._reorder()
        return band

    def _reorder(self) -> None:
        self.priorities = sorted(self._by_priority, reverse=True)
        self.high_to_low = [self._by_priority[priority] for priority in self.priorities]
        self.forget_turns = all(band.turns.forgets for band in self.high_to_low)


# Refusals


def queue_is_full(item: Queued, room: Occupancy, pool_is_empty: bool) -> Refusal:
    shortage = room.shortage(item.size_bytes)
    if pool_is_empty:
        return Refusal(Outcome.REJECTED_NO_ENDPOINTS, Reason("no-instance-queue-full", shortage))
    return Refusal(Outcome.REJECTED_CAPACITY, Reason("queue-full", shortage))


def id_is_taken(item: Queued) -> Refusal:
    return Refusal(Outcome.REJECTED_OTHER, Reason("id-waiting", {"request_id": item.request.request_id}))


def displaced(item: Queued, by: Queued, shortage: dict[str, Any]) -> Refusal:
    """The refusal of a request that made room for a more important one."""
    facts = {"priority": item.priority, "by_priority": by.priority}
    return Refusal(Outcome.REJECTED_CAPACITY, Reason("displaced", facts | shortage))


def waited_too_long(item: Queued, now: float, default_ttl_s: float) -> Refusal:
    reason = _waited("waited-too-long", item, now, item.ttl_s or 0.0, default_ttl_s, "flowControl.defaultRequestTTL")
    return Refusal(Outcome.EVICTED_TTL, reason)


def no_instance_came(item: Queued, now: float, limit_s: float | None, default_ttl_s: float, setting: str) -> Refusal:
    """The refusal of a request whose time to live is over while no instance runs."""
    reason = _waited("no-instance-came", item, now, limit_s, default_ttl_s, setting)
    return Refusal(Outcome.EVICTED_NO_ENDPOINTS, reason)


def _waited(code: str, item: Queued, now: float, limit_s: float | None, default_s: float, setting: str) -> Reason:
    """The reason, with facts about the wait. `setting` is where the limit is set, unless the request has set it."""
    facts = {"waited_s": now - item.enqueued_at, "limit_s": limit_s}
    return Reason(code, facts | {"setting": setting if limit_s == default_s else None})


def shutting_down() -> Refusal:
    return Refusal(Outcome.EVICTED_SHUTTING_DOWN, Reason("shutting-down"))


def evicted_in_flight(item: Queued, priority: int) -> Refusal:
    """The refusal of a running request that was stopped for a more important one."""
    facts = {"priority": item.priority, "by_priority": priority}
    return Refusal(Outcome.EVICTED_IN_FLIGHT, Reason("stopped-for-priority", facts))

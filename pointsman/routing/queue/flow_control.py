"""Flow control: which requests wait, which goes next, and which have to leave.

Enters: requests that cannot be sent at once. Leaves: each of them exactly once, to be served (`pop`, then `served`) or
with a refusal that says why. In between, a request is in one of these stages:

    offer -> waiting -> pop, take -> held -> served -> ended
                ^                     |        |
                +------ put_back -----+--------+
                +------ park ---------+

A request also stops waiting by cancel, expire, drain or an offer that displaces it, and a held request also leaves by
drop.

Held requests belong to the caller that popped them. They still take up room, but nothing else here touches them. The
order is kept and not recomputed: every operation takes O(log n) steps in the number of waiting requests and of flows.
"""

from collections.abc import Iterator, Sequence

from pointsman.errors import PointsmanError
from pointsman.routing.events import Refusal
from pointsman.routing.queue.backlog import Backlog, Deadlines, shorter_ttl
from pointsman.routing.queue.bands import (
    Bands,
    BandSettings,
    Occupancy,
    check_bounds,
    id_is_taken,
    no_instance_came,
    queue_is_full,
    shutting_down,
    waited_too_long,
)
from pointsman.routing.queue.items import Blocked, Offered, Queued, QueueStage
from pointsman.routing.queue.limits import StaticUsageLimitPolicy, UsageLimitPolicy

REQUEST_TTL_S = 60.0
"""How long a request may wait unless the request or a setting says otherwise."""

_WAITS = Offered()


class FlowControl:
    """The queue in front of the instances that serve one model."""

    def __init__(
        self,
        bands: Sequence[BandSettings] = (),
        *,
        default_band: BandSettings | None = None,
        default_negative_band: BandSettings | None = None,
        single_band: bool = False,
        limits: UsageLimitPolicy | None = None,
        max_requests: int | None = None,
        max_bytes: int | None = None,
        default_request_ttl_s: float = REQUEST_TTL_S,
        no_endpoint_request_ttl_s: float | None = None,
        first_wait_s: float | None = None,
    ) -> None:
        """`single_band`: all priorities share band 0, for strategies that order everything themselves. While there is
        no instance, the time to live is `first_wait_s` (the `wait` of a deployment's scaling), else
        `no_endpoint_request_ttl_s`, else `default_request_ttl_s`. 0 or less means no limit."""
        check_bounds(max_requests, max_bytes)
        given = (first_wait_s, no_endpoint_request_ttl_s, default_request_ttl_s)
        self._deadlines = Deadlines(next(limit for limit in given if limit is not None))
        self._bands = Bands(bands, default_band, default_negative_band, single=single_band)
        total = Occupancy(max_requests, max_bytes, "in all", "flowControl")
        self._backlog = Backlog(self._bands, total, self._deadlines)
        self._limits = StaticUsageLimitPolicy() if limits is None else limits
        self._ttl_s = default_request_ttl_s
        self._first_wait = "scaling.wait" if first_wait_s is not None else "flowControl.noEndpointRequestTTL"
        self._arrivals = 0
        self.blocked: Blocked | None = None
        """The band whose ceiling stopped the last `pop`; None if no ceiling stopped it."""

    def __len__(self) -> int:
        """Number of requests that wait or are held."""
        return self._backlog.total.requests

    def waiting(self) -> Iterator[Queued]:
        """The waiting requests, in the order in which they would go. Costs a sort."""
        return self._backlog.waiting()

    # In

    def offer(self, item: Queued, now: float, pool_is_empty: bool) -> Offered:
        """Let a request wait, or refuse it. In a full queue, a request displaces sheddable ones of lower priority."""
        _expect(item, QueueStage.NEW)
        self.pool_changed(pool_is_empty, now)
        backlog = self._backlog
        if item.request.request_id in backlog.by_id:
            item.stage = QueueStage.LEFT
            return Offered(id_is_taken(item))
        band = item.band = self._bands.of(item.priority)
        item.enqueued_at = now
        item.ttl_s = shorter_ttl(self._ttl_s, item.request.timeout_s)
        item.seq = self._arrivals = self._arrivals + 1
        item.order_key = band.ordering.key(item)
        fits = backlog.fits(item, band)
        if not fits:
            full = backlog.shortage(item, band)
            if full is not None:
                item.stage = QueueStage.LEFT
                return Offered(queue_is_full(item, full, pool_is_empty))
        band.put(item)  # if the key cannot be compared with the others, this raises, and nothing has changed
        displaced = [] if fits else backlog.displace(item, band)
        backlog.enter(item)
        backlog.wait(item)
        return Offered(None, displaced) if displaced else _WAITS

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent without waiting: no request waits, and no band keeps account of past turns."""
        return not self._backlog.by_id and self._bands.forget_turns

    def goes_at_once(self, item: Queued, now: float) -> None:
        """Send a request without waiting, while the queue `is_open`. Follow it with `ended` or `put_back`."""
        item.band = band = self._bands.of(item.request.priority)
        item.enqueued_at = item.taken_at = now
        own_s = item.request.timeout_s
        item.ttl_s = shorter_ttl(self._ttl_s, own_s) if own_s is not None or self._ttl_s <= 0 else self._ttl_s
        item.order_key = band.ordering.key(item)
        item.seq = self._arrivals = self._arrivals + 1
        item.stage = QueueStage.SERVED
        band.in_flight += 1

    def put_back(self, item: Queued) -> None:
        """Let a request that could not be placed, or was sent and failed, wait again in its old position.

        Its flow is not charged. There is always room for the request, because it was let in before.
        """
        served = item.stage is QueueStage.SERVED
        if not served:
            _expect(item, QueueStage.HELD)
        elif item.order_key is None:  # it was served from another queue
            item.order_key = item.band.ordering.key(item)
        item.band.put(item)
        if served:
            item.band.in_flight -= 1
            self._backlog.enter(item)
        self._backlog.wait(item)
        item.band.turns.returned(item)

    def park(self, item: Queued) -> None:
        """Let a request wait outside the order because, for reasons of its own, no instance can take it. Its flow is
        not charged."""
        _expect(item, QueueStage.HELD)
        item.band.parked.add(item)
        self._backlog.wait(item)
        item.band.turns.returned(item)

    # Another queue

    def continue_from(self, before: "FlowControl") -> None:
        """Replace another queue. This one takes over whether there are instances, and since when."""
        self._deadlines.pool_is_empty = before._deadlines.pool_is_empty
        self._deadlines.changed_at = before._deadlines.changed_at

    def adopt(self, item: Queued) -> None:
        """Take over a request that waits in another queue or was served from it. The time that it has waited counts.

        There is always room for the request, because it was let in before. Take over served requests before waiting
        requests: served ones count for the turns, but have no place in the order unless they are put back.
        """
        served = item.stage is QueueStage.SERVED
        item.band = self._bands.of(item.priority)
        item.ttl_s = shorter_ttl(self._ttl_s, item.request.timeout_s)
        item.seq = self._arrivals = self._arrivals + 1
        item.order_key = None if served else item.band.ordering.key(item)
        item.band.put(item)
        self._backlog.enter(item)
        self._backlog.wait(item)
        if served:
            self.served(self._backlog.hold(item, item.taken_at))

    # Out

    def retry_parked(self, number: int) -> None:
        """Let at most this many parked requests be popped again, before those in the order."""
        self._bands.retry_parked(number)

    def pop(self, now: float, saturation: float) -> Queued | None:
        """The next request; None if none may go now. Follow it with `served`, `put_back`, `park` or `drop`.

        The request comes from the highest band that has any. If that band is blocked, the bands below wait too.
        """
        self.blocked = None
        if not self._backlog.by_id:
            return None
        bands = self._bands
        ceilings = self._limits.ceilings(saturation, bands.priorities)
        for band, ceiling in zip(bands.high_to_low, ceilings, strict=True):
            retry = bands.retries > 0 and len(band.parked) > 0
            if not band.flows and not retry:
                continue
            if saturation >= ceiling:
                self.blocked = Blocked(band.priority, ceiling)
                return None
            return self._backlog.hold(bands.next_parked(band) if retry else band.next(now), now)
        return None

    def take(self, item: Queued, now: float) -> None:
        """Pop a request out of turn. A policy that decides on all waiting requests has chosen it. Follow this with the
        same calls as `pop`."""
        _expect(item, QueueStage.WAITING)
        self._backlog.hold(item, now)

    def served(self, item: Queued) -> None:
        """Free the room that a held request takes up, because it was sent."""
        _expect(item, QueueStage.HELD)
        self._backlog.leave(item, QueueStage.SERVED)
        item.band.in_flight += 1

    def drop(self, item: Queued) -> None:
        """Free the room that a held request takes up, because it will not be served. Its flow is not charged."""
        _expect(item, QueueStage.HELD)
        self._backlog.leave(item, QueueStage.LEFT)
        item.band.turns.returned(item)

    def ended(self, item: Queued, output_tokens: int, now: float | None = None) -> None:
        """Note that a served request has ended with this much output. `now` is None if the request failed."""
        _expect(item, QueueStage.SERVED)
        item.ended_at = now
        item.stage = QueueStage.LEFT
        item.band.in_flight -= 1
        item.band.turns.ended(item, output_tokens)

    def cancel(self, request_id: str) -> Queued | None:
        """Remove a waiting request. Returns None if no request of this id waits here."""
        item = self._backlog.by_id.get(request_id)
        if item is None or item.stage is not QueueStage.WAITING:
            return None
        self._backlog.remove(item)
        return item

    def drain(self) -> list[tuple[Queued, Refusal]]:
        """Remove all waiting requests, for a shutdown."""
        gone = list(self.waiting())
        for item in gone:
            self._backlog.remove(item)
        return [(item, shutting_down()) for item in gone]

    # Time

    def pool_changed(self, is_empty: bool, now: float) -> None:
        """Set whether there are no instances. When that changes, the time to live of every request starts again."""
        self._deadlines.pool_changed(is_empty, now)

    def expire(self, now: float, pool_is_empty: bool) -> list[tuple[Queued, Refusal]]:
        """Remove the requests whose time to live is over."""
        self.pool_changed(pool_is_empty, now)
        gone = []
        while (first := self._deadlines.first()) is not None and first[1] <= now:
            item = first[0]
            self._backlog.remove(item)
            if pool_is_empty:
                budget_s = self._deadlines.budget_s(item, pool_is_empty)
                usual_s = self._deadlines.no_endpoint_ttl_s
                refusal = no_instance_came(item, now, budget_s, usual_s, self._first_wait)
            else:
                refusal = waited_too_long(item, now, self._ttl_s)
            gone.append((item, refusal))
        return gone

    def next_expiry(self) -> float | None:
        """When the next request expires, if nothing changes; None if no request will expire."""
        first = self._deadlines.first()
        return None if first is None else first[1]


def _expect(item: Queued, stage: QueueStage) -> None:
    if item.stage is not stage:
        raise PointsmanError(f'request "{item.request.request_id}" should be {stage.value}, but is {item.stage.value}')

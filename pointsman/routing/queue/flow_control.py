"""Flow control: who waits, who goes next, and who has to leave.

Enters: requests that cannot be sent at once. Leaves: each of them exactly once, to be served (`pop`, then `served`) or
with a refusal that says why. In between a request is

    offer -> waiting -> pop, take -> held -> served -> ended
                ^                     |        |
                +------ put_back -----+--------+
                +------ park ----+

and out of waiting also by cancel, expire, drain or an offer that displaces it, out of held also by drop.

Held requests belong to whoever took them out; they still take up room, but nothing else here touches them. Order is
kept and not recomputed: every operation costs log-many steps in the number of waiting requests and of flows.
"""

from collections.abc import Iterator, Sequence

from pointsman.errors import PointsmanError
from pointsman.routing.events import Refusal
from pointsman.routing.queue import refusals
from pointsman.routing.queue.bands import Band, Bands, BandSettings, Occupancy, check_bounds
from pointsman.routing.queue.eviction import Deadlines, Sheddable, shorter_ttl
from pointsman.routing.queue.items import BandDepth, Blocked, Offered, Queued, QueueStage
from pointsman.routing.queue.limits import StaticUsageLimitPolicy, UsageLimitPolicy

REQUEST_TTL_S = 60.0
"""How long a request may wait unless it or a setting says otherwise."""

_WAITS = Offered()


class FlowControl:
    """The queue in front of the instances."""

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
        """`single_band`: all priorities share band 0, for strategies that order everything themselves. Times to live of
        0 or less: for ever; the one for an empty pool is the other one unless given. `first_wait_s`: the same as that,
        and before it, as the scaling of a deployment says it."""
        self._bands = Bands(bands, default_band, default_negative_band, single=single_band)
        check_bounds(max_requests, max_bytes)
        self._total = Occupancy(max_requests, max_bytes, "in all", "flowControl")
        self._limits = StaticUsageLimitPolicy() if limits is None else limits
        self._ttl_s = default_request_ttl_s
        given = (first_wait_s, no_endpoint_request_ttl_s, default_request_ttl_s)
        self._deadlines = Deadlines(next(limit for limit in given if limit is not None))
        self._first_wait = "scaling.wait" if first_wait_s is not None else "flowControl.noEndpointRequestTTL"
        self._sheddable = Sheddable()
        self._by_id: dict[str, Queued] = {}
        """Waiting and held."""
        self._arrivals = 0
        self._looks = self._looks_allowed = 0
        self.blocked: Blocked | None = None
        """The band whose ceiling stopped the last `pop`, if one did."""

    # In

    def offer(self, item: Queued, now: float, pool_is_empty: bool) -> Offered:
        """A request wants to wait. Sheddable work of lower priority makes room for it where the whole queue is full."""
        self._expect(item, QueueStage.NEW)
        self.pool_changed(pool_is_empty, now)
        if item.request.request_id in self._by_id:
            item.stage = QueueStage.LEFT
            return Offered(refusals.id_is_taken(item))
        band = item.band = self._bands.of(item.priority)
        item.enqueued_at = now
        item.ttl_s = shorter_ttl(self._ttl_s, item.request.timeout_s)
        item.seq = self._arrivals = self._arrivals + 1
        item.order_key = band.ordering.key(item)
        fits = band.room.fits(item.size_bytes) and self._total.fits(item.size_bytes)
        if not fits:
            full = self._cannot_make_room(item, band)
            if full is not None:
                item.stage = QueueStage.LEFT
                return Offered(refusals.queue_is_full(item, full, pool_is_empty))
        band.put(item)  # raises if its key cannot be compared with the others', and then nothing has changed
        displaced = [] if fits else self._displaced(item, band)
        self._enter(item)
        self._waits(item)
        return Offered(None, displaced) if displaced else _WAITS

    def continue_from(self, before: "FlowControl") -> None:
        """This queue takes the place of another: how long there have been instances is known."""
        self._deadlines.pool_is_empty = before._deadlines.pool_is_empty
        self._deadlines.changed_at = before._deadlines.changed_at

    def adopt(self, item: Queued) -> None:
        """Take over a request that waits in another queue or was served from it, with the time that it has waited.

        There is always room for it, as it was let in before. Take over those that were served first: they count for
        the turns, but have no place in the order unless they are put back.
        """
        served = item.stage is QueueStage.SERVED
        item.band = self._bands.of(item.priority)
        item.ttl_s = shorter_ttl(self._ttl_s, item.request.timeout_s)
        item.seq = self._arrivals = self._arrivals + 1
        item.order_key = None if served else item.band.ordering.key(item)
        item.band.put(item)
        self._enter(item)
        self._waits(item)
        if served:
            self.served(self._hold(item, item.taken_at))

    @property
    def is_open(self) -> bool:
        """Whether nobody waits, and who went before makes no difference then: nobody need wait to be counted."""
        return not self._by_id and self._bands.forget_turns

    def goes_at_once(self, item: Queued, now: float) -> None:
        """Nobody waits, and it has been sent without waiting either: `ended` or `put_back` follows."""
        item.band = band = self._bands.of(item.request.priority)
        item.enqueued_at = item.taken_at = now
        own_s = item.request.timeout_s
        item.ttl_s = shorter_ttl(self._ttl_s, own_s) if own_s is not None or self._ttl_s <= 0 else self._ttl_s
        item.order_key = band.ordering.key(item)
        item.seq = self._arrivals = self._arrivals + 1
        item.stage = QueueStage.SERVED
        band.in_flight += 1

    def put_back(self, item: Queued) -> None:
        """It could not be placed, or was sent and failed: it waits again where it stood, and its flow is not charged.

        There is always room for it, as it was let in before.
        """
        served = item.stage is QueueStage.SERVED
        if not served:
            self._expect(item, QueueStage.HELD)
        elif item.order_key is None:  # it was served from another queue
            item.order_key = item.band.ordering.key(item)
        item.band.put(item)
        if served:
            item.band.in_flight -= 1
            self._enter(item)
        self._waits(item)
        item.band.turns.returned(item)

    def park(self, item: Queued) -> None:
        """Nobody can take it now, for reasons of its own: it waits beside the order, and its flow is not charged."""
        self._expect(item, QueueStage.HELD)
        item.band.parked.add(item)
        self._waits(item)
        item.band.turns.returned(item)

    # Out

    def look_again(self, number: int) -> None:
        """So many of those that were set aside may be popped once more, before those in the order."""
        self._looks = self._looks_allowed = min(number, sum(len(band.parked) for band in self._bands.high_to_low))

    def pop(self, now: float, saturation: float) -> Queued | None:
        """Who goes next; None if nobody may go now. Follow it with `served`, `put_back`, `park` or `drop`.

        Of the bands that have work, the highest goes; if it is blocked, those below wait too.
        """
        self.blocked = None
        if not self._by_id:
            return None
        ceilings = self._limits.ceilings(saturation, self._bands.priorities)
        for band, ceiling in zip(self._bands.high_to_low, ceilings, strict=True):
            look = self._looks > 0 and len(band.parked) > 0
            if not band.flows and not look:
                continue
            if saturation >= ceiling:
                self.blocked = Blocked(band.priority, ceiling)
                return None
            return self._hold(self._once_more(band) if look else band.next(), now)
        return None

    def _once_more(self, band: Band) -> Queued:
        first_look = self._looks == self._looks_allowed
        self._looks -= 1
        return band.parked.first() if first_look else band.parked.longest_unseen()

    def take(self, item: Queued, now: float) -> None:
        """This one goes, whoever's turn it is: somebody who sees all that waits has chosen it. Follow it as `pop`."""
        self._expect(item, QueueStage.WAITING)
        self._hold(item, now)

    def served(self, item: Queued) -> None:
        """It was dispatched: its room is free again."""
        self._expect(item, QueueStage.HELD)
        self._leave(item, QueueStage.SERVED)
        item.band.in_flight += 1

    def drop(self, item: Queued) -> None:
        """It was popped and will not be served: its room is free again, and its flow is not charged."""
        self._expect(item, QueueStage.HELD)
        self._leave(item, QueueStage.LEFT)
        item.band.turns.returned(item)

    def ended(self, item: Queued, output_tokens: int) -> None:
        """It was served, with this much output."""
        self._expect(item, QueueStage.SERVED)
        item.stage = QueueStage.LEFT
        item.band.in_flight -= 1
        item.band.turns.ended(item, output_tokens)

    def cancel(self, request_id: str) -> Queued | None:
        """Its client has gone. None: nobody with that id waits here."""
        item = self._by_id.get(request_id)
        if item is None or item.stage is not QueueStage.WAITING:
            return None
        self._remove(item)
        return item

    def drain(self) -> list[tuple[Queued, Refusal]]:
        """Shutting down: everybody who waits leaves."""
        gone = list(self.waiting())
        for item in gone:
            self._remove(item)
        return [(item, refusals.shutting_down()) for item in gone]

    # Time

    def pool_changed(self, is_empty: bool, now: float) -> None:
        """Whether there is any instance. When that changes, everybody's time to live starts again."""
        self._deadlines.pool_changed(is_empty, now)

    def expire(self, now: float, pool_is_empty: bool) -> list[tuple[Queued, Refusal]]:
        """Everybody whose time to live is over leaves."""
        self.pool_changed(pool_is_empty, now)
        gone = []
        while (first := self._deadlines.first()) is not None and first[1] <= now:
            item = first[0]
            self._remove(item)
            if pool_is_empty:
                budget_s = self._deadlines.budget_s(item, pool_is_empty)
                usual_s = self._deadlines.no_endpoint_ttl_s
                refusal = refusals.no_instance_came(item, now, budget_s, usual_s, self._first_wait)
            else:
                refusal = refusals.waited_too_long(item, now, self._ttl_s)
            gone.append((item, refusal))
        return gone

    def next_expiry(self) -> float | None:
        """When somebody will expire, if nothing changes; None: never."""
        first = self._deadlines.first()
        return None if first is None else first[1]

    # Display

    def __len__(self) -> int:
        """Requests waiting or held."""
        return self._total.requests

    @property
    def waiting_bytes(self) -> int:
        """Bytes waiting or held."""
        return self._total.size_bytes

    def waiting(self) -> Iterator[Queued]:
        """Everybody who waits, in the order in which they would go. Costs a sort."""
        for band in self._bands.high_to_low:
            yield from band.in_order()

    def depths(self) -> list[BandDepth]:
        """How much waits in each band and flow, highest priority first."""
        return [
            BandDepth(
                priority=band.priority,
                requests=band.room.requests,
                size_bytes=band.room.size_bytes,
                flows={name: len(flow) for name, flow in band.flows.items()},
                parked=len(band.parked),
            )
            for band in self._bands.high_to_low
        ]

    # Room

    def _cannot_make_room(self, item: Queued, band: Band) -> Occupancy | None:
        """The bound that stops it even if all that it may displace were gone; None if there would be room."""
        requests, size_bytes = self._sheddable.below(item.priority)
        in_band = (requests, size_bytes) if self._bands.single else (0, 0)
        if not band.room.fits_without(item.size_bytes, *in_band):
            return band.room
        return None if self._total.fits_without(item.size_bytes, requests, size_bytes) else self._total

    def _displaced(self, item: Queued, band: Band) -> list[tuple[Queued, Refusal]]:
        gone = []
        for room in (band.room, self._total):
            while not room.fits(item.size_bytes):
                victim = self._sheddable.first()
                assert victim is not None
                gone.append((victim, refusals.displaced(victim, item, room.shortage(item.size_bytes))))
                self._remove(victim)
        return gone

    # A request takes up room from its offer until it is served; it is in the order only while it waits.

    def _enter(self, item: Queued) -> None:
        self._by_id[item.request.request_id] = item
        item.band.room.enter(item.size_bytes)
        self._total.enter(item.size_bytes)

    def _leave(self, item: Queued, stage: QueueStage) -> None:
        item.stage = stage
        del self._by_id[item.request.request_id]
        item.band.room.leave(item.size_bytes)
        self._total.leave(item.size_bytes)

    def _waits(self, item: Queued) -> None:
        """It is in the order now."""
        item.stage = QueueStage.WAITING
        self._deadlines.add(item)
        self._sheddable.add(item)

    def _hold(self, item: Queued, now: float) -> Queued:
        """From waiting to held."""
        item.band.take(item)
        self._deadlines.discard(item)
        self._sheddable.discard(item)
        item.stage, item.taken_at = QueueStage.HELD, now
        return item

    def _remove(self, item: Queued) -> None:
        """From waiting to gone."""
        item.band.discard(item)
        self._deadlines.discard(item)
        self._sheddable.discard(item)
        self._leave(item, QueueStage.LEFT)

    def _expect(self, item: Queued, stage: QueueStage) -> None:
        if item.stage is not stage:
            raise PointsmanError(
                f'request "{item.request.request_id}" should be {stage.value}, but is {item.stage.value}'
            )

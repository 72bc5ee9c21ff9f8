"""One queue per model, so that no model's requests hold up another's, and what is known of requests under way."""

from collections.abc import Sequence

import msgspec

from pointsman.routing.endpoints import EndpointTable
from pointsman.routing.events import DispatcherCommand, Outcome, Refusal, Refuse
from pointsman.routing.ledger import Hold, Ledger
from pointsman.routing.pools import Pools, Sent
from pointsman.routing.queue import Queued
from pointsman.routing.records import Journal
from pointsman.types import RequestMetadata

# Who has arrived and not left: those who wait, those who were sent, and how each of them leaves.
#
# One of these is what a dispatcher hands on when another takes its place. The one rule: a request is in it once,
# waiting or sent.


class RequestTable:
    """The requests of one dispatcher, and all that is counted and written down of them."""

    __slots__ = ("fleet", "journal", "ledger", "pools", "sent", "waiting")

    def __init__(self, fleet: EndpointTable, pools: Pools, journal: Journal) -> None:
        self.fleet = fleet
        self.ledger = Ledger(fleet)
        self.pools = pools
        self.journal = journal
        self.waiting: dict[str, Queued] = {}
        self.sent: dict[str, Sent] = {}

    def __len__(self) -> int:
        return len(self.waiting) + len(self.sent)

    # Leaving

    def released(self, request_id: str, now: float) -> Sent | None:
        """Take a request that was sent back from its instance. None: it is not out, or came back before."""
        sent = self.sent.pop(request_id, None)
        if sent is not None:
            self.ledger.release(request_id)
            sent.pool.ended(sent.item, now)
        return sent

    def refuse(self, request: RequestMetadata, refusal: Refusal, now: float, commands: list[DispatcherCommand]) -> None:
        """It leaves, and is told why."""
        self.left(request, refusal, now)
        commands.append(Refuse(request, refusal))

    def left(self, request: RequestMetadata, refusal: Refusal, now: float) -> None:
        """It has left by itself, or whoever sent it knows."""
        self.waiting.pop(request.request_id, None)
        self.journal.refused(request, refusal, now)

    def refuse_unordered(
        self, request: RequestMetadata, error: Exception, now: float, commands: list[DispatcherCommand]
    ) -> None:
        """An ordering of somebody's own has raised, and nothing was taken in."""
        self.journal.error(error)
        why = f"it cannot be put in order: {type(error).__name__}: {error}"
        self.refuse(request, Refusal(Outcome.REJECTED_OTHER, why), now, commands)

    # Taking over

    def go_on_from(self, other: "RequestTable", now: float, commands: list[DispatcherCommand]) -> None:
        """Take everything over from another, which must not be used any more: its instances and what is known of them,
        its records and counts, the requests that run and those that wait."""
        self.journal.go_on_from(other.journal)
        self.fleet.go_on_from(other.fleet)
        self.pools.go_on_from(other.pools)
        for before in other.sent.values():
            self._go_on_running(before, other.ledger.holds(before.item.request.request_id))
        for pool in other.pools.waiting():
            for item in pool.queue.waiting():
                self._go_on_waiting(item, now, commands)

    def _go_on_running(self, before: Sent, holds: Sequence[Hold]) -> None:
        request = before.item.request
        pool = self.pools.of(request.model_name)
        assert pool is not None, "somebody serves it"
        item = pool.queue.take_over_sent(before.item)
        pool.started(item)
        sent = Sent(item, pool, self.fleet.twin_of(before.endpoint), before.strategy, before.lightness)
        sent.begun, sent.revoked = before.begun, before.revoked
        self.sent[request.request_id] = sent
        replace, twin_of = msgspec.structs.replace, self.fleet.twin_of
        self.ledger.reserve(request.request_id, [replace(hold, endpoint=twin_of(hold.endpoint)) for hold in holds])

    def _go_on_waiting(self, before: Queued, now: float, commands: list[DispatcherCommand]) -> None:
        request = before.request
        pool = self.pools.of(request.model_name)
        assert pool is not None, "its pool was taken over"
        try:
            self.waiting[request.request_id] = pool.queue.take_over(before)
        except Exception as error:
            self.refuse_unordered(request, error, now, commands)

"""Requests between their arrival and their end: where each was sent, and the try that is being made there.

Two kinds of them are carried by the same dispatchers to the same kind of connections: clients' requests, and steps of
pipelines. What is the same about them is here; what is sent, and who hears of the answer, is each kind's own.
"""

import time
from asyncio import Task
from math import inf
from typing import TYPE_CHECKING

import msgspec

from pointsman.gateway.upstream import UpstreamConnection, UpstreamPool
from pointsman.http.answers import AnswerHead
from pointsman.routing.events import Cancelled, Failed, Outcome, Refusal, Send
from pointsman.types import RequestMetadata

if TYPE_CHECKING:
    from pointsman.gateway.gateway import Gateway
    from pointsman.gateway.metrics import DeploymentCounts
    from pointsman.runtimes.traffic import Lane


class InFlight(msgspec.Struct, eq=False, kw_only=True):
    """A request that is on an instance or waits for one."""

    gateway: "Gateway"
    lane: "Lane"
    request: RequestMetadata
    counts: "DeploymentCounts"
    deadline: float = inf
    """When we lose patience with the instance."""
    instance_id: str = ""
    """Where it was sent last."""
    _pool: UpstreamPool | None = None
    _attempt: "UpstreamConnection | Task[None] | None" = None
    """The connection that it was sent on, or the task that makes one."""
    _fresh: bool = False
    """The last try was on a connection of its own."""
    _head: AnswerHead | None = None
    """Of an answer that comes in pieces."""

    # What each kind does in its own way

    def send(self, command: Send) -> None:
        """Send it to an instance; if it was on another, that one is let go."""
        raise NotImplementedError

    def refuse(self, refusal: Refusal) -> None:
        """It will not be served, or not to its end."""
        raise NotImplementedError

    def timed_out(self) -> None:
        """We have lost patience with the instance."""
        raise NotImplementedError

    # What is the same

    def revoke(self, refusal: Refusal) -> None:
        """Stop it for more important work."""
        self.refuse(refusal)
        self._cancel()

    def abandon(self) -> None:
        """Nobody wants it any more."""
        self._leave()
        self.counts.abandoned += 1
        self._cancel()

    def let_go(self) -> None:
        """Whatever the instance still says is not wanted any more."""
        attempt, self._attempt = self._attempt, None
        self.deadline = inf
        if attempt is None:
            return
        if isinstance(attempt, UpstreamConnection):
            attempt.let_go(self)
        else:
            attempt.cancel()

    def pause(self) -> None:
        """Whoever gets the answer does not read fast enough: neither do we."""
        if isinstance(self._attempt, UpstreamConnection) and not self._attempt.transport.is_closing():
            self._attempt.transport.pause_reading()
            self.deadline = inf

    def resume(self) -> None:
        if isinstance(self._attempt, UpstreamConnection) and not self._attempt.transport.is_closing():
            self._attempt.transport.resume_reading()
            self.deadline = time.monotonic() + self.gateway.upstream.stall_timeout

    def connected(self, connection: UpstreamConnection) -> None:
        """The connection that was asked for is there."""
        self._attempt = connection

    def _came_to_nothing(self, why: str, *, may_retry: bool) -> None:
        """This try has failed. The dispatcher says what happens now."""
        retry = may_retry and self.gateway.retries.allows(time.monotonic())
        lane, instance_id = self.lane, self.instance_id  # it may be on another before this returns
        lane.tell(Failed(self.request.request_id, why, retry=retry))
        lane.failed(instance_id, why)

    def _leave(self) -> None:
        """Nothing more is decided about it, and nothing more is heard of its instance."""
        self.let_go()
        self.gateway.leave(self)

    def _cancel(self) -> None:
        self.lane.tell(Cancelled(self.request.request_id))
        self.lane.look_for_idle()

    def _count_refused(self, refusal: Refusal) -> tuple[int, int | None]:
        """What whoever asked is told: the status, and after how many seconds it is worth trying again, if ever."""
        status = 502 if refusal.outcome is Outcome.EVICTED_OTHER else refusal.status
        self.counts.statuses[status] += 1
        return status, self.gateway.retry_after(self.lane) if status in (429, 503) else None


# How many retries the fleet can bear: a share of the requests, so that failures do not multiply the load.


class RetryBudget:
    """Every request adds a share of a retry; some are allowed in any case, and come back with time."""

    def __init__(self, share: float, *, reserve: float = 50.0, per_second: float = 10.0) -> None:
        self.share = share
        """Of a retry, that each request adds."""
        self.requests = 0
        """That have come since a retry was last asked for. Whoever takes them in counts them here."""
        self._most = self._left = reserve
        self._per_second = per_second
        self._at = 0.0

    def allows(self, now: float) -> bool:
        """Whether one more retry may be made now; it is counted if so."""
        earned = self.requests * self.share + (now - self._at) * self._per_second
        self._left = min(self._most, self._left + earned)
        self._at, self.requests = now, 0
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

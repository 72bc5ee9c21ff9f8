"""One step on its way: waiting in the lane of its node, sent to a replica, sent again if that may be, ended once."""

import time
from asyncio import Task
from math import inf
from typing import TYPE_CHECKING, Protocol

import msgspec

from pointsman.gateway.answers import AnswerHead
from pointsman.gateway.upstream import UpstreamConnection, UpstreamPool
from pointsman.routing.events import Arrived, Cancelled, Ended, Failed, FirstToken, Send
from pointsman.routing.outcomes import Outcome, Refusal
from pointsman.types import RequestMetadata

if TYPE_CHECKING:
    from pointsman.gateway.gateway import Gateway
    from pointsman.runtimes.traffic import Lane

NOT_BEGUN = 503
"""A replica that answers so has not begun: somebody else may."""
MOST_BYTES = 256 * 1024 * 1024
"""Of a result that comes in pieces and must be had whole."""


class StepFailure(msgspec.Struct, frozen=True):
    """Why a step has no result."""

    status: int
    """What a client is told."""
    why: str
    code: str
    traceback: str = ""
    body: bytes = b""
    """The answer as it is, where that says more than we could."""


class Conductor(Protocol):
    """Whoever wants the result of steps."""

    def step_sent(self, place: int, instance_id: str) -> None: ...

    def step_answered(self, place: int, head: AnswerHead, body: bytes) -> None:
        """The whole result."""

    def step_began(self, place: int, head: AnswerHead) -> None:
        """The result comes in pieces from here on; only if they are wanted."""

    def step_piece(self, place: int, payload: bytes) -> None: ...

    def step_ended(self, place: int) -> None: ...

    def step_failed(self, place: int, failure: StepFailure) -> None: ...


class StepCall:
    """One request of ours to a replica."""

    __slots__ = (
        "_attempt",
        "_body",
        "_conductor",
        "_counts",
        "_fresh",
        "_gateway",
        "_head",
        "_lines",
        "_pieces",
        "_place",
        "_pool",
        "_sent",
        "_target",
        "deadline",
        "idempotent",
        "in_pieces",
        "instance_id",
        "lane",
        "request",
    )

    def __init__(
        self,
        gateway: "Gateway",
        conductor: Conductor,
        place: int,
        lane: "Lane",
        request: RequestMetadata,
        target: bytes,
        lines: bytes,
        body: bytes,
        *,
        idempotent: bool,
        in_pieces: bool,
    ) -> None:
        self._gateway = gateway
        self._conductor = conductor
        self._place = place
        self.lane = lane
        self.request = request
        self._target = target
        self._lines = lines
        """Header lines, each with its end."""
        self._body = body
        self.idempotent = idempotent
        """It may be sent again although somebody may have begun it."""
        self.in_pieces = in_pieces
        """Pieces are passed on as they come; else the whole is."""
        self.instance_id = ""
        self.deadline = inf
        """When we lose patience with the instance."""
        self._pool: UpstreamPool | None = None
        self._attempt: UpstreamConnection | Task[None] | None = None
        self._fresh = False
        self._sent = False
        """A replica may have begun it."""
        self._head: AnswerHead | None = None
        self._pieces: list[bytes] | None = None
        self._counts = gateway.metrics.of(lane.plan.name)

    def begin(self, now: float) -> None:
        """Take a place in the lane."""
        self._gateway.enter(self)
        self.lane.carry_out(self.lane.dispatcher.handle(Arrived((self.request,)), now))

    # What the dispatcher says

    def send(self, command: Send) -> None:
        """Send it to an instance; if it was on another, that one is let go."""
        if self._attempt is not None:
            self.let_go()
        if self._sent and not self.idempotent:
            why = f'{self.instance_id} is gone, and "{self.lane.plan.name}" is not marked idempotent'
            self._gateway.loop.call_soon(self._came_to_nothing, why)
            return
        instance = command.endpoint.instance
        self.instance_id = instance.instance_id
        self._pool = self._gateway.pool_of(instance)
        self._conductor.step_sent(self._place, self.instance_id)
        self._ask(fresh=False)

    def _ask(self, *, fresh: bool) -> None:
        assert self._pool is not None
        self._fresh = fresh
        self._head = self._pieces = None
        self.deadline = time.monotonic() + self._gateway.upstream.first_token_timeout
        head = b"POST %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            self._target,
            self._pool.authority,
            self._lines,
            len(self._body),
        )
        self._attempt = self._pool.ask(self, head, self._body, fresh=fresh)
        self._sent = isinstance(self._attempt, UpstreamConnection)

    def refuse(self, refusal: Refusal) -> None:
        """It will not be served."""
        self.let_go()
        self._gateway.leave(self)
        status = 502 if refusal.outcome is Outcome.EVICTED_OTHER else refusal.status
        self._counts.statuses[status] += 1
        self._conductor.step_failed(self._place, StepFailure(status, refusal.why, "not_served"))
        self.lane.look_for_idle()

    def revoke(self, refusal: Refusal) -> None:
        """Stop it for more important work."""
        self.refuse(refusal)
        self.lane.tell(Cancelled(self.request.request_id))
        self.lane.look_for_idle()

    def abandon(self) -> None:
        """Nobody wants it any more."""
        self.let_go()
        self._gateway.leave(self)
        self._counts.abandoned += 1
        self.lane.tell(Cancelled(self.request.request_id))
        self.lane.look_for_idle()

    def let_go(self) -> None:
        """Whatever the instance still says is not wanted any more."""
        attempt, self._attempt = self._attempt, None
        self.deadline = inf
        if isinstance(attempt, UpstreamConnection):
            attempt.let_go(self)
        elif attempt is not None:
            attempt.cancel()

    def pause(self) -> None:
        """Pieces are not taken fast enough."""
        if isinstance(self._attempt, UpstreamConnection) and not self._attempt.transport.is_closing():
            self._attempt.transport.pause_reading()
            self.deadline = inf

    def resume(self) -> None:
        if isinstance(self._attempt, UpstreamConnection) and not self._attempt.transport.is_closing():
            self._attempt.transport.resume_reading()
            self.deadline = time.monotonic() + self._gateway.upstream.stall_timeout

    # What the instance says

    def connected(self, connection: UpstreamConnection) -> None:
        """The connection that was asked for is there."""
        self._attempt = connection
        self._sent = True

    def answered(self, head: AnswerHead, body: bytes) -> None:
        """The whole answer."""
        self._attempt = None
        if head.status == NOT_BEGUN:
            self._sent = False
            self._came_to_nothing(f"it answered 503: {body[:200].decode('utf-8', 'replace')}")
            return
        self._ended(head.status)
        if head.status == 200:
            self._conductor.step_answered(self._place, head, body)
        else:
            self._conductor.step_failed(self._place, failure_of(head.status, body))

    def stream_began(self, head: AnswerHead) -> None:
        """The answer comes in pieces."""
        self._head = head
        if self.in_pieces and head.status == 200:
            self.lane.tell(FirstToken(self.request.request_id))
            self._conductor.step_began(self._place, head)
        else:
            self._pieces = []

    def stream_piece(self, payload: bytes) -> None:
        self.deadline = time.monotonic() + self._gateway.upstream.stall_timeout
        if self._pieces is None:
            self._conductor.step_piece(self._place, payload)
            return
        self._pieces.append(payload)
        if sum(map(len, self._pieces)) > MOST_BYTES:
            self._came_to_nothing(f"its result has more than {MOST_BYTES >> 20} MiB", retry=False)

    def stream_ended(self) -> None:
        head, pieces = self._head, self._pieces
        assert head is not None
        if pieces is not None:
            self.answered(head, b"".join(pieces))
            return
        self._attempt = None
        self._ended(head.status)
        self._conductor.step_ended(self._place)

    def upstream_failed(self, why: str, *, stale: bool = False) -> None:
        """There will be no answer, or no more of it. `stale`: the connection had been closed before we used it."""
        self._attempt = None
        if stale and self.idempotent and not self._fresh:
            self._ask(fresh=True)
        else:
            self._came_to_nothing(why)

    def timed_out(self) -> None:
        """We have lost patience with the instance."""
        self._came_to_nothing("it did not answer in time")

    # The end

    def _came_to_nothing(self, why: str, *, retry: bool = True) -> None:
        """This try has failed. The dispatcher says what happens now."""
        self.let_go()
        gateway, lane, instance_id = self._gateway, self.lane, self.instance_id
        may = retry and (self.idempotent or not self._sent) and (self._head is None or not self.in_pieces)
        again = may and gateway.retries.allows(time.monotonic())
        lane.tell(Failed(self.request.request_id, why, retry=again))
        lane.failed(instance_id, why)

    def _ended(self, status: int) -> None:
        """It was answered, whatever the answer says."""
        now = time.monotonic()
        self.deadline = inf
        self._gateway.leave(self)
        self.lane.tell(Ended(self.request.request_id))
        self.lane.worked(self.instance_id)
        self._counts.statuses[status] += 1
        self._counts.total.add(now - (self.request.arrival_time or now))


class _Raised(msgspec.Struct):
    """What a replica says of an error in the user's code."""

    type: str = "Exception"
    message: str = ""
    traceback: str = ""


def failure_of(status: int, body: bytes) -> StepFailure:
    """What a replica answered that is no result."""
    if status == 422:
        return StepFailure(422, "the input is not as it should be", "bad_input", body=body)
    if status == 504:
        return StepFailure(504, "its time was over", "deadline_exceeded")
    try:
        raised = msgspec.json.decode(body, type=_Raised)
    except msgspec.DecodeError:
        return StepFailure(502, f"it answered {status}: {body[:200].decode('utf-8', 'replace')}", "node_failed")
    if status == 500:
        return StepFailure(500, f"{raised.type}: {raised.message}", "node_failed", raised.traceback)
    return StepFailure(
        status if status in (404, 413) else 502, raised.message or f"it answered {status}", "node_failed"
    )

"""One step on its way: waiting in the lane of its node, sent to a replica, sent again if that may be, ended once."""

import time
from typing import Protocol

import msgspec

from pointsman.gateway.in_flight import InFlight
from pointsman.gateway.upstream import UpstreamConnection
from pointsman.http.answers import AnswerHead
from pointsman.routing.events import Arrived, Ended, FirstToken, Refusal, Send

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
    retry_after_s: int | None = None
    """None: trying again is of no use."""


class StepListener(Protocol):
    """Whoever wants the result of steps."""

    def step_sent(self, place: int, instance_id: str) -> None: ...

    def step_answered(self, place: int, head: AnswerHead, body: bytes) -> None:
        """The whole result."""

    def step_began(self, place: int, head: AnswerHead) -> None:
        """The result comes in pieces from here on; only if they are wanted."""

    def step_piece(self, place: int, payload: bytes) -> None: ...

    def step_ended(self, place: int) -> None: ...

    def step_failed(self, place: int, failure: StepFailure) -> None: ...


class StepCall(InFlight, eq=False):
    """One request of ours to a replica."""

    _conductor: StepListener
    _place: int
    _target: bytes
    _lines: bytes
    """Header lines, each with its end."""
    _body: bytes
    idempotent: bool
    """It may be sent again although somebody may have begun it."""
    in_pieces: bool
    """Pieces are passed on as they come; else the whole is."""
    _sent: bool = False
    """A replica may have begun it."""
    _pieces: list[bytes] | None = None

    def begin(self, now: float) -> None:
        """Take a place in the lane."""
        self.gateway.enter(self)
        self.lane.carry_out(self.lane.dispatcher.handle(Arrived((self.request,)), now))

    # What the dispatcher says

    def send(self, command: Send) -> None:
        if self._attempt is not None:
            self.let_go()
        if self._sent and not self.idempotent:
            why = f'{self.instance_id} is gone, and "{self.lane.plan.name}" is not marked idempotent'
            self.gateway.loop.call_soon(self._failed, why)
            return
        instance = command.endpoint.instance
        self.instance_id = instance.instance_id
        self._pool = self.gateway.pool_of(instance)
        self._conductor.step_sent(self._place, self.instance_id)
        self._ask(fresh=False)

    def _ask(self, *, fresh: bool) -> None:
        assert self._pool is not None
        self._fresh = fresh
        self._head = self._pieces = None
        self.deadline = time.monotonic() + self.gateway.upstream.first_token_timeout
        head = b"POST %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            self._target,
            self._pool.authority,
            self._lines,
            len(self._body),
        )
        self._attempt = self._pool.ask(self, head, self._body, fresh=fresh)
        self._sent = isinstance(self._attempt, UpstreamConnection)

    def refuse(self, refusal: Refusal) -> None:
        self._leave()
        status, retry_after_s = self._count_refused(refusal)
        failure = StepFailure(status, str(refusal.reason), "not_served", retry_after_s=retry_after_s)
        self._conductor.step_failed(self._place, failure)
        self.lane.look_for_idle()

    # What the instance says

    def connected(self, connection: UpstreamConnection) -> None:
        super().connected(connection)
        self._sent = True

    def answered(self, head: AnswerHead, body: bytes) -> None:
        """The whole answer."""
        self._attempt = None
        if head.status == NOT_BEGUN:
            self._sent = False
            self._failed(f"it answered 503: {body[:200].decode('utf-8', 'replace')}")
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
        self.deadline = time.monotonic() + self.gateway.upstream.stall_timeout
        if self._pieces is None:
            self._conductor.step_piece(self._place, payload)
            return
        self._pieces.append(payload)
        if sum(map(len, self._pieces)) > MOST_BYTES:
            self._failed(f"its result has more than {MOST_BYTES >> 20} MiB", retry=False)

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
            self._failed(why)

    def timed_out(self) -> None:
        self._failed("it did not answer in time")

    # The end

    def _failed(self, why: str, *, retry: bool = True) -> None:
        """This try has come to nothing."""
        self.let_go()
        may = retry and (self.idempotent or not self._sent) and (self._head is None or not self.in_pieces)
        self._came_to_nothing(why, may_retry=may)

    def _ended(self, status: int) -> None:
        """It was answered, whatever the answer says."""
        now = time.monotonic()
        self.gateway.leave(self)
        self.lane.tell(Ended(self.request.request_id))
        self.lane.worked(self.instance_id)
        self.counts.statuses[status] += 1
        self.counts.total.add(now - (self.request.arrival_time or now))


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

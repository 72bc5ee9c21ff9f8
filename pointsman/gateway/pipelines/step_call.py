"""One step of a pipeline in flight: it waits in the lane of its node, is sent to a replica or a model, is retried if
that is allowed, and ends once."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from pointsman.config.plan import DeploymentPlan
from pointsman.errors import PointsmanError
from pointsman.gateway.admission import Admission
from pointsman.gateway.openai import (
    MAX_USAGE_BYTES,
    BadRequest,
    Usage,
    answer_tokens,
    read_body,
    usage_of,
    usage_of_stream,
    without_usage,
)
from pointsman.gateway.pipelines.prepared import PreparedStep
from pointsman.gateway.tenants import Charge
from pointsman.gateway.upstream import (
    RETRIED,
    InFlight,
    answered_error,
    asked_too_much,
    body_for,
    learn_usage,
    no_response,
    note_answer,
)
from pointsman.http.pool import REQUEST_HEAD, ClientConnection
from pointsman.http.responses import PROGRESS_BYTES, EventStream, ResponseHead, data_in
from pointsman.pipeline.flow import NoSuchPart
from pointsman.pipeline.graph import filled
from pointsman.reasons import Reason
from pointsman.routing.events import Arrived, Ended, FirstToken, Refusal, Send
from pointsman.types import RequestMetadata
from pointsman.wire import BlobAt, Form, UnreadableBlob, decode_plain, encode_plain, failure_after_pieces, read_template

NOT_BEGUN = frozenset({429, 503})
"""Statuses from a replica or a model that has not begun the call. The call may then go to another instance."""
MAX_RESULT_BYTES = 256 * 1024 * 1024
"""Maximum size in bytes of a result that arrives in pieces but is needed as a whole."""


class StepFailure(msgspec.Struct, frozen=True):
    """Why a step has no result."""

    status: int
    """Status of the answer to the client."""
    why: Reason
    code: str
    traceback: str = ""
    raised: Mapping[str, str] = {}
    """The exception that the code raised, for handles: type, message and, if it can be sent, the exception itself."""
    body: bytes = b""
    """The replica's response, if it is passed on unchanged."""
    retry_after_s: int | None = None
    """Retry-After; None if trying again is of no use."""
    is_between_pieces: bool = False
    """Whether the code raised the exception after complete pieces of the answer, so that no piece was cut off."""

    def of_node(self, node: str) -> Reason:
        """The reason, including the node that failed."""
        return Reason("node-failed", {"node": node, "why": self.why}) if node else self.why


class StepListener(Protocol):
    """Receives the results of steps."""

    def step_sent(self, index: int, instance_id: str) -> None: ...

    def step_answered(self, index: int, head: ResponseHead, body: bytes) -> None:
        """Receive the whole result."""

    def step_began(self, index: int, head: ResponseHead) -> None:
        """From here on, the result comes in pieces. This happens only if the call asked for pieces."""

    def step_piece(self, index: int, payload: bytes) -> None: ...

    def step_ended(self, index: int) -> None: ...

    def step_failed(self, index: int, failure: StepFailure) -> None: ...


class StepCall(InFlight, eq=False):
    """One call of a replica or a model."""

    _listener: StepListener
    _index: int
    _target: bytes
    _lines: bytes
    """Header lines, each with its line end."""
    _body: bytes
    idempotent: bool
    """Whether the call may be sent again even if a replica may have begun it."""
    in_pieces: bool
    """Whether pieces are passed on as they arrive. If not, the result is passed on as a whole."""
    is_model: bool = False
    """Whether the step calls a model, not a replica."""
    _sent_body: bytes = b""
    """The body as the instance gets it."""
    _sent: bool = False
    """Whether a replica may have begun the call."""
    _pieces: list[bytes] | None = None
    _events: EventStream | None = None
    """Reads a stream of events. All events are passed on as they arrive, but only events with data extend the
    deadline."""

    def begin(self, now: float) -> None:
        """Hand the call to the dispatcher of its lane."""
        self.upstream.in_flight[self.request.request_id] = self
        self.lane.carry_out(self.lane.dispatcher.handle(Arrived((self.request,)), now))

    @property
    def is_movable(self) -> bool:
        return (self.idempotent or not self._sent) and (self._head is None or not self.in_pieces)

    # Commands of the dispatcher

    def send(self, command: Send) -> None:
        if self._attempt is not None:
            self.let_go()
        if self._sent and not self.idempotent:
            why = Reason("not-idempotent", {"instance": self.instance_id, "deployment": self.lane.name})
            self.upstream.loop.call_soon(self._failed, why)
            return
        instance = command.endpoint.instance
        self.instance_id = instance.instance_id
        self._pool = self.upstream.pool_of(instance)
        self._sent_body = bytes(body_for(self, command, self._body)) if self.is_model else self._body
        self._listener.step_sent(self._index, self.instance_id)
        self._send(fresh=False)

    def _send(self, *, fresh: bool) -> None:
        assert self._pool is not None
        self._fresh = fresh
        self._head = self._pieces = None
        self.deadline = time.monotonic() + self.upstream.settings.first_token_timeout
        lines = self._lines + self._pool.lines
        head = REQUEST_HEAD % (b"POST", self._target, self._pool.authority, lines, len(self._sent_body))
        self._attempt = self._pool.send(self, head, self._sent_body, fresh=fresh)
        self._sent = isinstance(self._attempt, ClientConnection)

    def refuse(self, refusal: Refusal) -> None:
        self._leave()
        status, retry_after_s, kept = self._count_refused(refusal)
        note_answer(self, status, None)
        failure = StepFailure(status, refusal.reason, "not_served", retry_after_s=retry_after_s)
        if kept is not None and status not in NOT_BEGUN:
            failure = failure_of(status, kept.body, is_model=self.is_model)
        self._listener.step_failed(self._index, failure)
        self.lane.look_for_idle()

    # The response of the instance

    def connected(self, connection: ClientConnection) -> None:
        super().connected(connection)
        self._sent = True

    def answered(self, head: ResponseHead, body: bytes) -> None:
        self._attempt = None
        if asked_too_much(self, head.status):
            return
        if head.status in NOT_BEGUN:
            self._sent = False
        may_ask = head.status >= 400 if self.is_model else head.status in NOT_BEGUN
        if may_ask and self._asks_another(head, body, RETRIED):
            return
        self._ended(head.status)
        if head.status == 200:
            self._listener.step_answered(self._index, head, body)
        else:
            self._listener.step_failed(self._index, failure_of(head.status, body, is_model=self.is_model))

    def stream_began(self, head: ResponseHead) -> None:
        self._head = head
        self._events = EventStream() if b"text/event-stream" in head.content_type.lower() else None
        self._unrenewed_bytes = PROGRESS_BYTES  # the first byte is progress
        if head.status == 200:
            learn_usage(self)
        if self.in_pieces and head.status == 200:
            self.lane.tell(FirstToken(self.request.request_id))
            self._listener.step_began(self._index, head)
        else:
            self._pieces = []

    def stream_piece(self, payload: bytes) -> None:
        self._renew(payload, time.monotonic())
        if self._pieces is None:
            self._listener.step_piece(self._index, payload)
            return
        self._pieces.append(payload)
        if sum(map(len, self._pieces)) > MAX_RESULT_BYTES:
            self._failed(Reason("result-too-large", {"limit_bytes": MAX_RESULT_BYTES}), retry=False)

    def _renew(self, payload: bytes, now: float) -> None:
        """Extend the deadline if the payload is progress: a value from a generator, an event with data, or enough
        bytes."""
        events, head = self._events, self._head
        if events is not None:
            events.feed(payload)
        if events.has_data if events is not None else head is not None and head.is_stream:
            self.deadline = now + self.upstream.settings.stall_timeout
        elif events is None:
            self._renew_by_bytes(payload, now)

    def stream_ended(self, trailers: bytes = b"") -> None:
        head, pieces = self._head, self._pieces
        assert head is not None
        raised = failure_after_pieces(trailers) if trailers and head.status == 200 else None
        if raised is not None:
            self._attempt = None
            self._ended(raised[0])
            failure = msgspec.structs.replace(failure_of(*raised), is_between_pieces=True)
            self._listener.step_failed(self._index, failure)
            return
        if pieces is not None:
            self.answered(head, b"".join(pieces))
            return
        self._attempt = None
        self._ended(head.status)
        self._listener.step_ended(self._index)

    def request_failed(self, why: str, *, stale: bool = False, error: OSError | None = None, local: str = "") -> None:
        self._attempt = None
        if stale and self.idempotent and not self._fresh:
            self._send(fresh=True)
        else:
            self._failed(no_response(why, error), local=local)

    def timed_out(self) -> None:
        self._failed(Reason("answer-late"))

    # The end

    def _failed(self, why: Reason, *, retry: bool = True, local: str = "") -> None:
        self.let_go()
        self._came_to_nothing(why, may_retry=retry and self.is_movable, local=local)

    def _ended(self, status: int) -> None:
        now = time.monotonic()
        self.upstream.in_flight.pop(self.request.request_id, None)
        self.lane.tell(Ended(self.request.request_id, status=status))
        self._judge(status)
        self.counts.statuses[status] += 1
        self.counts.total.add(now - (self.request.arrival_time or now))


class _Raised(msgspec.Struct):
    """An error in the user's code, as a replica reports it."""

    type: str = "Exception"
    message: str = ""
    traceback: str = ""
    pickled: str = ""
    node: str = ""
    """The node that failed, if the error comes from a call that the user's code made."""


def failure_of(status: int, body: bytes, *, is_model: bool = False) -> StepFailure:
    """The failure that an error response from a replica or a model means."""
    if status == 422:
        return StepFailure(422, Reason("input-not-valid"), "bad_input", body=body)
    if status == 504:
        return StepFailure(504, Reason("deadline-exceeded"), "deadline_exceeded")
    try:
        raised = msgspec.json.decode(body, type=_Raised)
    except msgspec.DecodeError:
        return StepFailure(502, answered_error(status, body), "node_failed")
    if status == 429:
        return StepFailure(
            429,
            Reason("node-refused", {"status": status, "text": raised.message}),
            "rate_limit_exceeded",
            retry_after_s=1,
        )
    if status == 500:
        told = {"type": raised.type, "message": raised.message, "traceback": raised.traceback}
        if raised.node:
            told["node"] = raised.node
        if raised.pickled and not is_model:  # unpickling runs code, and a model server is not trusted with that
            told["pickled"] = raised.pickled
        why = Reason("code-raised", {"type": raised.type, "message": raised.message})
        return StepFailure(500, why, "node_failed", raised.traceback, told)
    text = raised.message or f"it answered {status}"
    return StepFailure(
        status if status in (404, 413) else 502,
        Reason("node-refused", {"status": status, "text": text}),
        "node_failed",
        raised={"type": raised.type, "message": raised.message} if raised.message else {},
    )


# Calls of models: the arguments of a step become a request of the OpenAI API


class NotPlain(PointsmanError):
    """Raised if a value cannot be sent to a model, or if a model's response cannot be read."""


_TARGETS = {
    "chat": (b"/v1/chat/completions", "messages"),
    "complete": (b"/v1/completions", "prompt"),
    "embed": (b"/v1/embeddings", "input"),
}
"""For each method of the node, the path, and the body's field for the first argument."""


class ModelCall:
    def __init__(self, step: PreparedStep, blobs: list[bytes], *, in_pieces: bool) -> None:
        """Raises `NotPlain`."""
        self._method = step.step.method
        self.charge: Charge | None = None
        """The call's charge against the limits of its tenant."""
        self.events = EventStream()
        self.target, first = _TARGETS[self._method]

        def value(part: BlobAt) -> Any:
            try:
                return part.of(decode_plain(blobs[part.index]))
            except (UnreadableBlob, NoSuchPart, IndexError) as error:
                raise NotPlain(f"a model takes plain data (text, numbers, lists, mappings): {error}") from None

        try:
            fields, args = filled(read_template(step.kwargs), value), filled(read_template(step.args), value)
        except UnreadableBlob as error:
            raise NotPlain(str(error)) from None
        if args:
            fields[first] = args[0]
        if self._method == "chat" and isinstance(fields.get("messages"), str):
            fields["messages"] = [{"role": "user", "content": fields["messages"]}]
        self._raw = bool(fields.pop("raw", False))
        self.streams = bool(fields.get("stream")) and in_pieces
        fields["stream"] = self.streams
        self.hides_usage = self.streams and "stream_options" not in fields
        if self._method == "embed":
            fields.pop("stream")
        self.prompt = msgspec.json.encode(fields.get(first))
        limit = fields.get("max_tokens")
        self.max_tokens = limit if isinstance(limit, int) and limit > 0 else None
        self.body = msgspec.json.encode({"model": step.deployment, **fields})

    def reserve(self, request: RequestMetadata, admission: Admission, plan: DeploymentPlan, now: float) -> None:
        """Reserve the part of the tenant's limits that the call may use. Raises `NotAdmitted`."""
        tenant = admission.keys.tenant_named(request.user_id)
        if tenant is None:
            return
        answer = plan.assumed_output_tokens
        with suppress(BadRequest):  # the model reports the error
            answer = answer_tokens(read_body(self.body), self.target, answer)
        _, self.charge = admission.admit(request, tenant, now, answer, plan.price, part=True)

    def result(self, body: bytes, form: Form) -> bytes:
        """The result of the step in this form. Raises `NotPlain`."""
        try:
            value = self._value(msgspec.json.decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, RecursionError) as error:
            raise NotPlain(f"the answer of the model does not match the API: {error}") from None
        return encode_plain(value) if form in ("blob", "value") else msgspec.json.encode(value)

    def usage(self, body: bytes) -> Usage | None:
        """The usage that the model reported. `body` is the response, if it came as a whole."""
        if self.events.events:
            return usage_of_stream(self.events)
        try:
            return usage_of(body) if len(body) <= MAX_USAGE_BYTES else None
        except msgspec.DecodeError:  # `result` reports the error
            return None

    @property
    def output_events(self) -> int:
        """Approximate number of tokens in a stream, for models that do not report it."""
        return max(self.events.events - 2, 0)

    def for_client(self, events: bytes) -> bytes:
        """These events, without usage that the client did not ask for."""
        return without_usage(events) if self.hides_usage and events else events

    def texts(self, events: bytes) -> bytes:
        """Events as pieces for a handle: the text of each event, as a blob after its length."""
        found = b""
        for data in data_in(events):
            choices = msgspec.json.decode(data).get("choices") or [{}]
            text = (choices[0].get("delta") or {}).get("content") or choices[0].get("text")
            if text:
                blob = encode_plain(text)
                found += len(blob).to_bytes(4, "little") + blob
        return found

    def _value(self, answer: Any) -> Any:
        if self._raw:
            return answer
        if self._method == "chat":
            return answer["choices"][0]["message"]["content"]
        if self._method == "complete":
            return answer["choices"][0]["text"]
        return [one["embedding"] for one in answer["data"]]

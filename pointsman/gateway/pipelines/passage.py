"""One request on its way through an application: from its input to its answer, ended exactly once.

The run says which steps are ready; each is sent as a request of its own; results are kept, unread, until all who need
them have them. Where a deadline is given, whatever is under way when it is over is stopped.
"""

import time
from asyncio import TimerHandle
from typing import TYPE_CHECKING, Any

import msgspec

from pointsman.gateway.answers import AnswerHead
from pointsman.gateway.pipelines.audience import (
    BLOB,
    BLOB_TYPE,
    EVENTS,
    IN_PIECES,
    JSON,
    PIECES,
    VALUE,
    WHOLE,
    Audience,
)
from pointsman.gateway.pipelines.model_calls import ModelCall, NotPlain
from pointsman.gateway.pipelines.prepared import PreparedApplication, PreparedStep
from pointsman.gateway.pipelines.records import PassageRecord, StepRecord
from pointsman.gateway.pipelines.step_call import StepCall, StepFailure
from pointsman.pipeline import Run
from pointsman.pipeline.building import INGRESS
from pointsman.pipeline.flow import StepResult
from pointsman.pipeline.graph import filled
from pointsman.runtimes.wire import (
    CallHead,
    Form,
    HttpHead,
    UnreadableBlob,
    composed,
    decode_plain,
    encode_call,
    encode_plain,
    files_of,
    placeholder,
    template,
)
from pointsman.types import RequestMetadata

if TYPE_CHECKING:
    from pointsman.gateway.gateway import Gateway
    from pointsman.gateway.pipelines.applications import Applications
    from pointsman.gateway.requests import HttpRequest

CALL = b"/call"
NOTHING = template([])
LATE = StepFailure(504, "the deadline of the request was over", "deadline_exceeded")
_INPUT = -1
"""The place of the step that makes the input."""


class Asked(msgspec.Struct, frozen=True):
    """Who asks, how urgently, and until when."""

    request_id: str
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    """On the gateway's clock."""
    traceparent: str = ""
    """The trace that the client's request is part of, as W3C writes it."""


class Passage:
    """A request of an application."""

    def __init__(
        self,
        gateway: "Gateway",
        home: "Applications",
        application: PreparedApplication,
        asked: Asked,
        audience: Audience,
        caller: "Passage | None" = None,
    ) -> None:
        now = time.monotonic()
        self._gateway = gateway
        self._home = home
        self._application = application
        self.asked = asked
        self._audience = audience
        self._flow = application.flow
        self._run = Run(self._flow, now, asked.deadline)
        self._results: list[bytes | None] = [None] * len(self._flow.steps)
        self._inputs: list[bytes] = []
        self._calls: dict[int, StepCall] = {}
        """Under way, by place."""
        self._is_model: dict[int, ModelCall] = {}
        self._over = False
        self._streaming: int | None = None
        self._timers: list[TimerHandle] = []
        self._files: list[str] = []
        """In shared memory; removed when nobody needs them any more."""
        deadline_ms = None if asked.deadline is None else float(round((asked.deadline - now) * 1000))
        self.record = PassageRecord(
            asked.request_id, application.name, asked.tenant, asked.priority, deadline_ms, now, []
        )
        self._caller = caller
        """The request whose step made this call through a handle."""
        self._depth: int = 0 if caller is None else caller._depth + 1
        self._children = 0
        """Calls through handles that its steps have made."""
        self._told: dict[int, StepRecord] = {}
        if asked.deadline is not None:
            self._timers.append(gateway.loop.call_later(max(asked.deadline - now, 0.0), self._late, None))

    # The beginning

    def begin_from_http(self, http: "HttpRequest") -> None:
        """Let the ingress make the input."""
        now, application = time.monotonic(), self._application
        head = self._head(_INPUT, "input", NOTHING, application.input_parts, BLOB, now, self.asked.deadline)
        head.http = HttpHead(
            method=http.method.decode("latin-1"),
            path=http.path.decode("latin-1"),
            query=http.query.decode("latin-1"),
            headers={name.decode("latin-1"): value.decode("latin-1") for name, value in http.headers.items()},
        )
        body = encode_call(head, [encode_plain(bytes(http.body))])
        self._note(_INPUT, INGRESS, INGRESS, now)
        self._send(_INPUT, application.ingress, CALL, body, now, idempotent=True, deadline=self.asked.deadline)

    def begin(self, inputs: list[bytes]) -> None:
        """The input is there: a blob for each part that is used."""
        self._inputs = inputs
        now = time.monotonic()
        for place in self._run.begin():
            self._start(place, now)

    def _start(self, place: int, now: float) -> None:
        if self._over:
            return
        step = self._application.steps[place]
        self._note(place, step.step.id, step.step.node, now)
        deadline = self._run.deadline_of(place, now)
        if deadline is not None and deadline != self.asked.deadline:
            self._timers.append(self._gateway.loop.call_later(max(deadline - now, 0.0), self._late, place))
        blobs = step.blobs(self._inputs, self._results)
        if step.is_model:
            self._start_model(place, step, blobs, now, deadline)
            return
        head = self._head(place, step.step.method, step.args, step.kwargs, self._form(place), now, deadline)
        body = encode_call(head, blobs)
        self._send(place, step.deployment, CALL, body, now, idempotent=step.step.idempotent, deadline=deadline)

    def _start_model(
        self, place: int, step: PreparedStep, blobs: list[bytes], now: float, deadline: float | None
    ) -> None:
        """A step that is a call of a model: a request of the OpenAI API, like any other."""
        try:
            call = ModelCall(step, blobs, in_pieces=place == self._flow.streams and self._audience.form in IN_PIECES)
        except NotPlain as error:
            self.step_failed(place, StepFailure(500, str(error), "node_failed"))
            return
        self._is_model[place] = call
        self._send(place, step.deployment, call.target, call.body, now, idempotent=True, deadline=deadline, model=call)

    def _send(
        self,
        place: int,
        deployment: str,
        target: bytes,
        body: bytes,
        now: float,
        *,
        idempotent: bool,
        deadline: float | None,
        model: ModelCall | None = None,
    ) -> None:
        traffic = self._gateway.traffic
        lane = traffic.by_model.get(deployment) if model is not None else traffic.lanes.get(deployment)
        if lane is None:
            what = f'there is no model "{deployment}"' if model is not None else f'deployment "{deployment}" is gone'
            self.step_failed(place, StepFailure(503, what, "not_served"))
            return
        asked, request_id = self.asked, self._id_of(place)
        request = RequestMetadata(
            request_id,
            b"" if model is None else model.prompt,
            None if model is None else model.max_tokens,
            deployment,
            asked.priority,
            None if deadline is None else (deadline - now) * 1000,
            asked.tenant,
            now,
        )
        lines = b"content-type: application/json\r\n" if model is not None else self._home.secret_line
        call = StepCall(
            self._gateway,
            self,
            place,
            lane,
            request,
            target,
            lines + b"x-request-id: %b\r\n" % request_id.encode("latin-1", "replace"),
            body,
            idempotent=idempotent,
            in_pieces=place == self._flow.streams and self._audience.form in IN_PIECES,
        )
        self._calls[place] = call
        self._home.by_step[request_id] = self
        call.begin(now)

    def _head(
        self,
        place: int,
        method: str,
        args: msgspec.Raw,
        kwargs: msgspec.Raw,
        form: Form,
        now: float,
        deadline: float | None,
    ) -> CallHead:
        asked = self.asked
        return CallHead(
            method=method,
            args=args,
            kwargs=kwargs,
            form=form,
            request_id=asked.request_id,
            step=INGRESS if place == _INPUT else self._flow.steps[place].id,
            deadline_s=None if deadline is None else max(deadline - now, 0.0),
            priority=asked.priority,
            tenant=asked.tenant,
        )

    def _form(self, place: int) -> Form:
        """How a step is to answer: as the audience wants it, if its result is the answer."""
        if place == self._flow.streams:
            return self._audience.form
        feeds = self._flow.steps[place].feeds
        return WHOLE if not feeds and self._audience.form in (JSON, EVENTS, WHOLE) else BLOB

    def _id_of(self, place: int) -> str:
        name = INGRESS if place == _INPUT else self._flow.steps[place].id
        return f"{self.asked.request_id}.{name}"

    # What becomes of steps

    def step_sent(self, place: int, instance_id: str) -> None:
        told = self._told[place]
        told.instance, told.tries = instance_id, told.tries + 1

    def step_answered(self, place: int, head: AnswerHead, body: bytes) -> None:
        """A step has its result."""
        self._charge(place, body)
        now = self._ended(place)
        if self._over:
            return
        if place == _INPUT:
            self.begin(decode_plain(body))
            return
        if place in self._is_model:
            try:
                body = self._is_model[place].result(body, self._form(place))
            except NotPlain as error:
                self.step_failed(place, StepFailure(502, str(error), "node_failed"))
                return
        self._results[place] = body
        if self._form(place) == BLOB and (file := files_of(body)):
            self._files.append(file)
        ready = self._run.finished(place, now)
        if self._run.over:
            self._answer(head)
            return
        for following in ready:
            self._start(following, now)

    def step_began(self, place: int, head: AnswerHead) -> None:
        """The answer comes in pieces."""
        self._streaming = place
        self._audience.began(head)

    def step_piece(self, place: int, payload: bytes) -> None:
        model = self._is_model.get(place)
        if model is not None:
            payload = model.read_along(payload)
            if self._audience.form == PIECES:
                payload = model.texts(payload)
        if payload:
            self._audience.piece(payload)

    def step_ended(self, place: int) -> None:
        self._charge(place)
        self._run.finished(place, self._ended(place))
        self._finish(200)
        self._audience.ended()

    def _charge(self, place: int, body: bytes = b"") -> None:
        """What a model took is its tenant's to pay, as if it had been asked by itself."""
        model, call = self._is_model.get(place), self._calls.get(place)
        if model is None or call is None:
            return
        usage = model.usage(body)
        if usage is not None:
            self._gateway.metrics.of(call.lane.plan.name).used(usage)
        tenant = self._gateway.keys.tenants.get(self.asked.tenant)
        if tenant is not None:
            tenant.used(call.request, usage, model.output_events, call.lane.plan.price, time.monotonic())

    def step_failed(self, place: int, failure: StepFailure) -> None:
        """A step has no result, and so the request has no answer."""
        now = self._ended(place, failure.why)
        if self._over:
            return
        if place != _INPUT:
            self._run.failed(place, now)
        self._fail(failure, place)

    def _late(self, place: int | None) -> None:
        """The time of a step, or of everything, is over."""
        if self._over or (place is not None and place not in self._calls):
            return
        now = time.monotonic()
        if place is None:
            under_way = list(self._calls)
            self._run.give_up(now)
            place = under_way[0] if under_way else None
            failure = LATE
        else:
            failure = StepFailure(504, "its share of the request's time was over", "deadline_exceeded")
            self._run.failed(place, now)
        self._fail(failure, place)

    # The end

    def _answer(self, head: AnswerHead) -> None:
        """Every step has its result."""
        try:
            content_type, body = self._answered(head)
        except UnreadableBlob as error:
            why = f"a part of the answer is not plain data: {error}"
            self._fail(StepFailure(500, why, "not_plain"), None)
            return
        self._finish(200)
        self._audience.answer(content_type, body)

    def _answered(self, head: AnswerHead) -> tuple[bytes, bytes]:
        """Content type and body."""
        flow, audience = self._flow, self._audience
        if flow.streams is not None:
            body = self._results[flow.streams]
            assert body is not None
            if audience.form in (BLOB, VALUE):
                return BLOB_TYPE, body
            return b"application/json" if flow.streams in self._is_model else _content_type(head), body
        if audience.form in (BLOB, VALUE):
            parts: dict[Any, int] = {}
            output = filled(flow.output, lambda part: placeholder(parts.setdefault(part, len(parts))))
            return BLOB_TYPE, composed(output, [self._blob(part) for part in parts])
        return b"application/json", msgspec.json.encode(filled(flow.output, self._as_json))

    def _as_json(self, part: Any) -> Any:
        """Part of an answer that is made of several results."""
        is_json = isinstance(part, StepResult) and self._form(part.place) == WHOLE
        return msgspec.Raw(self._blob(part)) if is_json else decode_plain(self._blob(part))

    def _blob(self, part: Any) -> bytes:
        """A part of the input, or a result."""
        blob = self._results[part.place] if isinstance(part, StepResult) else self._inputs[part.place]
        assert blob is not None
        return blob

    def _fail(self, failure: StepFailure, place: int | None) -> None:
        step = node = ""
        if place is not None:
            step = INGRESS if place == _INPUT else self._flow.steps[place].id
            node = INGRESS if place == _INPUT else self._flow.steps[place].node
        self.record.failure = f'node "{node}": {failure.why}' if node else failure.why
        self._stop_calls(failure.why if failure.status == 504 else "another step failed")
        self._finish(failure.status)
        self._audience.failed(failure, step, node)

    def _stop_calls(self, why: str) -> None:
        calls, self._calls = self._calls, {}
        now = time.monotonic()
        for place, call in calls.items():
            told = self._told[place]
            told.ended_at, told.failure = now, told.failure or f"stopped: {why}"
            self._home.by_step.pop(call.request.request_id, None)
            call.abandon()

    def abandon(self) -> None:
        """The client has gone."""
        if not self._over:
            self._run.give_up(time.monotonic())
            self._stop_calls("the client has gone")
            self._finish(None)

    def pause(self) -> None:
        """The client does not read fast enough."""
        if self._streaming in self._calls:
            self._calls[self._streaming].pause()

    def resume(self) -> None:
        if self._streaming in self._calls:
            self._calls[self._streaming].resume()

    def _finish(self, status: int | None) -> None:
        self._over = True
        for timer in self._timers:
            timer.cancel()
        now = time.monotonic()
        self.record.ended_at, self.record.status = now, status
        self._home.ended(self, self._files, status, now - self.record.arrived_at)

    # The record

    @property
    def is_child(self) -> bool:
        """Whether it is part of another request."""
        return self._caller is not None

    def child_of(self, step_id: str) -> str:
        """The id of a call that one of its steps makes through a handle."""
        self._children += 1
        return f"{step_id}.{self._children}"

    def note_model_call(self, request_id: str, what: str) -> None:
        """One of its steps calls a model through a handle."""
        self._journal().steps.append(StepRecord(what, "", request_id, time.monotonic(), depth=self._depth + 1))

    def _note(self, place: int, step: str, node: str, now: float) -> None:
        told = self._told[place] = StepRecord(step, node, self._id_of(place), now, depth=self._depth)
        self._journal().steps.append(told)

    def _journal(self) -> PassageRecord:
        """Where steps are told: with those of the request that they are part of."""
        return self.record if self._caller is None else self._caller._journal()

    def _ended(self, place: int, failure: str = "") -> float:
        now = time.monotonic()
        call = self._calls.pop(place, None)
        if call is not None:
            self._home.by_step.pop(call.request.request_id, None)
        told = self._told.get(place)
        if told is not None and told.ended_at is None:
            told.ended_at, told.failure = now, failure
        return now


def _content_type(head: AnswerHead) -> bytes:
    """As the replica said it."""
    for line in head.lines.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-type":
            return value.strip()
    return b"application/json"

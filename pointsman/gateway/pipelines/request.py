"""One request on its way through an application: from its input to its answer, ended exactly once.

The run says which steps are ready; each is sent as a request of its own; results are kept, unread, until all who need
them have them. Where a deadline is given, whatever is under way when it is over is stopped.
"""

import time
from asyncio import TimerHandle
from typing import TYPE_CHECKING

import msgspec

from pointsman.gateway.pipelines.model_calls import ModelCall, NotPlain
from pointsman.gateway.pipelines.prepared import PreparedApplication, PreparedStep
from pointsman.gateway.pipelines.records import PipelineRecord, StepJournal
from pointsman.gateway.pipelines.response_sink import BLOB, IN_PIECES, PIECES, ResponseSink
from pointsman.gateway.pipelines.results import Results
from pointsman.gateway.pipelines.step_call import StepCall, StepFailure
from pointsman.http.answers import AnswerHead
from pointsman.pipeline import Run
from pointsman.pipeline.building import INGRESS
from pointsman.types import RequestMetadata
from pointsman.wire import CallHead, Form, HttpHead, UnreadableBlob, decode_plain, encode_call, encode_plain, template

if TYPE_CHECKING:
    from pointsman.gateway.gateway import Gateway
    from pointsman.gateway.pipelines.applications import Applications
    from pointsman.http.requests import HttpRequest


CALL = b"/call"
NOTHING = template([])
LATE = StepFailure(504, "the deadline of the request was over", "deadline_exceeded")
LATE_STEP = StepFailure(504, "its share of the request's time was over", "deadline_exceeded")
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


class PipelineRequest:
    """A request of an application."""

    def __init__(
        self,
        gateway: "Gateway",
        home: "Applications",
        application: PreparedApplication,
        asked: Asked,
        audience: ResponseSink,
        caller: "PipelineRequest | None" = None,
    ) -> None:
        """`caller`: the request whose step makes this call through a handle."""
        now = time.monotonic()
        self._gateway = gateway
        self._home = home
        self._application = application
        self.asked = asked
        self._audience = audience
        self.caller = caller
        self._flow = application.flow
        self._run = Run(self._flow, now, asked.deadline)
        self.results = Results(self._flow, audience.form)
        self._calls: dict[int, StepCall] = {}
        """Under way, by place."""
        self._models: dict[int, ModelCall] = {}
        """Steps that are calls of models."""
        self.over = False
        """It has an answer, or will have none."""
        self._streaming: int | None = None
        self._timers: list[TimerHandle] = []
        deadline_ms = None if asked.deadline is None else float(round((asked.deadline - now) * 1000))
        record = PipelineRecord(asked.request_id, application.name, asked.tenant, asked.priority, deadline_ms, now, [])
        self.journal: StepJournal = StepJournal(record, None if caller is None else caller.journal)
        if asked.deadline is not None:
            self._timers.append(gateway.loop.call_later(max(asked.deadline - now, 0.0), self._late, None))

    # The beginning

    def begin_from_http(self, http: "HttpRequest") -> None:
        """Let the ingress make the input."""
        now, application, deadline = time.monotonic(), self._application, self.asked.deadline
        head = self._head(_INPUT, "input", NOTHING, application.input_parts, BLOB, now, deadline)
        head.http = HttpHead(
            method=http.method.decode("latin-1"),
            path=http.path.decode("latin-1"),
            query=http.query.decode("latin-1"),
            headers={name.decode("latin-1"): value.decode("latin-1") for name, value in http.headers.items()},
        )
        self.journal.began(_INPUT, INGRESS, INGRESS, now)
        body = encode_call(head, [encode_plain(bytes(http.body))])
        self._send(_INPUT, application.ingress, body, now, deadline, idempotent=True)

    def begin(self, inputs: list[bytes]) -> None:
        """The input is there: a blob for each part that is used."""
        self.results.inputs = inputs
        now = time.monotonic()
        for place in self._run.begin():
            self._start(place, now)

    def _start(self, place: int, now: float) -> None:
        if self.over:
            return
        step = self._application.steps[place]
        self.journal.began(place, step.step.id, step.step.node, now)
        deadline = self._run.deadline_of(place, now)
        if deadline is not None and deadline != self.asked.deadline:
            self._timers.append(self._gateway.loop.call_later(max(deadline - now, 0.0), self._late, place))
        if step.is_model:
            self._start_model(place, step, now, deadline)
            return
        form = self.results.form_of(place)
        head = self._head(place, step.step.method, step.args, step.kwargs, form, now, deadline)
        body = encode_call(head, self.results.blobs_for(step))
        self._send(place, step.deployment, body, now, deadline, idempotent=step.step.idempotent)

    def _start_model(self, place: int, step: PreparedStep, now: float, deadline: float | None) -> None:
        """A step that is a call of a model: a request of the OpenAI API, like any other."""
        try:
            call = ModelCall(step, self.results.blobs_for(step), in_pieces=self._comes_in_pieces(place))
        except NotPlain as error:
            self.step_failed(place, StepFailure(500, str(error), "node_failed"))
            return
        self._models[place] = call
        self._send(place, step.deployment, call.body, now, deadline, idempotent=True, model=call)

    def _send(
        self,
        place: int,
        deployment: str,
        body: bytes,
        now: float,
        deadline: float | None,
        *,
        idempotent: bool,
        model: ModelCall | None = None,
    ) -> None:
        traffic = self._gateway.traffic
        lane = traffic.by_model.get(deployment) if model is not None else traffic.lanes.get(deployment)
        if lane is None:
            what = f'there is no model "{deployment}"' if model is not None else f'deployment "{deployment}" is gone'
            self.step_failed(place, StepFailure(503, what, "not_served", retry_after_s=1))
            return
        asked, request_id = self.asked, f"{self.asked.request_id}.{self._name_of(place)}"
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
            self,
            place,
            CALL if model is None else model.target,
            lines + b"x-request-id: %b\r\n" % request_id.encode("latin-1", "replace"),
            body,
            idempotent=idempotent,
            in_pieces=self._comes_in_pieces(place),
            gateway=self._gateway,
            lane=lane,
            request=request,
            counts=self._gateway.metrics.of(lane.plan.name),
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
            step=self._name_of(place),
            deadline_s=None if deadline is None else max(deadline - now, 0.0),
            priority=asked.priority,
            tenant=asked.tenant,
        )

    def _name_of(self, place: int) -> str:
        return INGRESS if place == _INPUT else self._flow.steps[place].id

    def _comes_in_pieces(self, place: int) -> bool:
        """Whether what a step yields is passed on as it comes."""
        return place == self._flow.streams and self._audience.form in IN_PIECES

    # What becomes of steps

    def step_sent(self, place: int, instance_id: str) -> None:
        self.journal.sent(place, instance_id)

    def step_answered(self, place: int, head: AnswerHead, body: bytes) -> None:
        """A step has its result."""
        model = self._charged(place, body)
        now = self._ended(place)
        if self.over:
            return
        if place == _INPUT:
            self.begin(decode_plain(body))
            return
        if model is not None:
            try:
                body = model.result(body, self.results.form_of(place))
            except NotPlain as error:
                self.step_failed(place, StepFailure(502, str(error), "node_failed"))
                return
        self.results[place] = body
        ready = self._run.finished(place, now)
        if self._run.over:
            self._answer(None if model is not None else head)
            return
        for following in ready:
            self._start(following, now)

    def step_began(self, place: int, head: AnswerHead) -> None:
        """The answer comes in pieces."""
        self._streaming = place
        self._audience.began(head)

    def step_piece(self, place: int, payload: bytes) -> None:
        model = self._models.get(place)
        if model is not None:
            payload = model.read_along(payload)
            if self._audience.form == PIECES:
                payload = model.texts(payload)
        if payload:
            self._audience.piece(payload)

    def step_ended(self, place: int) -> None:
        self._charged(place)
        self._run.finished(place, self._ended(place))
        self._finish(200)
        self._audience.ended()

    def step_failed(self, place: int, failure: StepFailure) -> None:
        """A step has no result, and so the request has no answer."""
        now = self._ended(place, failure.why)
        if self.over:
            return
        if place != _INPUT:
            self._run.failed(place, now)
        self._fail(failure, place)

    def _charged(self, place: int, body: bytes = b"") -> ModelCall | None:
        """What a model took is its tenant's to pay, as if it had been asked by itself; None: it was no model."""
        model, call = self._models.get(place), self._calls.get(place)
        if model is not None and call is not None:
            usage = model.usage(body)
            if usage is not None:
                self._gateway.metrics.of(call.lane.plan.name).used(usage)
            tenant = self._gateway.keys.tenants.get(self.asked.tenant)
            if tenant is not None:
                tenant.used(call.request, usage, model.output_events, call.lane.plan.price, time.monotonic())
        return model

    def _ended(self, place: int, failure: str = "") -> float:
        now = time.monotonic()
        call = self._calls.pop(place, None)
        if call is not None:
            self._home.by_step.pop(call.request.request_id, None)
        self.journal.ended(place, now, failure)
        return now

    def _late(self, place: int | None) -> None:
        """The time of a step, or of everything, is over."""
        if self.over or (place is not None and place not in self._calls):
            return
        now = time.monotonic()
        if place is None:
            self._run.give_up(now)
            self._fail(LATE, next(iter(self._calls), None))
        else:
            self._run.failed(place, now)
            self._fail(LATE_STEP, place)

    # The end

    def _answer(self, head: AnswerHead | None) -> None:
        """Every step has its result."""
        try:
            content_type, body = self.results.answer(head)
        except UnreadableBlob as error:
            why = f"a part of the answer is not plain data: {error}"
            self._fail(StepFailure(500, why, "not_plain"), None)
            return
        self._finish(200)
        self._audience.answer(content_type, body)

    def _fail(self, failure: StepFailure, place: int | None) -> None:
        step = "" if place is None else self._name_of(place)
        node = step if place is None or place == _INPUT else self._flow.steps[place].node
        self.journal.record.failure = f'node "{node}": {failure.why}' if node else failure.why
        self._stop_calls(failure.why if failure.status == 504 else "another step failed")
        self._finish(failure.status)
        self._audience.failed(failure, step, node)

    def _stop_calls(self, why: str) -> None:
        calls, self._calls = self._calls, {}
        now = time.monotonic()
        for place, call in calls.items():
            self.journal.ended(place, now, f"stopped: {why}")
            self._home.by_step.pop(call.request.request_id, None)
            call.abandon()

    def abandon(self) -> None:
        """The client has gone."""
        if not self.over:
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
        self.over = True
        for timer in self._timers:
            timer.cancel()
        self._home.ended(self, status, self.journal.over(status))

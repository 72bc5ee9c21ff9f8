"""One request to an application, from its input to its answer. It ends exactly once.

The run says which steps are ready. Each step is sent as a separate request. Results are kept, unread, until all steps
that need them have received them. After the deadline, the calls in flight are stopped.
"""

import time
from asyncio import TimerHandle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from pointsman.errors import did_you_mean
from pointsman.gateway.admission import NotAdmitted
from pointsman.gateway.pipelines.prepared import PreparedApplication, PreparedStep
from pointsman.gateway.pipelines.records import PipelineRecord, StepJournal
from pointsman.gateway.pipelines.results import BLOB, IN_PIECES, PIECES, ResponseSink, Results
from pointsman.gateway.pipelines.step_call import ModelCall, NotPlain, StepCall, StepFailure
from pointsman.gateway.tenants import Charge
from pointsman.http.heads import HttpRequest
from pointsman.http.responses import ResponseHead
from pointsman.pipeline import Run
from pointsman.pipeline.building import INGRESS
from pointsman.pipeline.flow import NoSuchPart
from pointsman.reasons import Reason
from pointsman.types import RequestMetadata
from pointsman.wire import CallHead, Form, HttpHead, UnreadableBlob, decode_plain, encode_call, encode_plain, template

if TYPE_CHECKING:
    from pointsman.gateway.gateway import Gateway
    from pointsman.gateway.pipelines.applications import Applications


CALL = b"/call"
NO_ARGS = template([])
LATE = StepFailure(504, Reason("request-late"), "deadline_exceeded")
LATE_STEP = StepFailure(504, Reason("step-late"), "deadline_exceeded")
INPUT = -1
"""The index of the step that makes the input."""


class RequestContext(msgspec.Struct, frozen=True):
    """The sender of a request, its priority, and its deadline."""

    request_id: str
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    """The deadline as a time on the gateway's clock; None if there is no deadline."""
    traceparent: str = ""
    """The trace that the client's request is part of, in W3C format."""


class StepCalls:
    """The calls of one request that are in flight."""

    def __init__(
        self,
        request: "PipelineRequest",
        gateway: "Gateway",
        home: "Applications",
        application: PreparedApplication,
        form: Form,
    ) -> None:
        self._request = request
        self._gateway = gateway
        self._home = home
        self._application = application
        self._form = form
        """The form of the answer."""
        self._calls: dict[int, StepCall] = {}
        """Calls in flight, by the index of the step."""
        self.models: dict[int, ModelCall] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._calls)

    def __getitem__(self, index: int) -> StepCall:
        return self._calls[index]

    def name_of(self, index: int) -> str:
        return INGRESS if index == INPUT else self._application.flow.steps[index].id

    def send_input(self, http: HttpRequest, now: float) -> None:
        application, deadline = self._application, self._request.context.deadline
        head = self._head(INPUT, "input", NO_ARGS, application.input_parts, BLOB, now, deadline)
        head.http = HttpHead(
            method=http.method.decode("latin-1"),
            path=http.path.decode("latin-1"),
            query=http.query.decode("latin-1"),
            headers={name.decode("latin-1"): value.decode("latin-1") for name, value in http.headers.items()},
        )
        body = encode_call(head, [encode_plain(bytes(http.body))])
        self._send(INPUT, application.ingress, body, now, deadline, idempotent=True)

    def send(self, index: int, step: PreparedStep, results: Results, now: float, deadline: float | None) -> None:
        if step.is_model:
            try:
                call = ModelCall(step, results.blobs_for(step), in_pieces=self._comes_in_pieces(index))
            except NotPlain as error:
                why = Reason("arguments-not-plain", {"error": str(error)})
                self._request.step_failed(index, StepFailure(500, why, "node_failed"))
                return
            self.models[index] = call
            self._send(index, step.deployment, call.body, now, deadline, idempotent=True, model=call)
            return
        head = self._head(index, step.step.method, step.args, step.kwargs, results.form_of(index), now, deadline)
        body = encode_call(head, results.blobs_for(step))
        self._send(index, step.deployment, body, now, deadline, idempotent=step.step.idempotent)

    def _send(
        self,
        index: int,
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
            why = Reason("deployment-gone", {"deployment": deployment})
            if model is not None:
                why = Reason("no-model", {"model": deployment, "advice": did_you_mean(deployment, traffic.by_model)})
            self._request.step_failed(index, StepFailure(503, why, "not_served", retry_after_s=1))
            return
        context = self._request.context
        request_id = f"{context.request_id}.{self.name_of(index)}"
        request = RequestMetadata(
            request_id,
            b"" if model is None else model.prompt,
            None if model is None else model.max_tokens,
            deployment,
            context.priority,
            None if deadline is None else (deadline - now) * 1000,
            context.tenant,
            now,
        )
        if model is not None:
            try:
                model.reserve(request, self._gateway.admission, lane.plan, now)
            except NotAdmitted as error:
                why = Reason("turned-away", {"text": str(error)})
                failure = StepFailure(error.status, why, error.code, retry_after_s=error.retry_after_s)
                self._request.step_failed(index, failure)
                return
        lines = b"content-type: application/json\r\n" if model is not None else self._home.replica_calls.secret_line
        call = StepCall(
            self._request,
            index,
            CALL if model is None else model.target,
            lines + b"x-request-id: %b\r\n" % request_id.encode("latin-1", "replace"),
            body,
            idempotent=idempotent,
            in_pieces=self._comes_in_pieces(index),
            is_model=model is not None,
            usage_question=b"" if model is not None and model.hides_usage else None,
            upstream=self._gateway.upstream,
            lane=lane,
            request=request,
            counts=self._gateway.metrics.of(lane.name),
        )
        self._calls[index] = call
        self._home.by_step[request_id] = self._request
        call.begin(now)

    def _head(
        self,
        index: int,
        method: str,
        args: msgspec.Raw,
        kwargs: msgspec.Raw,
        form: Form,
        now: float,
        deadline: float | None,
    ) -> CallHead:
        context = self._request.context
        return CallHead(
            method=method,
            args=args,
            kwargs=kwargs,
            form=form,
            request_id=context.request_id,
            step=self.name_of(index),
            deadline_s=None if deadline is None else max(deadline - now, 0.0),
            priority=context.priority,
            tenant=context.tenant,
        )

    def _comes_in_pieces(self, index: int) -> bool:
        """Whether the values that a step yields are passed on as they arrive."""
        return index == self._application.flow.streams and self._form in IN_PIECES

    def settle(self, index: int, body: bytes = b"") -> ModelCall | None:
        """Charge the tokens of a model call to the tenant. Returns the call; None if the step does not call a model."""
        model, call = self.models.get(index), self._calls.get(index)
        if model is not None and call is not None:
            usage = model.usage(body)
            if usage is not None:
                call.counts.used(usage)
            if model.charge is not None:
                model.charge.settle(usage, model.output_events if model.streams else None, len(body), time.monotonic())
        return model

    def end(self, index: int) -> None:
        call, model = self._calls.pop(index, None), self.models.get(index)
        if call is not None:
            self._home.by_step.pop(call.request.request_id, None)
        if model is not None and model.charge is not None:
            model.charge.close()
            if call is not None:
                note_cost(call, model.charge)

    def stop(self) -> list[int]:
        """Give up all calls. Returns the indexes of their steps."""
        calls, self._calls = self._calls, {}
        for index, call in calls.items():
            self._home.by_step.pop(call.request.request_id, None)
            model = self.models.get(index)
            if model is not None and model.charge is not None:
                if call.instance_id:
                    model.charge.grown(model.events.events, time.monotonic())
                model.charge.close()
                note_cost(call, model.charge)
            call.abandon()
        return list(calls)


class PipelineRequest:
    def __init__(
        self,
        gateway: "Gateway",
        home: "Applications",
        application: PreparedApplication,
        context: RequestContext,
        sink: ResponseSink,
        caller: "PipelineRequest | None" = None,
    ) -> None:
        """`caller` is the request whose step makes this call, if the call comes through a handle."""
        now = time.monotonic()
        self._loop = gateway.loop
        self._home = home
        self._application = application
        self.context = context
        self._sink = sink
        self.caller = caller
        self._run = Run(application.flow, now, context.deadline)
        self.results = Results(application.flow, sink.form)
        self._calls = StepCalls(self, gateway, home, application, sink.form)
        self.over = False
        """Whether the request has an answer, or will never get one."""
        self._streaming: int | None = None
        self._timers: list[TimerHandle] = []
        deadline_ms = None if context.deadline is None else float(round((context.deadline - now) * 1000))
        record = PipelineRecord(
            context.request_id, application.name, context.tenant, context.priority, deadline_ms, now, []
        )
        self.journal: StepJournal = StepJournal(record, None if caller is None else caller.journal)
        if context.deadline is not None:
            self._timers.append(self._loop.call_later(max(context.deadline - now, 0.0), self._late, None))

    # The beginning

    def begin_from_http(self, http: HttpRequest) -> None:
        now = time.monotonic()
        self.journal.began(INPUT, INGRESS, INGRESS, now)
        self._calls.send_input(http, now)

    def begin(self, inputs: list[bytes]) -> None:
        """Begin with the input, which has a blob for each used part."""
        self.results.inputs = inputs
        self._start(self._run.begin(), time.monotonic())

    def _start(self, ready: Sequence[int], now: float) -> None:
        for index in ready:
            if self.over:  # an earlier step has failed
                return
            step = self._application.steps[index]
            self.journal.began(index, step.step.id, step.step.node, now)
            deadline = self._run.deadline_of(index, now)
            if deadline is not None and deadline != self.context.deadline:
                self._timers.append(self._loop.call_later(max(deadline - now, 0.0), self._late, index))
            self._calls.send(index, step, self.results, now, deadline)

    # Steps

    def step_sent(self, index: int, instance_id: str) -> None:
        self.journal.sent(index, instance_id)

    def step_answered(self, index: int, head: ResponseHead, body: bytes) -> None:
        model = self._calls.settle(index, body)
        now = self._step_over(index)
        if self.over:
            return
        if index == INPUT:
            self.begin(decode_plain(body))
            return
        if model is not None:
            try:
                body = model.result(body, self.results.form_of(index))
            except NotPlain as error:
                why = Reason("unreadable-result", {"error": str(error)})
                self.step_failed(index, StepFailure(502, why, "node_failed"))
                return
        self.results[index] = body
        ready = self._run.finished(index, now)
        if self._run.over:
            self._answer(None if model is not None else head)
        else:
            self._start(ready, now)

    def step_began(self, index: int, head: ResponseHead) -> None:
        self._streaming = index
        self._sink.began(head)

    def step_piece(self, index: int, payload: bytes) -> None:
        model = self._calls.models.get(index)
        if model is not None:
            payload = model.events.feed(payload)
            if model.charge is not None:
                model.charge.grown(model.events.events, time.monotonic())
            payload = model.texts(payload) if self._sink.form == PIECES else model.for_client(payload)
        if payload:
            self._sink.piece(payload)

    def step_ended(self, index: int) -> None:
        self._calls.settle(index)
        self._run.finished(index, self._step_over(index))
        self._finish(200)
        self._sink.ended()

    def step_failed(self, index: int, failure: StepFailure) -> None:
        """Fail the request, because an answer needs the results of all steps."""
        now = self._step_over(index, failure.why)
        if self.over:
            return
        if index != INPUT:
            self._run.failed(index, now)
        self._fail(failure, index)

    def _step_over(self, index: int, failure: Reason | None = None) -> float:
        now = time.monotonic()
        self._calls.end(index)
        self.journal.ended(index, now, failure)
        return now

    # The end

    def _late(self, index: int | None) -> None:
        """Handle a missed deadline: of a step, or of the whole request."""
        if self.over or (index is not None and index not in self._calls):
            return
        now = time.monotonic()
        if index is None:
            self._run.give_up(now)
            self._fail(LATE, next(iter(self._calls), None))
        else:
            self._run.failed(index, now)
            self._fail(LATE_STEP, index)

    def _answer(self, head: ResponseHead | None) -> None:
        try:
            content_type, body = self.results.answer(head)
        except UnreadableBlob as error:
            why = Reason("answer-not-plain", {"error": str(error)})
            self._fail(StepFailure(500, why, "not_plain"), None)
            return
        except NoSuchPart as error:
            self._fail(StepFailure(500, Reason("no-such-part", {"error": str(error)}), "node_failed"), None)
            return
        self._finish(200)
        self._sink.answer(content_type, body)

    def _fail(self, failure: StepFailure, index: int | None) -> None:
        step = "" if index is None else self._calls.name_of(index)
        node = step if index is None or index == INPUT else self._application.flow.steps[index].node
        self.journal.record.failure = failure.of_node(node)
        self._stop_calls(failure.why if failure.status == 504 else Reason("another-step-failed"))
        self._finish(failure.status)
        self._sink.failed(failure, step, node)

    def _stop_calls(self, why: Reason) -> None:
        now, stopped = time.monotonic(), Reason("step-stopped", {"why": why})
        for index in self._calls.stop():
            self.journal.ended(index, now, stopped)

    def _finish(self, status: int | None) -> None:
        self.over = True
        for timer in self._timers:
            timer.cancel()
        self._home.ended(self, status, self.journal.over(status))

    # The client

    def abandon(self) -> None:
        if not self.over:
            self._run.give_up(time.monotonic())
            self._stop_calls(Reason("client-disconnected"))
            self._finish(None)

    def pause(self) -> None:
        if self._streaming is not None and self._streaming in self._calls:
            self._calls[self._streaming].pause()

    def resume(self) -> None:
        if self._streaming is not None and self._streaming in self._calls:
            self._calls[self._streaming].resume()


def note_cost(call: StepCall, charge: Charge) -> None:
    """Add the tenant's cost for a call to the record of the call."""
    record = call.lane.dispatcher.records.get(call.request.request_id)
    if record is not None:
        record.cost = charge.used

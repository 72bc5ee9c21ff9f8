"""The applications of a gateway: their pages, their requests in flight, and the calls that their replicas make."""

import hmac
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pointsman.config.plan import ApplicationPlan
from pointsman.errors import PointsmanError, did_you_mean, shown
from pointsman.gateway.admission import NotAdmitted
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import READ, WRITE, GatewayPage
from pointsman.gateway.long_bodies import INPUT_JSON, JsonLimits
from pointsman.gateway.openai import BadRequest, Extension, settings_in_headers
from pointsman.gateway.pipelines.prepared import PreparedApplication, PreparedCall
from pointsman.gateway.pipelines.records import PipelineRecord, PipelineRecords, exporting
from pointsman.gateway.pipelines.request import PipelineRequest, RequestContext
from pointsman.gateway.pipelines.results import (
    HttpSink,
    ResponseSink,
    SharedFiles,
    arguments_of,
    has_arguments,
    inputs_of,
)
from pointsman.gateway.pipelines.step_call import StepCall, StepFailure
from pointsman.gateway.tenants import Tenant
from pointsman.http.heads import HttpRequest
from pointsman.http.responses import ResponseHead
from pointsman.pipeline.flow import BadInput
from pointsman.pipeline.graph import Access
from pointsman.reasons import Reason
from pointsman.runtimes.interface import SharedMemory
from pointsman.runtimes.traffic import Lane
from pointsman.types import MAX_NAME, RequestMetadata, RequestPriority
from pointsman.wire import CallHead, UnreadableBlob, decode_call, decode_plain, encode_call, load_arrays

if TYPE_CHECKING:
    from pointsman.gateway.gateway import Gateway


# The OpenAPI document of an application. The schema of the input comes from a replica.


SCHEMA_S = 1.0
"""How long a document is served before the gateway requests it from a replica again."""


class SchemaPage:
    """The OpenAPI document of an application. One request to a replica, at most every `SCHEMA_S`, serves all
    clients."""

    def __init__(self, gateway: "Gateway", replicas: "ReplicaCalls", application: PreparedApplication) -> None:
        self._gateway = gateway
        self._replicas = replicas
        self._name, self._ingress = application.name, application.ingress
        self._shape = shape_of([part.path for part in application.flow.inputs])
        self._content = b""
        self._made_at = -SCHEMA_S
        self.readers: dict[SchemaReader, GatewayConnection] = {}
        """Clients that wait for a replica's answer."""
        self._asked = False

    def __call__(self, client: GatewayConnection, *_: object) -> None:
        lane = self._gateway.traffic.lanes.get(self._ingress)
        if lane is None:
            client.answer(200, msgspec.json.encode(openapi(self._name, self._shape)))
        elif time.monotonic() - self._made_at < SCHEMA_S:
            client.answer(200, self._content)
        else:
            reader = SchemaReader(self)
            client.serving = reader
            self.readers[reader] = client
            if not self._asked:
                self._ask(lane)

    def _ask(self, lane: Lane) -> None:
        self._asked = True
        now, request_id = time.monotonic(), self._gateway.admission.new_id()
        call = StepCall(
            self,
            0,
            b"/call",
            self._replicas.secret_line,
            encode_call(CallHead(method="openapi", request_id=request_id)),
            idempotent=True,
            in_pieces=False,
            upstream=self._gateway.upstream,
            lane=lane,
            request=RequestMetadata(request_id, model_name=lane.plan.model, arrival_time=now),
            counts=self._gateway.metrics.of(lane.name),
        )
        call.begin(now)

    def step_sent(self, index: int, instance_id: str) -> None: ...

    def step_answered(self, index: int, head: ResponseHead, body: bytes) -> None:
        try:
            schema = decode_plain(body) or {}
        except UnreadableBlob as error:
            self.step_failed(index, StepFailure(502, Reason("unreadable-result", {"error": str(error)}), "node_failed"))
            return
        self._content, self._made_at = msgspec.json.encode(openapi(self._name, schema)), time.monotonic()
        for client in self._answered():
            client.answer(200, self._content)

    def step_began(self, index: int, head: ResponseHead) -> None: ...

    def step_piece(self, index: int, payload: bytes) -> None: ...

    def step_ended(self, index: int) -> None: ...

    def step_failed(self, index: int, failure: StepFailure) -> None:
        for client in self._answered():
            client.error(failure.status, str(failure.why), failure.code)

    def _answered(self) -> Collection[GatewayConnection]:
        readers, self.readers, self._asked = self.readers, {}, False
        return readers.values()


def shape_of(paths: Iterable[Sequence[Access]]) -> dict[str, Any]:
    """The JSON schema of an input, as far as the used parts of the input determine it."""
    parts: dict[int | str, list[Sequence[Access]]] = {}
    for path in paths:
        if not path:
            return {}  # any value
        parts.setdefault(path[0].key, []).append(path[1:])
    within = {key: shape_of(rest) for key, rest in parts.items()}
    numbers = [key for key in within if isinstance(key, int)]
    if numbers and len(numbers) == len(within) and min(numbers) >= 0:
        needed = max(numbers) + 1
        items = [within.get(number, {}) for number in range(needed)]
        return {"type": "array", "prefixItems": items, "minItems": needed}
    if numbers or not within:
        return {}
    return {"type": "object", "properties": within, "required": [str(key) for key in within]}


class SchemaReader:
    """A client that waits for the OpenAPI document of an application."""

    def __init__(self, page: SchemaPage) -> None:
        self._page = page

    def abandon(self) -> None:
        self._page.readers.pop(self, None)

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def openapi(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document of an application whose input has this schema."""
    body = {"content": {"application/json": {"schema": schema}}, "required": True}
    responses = {
        "200": {"description": "the answer", "content": {"application/json": {}}},
        "422": {"description": "the input is not valid; each problem with its field"},
        "500": {"description": "a node failed; the error says which"},
        "504": {"description": "the deadline was exceeded"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": name, "version": "1"},
        "paths": {f"/{name}": {"post": {"operationId": name, "requestBody": body, "responses": responses}}},
    }


CALLS = b"/pipelines/call"
"""The path at which replicas call each other through handles."""
MODELS = b"/pipelines/v1/"
"""The prefix at which replicas call models; a path of the OpenAI API follows it."""
SECRET = b"x-pointsman-secret"
CALLER = b"x-pointsman-caller"
"""The header with the id of the step that calls a model."""


class Applications:
    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self._prepared: dict[str, PreparedApplication] = {}
        self._in_flight: dict[str, PipelineRequest] = {}
        """Requests in flight, by id."""
        gateway.admission.names_in_flight = self._in_flight
        self.replica_calls = ReplicaCalls(gateway, self)
        self._files = SharedFiles(gateway.loop, gateway.tasks)
        self._export = exporting()
        self.records = PipelineRecords(gateway.settings.keep_records)
        self.by_step: dict[str, PipelineRequest] = {}
        """For each step in flight, its pipeline request, by the request id of the step."""

    def trust(self, secret: str, memory: SharedMemory) -> None:
        """Use the secret and the shared memory of a plane's replicas."""
        self.replica_calls.secret = secret.encode()
        self._files.use(memory)

    def configure(self, plans: Sequence[ApplicationPlan]) -> None:
        """Open the pages of new applications, and close the pages of removed ones."""
        self.records.limit = self._gateway.settings.keep_records
        if plans:
            load_arrays()
        pages = self._gateway.pages.exact
        for name in self._prepared:
            for path in (f"/{name}", f"/{name}/", f"/{name}/openapi.json"):
                pages.pop(path.encode(), None)
        self._prepared = {plan.name: PreparedApplication(plan) for plan in plans}
        for name, application in self._prepared.items():
            pages[f"/{name}".encode()] = pages[f"/{name}/".encode()] = self._page(application)
            schema = SchemaPage(self._gateway, self.replica_calls, application)
            reader = self._gateway.admission.page_reader
            pages[f"/{name}/openapi.json".encode()] = GatewayPage(schema, reader, READ)

    def get(self, name: str) -> PreparedApplication | None:
        return self._prepared.get(name)

    @property
    def names(self) -> list[str]:
        return sorted(self._prepared)

    # Requests of clients

    def _page(self, application: PreparedApplication) -> GatewayPage:
        def page(client: GatewayConnection, http: HttpRequest, tenant: Tenant | None) -> None:
            given = http.headers.get(b"x-request-id")
            try:
                context = self.admitted(application.name, http, tenant)
                self.begin(application, context, HttpSink(client, http, context.request_id), http)
            except (NotAdmitted, BadRequest, BadInput) as error:
                if given is not None:
                    http.headers[b"x-request-id"] = given
                body = _field_error(error) if isinstance(error, BadInput) else None
                self._gateway.history.turn_away(client, http, refused(error), tenant, application.name, body=body)

        def json_limits(http: HttpRequest) -> JsonLimits | None:
            return None if application.ingress or has_arguments(http) else INPUT_JSON

        return GatewayPage(page, self._gateway.admission.tenant_of, WRITE, json_limits)

    def admitted(self, name: str, http: HttpRequest, tenant: Tenant | None) -> RequestContext:
        """The sender of the request, its priority, and its deadline. Raises `NotAdmitted`."""
        admission, now = self._gateway.admission, time.monotonic()
        try:
            settings = settings_in_headers(http.headers)
        except BadRequest as error:
            raise NotAdmitted(400, str(error), "invalid_header") from None
        priority = RequestPriority(int(settings.priority or 0))
        request = RequestMetadata(admission.request_id(http), model_name=name, priority=priority, arrival_time=now)
        if tenant is not None:
            request, _ = admission.admit(request, tenant, now)
        self._gateway.upstream.retries.requests += 1
        whose = settings.tenant if tenant is None else tenant.name
        trace = http.headers.get(b"traceparent", b"").decode("latin-1")
        trace = trace if len(trace) <= MAX_NAME else ""  # W3C requires that an invalid trace is ignored
        return RequestContext(request.request_id, request.priority, whose, _deadline(settings, now), trace)

    def begin(
        self, application: PreparedApplication, context: RequestContext, sink: ResponseSink, http: HttpRequest
    ) -> None:
        """Start a request. Raises `BadRequest` or `BadInput` if the input cannot be read."""
        if application.ingress:
            if has_arguments(http):
                arguments_of(http.body)  # refuse unreadable arguments here; the ingress reads them again
            self.enter(application, context, sink).begin_from_http(http)
        else:
            inputs = inputs_of(application, http)
            self.enter(application, context, sink).begin(inputs)

    def enter(
        self,
        application: PreparedApplication,
        context: RequestContext,
        sink: ResponseSink,
        caller: PipelineRequest | None = None,
    ) -> PipelineRequest:
        """Register a request as in flight; the caller of this method begins the request."""
        request = PipelineRequest(self._gateway, self, application, context, sink, caller)
        sink.wait_for(request)
        self._in_flight[context.request_id] = request
        if caller is None:
            self.records.add(request.journal.record)
        return request

    # Requests that have ended

    def record_of(self, request_id: str) -> PipelineRecord | None:
        """The record of a request, including the known details of the model calls that its steps have made."""
        record = self.records.get(request_id)
        for step in () if record is None else record.steps:
            if step.instance:
                continue
            for lane in self._gateway.traffic.all_lanes():
                known = lane.dispatcher.records.get(step.request_id)
                if known is not None:
                    step.node = step.node or known.model
                    step.instance, step.ended_at = known.instance, known.ended_at
        return record

    def ended(self, request: PipelineRequest, status: int | None, seconds: float) -> None:
        """Free the shared memory of a request, and count the request."""
        self._in_flight.pop(request.context.request_id, None)
        self._files.ended(request)
        if request.caller is not None:
            return
        record = request.journal.record
        self._gateway.history.fresh.append(record)
        if self._export is not None:
            self._export(record, request.context.traceparent)
        counts = self._gateway.metrics.of(record.application)
        if status is None:
            counts.abandoned += 1
        else:
            counts.statuses[status] += 1
            counts.total.add(seconds)

    def __len__(self) -> int:
        """Number of requests in flight."""
        return len(self._in_flight)


class ReplicaCalls:
    """Calls that replicas make through handles. Each call is a step of the request that the replica serves, and is
    scheduled like any other step."""

    def __init__(self, gateway: "Gateway", applications: Applications) -> None:
        self._gateway = gateway
        self._applications = applications
        self.secret = b""
        """The shared secret with which the plane's replicas and its gateway authenticate each other."""
        pages = gateway.pages
        pages.exact[CALLS], pages.trees[MODELS] = (
            GatewayPage(self._call, self.check),
            GatewayPage(self._call_model, self.check),
        )
        pages.of_replicas += [pages.exact[CALLS], pages.trees[MODELS]]

    @property
    def secret_line(self) -> bytes:
        return b"%b: %b\r\n" % (SECRET, self.secret)

    def _call(self, client: GatewayConnection, http: HttpRequest, tenant: Tenant | None) -> None:
        try:
            head, blobs = decode_call(bytes(http.body))
        except UnreadableBlob as error:
            client.error(400, str(error), "invalid_body")
            return
        application = self._applications.get(head.app)
        if application is None or not any(node.name == head.node for node in application.plan.graph.nodes):
            why = f'there is no application "{shown(head.app)}"{did_you_mean(head.app, self._applications.names)}'
            if application is not None:
                nodes = [node.name for node in application.plan.graph.nodes]
                near = did_you_mean(head.node, nodes)
                why = f'there is no node "{shown(head.node)}" in application "{shown(head.app)}"{near}'
            client.error(404, why, "not_found")
            return
        step = f"{head.request_id}.{head.step}"
        caller, now = self._applications.by_step.get(step), time.monotonic()
        http.headers.pop(b"x-request-id", None)
        context = RequestContext(
            self._gateway.admission.request_id(http) if caller is None else caller.journal.child_of(step),
            RequestPriority(head.priority),
            head.tenant,
            None if head.deadline_s is None else now + head.deadline_s,
        )
        sink = HttpSink(client, http, context.request_id)
        sink.form = head.form
        call = PreparedCall(application, head, len(blobs))
        self._applications.enter(call, context, sink, caller).begin(list(map(bytes, blobs)))

    def _call_model(self, client: GatewayConnection, http: HttpRequest, tenant: Tenant | None) -> None:
        """Call a model. The client's request was admitted already, but the tokens of this call are charged to its
        tenant."""
        headers = http.headers
        del headers[SECRET]
        step = headers.pop(CALLER, b"").decode("latin-1")
        caller, request_id = self._applications.by_step.get(step), ""
        if caller is not None:
            request_id = caller.journal.child_of(step)
            headers.pop(b"x-request-id", None)
            caller.journal.model_called(request_id, http.path.rpartition(b"/")[2].decode("latin-1"))
        http.path = http.target = http.path.removeprefix(b"/pipelines")
        tenant = self._gateway.admission.keys.tenant_named(headers.get(b"x-pointsman-tenant", b"").decode("latin-1"))
        self._gateway.infer(client, http, tenant, part_id=request_id)

    def check(self, http: HttpRequest, client: GatewayConnection) -> None:
        """Raise `NotAdmitted` if the sender is not a process of this plane."""
        if not self.secret or not hmac.compare_digest(http.headers.get(SECRET, b""), self.secret):
            raise NotAdmitted(403, "only replicas of this plane may call this", "forbidden")


def _deadline(settings: Extension, now: float) -> float | None:
    limits = [settings.deadline_ms / 1000] if settings.deadline_ms is not None else []
    limits += [settings.timeout_s] if settings.timeout_s is not None else []
    return now + min(limits) if limits else None


def refused(error: NotAdmitted | BadRequest | BadInput) -> NotAdmitted:
    """The error for a request that cannot be started."""
    if isinstance(error, NotAdmitted):
        return error
    status, code = (422, "bad_input") if isinstance(error, BadInput) else (400, "invalid_body")
    return NotAdmitted(status, str(error), code)


def _field_error(error: PointsmanError) -> bytes:
    return msgspec.json.encode({"detail": [{"loc": ["body"], "msg": str(error), "type": "bad_input"}]})

"""Which applications there are: their pages at the gateway, and the requests that are on their way through them."""

import hmac
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from pointsman.config.plan import ApplicationPlan
from pointsman.errors import PointsmanError
from pointsman.gateway.client import ClientConnection
from pointsman.gateway.openai import BadRequest, Extension, asked_in_headers
from pointsman.gateway.pages import only_read
from pointsman.gateway.pipelines.openapi import SchemaQuestion, openapi
from pointsman.gateway.pipelines.prepared import PreparedApplication, PreparedCall
from pointsman.gateway.pipelines.records import PipelineRecord, PipelineRecords
from pointsman.gateway.pipelines.request import Asked, PipelineRequest
from pointsman.gateway.pipelines.response_sink import HttpSink, ResponseSink
from pointsman.gateway.pipelines.results import ARGUMENTS, inputs_of
from pointsman.gateway.pipelines.sharing import SharedFiles
from pointsman.gateway.pipelines.tracing import exporting
from pointsman.http.requests import HttpRequest
from pointsman.pipeline.inputs import BadInput
from pointsman.runtimes.interface import ReplicaAccess
from pointsman.types import RequestMetadata
from pointsman.wire import UnreadableBlob, decode_call

if TYPE_CHECKING:
    from pointsman.gateway.gateway import Gateway

CALLS = b"/pipelines/call"
"""Where replicas call each other through handles."""
MODELS = b"/pipelines/v1/"
"""Where they call models: the paths of the OpenAI API follow."""
CALLER = b"x-pointsman-caller"
"""The step that calls a model."""


class NotAdmitted(PointsmanError):
    """A request may not come in, or not now, or not so: what whoever sent it is told."""

    def __init__(self, status: int, why: str, code: str, retry_after_s: int | None = None) -> None:
        self.status, self.code, self.retry_after_s = status, code, retry_after_s
        super().__init__(why)


class Applications:
    """The applications of a gateway."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self._prepared: dict[str, PreparedApplication] = {}
        self._in_flight: dict[str, PipelineRequest] = {}
        """By request id."""
        gateway.names_in_flight = self._in_flight
        self._secret = b""
        self._files = SharedFiles(gateway.loop)
        self._export = exporting()
        self.records = PipelineRecords(gateway.settings.keep_records)
        self.by_step: dict[str, PipelineRequest] = {}
        """By the request id of a step that is under way: what it belongs to."""
        gateway.pages[CALLS] = self._call
        gateway.page_trees[MODELS] = self._call_model

    @property
    def secret_line(self) -> bytes:
        """What replicas know us by."""
        return b"x-pointsman-secret: %b\r\n" % self._secret

    def trust(self, replicas: ReplicaAccess) -> None:
        """Use the secret and the shared memory of these replicas."""
        self._secret = replicas.secret.encode()
        self._files.use(replicas.memory)

    def configure(self, plans: Sequence[ApplicationPlan]) -> None:
        """Open the pages of new applications, and close those of applications that are gone."""
        self.records.most = self._gateway.settings.keep_records
        for name in self._prepared:
            self._gateway.pages.pop(f"/{name}".encode(), None)
            self._gateway.pages.pop(f"/{name}/openapi.json".encode(), None)
        self._prepared = {plan.name: PreparedApplication(plan) for plan in plans}
        for name, application in self._prepared.items():
            self._gateway.pages[f"/{name}".encode()] = self._page(application)
            self._gateway.pages[f"/{name}/openapi.json".encode()] = self._openapi(application)

    def get(self, name: str) -> PreparedApplication | None:
        return self._prepared.get(name)

    @property
    def names(self) -> list[str]:
        return sorted(self._prepared)

    # Requests of clients

    def _page(self, application: PreparedApplication) -> Callable[[ClientConnection, HttpRequest], None]:
        def page(client: ClientConnection, http: HttpRequest) -> None:
            if http.method == b"POST":
                self._serve(application, client, http)
            else:
                client.error(405, "send this as POST", headers=b"allow: POST\r\n")

        return page

    def _serve(self, application: PreparedApplication, client: ClientConnection, http: HttpRequest) -> None:
        try:
            asked = self.admitted(application.name, http, client)
            self.begin(application, asked, HttpSink(self._gateway, client, http, asked.request_id), http)
        except NotAdmitted as error:
            retry = b"" if error.retry_after_s is None else b"retry-after: %d\r\n" % error.retry_after_s
            client.error(error.status, str(error), error.code, retry)
        except BadRequest as error:
            client.error(400, str(error), "invalid_body")
        except BadInput as error:
            client.answer(422, _field_error(error))

    def begin(self, application: PreparedApplication, asked: Asked, audience: ResponseSink, http: HttpRequest) -> None:
        """Let a request go its way. Raises `BadRequest` or `BadInput` if it cannot even begin."""
        if http.headers.get(b"content-type") == ARGUMENTS or not application.ingress:
            inputs = inputs_of(application, http)
            self.enter(application, asked, audience).begin(inputs)
        else:
            self.enter(application, asked, audience).begin_from_http(http)

    def enter(
        self,
        application: PreparedApplication,
        asked: Asked,
        audience: ResponseSink,
        caller: PipelineRequest | None = None,
    ) -> PipelineRequest:
        """A request is on its way; whoever has made it begins it."""
        passage = PipelineRequest(self._gateway, self, application, asked, audience, caller)
        audience.wait_for(passage)
        self._in_flight[asked.request_id] = passage
        if caller is None:
            self.records.add(passage.journal.record)
        return passage

    def admitted(self, name: str, http: HttpRequest, client: ClientConnection | None = None) -> Asked:
        """Who asks and how. Raises `NotAdmitted`."""
        gateway, now = self._gateway, time.monotonic()
        tenant = None
        if gateway.keys.required:
            tenant = gateway.keys.tenant_of(client, http)
            if tenant is None:
                raise NotAdmitted(401, "send your API key as: authorization: Bearer KEY", "invalid_api_key")
        try:
            wanted = asked_in_headers(http.headers)
        except BadRequest as error:
            raise NotAdmitted(400, str(error), "invalid_header") from None
        request = RequestMetadata(gateway.request_id(http), model_name=name, priority=int(wanted.priority or 0))
        if tenant is not None:
            request = tenant.bounded(request)
            denial = tenant.denial(request, now)
            if denial is not None:
                gateway.metrics.turned_away[tenant.name] += 1
                raise NotAdmitted(429, denial.why, "rate_limit_exceeded", denial.retry_after_s)
        gateway.retries.requests += 1
        whose = wanted.tenant if tenant is None else tenant.name
        trace = http.headers.get(b"traceparent", b"").decode("latin-1")
        return Asked(request.request_id, request.priority, whose, _deadline(wanted, now), trace)

    def _openapi(self, application: PreparedApplication) -> Callable[[ClientConnection, HttpRequest], None]:
        def page(client: ClientConnection, http: HttpRequest) -> None:
            lane = self._gateway.traffic.lanes.get(application.ingress)
            if lane is None:
                client.answer(200, msgspec.json.encode(openapi(application.name, {})))
                return
            question = SchemaQuestion(application.name, client)
            client.serving = question
            question.ask(self._gateway, lane, self.secret_line, self._gateway.request_id(http))

        return only_read(page)

    # Calls of replicas

    def _call(self, client: ClientConnection, http: HttpRequest) -> None:
        """A call through a handle: a step of somebody's request, scheduled like any other."""
        if not self._knows(client, http):
            return
        try:
            head, blobs = decode_call(bytes(http.body))
        except UnreadableBlob as error:
            client.error(400, str(error), "invalid_body")
            return
        application = self._prepared.get(head.app)
        if application is None or not any(node.name == head.node for node in application.plan.graph.nodes):
            client.error(404, f'there is no node "{head.node}" in application "{head.app}"', "not_found")
            return
        step = f"{head.request_id}.{head.step}"
        caller, now = self.by_step.get(step), time.monotonic()
        asked = Asked(
            self._gateway.request_id(http) if caller is None else caller.journal.child_of(step),
            head.priority,
            head.tenant,
            None if head.deadline_s is None else now + head.deadline_s,
        )
        audience = HttpSink(self._gateway, client, http, asked.request_id)
        audience.form = head.form
        call = PreparedCall(application, head, len(blobs))
        self.enter(call, asked, audience, caller).begin(list(map(bytes, blobs)))

    def _call_model(self, client: ClientConnection, http: HttpRequest) -> None:
        """A call of a model through a handle: let in already, but its tokens are its tenant's."""
        if not self._knows(client, http):
            return
        headers = http.headers
        step = headers.pop(CALLER, b"").decode("latin-1")
        caller = self.by_step.get(step)
        if caller is not None:
            request_id = caller.journal.child_of(step)
            headers[b"x-request-id"] = request_id.encode("latin-1", "replace")
            caller.journal.model_called(request_id, http.path.rpartition(b"/")[2].decode("latin-1"))
        http.path = http.target = http.path.removeprefix(b"/pipelines")
        tenant = self._gateway.keys.tenants.get(headers.get(b"x-pointsman-tenant", b"").decode("latin-1"))
        self._gateway.infer(client, http, tenant, is_part=True)

    def _knows(self, client: ClientConnection, http: HttpRequest) -> bool:
        """Whether it is a replica of this plane; others are told off."""
        said = http.headers.pop(b"x-pointsman-secret", b"")
        if self._secret and hmac.compare_digest(said, self._secret):
            return True
        client.error(403, "this is for replicas of this plane alone", "forbidden")
        return False

    # What became of requests

    def told(self, request_id: str) -> PipelineRecord | None:
        """The record of a request, with what is known of models that its steps have called."""
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

    def ended(self, passage: PipelineRequest, status: int | None, seconds: float) -> None:
        """A request has ended: its shared memory is given back, and it is counted."""
        self._in_flight.pop(passage.asked.request_id, None)
        self._files.ended(passage)
        if passage.caller is not None:
            return
        record = passage.journal.record
        if self._export is not None:
            self._export(record, passage.asked.traceparent)
        counts = self._gateway.metrics.of(record.application)
        if status is None:
            counts.abandoned += 1
        else:
            counts.statuses[status] += 1
            counts.total.add(seconds)

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._in_flight)


def _deadline(wanted: Extension, now: float) -> float | None:
    limits = [wanted.deadline_ms / 1000] if wanted.deadline_ms is not None else []
    limits += [wanted.timeout_s] if wanted.timeout_s is not None else []
    return now + min(limits) if limits else None


def _field_error(error: PointsmanError) -> bytes:
    return msgspec.json.encode({"detail": [{"loc": ["body"], "msg": str(error), "type": "bad_input"}]})

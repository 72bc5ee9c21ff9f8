"""The OpenAPI document of an application; the schema of its input comes from a replica of its ingress."""

import time
from typing import TYPE_CHECKING, Any

import msgspec

from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.pipelines.prepared import PreparedApplication
from pointsman.gateway.pipelines.step_call import StepCall, StepFailure
from pointsman.http.parser import HttpRequest
from pointsman.http.responses import ResponseHead
from pointsman.runtimes.traffic import Lane
from pointsman.types import RequestMetadata
from pointsman.wire import CallHead, decode_plain, encode_call

if TYPE_CHECKING:
    from pointsman.gateway.gateway import Gateway, GatewayPage
    from pointsman.gateway.pipelines.applications import ReplicaCalls


def schema_page(gateway: "Gateway", replicas: "ReplicaCalls", application: PreparedApplication) -> "GatewayPage":
    """The page with the document of an application."""

    def page(client: GatewayConnection, http: HttpRequest) -> None:
        lane = gateway.traffic.lanes.get(application.ingress)
        if lane is None:
            client.answer(200, msgspec.json.encode(openapi(application.name, {})))
            return
        request = SchemaRequest(application.name, client)
        client.serving = request
        request.send(gateway, lane, replicas.secret_line, gateway.admission.request_id(http))

    return page


class SchemaRequest:
    """A client's request for the schema of an application."""

    def __init__(self, name: str, client: GatewayConnection) -> None:
        self._name = name
        self._client = client
        self._call: StepCall | None = None

    def send(self, gateway: "Gateway", lane: Lane, secret_line: bytes, request_id: str) -> None:
        """Call a replica of the ingress."""
        now = time.monotonic()
        request = RequestMetadata(request_id, model_name=lane.plan.model, arrival_time=now)
        body = encode_call(CallHead(method="openapi", request_id=request_id))
        self._call = StepCall(
            self,
            0,
            b"/call",
            secret_line,
            body,
            idempotent=True,
            in_pieces=False,
            upstream=gateway.upstream,
            lane=lane,
            request=request,
            counts=gateway.metrics.of(lane.plan.name),
        )
        self._call.begin(now)

    def step_sent(self, index: int, instance_id: str) -> None: ...

    def step_answered(self, index: int, head: ResponseHead, body: bytes) -> None:
        self._client.answer(200, msgspec.json.encode(openapi(self._name, decode_plain(body) or {})))

    def step_began(self, index: int, head: ResponseHead) -> None: ...

    def step_piece(self, index: int, payload: bytes) -> None: ...

    def step_ended(self, index: int) -> None: ...

    def step_failed(self, index: int, failure: StepFailure) -> None:
        self._client.error(failure.status, failure.why, failure.code)

    def abandon(self) -> None:
        if self._call is not None:
            self._call.abandon()

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def openapi(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The document of an application whose input has this schema."""
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

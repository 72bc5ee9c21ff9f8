"""The gRPC services, their messages, and the server."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import msgspec
from google.protobuf import descriptor_pool, message_factory, struct_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from pointsman.config.schema import TlsSpec
from pointsman.errors import did_you_mean, shown
from pointsman.gateway.admission import NotAdmitted
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.grpc.response_sink import Context, GrpcSink, NotAnswered, refuse
from pointsman.gateway.long_bodies import INPUT_JSON, count_json
from pointsman.gateway.openai import BadRequest
from pointsman.gateway.pipelines.applications import Applications, refused
from pointsman.gateway.pipelines.prepared import PreparedApplication
from pointsman.gateway.pipelines.request import RequestContext
from pointsman.gateway.pipelines.results import JSON, WHOLE
from pointsman.http.heads import HttpRequest
from pointsman.pipeline.flow import BadInput
from pointsman.types import MAX_NAME
from pointsman.wire import Form

# The messages of predict.proto are built at import, because generated code would need a particular version of protobuf.

PACKAGE = "pointsman.v1"
SERVICE = f"{PACKAGE}.Predict"

_STRING, _MESSAGE = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_MESSAGE


def _file() -> FileDescriptorProto:
    """The descriptor that the compiler would generate from predict.proto."""
    file = FileDescriptorProto(
        name="pointsman/v1/predict.proto", package=PACKAGE, syntax="proto3", dependency=[struct_pb2.DESCRIPTOR.name]
    )
    request = file.message_type.add(name="PredictRequest")
    request.oneof_decl.add(name="input")
    _field(request, "application", 1)
    _field(request, "json", 2, oneof=0)
    _field(request, "values", 3, _MESSAGE, oneof=0, message=struct_pb2.Value.DESCRIPTOR.full_name)
    response = file.message_type.add(name="PredictResponse")
    _field(response, "json", 1)
    _field(response, "request_id", 2)
    service = file.service.add(name="Predict")
    for name, streams in (("Predict", False), ("PredictStream", True)):
        service.method.add(
            name=name,
            input_type=f".{PACKAGE}.PredictRequest",
            output_type=f".{PACKAGE}.PredictResponse",
            server_streaming=streams,
        )
    return file


def _field(
    of: DescriptorProto,
    name: str,
    number: int,
    kind: FieldDescriptorProto.Type.ValueType = _STRING,
    *,
    oneof: int | None = None,
    message: str = "",
) -> None:
    field = of.field.add(name=name, number=number, type=kind, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if oneof is not None:
        field.oneof_index = oneof
    if message:
        field.type_name = f".{message}"


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(FILE.message_types_by_name[name])


_pool = descriptor_pool.Default()  # the pool that reflection uses
FILE = _pool.AddSerializedFile(_file().SerializeToString())
PredictRequest = _class("PredictRequest")
PredictResponse = _class("PredictResponse")


MAX_VALUES = 100_000
"""Maximum number of values in an input in the field `values`, because each value is a Python object. Inputs as JSON
have no such limit."""


def plain(value: Any) -> Any:
    """The Python value for a `google.protobuf.Value`. Its numbers are doubles; whole numbers become integers. Raises
    `BadRequest`."""
    return _plain(value, count(1))


def _plain(value: Any, number: "count[int]") -> Any:
    if next(number) > MAX_VALUES:
        raise BadRequest(f"the input has more than {MAX_VALUES} values; send it as json")
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return {name: _plain(one, number) for name, one in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_plain(one, number) for one in value.list_value.values]
    if kind == "number_value":
        given = value.number_value
        return int(given) if given.is_integer() and abs(given) < 1 << 53 else given
    return None if kind in (None, "null_value") else getattr(value, kind)


WATCH_S = 0.25
"""How often the status is checked for clients that watch it, in seconds."""

HealthContext: TypeAlias = grpc.aio.ServicerContext[HealthCheckRequest, HealthCheckResponse]


class Health(HealthServicer):
    """The standard health service. The names "" and pointsman.v1.Predict stand for the plane; each application has its
    own name."""

    def __init__(self, gateway: Gateway, applications: Applications, is_ready: Callable[[], bool]) -> None:
        self._gateway = gateway
        self._applications = applications
        self._is_ready = is_ready
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Report that nothing is ready, and end all watches."""
        self._ending.set()

    async def Check(self, request: HealthCheckRequest, context: HealthContext) -> HealthCheckResponse:  # noqa: N802
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            known = did_you_mean(request.service, [SERVICE, *self._applications.names])
            what = f'there is no service or application "{shown(request.service)}"{known}'
            await context.abort(grpc.StatusCode.NOT_FOUND, what)
        return HealthCheckResponse(status=status)

    async def Watch(self, request: HealthCheckRequest, context: HealthContext) -> None:  # noqa: N802
        """The status now, and whenever it changes."""
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                await context.write(HealthCheckResponse(status=status))
                last = status
            if self._ending.is_set():
                return
            try:
                await asyncio.wait_for(self._ending.wait(), WATCH_S)
            except TimeoutError:
                continue

    def _status(self, service: str) -> int:
        if service in ("", SERVICE):
            serves = self._is_ready()
        else:
            application = self._applications.get(service)
            if application is None:
                return HealthCheckResponse.SERVICE_UNKNOWN
            serves = self._can_answer(application)
        stopping = self._gateway.draining or self._ending.is_set()
        return HealthCheckResponse.SERVING if serves and not stopping else HealthCheckResponse.NOT_SERVING

    def _can_answer(self, application: PreparedApplication) -> bool:
        """Whether each step of an application has instances."""
        traffic = self._gateway.traffic
        lanes = [
            (traffic.by_model if step.is_model else traffic.lanes).get(step.deployment) for step in application.steps
        ]
        if application.ingress:
            lanes.append(traffic.lanes.get(application.ingress))
        return all(lane is not None and len(lane.dispatcher.fleet) > 0 for lane in lanes)


Messages: TypeAlias = AsyncIterator[bytes]


class GrpcCall:
    """One call, and the sink for its answer."""

    def __init__(self, form: Form) -> None:
        self.sink = GrpcSink(form)
        self.request_id = ""
        """Empty until the request is admitted."""
        self.charged = 0
        """Size of the call's request in bytes; it counts towards the gateway's limit."""

    def response(self, piece: str) -> Any:
        return PredictResponse(json=piece, request_id=self.request_id)


class PredictService:
    """`pointsman.v1.Predict`. `Predict` returns the whole answer. `PredictStream` returns a message per piece: a
    line of JSON, or text as it arrives."""

    def __init__(self, gateway: Gateway, applications: Applications) -> None:
        self._gateway = gateway
        self._applications = applications

    def handler(self) -> grpc.GenericRpcHandler:
        # This service decodes requests itself, so that it can answer invalid ones. Each call has one message. It is
        # declared as a stream of messages, so that the gateway checks the key before it receives the message.
        how = {"response_serializer": _serialized}
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Predict": grpc.stream_unary_rpc_method_handler(self.predict, **how),
                "PredictStream": grpc.stream_stream_rpc_method_handler(self.predict_stream, **how),
            },
        )

    async def predict(self, messages: Messages, context: Context) -> Any:
        call = GrpcCall(WHOLE)
        try:
            await self._begin(call, messages, context)
            pieces = [piece async for piece in call.sink]
        except NotAnswered as error:
            await refuse(context, error, call.request_id)
        finally:
            self._end(call)
        return call.response(f"[{','.join(pieces)}]" if call.sink.came_in_pieces else pieces[0])

    async def predict_stream(self, messages: Messages, context: Context) -> None:
        call = GrpcCall(JSON)
        try:
            await self._begin(call, messages, context)
            async for piece in call.sink:
                await context.write(call.response(piece))
        except NotAnswered as error:
            await refuse(context, error, call.request_id)
        except grpc.aio.InternalError:
            return  # the client has disconnected
        finally:
            self._end(call)

    async def _begin(self, call: GrpcCall, messages: Messages, context: Context) -> None:
        """Start the request. Raises `NotAnswered`."""
        applications = self._applications
        http, tenant, name = _as_http(context), None, ""
        given = http.headers.get(b"x-request-id")
        try:
            tenant = self._gateway.admission.tenant_of(http)
            message = await self._received(call, messages)
            name = message.application
            http.path = http.target = b"/" + name.encode()
            admitted = applications.admitted(name, http, tenant)
            call.request_id = admitted.request_id
            application = self._application(name)
            http.body = _input(message)
            if not application.ingress and (problem := await count_json(http.body, INPUT_JSON)):
                raise NotAdmitted(413, problem, "body_too_complex")
            applications.begin(application, _within(admitted, context.time_remaining()), call.sink, http)
        except (NotAdmitted, BadRequest, BadInput) as error:
            if given is not None:
                http.headers[b"x-request-id"] = given
            turned_away, history = refused(error), self._gateway.history
            call.request_id = history.note_refused(http, turned_away, tenant, name, call.request_id)
            raise NotAnswered(turned_away.status, str(turned_away), turned_away.retry_after_s) from None

    async def _received(self, call: GrpcCall, messages: Messages) -> Any:
        """The request of a call. Its size counts towards the bytes that the gateway holds."""
        try:
            async with asyncio.timeout(self._gateway.limits.body_timeout):
                body = await anext(messages, None)
        except TimeoutError:
            raise NotAnswered(504, "the request did not arrive in time") from None
        if body is None:
            raise NotAnswered(400, "the call has no PredictRequest")
        buffered = self._gateway.buffered
        call.charged = len(body)
        buffered.held += call.charged
        if buffered.is_exceeded:
            raise NotAnswered(503, "the gateway holds too many bytes of requests; try again later", 1)
        try:
            message = PredictRequest.FromString(body)
        except DecodeError as error:
            raise NotAnswered(400, f"this is not a PredictRequest: {shown(str(error))}") from None
        if len(message.application) > MAX_NAME:
            found = f"{len(message.application)} characters"
            raise NotAnswered(400, f"application: expected at most {MAX_NAME} characters, found {found}")
        return message

    def _end(self, call: GrpcCall) -> None:
        call.sink.leave()
        self._gateway.buffered.held -= call.charged

    def _application(self, name: str) -> PreparedApplication:
        if self._gateway.draining:
            raise NotAdmitted(503, "the gateway is shutting down; send the request to another one", "shutting_down", 1)
        application = self._applications.get(name)
        if application is None:
            known = did_you_mean(name, self._applications.names)
            why = f'there is no application "{shown(name)}"{known}' if name else f"name an application{known}"
            raise NotAdmitted(404 if name else 400, why, "application_not_found" if name else "application_missing")
        return application


def _as_http(context: Context) -> HttpRequest:
    """The call as an HTTP request, without the contents of its message."""
    headers = {
        name.encode(): value.encode("utf-8", "replace")
        for name, value in context.invocation_metadata() or ()
        if isinstance(value, str)
    }
    path = b"/" + SERVICE.encode()
    return HttpRequest(b"POST", path, path, b"", headers | {b"content-type": b"application/json"})


def _input(message: Any) -> bytes:
    """The input as JSON. Raises `BadRequest`."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise BadRequest("there is no input; send it as json or as values")
    return message.json.encode() if kind == "json" else msgspec.json.encode(plain(message.values))


def _within(context: RequestContext, seconds: float | None) -> RequestContext:
    """The context. If the deadline of the call is earlier, the context gets that deadline."""
    if seconds is None:
        return context
    until = time.monotonic() + seconds
    deadline = until if context.deadline is None else min(context.deadline, until)
    return msgspec.structs.replace(context, deadline=deadline)


def _serialized(response: Any) -> bytes:
    return bytes(response.SerializeToString())


HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
UNREAD = 100_000
"""Maximum number of calls that wait to be accepted. gRPC drops further calls without a reason, so the limit is high."""


class PredictServer:
    """A gRPC server in the loop of the gateway."""

    def __init__(
        self, gateway: Gateway, applications: Applications, is_ready: Callable[[], bool], *, shared: bool = False
    ) -> None:
        limits = gateway.limits
        connections = gateway.clients.set_aside_for_grpc()
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", limits.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", limits.max_header_bytes),
                ("grpc.max_allowed_incoming_connections", connections),
                ("grpc.max_connection_idle_ms", round(1000 * limits.idle_timeout)),
                ("grpc.server_handshake_timeout_ms", round(1000 * limits.header_timeout)),
                ("grpc.server.max_pending_requests", UNREAD),
                ("grpc.server.max_pending_requests_hard_limit", UNREAD),
                ("grpc.so_reuseport", int(shared)),  # otherwise gRPC silently shares the port of another program
            )
        )
        self._health = Health(gateway, applications, is_ready)
        self._server.add_generic_rpc_handlers((PredictService(gateway, applications).handler(),))
        add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self._server)

    async def start(self, listen: str, tls: TlsSpec | None) -> int:
        """Listen. Returns the port. Raises RuntimeError if the address is not available."""
        if tls is None:
            port = self._server.add_insecure_port(listen)
        else:
            certificate = (Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes())
            port = self._server.add_secure_port(listen, grpc.ssl_server_credentials([certificate]))
        await self._server.start()
        return port

    async def stop(self, grace_s: float) -> None:
        """Accept no new calls. Calls in flight have `grace_s` to end."""
        self._health.end()
        await self._server.stop(grace_s)

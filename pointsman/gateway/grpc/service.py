"""Calls on their way into applications, and their answers on the way back.

`Predict` asks for the whole answer. `PredictStream` asks for it as HTTP clients do, in JSON: values come one to a line
and each is a message; text comes as it comes, and whatever has come is a message.
"""

import time
from typing import Any

import grpc
import msgspec

from pointsman.errors import did_you_mean
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.grpc.audience import GrpcSink, NotAnswered
from pointsman.gateway.grpc.messages import SERVICE, PredictRequest, PredictResponse, plain
from pointsman.gateway.grpc.statuses import Context, refuse
from pointsman.gateway.openai import BadRequest
from pointsman.gateway.pipelines.applications import Applications, NotAdmitted
from pointsman.gateway.pipelines.audience import JSON, WHOLE
from pointsman.gateway.pipelines.passage import Asked
from pointsman.gateway.pipelines.prepared import PreparedApplication
from pointsman.gateway.requests import HttpRequest
from pointsman.pipeline.inputs import BadInput
from pointsman.runtimes.wire import Form


class GrpcCall:
    """One call: what it asks for, and who waits for it."""

    def __init__(self, form: Form) -> None:
        self.audience = GrpcSink(form)
        self.request_id = ""
        """Empty: it has not come in."""

    def response(self, piece: str) -> Any:
        return PredictResponse(json=piece, request_id=self.request_id)


class PredictService:
    """`pointsman.v1.Predict`"""

    def __init__(self, gateway: Gateway, applications: Applications) -> None:
        self._gateway = gateway
        self._applications = applications

    def handler(self) -> grpc.GenericRpcHandler:
        """For a server."""
        how = {"request_deserializer": PredictRequest.FromString, "response_serializer": _serialized}
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Predict": grpc.unary_unary_rpc_method_handler(self.predict, **how),
                "PredictStream": grpc.unary_stream_rpc_method_handler(self.predict_stream, **how),
            },
        )

    async def predict(self, message: Any, context: Context) -> Any:
        """The whole answer."""
        call = GrpcCall(WHOLE)
        try:
            self._begin(call, message, context)
            pieces = [piece async for piece in call.audience]
        except NotAnswered as error:
            await refuse(context, error, call.request_id)
        finally:
            call.audience.leave()
        return call.response(f"[{','.join(pieces)}]" if call.audience.came_in_pieces else pieces[0])

    async def predict_stream(self, message: Any, context: Context) -> None:
        """A message for each piece."""
        call = GrpcCall(JSON)
        try:
            self._begin(call, message, context)
            async for piece in call.audience:
                await context.write(call.response(piece))
        except NotAnswered as error:
            await refuse(context, error, call.request_id)
        except grpc.aio.InternalError:
            return  # it could not be written: the client has gone
        finally:
            call.audience.leave()

    # The way in

    def _begin(self, call: GrpcCall, message: Any, context: Context) -> None:
        """Let the request go its way. Raises `NotAnswered`."""
        applications = self._applications
        http = _as_http(message, context)
        try:
            asked = applications.admitted(message.application, http)
            call.request_id = asked.request_id
            application = self._application(message.application)
            http.body = _input(message)
            applications.begin(application, _within(asked, context.time_remaining()), call.audience, http)
        except NotAdmitted as error:
            raise NotAnswered(error.status, str(error), error.retry_after_s) from None
        except BadRequest as error:
            raise NotAnswered(400, str(error)) from None
        except BadInput as error:
            raise NotAnswered(422, str(error)) from None

    def _application(self, name: str) -> PreparedApplication:
        if self._gateway.draining:
            raise NotAnswered(503, "the gateway is shutting down", 1)
        application = self._applications.get(name)
        if application is None:
            known = did_you_mean(name, self._applications.names)
            raise NotAnswered(404 if name else 400, f'there is no application "{name[:200]}"{known}')
        return application


def _as_http(message: Any, context: Context) -> HttpRequest:
    """The call as a client over HTTP would have sent it: whoever reads requests need not know of others."""
    told = {
        name.encode(): value.encode("utf-8", "replace")
        for name, value in context.invocation_metadata() or ()
        if isinstance(value, str)
    }
    path = b"/" + message.application.encode()
    return HttpRequest(b"POST", path, path, b"", told | {b"content-type": b"application/json"})


def _input(message: Any) -> bytes:
    """As JSON. Raises `BadRequest`."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise BadRequest("there is no input; send it as json or as values")
    return message.json.encode() if kind == "json" else msgspec.json.encode(plain(message.values))


def _within(asked: Asked, seconds: float | None) -> Asked:
    """The same, with the deadline of the call if that is earlier."""
    if seconds is None:
        return asked
    until = time.monotonic() + seconds
    return msgspec.structs.replace(asked, deadline=until if asked.deadline is None else min(asked.deadline, until))


def _serialized(response: Any) -> bytes:
    return bytes(response.SerializeToString())

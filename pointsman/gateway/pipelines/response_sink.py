"""Where the answer of an application goes: the forms it can have, and a client over HTTP."""

from typing import Any, Protocol

from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.openai import error_body, error_kind
from pointsman.gateway.pipelines.step_call import StepFailure
from pointsman.http.events import event
from pointsman.http.parser import HttpRequest
from pointsman.http.responses import ResponseHead
from pointsman.http.server import RequestHandler, ResponseStream
from pointsman.wire import BLOB as BLOB_TYPE
from pointsman.wire import Form

JSON: Form = "json"
EVENTS: Form = "events"
"""Forms for people and their programs; events: server-sent, if the answer comes in pieces."""
WHOLE: Form = "whole"
"""JSON that never comes in pieces: it is part of a larger answer."""
BLOB: Form = "blob"
VALUE: Form = "value"
PIECES: Form = "pieces"
"""Forms for handles: a value as it is; VALUE: without shared memory; PIECES: a value per piece."""
IN_PIECES = frozenset({JSON, EVENTS, PIECES})
"""Forms in which what a generator yields is passed on as it comes."""
ACCEPTED: dict[bytes, Form] = {BLOB_TYPE.encode(): VALUE, f"{BLOB_TYPE}; pieces".encode(): PIECES}
"""What handles accept -> the form."""


class ResponseSink(Protocol):
    """Gets exactly one of: an answer; a beginning, pieces and an end; a failure, before or after a beginning."""

    form: Form

    def wait_for(self, handler: RequestHandler) -> None:
        """The handler that makes the answer; it learns if the client disconnects or reads slowly."""

    def answer(self, content_type: bytes, body: bytes) -> None: ...

    def began(self, head: ResponseHead) -> None: ...

    def piece(self, payload: bytes) -> None: ...

    def ended(self) -> None: ...

    def failed(self, failure: StepFailure, step: str, node: str) -> None: ...


class HttpSink:
    """A client over HTTP."""

    def __init__(self, client: GatewayConnection, http: HttpRequest, request_id: str) -> None:
        self._client = client
        self._id_line = b"x-request-id: %b\r\n" % request_id.encode("latin-1", "replace")
        self._stream: ResponseStream | None = None
        accepted = http.headers.get(b"accept", b"")
        self.form: Form = ACCEPTED.get(accepted) or (EVENTS if b"text/event-stream" in accepted else JSON)
        self._wants_traceback = http.headers.get(b"x-pointsman-traceback", b"0") not in (b"0", b"false")

    def wait_for(self, handler: RequestHandler) -> None:
        self._client.serving = handler

    def answer(self, content_type: bytes, body: bytes) -> None:
        self._client.answer(200, body, content_type, self._id_line)

    def began(self, head: ResponseHead) -> None:
        self._stream = ResponseStream(self._client, head.lines + self._id_line)

    def piece(self, payload: bytes) -> None:
        assert self._stream is not None
        self._stream.write(payload)

    def ended(self) -> None:
        assert self._stream is not None
        self._stream.end()

    def failed(self, failure: StepFailure, step: str, node: str) -> None:
        stream = self._stream
        if stream is not None:
            if self.form != EVENTS or not stream.is_chunked:
                self._client.abort()  # only the end of the connection can tell
                return
            words = f"the answer was cut off: {failure.of_node(node)}"
            stream.end(event(error_body(words, "server_error", failure.code, **self._details(failure, step, node))))
        elif failure.body:
            self._client.answer(failure.status, failure.body, lines=self._id_line)
        else:
            retry = b"" if failure.retry_after_s is None else b"retry-after: %d\r\n" % failure.retry_after_s
            details = self._details(failure, step, node)
            body = error_body(failure.of_node(node), error_kind(failure.status), failure.code, **details)
            self._client.answer(failure.status, body, lines=self._id_line + retry)

    def _details(self, failure: StepFailure, step: str, node: str) -> dict[str, Any]:
        details = {"node": node, "step": step} if node else {}
        return details | ({"traceback": failure.traceback} if self._wants_traceback and failure.traceback else {})

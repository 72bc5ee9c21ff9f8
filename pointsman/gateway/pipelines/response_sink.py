"""Whoever waits for the answer of an application: a client over HTTP, as it wants it."""

from typing import TYPE_CHECKING, Any, Protocol

from pointsman.gateway.client import ClientConnection, Service
from pointsman.gateway.pipelines.step_call import StepFailure
from pointsman.http.answers import AnswerHead
from pointsman.http.heads import KEEP_ALIVE, LAST_CHUNK, error_body, error_kind
from pointsman.http.requests import HttpRequest
from pointsman.wire import Form

if TYPE_CHECKING:
    from pointsman.gateway.gateway import Gateway


JSON: Form = "json"
EVENTS: Form = "events"
"""Forms for people and their programs; events: server-sent, if the answer comes in pieces."""
WHOLE: Form = "whole"
"""JSON that never comes in pieces: it is part of a larger answer."""
BLOB: Form = "blob"
VALUE: Form = "value"
PIECES: Form = "pieces"
"""Forms for programs of ours: a value as it is; VALUE: without shared memory; PIECES: a value per piece."""
IN_PIECES = frozenset({JSON, EVENTS, PIECES})
"""Forms in which what a generator yields is passed on as it comes."""
BLOB_TYPE = b"application/x-pointsman-blob"


class ResponseSink(Protocol):
    """Gets exactly one of: an answer; a beginning, pieces and an end; a failure, before or after a beginning."""

    form: Form

    def wait_for(self, travelling: Service) -> None:
        """This is the request; from now on it can be told that nobody waits."""

    def answer(self, content_type: bytes, body: bytes) -> None: ...

    def began(self, head: AnswerHead) -> None: ...

    def piece(self, payload: bytes) -> None: ...

    def ended(self) -> None: ...

    def failed(self, failure: StepFailure, step: str, node: str) -> None: ...


class HttpSink:
    """A client over HTTP."""

    def __init__(self, gateway: "Gateway", client: ClientConnection, http: HttpRequest, request_id: str) -> None:
        self._gateway = gateway
        self._client = client
        self._http = http
        self._id_line = b"x-request-id: %b\r\n" % request_id.encode("latin-1", "replace")
        self._chunked = False
        self._begun = False
        accepted = http.headers.get(b"accept", b"")
        self.form: Form = BLOB_FORMS.get(accepted) or (EVENTS if b"text/event-stream" in accepted else JSON)
        self.wants_traceback = http.headers.get(b"x-pointsman-traceback", b"0") not in (b"0", b"false")

    def wait_for(self, travelling: Service) -> None:
        """From now on the client's comings and goings are told to it."""
        self._client.serving = travelling

    def answer(self, content_type: bytes, body: bytes) -> None:
        self._client.answer(200, body, content_type, self._id_line)

    def began(self, head: AnswerHead) -> None:
        self._begun = True
        self._chunked = not self._http.is_http_1_0
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        if not self._stays:
            framing += b"connection: close\r\n"
        elif self._http.is_http_1_0:
            framing += KEEP_ALIVE
        self._client.write(b"HTTP/1.1 200 OK\r\n%b%b%b\r\n" % (head.lines, self._id_line, framing))

    def piece(self, payload: bytes) -> None:
        self._client.write(b"%x\r\n%b\r\n" % (len(payload), payload) if self._chunked else payload)

    def ended(self) -> None:
        if self._chunked:
            self._client.write(LAST_CHUNK)
        self._client.answered(close=not self._stays)

    def failed(self, failure: StepFailure, step: str, node: str) -> None:
        if self._begun:
            self._break_off(failure, step, node)
            return
        if failure.body:
            self._client.answer(failure.status, failure.body, headers=self._id_line)
            return
        lines = self._id_line
        if failure.retry_after_s is not None:
            lines += b"retry-after: %d\r\n" % failure.retry_after_s
        body = error_body(
            _in_words(failure, node), error_kind(failure.status), failure.code, **self._where(failure, step, node)
        )
        self._client.answer(failure.status, body, headers=lines)

    def _break_off(self, failure: StepFailure, step: str, node: str) -> None:
        """Part of the answer is out: whoever reads events is told, others by the connection."""
        if self.form != EVENTS or not self._chunked:
            self._client.serving = None
            self._client.transport.abort()
            return
        words = f"the answer was cut off: {_in_words(failure, node)}"
        body = error_body(words, "server_error", failure.code, **self._where(failure, step, node))
        self.piece(b"data: %b\n\n" % body)
        self.ended()

    def _where(self, failure: StepFailure, step: str, node: str) -> dict[str, Any]:
        told = {"node": node, "step": step} if node else {}
        return told | ({"traceback": failure.traceback} if self.wants_traceback and failure.traceback else {})

    @property
    def _stays(self) -> bool:
        return self._http.keep_alive and not self._gateway.draining and (self._chunked or not self._http.is_http_1_0)


def _in_words(failure: StepFailure, node: str) -> str:
    return f'node "{node}": {failure.why}' if node else failure.why


BLOB_FORMS: dict[bytes, Form] = {BLOB_TYPE: VALUE, b"%b; pieces" % BLOB_TYPE: PIECES}
"""What programs of ours accept."""

"""The values of a pipeline request: the parts of its input, the results of its steps, and the answer made from them.

Values are blobs. They are not decoded here, except if several must be joined into one JSON answer.
"""

from asyncio import AbstractEventLoop
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pointsman.errors import shown
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.openai import BadRequest, error_kind
from pointsman.gateway.pipelines.prepared import PreparedApplication, PreparedStep
from pointsman.gateway.pipelines.step_call import StepFailure
from pointsman.http.heads import HttpRequest
from pointsman.http.responses import ResponseHead, event
from pointsman.http.server import RequestHandler, ResponseStream
from pointsman.pipeline import Flow
from pointsman.pipeline.flow import InputValue, StepResult, input_value, part_of
from pointsman.pipeline.graph import filled
from pointsman.runtimes.interface import BackgroundTasks, SharedMemory
from pointsman.wire import (
    ARGUMENTS,
    Form,
    UnreadableBlob,
    Unsendable,
    check_counts,
    composed,
    decode_plain,
    encode_plain,
    failed_piece,
    files_of,
    placeholder,
)
from pointsman.wire import BLOB as BLOB_NAME

if TYPE_CHECKING:
    from pointsman.gateway.pipelines.request import PipelineRequest


JSON: Form = "json"
EVENTS: Form = "events"
"""Forms for clients. EVENTS stands for server-sent events if the answer comes in pieces."""
WHOLE: Form = "whole"
"""JSON that never comes in pieces, because it is part of a larger answer."""
BLOB: Form = "blob"
VALUE: Form = "value"
PIECES: Form = "pieces"
"""Forms for handles. BLOB is a value as it is, VALUE is a value without shared memory, and PIECES has a value per
piece."""
IN_PIECES = frozenset({JSON, EVENTS, PIECES})
"""Forms in which the values of a generator are passed on one by one."""
ACCEPTED: dict[bytes, Form] = {BLOB_NAME.encode(): VALUE, f"{BLOB_NAME}; pieces".encode(): PIECES}
"""The form for each content type that a handle accepts."""


class ResponseSink(Protocol):
    """Receives exactly one of these: a whole answer; a beginning, pieces and an end; or a failure, before or after a
    beginning."""

    form: Form

    def wait_for(self, handler: RequestHandler) -> None:
        """Set the handler that makes the answer. The sink notifies the handler if the client disconnects or reads
        slowly."""

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
        if self._stream is not None:
            self._failed_after_pieces(self._stream, failure, step, node)
        elif failure.body:
            self._client.answer(failure.status, failure.body, lines=self._id_line)
        else:
            retry = b"" if failure.retry_after_s is None else b"retry-after: %d\r\n" % failure.retry_after_s
            body = self._error(str(failure.of_node(node)), failure, step, node)
            self._client.answer(failure.status, body, lines=self._id_line + retry)

    def _failed_after_pieces(self, stream: ResponseStream, failure: StepFailure, step: str, node: str) -> None:
        words = str(failure.of_node(node))
        if not failure.is_between_pieces:
            words = f"the answer was cut off: {words}"
        body = self._error(words, failure, step, node)
        if self.form == EVENTS and stream.is_chunked:
            stream.end(event(body))
        elif self.form == PIECES and failure.is_between_pieces:
            stream.end(failed_piece(failure.status, body))
        else:
            self._client.abort()  # only a broken connection can show the failure

    def _error(self, words: str, failure: StepFailure, step: str, node: str) -> bytes:
        details: dict[str, Any] = {"message": words, "type": error_kind(failure.status), "param": None}
        details |= {"code": failure.code} | self._details(failure, step, node)
        return msgspec.json.encode({"error": details})

    def _details(self, failure: StepFailure, step: str, node: str) -> dict[str, Any]:
        details: dict[str, Any] = {"node": node, "step": step} if node else {}
        if self.form in (BLOB, VALUE, PIECES):  # for a handle, which raises the exception in the caller
            return details | dict(failure.raised)
        return details | ({"traceback": failure.traceback} if self._wants_traceback and failure.traceback else {})


ARGUMENTS_TYPE = ARGUMENTS.encode()


def inputs_of(application: PreparedApplication, http: HttpRequest) -> list[bytes]:
    """The used parts of the input, each as a blob. Raises `BadRequest` or `BadInput`."""
    value = arguments_of(http.body) if has_arguments(http) else _json(http.body)
    try:
        return [encode_plain(part_of(value, part.path)) for part in application.flow.inputs]
    except Unsendable as error:  # integers in JSON can have any size
        raise BadRequest(f"the input cannot be sent to a node: {shown(str(error))}") from None


def _json(body: bytes | memoryview) -> Any:
    try:
        return msgspec.json.decode(body) if body else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {shown(str(error))}") from None


def has_arguments(http: HttpRequest) -> bool:
    """Whether the body contains the arguments of a call through a handle."""
    return http.headers.get(b"content-type") == ARGUMENTS_TYPE


def arguments_of(body: bytes | memoryview) -> Any:
    try:
        check_counts(body)
        arguments = decode_plain(body)
    except UnreadableBlob as error:
        raise BadRequest(f"the arguments cannot be read: {error}") from None
    match arguments:
        case {"args": list(args), "kwargs": dict(kwargs)} if all(type(name) is str for name in kwargs):
            return input_value(args, kwargs)
    raise BadRequest("the arguments cannot be read: expected a list as args, and a mapping with names as kwargs")


JSON_TYPE = b"application/json"
BLOB_TYPE = BLOB_NAME.encode()


class Results:
    """The values of one request, and the form of its answer."""

    def __init__(self, flow: Flow, form: Form) -> None:
        self._flow = flow
        self._form = form
        self.inputs: list[bytes] = []
        self._results: list[bytes | None] = [None] * len(flow.steps)

    def __setitem__(self, index: int, blob: bytes) -> None:
        self._results[index] = blob

    def form_of(self, index: int) -> Form:
        """The form of a step's result. If the result is the answer, this is the form of the answer."""
        if index == self._flow.streams:
            return self._form
        feeds = self._flow.steps[index].feeds
        return WHOLE if not feeds and self._form in (JSON, EVENTS, WHOLE) else BLOB

    def blobs_for(self, step: PreparedStep) -> list[bytes]:
        """The arguments of a step that is ready."""
        return [self._blob(source) for source in step.sources]

    def _blob(self, part: InputValue | StepResult) -> bytes:
        blob = self._results[part.index] if isinstance(part, StepResult) else self.inputs[part.index]
        assert blob is not None, "a step begins when all that it needs is known"
        return blob

    # Shared memory

    def files(self) -> Iterator[str]:
        """Files in shared memory that can be removed when the request has ended."""
        for blob in self.inputs:
            yield from _file_of(blob)
        for index, result in enumerate(self._results):
            if result is not None and index != self._flow.streams and self.form_of(index) == BLOB:
                yield from _file_of(result)

    def answer_files(self) -> Iterator[str]:
        """Files that the receiver of the answer still has to read."""
        index = self._flow.streams
        if index is not None and self._form == BLOB and (result := self._results[index]) is not None:
            yield from _file_of(result)

    # The answer

    def answer(self, head: ResponseHead | None) -> tuple[bytes, bytes]:
        """Content type and body of the answer. `head` is the head of the last step's response, if there is one. Raises
        `UnreadableBlob`."""
        flow, is_value = self._flow, self._form in (BLOB, VALUE)
        if flow.streams is not None:
            kind = BLOB_TYPE if is_value else JSON_TYPE if head is None else head.content_type or JSON_TYPE
            return kind, self._blob(StepResult(flow.streams))
        if is_value:
            parts: dict[Any, int] = {}

            def number(part: Any) -> Any:
                if isinstance(part, InputValue):
                    return placeholder(parts.setdefault(part, len(parts)))
                return placeholder(parts.setdefault(StepResult(part.index), len(parts)), part.path)

            output = filled(flow.output, number)
            return BLOB_TYPE, composed(output, [self._blob(part) for part in parts])
        return JSON_TYPE, msgspec.json.encode(filled(flow.output, self._as_json))

    def _as_json(self, part: Any) -> Any:
        """One part, as JSON, of an answer that consists of several results."""
        is_json = isinstance(part, StepResult) and self.form_of(part.index) == WHOLE
        if isinstance(part, StepResult) and part.path:
            blob = self._blob(part)
            return part.of(msgspec.json.decode(blob) if is_json else decode_plain(blob))
        return msgspec.Raw(self._blob(part)) if is_json else decode_plain(self._blob(part))


def _file_of(blob: bytes) -> Iterator[str]:
    file = files_of(blob)
    if file is not None:
        yield file


MAX_AGE_S = 900.0
"""Maximum age of files, in seconds. The request of an older file has ended, and no gateway has learned of the file, so
the file is removed."""
SWEEP_S = 60.0
READ_S = 30.0
"""How long an answer is kept for its caller, in seconds, if the caller's request is unknown."""


class SharedFiles:
    """Removes files in shared memory when their requests no longer need them, so that senders can reuse the memory."""

    def __init__(self, loop: AbstractEventLoop, tasks: BackgroundTasks) -> None:
        self._loop = loop
        self._tasks = tasks
        self._memory: SharedMemory | None = None
        self._borrowed: dict[PipelineRequest, list[str]] = {}
        """The files with answers to calls through handles. They are kept until the request that made the calls ends."""

    def use(self, memory: SharedMemory) -> None:
        if self._memory is None:
            self._tasks.every("shared memory sweep", SWEEP_S, self._sweep)
        self._memory = memory

    def ended(self, request: "PipelineRequest") -> None:
        """Remove the files of a request, but keep its answer until its caller has read it."""
        self._remove(request.results.files())
        self._remove(self._borrowed.pop(request, ()))
        answer = list(request.results.answer_files())
        if request.caller is not None and not request.caller.over:
            self._borrowed.setdefault(request.caller, []).extend(answer)
        elif answer:
            self._loop.call_later(READ_S, self._remove, answer)

    def _remove(self, files: Iterable[str]) -> None:
        if self._memory is not None:
            self._memory.remove(files)

    def _sweep(self) -> None:
        if self._memory is not None:
            self._memory.remove_older_than(MAX_AGE_S)

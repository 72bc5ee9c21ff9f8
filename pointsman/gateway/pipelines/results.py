"""The values of a pipeline request: the parts of its input, the results of its steps, and the answer made of them.

Values are blobs that are not decoded here, except parts of an answer that must be joined as JSON.
"""

from asyncio import AbstractEventLoop
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from pointsman.gateway.openai import BadRequest
from pointsman.gateway.pipelines.prepared import PreparedApplication, PreparedStep
from pointsman.gateway.pipelines.response_sink import BLOB, EVENTS, JSON, VALUE, WHOLE
from pointsman.http.parser import HttpRequest
from pointsman.http.responses import ResponseHead
from pointsman.pipeline import Flow
from pointsman.pipeline.flow import InputValue, StepResult, input_value, part_of
from pointsman.pipeline.graph import filled
from pointsman.runtimes.interface import SharedMemory
from pointsman.wire import BLOB as BLOB_NAME
from pointsman.wire import Form, UnreadableBlob, Unsendable, composed, decode_plain, encode_plain, files_of, placeholder

if TYPE_CHECKING:
    from pointsman.gateway.pipelines.request import PipelineRequest

ARGUMENTS = b"application/x-pointsman-arguments"
"""The content type of the arguments of a handle's call: a plain blob of args and kwargs."""


def inputs_of(application: PreparedApplication, http: HttpRequest) -> list[bytes]:
    """The parts of the input that are used, each as a blob. Raises `BadRequest` or `BadInput`."""
    value = _arguments(http.body) if http.headers.get(b"content-type") == ARGUMENTS else _json(http.body)
    try:
        return [encode_plain(part_of(value, part.path)) for part in application.flow.inputs]
    except Unsendable as error:  # JSON has integers of any size
        raise BadRequest(f"the input cannot be sent to a node: {error}") from None


def _json(body: bytes | memoryview) -> Any:
    try:
        return msgspec.json.decode(body) if body else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def _arguments(body: bytes | memoryview) -> Any:
    try:
        arguments = decode_plain(body)
        return input_value(arguments["args"], arguments["kwargs"])
    except (UnreadableBlob, LookupError, TypeError) as error:
        raise BadRequest(f"the arguments cannot be read: {error}") from None


JSON_TYPE = b"application/json"
BLOB_TYPE = BLOB_NAME.encode()


class Results:
    """The values of one request, whose answer is wanted in this form."""

    def __init__(self, flow: Flow, form: Form) -> None:
        self._flow = flow
        self._form = form
        self.inputs: list[bytes] = []
        self._results: list[bytes | None] = [None] * len(flow.steps)

    def __setitem__(self, index: int, blob: bytes) -> None:
        self._results[index] = blob

    def form_of(self, index: int) -> Form:
        """The form of a step's result: that of the answer, if its result is the answer."""
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
        """Files that the receiver of the answer has yet to read."""
        index = self._flow.streams
        if index is not None and self._form == BLOB and (result := self._results[index]) is not None:
            yield from _file_of(result)

    # The answer

    def answer(self, head: ResponseHead | None) -> tuple[bytes, bytes]:
        """Content type and body; `head`: of the response of the last step, if any. Raises `UnreadableBlob`."""
        flow, is_value = self._flow, self._form in (BLOB, VALUE)
        if flow.streams is not None:
            kind = BLOB_TYPE if is_value else JSON_TYPE if head is None else head.content_type or JSON_TYPE
            return kind, self._blob(StepResult(flow.streams))
        if is_value:
            parts: dict[Any, int] = {}
            output = filled(flow.output, lambda part: placeholder(parts.setdefault(part, len(parts))))
            return BLOB_TYPE, composed(output, [self._blob(part) for part in parts])
        return JSON_TYPE, msgspec.json.encode(filled(flow.output, self._as_json))

    def _as_json(self, part: Any) -> Any:
        """Part of an answer that is made of several results."""
        is_json = isinstance(part, StepResult) and self.form_of(part.index) == WHOLE
        return msgspec.Raw(self._blob(part)) if is_json else decode_plain(self._blob(part))


def _file_of(blob: bytes) -> Iterator[str]:
    file = files_of(blob)
    if file is not None:
        yield file


MAX_AGE_S = 900.0
"""Older files are removed: their request has ended, and the gateway never saw the file."""
SWEEP_S = 60.0
READ_S = 30.0
"""How long an answer is kept for a caller whose request is unknown."""


class SharedFiles:
    """Removes files in shared memory when their requests need them no more, so that senders reuse them."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._memory: SharedMemory | None = None
        self._borrowed: dict[PipelineRequest, list[str]] = {}
        """Answers of calls through handles, until the request that made the calls ends."""

    def use(self, memory: SharedMemory) -> None:
        """Remove files from here."""
        if self._memory is None:
            self._loop.call_later(SWEEP_S, self._sweep)
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
        self._loop.call_later(SWEEP_S, self._sweep)
        if self._memory is not None:
            self._memory.remove_older_than(MAX_AGE_S)

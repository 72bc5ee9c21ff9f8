"""What a request has so far: the parts of its input and the results of its steps, and the answer made of them.

Everything is a blob that nobody here looks into, but for the parts of an answer that must be put together as JSON.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from pointsman.gateway.openai import BadRequest
from pointsman.gateway.pipelines.prepared import PreparedApplication, PreparedStep
from pointsman.gateway.pipelines.response_sink import BLOB, BLOB_TYPE, EVENTS, JSON, VALUE, WHOLE
from pointsman.http.answers import AnswerHead
from pointsman.http.requests import HttpRequest
from pointsman.pipeline import Flow
from pointsman.pipeline.flow import InputValue, StepResult
from pointsman.pipeline.graph import filled
from pointsman.pipeline.inputs import input_value, part_of
from pointsman.wire import Form, UnreadableBlob, Unsendable, composed, decode_plain, encode_plain, files_of, placeholder

# The input of an application, where no code of the user makes it: JSON of a client, or the arguments of a handle.


ARGUMENTS = b"application/x-pointsman-arguments"
"""The type of a body that has the arguments of a handle's call: a plain blob of args and kwargs."""


def inputs_of(application: PreparedApplication, http: HttpRequest) -> list[bytes]:
    """The parts of the input that are used, each as a blob. Raises `BadRequest` or `BadInput`."""
    value = _arguments(http.body) if http.headers.get(b"content-type") == ARGUMENTS else _json(http.body)
    try:
        return [encode_plain(part_of(value, part.path)) for part in application.flow.inputs]
    except Unsendable as error:  # JSON has integers of any size
        raise BadRequest(f"the input cannot be passed on: {error}") from None


def _json(body: bytes | memoryview) -> Any:
    try:
        return msgspec.json.decode(body) if body else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def _arguments(body: bytes | memoryview) -> Any:
    try:
        told = decode_plain(body)
        return input_value(told["args"], told["kwargs"])
    except (UnreadableBlob, LookupError, TypeError) as error:
        raise BadRequest(f"the arguments cannot be read: {error}") from None


JSON_TYPE = b"application/json"


class Results:
    """Of one request, for an audience that wants the answer in this form."""

    def __init__(self, flow: Flow, form: Form) -> None:
        self._flow = flow
        self._form = form
        self.inputs: list[bytes] = []
        self._results: list[bytes | None] = [None] * len(flow.steps)

    def __setitem__(self, place: int, blob: bytes) -> None:
        self._results[place] = blob

    def form_of(self, place: int) -> Form:
        """How a step is to answer: as the audience wants it, if its result is the answer."""
        if place == self._flow.streams:
            return self._form
        feeds = self._flow.steps[place].feeds
        return WHOLE if not feeds and self._form in (JSON, EVENTS, WHOLE) else BLOB

    def blobs_for(self, step: PreparedStep) -> list[bytes]:
        """What a step that is ready is called with."""
        return [self._blob(source) for source in step.sources]

    def _blob(self, part: InputValue | StepResult) -> bytes:
        blob = self._results[part.place] if isinstance(part, StepResult) else self.inputs[part.place]
        assert blob is not None, "a step begins when all that it needs is there"
        return blob

    # Shared memory

    def files(self) -> Iterator[str]:
        """Files in shared memory that are of no use when the request has ended."""
        for blob in self.inputs:
            yield from _file_of(blob)
        for place, result in enumerate(self._results):
            if result is not None and place != self._flow.streams and self.form_of(place) == BLOB:
                yield from _file_of(result)

    def answer_files(self) -> Iterator[str]:
        """Files that whoever gets the answer has yet to read."""
        place = self._flow.streams
        if place is not None and self._form == BLOB and (result := self._results[place]) is not None:
            yield from _file_of(result)

    # The answer

    def answer(self, head: AnswerHead | None) -> tuple[bytes, bytes]:
        """Content type and body; `head`: of the last step, if it said what it answers with. Raises `UnreadableBlob`."""
        flow, is_value = self._flow, self._form in (BLOB, VALUE)
        if flow.streams is not None:
            kind = BLOB_TYPE if is_value else JSON_TYPE if head is None else _content_type(head)
            return kind, self._blob(StepResult(flow.streams))
        if is_value:
            parts: dict[Any, int] = {}
            output = filled(flow.output, lambda part: placeholder(parts.setdefault(part, len(parts))))
            return BLOB_TYPE, composed(output, [self._blob(part) for part in parts])
        return JSON_TYPE, msgspec.json.encode(filled(flow.output, self._as_json))

    def _as_json(self, part: Any) -> Any:
        """Part of an answer that is made of several results."""
        is_json = isinstance(part, StepResult) and self.form_of(part.place) == WHOLE
        return msgspec.Raw(self._blob(part)) if is_json else decode_plain(self._blob(part))


def _file_of(blob: bytes) -> Iterator[str]:
    file = files_of(blob)
    if file is not None:
        yield file


def _content_type(head: AnswerHead) -> bytes:
    """As the replica said it."""
    for line in head.lines.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-type":
            return value.strip()
    return JSON_TYPE


# Files in shared memory that belong to requests: removed once nobody needs them, so that senders use them again.

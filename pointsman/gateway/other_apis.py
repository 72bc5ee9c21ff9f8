"""Requests to instances outside the OpenAI API: Anthropic's API, and paths that only some engines have.

Enters: a request, and the instance that was chosen for it. Leaves: the request in the form that the instance needs, and
the answer in the form that the client needs. The one rule: routing treats such a request like any other.
"""

import re
from collections.abc import Callable

import msgspec
from msgspec import Raw

from pointsman.gateway.messages import (
    CHAT,
    COUNT_TOKENS,
    MessageStream,
    as_error,
    chat_request,
    counted,
    error_event,
    message_of,
)
from pointsman.gateway.openai import (
    BadRequest,
    Body,
    Usage,
    error_body,
    read_body,
    usage_of,
    usage_of_stream,
    with_model,
)
from pointsman.gateway.upstream import InFlight
from pointsman.http.heads import Bytes, HttpRequest
from pointsman.http.responses import EventStream, data_in, event
from pointsman.types import MAX_NAME, ExecutionInstance

LACKING = frozenset({404, 405, 501})
"""Statuses with which an engine may answer if it lacks a path."""
MAX_FORM_FIELDS = 1000
"""Maximum number of fields in a form, because fields are searched one by one."""


class OtherApi:
    """A request to a path outside the OpenAI API. Its body may be a form, and the answer may have any content type."""

    serves_json = False
    """Whether the answer must be JSON."""
    ends_with_done = False
    """Whether streams end with the end mark of the OpenAI API."""

    def __init__(self, http: HttpRequest) -> None:
        """Raises `BadRequest`."""
        self.path = http.path
        self._boundary = boundary_of(http.headers.get(b"content-type", b""))
        self.body = read_body(http.body) if self._boundary is None else read_form(http.body, self._boundary)
        if not self.body.as_prompt():
            self.body.prompt = Raw(http.body) if self._boundary is None else Raw()

    def outgoing(self, http: HttpRequest, one: InFlight, instance: ExecutionInstance) -> tuple[bytes, Bytes]:
        """Target and body for this instance."""
        served = instance.engine_names.get(one.request.model_name)
        if served is None:
            return http.target, http.body
        if self._boundary is None:
            return http.target, with_model(http.body, served)
        return http.target, form_with_model(http.body, self._boundary, served)

    def answer(self, body: bytes) -> bytes:
        """A successful answer, in the form that the client needs. Raises `msgspec.DecodeError`."""
        return body

    def refused(self, one: InFlight, status: int) -> bool:
        """Whether to send the request to the same instance again, in another form."""
        return False

    def served(self, one: InFlight) -> None:
        """Note that an instance serves the request."""

    def error(self, status: int, body: bytes) -> bytes:
        """An engine's error, in the form that the client needs."""
        return body

    def events(self, events: bytes) -> bytes:
        return events

    def end(self, rest: bytes) -> bytes:
        """The end of a stream. `rest` contains the stream's last bytes."""
        return rest

    def broken(self, why: str) -> bytes:
        """The last event of an interrupted stream."""
        return event(error_body(why, "server_error", "stream_interrupted"))

    def usage(self, stream: EventStream, beginning: bytes) -> Usage | None:
        return usage_of_stream(stream)


_BOUNDARY = re.compile(rb'multipart/form-data\b.*?;\s*boundary=(?:"([^"]+)"|([^\s;]+))', re.IGNORECASE | re.DOTALL)
_FIELD = re.compile(rb'^content-disposition:[^\r\n]*?[;\s]name="?([^";\r\n]*)"?', re.IGNORECASE | re.MULTILINE)


def boundary_of(content_type: bytes) -> bytes | None:
    """The boundary between the fields of a form; None if the body is not a form."""
    found = _BOUNDARY.match(content_type.strip())
    return None if found is None else b"--" + (found[1] or found[2])


def _form_field(body: bytes, boundary: bytes, name: bytes) -> tuple[int, int] | None:
    """The position of a field's value; None if the form has no such field. Raises `BadRequest`."""
    at, count = body.find(boundary), 0
    while at >= 0:
        count += 1
        if count > MAX_FORM_FIELDS:
            raise BadRequest(f"the form has more than {MAX_FORM_FIELDS} fields")
        head_end = body.find(b"\r\n\r\n", at)
        end = body.find(b"\r\n" + boundary, head_end)
        if head_end < 0 or end < 0:
            return None
        field = _FIELD.search(body, at, head_end)
        if field is not None and field[1] == name and b"filename" not in body[at:head_end]:
            return head_end + 4, end
        at = end + 2
    return None


def read_form(body: Bytes, boundary: bytes) -> Body:
    """The fields of a form that routing needs. Raises `BadRequest`."""
    text = bytes(body)
    if not text.rstrip().endswith(boundary + b"--"):
        raise BadRequest("the body is not a form: its last boundary is missing")

    def value(name: bytes) -> str:
        at = _form_field(text, boundary, name)
        return "" if at is None else text[slice(*at)].decode("utf-8", "replace").strip()

    model = value(b"model")
    if len(model) > MAX_NAME:
        raise BadRequest(f"model: expected at most {MAX_NAME} characters, found {len(model)}")
    return Body(model=model, stream=value(b"stream") == "true", prompt=Raw(msgspec.json.encode(value(b"prompt"))))


def form_with_model(body: Bytes, boundary: bytes, model: str) -> bytes:
    """A valid form with another model."""
    text = bytes(body)
    at = _form_field(text, boundary, b"model")
    if at is None:
        field = b'%b\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n' % (boundary, model.encode())
        return field + text
    return b"".join((text[: at[0]], model.encode(), text[at[1] :]))


class MessagesApi(OtherApi):
    """A request to Anthropic's API. Engines that serve this API get it unchanged; for all others it is translated."""

    serves_json = True

    def __init__(self, http: HttpRequest, *, translates: Callable[[str], bool]) -> None:
        """`translates` returns whether some engine of a model needs a translation. Raises `BadRequest`."""
        super().__init__(http)
        self._counts = http.path == COUNT_TOKENS
        self._chat = chat_request(http.body, counts=self._counts) if translates(self.body.model) else None
        self._model = self.body.model
        self._stream: MessageStream | None = None
        self._is_translated = self._fell_back = False

    @property
    def ends_with_done(self) -> bool:  # type: ignore[override]
        return self._is_translated

    def outgoing(self, http: HttpRequest, one: InFlight, instance: ExecutionInstance) -> tuple[bytes, Bytes]:
        has_it = instance.serves_messages and (instance.instance_id, self.path) not in one.upstream.lacks
        self._is_translated = (self._fell_back or not has_it) and self._translatable(http)
        self._stream = MessageStream(self._model) if self._is_translated and self.body.stream else None
        if not self._is_translated:
            return super().outgoing(http, one, instance)
        assert self._chat is not None
        served = instance.engine_names.get(one.request.model_name)
        return CHAT, self._chat if served is None else with_model(self._chat, served)

    def _translatable(self, http: HttpRequest) -> bool:
        if self._chat is None:
            try:
                self._chat = chat_request(http.body, counts=self._counts)
            except BadRequest:  # an engine that has this API reports the error itself
                return False
        return True

    def refused(self, one: InFlight, status: int) -> bool:
        if self._is_translated or self._fell_back or status not in LACKING:
            return False
        self._fell_back = True
        return True

    def served(self, one: InFlight) -> None:
        """Note that an instance has served the request. An instance that served only the translation lacks this API."""
        if self._fell_back and self._is_translated:
            one.upstream.lacks.add((one.instance_id, self.path))

    def answer(self, body: bytes) -> bytes:
        if not self._is_translated:
            return body
        return counted(body) if self._counts else message_of(body, self._model)

    def error(self, status: int, body: bytes) -> bytes:
        return as_error(status, body)

    def events(self, events: bytes) -> bytes:
        return events if self._stream is None else self._stream.feed(events)

    def end(self, rest: bytes) -> bytes:
        return rest if self._stream is None else self._stream.feed(rest) + self._stream.end()

    def broken(self, why: str) -> bytes:
        return error_event(500, why)

    def usage(self, stream: EventStream, beginning: bytes) -> Usage | None:
        """The usage in a stream. Engines report the input at the beginning, and the output at the end."""
        last = super().usage(stream, beginning)
        if self._is_translated or last is None or last.input is not None:
            return last
        for data in data_in(beginning):
            first = usage_of(data)
            if first is not None:
                return Usage(first.input, last.output, first.cached)
        return last

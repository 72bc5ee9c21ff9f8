"""The OpenAI API: the fields of requests that routing needs, the usage that responses report, and errors.

Each body is parsed once, and only the values that are read are built.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from pointsman.errors import in_words, shown
from pointsman.http.buffers import LARGE_BYTES
from pointsman.http.heads import COPIED_BYTES, Bytes
from pointsman.http.responses import EventStream, data_in
from pointsman.routing.queue.items import FAIRNESS_ALIAS, FAIRNESS_HEADER
from pointsman.types import MAX_NAME, RequestMetadata, RequestPriority


class ClientHeaders(Mapping[str, str]):
    """The headers of a request as text, decoded when they are read."""

    __slots__ = ("_raw",)

    def __init__(self, raw: dict[bytes, bytes]) -> None:
        self._raw = raw

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        value = self._raw.get(name.encode("latin-1", "replace"))
        return default if value is None else value.decode("latin-1")

    def __getitem__(self, name: str) -> str:
        return self._raw[name.encode("latin-1", "replace")].decode("latin-1")

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __repr__(self) -> str:
        return repr(dict(self))


STREAMS_END_WITH_DONE = frozenset({b"/v1/chat/completions", b"/v1/completions"})
"""Paths whose streams end with `data: [DONE]`."""

WRITES = STREAMS_END_WITH_DONE | {b"/v1/responses", b"/v1/messages"}
"""Paths whose answers contain tokens that a model has generated."""

MAX_SMALL_BYTES = 16 * 1024
"""In a large body, the maximum size in bytes of a field that is not part of the prompt."""
MAX_PRIORITY = 1_000_000
"""Maximum priority; the minimum is -MAX_PRIORITY."""

PRIORITIES: Mapping[str, int] = {priority.name.lower(): priority for priority in RequestPriority}


class BadRequest(Exception):
    """A request that its sender must correct."""


Name = Annotated[str, Meta(max_length=MAX_NAME)]


class Extension(msgspec.Struct, forbid_unknown_fields=True):
    """The object `pointsman` in a body: settings for which the OpenAI API has no field. Headers take precedence."""

    priority: int | Name | None = None
    deadline_ms: float | None = None
    tenant: Name = ""
    session: Name = ""
    cost_budget: float | None = None
    timeout_s: float | None = None


class Body(msgspec.Struct):
    """Those fields of a body that the gateway reads."""

    model: Name = ""
    stream: bool | None = False
    stream_options: Raw = Raw()
    messages: Raw = Raw()
    prompt: Raw = Raw()
    input: Raw = Raw()
    instructions: Raw = Raw()
    system: Raw = Raw()
    tools: Raw = Raw()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: Raw = Raw()
    best_of: Raw = Raw()
    cache_salt: Name | None = None
    pointsman: Extension | None = None

    def as_prompt(self) -> bytes | memoryview | tuple[bytes, ...]:
        """The prompt as the client sent it, because the next turn of a conversation begins with the same bytes.

        If a completion has several prompts, they stay separate, because engines cache each prompt on its own.
        """
        if not len(self.messages) and memoryview(self.prompt)[:1].tobytes() == b"[":
            several = _prompt_list(self.prompt)
            if 0 < len(several) <= MAX_APART:
                return tuple(map(bytes, several))
        prompt = memoryview(self.messages) or memoryview(self.prompt) or memoryview(self.input)
        prefix = bytes(self.tools) + bytes(self.instructions) + bytes(self.system)
        if prefix:
            return prefix + prompt
        return prompt if len(prompt) > COPIED_BYTES else bytes(prompt)


_decode = msgspec.json.Decoder(Body).decode
_decode_parts = msgspec.json.Decoder(dict[str, Raw]).decode


_RAW_FIELDS = [field.name for field in msgspec.structs.fields(Body) if field.type is Raw]
_decode_large = msgspec.json.Decoder(
    msgspec.defstruct("LargeBody", [(name, Raw, Raw()) for name in Body.__struct_fields__])
).decode


def _read_large(body: Bytes) -> Body:
    """Read a large body. Even a hostile body takes little time, because field names that are megabytes long are not
    decoded."""
    found = _decode_large(body)
    small = [name for name in Body.__struct_fields__ if name not in _RAW_FIELDS and len(getattr(found, name))]
    for name in small:
        if len(getattr(found, name)) > MAX_SMALL_BYTES:
            raise BadRequest(f"the field {name} is too long; names have at most {MAX_NAME} characters")
    read = _decode(msgspec.json.encode({name: getattr(found, name) for name in small}))
    for name in _RAW_FIELDS:
        setattr(read, name, getattr(found, name))
    return read


def read_body(body: Bytes) -> Body:
    """Raises `BadRequest`."""
    try:
        return _decode(body) if len(body) < LARGE_BYTES else _read_large(body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body does not match the API: {shown(in_words(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}" if body else "the body is empty; send JSON") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def with_fields(body: Bytes, **fields: object) -> bytes:
    """The body with new values for some fields; the bytes of all other fields stay as they are. The body must be a
    valid object."""
    parts = _decode_parts(body)
    parts.update((name, Raw(msgspec.json.encode(value))) for name, value in fields.items())
    return msgspec.json.encode(parts)


_MODEL = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\]|\\.)*")')


def with_model(body: Bytes, model: str) -> bytes:
    """The body with another model; all other bytes stay as they are. The body must be valid."""
    text = bytes(body)
    # Quotes inside a string are escaped, so a match is a whole key or a whole string. If there is only one match, and
    # the key cannot occur elsewhere with escaped letters, the match is the key that was read. Otherwise the body is
    # split into fields.
    if text.count(b'"model"') == 1 and b"\\u006" not in text and (found := _MODEL.search(text)):
        return b"".join((text[: found.start(1)], msgspec.json.encode(model), text[found.end(1) :]))
    return with_fields(text, model=model)


def usage_question(body: Body) -> bytes | None:
    """The `stream_options` that request the usage of a stream. Empty if the body has no `stream_options`; None if the
    client requests usage itself."""
    if not memoryview(body.stream_options):
        return b""
    options = msgspec.json.decode(body.stream_options) or {}
    if not isinstance(options, dict) or options.get("include_usage") is True:  # the engine refuses other types
        return None
    return msgspec.json.encode({**options, "include_usage": True})


def with_question(body: Bytes, question: bytes) -> bytes:
    """The body with these `stream_options`; see `usage_question`. The body must be valid."""
    if question:
        return with_fields(body, stream_options=Raw(question))
    return b'{"stream_options":{"include_usage":true},' + bytes(body).lstrip()[1:]


def metadata(request_id: str, body: Body, raw: dict[bytes, bytes], now: float, tenant: str) -> RequestMetadata:
    """A request as the dispatcher gets it. `tenant` is the owner of the key; if it is empty, the client names its
    tenant.

    Raises `BadRequest`.
    """
    settings = _DEFAULTS
    if body.pointsman is not None or not raw.keys().isdisjoint(_READ):
        settings = _with_headers(raw, body.pointsman or Extension())
    if settings.session:
        raw[b"x-session-id"] = settings.session.encode()
    if tenant:  # the tenant decides the share of the queue, not a header
        raw.pop(FAIRNESS_HEADER.encode(), None)
        raw.pop(FAIRNESS_ALIAS.encode(), None)
    return RequestMetadata(
        request_id,
        body.as_prompt(),
        _tokens(body.max_tokens or body.max_completion_tokens or body.max_output_tokens),
        body.model,
        settings.priority,  # type: ignore[arg-type]  # a number, once checked
        settings.deadline_ms,
        tenant or settings.tenant,
        now,
        settings.cost_budget,
        settings.timeout_s,
        ClientHeaders(raw),
        cache_salt=body.cache_salt or "",
        streams=bool(body.stream),
    )


def settings_in_headers(raw: dict[bytes, bytes]) -> Extension:
    """The settings in headers, with the priority as a number. Raises `BadRequest`."""
    return _DEFAULTS if raw.keys().isdisjoint(_READ) else _with_headers(raw, Extension())


_DEFAULTS = Extension(priority=RequestPriority.NORMAL)
_HEADERS = {field: f"x-pointsman-{field.replace('_', '-')}".encode() for field in Extension.__struct_fields__}
_NAMES = frozenset(name.encode() for name in ("x-session-id", "x-session-token", FAIRNESS_HEADER, FAIRNESS_ALIAS))
"""Further headers that the gateway reads; their values are names."""
_READ = _NAMES.union(_HEADERS.values())
_KINDS: Mapping[str, object] = {"priority": str, "tenant": str, "session": str}
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _with_headers(raw: dict[bytes, bytes], extension: Extension) -> Extension:
    """The settings of headers and body together, with the priority as a number. Raises `BadRequest`."""
    for name in _READ & raw.keys():
        if len(raw[name]) > MAX_NAME:
            raise BadRequest(f"{name.decode()}: expected at most {MAX_NAME} characters, found {len(raw[name])}")
    settings = msgspec.structs.replace(extension)
    for field, header in _HEADERS.items():
        value = raw.get(header)
        if value is not None:
            written = value.decode("latin-1").strip()
            try:
                setattr(settings, field, msgspec.convert(written, _KINDS.get(field, float), strict=False))
            except msgspec.ValidationError:
                raise BadRequest(f'{header.decode()}: expected a number, found "{shown(written, 60)}"') from None
    if _CONTROL.search(settings.session):
        raise BadRequest("session has a control character in it; it is sent on as a header")
    for field in ("deadline_ms", "cost_budget", "timeout_s"):
        number = getattr(settings, field)
        if number is not None and not 0 < number < 1e15:
            raise BadRequest(f"{field} is {number:g}; it must be above 0 and below 1e15")
    settings.priority = _priority(settings.priority)
    return settings


def _priority(value: int | str | None) -> int:
    if value is None:
        return RequestPriority.NORMAL
    if isinstance(value, str):
        named = PRIORITIES.get(value.lower())
        if named is None and not _WHOLE.fullmatch(value):
            known = ", ".join(PRIORITIES)
            raise BadRequest(f'priority is "{value[:60]}"; it must be a whole number or one of {known}')
        value = int(value) if named is None else named
    if abs(value) > MAX_PRIORITY:
        raise BadRequest(f"priority must be within {MAX_PRIORITY} of 0")
    return RequestPriority(value)


def _tokens(limit: int | None) -> int | None:
    """A token limit; None if the value limits nothing. The engine decides what -1 or a huge number means."""
    return limit if limit is not None and 0 < limit < 1 << 53 else None


def answer_tokens(body: Body, path: bytes, assumed: int) -> int:
    """Maximum number of tokens in the answer. `assumed` is the length of one choice if the body sets no limit."""
    if path not in WRITES:
        return 0
    given = (_tokens(body.max_tokens), _tokens(body.max_completion_tokens), _tokens(body.max_output_tokens))
    limit = max(filter(None, given), default=assumed)  # engines differ in which limit they use
    return limit * max(1, _whole(body.n), _whole(body.best_of)) * _prompts(body.prompt)


MANY_PROMPTS = 100_000
MAX_APART = 1_000
"""Maximum number of prompts of one request that are hashed separately. If there are more, they are hashed as one
text."""


def _whole(raw: Raw) -> int:
    try:
        return _decode_whole(raw) if memoryview(raw) else 0
    except msgspec.DecodeError:
        return 0  # the engine will refuse this value


def _prompts(raw: Raw) -> int:
    """The number of prompts in a request for completions, which has one prompt or a list of prompts."""
    if memoryview(raw)[:1].tobytes() != b"[":
        return 1
    most = bytes(raw).count(b",") + 1
    if most > MANY_PROMPTS:  # telling prompts apart from commas inside them is not worth the memory
        return most
    return len(_prompt_list(raw)) or 1


def _prompt_list(raw: Raw) -> list[Raw]:
    """The prompts in a list. Empty if the list is a single prompt of token ids, or is too long to be split."""
    if bytes(raw).count(b",") >= MANY_PROMPTS:
        return []
    try:
        each = _decode_list(raw)
    except msgspec.DecodeError:
        return []
    return each if each and memoryview(each[0])[:1].tobytes() in (b'"', b"[") else []


_decode_whole = msgspec.json.Decoder(int).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode


# Usage

MAX_USAGE_BYTES = 1024 * 1024
"""Maximum size of responses that are searched for usage, in bytes."""

Tokens = Annotated[int, Meta(ge=0, le=1 << 40)]
"""Maximum token count; larger numbers are ignored."""


class _Details(msgspec.Struct):
    cached_tokens: Tokens | None = None


class Usage(msgspec.Struct):
    """Token counts from the engine; None where the engine reported no count."""

    input: int | None
    output: int | None
    cached: int | None
    """Number of prompt tokens that were in the prefix cache."""


class _ReportedUsage(msgspec.Struct):
    """Usage with the field names of all APIs. The responses API has input and output instead of prompt and completion.
    Anthropic's API does not count cached tokens as input."""

    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: Tokens | None = None
    cache_creation_input_tokens: Tokens | None = None


class _Response(msgspec.Struct):
    usage: _ReportedUsage | None = None


class _UsageBody(msgspec.Struct):
    usage: _ReportedUsage | None = None
    response: _Response | None = None
    message: _Response | None = None


_decode_usage = msgspec.json.Decoder(_UsageBody).decode


def usage_of(body: bytes) -> Usage | None:
    """The usage in a JSON response; None if the response has none. Raises `msgspec.DecodeError` if the body is not
    JSON."""
    try:
        read = _decode_usage(body)
    except (msgspec.ValidationError, RecursionError):  # JSON of another shape
        return None
    reported = read.usage
    whole = read.response or read.message
    if reported is None and whole is not None:
        reported = whole.usage
    if reported is None:
        return None
    details = reported.prompt_tokens_details or reported.input_tokens_details
    if reported.cache_read_input_tokens is not None and reported.input_tokens is not None:
        cached = reported.cache_read_input_tokens
        total = reported.input_tokens + cached + (reported.cache_creation_input_tokens or 0)
        return Usage(total, reported.output_tokens, cached)
    return Usage(
        reported.input_tokens if reported.prompt_tokens is None else reported.prompt_tokens,
        reported.output_tokens if reported.completion_tokens is None else reported.completion_tokens,
        None if details is None else details.cached_tokens,
    )


def usage_of_stream(stream: EventStream) -> Usage | None:
    """The usage in the last events of a stream; None if these events have none."""
    for piece in (stream.last, stream.before_last):
        if b'"usage"' in piece:
            for data in reversed([data for data in data_in(piece) if b'"usage"' in data]):
                try:
                    usage = usage_of(data)
                except msgspec.DecodeError:
                    continue
                if usage is not None:
                    return usage
    return None


class _Chunk(msgspec.Struct):
    choices: list[Raw] | None = None
    usage: _ReportedUsage | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_EVENT = re.compile(rb".*?(?:\r?\n\r?\n|\Z)", re.DOTALL)


def without_usage(events: bytes) -> bytes:
    """These complete events, without those that only report usage."""
    return b"".join(one for one in _EVENT.findall(events) if not any(map(_only_usage, data_in(one))))


def _only_usage(data: bytes) -> bool:
    try:
        read = _decode_chunk(data)
    except msgspec.DecodeError:
        return False
    return read.choices == [] and read.usage is not None


# Errors

_ERROR_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}


def error_kind(status: int) -> str:
    """OpenAI's error type for this status."""
    return _ERROR_KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(message: str, kind: str, code: str | None = None, **extra: Any) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code, **extra}})

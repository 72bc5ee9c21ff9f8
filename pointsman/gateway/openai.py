"""Requests of the OpenAI API, read as far as deciding needs: one parse, and nothing is built that nobody reads."""

import re
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Raw

from pointsman.http.requests import COPIED_BYTES, Bytes
from pointsman.routing.queue.items import FAIRNESS_ALIAS, FAIRNESS_HEADER
from pointsman.types import Priority, RequestMetadata

# A client's headers, as the deciding part wants them: text by lower-cased name, made when somebody asks.


class ClientHeaders(Mapping[str, str]):
    """Headers as they came, and what was said elsewhere in a header's stead."""

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
"""Whose streams end with `data: [DONE]`."""

MOST_PRIORITY = 1_000_000
"""Or as little, below 0."""

PRIORITIES: Mapping[str, int] = {priority.name.lower(): priority.value for priority in Priority}


class BadRequest(Exception):
    """What is wrong with a request, for its author."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Extension(msgspec.Struct, forbid_unknown_fields=True):
    """The object `pointsman` in a body: what the OpenAI API has no field for. Headers say the same, and win."""

    priority: int | str | None = None
    deadline_ms: float | None = None
    tenant: str = ""
    session: str = ""
    cost_budget: float | None = None
    timeout_s: float | None = None


class Body(msgspec.Struct):
    """What is read of a body; everything else is passed over."""

    model: str = ""
    stream: bool | None = False
    messages: Raw = Raw()
    prompt: Raw = Raw()
    input: Raw = Raw()
    instructions: Raw = Raw()
    tools: Raw = Raw()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    cache_salt: str | None = None
    pointsman: Extension | None = None

    def as_prompt(self) -> bytes | memoryview:
        """The prompt as it was written: requests that go on from one another begin with the same bytes."""
        said = memoryview(self.messages) or memoryview(self.prompt) or memoryview(self.input)
        ahead = bytes(self.tools) or bytes(self.instructions)
        if ahead:
            return ahead + said
        return said if len(said) > COPIED_BYTES else bytes(said)


_decode = msgspec.json.Decoder(Body).decode


def read_body(body: Bytes) -> Body:
    """Read a body. Raises `BadRequest`."""
    try:
        return _decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body is not as the API wants it: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def metadata(request_id: str, body: Body, raw: dict[bytes, bytes], now: float, tenant: str) -> RequestMetadata:
    """A request as the dispatcher knows it. `tenant` is who the key belongs to; empty: whoever they say they are.

    Raises `BadRequest`.
    """
    asked = _NOTHING
    if body.pointsman is not None or not raw.keys().isdisjoint(_NAMES):
        asked = _checked(_with_headers(raw, body.pointsman or Extension()))
    if asked.session:
        raw[b"x-session-id"] = asked.session.encode()
    if tenant:  # with whom it shares its turns is not for the client to say
        raw.pop(FAIRNESS_HEADER.encode(), None)
        raw.pop(FAIRNESS_ALIAS.encode(), None)
    return RequestMetadata(
        request_id,
        body.as_prompt(),
        _tokens(body.max_tokens or body.max_completion_tokens or body.max_output_tokens),
        body.model,
        asked.priority,  # type: ignore[arg-type]  # a number, as it has been checked
        asked.deadline_ms,
        tenant or asked.tenant,
        now,
        asked.cost_budget,
        asked.timeout_s,
        ClientHeaders(raw),
        cache_salt=body.cache_salt or "",
    )


def asked_in_headers(raw: dict[bytes, bytes]) -> Extension:
    """What headers ask for, with the priority as a number. Raises `BadRequest`."""
    return _NOTHING if raw.keys().isdisjoint(_NAMES) else _checked(_with_headers(raw, Extension()))


_NOTHING = Extension(priority=Priority.NORMAL)
_HEADERS = {field: f"x-pointsman-{field.replace('_', '-')}".encode() for field in Extension.__struct_fields__}
_NAMES = frozenset(_HEADERS.values())
_KINDS: Mapping[str, object] = {"priority": str, "tenant": str, "session": str}
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _with_headers(raw: dict[bytes, bytes], extension: Extension) -> Extension:
    """What headers and body ask for together."""
    asked = msgspec.structs.replace(extension)
    for field, header in _HEADERS.items():
        value = raw.get(header)
        if value is not None:
            written = value.decode("latin-1").strip()
            try:
                setattr(asked, field, msgspec.convert(written, _KINDS.get(field, float), strict=False))
            except msgspec.ValidationError:
                raise BadRequest(f"{header.decode()}: expected a number, found {value[:60]!r}", field) from None
    return asked


def _checked(asked: Extension) -> Extension:
    """The same, with its priority as a number. Raises `BadRequest`."""
    if _CONTROL.search(asked.session):
        raise BadRequest("session has a control character in it; it goes on as a header", "session")
    for field in ("deadline_ms", "cost_budget", "timeout_s"):
        value = getattr(asked, field)
        if value is not None and not 0 < value < 1e15:
            raise BadRequest(f"{field} is {value:g}; it must be above 0 and below 1e15", field)
    asked.priority = _priority(asked.priority)
    return asked


def _priority(asked: int | str | None) -> int:
    if asked is None:
        return Priority.NORMAL
    if isinstance(asked, str):
        found = PRIORITIES.get(asked.lower())
        if found is None and not _WHOLE.fullmatch(asked):
            known = ", ".join(PRIORITIES)
            raise BadRequest(f'priority is "{asked[:60]}"; it must be a whole number or one of {known}', "priority")
        asked = int(asked) if found is None else found
    if abs(asked) > MOST_PRIORITY:
        raise BadRequest(f"priority must be within {MOST_PRIORITY} of 0", "priority")
    return asked


def _tokens(asked: int | None) -> int | None:
    """As far as it is a bound: what -1 or a number without end means is for the engine to say."""
    return asked if asked is not None and 0 < asked < 1 << 53 else None

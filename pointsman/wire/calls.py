"""A call as bytes: 4 bytes with the length of the head, the head, and the blobs."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw
from msgspec.msgpack import Decoder, Encoder, Ext

from pointsman.errors import shown
from pointsman.wire.blobs import EXT_ARRAY, EXT_BLOB, Bytes, array_as_ext, array_from_ext, decode_value
from pointsman.wire.shared_memory import SharedBuffers, UnreadableBlob

Form: TypeAlias = Literal["blob", "value", "json", "whole", "events", "pieces"]
"""Of an answer: blob: one value for the next step; value: the same without shared memory, for a program outside; json:
for a client, perhaps in pieces; whole: JSON in one piece; events: server-sent; pieces: a value per piece."""
COLLECTED: frozenset[Form] = frozenset({"blob", "value", "whole"})
"""Forms in which the values of a generator are one list."""

BLOB = "application/x-pointsman-blob"
PIECES = "application/x-pointsman-pieces"
"""Pieces, each with its length in 4 bytes before it. None is in shared memory."""

EXT_HANDLE = 3
MAX_BLOBS = 10_000
"""Of one call."""

_encode = Encoder(enc_hook=array_as_ext).encode


class BlobAt(msgspec.Struct, frozen=True):
    """In a template: the value of a blob of the call."""

    index: int


class HandleAt(msgspec.Struct, frozen=True):
    """In a template: a handle to a node, or to a model."""

    name: str
    model: bool = False


class HttpHead(msgspec.Struct, array_like=True, frozen=True):
    """The request of a client, for code that makes the input. Its body is the first blob of the call."""

    method: str
    path: str
    query: str = ""
    headers: dict[str, str] = {}


def template(value: Any) -> Raw:
    """Encoded arguments: plain data with `placeholder`s. Reusable for many calls."""
    return Raw(_encode(value))


NO_ARGS = template([])
NO_KWARGS = template({})


class CallHead(msgspec.Struct, array_like=True, kw_only=True):
    """Everything about a call but the values."""

    method: str
    args: Raw = NO_ARGS
    """A template that is a list."""
    kwargs: Raw = NO_KWARGS
    """A template that is a dict."""
    blobs: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_BLOBS)] = []
    """Their lengths; set by `encode_call`."""
    form: Form = "blob"
    request_id: str = ""
    deadline_s: Annotated[float, Meta(ge=-1e13, le=1e13)] | None = None
    """Time left until the deadline; None if there is none."""
    priority: int = 0
    tenant: str = ""
    app: str = ""
    """In calls through handles: the application,"""
    node: str = ""
    """and the node that is called."""
    step: str = ""
    """The step of the request; in calls through handles, the step that makes the call."""
    http: HttpHead | None = None
    """Only in calls of code that makes the input of a request."""


def encode_call(head: CallHead, blobs: Sequence[Bytes] = ()) -> bytes:
    head.blobs = [len(blob) for blob in blobs]
    encoded = _encode(head)
    return b"".join((len(encoded).to_bytes(4, "little"), encoded, *blobs))


def decode_call(body: Bytes) -> tuple[CallHead, list[memoryview]]:
    """A call and its blobs, which are not decoded. Raises `UnreadableBlob`."""
    view = memoryview(body)
    start = 4 + int.from_bytes(view[:4], "little")
    try:
        head = _decode_head(view[4:start])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableBlob(f"this is not a call: {shown(str(error))}") from None
    blobs = []
    for length in head.blobs:
        blobs.append(view[start : start + length])
        start += length
    if start != view.nbytes:
        raise UnreadableBlob(f"this is not a call: it should have {start} bytes, and has {view.nbytes}")
    return head, blobs


def arguments(
    head: CallHead,
    blobs: Sequence[Bytes],
    shared: SharedBuffers | None = None,
    handle: Callable[[HandleAt], Any] | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call. Raises `UnreadableBlob`."""

    def value_of(code: int, data: memoryview) -> Any:
        found = _reference(code, data)
        if isinstance(found, BlobAt):
            return decode_value(blobs[found.index], shared)
        if isinstance(found, HandleAt):
            if handle is None:
                raise UnreadableBlob(f'a handle to "{found.name}" is not allowed here')
            return handle(found)
        return found

    try:
        args = msgspec.msgpack.decode(head.args, ext_hook=value_of)
        kwargs = {} if head.kwargs == NO_KWARGS else msgspec.msgpack.decode(head.kwargs, ext_hook=value_of)
    except (msgspec.DecodeError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise UnreadableBlob(f"the arguments of {shown(head.method)} cannot be read: {shown(str(error))}") from None
    if type(args) is not list or type(kwargs) is not dict:
        raise UnreadableBlob(f"the arguments of {shown(head.method)} must be a list and a dict")
    return args, kwargs


def placeholder(index: int) -> Ext:
    """In a template, the value of the n-th blob."""
    return Ext(EXT_BLOB, index.to_bytes(4, "little"))


def placeholder_of_handle(name: str, *, model: bool = False) -> Ext:
    """In a template, a handle to a node or to a model, which the method that is called can use."""
    return Ext(EXT_HANDLE, f"{'model' if model else 'node'}:{name}".encode())


def read_template(raw: Raw) -> Any:
    """A template with `BlobAt` and `HandleAt` in it. Raises `UnreadableBlob`."""
    try:
        return _decode_template(raw)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise UnreadableBlob(f"a template cannot be read: {shown(str(error))}") from None


def _reference(code: int, data: memoryview) -> Any:
    if code == EXT_BLOB:
        return BlobAt(int.from_bytes(data, "little"))
    if code == EXT_HANDLE:
        kind, _, name = bytes(data).decode().partition(":")
        return HandleAt(name, model=kind == "model")
    if code == EXT_ARRAY:
        return array_from_ext(data)
    raise ValueError(f"extension {code} has no meaning in a call")


_decode_head = Decoder(CallHead).decode
_decode_template = Decoder(ext_hook=_reference).decode

"""A call as bytes: 4 bytes that say how long the head is, the head, and the blobs one after the other."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Raw
from msgspec.msgpack import Decoder, Encoder, Ext

from pointsman.wire.blobs import EXT_ARRAY, EXT_BLOB, Bytes, array_as_ext, array_from_ext, decode_value
from pointsman.wire.failures import UnreadableBlob
from pointsman.wire.shared_memory import SharedBuffers

Form: TypeAlias = Literal["blob", "value", "json", "whole", "events", "pieces"]
"""How the answer is wanted: as one value for the next step, or for a program outside (without shared memory); as a
client reads it, perhaps piece by piece, or in any case whole; as events; as a value per piece."""
COLLECTED: frozenset[Form] = frozenset({"blob", "value", "whole"})
"""Forms in which what a generator yields is one list."""

BLOB = "application/x-pointsman-blob"
PIECES = "application/x-pointsman-pieces"
"""Piece by piece: 4 bytes that say how long a blob is, and the blob. None of them is in shared memory."""

EXT_HANDLE = 3

_encode = Encoder(enc_hook=array_as_ext).encode


class BlobAt(msgspec.Struct, frozen=True):
    """In a template: the value of a blob of the call."""

    place: int


class HandleAt(msgspec.Struct, frozen=True):
    """In a template: a handle to a node, or to a model."""

    name: str
    model: bool = False


class HttpHead(msgspec.Struct, array_like=True, frozen=True):
    """The request of a client, for code that makes the input of it. Its body is the call's first blob."""

    method: str
    path: str
    query: str = ""
    headers: dict[str, str] = {}


def template(value: Any) -> Raw:
    """Arguments for a head: plain data, with `placeholder`s in it. Whoever calls often makes it once."""
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
    blobs: list[int] = []
    """How long each is; `encode_call` writes it."""
    form: Form = "blob"
    request_id: str = ""
    deadline_s: float | None = None
    """What is left until the answer is due; None: it is not due at any time."""
    priority: int = 0
    tenant: str = ""
    app: str = ""
    """In calls through handles: of which application,"""
    node: str = ""
    """and of which node of it."""
    step: str = ""
    """Which step of the request this is; in calls through handles, the step that makes them."""
    http: HttpHead | None = None
    """Only for code that makes the input of a request."""


def encode_call(head: CallHead, blobs: Sequence[Bytes] = ()) -> bytes:
    """A call as bytes."""
    head.blobs = [len(blob) for blob in blobs]
    encoded = _encode(head)
    return b"".join((len(encoded).to_bytes(4, "little"), encoded, *blobs))


def decode_call(body: Bytes) -> tuple[CallHead, list[memoryview]]:
    """A call and its blobs, which are not looked into. Raises `UnreadableBlob`."""
    view = memoryview(body)
    start = 4 + int.from_bytes(view[:4], "little")
    try:
        head = _decode_head(view[4:start])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableBlob(f"this is no call: {error}") from None
    blobs = []
    for length in head.blobs:
        blobs.append(view[start : start + length])
        start += length
    if start != view.nbytes:
        raise UnreadableBlob(f"this is no call: it should have {start} bytes, and has {view.nbytes}")
    return head, blobs


def arguments(
    head: CallHead,
    blobs: Sequence[Bytes],
    shared: SharedBuffers | None = None,
    handle: Callable[[HandleAt], Any] | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """What a method is called with. Raises `UnreadableBlob`."""

    def value_of(code: int, data: memoryview) -> Any:
        found = _reference(code, data)
        if isinstance(found, BlobAt):
            return decode_value(blobs[found.place], shared)
        if isinstance(found, HandleAt):
            if handle is None:
                raise UnreadableBlob(f'a handle to "{found.name}" has no place here')
            return handle(found)
        return found

    try:
        args = msgspec.msgpack.decode(head.args, ext_hook=value_of)
        kwargs = {} if head.kwargs == NO_KWARGS else msgspec.msgpack.decode(head.kwargs, ext_hook=value_of)
    except (msgspec.DecodeError, ValueError, IndexError) as error:
        raise UnreadableBlob(f"the arguments of {head.method} cannot be read: {error}") from None
    if type(args) is not list or type(kwargs) is not dict:
        raise UnreadableBlob(f"the arguments of {head.method} must be a list and a dict")
    return args, kwargs


def placeholder(place: int) -> Ext:
    """In a template, the value of the n-th blob."""
    return Ext(EXT_BLOB, place.to_bytes(4, "little"))


def placeholder_of_handle(name: str, *, model: bool = False) -> Ext:
    """In a template, a handle to a node or to a model: whoever is called can call it."""
    return Ext(EXT_HANDLE, f"{'model' if model else 'node'}:{name}".encode())


def read_template(raw: Raw) -> Any:
    """A template with `BlobAt` and `HandleAt` in it."""
    return _decode_template(raw)


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

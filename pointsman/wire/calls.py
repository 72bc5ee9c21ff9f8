"""A call as bytes: 4 bytes with the length of the head, the head, and the blobs."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw
from msgspec.msgpack import Decoder, Encoder, Ext

from pointsman.errors import shown
from pointsman.pipeline.flow import result_part
from pointsman.pipeline.graph import Access
from pointsman.wire.blobs import (
    EXT_ARRAY,
    EXT_BLOB,
    Bytes,
    array_as_ext,
    array_from_ext,
    decode_value,
    read_path,
    written_path,
)
from pointsman.wire.failures import raised_by
from pointsman.wire.shared_memory import BufferSource, UnreadableBlob

Form: TypeAlias = Literal["blob", "value", "json", "whole", "events", "pieces"]
"""The form of an answer. blob: one value for the next step; value: one value without shared memory, for an outside
program; json: JSON for a client, perhaps in pieces; whole: JSON in one piece; events: server-sent events; pieces: one
value per piece."""
COLLECTED: frozenset[Form] = frozenset({"blob", "value", "whole"})
"""In these forms, the values of a generator become one list."""

ARGUMENTS = "application/x-pointsman-arguments"
"""The content type of the arguments of a handle's call: a plain blob of args and kwargs."""
BLOB = "application/x-pointsman-blob"
PIECES = "application/x-pointsman-pieces"
"""The content type of pieces. Each piece follows its length in 4 bytes, and no piece is in shared memory. If `FAILED`
takes the place of a length, the status, length and body of an error follow, and the answer ends there."""
FAILED = b"\xff\xff\xff\xff"
FAILED_LINE = b"x-pointsman-failed"
"""If code raises after some pieces were sent, the replica sends this trailer after the last piece, with the status, and
the body of the error as base64. So the answer ends normally: the call has failed, but the connection has not."""
MAX_FAILURE_BYTES = 32 * 1024
"""Maximum bytes of the body of such an error. If the body is larger, its traceback is left out."""

EXT_HANDLE = 3
MAX_BLOBS = 10_000
"""Maximum number of blobs of one call."""

_encode = Encoder(enc_hook=array_as_ext).encode


class BlobAt(msgspec.Struct, frozen=True):
    """In a template, stands for the value of one of the call's blobs."""

    index: int
    path: tuple[Access, ...] = ()
    """The path to the wanted part of the value; empty for the whole value."""

    def of(self, value: Any) -> Any:
        return result_part(value, self.path)


class HandleAt(msgspec.Struct, frozen=True):
    """In a template, stands for a handle to a node or to a model."""

    name: str
    model: bool = False


class HttpHead(msgspec.Struct, array_like=True, frozen=True):
    """A client's request, for code that makes the input from it. The body of the request is the first blob of the
    call."""

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
    """Everything about a call except the values."""

    method: str
    args: Raw = NO_ARGS
    """A template that is a list."""
    kwargs: Raw = NO_KWARGS
    """A template that is a dict."""
    blobs: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_BLOBS)] = []
    """The lengths of the call's blobs; `encode_call` sets them."""
    form: Form = "blob"
    request_id: str = ""
    deadline_s: Annotated[float, Meta(ge=-1e13, le=1e13)] | None = None
    """Time left until the deadline; None if the call has no deadline."""
    priority: int = 0
    tenant: str = ""
    app: str = ""
    """The application; set only in calls through handles."""
    node: str = ""
    """The node that is called; set only in calls through handles."""
    step: str = ""
    """The step of the request; in calls through handles, the step that makes the call."""
    http: HttpHead | None = None
    """The client's request; set only in calls of code that makes the input of a request."""


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
    shared: BufferSource | None = None,
    handle: Callable[[HandleAt], Any] | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call. Raises `UnreadableBlob`."""

    def value_of(code: int, data: memoryview) -> Any:
        found = _reference(code, data)
        if isinstance(found, BlobAt):
            return found.of(decode_value(blobs[found.index], shared))
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


def placeholder(index: int, path: tuple[Access, ...] = ()) -> Ext:
    """In a template, stands for the value of the n-th blob, or for a part of that value."""
    return Ext(EXT_BLOB, index.to_bytes(4, "little") + written_path(path))


def placeholder_of_handle(name: str, *, model: bool = False) -> Ext:
    """In a template, stands for a handle to a node or a model. The method that is called can use the handle."""
    return Ext(EXT_HANDLE, f"{'model' if model else 'node'}:{name}".encode())


def read_template(raw: Raw) -> Any:
    """A template with `BlobAt` and `HandleAt` in it. Raises `UnreadableBlob`."""
    try:
        return _decode_template(raw)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise UnreadableBlob(f"a template cannot be read: {shown(str(error))}") from None


def _reference(code: int, data: memoryview) -> Any:
    if code == EXT_BLOB:
        return BlobAt(int.from_bytes(data[:4], "little"), read_path(data[4:]))
    if code == EXT_HANDLE:
        kind, _, name = bytes(data).decode().partition(":")
        return HandleAt(name, model=kind == "model")
    if code == EXT_ARRAY:
        return array_from_ext(data)
    raise ValueError(f"extension {code} has no meaning in a call")


# Errors after pieces


def failed_after_pieces(status: int, body: bytes) -> bytes:
    """The trailer of an answer in pieces, if the user's code raised an error after the last piece."""
    if len(body) > MAX_FAILURE_BYTES:
        error = msgspec.json.decode(body)
        kept = {"type": error.get("type", ""), "message": str(error.get("message", ""))[: MAX_FAILURE_BYTES // 4]}
        body = msgspec.json.encode(kept)
    return b"%b: %d %b\r\n" % (FAILED_LINE, status, b64encode(body))


def failure_after_pieces(trailers: bytes) -> tuple[int, bytes] | None:
    """Status and body of the error in these trailers; None if they have no error."""
    for line in trailers.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == FAILED_LINE:
            status, _, body = value.strip().partition(b" ")
            try:
                return int(status), b64decode(body, validate=True)
            except ValueError:
                return 502, b""
    return None


def failed_piece(status: int, body: bytes) -> bytes:
    """The last piece of an answer that failed: it marks the end of the pieces, and contains the error."""
    return FAILED + status.to_bytes(2, "little") + len(body).to_bytes(4, "little") + body


class PieceReader:
    """Divides bytes into pieces as they arrive."""

    def __init__(self, node: str = "") -> None:
        self._node = node
        self._held = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the blobs of complete pieces. If the code has failed, raises its error after the last piece."""
        self._held += data
        while len(self._held) >= 4:
            if self._held.startswith(FAILED):
                self._look_at_failure()
                return
            end = 4 + int.from_bytes(self._held[:4], "little")
            if len(self._held) < end:
                return
            piece, self._held = self._held[4:end], self._held[end:]
            yield piece

    def _look_at_failure(self) -> None:
        held = self._held
        if len(held) >= 10 and len(held) >= 10 + int.from_bytes(held[6:10], "little"):
            raise raised_by(int.from_bytes(held[4:6], "little"), held[10:], self._node)


_decode_head = Decoder(CallHead).decode
_decode_template = Decoder(ext_hook=_reference).decode

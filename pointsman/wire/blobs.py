"""One value as bytes; the first byte is its kind.

    0  msgpack       None, bool, int of 64 bits, float, str, bytes, list, dict with str keys; small arrays as Ext 2
    1  pickle        anything else that has no buffers
    2  with buffers  pickle, and the buffers of arrays: large ones in shared memory, small ones after the pickle
    3  composed      a list or dict with other blobs in it; the gateway makes it without decoding those blobs

All arrays arrive read-only, because large ones are shared: code that writes to its arguments fails for small arrays
too, and not only for large ones. Copy an array before changing it. (Arrays that are not contiguous, and arrays of dates
or objects, have no buffer to share: they are pickled, and arrive as copies.)
"""

import pickle
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from math import prod
from types import NoneType
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Raw
from msgspec.msgpack import Decoder, Encoder, Ext

from pointsman.errors import shown, shown_bytes
from pointsman.pipeline.flow import result_part
from pointsman.pipeline.graph import Access
from pointsman.wire.shared_memory import BufferSource, SharedBuffers, Span, UnreadableBlob, Unsendable, is_file_name

Bytes: TypeAlias = bytes | memoryview

KIND_PLAIN, KIND_PICKLED, KIND_WITH_BUFFERS, KIND_COMPOSED = 0, 1, 2, 3
LARGE_BYTES = 256 * 1024
"""Values whose buffers have more bytes in total go through shared memory."""
EXT_BLOB, EXT_ARRAY = 1, 2
MAX_DEPTH = 64
"""Maximum depth of nested lists and dicts; deeper values are pickled."""

_SCALARS = frozenset({NoneType, bool, int, float, str, bytes})
_NAMES = frozenset({str})


_SIZES = {
    kind + size: int(size)
    for kind, sizes in {"b": "1", "i": "1 2 4 8", "u": "1 2 4 8", "f": "2 4 8 16", "c": "8 16 32"}.items()
    for size in sizes.split()
}
"""The types of booleans and numbers that arrays may have, with the size of each type in bytes. Numpy itself accepts
descriptions of any complexity."""
_Dtype = Annotated[str, Meta(min_length=3, max_length=4)]
"""Byte order, kind and size, such as <f8."""
_Shape = Annotated[list[Annotated[int, Meta(ge=1, le=1 << 40)]], Meta(max_length=32)]


class _Buffers(msgspec.Struct, array_like=True):
    file: str
    """The file in shared memory; empty if the buffers are inline."""
    home: str
    """The home of the node whose memory has the file; empty if there is only one node."""
    length: int
    spans: list[Span]
    pickled: bytes
    inline: list[memoryview]


class _Composed(msgspec.Struct, array_like=True):
    template: Raw
    blobs: list[memoryview]


class StoredFile(msgspec.Struct, array_like=True, frozen=True):
    """The location of a blob's buffers."""

    file: str
    home: str
    length: Annotated[int, Meta(ge=0)]

    def __str__(self) -> str:
        """File and home as one name, for `SharedMemory.remove`."""
        return f"{self.file}@{self.home}" if self.home else self.file


# Any value


def encode_value(value: Any, shared: SharedBuffers | None = None) -> bytes:
    """A value as a blob, for another replica. Raises `Unsendable`."""
    size = 0 if type(value) in _SCALARS else _bytes_of_arrays(value)
    if 0 <= size < LARGE_BYTES:
        try:
            return b"\x00" + _encode(value)
        except (OverflowError, UnicodeEncodeError, RecursionError):
            pass  # integers beyond 64 bits, lone surrogates
    buffers: list[memoryview] = []

    def is_inline(buffer: pickle.PickleBuffer) -> bool:
        try:
            buffers.append(buffer.raw())
        except BufferError:  # not contiguous
            return True
        return False

    try:
        pickled = pickle.dumps(value, protocol=5, buffer_callback=is_inline)
    except Exception as error:  # a user's class may raise anything while it is pickled
        raise Unsendable(
            f"a value of type {type(value).__name__} cannot be sent to another process: {error}"
        ) from error
    if not buffers:
        return b"\x01" + pickled
    if shared is not None and sum(buffer.nbytes for buffer in buffers) >= LARGE_BYTES:
        try:
            home = shared.home
            name, length, spans = shared.put(buffers)
        except OSError:
            pass  # no room, or other nodes cannot reach this one: send them inline
        else:
            return b"\x02" + _encode(_Buffers(name, home, length, spans, pickled, []))
    return b"\x02" + _encode(_Buffers("", "", 0, [], pickled, buffers))


def decode_value(blob: Bytes, shared: BufferSource | None = None) -> Any:
    """The value of a blob from a replica of this plane; decoding may run code. Raises `UnreadableBlob`."""
    kind, rest = _parts(blob)
    if kind == KIND_PLAIN:
        return _decoded(rest)
    try:
        if kind == KIND_COMPOSED:
            return _decompose(rest, shared)
        if kind == KIND_PICKLED:
            return pickle.loads(rest)
        head = _decode_buffers(rest)
        if not head.file:
            return pickle.loads(head.pickled, buffers=[buffer.toreadonly() for buffer in head.inline])
        if shared is None:
            raise UnreadableBlob("a value is in shared memory, and this process has none")
        memory = shared.get(head.file, head.length, head.home)
        return pickle.loads(head.pickled, buffers=[span.of(memory) for span in head.spans])
    except UnreadableBlob:
        raise
    except Exception as error:  # the class is missing, or raises
        raise UnreadableBlob(f"a value cannot be restored here: {type(error).__name__}: {error}") from error


def files_of(blob: Bytes) -> str | None:
    """The name of a blob's file in shared memory, for `SharedMemory.remove`; None if the blob has no file. Runs no code
    of the blob."""
    stored = _stored(blob)
    return None if stored is None else str(stored)


def _stored(blob: Bytes) -> StoredFile | None:
    if not blob or blob[0] != KIND_WITH_BUFFERS:
        return None
    try:
        stored = _decode_file(memoryview(blob)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return stored if is_file_name(stored.file) else None


def files_inside(blob: Bytes) -> Iterator[StoredFile]:
    """All files that decoding a blob needs. Raises `UnreadableBlob`."""
    if blob and blob[0] == KIND_COMPOSED:
        try:
            parts = _decode_composed(memoryview(blob)[1:]).blobs
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UnreadableBlob(f"a value cannot be read: {shown(str(error))}") from None
        for part in parts:
            if part and part[0] != KIND_COMPOSED:  # the gateway does not nest composed blobs
                yield from files_inside(part)
    elif (stored := _stored(blob)) is not None:
        yield stored


# Values made of other blobs


def composed(template: Any, blobs: Sequence[bytes]) -> bytes:
    """A blob of plain data with `placeholder`s for the values of these blobs."""
    return b"\x03" + _encode([Raw(_encode(template)), blobs])


def _decompose(rest: memoryview, shared: BufferSource | None) -> Any:
    content = _decode_composed(rest)

    def value_of(code: int, data: memoryview) -> Any:
        if code == EXT_BLOB:
            value = decode_value(content.blobs[int.from_bytes(data[:4], "little")], shared)
            return result_part(value, read_path(data[4:]))
        return _from_ext(code, data)

    return msgspec.msgpack.decode(content.template, ext_hook=value_of)


def written_path(path: Sequence[Access]) -> bytes:
    """The path to a part of a value. A placeholder has it after the number of its blob; empty for the whole value."""
    return msgspec.msgpack.encode([(access.key, access.attribute) for access in path]) if path else b""


def read_path(data: Bytes) -> tuple[Access, ...]:
    return tuple(Access(*one) for one in _decode_path(data)) if data else ()


# Plain values


def encode_plain(value: Any) -> bytes:
    """A value as a plain blob. Raises `Unsendable`, which names the part that is not plain."""
    if _bytes_of_arrays(value) < 0:
        raise Unsendable(_plainness_problem(value, "the value"))
    try:
        return b"\x00" + _encode(value)
    except OverflowError:
        raise Unsendable("the value has an integer of more than 64 bits") from None
    except UnicodeEncodeError as error:
        raise Unsendable(f"the value has text that is not Unicode: {error}") from None


def decode_plain(blob: Bytes) -> Any:
    """The value of a plain blob; no other kind is read. Raises `UnreadableBlob`."""
    kind, rest = _parts(blob)
    if kind != KIND_PLAIN:
        raise UnreadableBlob("the value is not plain data; only replicas may decode others")
    return _decoded(rest)


def _bytes_of_arrays(value: Any) -> int:
    """Bytes of the arrays in a plain value; -1 if the value is not plain."""
    return _measured(value, getattr(sys.modules.get("numpy"), "ndarray", None), 0)


def _measured(value: Any, array: type | None, depth: int) -> int:
    kind = type(value)
    inside: Iterable[Any]
    if kind in _SCALARS:
        return 0
    if kind is list:
        inside = value
    elif kind is dict:
        if not _NAMES.issuperset(map(type, value)):
            return -1
        inside = value.values()
    elif kind is array and _is_simple(value):
        return int(value.nbytes)
    else:
        return -1
    if _SCALARS.issuperset(map(type, inside)):  # true of most lists, and faster than a loop
        return 0
    if depth == MAX_DEPTH:
        return -1
    total = 0
    for one in inside:
        if type(one) not in _SCALARS:
            size = _measured(one, array, depth + 1)
            if size < 0:
                return -1
            total += size
    return total


def _is_simple(array: Any) -> bool:
    """Whether shape, type and bytes describe the array completely."""
    dtype = array.dtype
    return bool(dtype.kind in "biufc" and array.flags.c_contiguous and array.size and dtype.metadata is None)


def _plainness_problem(value: Any, where: str, depth: int = 0) -> str:
    """The first part of a value that is not plain, and why it is not; empty if all parts are plain."""
    if type(value) in (list, dict) and depth > MAX_DEPTH:
        return f"{where} is nested more than {MAX_DEPTH} deep"
    if type(value) is dict:
        for name, inside in value.items():
            if type(name) is not str:
                return f"{where} has the key {shown(repr(name))} of type {type(name).__name__}; keys must be str"
            if type(inside) not in _SCALARS and (found := _plainness_problem(inside, "", depth + 1)):
                return f"{where}[{shown(repr(name))}]{found}"
        return ""
    if type(value) is list:
        for index, inside in enumerate(value):
            if type(inside) not in _SCALARS and (found := _plainness_problem(inside, "", depth + 1)):
                return f"{where}[{index}]{found}"
        return ""
    if _bytes_of_arrays(value) >= 0:
        return ""
    return (
        f"{where} is of type {type(value).__name__}; plain are None, bool, int, float, str, bytes, list, dict and "
        "arrays of numbers"
    )


def _parts(blob: Bytes) -> tuple[int, memoryview]:
    view = memoryview(blob)
    if not view.nbytes or view[0] > KIND_COMPOSED:
        raise UnreadableBlob(f"{shown_bytes(bytes(view[:20]))} does not begin like a value")
    return view[0], view[1:]


def _decoded(rest: memoryview) -> Any:
    try:
        return _decode(rest)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise UnreadableBlob(f"a value cannot be read: {shown(str(error))}") from None
    except RecursionError:
        raise UnreadableBlob("a value is nested too deeply") from None


def array_as_ext(value: Any) -> Ext:
    """An array as an extension; no other type gets here."""
    return Ext(EXT_ARRAY, _encode([value.dtype.str, value.shape, value.data.cast("B")]))


def load_arrays() -> None:
    """Load numpy in the background: loading blocks for longer than other requests may wait."""
    if "numpy" not in sys.modules:
        threading.Thread(target=import_module, args=("numpy",), daemon=True).start()


def array_from_ext(data: memoryview) -> Any:
    """The array in an extension. If anything is wrong with the bytes, raises ValueError."""
    dtype, shape, content = _decode_array(data)
    size = _SIZES.get(dtype[1:])
    if size is None or dtype[0] not in ("<>" if size > 1 else "|"):
        raise ValueError(f"{dtype!r} is not a type of simple numbers")
    if prod(shape) * size != content.nbytes:
        raise ValueError(f"an array of {dtype} in the shape {shape} does not have {content.nbytes} bytes")
    import numpy  # only after the checks: bytes that are refused may arrive before numpy is loaded

    return numpy.frombuffer(content.toreadonly(), dtype).reshape(shape)


def _from_ext(code: int, data: memoryview) -> Any:
    if code != EXT_ARRAY:
        raise ValueError(f"extension {code} is not a value")
    return array_from_ext(data)


_encode = Encoder(enc_hook=array_as_ext).encode
_decode = Decoder(ext_hook=_from_ext).decode
_decode_array = Decoder(tuple[_Dtype, _Shape, memoryview]).decode
_decode_buffers = Decoder(_Buffers).decode
_decode_composed = Decoder(_Composed).decode
_decode_path = Decoder(list[tuple[int | str, bool]]).decode
_decode_file = Decoder(StoredFile).decode


# Values from clients: the number of values is checked before the first one is created

MAX_CONTAINERS, MAX_VALUES = 30_000, 2_000_000
"""Maximum number of lists and mappings in the arguments of a client, and of all values in them. An empty list takes one
byte of a body, but 64 bytes of memory. Many numbers belong in an array."""
MAX_LONG_STRINGS = 100_000
"""Maximum number of byte strings and of strings with 32 bytes or more, in msgpack. They are counted one by one."""
UNCHECKED_BYTES = 64 * 1024
"""A body of up to this many bytes cannot have too many values."""
_RUN = re.compile(
    rb"(?:[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1].{2}|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8}|"
    + b"|".join(b"\\x%02x.{%d}" % (0xA0 + length, length) for length in range(32))
    + b")++",
    re.DOTALL,
)
"""A run of successive numbers, constants and short strings in msgpack."""
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4}
"""Type codes of byte strings, longer strings and extensions, which are skipped."""
_COUNT_BYTES = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Type codes of lists and mappings with more than 15 values."""


def check_counts(blob: Bytes) -> None:
    """Raise `UnreadableBlob` if a plain blob has too many values to be decoded."""
    if len(blob) <= UNCHECKED_BYTES:
        return
    data, at, containers, values, long = bytes(blob), 1, 0, 0, 0
    while at < len(data):
        run = _RUN.match(data, at)
        if run is not None:
            at = run.end()
            continue
        code, long = data[at], long + 1
        if long > MAX_LONG_STRINGS + MAX_CONTAINERS:
            raise UnreadableBlob(f"there are more than {MAX_LONG_STRINGS} long strings; send them as JSON")
        if code in _LENGTH_BYTES:
            start = at + 1 + _LENGTH_BYTES[code]
            at = start + int.from_bytes(data[at + 1 : start], "big") + (code in (0xC7, 0xC8, 0xC9))
        elif 0xD4 <= code <= 0xD8:
            at += 2 + (1 << code - 0xD4)
        else:
            start = at + 1 + _COUNT_BYTES.get(code, 0)
            values += int.from_bytes(data[at + 1 : start], "big") if start > at + 1 else code & 0x0F
            containers, at = containers + 1, start
            _check(containers, values)


def _check(containers: int, values: int) -> None:
    if containers > MAX_CONTAINERS or values > MAX_VALUES:
        raise UnreadableBlob(
            f"there are more than {MAX_CONTAINERS} lists and mappings, or {MAX_VALUES} values; send numbers as an array"
        )

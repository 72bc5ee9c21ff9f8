"""Bytes that no encoder made: whatever comes, decoders return a value or raise `UnreadableBlob`, in bounded time."""

import struct
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.msgpack import Ext

from pointsman.wire import (
    CallHead,
    HttpHead,
    SharedBuffers,
    UnreadableBlob,
    arguments,
    check_counts,
    composed,
    decode_call,
    decode_plain,
    decode_value,
    encode_call,
    encode_plain,
    files_of,
    placeholder,
    placeholder_of_handle,
    read_template,
    template,
)
from pointsman.wire.blobs import MAX_CONTAINERS, MAX_VALUES
from tests.properties import examples

pack = msgspec.msgpack.encode


def array(dtype: object, shape: object, content: bytes = b"\0" * 8) -> bytes:
    """A plain blob with an array as another program might describe it."""
    return b"\0" + pack(Ext(2, pack([dtype, shape, content])))


GOOD = [
    encode_plain({"args": [1, 2.5, "text", None, True, b"bytes"], "kwargs": {"name": [[], {}]}}),
    encode_plain([np.arange(6, dtype=np.float32).reshape(2, 3), np.array([True]), np.zeros((1, 2, 3), np.int64)]),
    encode_plain("x" * 300),
    encode_plain([2**63, -(2**63), 1e300]),
    composed({"a": placeholder(0), "b": [placeholder(1)]}, [encode_plain(1), encode_plain([2, "three"])]),
]
CALLS = [
    encode_call(
        CallHead(
            method="m",
            args=template([placeholder(0), [placeholder(1)], {"x": 1}]),
            kwargs=template({"h": placeholder_of_handle("node")}),
            deadline_s=1.5,
            http=HttpHead("POST", "/x", headers={"a": "b"}),
        ),
        [encode_plain([1, 2]), encode_plain(np.arange(3))],
    ),
    encode_call(CallHead(method="m")),
]
TOKENS = [
    b"\x00", b"\x03", b"\x80", b"\x90", b"\x91", b"\xc0", b"\xc1", b"\xcf" + b"\xff" * 8, b"\xcb\x7f\xf0" + b"\0" * 6,
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xa1\xff",
    b"\xc9\xff\xff\xff\xff\x02", b"\xd4\x02\x00", b"\xd6\x01\xff\xff\xff\xff", b"\xd6\xff\xff\xff\xff\xff",
    b"\xd4\x03\xff", b"\x91" * 2000, pack(Ext(2, pack(["O", [1], b"\0" * 8]))), pack(Ext(2, pack(["<f8", [-1], b""]))),
    pack("<f8"), pack(2**63), pack(-1), b"\xff\xff\xff\xff", b"(1,,2)i4", b"/../", b"\0\0\0\0",
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, good: Sequence[bytes]) -> bytes:
    made = bytearray(draw(st.sampled_from(good)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(made)))
        match draw(st.integers(0, 4)):
            case 0:
                del made[at : at + draw(st.integers(1, 12))]
            case 1:
                made[at:at] = draw(st.sampled_from(TOKENS))
            case 2:
                made[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 3:
                made[at:at] = made[at : at + draw(st.integers(1, 40))]
            case _:
                del made[at:]
    return bytes(made)


def reads(decode: Callable[[], object]) -> None:
    problem = ""
    try:
        decode()
    except UnreadableBlob as error:
        problem = str(error)
    assert len(problem) < 1000


@given(mutated(GOOD))
@settings(max_examples=examples(250))
def test_mutated_values(blob: bytes) -> None:
    reads(lambda: decode_plain(blob))
    reads(lambda: files_of(blob))
    reads(lambda: check_counts(blob))
    if blob[:1] in (b"\0", b"\3") and _has_no_pickle(blob):
        reads(lambda: decode_value(blob))


def _has_no_pickle(blob: bytes) -> bool:
    """Whether no part of a composed blob is of a kind that may run code: those are for replicas alone."""
    try:
        _, blobs = msgspec.msgpack.decode(blob[1:], type=tuple[Raw, list[bytes]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return blob[:1] == b"\0"
    return all(one[:1] == b"\0" for one in blobs)


@given(mutated(CALLS))
@settings(max_examples=examples(250))
def test_mutated_calls(body: bytes) -> None:
    def decode() -> None:
        head, blobs = decode_call(body)
        reads(lambda: read_template(head.args))
        reads(lambda: read_template(head.kwargs))
        if all(bytes(blob[:1]) == b"\0" for blob in blobs):
            reads(lambda: arguments(head, blobs, None, lambda at: at.name))

    reads(decode)


@given(st.binary(max_size=200))
@settings(max_examples=examples(250))
def test_random_bytes(data: bytes) -> None:
    reads(lambda: decode_plain(b"\0" + data))
    reads(lambda: decode_call(data))
    reads(lambda: read_template(Raw(data)))
    reads(lambda: files_of(b"\2" + data))


@given(st.recursive(st.integers(), lambda inside: st.lists(inside, max_size=3)), st.integers(), st.integers())
@settings(max_examples=examples(200))
def test_spans_beyond_shared_memory(names: Any, offset: int, length: int) -> None:
    """A span may not reach out of its file, whatever it says."""
    with tempfile.TemporaryDirectory() as folder:
        shared = SharedBuffers(Path(folder))
        try:
            name, total, _ = shared.put([memoryview(b"x" * 100)])
            for span, size in ([offset, length], total), ([0, 100], length), ([offset, 100], total), (names, total):
                try:
                    blob = b"\2" + pack([name, size, [span], b"\x80\x05N.", []])
                except OverflowError:
                    continue
                reads(partial(decode_value, blob, shared))
        finally:
            shared.close()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", ".hidden", "", "a/b", "a\0b", "n" * 5000, ".."])
def test_files_outside_of_shared_memory_are_not_touched(tmp_path: Path, name: str) -> None:
    shared = SharedBuffers(tmp_path)
    blob = b"\2" + pack([name, 10, [[0, 10]], b"\x80\x05N.", []])
    assert files_of(blob) is None
    if name:
        with pytest.raises(UnreadableBlob):
            decode_value(blob, shared)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("(1,,2)i4", [2]), ("(2,)i4", [1]), ("i4,i4", [1]), ("f8", [1]), ("=f8", [1]), ("|f8", [1]), ("<i3", [1]),
        ("<b4", [2]), ("|O8", [1]), ("|S8", [1]), ("<U2", [1]), ("<M8", [1]), ("<V8", [1]), ("|V8", [1]), ("", [1]),
        ("<f8", [-1]), ("<f8", [2]), ("<f8", [0]), ("<f8", [1] * 33), ("<f8", [2**40, 2**40]), ("<f8", [2**63]),
        ("<f8", [1.0]), ("<f8", 1), ("<f8", None), ("<f8", {}), (None, [1]), (1, [1]),
        (",".join(["i4"] * 1_000_000), [1]), ("<f8" * 1_000_000, [1]), ("<\xf3", [1]), ("a\0b", [1]),
    ],
    ids=lambda given: repr(given)[:20],
)  # fmt: skip
def test_arrays_that_are_not_simple(dtype: object, shape: object) -> None:
    began = time.process_time()
    with pytest.raises(UnreadableBlob):
        decode_plain(array(dtype, shape))
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("dtype", ["<f8", ">f8", "<i8", "<u8", "<c8", ">i8"])
@pytest.mark.parametrize("shape", [[1], [], [1, 1, 1], [1] * 32])
def test_simple_arrays(dtype: str, shape: list[int]) -> None:
    found = decode_plain(array(dtype, shape))
    assert (found.dtype.str, list(found.shape)) == (dtype, shape)


MANY = 8_000_000
TOO_MANY: dict[str, bytes] = {
    "empty lists": b"\0\xdd" + struct.pack(">I", MANY) + b"\x90" * MANY,
    "empty mappings": b"\0\xdd" + struct.pack(">I", MANY) + b"\x80" * MANY,
    "lists in lists": b"\0" + b"\x92\x90" * (MANY // 2) + b"\x90",
    "numbers": b"\0\xdd" + struct.pack(">I", MANY) + b"\x01" * MANY,
    "a count of numbers": b"\0\xdd\xff\xff\xff\xff" + b"\x01" * 100_000,
    "strings in a long form": b"\0\xdd" + struct.pack(">I", MAX_VALUES) + b"\xd9\x01a" * MAX_VALUES,
    "short strings": b"\0\xdd" + struct.pack(">I", MANY // 3) + b"\xd9\x01a" * (MANY // 3),
}


def bounded(check: Callable[[], object], size: int) -> None:
    """Refused, with less memory than two copies of what came."""
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableBlob):
            check()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2.5 * size + 1_000_000


@pytest.mark.parametrize("what", TOO_MANY)
def test_too_many_values_are_refused_before_any_is_made(what: str) -> None:
    bounded(lambda: check_counts(TOO_MANY[what]), len(TOO_MANY[what]))


@pytest.mark.parametrize(
    "value",
    [
        ["[" * 300_000, "," * 3_000_000, '"\\[' * 100_000],
        {"text": "a, [b] {c} " * 200_000},
        [[1.5, 2.5, "x"]] * (MAX_CONTAINERS - 10),
        [1.5] * (MAX_VALUES - 10),
        ["x" * 40] * 100_000,
        {str(number): number for number in range(100_000)},
    ],
    ids=["brackets in strings", "text", "rows", "numbers", "strings", "names"],
)
def test_large_values_of_ordinary_shape_are_accepted(value: Any) -> None:
    check_counts(encode_plain(value))


def test_large_arrays_are_accepted() -> None:
    check_counts(encode_plain({"args": [np.full(1_000_000, -1, np.int16)], "kwargs": {"b": b"\x90" * 1_000_000}}))


@given(st.binary(max_size=300))
@settings(max_examples=examples(300))
def test_counts_of_random_bytes(data: bytes) -> None:
    reads(lambda: check_counts(b"\0" + data * 300))


def test_what_is_not_plain_is_found_in_one_pass() -> None:
    """Looking for it at each level again would take 64 times as long."""
    wide: Any = list(range(20_000))
    value: Any = {1: 2}
    for _ in range(60):
        value = [[wide], value]

    def took() -> float:
        began = time.process_time()
        with pytest.raises(Exception, match="keys must be str"):
            encode_plain(value)
        return time.process_time() - began

    began = time.process_time()
    encode_plain([[wide] for _ in range(60)])
    assert min(took() for _ in range(3)) < 20 * (time.process_time() - began) + 0.1

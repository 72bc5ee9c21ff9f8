"""Values and calls round-trip through bytes with their types."""

import contextlib
import datetime
import math
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.wire import (
    LARGE_BYTES,
    BlobAt,
    CallFailed,
    CallHead,
    HandleAt,
    HttpHead,
    SharedBuffers,
    UnreadableBlob,
    Unsendable,
    arguments,
    decode_call,
    decode_plain,
    decode_value,
    encode_call,
    encode_plain,
    encode_value,
    files_of,
    placeholder,
    placeholder_of_handle,
    read_template,
    template,
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
PLAIN = st.recursive(
    SCALARS, lambda inside: st.lists(inside, max_size=5) | st.dictionaries(st.text(), inside, max_size=5), max_leaves=30
)
HASHABLE = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
ANYTHING = st.recursive(
    SCALARS | st.integers() | st.text(st.characters(categories=["Cs", "L"])) | st.sets(HASHABLE, max_size=3),
    lambda inside: (
        st.lists(inside, max_size=4)
        | st.tuples(inside, inside)
        | st.dictionaries(HASHABLE, inside, max_size=4)
        | st.lists(inside, max_size=3).map(tuple)
    ),
    max_leaves=30,
)


@dataclass
class Point:
    x: int
    y: int


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedBuffers]:
    memory = SharedBuffers(tmp_path)
    yield memory
    memory.close()


def same(one: Any, other: Any) -> bool:
    """Equal with equal types at every level; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    return bool(one == other)


@given(PLAIN)
def test_plain_values_round_trip(value: Any) -> None:
    blob = encode_plain(value)
    assert blob[0] == 0
    assert same(decode_plain(blob), value)
    assert encode_value(value) == blob


@given(ANYTHING)
def test_all_values_round_trip(value: Any) -> None:
    assert same(decode_value(encode_value(value)), value)


@pytest.mark.parametrize(
    "value",
    [(1, 2), [(1,)], {"a": {1, 2}}, {1: 2}, Point(1, 2), [Point(1, 2)], np.float32(1.5), 2**70, "\ud800",
     datetime.datetime(2024, 1, 2), bytearray(b"x"), True + 0j],
)  # fmt: skip
def test_values_that_plain_data_would_change_are_pickled(value: Any) -> None:
    blob = encode_value(value)
    assert blob[0] == 1
    assert same(decode_value(blob), value)
    with pytest.raises(Unsendable):
        encode_plain(value)
    with pytest.raises(UnreadableBlob, match="not plain"):
        decode_plain(blob)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, (2, 3)]}, r"the value\['a'\]\[1\] is of type tuple"),
        ({"a": {1: 2}}, r"the value\['a'\] has the key 1 of type int"),
        (2**64, "more than 64 bits"),
        (Point(1, 2), "is of type Point"),
    ],
)
def test_values_that_are_not_plain_are_named(value: Any, message: str) -> None:
    with pytest.raises(Unsendable, match=message):
        encode_plain(value)


def test_deep_and_circular_values_are_pickled() -> None:
    circle: list[Any] = []
    circle.append(circle)
    again = decode_value(encode_value(circle))
    assert again[0] is again
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    assert decode_value(encode_value(deep)) == deep
    with pytest.raises(Unsendable, match="nested more than"):
        encode_plain(deep)


def test_values_that_cannot_be_sent_say_so() -> None:
    with pytest.raises(Unsendable, match=r"of type generator cannot be sent"):
        encode_value(x for x in "abc")


ARRAYS = [
    np.arange(5),
    np.array(2.5),
    np.ones((2, 3, 4), dtype=">f4"),
    np.array([True, False]),
    np.array([1j]),
    np.zeros((0, 3)),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(10)[::3],
    np.array(["a", "bc"]),
    np.array(["2020-01-01"], dtype="M8[D]"),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    np.arange(LARGE_BYTES).reshape(-1, 256),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [1, {"a": one}], lambda one: (one, one)])
def test_arrays_round_trip(array: Any, wrap: Any, shared: SharedBuffers) -> None:
    got = decode_value(encode_value(wrap(array), shared), shared)
    found = got[1]["a"] if isinstance(got, list) else got[1] if isinstance(got, tuple) else got
    assert type(got) is type(wrap(array))
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert (found == array).all()


@pytest.mark.parametrize("count", [10, LARGE_BYTES])
@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: (one, "label")])
def test_received_arrays_are_read_only(count: int, wrap: Any, shared: SharedBuffers) -> None:
    got = decode_value(encode_value(wrap(np.arange(count)), shared), shared)
    array = got[0] if isinstance(got, tuple) else got
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_only_large_buffers_are_shared(shared: SharedBuffers, tmp_path: Path) -> None:
    assert files_of(encode_value(np.zeros(10), shared)) is None
    assert files_of(encode_value((np.zeros(10), 1), shared)) is None
    assert files_of(encode_value("x" * LARGE_BYTES, shared)) is None
    large = np.zeros(LARGE_BYTES, dtype="u1")
    name = files_of(encode_value(large, shared))
    assert name is not None
    assert (tmp_path / name).exists()
    assert files_of(encode_value(large, None)) is None
    assert len(encode_value(large, shared)) < 500


def test_a_file_that_was_removed_is_an_error(shared: SharedBuffers) -> None:
    blob = encode_value(np.zeros(LARGE_BYTES), shared)
    kept = decode_value(blob, shared)
    shared.remove(files_of(blob) or "")
    with pytest.raises(UnreadableBlob, match="is gone: its request has ended"):
        decode_value(blob, shared)
    assert not kept.any()  # an open mapping stays valid
    with pytest.raises(UnreadableBlob, match="this process has none"):
        decode_value(blob)


def test_memory_is_reused_only_when_it_is_not_mapped(shared: SharedBuffers, tmp_path: Path) -> None:
    first = encode_value(np.full(LARGE_BYTES, 1), shared)
    held = decode_value(first, shared)
    inode = (tmp_path / (files_of(first) or "")).stat().st_ino
    shared.remove(files_of(first) or "")

    second = encode_value(np.full(LARGE_BYTES, 2), shared)
    assert (tmp_path / (files_of(second) or "")).stat().st_ino != inode, "it is still mapped"
    assert (held == 1).all()
    part = held[10:20]
    del held
    third = encode_value(np.full(LARGE_BYTES, 3), shared)
    assert (tmp_path / (files_of(third) or "")).stat().st_ino != inode, "a part of it is still mapped"
    assert (part == 1).all()
    del part
    fourth = encode_value(np.full(LARGE_BYTES, 4), shared)
    assert (tmp_path / (files_of(fourth) or "")).stat().st_ino == inode
    assert (decode_value(second, shared) == 2).all()
    assert (decode_value(third, shared) == 3).all()
    assert (decode_value(fourth, shared) == 4).all()
    with pytest.raises(UnreadableBlob, match="gone"):
        decode_value(first, shared)


def test_closing_and_sweeping_leave_no_files(tmp_path: Path) -> None:
    shared = SharedBuffers(tmp_path)
    blob = encode_value(np.zeros(LARGE_BYTES), shared)
    shared.close()
    assert [file.name for file in tmp_path.iterdir()] == [files_of(blob)]
    shared.sweep()
    assert list(tmp_path.iterdir()) == []
    assert (decode_value(encode_value(np.ones(LARGE_BYTES), shared), shared) == 1).all()
    SharedBuffers(tmp_path).sweep()  # by another process, while files are in use
    assert (decode_value(encode_value(np.ones(LARGE_BYTES), shared), shared) == 1).all()
    shared.close()


def test_files_of_killed_processes_are_removed(tmp_path: Path, shared: SharedBuffers) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".{dead.pid}-1").write_bytes(b"left")
    (tmp_path / f".{os.getppid()}-1").write_bytes(b"alive")
    encode_value(np.zeros(LARGE_BYTES), shared)
    assert not (tmp_path / f".{dead.pid}-1").exists()
    assert (tmp_path / f".{os.getppid()}-1").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", ".hidden"])
def test_a_blob_cannot_name_other_files(name: str, shared: SharedBuffers) -> None:
    blob = b"\x02" + msgspec.msgpack.encode([name, "", 10, [[0, 10]], pickle.dumps(1), []])
    with pytest.raises(UnreadableBlob, match="cannot be in shared memory"):
        decode_value(blob, shared)


def test_without_room_in_shared_memory_values_are_sent_inline(tmp_path: Path) -> None:
    nowhere = SharedBuffers(tmp_path / "missing")
    assert (decode_value(encode_value(np.ones(LARGE_BYTES), nowhere), None) == 1).all()


@given(st.binary(max_size=40))
def test_a_garbled_response_is_502(garbage: bytes) -> None:
    for read in (decode_plain, decode_call):
        with contextlib.suppress(UnreadableBlob):
            read(garbage)
    files_of(garbage)


def test_numpy_is_imported_only_for_arrays() -> None:
    code = (
        "import sys; from pointsman.wire import *; decode_value(encode_value([1, (2, 3), {'a': b'x'}])); "
        "sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_call_is_decoded_as_it_was_encoded(shared: SharedBuffers) -> None:
    head = CallHead(
        method="forward",
        args=template([placeholder(1), {"deep": [placeholder(0), "plain"]}, 3]),
        kwargs=template({"name": placeholder(1), "to": placeholder_of_handle("cheap")}),
        form="json", request_id="r1", deadline_s=1.5, priority=2, tenant="t", app="a", node="n", step="s",
        http=HttpHead("POST", "/app", "a=1", {"x": "y"}),
    )  # fmt: skip
    read, blobs = decode_call(encode_call(head, [encode_value((1, 2)), encode_value("x")]))
    assert (read.method, read.form, read.request_id, read.deadline_s) == ("forward", "json", "r1", 1.5)
    assert (read.priority, read.tenant, read.app, read.node, read.step) == (2, "t", "a", "n", "s")
    assert read.http == HttpHead("POST", "/app", "a=1", {"x": "y"})
    args, kwargs = arguments(read, blobs, shared, lambda to: to)
    assert args == ["x", {"deep": [(1, 2), "plain"]}, 3]
    assert kwargs == {"name": "x", "to": HandleAt("cheap")}
    assert read_template(read.args) == [BlobAt(1), {"deep": [BlobAt(0), "plain"]}, 3]
    with pytest.raises(UnreadableBlob, match='a handle to "cheap"'):
        arguments(read, blobs)


def test_a_call_that_refers_to_a_missing_blob() -> None:
    head, blobs = decode_call(encode_call(CallHead(method="f", args=template([placeholder(3)]))))
    with pytest.raises(UnreadableBlob, match="arguments of f"):
        arguments(head, blobs)


def test_a_call_with_an_unknown_extension_is_refused() -> None:
    head, blobs = decode_call(encode_call(CallHead(method="f", args=template([msgspec.msgpack.Ext(9, b"")]))))
    with pytest.raises(UnreadableBlob, match="extension 9 has no meaning"):
        arguments(head, blobs)
    wrongs: list[Any] = [{}, [[1]]]
    for wrong in wrongs:
        head, blobs = decode_call(encode_call(CallHead(method="f", args=template({}), kwargs=template(wrong))))
        with pytest.raises(UnreadableBlob, match="must be a list and a dict"):
            arguments(head, blobs)


def test_a_truncated_call_is_refused() -> None:
    body = encode_call(CallHead(method="f", args=template([placeholder(0)])), [encode_value("long enough")])
    with pytest.raises(UnreadableBlob, match="it should have"):
        decode_call(body[:-3])


@pytest.mark.parametrize(
    ("status", "body", "message", "kind"),
    [
        (500, b'{"type":"ValueError","message":"no","traceback":"T"}', "n: ValueError: no", "ValueError"),
        (429, b'{"error":{"message":"too much","type":"busy"}}', "n: busy: too much", "busy"),
        (
            422,
            b'{"detail":[{"loc":["a","b"],"msg":"must be int","type":"x"}]}',
            "n: BadInput: a.b: must be int",
            "BadInput",
        ),
        (502, b"<html>", "n: <html>", ""),
        (503, b"", "n: it answered 503 without a body", ""),
    ],
)
def test_errors_in_responses(status: int, body: bytes, message: str, kind: str) -> None:
    failed = CallFailed.from_answer(status, body, "n")
    assert (str(failed), failed.kind, failed.status) == (message, kind, status)

"""Inputs of applications that no client library made: over HTTP and gRPC, the answer is 400 or 422, never a failure."""

import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from google.protobuf import struct_pb2
from msgspec.msgpack import Ext

from pointsman.gateway.grpc.server import MAX_VALUES, PredictRequest
from pointsman.gateway.listeners import Listeners
from pointsman.gateway.pages import add_pages
from pointsman.wire import encode_plain
from tests.gateway.grpc.grpc_bed import GrpcBed, refusal, running_grpc_bed
from tests.gateway.wire import HEALTH, Client, Message, post
from tests.wire.test_malformed import GOOD, TOKENS, TOO_MANY, array

ARGUMENTS = ["content-type: application/x-pointsman-arguments"]
JSON = ["content-type: application/json"]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcBed]:
    with running_grpc_bed(tmp_path_factory.mktemp("replicas")) as bed:
        yield bed


@pytest.fixture
def client(bed: GrpcBed) -> Iterator[Client]:
    """A connection to the gateway of the bed over HTTP."""
    add_pages(bed.gateway, lambda: True)
    listeners = Listeners(bed.gateway)
    bed.thread.run(listeners.bind(bed.gateway.settings))
    bed.thread.run(listeners.open())
    host, _, port = listeners.url.partition("://")[2].rpartition(":")
    client = Client(socket.create_connection((host, int(port))))
    yield client
    client.close()
    bed.thread.call(listeners.close)


def given(value: Any) -> bytes:
    return encode_plain({"args": [value], "kwargs": {}})


def pack(**fields: Any) -> bytes:
    return b"\0" + msgspec.msgpack.encode(fields)


def test_arguments_and_json_are_served(client: Client) -> None:
    assert client.fetch(post(given([1, "two"]), b"/echo", ARGUMENTS)).json() == [1, "two"]
    assert client.fetch(post(given(np.arange(3)), b"/echo", ARGUMENTS)).json() == [0, 1, 2]
    assert client.fetch(post(b"[1, 2]", b"/echo", JSON)).json() == [1, 2]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\0", b"\1", b"\1cos\nsystem\n(S'true'\ntR.", b"\3\x92\x90\x90", b"\7", b"{}", encode_plain([1]),
        encode_plain({}), encode_plain({"args": []}), pack(args=1, kwargs={}), pack(args=[], kwargs=[]),
        pack(args="ab", kwargs={}), pack(args={}, kwargs={}), pack(args=[], kwargs=["abc"]),
        pack(args=[], kwargs={1: 2}), pack(args=[], kwargs={b"x": 2}),
        pack(args=[1], kwargs={"a": 1}), pack(args=[{1: 2}], kwargs={}),
        pack(args=[Ext(1, b"\0\0\0\0")], kwargs={}), pack(args=[Ext(3, b"x")], kwargs={}),
        pack(args=[], kwargs={"n" * 100_000: 1}) + b"\1", b"\0" + b"\x91" * 100_000, *TOO_MANY.values(),
    ],
    ids=lambda body: repr(bytes(body[:20])),
)  # fmt: skip
def test_arguments_that_cannot_be_read(client: Client, body: bytes) -> None:
    refused(client.fetch(post(body, b"/echo", ARGUMENTS)))
    assert client.stays_open()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("(1,,2)i4", [2]),
        (",".join(["i4"] * 1_000_000), [1]),
        ("|O8", [1]),
        ("<f8", [-1]),
        ("<f8", [3]),
        ("<f8", [1 << 40]),
    ],
    ids=lambda one: repr(one)[:20],
)
def test_arrays_that_cannot_be_read(client: Client, dtype: str, shape: list[int]) -> None:
    inside = array(dtype, shape)[1:]
    body = b"\0" + msgspec.msgpack.encode({"args": [msgspec.Raw(inside)], "kwargs": {}})
    refused(client.fetch(post(body, b"/echo", ARGUMENTS)))


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"Infinity", b"1e400", b"9" * 5000, b"9" * 1_000_000, b"\xff",
        b'"\\ud800"', b'"\xff"', b"[1,]", b"1 2", b"\0", b"'a'", b"[" * 30 + b"1" + b"]" * 90,
    ],
    ids=lambda body: repr(bytes(body[:20])),
)  # fmt: skip
def test_json_that_cannot_be_read(client: Client, body: bytes) -> None:
    refused(client.fetch(post(body, b"/echo", JSON)))
    assert client.stays_open()


TOO_MUCH_JSON: dict[str, bytes] = {
    "lists": b"[" + b"[]," * 20_000 + b"[]]",
    "mappings": b"[" + b"{}," * 100_000 + b"{}]",
    "numbers": b"[" + b"1," * 2_000_000 + b"1]",
    "strings": b"[" + b'"ab",' * 400_000 + b"1]",
    "fields": b"{%b}" % b",".join(b'"%d":1' % number for number in range(60_000)),
    "open lists": b"[" * 1_000_000,
}
ENOUGH_JSON: dict[str, Any] = {
    "100,000 numbers": [number / 7 for number in range(100_000)],
    "256 embeddings": [[number / 7 for number in range(1024)]] * 256,
    "rows": [{"id": number, "name": "a, [b] {c}"} for number in range(10_000)],
    "text": "a, [b] {c} " * 200_000,
}


@pytest.mark.parametrize("what", TOO_MUCH_JSON)
def test_json_of_too_many_parts_is_refused(bed: GrpcBed, client: Client, what: str) -> None:
    body = TOO_MUCH_JSON[what]
    got = client.fetch(post(body, b"/echo", JSON))
    assert (got.status, got.json()["error"]["code"]) == (413, "body_too_complex"), got.body[:500]
    assert b"the body has more than " in got.body
    error = refusal(lambda: bed.one(PredictRequest(application="echo", json=body.decode()), timeout=60))
    assert (error.code, "the body has more than " in error.why) == ("INVALID_ARGUMENT", True)


@pytest.mark.parametrize("what", ENOUGH_JSON)
def test_long_json_of_ordinary_shape_is_served(bed: GrpcBed, client: Client, what: str) -> None:
    value = ENOUGH_JSON[what]
    assert client.fetch(post(msgspec.json.encode(value), b"/echo", JSON)).json() == value


def test_json_with_a_name_twice_has_its_last_value(client: Client) -> None:
    assert client.fetch(post(b'{"a": 1, "a": 2}', b"/echo", JSON)).json() == {"a": 2}


def refused(got: Message) -> None:
    assert got.status in (400, 413, 422), got.body[:500]
    assert len(got.body) < 1000


def test_mutated_arguments(client: Client) -> None:
    """Whatever they became, they are served or refused, and the connection lives on."""
    chance = random.Random(7)
    good = [given([1, 2.5, "x", {"a": [None, True]}]), given(np.arange(6).reshape(2, 3)), *GOOD]
    for _ in range(300):
        body = bytearray(chance.choice(good))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(body) + 1)
            what = chance.randrange(3)
            if what == 0:
                body[at : at + 1] = bytes([chance.randrange(256)])
            elif what == 1:
                body[at:at] = chance.choice(TOKENS)
            else:
                del body[at : at + chance.randint(1, 9)]
        got = client.fetch(post(bytes(body), b"/echo", ARGUMENTS))
        assert got.status in (200, 400, 422), (bytes(body), got.body[:300])
    assert client.fetch(HEALTH).status == 200


# gRPC


def test_values_over_grpc_are_bounded(bed: GrpcBed) -> None:
    many = struct_pb2.Value()
    many.list_value.values.extend([struct_pb2.Value(null_value=struct_pb2.NULL_VALUE)] * (MAX_VALUES + 1))
    error = refusal(lambda: bed.one(PredictRequest(application="echo", values=many), timeout=60))
    assert (error.code, "send it as json" in error.why) == ("INVALID_ARGUMENT", True)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e308])
def test_numbers_over_grpc(bed: GrpcBed, number: float) -> None:
    values = struct_pb2.Value(number_value=number)
    answer = bed.one(PredictRequest(application="echo", values=values), timeout=60)
    assert answer.json == (msgspec.json.encode(number).decode())


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "NaN", "9" * 5000, "1e400", '"\\ud800"'], ids=lambda t: t[:9])
def test_json_over_grpc_that_cannot_be_read(bed: GrpcBed, text: str) -> None:
    error = refusal(lambda: bed.one(PredictRequest(application="echo", json=text), timeout=60))
    assert error.code == "INVALID_ARGUMENT"
    assert len(error.why) < 1000


def test_messages_over_grpc_that_are_no_messages(bed: GrpcBed) -> None:
    chance = random.Random(3)
    raw: Any = bed.channel.unary_unary("/pointsman.v1.Predict/Predict")
    whole = PredictRequest(application="echo", json="[1]").SerializeToString()
    for _ in range(100):
        body = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        body += struct.pack(">I", chance.randrange(1 << 32)) * chance.randint(0, 2)
        try:
            raw(bytes(body), timeout=60)
        except grpc.RpcError as error:
            code = error.code().name
        else:
            code = "OK"
        assert code in ("OK", "INVALID_ARGUMENT", "NOT_FOUND")
    assert bed.predict("echo", 1) == 1

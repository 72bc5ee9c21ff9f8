"""predict.proto, which clients use, matches our own descriptors."""

import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2

import pointsman.gateway.grpc
from pointsman.gateway.grpc.server import FILE, plain

PROTO = (Path(pointsman.gateway.grpc.__file__).parent / "predict.proto").read_text(encoding="utf-8")
KINDS = {9: "string", 11: "google.protobuf.Value"}


def test_fields_match_the_proto_file() -> None:
    for name, message in FILE.message_types_by_name.items():
        [body] = re.findall(rf"^message {name} \{{$(.*?)^\}}$", PROTO, re.MULTILINE | re.DOTALL)
        declared = re.findall(r"^ +([\w.]+) (\w+) = (\d+);$", body, re.MULTILINE)
        assert {(KINDS[one.type], one.name, str(one.number)) for one in message.fields} == set(declared)
        oneofs = {one.name: {field.name for field in one.fields} for one in message.oneofs}
        written = re.findall(r"oneof (\w+) \{(.*?)\}", body, re.DOTALL)
        assert oneofs == {of: set(re.findall(r"(\w+) = ", fields)) for of, fields in written}


def test_methods_match_the_proto_file() -> None:
    assert re.findall(r"^package (.+);$", PROTO, re.MULTILINE) == [FILE.package]
    declared = re.findall(r"^  rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\);$", PROTO, re.MULTILINE)
    methods = FILE.services_by_name["Predict"].methods
    assert declared == [
        (one.name, one.input_type.name, "stream " if one.server_streaming else "", one.output_type.name)
        for one in methods
    ]


@pytest.mark.parametrize(
    "value", [None, True, "1", 1, -3, 1.5, 2**60 + 0.0, [1, [None]], {"a": {"b": [2.0]}}], ids=repr
)
def test_protobuf_values_are_converted(value: Any) -> None:
    assert plain(json_format.ParseDict(value, struct_pb2.Value())) == value


def test_whole_numbers_become_integers() -> None:
    assert type(plain(struct_pb2.Value(number_value=3))) is int
    assert type(plain(struct_pb2.Value(number_value=2.0**60))) is float
    assert plain(struct_pb2.Value()) is None

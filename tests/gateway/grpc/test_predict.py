"""Applications over gRPC: a client of grpcio, a gateway, and replicas that are processes."""

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format, struct_pb2

from pointsman.config.schema import KeySpec, TenantSpec
from pointsman.gateway.grpc.server import PredictRequest
from tests.gateway.grpc.grpc_bed import Door, refusal, request
from tests.gateway.wire import wait_for
from tests.live.manifests import hashed

VALUES = [1, 2.5, "ü", None, True, [], {"a": [1, {"b": None}]}, 2**53 - 1]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_json_input_round_trips(door: Door, value: Any) -> None:
    assert door.predict("echo", value) == value


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_value_input_round_trips(door: Door, value: Any) -> None:
    values = json_format.ParseDict(value, struct_pb2.Value())
    answer = door.one(PredictRequest(application="echo", values=values), timeout=10)
    assert answer.json == msgspec.json.encode(value).decode()


def test_bytes_are_base64(door: Door) -> None:
    assert door.predict("as_bytes", "ab") == "YWI="
    assert [piece.json for piece in door.stream("as_bytes", "ab")] == ['"YWI="']


def test_a_response_from_several_steps(door: Door) -> None:
    assert door.predict("pair", {"left": 1, "right": [2]}) == {"a": 1, "b": [2]}


def test_one_message_per_yielded_value(door: Door) -> None:
    pieces = [msgspec.json.decode(piece.json) for piece in door.stream("count", 5)]
    assert pieces == [{"n": number} for number in range(5)]
    assert list(door.stream("count", 0)) == []


def test_yielded_text_becomes_strings(door: Door) -> None:
    pieces = [msgspec.json.decode(piece.json) for piece in door.stream("words", "5 true hä {")]
    assert all(isinstance(piece, str) for piece in pieces)
    assert "".join(pieces) == "5 true hä { "


def test_predict_collects_yielded_values(door: Door) -> None:
    assert door.predict("count", 3) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert door.predict("words", "a b") == ["a ", "b "]
    assert [piece.json for piece in door.stream("echo", {"a": 1})] == ['{"a":1}']


def test_requests_carry_tenant_priority_and_deadline(door: Door) -> None:
    told = {"x-pointsman-priority": "high", "x-pointsman-tenant": "me", "x-request-id": "mine"}
    answer = door.ask("asked", metadata=told)
    assert answer.request_id == "mine"
    assert msgspec.json.decode(answer.json) == {"priority": 1, "tenant": "me", "late": True}
    record = door.applications.records.get("mine")
    assert record is not None
    assert (record.application, record.tenant, record.state) == ("asked", "me", "served")
    assert door.ask("asked").request_id != door.ask("asked").request_id


def test_the_earlier_deadline_applies(door: Door) -> None:
    door.ask("echo", metadata={"x-pointsman-deadline-ms": "2000", "x-request-id": "header"}, timeout=60)
    door.ask("echo", metadata={"x-pointsman-deadline-ms": "60000", "x-request-id": "call"}, timeout=3)
    door.ask("echo", metadata={"x-request-id": "none"}, timeout=None)
    limits = [door.applications.records.get(name).deadline_ms for name in ("header", "call")]  # type: ignore[union-attr]
    assert limits == [pytest.approx(2000, abs=100), pytest.approx(3000, abs=500)]
    assert door.applications.records.get("none").deadline_ms is None  # type: ignore[union-attr]


def test_many_calls_at_once_are_all_answered(door: Door) -> None:
    busy = threading.Event()
    door.thread.loop.call_soon_threadsafe(busy.wait, 10)  # the gateway accepts none before all are sent
    calls = [door.one.future(request("echo", number), timeout=60) for number in range(2500)]
    busy.set()
    assert [call.result().json for call in calls] == [str(number) for number in range(2500)]


# Refusals


def test_input_that_the_schema_refuses_is_reported_by_field(door: Door) -> None:
    assert door.predict("shop", {"item": "tea", "count": 2}) == "2 x tea"
    error = door.refusal("shop", {"count": 0})
    assert error.code == "INVALID_ARGUMENT"
    assert "item: Field required" in error.why
    assert "count: Input should be greater than 0" in error.why


@pytest.mark.parametrize(
    ("message", "code", "why"),
    [
        (PredictRequest(application="echo", json="{"), "INVALID_ARGUMENT", "the body is not JSON"),
        (PredictRequest(application="echo"), "INVALID_ARGUMENT", "send it as json or as values"),
        (PredictRequest(application="pair", json='{"left": 1}'), "INVALID_ARGUMENT", "input['right']"),
        (PredictRequest(application="ecco", json="1"), "NOT_FOUND", 'did you mean "echo"?'),
        (PredictRequest(json="1"), "INVALID_ARGUMENT", "known: "),
        (PredictRequest(application="boom", json='"tea"'), "INTERNAL", 'node "everything": ValueError: no tea today'),
    ],
)
def test_errors_have_a_code_and_a_message(door: Door, message: Any, code: str, why: str) -> None:
    for told in (
        refusal(lambda: door.one(message, timeout=10)),
        refusal(lambda: list(door.many(message, timeout=10))),
    ):
        assert told.code == code
        assert why in told.why
        assert "Traceback" not in told.why


def test_invalid_metadata_is_refused(door: Door) -> None:
    error = door.refusal("echo", 1, {"x-pointsman-deadline-ms": "soon"})
    assert error.code == "INVALID_ARGUMENT"
    assert "x-pointsman-deadline-ms: expected a number" in error.why


def test_keys_and_limits_apply_as_over_http(door: Door) -> None:
    keys, tenants = [KeySpec(sha256=hashed("k"), tenant="t")], [TenantSpec(name="t", requests_per_minute=1)]
    with door.settings(keys=keys, tenants=tenants):
        assert door.refusal("echo").code == "UNAUTHENTICATED"
        assert door.refusal("ecco", None, {"authorization": "Bearer no"}).code == "UNAUTHENTICATED"
        assert door.predict("asked", None, {"authorization": "Bearer k", "x-pointsman-tenant": "u"})["tenant"] == "t"
        error = door.refusal("echo", None, {"authorization": "Bearer k"})
        assert error.code == "RESOURCE_EXHAUSTED"
        assert error.why == '"t" may send 1 requests per minute'
        assert 1 <= int(error.metadata["retry-after"]) <= 60
        assert door.gateway.metrics.limited["t"] == 1


def test_a_deadline_that_is_exceeded(door: Door, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    error = door.refusal("forever", str(mark), {"x-pointsman-deadline-ms": "300", "x-request-id": "late"})
    assert error.code == "DEADLINE_EXCEEDED"
    assert 'node "everything"' in error.why
    assert error.metadata["x-request-id"] == "late"
    wait_for(lambda: mark.read_text() == "given up", "the code goes on")


def test_an_expired_call_deadline_cancels_the_call(door: Door, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    told = refusal(lambda: door.ask("forever", str(mark), timeout=0.3))
    assert told.code == "DEADLINE_EXCEEDED"
    wait_for(lambda: mark.read_text() == "given up", "the code goes on")


@pytest.mark.parametrize("how", ["Predict", "PredictStream"])
def test_a_cancelled_call_is_abandoned(door: Door, tmp_path: Path, how: str) -> None:
    mark = tmp_path / "mark"
    message = PredictRequest(application="forever", json=msgspec.json.encode(str(mark)).decode())
    call = (door.one.future if how == "Predict" else door.many)(message, timeout=30)
    wait_for(lambda: mark.exists() and mark.read_text() == "begun", "the code does not begin")
    call.cancel()
    wait_for(lambda: mark.read_text() == "given up", "the code goes on")
    wait_for(lambda: door.applications.records.newest()[0].state == "abandoned")


def test_an_interrupted_response_is_an_error(door: Door) -> None:
    got: list[str] = []
    told = refusal(lambda: got.extend(piece.json for piece in door.stream("half", 7)))
    assert got in ([], ["7"]), "the beginning may be held back"
    assert told.code == "INTERNAL"
    assert 'node "everything"' in told.why


def test_generators_wait_for_a_client_that_does_not_read(door: Door, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    call = door.stream("large", str(mark))
    assert next(call).json.startswith("[0,0,")

    def stands_still() -> bool:
        before, until = mark.read_text(), time.monotonic() + 0.3
        while time.monotonic() < until:
            if mark.read_text() != before:
                return False
        return True

    wait_for(stands_still)
    assert int(mark.read_text()) < 900
    assert sum(1 for _ in call) == 999

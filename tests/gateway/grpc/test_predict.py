"""Applications over gRPC: a grpcio client, a gateway, and replicas as processes."""

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format, struct_pb2

from pointsman.config.schema import KeySpec, TenantSpec
from pointsman.gateway.grpc.server import SERVICE, PredictRequest
from pointsman.types import MAX_NAME
from tests.gateway.grpc.grpc_bed import GrpcBed, refusal, request
from tests.gateway.wire import wait_for
from tests.live.manifests import hashed

VALUES = [1, 2.5, "ü", None, True, [], {"a": [1, {"b": None}]}, 2**53 - 1]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_json_input_round_trips(grpc_bed: GrpcBed, value: Any) -> None:
    assert grpc_bed.predict("echo", value) == value


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_value_input_round_trips(grpc_bed: GrpcBed, value: Any) -> None:
    values = json_format.ParseDict(value, struct_pb2.Value())
    answer = grpc_bed.one(PredictRequest(application="echo", values=values), timeout=10)
    assert answer.json == msgspec.json.encode(value).decode()


def test_bytes_are_base64(grpc_bed: GrpcBed) -> None:
    assert grpc_bed.predict("as_bytes", "ab") == "YWI="
    assert [piece.json for piece in grpc_bed.stream("as_bytes", "ab")] == ['"YWI="']


def test_a_response_from_several_steps(grpc_bed: GrpcBed) -> None:
    assert grpc_bed.predict("pair", {"left": 1, "right": [2]}) == {"a": 1, "b": [2]}


def test_one_message_per_yielded_value(grpc_bed: GrpcBed) -> None:
    pieces = [msgspec.json.decode(piece.json) for piece in grpc_bed.stream("count", 5)]
    assert pieces == [{"n": number} for number in range(5)]
    assert list(grpc_bed.stream("count", 0)) == []


def test_yielded_text_becomes_strings(grpc_bed: GrpcBed) -> None:
    pieces = [msgspec.json.decode(piece.json) for piece in grpc_bed.stream("words", "5 true hä {")]
    assert all(isinstance(piece, str) for piece in pieces)
    assert "".join(pieces) == "5 true hä { "


def test_predict_collects_yielded_values(grpc_bed: GrpcBed) -> None:
    assert grpc_bed.predict("count", 3) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert grpc_bed.predict("words", "a b") == ["a ", "b "]
    assert [piece.json for piece in grpc_bed.stream("echo", {"a": 1})] == ['{"a":1}']


def test_requests_carry_tenant_priority_and_deadline(grpc_bed: GrpcBed) -> None:
    metadata = {"x-pointsman-priority": "high", "x-pointsman-tenant": "me", "x-request-id": "mine"}
    answer = grpc_bed.fetch("context", metadata=metadata)
    assert answer.request_id == "mine"
    assert msgspec.json.decode(answer.json) == {"priority": 1, "tenant": "me", "late": True}
    record = grpc_bed.applications.records.get("mine")
    assert record is not None
    assert (record.application, record.tenant, record.state) == ("context", "me", "served")
    assert grpc_bed.fetch("context").request_id != grpc_bed.fetch("context").request_id


def test_the_earlier_deadline_applies(grpc_bed: GrpcBed) -> None:
    grpc_bed.fetch("echo", metadata={"x-pointsman-deadline-ms": "2000", "x-request-id": "header"}, timeout=60)
    grpc_bed.fetch("echo", metadata={"x-pointsman-deadline-ms": "60000", "x-request-id": "call"}, timeout=3)
    grpc_bed.fetch("echo", metadata={"x-request-id": "none"}, timeout=None)
    limits = [grpc_bed.applications.records.get(name).deadline_ms for name in ("header", "call")]  # type: ignore[union-attr]
    assert limits == [pytest.approx(2000, abs=100), pytest.approx(3000, abs=500)]
    assert grpc_bed.applications.records.get("none").deadline_ms is None  # type: ignore[union-attr]


def test_many_calls_at_once_are_all_answered(grpc_bed: GrpcBed) -> None:
    busy = threading.Event()
    grpc_bed.thread.loop.call_soon_threadsafe(busy.wait, 10)  # the gateway accepts none before all have been sent
    calls = [grpc_bed.one.future(request("echo", number), timeout=60) for number in range(2500)]
    busy.set()
    assert [call.result().json for call in calls] == [str(number) for number in range(2500)]


# Errors


def test_input_that_the_schema_refuses_is_reported_by_field(grpc_bed: GrpcBed) -> None:
    assert grpc_bed.predict("shop", {"item": "tea", "count": 2}) == "2 x tea"
    error = grpc_bed.refusal("shop", {"count": 0})
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
def test_errors_have_a_code_and_a_message(grpc_bed: GrpcBed, message: Any, code: str, why: str) -> None:
    for error in (
        refusal(lambda: grpc_bed.one(message, timeout=10)),
        refusal(lambda: list(grpc_bed.many(message, timeout=10))),
    ):
        assert error.code == code
        assert why in error.why
        assert "Traceback" not in error.why


def test_invalid_metadata_is_refused(grpc_bed: GrpcBed) -> None:
    error = grpc_bed.refusal("echo", 1, {"x-pointsman-deadline-ms": "soon"})
    assert error.code == "INVALID_ARGUMENT"
    assert "x-pointsman-deadline-ms: expected a number" in error.why


@pytest.mark.parametrize("name", ["x-request-id", "x-pointsman-tenant", "x-pointsman-priority", "x-session-id"])
def test_names_in_metadata_are_bounded(grpc_bed: GrpcBed, name: str) -> None:
    error = grpc_bed.refusal("echo", 1, {name: "1" * (MAX_NAME + 1)})
    assert (error.code, str(MAX_NAME) in error.why) == ("INVALID_ARGUMENT", True)


def test_the_name_of_an_application_is_bounded(grpc_bed: GrpcBed) -> None:
    error = grpc_bed.refusal("n" * 1_000_000)
    assert (error.code, str(MAX_NAME) in error.why) == ("INVALID_ARGUMENT", True)


def test_keys_and_limits_apply_as_over_http(grpc_bed: GrpcBed) -> None:
    keys, tenants = [KeySpec(sha256=hashed("k"), tenant="t")], [TenantSpec(name="t", requests_per_minute=1)]
    with grpc_bed.settings(keys=keys, tenants=tenants):
        assert grpc_bed.refusal("echo").code == "UNAUTHENTICATED"
        assert grpc_bed.refusal("ecco", None, {"authorization": "Bearer no"}).code == "UNAUTHENTICATED"
        assert (
            grpc_bed.predict("context", None, {"authorization": "Bearer k", "x-pointsman-tenant": "u"})["tenant"] == "t"
        )
        error = grpc_bed.refusal("echo", None, {"authorization": "Bearer k"})
        assert error.code == "RESOURCE_EXHAUSTED"
        assert error.why == '"t" may send 1 requests per minute'
        assert 1 <= int(error.metadata["retry-after"]) <= 60
        assert grpc_bed.gateway.metrics.limited["t"] == 1


def test_calls_that_are_refused_are_recorded_as_over_http(grpc_bed: GrpcBed) -> None:
    history = grpc_bed.gateway.history
    keys, tenants = [KeySpec(sha256=hashed("k"), tenant="u")], [TenantSpec(name="u", requests_per_minute=2)]
    with grpc_bed.settings(keys=keys, tenants=tenants):
        refusals = [
            grpc_bed.refusal("echo", None, {"x-request-id": "stranger"}),
            grpc_bed.refusal("ecco", None, {"authorization": "Bearer k", "x-request-id": "unknown"}),
            grpc_bed.refusal("pair", "not an object", {"authorization": "Bearer k", "x-request-id": "input"}),
            grpc_bed.refusal("echo", None, {"authorization": "Bearer k", "x-request-id": "limited"}),
        ]
    assert [one.code for one in refusals][::3] == ["UNAUTHENTICATED", "RESOURCE_EXHAUSTED"]
    assert [one.metadata["x-request-id"] for one in refusals] == ["stranger", "unknown", "input", "limited"]
    [stranger] = [one for one in history.strangers if one.request_id == "stranger"]
    assert (stranger.model, stranger.path) == ("", f"/{SERVICE}"), "its message is not read"
    assert (stranger.tenant, stranger.status) == ("", 401)
    told = [(one.request_id, one.model, one.status, one.code) for one in history.limited if one.tenant == "u"]
    assert told == [
        ("unknown", "ecco", 404, "application_not_found"),
        ("input", "pair", 422, "bad_input"),
        ("limited", "echo", 429, "rate_limit_exceeded"),
    ]


def test_a_deadline_that_is_exceeded(grpc_bed: GrpcBed, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    error = grpc_bed.refusal("forever", str(mark), {"x-pointsman-deadline-ms": "300", "x-request-id": "late"})
    assert error.code == "DEADLINE_EXCEEDED"
    assert 'node "everything"' in error.why
    assert error.metadata["x-request-id"] == "late"
    wait_for(lambda: mark.read_text() == "cancelled", "the code was not cancelled")


def test_an_expired_call_deadline_cancels_the_call(grpc_bed: GrpcBed, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    error = refusal(lambda: grpc_bed.fetch("forever", str(mark), timeout=0.3))
    assert error.code == "DEADLINE_EXCEEDED"
    wait_for(lambda: mark.read_text() == "cancelled", "the code was not cancelled")


@pytest.mark.parametrize("how", ["Predict", "PredictStream"])
def test_a_cancelled_call_is_abandoned(grpc_bed: GrpcBed, tmp_path: Path, how: str) -> None:
    mark = tmp_path / "mark"
    message = PredictRequest(application="forever", json=msgspec.json.encode(str(mark)).decode())
    call = (grpc_bed.one.future if how == "Predict" else grpc_bed.many)(message, timeout=30)
    wait_for(lambda: mark.exists() and mark.read_text() == "begun", "the code did not start")
    call.cancel()
    wait_for(lambda: mark.read_text() == "cancelled", "the code was not cancelled")
    wait_for(lambda: grpc_bed.applications.records.newest()[0].state == "abandoned")


def test_an_interrupted_response_is_an_error(grpc_bed: GrpcBed) -> None:
    got: list[str] = []
    error = refusal(lambda: got.extend(piece.json for piece in grpc_bed.stream("half", 7)))
    assert got in ([], ["7"]), "the first message may be held back"
    assert error.code == "INTERNAL"
    assert 'node "everything"' in error.why


def test_generators_wait_for_a_client_that_does_not_read(grpc_bed: GrpcBed, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    call = grpc_bed.stream("large", str(mark))
    assert next(call).json.startswith("[0,0,")

    def has_stopped() -> bool:
        before, until = mark.read_text(), time.monotonic() + 0.3
        while time.monotonic() < until:
            if mark.read_text() != before:
                return False
        return True

    wait_for(has_stopped)
    assert int(mark.read_text()) < 900
    assert sum(1 for _ in call) == 999

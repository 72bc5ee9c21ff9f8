"""The gRPC server: health, reflection, opening and closing."""

import builtins
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from pointsman.config.schema import TlsSpec
from pointsman.errors import PointsmanError
from pointsman.gateway.grpc.server import SERVICE, PredictResponse
from pointsman.gateway.listeners import CannotListen, GrpcListener
from tests.gateway.grpc.grpc_bed import Door, refusal, request
from tests.gateway.wire import PATIENCE_S, wait_for

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def health(door: Door, service: str) -> int:
    stub: Any = HealthStub(door.channel)
    return int(stub.Check(HealthCheckRequest(service=service), timeout=PATIENCE_S).status)


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_follows_the_readiness_of_the_plane(door: Door, service: str) -> None:
    assert health(door, service) == SERVING
    door.is_ready = False
    assert health(door, service) == NOT_SERVING
    door.is_ready = True
    assert health(door, service) == SERVING


def test_an_application_is_serving_while_every_step_has_an_instance(door: Door) -> None:
    assert health(door, "shop") == SERVING
    door.leave("shop.ingress")
    assert (health(door, "shop"), health(door, "echo")) == (NOT_SERVING, SERVING)
    door.admit("shop.ingress")
    assert health(door, "shop") == SERVING
    assert refusal(lambda: health(door, "nothing")).code == "NOT_FOUND"


def test_watches_report_changes(door: Door) -> None:
    stub: Any = HealthStub(door.channel)
    told = stub.Watch(HealthCheckRequest(service=""), timeout=PATIENCE_S)
    assert next(told).status == SERVING
    door.is_ready = False
    assert next(told).status == NOT_SERVING
    door.is_ready = True
    assert next(told).status == SERVING
    told.cancel()
    assert next(stub.Watch(HealthCheckRequest(service="?"), timeout=5)).status == HealthCheckResponse.SERVICE_UNKNOWN


def test_reflection_shows_the_services(door: Door) -> None:
    stub: Any = ServerReflectionStub(door.channel)
    asked = [ServerReflectionRequest(list_services=""), ServerReflectionRequest(file_containing_symbol=SERVICE)]
    names, file = stub.ServerReflectionInfo(iter(asked), timeout=PATIENCE_S)
    assert {one.name for one in names.list_services_response.service} == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    told, needed = map(FileDescriptorProto.FromString, file.file_descriptor_response.file_descriptor_proto)
    assert [one.name for one in told.service[0].method] == ["Predict", "PredictStream"]
    assert needed.name == "google/protobuf/struct.proto"


def test_a_message_over_the_size_limit_is_refused(door: Door) -> None:
    limits = door.gateway.limits
    assert door.refusal("echo", "x" * (limits.max_body_bytes + 1)).code == "RESOURCE_EXHAUSTED"


def test_an_address_in_use(door: Door) -> None:
    another = GrpcListener(door.gateway, door.applications, lambda: True)
    with pytest.raises(CannotListen, match=r"set gateway.grpcListen to another address"):
        door.thread.run(another.open(door.listener.address))
    door.thread.run(another.close(0))


def test_without_an_address_nothing_is_opened(door: Door) -> None:
    another = GrpcListener(door.gateway, door.applications, lambda: True)
    assert door.thread.run(another.open("")) == 0
    assert another.address == ""


def test_a_missing_package_is_named(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pointsman.gateway.grpc.server":
            raise ImportError("No module named 'grpc_health'", name="grpc_health")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    another = GrpcListener(door.gateway, door.applications, lambda: True)
    with pytest.raises(PointsmanError, match=r"\(grpc_health\); run: pip install 'pointsman\[grpc\]'"):
        door.thread.run(another.open("127.0.0.1:0"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="a certificate is made with openssl")
def test_tls_uses_the_gateways_certificate(door: Door, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    another = GrpcListener(door.gateway, door.applications, lambda: True)
    with door.settings(tls=TlsSpec(cert_file=str(certificate), key_file=str(key))):
        door.thread.run(another.open("127.0.0.1:0"))
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    with grpc.secure_channel(another.address, credentials) as channel:
        stub: Any = HealthStub(channel)
        assert stub.Check(HealthCheckRequest(), timeout=PATIENCE_S).status == SERVING
    door.thread.run(another.close(0))


def test_closing_finishes_calls_in_flight_and_refuses_new_ones(door: Door, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    another = GrpcListener(door.gateway, door.applications, lambda: True)
    door.thread.run(another.open("127.0.0.1:0"))
    with grpc.insecure_channel(another.address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Predict", _serialized, PredictResponse.FromString)
        watching: Any = HealthStub(channel)
        told = watching.Watch(HealthCheckRequest(), timeout=PATIENCE_S)
        assert next(told).status == SERVING
        in_flight = call.future(request("forever", str(mark)), timeout=PATIENCE_S)
        wait_for(mark.exists)
        closing = door.thread.loop.create_task
        patient = door.thread.call(lambda: closing(another.close(PATIENCE_S)))
        assert [one.status for one in told] == [NOT_SERVING], "watches do not delay the shutdown"
        assert not patient.done()
        door.thread.call(lambda: door.gateway.upstream.cut_off("the gateway is shutting down"))
        assert in_flight.code() is grpc.StatusCode.UNAVAILABLE
        assert "the gateway is shutting down" in in_flight.details()
        door.thread.run(another.close(1.0))
        wait_for(patient.done)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(another.address.rpartition(":")[2])))


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())

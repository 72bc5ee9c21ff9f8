"""The gRPC server: health, reflection, and how it opens and closes."""

import builtins
import shutil
import socket
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from pointsman.config.schema import TlsSpec
from pointsman.errors import PointsmanError
from pointsman.gateway.gateway import FILES_PER_INSTANCE, RESERVED_FILES
from pointsman.gateway.grpc.server import SERVICE, PredictResponse
from pointsman.gateway.listeners import CannotListen, GrpcListener
from tests.gateway.grpc.grpc_bed import GrpcBed, refusal, request
from tests.gateway.wire import TIMEOUT_S, wait_for

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def health(grpc_bed: GrpcBed, service: str) -> int:
    stub: Any = HealthStub(grpc_bed.channel)
    return int(stub.Check(HealthCheckRequest(service=service), timeout=TIMEOUT_S).status)


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_follows_the_readiness_of_the_plane(grpc_bed: GrpcBed, service: str) -> None:
    assert health(grpc_bed, service) == SERVING
    grpc_bed.is_ready = False
    assert health(grpc_bed, service) == NOT_SERVING
    grpc_bed.is_ready = True
    assert health(grpc_bed, service) == SERVING


def test_an_application_is_serving_while_every_step_has_an_instance(grpc_bed: GrpcBed) -> None:
    assert health(grpc_bed, "shop") == SERVING
    grpc_bed.leave("shop.ingress")
    assert (health(grpc_bed, "shop"), health(grpc_bed, "echo")) == (NOT_SERVING, SERVING)
    grpc_bed.admit("shop.ingress")
    assert health(grpc_bed, "shop") == SERVING
    assert refusal(lambda: health(grpc_bed, "nothing")).code == "NOT_FOUND"


def test_watches_report_changes(grpc_bed: GrpcBed) -> None:
    stub: Any = HealthStub(grpc_bed.channel)
    watch = stub.Watch(HealthCheckRequest(service=""), timeout=TIMEOUT_S)
    assert next(watch).status == SERVING
    grpc_bed.is_ready = False
    assert next(watch).status == NOT_SERVING
    grpc_bed.is_ready = True
    assert next(watch).status == SERVING
    watch.cancel()
    assert next(stub.Watch(HealthCheckRequest(service="?"), timeout=5)).status == HealthCheckResponse.SERVICE_UNKNOWN


def test_reflection_shows_the_services(grpc_bed: GrpcBed) -> None:
    stub: Any = ServerReflectionStub(grpc_bed.channel)
    queries = [ServerReflectionRequest(list_services=""), ServerReflectionRequest(file_containing_symbol=SERVICE)]
    names, file = stub.ServerReflectionInfo(iter(queries), timeout=TIMEOUT_S)
    assert {one.name for one in names.list_services_response.service} == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    predict, dependency = map(FileDescriptorProto.FromString, file.file_descriptor_response.file_descriptor_proto)
    assert [one.name for one in predict.service[0].method] == ["Predict", "PredictStream"]
    assert dependency.name == "google/protobuf/struct.proto"


def test_a_message_over_the_size_limit_is_refused(grpc_bed: GrpcBed) -> None:
    limits = grpc_bed.gateway.limits
    assert grpc_bed.refusal("echo", "x" * (limits.max_body_bytes + 1)).code == "RESOURCE_EXHAUSTED"


def test_messages_count_towards_the_bytes_that_the_gateway_holds(grpc_bed: GrpcBed, tmp_path: Path) -> None:
    mark, buffered = tmp_path / "mark", grpc_bed.gateway.buffered
    assert buffered.held == 0
    held = request("forever", str(mark))
    held.json += " " * 50_000
    with grpc_bed.settings(max_buffered_bytes=80_000):
        waiting = grpc_bed.one.future(held, timeout=TIMEOUT_S)
        wait_for(mark.exists)
        assert buffered.held == held.ByteSize()
        error = grpc_bed.refusal("echo", "x" * 50_000)
        assert (error.code, error.metadata["retry-after"]) == ("UNAVAILABLE", "1")
        assert grpc_bed.predict("echo", "x" * 10_000) == "x" * 10_000
        waiting.cancel()
        wait_for(lambda: buffered.held == 0)


def test_a_message_that_does_not_come_times_out(grpc_bed: GrpcBed) -> None:
    limits = msgspec.structs.replace(grpc_bed.gateway.limits, body_timeout=0.2)
    never = threading.Event()
    call = grpc_bed.channel.stream_unary(f"/{SERVICE}/Predict", _serialized, PredictResponse.FromString)
    with grpc_bed.settings(limits=limits):
        error = refusal(lambda: call(iter(never.wait, False), timeout=TIMEOUT_S))
        never.set()
    assert (error.code, error.why) == ("DEADLINE_EXCEEDED", "the request did not arrive in time")


def test_connections_over_grpc_are_bounded_and_set_aside(grpc_bed: GrpcBed) -> None:
    clients = grpc_bed.gateway.clients
    another = GrpcListener(grpc_bed.gateway, grpc_bed.applications, lambda: True)
    files, clients.max_files = clients.max_files, 300
    try:
        grpc_bed.thread.run(another.open("127.0.0.1:0"))
        over_http, over_grpc = clients.limit, clients.set_aside_for_grpc()
        instances = sum(len(lane.dispatcher.fleet) for lane in grpc_bed.gateway.traffic.lanes.values())
        assert 2 * (over_http + over_grpc) <= 300 - RESERVED_FILES - FILES_PER_INSTANCE * instances
        address = ("127.0.0.1", int(another.address.rpartition(":")[2]))
        with ExitStack() as stack:
            idle = [stack.enter_context(socket.create_connection(address, TIMEOUT_S)) for _ in range(2 * over_grpc)]
            # A server sends its settings first; one that accepts no more closes the connection.
            served = [bool(one.recv(1)) for one in idle]
            assert sum(served) == over_grpc
    finally:
        clients.max_files = files
        grpc_bed.thread.run(another.close(0))


def test_an_address_in_use(grpc_bed: GrpcBed) -> None:
    another = GrpcListener(grpc_bed.gateway, grpc_bed.applications, lambda: True)
    with pytest.raises(CannotListen, match=r"set gateway.grpcListen to another address"):
        grpc_bed.thread.run(another.open(grpc_bed.listener.address))
    grpc_bed.thread.run(another.close(0))


def test_without_an_address_nothing_is_opened(grpc_bed: GrpcBed) -> None:
    another = GrpcListener(grpc_bed.gateway, grpc_bed.applications, lambda: True)
    assert grpc_bed.thread.run(another.open("")) == 0
    assert another.address == ""


def test_a_missing_package_is_named(grpc_bed: GrpcBed, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pointsman.gateway.grpc.server":
            raise ImportError("No module named 'grpc_health'", name="grpc_health")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    another = GrpcListener(grpc_bed.gateway, grpc_bed.applications, lambda: True)
    with pytest.raises(PointsmanError, match=r"\(grpc_health\); run: pip install 'pointsman\[grpc\]'"):
        grpc_bed.thread.run(another.open("127.0.0.1:0"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_uses_the_gateways_certificate(grpc_bed: GrpcBed, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    another = GrpcListener(grpc_bed.gateway, grpc_bed.applications, lambda: True)
    with grpc_bed.settings(tls=TlsSpec(cert_file=str(certificate), key_file=str(key))):
        grpc_bed.thread.run(another.open("127.0.0.1:0"))
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    with grpc.secure_channel(another.address, credentials) as channel:
        stub: Any = HealthStub(channel)
        assert stub.Check(HealthCheckRequest(), timeout=TIMEOUT_S).status == SERVING
    grpc_bed.thread.run(another.close(0))


def test_closing_finishes_calls_in_flight_and_refuses_new_ones(grpc_bed: GrpcBed, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    another = GrpcListener(grpc_bed.gateway, grpc_bed.applications, lambda: True)
    grpc_bed.thread.run(another.open("127.0.0.1:0"))
    with grpc.insecure_channel(another.address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Predict", _serialized, PredictResponse.FromString)
        watching: Any = HealthStub(channel)
        watch = watching.Watch(HealthCheckRequest(), timeout=TIMEOUT_S)
        assert next(watch).status == SERVING
        in_flight = call.future(request("forever", str(mark)), timeout=TIMEOUT_S)
        wait_for(mark.exists)
        closing = grpc_bed.thread.loop.create_task
        patient = grpc_bed.thread.call(lambda: closing(another.close(TIMEOUT_S)))
        assert [one.status for one in watch] == [NOT_SERVING], "a watch does not delay closing"
        assert not patient.done()
        grpc_bed.thread.call(lambda: grpc_bed.gateway.upstream.cut_off("the gateway is shutting down"))
        assert in_flight.code() is grpc.StatusCode.UNAVAILABLE
        assert "the gateway is shutting down" in in_flight.details()
        grpc_bed.thread.run(another.close(1.0))
        wait_for(patient.done)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(another.address.rpartition(":")[2])))


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())

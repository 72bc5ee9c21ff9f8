"""A complete plane with an application and gRPC."""

from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from pointsman.config.revision import ManifestText
from pointsman.gateway.embedded import Embedded
from pointsman.gateway.grpc.server import SERVICE, PredictRequest, PredictResponse
from tests.gateway.bed import LoopThread
from tests.gateway.grpc.grpc_bed import NODES, SHOP, refusal, request
from tests.gateway.wire import wait_for

MANIFEST = "kind: Pointsman\ngateway: {listen: '127.0.0.1:0', grpcListen: '127.0.0.1:0'}\n"
START_S = 60.0


async def made(state: Path) -> Embedded:
    return Embedded(state)


def test_an_application_of_a_running_plane(tmp_path: Path) -> None:
    thread = LoopThread()
    try:
        plane: Any = thread.run(made(tmp_path))
        if not hasattr(plane, "grpc") or not hasattr(plane, "applications"):
            thread.run(plane.stop())
            pytest.skip("the plane has no gRPC listener yet")
        try:
            thread.run(plane.start(ManifestText(MANIFEST, str(tmp_path))))
            thread.run(plane.plane.documents.deploy(ManifestText(SHOP, str(NODES.parent))))
            with grpc.insecure_channel(plane.grpc.address) as channel:
                wait_for(lambda: is_serving(channel, "shop"), "the application is not ready", START_S)
                assert is_serving(channel, "")
                predict = channel.unary_unary(
                    f"/{SERVICE}/Predict", PredictRequest.SerializeToString, PredictResponse.FromString
                )
                answer = predict(request("shop", {"item": "tea", "count": 2}), timeout=10)
                assert msgspec.json.decode(answer.json) == "2 x tea"
                error = refusal(lambda: predict(request("shop", {"item": "tea", "count": 0}), timeout=10))
                assert error.code == "INVALID_ARGUMENT"
                assert "count: Input should be greater than 0" in error.why
        finally:
            thread.run(plane.stop())
    finally:
        thread.close()
    assert thread.errors == []


def is_serving(channel: grpc.Channel, service: str) -> bool:
    stub: Any = HealthStub(channel)
    request = HealthCheckRequest(service=service)
    try:
        return bool(stub.Check(request, timeout=5).status == HealthCheckResponse.SERVING)
    except grpc.RpcError:  # the name is not known yet
        return False

"""What is served over gRPC, put together."""

from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from pointsman.config.manifest import TlsSpec
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.grpc.health import Health
from pointsman.gateway.grpc.messages import SERVICE
from pointsman.gateway.grpc.service import PredictService
from pointsman.gateway.pipelines.applications import Applications

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
UNREAD = 100_000
"""Calls that may come at once. More are dropped, as if their clients had cancelled them: we would rather say why."""


class PredictServer:
    """A gRPC server in the loop of the gateway."""

    def __init__(self, gateway: Gateway, applications: Applications, is_ready: Callable[[], bool]) -> None:
        limits = gateway.limits
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", limits.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", limits.max_header_bytes),
                ("grpc.server.max_pending_requests", UNREAD),
                ("grpc.server.max_pending_requests_hard_limit", UNREAD),
                ("grpc.so_reuseport", 0),  # a port that somebody else has must not be shared in silence
            )
        )
        self._health = Health(gateway, applications, is_ready)
        self._server.add_generic_rpc_handlers((PredictService(gateway, applications).handler(),))
        add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self._server)

    async def start(self, listen: str, tls: TlsSpec | None) -> int:
        """Listen; the port. Raises RuntimeError if the address cannot be had."""
        if tls is None:
            port = self._server.add_insecure_port(listen)
        else:
            certificate = (Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes())
            port = self._server.add_secure_port(listen, grpc.ssl_server_credentials([certificate]))
        await self._server.start()
        return port

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; those under way get so long to end."""
        self._health.end()
        await self._server.stop(grace_s)

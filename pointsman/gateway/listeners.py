"""Where the gateway listens: TCP, with TLS if configured, and gRPC."""

import asyncio
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from pointsman.config.schema import GatewaySpec
from pointsman.errors import PointsmanError
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import Gateway
from pointsman.parameters import host_and_port

if TYPE_CHECKING:
    from pointsman.gateway.grpc.server import PredictServer
    from pointsman.gateway.pipelines.applications import Applications

BACKLOG = 2048


class CannotListen(PointsmanError):
    """The address is not available."""


class Listeners:
    """Where a gateway listens for HTTP."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._servers: list[asyncio.AbstractServer] = []
        self.url = ""
        """Where clients send requests."""

    async def open(self, settings: GatewaySpec) -> None:
        """Listen as the settings say."""
        host, port = host_and_port(settings.listen)
        tls = None if settings.tls is None else _tls(settings.tls.cert_file, settings.tls.key_file)
        try:
            server = await self._gateway.loop.create_server(
                lambda: GatewayConnection(self._gateway), host, port, ssl=tls, backlog=BACKLOG, reuse_address=True
            )
        except OSError as error:
            why = error.strerror or str(error)
            raise CannotListen(
                f"cannot listen on {settings.listen}: {why}; set gateway.listen to another address"
            ) from error
        self._servers.append(server)
        port = server.sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'http' if tls is None else 'https'}://{shown}:{port}"

    def close(self) -> None:
        """Accept no new connections."""
        for server in self._servers:
            server.close()


class GrpcListener:
    """Where the gateway listens for gRPC, if anywhere. The packages for it are imported when it opens."""

    def __init__(self, gateway: Gateway, applications: "Applications", is_ready: Callable[[], bool]) -> None:
        self._gateway = gateway
        self._applications = applications
        self._is_ready = is_ready
        self._server: PredictServer | None = None
        self.address = ""
        """host:port; empty if it is not open."""

    async def open(self, listen: str) -> int:
        """Listen at this address, with the certificate of the gateway if it has one. Returns the port; 0 if the address
        is empty, which opens nothing."""
        if not listen:
            return 0
        try:
            from pointsman.gateway.grpc.server import PredictServer
        except ImportError as error:
            raise PointsmanError(
                f"gateway.grpcListen is {listen}, which needs packages that are not installed ({error.name}); "
                "run: pip install 'pointsman[grpc]'"
            ) from error
        server = PredictServer(self._gateway, self._applications, self._is_ready)
        try:
            port = await server.start(listen, self._gateway.settings.tls)
        except RuntimeError as error:
            raise CannotListen(
                f"cannot listen for gRPC on {listen}: {error}; set gateway.grpcListen to another address"
            ) from error
        self._server = server
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        return port

    async def close(self, grace_s: float) -> None:
        """Accept no new calls; those in flight have `grace_s` to end. A second call may shorten that."""
        if self._server is not None:
            await self._server.stop(grace_s)


def _tls(cert_file: str, key_file: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert_file, key_file)
    context.set_alpn_protocols(["http/1.1"])
    return context

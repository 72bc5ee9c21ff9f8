"""Where the gateway listens for gRPC. Nothing is loaded for it before it does."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pointsman.errors import PointsmanError
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.pipelines.applications import Applications
from pointsman.gateway.server import CannotListen

if TYPE_CHECKING:
    from pointsman.gateway.grpc.server import PredictServer


class GrpcListener:
    """The door for gRPC, open or not."""

    def __init__(self, gateway: Gateway, applications: Applications, is_ready: Callable[[], bool]) -> None:
        self._gateway = gateway
        self._applications = applications
        self._is_ready = is_ready
        self._server: PredictServer | None = None
        self.address = ""
        """Where clients connect to: host:port; empty: nowhere."""

    async def open(self, listen: str) -> int:
        """Listen there, in the running loop, with the certificate of the gateway if it has one; empty: nowhere. The
        port, or 0."""
        if not listen:
            return 0
        try:
            from pointsman.gateway.grpc.server import PredictServer
        except ImportError as error:
            raise PointsmanError(
                f"gateway.grpcListen is {listen}, which takes packages that are not installed ({error.name}); "
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
        """Take no new calls; those under way get so long to end. Asked again: with less patience."""
        if self._server is not None:
            await self._server.stop(grace_s)

"""Where the gateway listens for clients: TCP, with TLS if configured."""

import asyncio
import ssl

from pointsman.config.schema import GatewaySpec
from pointsman.errors import PointsmanError
from pointsman.gateway.client import ClientConnection
from pointsman.gateway.gateway import Gateway
from pointsman.parameters import host_and_port

BACKLOG = 2048


class CannotListen(PointsmanError):
    """The address cannot be had."""


class Listeners:
    """The open doors of a gateway."""

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
                lambda: ClientConnection(self._gateway), host, port, ssl=tls, backlog=BACKLOG, reuse_address=True
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
        """Take no new connections."""
        for server in self._servers:
            server.close()


def _tls(cert_file: str, key_file: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert_file, key_file)
    context.set_alpn_protocols(["http/1.1"])
    return context

"""The addresses where gateways listen, for HTTP and for gRPC, and checks that these addresses are free."""

import asyncio
import errno
import os
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from pointsman.config.schema import GatewaySpec
from pointsman.errors import PointsmanError
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.pipelines.applications import Applications
from pointsman.parameters import host_and_port

if TYPE_CHECKING:
    from pointsman.gateway.grpc.server import PredictServer


MANY_FILES = 1 << 20
"""Assumed maximum number of open files if the system sets no limit."""


class CannotListen(PointsmanError):
    """Raised if an address is not available."""


class Listeners:
    """The listener of a gateway for HTTP."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._servers: list[asyncio.AbstractServer] = []
        self.url = ""
        """The URL to which clients send requests."""

    async def bind(self, settings: GatewaySpec, *, shared: bool = False) -> None:
        """Take the address. If `shared` is true, other processes may take the same address. Raises `CannotListen`."""
        host, port = host_and_port(settings.listen)
        tls = None if settings.tls is None else _tls(settings.tls.cert_file, settings.tls.key_file)
        try:
            server = await self._gateway.loop.create_server(
                lambda: GatewayConnection(self._gateway),
                host,
                port,
                ssl=tls,
                backlog=2048,
                reuse_address=True,
                reuse_port=shared or None,
                start_serving=False,
            )
        except OSError as error:
            raise _cannot_listen("gateway.listen", settings.listen, error) from error
        self._servers.append(server)
        port = server.sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'http' if tls is None else 'https'}://{shown}:{port}"

    async def open(self) -> None:
        """Accept connections."""
        for server in self._servers:
            await server.start_serving()

    def close(self) -> None:
        """Accept no new connections; open ones stay."""
        for server in self._servers:
            server.close()


class GrpcListener:
    """The gateway's listener for gRPC, if it has one. `open` imports the packages for gRPC."""

    def __init__(self, gateway: Gateway, applications: "Applications", is_ready: Callable[[], bool]) -> None:
        self._gateway = gateway
        self._applications = applications
        self._is_ready = is_ready
        self._server: PredictServer | None = None
        self.address = ""
        """host:port; empty if the listener is closed."""

    async def open(self, listen: str, *, shared: bool = False) -> int:
        """Listen at this address, with the gateway's certificate if there is one. If `shared` is true, other processes
        may listen there too. Returns the port. An empty address opens nothing, and the result is 0."""
        if not listen:
            return 0
        try:
            from pointsman.gateway.grpc.server import PredictServer
        except ImportError as error:
            raise PointsmanError(
                f"gateway.grpcListen is {listen}, which needs packages that are not installed ({error.name}); "
                "run: pip install 'pointsman[grpc]'"
            ) from error
        server = PredictServer(self._gateway, self._applications, self._is_ready, shared=shared)
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
        """Accept no new calls. Calls in flight have `grace_s` to end; a second call of `close` may shorten that
        time."""
        if self._server is not None:
            await self._server.stop(grace_s)


def _cannot_listen(setting: str, listen: str, error: OSError) -> CannotListen:
    # The event loop's message repeats the address in another form.
    why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    remedy = f"set {setting} to another address"
    if error.errno == errno.EADDRINUSE:
        remedy = f"stop the program that listens there, or {remedy}"
    return CannotListen(f"cannot listen on {listen}: {why}; {remedy}")


async def check_free(setting: str, listen: str) -> None:
    """Raise `CannotListen` if an address is in use; an empty address is ignored."""
    if listen:
        host, port = host_and_port(listen)
        loop = asyncio.get_running_loop()
        try:
            trial = await loop.create_server(asyncio.Protocol, host, port, reuse_address=True, start_serving=False)
        except OSError as error:
            raise _cannot_listen(setting, listen, error) from error
        trial.close()
        await trial.wait_closed()


def _tls(cert_file: str, key_file: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert_file, key_file)
    context.set_alpn_protocols(["http/1.1"])
    return context


def allow_many_files() -> int:
    """Raise the limit on open files as far as this process may. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, MANY_FILES):
        if wanted != resource.RLIM_INFINITY and soft != resource.RLIM_INFINITY and wanted > soft:
            with suppress(ValueError, OSError):  # some systems allow fewer than they report
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                soft = wanted
    return MANY_FILES if soft == resource.RLIM_INFINITY else soft


class ReservedAddress:
    """An address that several processes will listen on, each with its own socket. This socket accepts nothing."""

    def __init__(self, setting: str, listen: str) -> None:
        """Take the address. Port 0 stands for any free port. Raises `CannotListen`."""
        host, port = host_and_port(listen)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise _cannot_listen(setting, listen, error) from error
        shown = f"[{host}]" if ":" in host else host
        self.listen = f"{shown}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.close()

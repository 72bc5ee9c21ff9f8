"""A plane and its gateway in one process: what `pointsman up` runs.

Enters: a manifest. Leaves: a gateway that answers, until it is told to stop. The one rule: it stops in the order in
which requests go: first new requests, then those in flight, then the instances.
"""

import asyncio
import errno
import gc
import os
import resource
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import ManifestText
from pointsman.config.schema import GatewaySpec
from pointsman.errors import PointsmanError
from pointsman.gateway.admin import Admin
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.metrics import fault_metrics, scaling_metrics
from pointsman.gateway.pages import add_pages
from pointsman.gateway.pipelines.applications import Applications
from pointsman.gateway.records import RecordFile
from pointsman.parameters import host_and_port
from pointsman.runtimes.choosing import plane_on
from pointsman.runtimes.serving import LocalTraffic

if TYPE_CHECKING:
    from pointsman.gateway.grpc.server import PredictServer


MANY_FILES = 1 << 20
"""Enough, where the system sets no limit."""


class CannotListen(PointsmanError):
    """The address is not available."""


class Listeners:
    """Where a gateway listens for HTTP."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._servers: list[asyncio.AbstractServer] = []
        self.url = ""
        """Where clients send requests."""

    async def bind(self, settings: GatewaySpec) -> None:
        """Take the address. Raises `CannotListen`."""
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
        """Accept no new connections; those that are open stay."""
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


def _cannot_listen(setting: str, listen: str, error: OSError) -> CannotListen:
    # What the event loop says names the address again, in another form.
    why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    remedy = f"set {setting} to another address"
    if error.errno == errno.EADDRINUSE:
        remedy = f"stop the program that listens there, or {remedy}"
    return CannotListen(f"cannot listen on {listen}: {why}; {remedy}")


async def check_free(setting: str, listen: str) -> None:
    """Raise `CannotListen` if an address is in use; an empty one is none."""
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
    """Raise the limit on open files as far as this process may. The limit from then on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, MANY_FILES):
        if wanted != resource.RLIM_INFINITY and soft != resource.RLIM_INFINITY and wanted > soft:
            with suppress(ValueError, OSError):  # some systems allow less than they say
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                soft = wanted
    return MANY_FILES if soft == resource.RLIM_INFINITY else soft


class Embedded:
    """A plane with a gateway in front."""

    def __init__(self, state: Path | None, runtime: str = "local") -> None:
        """`state`: where the plane keeps its state; None: nowhere, it ends with this process."""
        self._loop = asyncio.get_running_loop()
        self._state = state
        self.gateway = Gateway(GatewaySpec(), self._loop)
        self.gateway.clients.max_files = allow_many_files()
        self.applications = Applications(self.gateway)
        self.plane = plane_on(runtime, state, LocalTraffic(self.gateway.traffic), self.gateway.tasks)
        self.plane.reconfigured.append(self._reconfigure)
        self._listeners = Listeners(self.gateway)
        self.grpc = GrpcListener(self.gateway, self.applications, lambda: self.plane.ready)
        self._stop_asked = asyncio.Event()
        self._hurry_asked = asyncio.Event()
        self.gateway.metrics.sources.append(lambda page: scaling_metrics(page, self.plane.scaling.each()))
        self.gateway.metrics.sources.append(
            lambda page: fault_metrics(page, self.gateway.tasks.failures(), self.plane.runtime.unsaved())
        )
        add_pages(self.gateway, lambda: self.plane.ready)
        Admin(self.gateway, self.plane, self.status, self.ask_to_stop, self.applications)

    @property
    def url(self) -> str:
        return self._listeners.url

    async def start(self, manifest: ManifestText | None) -> None:
        """Run a manifest; None: the one that was last in force."""
        try:
            await self.plane.start(manifest, self._take_addresses)
            self.gateway.admission.usage.open(self.plane.runtime.usage)
            settings = self.plane.documents.plan_in_force.gateway
            if self._state is not None:
                self.gateway.history.open(RecordFile(self._state, self._loop), settings.keep_records)
                self.gateway.history.configure(settings.max_record_bytes)
            await self._listeners.open()
            await self.plane.runtime.admin.listen(lambda: GatewayConnection(self.gateway, is_local=True))
            await self.grpc.open(settings.grpc_listen)
        except BaseException:
            await self.stop()
            raise
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not scan it again
        gc.set_threshold(20_000, 20, 100)

    async def _take_addresses(self, plan: PointsmanPlan) -> None:
        """Before anything is started: an address that is in use must leave nothing behind."""
        await self._listeners.bind(plan.gateway)
        await check_free("gateway.grpcListen", plan.gateway.grpc_listen)

    def ask_to_stop(self) -> None:
        """Stop soon; when called again, at once."""
        if self._stop_asked.is_set():
            self._hurry_asked.set()
        self._stop_asked.set()

    async def until_stopped(self) -> None:
        await self._stop_asked.wait()

    async def stop(self) -> int:
        """End new requests, then those in flight, then the instances. How many requests were cut off."""
        self._listeners.close()
        closing = self._loop.create_task(self.grpc.close(self.gateway.settings.drain_timeout))
        draining = self._loop.create_task(self.gateway.drain(self.gateway.settings.drain_timeout))
        hurrying = self._loop.create_task(self._hurry_asked.wait())
        try:
            await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
            hurrying.cancel()
            draining.cancel()
            cut_off = self.gateway.in_flight
            self.gateway.upstream.cut_off("the gateway is shutting down")
            await self.grpc.close(1.0)
            await closing
        finally:  # whatever failed, no process is left
            self.gateway.admission.usage.close()
            await self.gateway.history.close()
            await self.plane.stop()
            self.plane.runtime.admin.close()
            self.gateway.close()
        return cut_off

    def status(self) -> dict[str, Any]:
        """What runs, how it is doing, and where requests go."""
        status = self.plane.status()
        for deployment in status["deployments"]:
            deployment.update(self.gateway.metrics.summary(deployment["name"]))
        gateway = self.gateway
        problems = [*gateway.clients.problems(), *gateway.upstream.problems(time.monotonic())]
        problems += gateway.history.problems()
        return {
            **status,
            "problems": [*status["problems"], *problems],
            "url": self.url,
            "tenants": gateway.admission.report(),
        }

    def _reconfigure(self, plan: PointsmanPlan) -> None:
        self.gateway.configure(plan.gateway)
        self.applications.trust(self.plane.runtime.replicas)
        self.applications.configure(plan.applications)

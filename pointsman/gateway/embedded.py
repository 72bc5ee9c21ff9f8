"""A plane and its gateway in one process: what `pointsman up` runs.

Enters: a manifest and a state directory. Leaves: a gateway that answers, until it is told to stop. The one rule: it
ends in the order in which requests go: no new ones, then those under way, then the instances.
"""

import asyncio
import gc
import os
import socket
from pathlib import Path
from typing import Any

from pointsman.config.changes import Changes
from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import ManifestText
from pointsman.config.schema import GatewaySpec
from pointsman.errors import PointsmanError
from pointsman.gateway.admin import Admin
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.grpc import GrpcListener
from pointsman.gateway.metrics import scaling_metrics
from pointsman.gateway.pages import add_pages
from pointsman.gateway.pipelines.applications import Applications
from pointsman.gateway.server import Listeners
from pointsman.http.client import reachable
from pointsman.placement.fleet import Snapshot
from pointsman.runtimes.local import Plane
from pointsman.runtimes.local.shared import SOCKET


class Embedded:
    """A plane with a gateway in front."""

    def __init__(self, state: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self.gateway = Gateway(GatewaySpec(), self._loop)
        self.applications = Applications(self.gateway)
        self.plane = Plane(state, self.gateway.traffic)
        self.plane.reconfigured.append(self._reconfigure)
        self._listeners = Listeners(self.gateway)
        self.grpc = GrpcListener(self.gateway, self.applications, lambda: self.plane.ready)
        self._socket = self.plane.state / SOCKET
        self._is_bound = False
        """The socket is ours: as long as it is not, that of another plane may be there."""
        self._stop_asked = asyncio.Event()
        self._impatient = asyncio.Event()
        self.gateway.metrics.others.append(lambda page: scaling_metrics(page, self.plane.scaled()))
        add_pages(self.gateway, lambda: self.plane.ready)
        Admin(self.gateway, self, self.ask_to_stop, self.applications.told)

    @property
    def url(self) -> str:
        """Where clients send requests."""
        return self._listeners.url

    async def start(self, manifest: ManifestText | None) -> None:
        """Run a manifest; None: the one that was last in force in this state directory."""
        try:
            await self.plane.start(manifest)
            await self._listeners.open(self.plane.current.gateway)
            await self._listeners.open_local(self._bound())
            await self.grpc.open(self.plane.current.gateway.grpc_listen)
        except BaseException:
            await self.stop()
            raise
        gc.collect()
        gc.freeze()  # what is there now stays: it need not be looked through again and again
        gc.set_threshold(20_000, 20, 100)

    def ask_to_stop(self) -> None:
        """Stop soon; asked once more: at once."""
        if self._stop_asked.is_set():
            self._impatient.set()
        self._stop_asked.set()

    async def until_stopped(self) -> None:
        """Wait until somebody asks to stop."""
        await self._stop_asked.wait()

    async def stop(self) -> int:
        """No new requests, then those under way, then the instances. How many requests had to be cut off."""
        self._listeners.close(local=False)
        closing = self._loop.create_task(self.grpc.close(self.gateway.settings.drain_timeout))
        draining = self._loop.create_task(self.gateway.drain(self.gateway.settings.drain_timeout))
        hurrying = self._loop.create_task(self._impatient.wait())
        await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        draining.cancel()
        cut_off = self.gateway.in_flight
        self.gateway.cut_off("the gateway is shutting down")
        await self.grpc.close(1.0)
        await closing
        await self.plane.stop()
        self._listeners.close(local=True)
        self.gateway.close()
        if self._is_bound:
            self._socket.unlink(missing_ok=True)
        return cut_off

    # What the admin API offers

    def status(self) -> dict[str, Any]:
        """What runs, how it is doing, and where requests go."""
        status = self.plane.status()
        for deployment in status["deployments"]:
            deployment.update(self.gateway.metrics.told(deployment["name"]))
        return {**status, "url": self.url, "pid": os.getpid()}

    def fleet(self) -> Snapshot:
        """The workers that are known, and what instances have of them."""
        return self.plane.fleet()

    def plan(self, manifest: ManifestText) -> Changes:
        """What applying a manifest would change."""
        return self.plane.plan(manifest)

    async def apply(self, manifest: ManifestText) -> Changes:
        """Put a manifest in force."""
        return await self.plane.apply(manifest)

    async def deploy(self, document: ManifestText) -> Changes:
        """Put an application in force beside the manifest."""
        return await self.plane.deploy(document)

    async def rollback(self, name: str) -> Changes:
        """Put the version of an application in force that was before this one."""
        return await self.plane.rollback(name)

    async def delete(self, name: str) -> Changes:
        """Take an application out of force."""
        return await self.plane.delete(name)

    def application(self, name: str) -> str:
        """The document of an application in force."""
        return self.plane.application(name)

    def logs(self, instance_id: str, lines: int) -> str:
        """The last lines that an instance wrote."""
        return self.plane.logs(instance_id, lines)

    async def drain(self, instance_id: str) -> None:
        """Take an instance out of service; another takes its place first."""
        await self.plane.drain(instance_id)

    def scaling(self, deployment: str) -> dict[str, Any]:
        """How many instances there are of a deployment, and why."""
        return self.plane.scaling(deployment)

    def load_seen(self, deployment: str) -> dict[str, Any]:
        """What has come for a deployment so far, to rehearse policies on."""
        return self.plane.load_seen(deployment)

    async def scale(self, deployment: str, replicas: int | None, for_s: float | None, by: str) -> None:
        """So many instances of a deployment; None: as its policy says."""
        await self.plane.scale(deployment, replicas, for_s, by)

    def _reconfigure(self, plan: PointsmanPlan) -> None:
        self.gateway.configure(plan.gateway)
        self.applications.trust(self.plane.secret, self.plane.shm)
        self.applications.configure(plan.applications)

    def _bound(self) -> socket.socket:
        """The socket of the state directory. Only one plane is in it, so what an earlier one left behind may go."""
        self._socket.unlink(missing_ok=True)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            with reachable(self._socket) as path:
                bound.bind(path)
        except OSError as error:
            bound.close()
            raise PointsmanError(f"cannot make {self._socket}: {error.strerror}; try another --state") from error
        finally:
            os.umask(before)
        self._is_bound = True
        return bound

"""A plane and its gateway in one process: what `pointsman up` runs.

Enters: a manifest. Leaves: a gateway that answers, until it is told to stop. The one rule: it stops in the order in
which requests go: first new requests, then those in flight, then the instances.
"""

import asyncio
import gc
from pathlib import Path
from typing import Any

from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import ManifestText
from pointsman.config.schema import GatewaySpec
from pointsman.gateway.admin import Admin
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.listeners import GrpcListener, Listeners
from pointsman.gateway.metrics import scaling_metrics
from pointsman.gateway.pages import add_pages
from pointsman.gateway.pipelines.applications import Applications
from pointsman.runtimes.choosing import plane_on


class Embedded:
    """A plane with a gateway in front."""

    def __init__(self, state: Path | None, runtime: str = "local") -> None:
        """`state`: where the plane keeps its state; None: nowhere, it ends with this process."""
        self._loop = asyncio.get_running_loop()
        self.gateway = Gateway(GatewaySpec(), self._loop)
        self.applications = Applications(self.gateway)
        self.plane = plane_on(runtime, state, self.gateway.traffic)
        self.plane.reconfigured.append(self._reconfigure)
        self._listeners = Listeners(self.gateway)
        self.grpc = GrpcListener(self.gateway, self.applications, lambda: self.plane.ready)
        self._stop_asked = asyncio.Event()
        self._hurry_asked = asyncio.Event()
        self.gateway.metrics.sources.append(lambda page: scaling_metrics(page, self.plane.scaling.each()))
        add_pages(self.gateway, lambda: self.plane.ready)
        Admin(self.gateway, self.plane, self.status, self.ask_to_stop, self.applications.record_of)

    @property
    def url(self) -> str:
        """Where clients send requests."""
        return self._listeners.url

    async def start(self, manifest: ManifestText | None) -> None:
        """Run a manifest; None: the one that was last in force."""
        try:
            await self.plane.start(manifest)
            settings = self.plane.documents.plan_in_force.gateway
            await self._listeners.open(settings)
            await self.plane.runtime.admin.listen(lambda: GatewayConnection(self.gateway, is_local=True))
            await self.grpc.open(settings.grpc_listen)
        except BaseException:
            await self.stop()
            raise
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not scan it again
        gc.set_threshold(20_000, 20, 100)

    def ask_to_stop(self) -> None:
        """Stop soon; when called again, at once."""
        if self._stop_asked.is_set():
            self._hurry_asked.set()
        self._stop_asked.set()

    async def until_stopped(self) -> None:
        """Wait for `ask_to_stop`."""
        await self._stop_asked.wait()

    async def stop(self) -> int:
        """End new requests, then those in flight, then the instances. How many requests were cut off."""
        self._listeners.close()
        closing = self._loop.create_task(self.grpc.close(self.gateway.settings.drain_timeout))
        draining = self._loop.create_task(self.gateway.drain(self.gateway.settings.drain_timeout))
        hurrying = self._loop.create_task(self._hurry_asked.wait())
        await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        draining.cancel()
        cut_off = self.gateway.in_flight
        self.gateway.upstream.cut_off("the gateway is shutting down")
        await self.grpc.close(1.0)
        await closing
        await self.plane.stop()
        self.plane.runtime.admin.close()
        self.gateway.close()
        return cut_off

    def status(self) -> dict[str, Any]:
        """What runs, how it is doing, and where requests go."""
        status = self.plane.status()
        for deployment in status["deployments"]:
            deployment.update(self.gateway.metrics.summary(deployment["name"]))
        return {**status, "url": self.url}

    def _reconfigure(self, plan: PointsmanPlan) -> None:
        self.gateway.configure(plan.gateway)
        self.applications.trust(self.plane.runtime.replicas)
        self.applications.configure(plan.applications)

"""A plane and its gateway, as `pointsman up` runs them: in one process, or with gateways in separate processes.

Enters: a manifest. Leaves: a gateway that answers until it is stopped. The one rule: everything stops from front to
back: first new requests, then requests in flight, then the instances.
"""

import asyncio
import gc
import time
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import Any

from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import ManifestText
from pointsman.config.schema import GatewaySpec
from pointsman.errors import PointsmanError
from pointsman.gateway.admin import Admin
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.listeners import GrpcListener, Listeners, allow_many_files, check_free
from pointsman.gateway.metrics import fault_metrics, instance_metrics, scaling_metrics
from pointsman.gateway.owner import GatewayOwner, first_url, is_listening, summary_of
from pointsman.gateway.pages import add_pages
from pointsman.gateway.pipelines.applications import Applications
from pointsman.gateway.recording import RecordingAdmin
from pointsman.gateway.records import RecordFile
from pointsman.gateway.shadows import ShadowAdmin, ShadowsEverywhere
from pointsman.http.buffers import keep_freed_memory
from pointsman.runtimes.choosing import LOCAL, RuntimeChoice, plane_on
from pointsman.runtimes.gateways import SharedTraffic
from pointsman.runtimes.promotions import Promotions
from pointsman.runtimes.serving import LocalTraffic
from pointsman.runtimes.tasks import LoopClock

EVENT_FILE = "events.log"
MAX_EVENT_BYTES = 4 * 1024 * 1024


class Embedded:
    """A plane with a gateway in front."""

    def __init__(self, state: Path | None, runtime: RuntimeChoice = LOCAL) -> None:
        """`state` is the directory where the plane keeps its state; if None, the state is in memory only."""
        self._loop = asyncio.get_running_loop()
        self._state = state
        self._runtime = runtime.name
        self.gateway = Gateway(GatewaySpec(), self._loop)
        self.gateway.clients.max_files = allow_many_files()
        keep_freed_memory()
        self.applications = Applications(self.gateway)
        traffic = SharedTraffic(LocalTraffic(self.gateway.traffic), LoopClock(self._loop))
        self.gateways = GatewayOwner(self.gateway, self.applications, traffic)
        self.plane = plane_on(runtime, state, traffic, self.gateway.tasks)
        self.plane.reconfigured.append(self._reconfigure)
        self._listeners = Listeners(self.gateway)
        self.grpc = GrpcListener(self.gateway, self.applications, lambda: self.plane.ready)
        self._stop_asked = asyncio.Event()
        self._hurry_asked = asyncio.Event()
        self.gateway.metrics.sources.append(lambda page: scaling_metrics(page, self.plane.scaling.each()))
        release = version("pointsman")  # look it up now: that takes longer than rendering a page
        self.gateway.metrics.sources.append(
            lambda page: instance_metrics(page, self.plane.control.controller, self.plane.events.phases, release)
        )
        self.gateway.metrics.sources.append(
            lambda page: fault_metrics(page, self.gateway.tasks.failures(), self.plane.runtime.unsaved())
        )
        add_pages(self.gateway, lambda: self.plane.ready)
        ask, clock = self.gateways.inquiries.all, LoopClock(self._loop)
        shadows = ShadowsEverywhere(self.gateway, clock, ask)
        self.promotions = Promotions(
            self.plane.documents, clock, self.gateway.tasks, shadows.lease, lambda: token_hex(4)
        )
        recording = RecordingAdmin(self.gateway, clock, ask)
        candidates = ShadowAdmin(self.gateway, shadows, self.promotions)
        Admin(self.gateway, self.plane, self.status, self.ask_to_stop, self.applications, ask, candidates, recording)

    @property
    def url(self) -> str:
        return self.gateways.url or self._listeners.url or first_url(self.gateways.members.values())

    @property
    def in_flight(self) -> int:
        """Number of requests that were admitted and are not answered yet."""
        return self.gateway.in_flight + sum(one.last.in_flight for one in self.gateways.members.values())

    async def start(self, manifest: ManifestText | None) -> None:
        """Run a manifest. If it is None, run the manifest that was last in force."""
        try:
            await self.plane.start(manifest, self._take_addresses)
            self.gateway.admission.usage.open(self.plane.runtime.usage)
            settings = self.plane.documents.plan_in_force.gateway
            if self._state is not None:
                self.gateway.history.open(RecordFile(self._state, self._loop), settings.keep_records)
                self.gateway.history.configure(settings.max_record_bytes)
                self.plane.events.open(RecordFile(self._state, self._loop, EVENT_FILE, MAX_EVENT_BYTES))
            await self._listeners.open()
            await self.plane.runtime.admin.listen(
                lambda: GatewayConnection(self.gateway, is_local=True),
                lambda: GatewayConnection(self.gateway, is_replica=True),
            )
            if not self.gateways.members:
                await self.grpc.open(settings.grpc_listen)
            await self.gateways.open(self.plane)
        except BaseException:
            await self.stop()
            raise
        gc.collect()
        gc.freeze()  # these objects are long-lived: the collector need not scan them again
        gc.set_threshold(20_000, 20, 100)

    async def _take_addresses(self, plan: PointsmanPlan) -> None:
        """Take the addresses before anything is started, so that nothing is left running if an address is in use."""
        settings, is_local = plan.gateway, self._runtime == LOCAL.name
        if settings.nodes and is_local:
            raise PointsmanError("gateway.nodes names nodes of a cluster; remove it, or use: --runtime ray")
        if settings.processes > 1 and not settings.nodes and not is_local:
            raise PointsmanError(
                f"gateway.processes is {settings.processes}; on a cluster, also name the nodes "
                "that have this many gateways each, in gateway.nodes"
            )
        if settings.processes > 1 or settings.nodes:
            self.gateways.reserve(settings, self.plane)
            return
        await self._listeners.bind(plan.gateway)
        await check_free("gateway.grpcListen", plan.gateway.grpc_listen)

    def ask_to_stop(self) -> None:
        """Stop soon. A second call stops at once."""
        if self._stop_asked.is_set():
            self._hurry_asked.set()
        self._stop_asked.set()

    async def until_stopped(self) -> None:
        await self._stop_asked.wait()

    async def stop(self) -> int:
        """Refuse new requests, finish those in flight, then stop the instances. Returns how many requests were cut
        off."""
        self._listeners.close()
        closing = self._loop.create_task(self.grpc.close(self.gateway.settings.drain_timeout))
        hurrying = self._loop.create_task(self._hurry_asked.wait())
        try:
            await self.gateways.stop(self.gateway.settings.drain_timeout, self._hurry_asked)
            draining = self._loop.create_task(self.gateway.drain(self.gateway.settings.drain_timeout))
            await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
            hurrying.cancel()
            draining.cancel()
            cut_off = self.gateway.in_flight + self.gateways.links.cut_off
            self.gateway.upstream.cut_off("the gateway is shutting down")
            await self.grpc.close(1.0)
            await closing
        finally:  # even after an error, no process may be left running
            self.gateway.admission.usage.close()
            await self.gateway.history.close()
            await self.plane.stop()
            await self.plane.events.close()
            self.plane.runtime.admin.close()
            self.gateways.close()
            self.gateway.close()
        return cut_off

    def status(self) -> dict[str, Any]:
        """What runs, in which state it is, and where requests go."""
        status, members = self.plane.status(), self.gateways.members.values()
        for deployment in status["deployments"]:
            name = deployment["name"]
            deployment.update(
                summary_of([self.gateway.metrics.totals(name), *self.gateways.pages.totals(name, members)])
            )
        gateway = self.gateway
        problems = [*gateway.clients.problems(), *gateway.upstream.problems(time.monotonic())]
        problems += [*gateway.history.problems(), *self.plane.events.problems()]
        return {
            **status,
            "ready": status["ready"] and is_listening(members),
            "problems": [*status["problems"], *(one.as_dict() for one in problems)],
            "url": self.url,
            "tenants": gateway.tenants(),
            "gateways": [one.status() for one in members],
            "promotions": [one.as_dict(time.monotonic()) for one in self.promotions.running()],
        }

    def _reconfigure(self, plan: PointsmanPlan) -> None:
        self.gateway.configure(plan.gateway)
        self.gateways.configure(plan)
        replicas = self.plane.runtime.replicas
        self.applications.trust(replicas.secret, replicas.memory)
        self.applications.configure(plan.applications)

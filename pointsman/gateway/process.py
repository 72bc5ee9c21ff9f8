"""A gateway in its own process, `python -m pointsman.gateway.process NAME`. A plane starts the gateway, which then
follows the plane.

Enters: requests from clients, and messages from the plane. Leaves: answers, and reports to the plane. The one rule: the
gateway serves with the last known state. If the plane is gone, the gateway continues and looks for the next plane. In
that time, only the runtime that started the gateway ends it.

The gateway reads these environment variables: POINTSMAN_SECRET; POINTSMAN_SOCKET or, on another machine,
POINTSMAN_GATEWAY, a file with the plane's address, which changes with the plane; POINTSMAN_HOST, the address of the
gateway's machine; and POINTSMAN_SHM, the folder for large values, if there is one. Records and usage go to the plane;
pages about the plane as a whole (metrics, the admin API) come from the plane.
"""

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import load_revision
from pointsman.config.schema import EACH_NODE, GatewaySpec
from pointsman.errors import PointsmanError
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.listeners import CannotListen, GrpcListener, Listeners, allow_many_files
from pointsman.gateway.lookup import newest_at, record_at
from pointsman.gateway.metrics import fault_metrics
from pointsman.gateway.pages import add_pages
from pointsman.gateway.pipelines.applications import SECRET, Applications
from pointsman.gateway.plane_pages import PlanePages
from pointsman.gateway.shadows import shadow_answer
from pointsman.gateway.shares import GrantedTenants, divided
from pointsman.http.buffers import keep_freed_memory
from pointsman.http.client import NoResponse, StreamedResponse
from pointsman.http.heads import HttpRequest
from pointsman.reasons import Reason
from pointsman.replica.handles import LOOPBACK, PlaneAddress
from pointsman.runtimes.interface import Unsaved
from pointsman.runtimes.link import (
    BEAT_S,
    SHARE_S,
    Frames,
    GatewayMessage,
    Grants,
    Inquiry,
    InquiryAnswer,
    Joining,
    LinkReport,
    Listens,
    PlaneMessage,
    Readiness,
    RecordLines,
    Stopped,
    StopServing,
    UseDocuments,
    frame,
)
from pointsman.runtimes.linked import LinkedTraffic
from pointsman.runtimes.recording import Recorder, recording_answer
from pointsman.runtimes.shadowing import Shadows
from pointsman.runtimes.tasks import LoopClock
from pointsman.runtimes.traffic import scheduling_problems
from pointsman.wire import FilesOfNodes
from pointsman.wire.shared_memory import BufferFiles

LINK, REPORTS, PAGES = "/gateways/link", "/gateways/reports", b"/gateways/pages"
"""The plane's paths: for connections, for reports, and for pages that the plane renders for clients of gateways."""
WATCH_S, SILENT_S = 0.25, 5.0
"""How often the link to a plane is checked, and the maximum silence of a plane on another machine. A plane sends ten
messages a second."""
RETRY_S = 0.05
"""Time between attempts to reach a plane that is gone."""
CONNECT_S = 10.0
"""Time limit for a plane to accept the connection."""
REPORT_S = 10.0
"""Time limit for the plane's answer to a report."""
TERM_S = 3.0
"""Time limit for requests in flight to end after SIGTERM."""
PASSED_ON = (b"authorization", b"x-api-key", b"x-pointsman-author", b"accept", b"last-event-id")
"""Headers of a client's request that the plane needs for its answer."""
MAX_LINES_BYTES = 4 * 1024 * 1024
"""Maximum total size in bytes of records that wait for a plane; older records are dropped."""


class PlaneLink:
    """The connection to the plane. If the plane is gone, the link tries to connect until there is a new one."""

    def __init__(self, name: str, plane: PlaneAddress, secret: str) -> None:
        self.name = name
        self.is_connected = False
        self._plane = plane
        self._limit: asyncio.Timeout | None = None
        """The timeout whose expiry ends the connection."""
        self._heard_at = 0.0
        self._headers = f"{SECRET.decode()}: {secret}\r\nx-pointsman-gateway: {name}\r\n"
        self._untold: list[GatewayMessage] = []
        self._news = asyncio.Event()

    def tell(self, message: GatewayMessage) -> None:
        """Send a message soon. If there is no plane, keep the message only if the next plane needs it."""
        self.tell_later(message)
        if self.is_connected:
            self._news.set()

    def tell_later(self, message: GatewayMessage) -> None:
        """Send a message together with the next message, or at the latest with the next report."""
        self._untold.append(message)

    async def follow(self, process: "GatewayProcess") -> None:
        """Connect, and carry out the plane's messages, forever."""
        while True:
            try:
                await self._connection(process)
            except (NoResponse, msgspec.MsgspecError, OSError, ValueError, TimeoutError):
                pass
            finally:
                self.is_connected, self._limit = False, None
            await asyncio.sleep(RETRY_S)

    async def _connection(self, process: "GatewayProcess") -> None:
        tenants = process.granted.usage(whole=True)
        hello = frame(Joining(self.name, tenants, process.url))[4:]
        began = False
        try:
            client = self._plane.client()
            async with (
                asyncio.timeout(CONNECT_S) as limit,
                client.stream("POST", LINK, hello, self._headers) as response,
            ):
                if response.status != 200:
                    raise NoResponse(f"the plane answered {response.status}")
                began, frames = True, Frames()
                process.connected()
                self.is_connected, self._heard_at, self._limit = True, time.monotonic(), limit
                limit.reschedule(None)
                async for piece in response.pieces():
                    for message in frames.plane(piece):
                        await process.handle(message)
                    self._heard_at = time.monotonic()
        finally:
            if not began:
                process.granted.not_told(tenants)

    def watch(self) -> None:
        """Disconnect from a plane that was replaced, or from a plane on another machine that has become silent."""
        if self._limit is None:
            return
        is_replaced = False
        with suppress(OSError):  # if the file is missing, keep the last known address
            is_replaced = self._plane.named() != self._plane.at
        is_silent = self._plane.is_file and time.monotonic() - self._heard_at > SILENT_S
        if is_replaced or is_silent:
            self._limit.reschedule(asyncio.get_running_loop().time())
            self._limit = None

    async def report(self, process: "GatewayProcess") -> None:
        """Send pending reports in order, forever."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self.flush(process)

    async def flush(self, process: "GatewayProcess") -> None:
        told, self._untold = self._untold, []
        if not told:
            return
        try:
            body = b"".join(map(frame, told))
            client = self._plane.client()
            answer = await client.fetch("POST", REPORTS, body, timeout_s=REPORT_S, headers=self._headers)
            if answer.status != 200:
                raise NoResponse(f"the plane answered {answer.status}")
        except (NoResponse, OSError, ValueError):
            self._keep(told, process)

    def _keep(self, told: Iterable[GatewayMessage], process: "GatewayProcess") -> None:
        """Keep the messages that the next plane needs: usage and records. The next plane asks for everything else."""
        lines: list[bytes] = []
        for message in told:
            if isinstance(message, LinkReport):
                process.granted.not_told(message.tenants)
            elif isinstance(message, RecordLines):
                lines += message.lines
        while sum(map(len, lines)) > MAX_LINES_BYTES:
            del lines[: len(lines) // 2 + 1]
        if lines:
            self._untold.insert(0, RecordLines(lines))

    def drop_stale(self, process: "GatewayProcess") -> None:
        """Before a connection to a new plane, drop the messages that only the previous plane could use."""
        told, self._untold = self._untold, []
        self._keep(told, process)

    @asynccontextmanager
    async def ask(self, http: HttpRequest) -> AsyncIterator[StreamedResponse]:
        """Send a client's request to the plane, with the client's key, and open the plane's answer. Raises
        `NoResponse`."""
        path = (PAGES + http.path).decode("latin-1") + (f"?{http.query.decode('latin-1')}" if http.query else "")
        headers = self._headers + "".join(
            f"{name.decode()}: {http.headers[name].decode('latin-1')}\r\n" for name in PASSED_ON if name in http.headers
        )
        try:
            client = self._plane.client()
        except (OSError, ValueError) as error:
            raise NoResponse(f"the plane is not known: {error}") from error
        async with client.stream(http.method.decode("latin-1"), path, bytes(http.body), headers) as response:
            yield response


class LinkedRecords:
    """`RecordSink`: the plane stores the records of all gateways."""

    def __init__(self, link: PlaneLink) -> None:
        self.max_bytes = 0
        self._link = link

    def lines(self, limit: int) -> list[bytes]:
        return []

    def append(self, lines: Iterable[bytes]) -> None:
        told = list(lines)
        if told:
            self._link.tell_later(RecordLines(told))

    def problems(self) -> list[Reason]:
        return []

    async def close(self) -> None: ...


class GatewayProcess:
    """The gateway and its link to the plane; carries out the plane's messages."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        secret, file = environment.get("POINTSMAN_SECRET", ""), environment.get("POINTSMAN_GATEWAY", "")
        address = file or environment.get("POINTSMAN_SOCKET", "")
        if not secret or not address:
            raise PointsmanError(
                "POINTSMAN_SECRET, and POINTSMAN_SOCKET or POINTSMAN_GATEWAY, must say where the plane is"
            )
        self._host = environment.get("POINTSMAN_HOST", "")
        self.gateway = gateway = Gateway(GatewaySpec(), self._loop)
        gateway.clients.max_files = allow_many_files()
        keep_freed_memory()
        self.granted = GrantedTenants()
        gateway.admission.tenants = self.granted.tenants
        self.applications = Applications(gateway)
        folder, on_nodes = environment.get("POINTSMAN_SHM", ""), environment.get("POINTSMAN_MEMORY")
        self.applications.trust(secret, FilesOfNodes(secret) if on_nodes else BufferFiles(Path(folder)))
        plane = PlaneAddress(Path(address), is_file=bool(file), connect_timeout_s=1.0)
        self.link = PlaneLink(name, plane, secret)
        clock = LoopClock(self._loop)
        self.traffic = LinkedTraffic(gateway.traffic, clock, self.link.tell)
        self.shadows, self.recorder = Shadows(gateway.traffic, clock), Recorder(gateway.traffic, clock)
        gateway.traffic.hooks.failed = gateway.tasks.failed
        self._listeners: Listeners | None = None
        self._for_replicas: asyncio.Server | None = None
        self._grpc = GrpcListener(gateway, self.applications, lambda: self._is_ready)
        self._is_ready = False
        self._listen = ""
        self._reported_at = 0.0
        self._stopped = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        add_pages(gateway, lambda: self._is_ready)
        PlanePages(gateway, self.link.ask)
        gateway.metrics.sources[:] = [lambda page: fault_metrics(page, gateway.tasks.failures(), Unsaved(0, 0))]
        gateway.history.gateway = name
        gateway.history.open(LinkedRecords(self.link), 0)

    @property
    def url(self) -> str:
        return "" if self._listeners is None else self._listeners.url

    async def run(self) -> None:
        tasks = self.gateway.tasks
        tasks.keep("link to the plane", lambda: self.link.follow(self))
        tasks.keep("reports to the plane", lambda: self.link.report(self))
        tasks.every("report", SHARE_S, self._report)
        tasks.every("plane watch", WATCH_S, self.link.watch)
        self._loop.add_signal_handler(signal.SIGTERM, lambda: self.stop(TERM_S))
        await self._stopped.wait()
        self.gateway.close()

    # The plane

    def connected(self) -> None:
        self.link.drop_stale(self)
        self.traffic.connected()
        self._reported_at = 0.0

    async def handle(self, message: PlaneMessage) -> None:
        match message:
            case UseDocuments():
                await self._use(message)
            case Grants():
                self.granted.granted(message.tenants, time.monotonic())
            case Readiness():
                self._is_ready = message.ready
            case Inquiry():
                self.link.tell(InquiryAnswer(message.number, msgspec.json.encode(_answer(self, message), enc_hook=str)))
            case StopServing():
                self.stop(message.within_s)
            case _:
                self.traffic.handle(message)

    async def _use(self, wanted: UseDocuments) -> None:
        problem = ""
        try:
            plan = await self._loop.run_in_executor(None, _plan_of, wanted)
            listen = self._address(wanted.listen)
            settings = msgspec.structs.replace(divided(plan.gateway, wanted.processes), listen=listen)
            self.gateway.configure(settings)
            self.applications.configure(plan.applications)
            self.gateway.traffic.configure([one.among(wanted.processes) for one in plan.deployments])
            self.traffic.observe()
            await self._listen_at(settings, self._address(wanted.grpc_listen))
        except (PointsmanError, OSError) as error:  # the gateway continues with its present documents
            problem = str(error)
        self.link.tell(Listens(self.url, self._grpc.address, problem, self._calls))

    def _address(self, listen: str) -> str:
        """The address at which this gateway listens: `node` stands for the machine that it runs on."""
        host, _, port = listen.rpartition(":")
        return f"{self._host}:{port}" if host == EACH_NODE else listen

    @property
    def _calls(self) -> str:
        """The address that replicas call; every call needs the replicas' secret."""
        if self._for_replicas is None:
            return ""
        host, port = self._for_replicas.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _listen_at(self, settings: GatewaySpec, grpc_listen: str) -> None:
        """Raises `CannotListen`."""
        if self._listen != settings.listen:
            before, listeners = self._listeners, Listeners(self.gateway)
            await listeners.bind(settings, shared=True)
            await listeners.open()
            self._listeners, self._listen = listeners, settings.listen
            if before is not None:
                before.close()
        if self._for_replicas is None:
            self._for_replicas = await self._loop.create_server(
                lambda: GatewayConnection(self.gateway, is_replica=True), self._host or LOOPBACK, 0
            )
        if grpc_listen and not self._grpc.address:
            await self._grpc.open(grpc_listen, shared=True)
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 100)

    def _report(self) -> None:
        """Report changes. If there are none, report that this gateway is alive."""
        if not self.link.is_connected:
            return
        now, gateway = time.monotonic(), self.gateway
        lanes, endings, news = self.traffic.report()
        tenants, is_beat = self.granted.usage(), now - self._reported_at >= BEAT_S
        if not (lanes or endings or news or tenants or is_beat):
            return
        if is_beat:
            self._reported_at = now
        totals = {name: gateway.metrics.totals(name) for name in gateway.metrics.names()}
        internal = {lane.name for lane in gateway.traffic.all_lanes() if lane.plan.internal}
        self.link.tell(
            LinkReport(
                now,
                lanes,
                endings,
                news,
                tenants,
                len(gateway.clients),
                gateway.in_flight,
                sum(answered for name, (answered, *_) in totals.items() if name not in internal),
                _problems(gateway, now) if is_beat else None,
                totals,
            )
        )

    # The end

    def stop(self, within_s: float) -> None:
        """Accept no new requests, finish those in flight, and end. A second call ends the gateway at once."""
        if self._stopping is not None:
            self._stopping.cancel()
            within_s = 0.0
        self._stopping = self._loop.create_task(self._stop(within_s))

    async def _stop(self, within_s: float) -> None:
        if self._listeners is not None:
            self._listeners.close()
        if self._for_replicas is not None:
            self._for_replicas.close()
        closing = self._loop.create_task(self._grpc.close(within_s))
        cut_off = await self.gateway.drain(within_s)
        self.gateway.upstream.cut_off("the gateway is shutting down")
        await self._grpc.close(1.0)
        await closing
        self.gateway.outbox.flush()
        self.gateway.history.collect()
        self._reported_at = 0.0
        self._report()
        self.link.tell(Stopped(cut_off))
        await self.link.flush(self)
        self._stopped.set()


def _problems(gateway: Gateway, now: float) -> list[Reason]:
    name = gateway.history.gateway.removeprefix("@")
    own = [*gateway.clients.problems(), *gateway.upstream.problems(now)]
    tasks = [one.having(gateway=name) for one in gateway.tasks.problems()]  # the plane's tasks have the same names
    return [one.plain() for one in (*own, *tasks, *scheduling_problems(gateway.traffic.lanes.values()))]


def _answer(process: GatewayProcess, asked: Inquiry) -> Any:
    gateway, applications = process.gateway, process.applications
    match asked.about:
        case "metrics":
            return gateway.metrics.text(gateway)
        case "request":
            return record_at(gateway, applications, asked.details["id"])
        case "requests":
            return newest_at(gateway, applications, asked.details, int(asked.details["limit"]))
        case "shadow" | "canary":
            return shadow_answer(process.shadows, asked.about, asked.details)
        case "recording":
            return recording_answer(process.recorder, asked.details)
    return None


def _plan_of(wanted: UseDocuments) -> PointsmanPlan:
    """Build a plan, on a thread, because it may import the user's modules. Raises `ConfigError`."""
    return load_revision(wanted.manifest, wanted.applications, was_in_force=True).plan()


async def _serve(name: str) -> None:
    await GatewayProcess(name, os.environ).run()


def main() -> int:
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the plane only
    try:
        uvloop.run(_serve(sys.argv[1]))
    except (CannotListen, PointsmanError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

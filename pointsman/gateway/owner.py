"""The plane's side of several gateways: their links, limits, metrics and answers.

Enters: connections from gateways (`gateway/process.py`), and inquiries about all gateways. Leaves: documents, instances
and grants for each gateway, and answers for all gateways together. The one rule: a counter that was shown never falls.
When a process ends, its last known counts stay in the sum.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from pointsman.config.plan import PointsmanPlan
from pointsman.config.schema import GatewaySpec
from pointsman.control.events import ControllerEvent
from pointsman.errors import PointsmanError
from pointsman.gateway.admission import NotAdmitted
from pointsman.gateway.connection import GatewayConnection, PendingAnswer
from pointsman.gateway.gateway import READ, WRITE, Gateway, GatewayPage
from pointsman.gateway.listeners import ReservedAddress
from pointsman.gateway.metrics import Labels, Page, counters_of, merged
from pointsman.gateway.pages import PROMETHEUS, SharedPage
from pointsman.gateway.pipelines.applications import Applications
from pointsman.gateway.process import LINK, PAGES, REPORTS
from pointsman.gateway.records import recall, store
from pointsman.gateway.shares import Bank, GrantedTenants
from pointsman.gateway.tenants import Tenant
from pointsman.http.heads import HttpRequest
from pointsman.http.server import ResponseStream
from pointsman.runtimes.gateway_processes import GatewayChange, GatewayProcesses, gateway_places
from pointsman.runtimes.gateways import LinkedGateway, SharedTraffic
from pointsman.runtimes.interface import PlaneOperations
from pointsman.runtimes.link import (
    SHARE_S,
    Frames,
    GatewayMessage,
    Grants,
    Inquiry,
    InquiryAnswer,
    LinkReport,
    Listens,
    PlaneMessage,
    Readiness,
    RecordLines,
    Stopped,
    StopServing,
    UseDocuments,
    frame,
    joining,
)

METRICS, ADMIN = b"/metrics", b"/admin/v1/"
COMMAND = (sys.executable, "-P", "-m", "pointsman.gateway.process")
OPEN_S = 60.0
"""Time limit until all gateways listen."""
ADOPT_S = 5.0
"""The same time limit, if some gateways serve already."""
ANSWER_S = 2.0
"""Time limit for a gateway's answer to a question."""
HUNG_S = 20.0
"""If a connected gateway has not reported for this long, it is stopped and started again."""
OVERTIME_S = 5.0
"""If gateways have not ended this long after their time limit, the runtime ends them."""
RECALL_S = 1.0
"""Maximum time to wait until the last records from an ended gateway are in the file."""


class LinkStream:
    """The connection of a gateway, for messages from the plane."""

    def __init__(self, client: GatewayConnection, lost: Callable[["LinkStream"], None]) -> None:
        self._client: GatewayConnection | None = client
        self._stream = ResponseStream(client, b"content-type: application/octet-stream\r\n")
        self._lost = lost
        client.serving = self

    def send(self, message: PlaneMessage) -> None:
        if self._client is not None:
            self._stream.write(frame(message))

    def cut(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.abort()

    def abandon(self) -> None:
        self._client = None
        self._lost(self)

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Inquiries:
    """Questions to gateways, and their answers."""

    def __init__(self, members: Mapping[str, LinkedGateway]) -> None:
        self._members = members
        self._open: dict[int, tuple[str, asyncio.Future[bytes]]] = {}
        self._count = 0

    async def all(self, about: str, details: Mapping[str, str]) -> list[Any]:
        """The answers that arrive in time."""
        return list((await self.by_name(about, details)).values())

    async def by_name(self, about: str, details: Mapping[str, str]) -> dict[str, Any]:
        loop, asked = asyncio.get_running_loop(), {}
        for one in self._members.values():
            if one.send is not None:
                self._count += 1
                asked[one.name] = loop.create_future()
                self._open[self._count] = one.name, asked[one.name]
                one.send(Inquiry(self._count, about, dict(details)))
        if asked:
            await asyncio.wait(asked.values(), timeout=ANSWER_S)
        self._open = {key: each for key, each in self._open.items() if each[1] not in asked.values()}
        done = {name: one for name, one in asked.items() if one.done() and not one.cancelled()}
        return {name: msgspec.json.decode(one.result()) for name, one in done.items()}

    def answered(self, message: InquiryAnswer) -> None:
        _, answer = self._open.get(message.number, ("", None))
        if answer is not None and not answer.done():
            answer.set_result(message.body)

    def ended(self, gateway: str) -> None:
        """Note that a gateway will no longer answer."""
        for name, answer in self._open.values():
            if name == gateway and not answer.done():
                answer.cancel()


class GatewayLinks:
    """The connections of gateways."""

    def __init__(self, gateway: Gateway, traffic: SharedTraffic, inquiries: Inquiries) -> None:
        self.bank: Bank | None = None
        """None if there is only one gateway."""
        self.welcome: Callable[[], Sequence[PlaneMessage]] = lambda: ()
        """Returns the first messages for a newly connected gateway."""
        self.changed = asyncio.Event()
        """Set when a gateway has ended or has begun to listen."""
        self.announce: Callable[[], None] = lambda: None
        """Called when the address at which a gateway accepts calls from replicas has changed."""
        self.cut_off = 0
        """Number of requests that gateways cut off when they stopped."""
        self.seen_at: dict[str, float] = {}
        self._gateway = gateway
        self._traffic = traffic
        self._members = traffic.group.members
        self._inquiries = inquiries
        self._streams: dict[str, LinkStream] = {}

    def link(self, client: GatewayConnection, http: HttpRequest, tenant: Tenant | None) -> None:
        try:
            hello = joining(bytes(http.body))
            one = self._members[hello.gateway]
        except (msgspec.MsgspecError, KeyError):
            client.error(404, "this plane has no such gateway", "not_found")
            return
        self.cut(one.name)
        stream = self._streams[one.name] = LinkStream(client, self._lost)
        self.seen_at[one.name] = time.monotonic()
        if self.bank is not None:
            self.bank.joined(one.name, hello.tenants)
        for message in self.welcome():
            stream.send(message)
        self._traffic.connected(one, stream.send)

    def cut(self, name: str) -> None:
        """Close the connection of a gateway, which connects again if it can."""
        stream = self._streams.pop(name, None)
        self._members[name].send = None
        if stream is not None:
            stream.cut()

    def page(self, client: GatewayConnection, http: HttpRequest, tenant: Tenant | None) -> None:
        """Serve a page about the plane as a whole to a client of a gateway. The client needs the same key as at the
        plane itself."""
        pages, http.path = self._gateway.pages, http.path.removeprefix(PAGES)
        found = pages.exact[METRICS] if http.path == METRICS else pages.trees[ADMIN]
        if http.path != METRICS and not http.path.startswith(ADMIN):
            client.error(404, "gateways ask for other pages", "not_found")
            return
        try:
            tenant = found.check(http, client)
        except NotAdmitted as error:
            self._gateway.history.turn_away(client, http, error)
            return
        found.serve(client, http, tenant)

    def _lost(self, stream: LinkStream) -> None:
        for name in [name for name, known in self._streams.items() if known is stream]:
            del self._streams[name]
            self._members[name].send = None

    def reports(self, client: GatewayConnection, http: HttpRequest, tenant: Tenant | None) -> None:
        one = self._members.get(http.headers.get(b"x-pointsman-gateway", b"").decode("latin-1"))
        try:
            messages = Frames().gateway(bytes(http.body))
        except msgspec.MsgspecError as error:
            client.error(400, f"this is not a report: {error}", "invalid_body")
            return
        if one is not None:
            self.seen_at[one.name] = time.monotonic()
            for message in messages:
                self._gateway.tasks.attempt("gateway reports", self._take_in, one, message)
        client.answer(200, b"{}")

    def _take_in(self, one: LinkedGateway, message: GatewayMessage) -> None:
        match message:
            case Listens():
                one.url, one.problem = message.url, message.problem
                one.calls = "" if one.problem else message.calls
                self.announce()
                self.changed.set()
            case RecordLines():
                store(self._gateway.history, message.lines)
            case InquiryAnswer():
                self._inquiries.answered(message)
            case Stopped():
                self.cut_off += message.cut_off
            case _:
                if isinstance(message, LinkReport) and self.bank is not None:
                    self.bank.used(one.name, message.tenants)
                self._traffic.handle(one, message)


class GatewayOwner:
    """The gateways of a plane, if it has several."""

    def __init__(self, gateway: Gateway, applications: Applications, traffic: SharedTraffic) -> None:
        self.traffic = traffic
        self.members = traffic.group.members
        self.inquiries = Inquiries(self.members)
        self.links = GatewayLinks(gateway, traffic, self.inquiries)
        self.pages = MergedMetrics(gateway, self.inquiries)
        self.url = ""
        """The URL of all gateways. Empty if the only gateway is in this process, or if each gateway has its own
        address."""
        self._granted = GrantedTenants()
        """The limits that are granted to this process, for requests from replicas."""
        self._gateway = gateway
        self._applications = applications
        self._plane: PlaneOperations | None = None
        self._processes: GatewayProcesses | None = None
        self._early: list[ControllerEvent] = []
        """Process events that came before the owner was ready for them."""
        self._addresses: list[ReservedAddress] = []
        self._listen = "", ""
        """The addresses where gateways listen, for HTTP and for gRPC."""
        self._ready: bool | None = None
        self._beat_at = time.monotonic()
        traffic.process_told = self._process_told
        traffic.configured = self._tell_documents
        self.links.welcome = lambda: (self._documents(), Readiness(self._plane is not None and self._plane.ready))

    # Beginning and end

    def reserve(self, settings: GatewaySpec, plane: PlaneOperations) -> None:
        """Take the addresses before anything is started. Addresses on other machines are not taken. Raises
        `CannotListen`."""
        gateway, self._plane = self._gateway, plane
        self._listen = settings.listen, settings.grpc_listen
        for field, listen in (("listen", settings.listen), ("grpcListen", settings.grpc_listen)):
            if listen and not settings.nodes:
                self._addresses.append(ReservedAddress(f"gateway.{field}", listen))
        if self._addresses:
            listen, *grpc = [address.listen for address in self._addresses]
            self.url = f"{'http' if settings.tls is None else 'https'}://{listen}"
            self._listen = listen, grpc[0] if grpc else ""
        bank = self.links.bank = Bank(gateway.admission.usage, time.monotonic)
        bank.joined("", {})
        gateway.admission.tenants = self._granted.tenants
        gateway.tenants = lambda: bank.report(time.time())
        places = gateway_places(settings.processes, settings.nodes)
        self.members.update((name, LinkedGateway(name, worker)) for name, worker in places.items())
        pages, check = gateway.pages, self._applications.replica_calls.check
        pages.exact[LINK.encode()] = GatewayPage(self.links.link, check, WRITE)
        pages.exact[REPORTS.encode()] = GatewayPage(self.links.reports, check, WRITE)
        pages.trees[PAGES] = GatewayPage(self.links.page, check)
        pages.of_replicas += [pages.exact[LINK.encode()], pages.exact[REPORTS.encode()], pages.trees[PAGES]]
        pages.exact[METRICS] = GatewayPage(self.pages.serve, gateway.admission.page_reader, READ)
        gateway.metrics.sources.append(lambda page: process_metrics(page, self.members.values()))

    async def open(self, plane: PlaneOperations) -> None:
        """Start or adopt the gateways. Wait until every gateway with a present worker listens. Raises
        `PointsmanError`."""
        tasks, clock = self._gateway.tasks, plane.runtime.clock
        self._processes = GatewayProcesses(plane.runtime, clock, tasks, COMMAND, self._process_changed)
        early, self._early = self._early, []
        self._processes.adopt(self.members, early)
        if not self.members:
            plane.runtime.replicas.reach_at(())
            return
        reach_at, members = plane.runtime.replicas.reach_at, self.members.values()
        self.links.announce = lambda: reach_at([one.calls for one in members if one.calls])
        tasks.every("gateways", SHARE_S, self._beat)
        plane.listeners.append(self._tell_readiness)
        adopted = any(one.process for one in self.members.values())
        try:
            async with asyncio.timeout(ADOPT_S if adopted else OPEN_S):
                while not all(one.url or one.unstarted or one.problem for one in self.members.values()):
                    self.links.changed.clear()
                    await self.links.changed.wait()
            wrong = [one.problem for one in self.members.values() if one.problem]
        except TimeoutError:
            silent = ", ".join(name for name, one in self.members.items() if not one.url)
            wrong = [f"these gateways do not listen after {OPEN_S:g} s: {silent}; see their logs"]
        if wrong and not adopted:  # otherwise gateways serve clients, and `status` shows the problem
            raise PointsmanError(wrong[0])

    async def stop(self, within_s: float, hurry: asyncio.Event) -> None:
        """Let all gateways refuse new requests and finish those in flight, and wait until their processes end."""
        if self._processes is None:
            return
        self._processes.stop()
        self.traffic.group.send(StopServing(within_s))
        for one in self.members.values():
            if one.send is None and one.process:
                self._processes.kill(one)
        hurrying = asyncio.get_running_loop().create_task(hurry.wait())
        hurrying.add_done_callback(lambda task: None if task.cancelled() else self.traffic.group.send(StopServing(0.0)))
        with suppress(TimeoutError):  # the runtime stops the others
            async with asyncio.timeout(within_s + OVERTIME_S):
                while any(one.process for one in self.members.values()):
                    self.links.changed.clear()
                    await self.links.changed.wait()
        hurrying.cancel()

    def close(self) -> None:
        for address in self._addresses:
            address.close()

    # Messages to gateways

    def configure(self, plan: PointsmanPlan) -> None:
        if self.links.bank is not None:
            self.links.bank.configure(plan.gateway.tenants)

    def _documents(self) -> UseDocuments:
        assert self._plane is not None
        sources = self._plane.documents.revision.sources()
        return UseDocuments(*sources, *self._listen, len(self.members))

    def _tell_documents(self) -> None:
        if self.members:
            self.traffic.group.send(self._documents())

    def _tell_readiness(self) -> None:
        assert self._plane is not None
        if self._ready is not self._plane.ready:
            self._ready = self._plane.ready
            self.traffic.group.send(Readiness(self._ready))

    def _beat(self) -> None:
        """Do the work that must be done ten times a second."""
        bank, now, seen_at = self.links.bank, time.monotonic(), self.links.seen_at
        assert bank is not None
        assert self._processes is not None
        self.traffic.beat()
        bank.used("", self._granted.usage())
        for name, grants in bank.grants().items():
            if not name:
                self._granted.granted(grants, now)
            elif (send := self.members[name].send) is not None:
                send(Grants(grants))
        late_s, self._beat_at = now - self._beat_at, now
        if late_s > HUNG_S / 4:  # this process itself was blocked
            seen_at.update(dict.fromkeys(seen_at, now))
        for one in self.members.values():
            if one.send is not None and now - seen_at.get(one.name, now) > HUNG_S:
                seen_at[one.name] = now
                self._processes.kill(one)

    # Processes

    def _process_told(self, event: ControllerEvent) -> None:
        if self._processes is None:
            self._early.append(event)
        else:
            self._processes.told(self.members, event)

    def _process_changed(self, one: LinkedGateway, change: GatewayChange) -> None:
        if change is not GatewayChange.STARTED:
            self.links.cut(one.name)
        if change is GatewayChange.ENDED:
            self.pages.process_ended(one)
            self.traffic.ended(one)
            self.links.announce()
            if self.links.bank is not None:
                self.links.bank.left(one.name)
            self.inquiries.ended(one.name)
            history, keep = self._gateway.history, self._gateway.settings.keep_records
            self._gateway.loop.call_later(RECALL_S, recall, history, one.name, keep)
        self.links.changed.set()


def first_url(members: Collection[LinkedGateway]) -> str:
    """The address at which clients reach one of these gateways; empty if none listens."""
    return next((one.url for one in members if one.url), "")


def is_listening(members: Collection[LinkedGateway]) -> bool:
    """Whether clients can reach one of these gateways; True if there are no gateways."""
    return not members or any(one.url for one in members)


def process_metrics(page: Page, members: Iterable[LinkedGateway]) -> None:
    each: list[tuple[Labels, LinkedGateway]] = [((("gateway", one.name.removeprefix("@")),), one) for one in members]
    up = {labels: float(one.send is not None) for labels, one in each}
    page.gauge("gateway_up", "Whether a gateway process is connected.", up)
    restarts = {labels: float(one.restarts) for labels, one in each}
    page.counter("gateway_restarts", "Times that a gateway process was started again.", restarts)


class MergedMetrics:
    """The page `/metrics` of all gateways together."""

    def __init__(self, gateway: Gateway, inquiries: Inquiries) -> None:
        self._gateway = gateway
        self._inquiries = inquiries
        self._last: dict[str, str] = {}
        """The last page from each gateway."""
        self._ended = ""
        """The counters from gateways that have ended."""
        self._answered: dict[str, tuple[int, int, float, int]] = {}
        """The totals from gateways that have ended, by deployment."""
        self._page = SharedPage(self._merged)
        self._making: asyncio.Task[bytes] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    def serve(self, client: GatewayConnection, request: HttpRequest, tenant: Tenant | None) -> None:
        running = PendingAnswer(client)
        client.serving = running
        task = self._gateway.loop.create_task(self._answer(running))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _answer(self, running: PendingAnswer) -> None:
        content = self._page.cached
        if content is None:
            if self._making is None or self._making.done():  # else all requests that arrive meanwhile share one page
                self._making = self._gateway.loop.create_task(self._make())
            content = await asyncio.shield(self._making)
        if running.client is not None:
            running.client.answer(200, content, PROMETHEUS)

    async def _make(self) -> bytes:
        self._last |= await self._inquiries.by_name("metrics", {})
        return self._page.rendered(self._merged)

    def _merged(self) -> bytes:
        own = self._gateway.metrics.text(self._gateway)
        return merged([own, *self._last.values(), self._ended]).encode()

    def totals(self, deployment: str, members: Iterable[LinkedGateway]) -> list[tuple[int, int, float, int]]:
        """The totals from all gateways; see `GatewayMetrics.totals`."""
        found = [one.summaries.get(deployment) for one in members]
        return [one for one in [*found, self._answered.get(deployment)] if one is not None]

    def process_ended(self, one: LinkedGateway) -> None:
        self._ended = merged([self._ended, counters_of(self._last.pop(one.name, ""))])
        for name, totals in one.summaries.items():
            self._answered[name] = _added(self._answered.get(name, (0, 0, 0.0, 0)), totals)
        one.summaries = {}


def _added(one: Sequence[float], other: Sequence[float]) -> tuple[int, int, float, int]:
    sums = [mine + theirs for mine, theirs in zip(one, other, strict=True)]
    return int(sums[0]), int(sums[1]), sums[2], int(sums[3])


def summary_of(totals: Sequence[tuple[int, int, float, int]]) -> dict[str, float | None]:
    """A summary of a deployment's requests at all gateways, for `status`."""
    answered, errors, seconds, ended = (sum(each) for each in zip(*totals, strict=True))
    return {
        "answered": answered,
        "errors": errors,
        "mean_ms": round(seconds / ended * 1000, 3) if ended else None,
    }

"""The gateway: accepts requests from clients, answers some itself, and passes the others to the dispatchers."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from typing import Any, NamedTuple

from pointsman.config.schema import GatewaySpec
from pointsman.errors import listed, nearest, shown
from pointsman.gateway.admission import Admission, NotAdmitted
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.known_bodies import LONG_BYTES, KnownBodies
from pointsman.gateway.long_bodies import MESSAGES_JSON, MODEL_JSON, JsonLimits, LongBodies
from pointsman.gateway.messages import COUNT_TOKENS, MESSAGES
from pointsman.gateway.metrics import GatewayMetrics, tenant_metrics
from pointsman.gateway.model_request import ModelRequest
from pointsman.gateway.openai import (
    STREAMS_END_WITH_DONE,
    BadRequest,
    answer_tokens,
    error_body,
    error_kind,
    metadata,
    read_body,
    usage_question,
)
from pointsman.gateway.other_apis import MessagesApi, OtherApi, boundary_of
from pointsman.gateway.records import COLLECT_S, RequestHistory
from pointsman.gateway.silence import SilenceWatch
from pointsman.gateway.tenants import Charge, Tenant
from pointsman.gateway.upstream import Upstream
from pointsman.http.buffers import BufferBudget
from pointsman.http.heads import COPIED_BYTES, HttpRequest
from pointsman.http.pool import FEW
from pointsman.parameters import host_and_port, is_loopback
from pointsman.reasons import Reason
from pointsman.routing.events import Arrived, DispatcherCommand, Outcome, Refusal
from pointsman.routing.routes import DispatcherSettings
from pointsman.runtimes.policy_runner import Watchdog
from pointsman.runtimes.tasks import LoopClock, LoopTurns, Tasks
from pointsman.runtimes.traffic import Traffic, only_lane

INFERENCE = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings", b"/v1/responses"})
"""Paths of the OpenAI API whose requests go to instances."""

SWEEP_S = 0.25
"""How often timeouts are checked."""
SWEEP = "gateway timeouts"
MAX_CONNECTIONS = 10_000
"""Maximum client connections, unless a setting says otherwise."""
RESERVED_FILES, FILES_PER_INSTANCE = 128, 4
"""Number of file descriptors that are reserved for uses other than clients."""


READ, WRITE = (b"GET", b"HEAD"), (b"POST",)
"""Values of `GatewayPage.methods`."""


class GatewayPage(NamedTuple):
    """A page: how requests to a path are served."""

    serve: Callable[[GatewayConnection, HttpRequest, Tenant | None], None]
    check: Callable[[HttpRequest, GatewayConnection], Tenant | None]
    """Called before the body is read. Returns the sender's tenant, or None if the page needs none. Raises
    `NotAdmitted`."""
    methods: Sequence[bytes] = ()
    """The permitted methods; empty if the page checks the method itself."""
    json_limits: Callable[[HttpRequest], JsonLimits | None] | None = None
    """Returns the limits for the body of a request; None if the body is not parsed as JSON."""


def needs_no_key(http: HttpRequest, client: GatewayConnection) -> Tenant | None:
    """The `check` of a page that needs no key."""


_HOST = re.compile(rb"([0-9A-Za-z._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
_ORIGIN = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://(.*)")
MAX_KNOWN_HOSTS = 64


class HostCheck:
    """Names by which a gateway may be called.

    A gateway without keys that listens on this machine only must be out of reach for web pages in a browser. A page
    could use a DNS name of its own that resolves to this machine, or make the browser send a cross-origin request.
    """

    def __init__(self, settings: GatewaySpec) -> None:
        host, _ = host_and_port(settings.listen)
        self._names = {name.lower() for name in (host, *settings.allowed_hosts)}
        self._has_keys = bool(settings.keys)
        self._is_loopback = is_loopback(host)
        self._known: set[bytes] = set()
        """Accepted hosts, cached because clients send the same host again and again."""

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises `NotAdmitted`."""
        host = headers.get(b"host")
        if host is not None and host not in self._known:
            self._check_host(host)
        if b"origin" in headers and not self._has_keys:
            self._check_origin(headers[b"origin"], host)

    def _check_host(self, host: bytes) -> None:
        found = _HOST.fullmatch(host)
        if found is None:
            raise NotAdmitted(400, f"the header host is not valid: {shown(repr(host))}", "invalid_host")
        if self._is_loopback and not self._has_keys and not self._is_ours(found[1]):
            why = f"this gateway is for this machine only, not for {shown(repr(host))}; see gateway.allowedHosts"
            raise NotAdmitted(403, why, "unknown_host")
        if len(self._known) < MAX_KNOWN_HOSTS:
            self._known.add(host)

    def _check_origin(self, origin: bytes, host: bytes | None) -> None:
        found = _ORIGIN.fullmatch(origin)
        authority = b"" if found is None else found[1]
        name = _HOST.fullmatch(authority)
        if not authority or name is None or (authority != host and not self._is_ours(name[1])):
            why = f"pages of {shown(repr(origin))} may not use a gateway without keys; see gateway.allowedHosts"
            raise NotAdmitted(403, why, "unknown_origin")

    def _is_ours(self, host: bytes) -> bool:
        name = host.decode("ascii").lower().rstrip(".").strip("[]")
        return name in self._names or is_loopback(name)


class Pages:
    """The pages of a gateway, by path."""

    def __init__(self, settings: GatewaySpec) -> None:
        self.exact: dict[bytes, GatewayPage] = {}
        self.trees: dict[bytes, GatewayPage] = {}
        """Pages that serve everything below a path."""
        self.passed_on: dict[bytes, GatewayPage] = {}
        """The pages of the paths that are passed on to engines."""
        self.of_replicas: list[GatewayPage] = []
        """Pages that need the secret of replicas."""
        self.hosts = HostCheck(settings)

    def pass_on(self, paths: Sequence[str], page: GatewayPage) -> None:
        """Use `page` to serve the paths of the APIs, and also `paths`."""
        self.passed_on = dict.fromkeys((*INFERENCE, MESSAGES, COUNT_TOKENS, *(path.encode() for path in paths)), page)

    def find(self, client: GatewayConnection, request: HttpRequest) -> tuple[GatewayPage, Tenant | None]:
        """The page that serves a request, and the tenant that sent it. Raises `NotAdmitted`."""
        if not client.is_local and not client.is_replica:
            self.hosts.check(request.headers)
        path = request.path
        page = self.passed_on.get(path) or self.exact.get(path)
        if page is None:
            page = next((page for tree, page in self.trees.items() if path.startswith(tree)), None)
            if page is None:
                asked, known = path.decode("latin-1"), [path.decode() for path in (*self.exact, *self.passed_on)]
                near = nearest(asked, known)
                there = f"there is {', '.join(sorted(known))};" if near is None else f"did you mean {near}?"
                more = "gateway.paths lists further paths of engines to pass on"
                why = f"there is nothing at {shown(asked)}; {there} {more}"
                raise NotAdmitted(404, why, "not_found")
        if client.is_replica and page not in self.of_replicas:
            raise NotAdmitted(403, "only replicas call this address, and this is not for them", "forbidden")
        if page.methods and request.method not in page.methods:
            allowed = b", ".join(page.methods)
            why = f"{shown(path.decode('latin-1'))} takes {allowed.decode()}"
            raise NotAdmitted(405, why, "method_not_allowed", lines=b"allow: %b\r\n" % allowed)
        if page.methods is READ and _has_long_body(request.headers):
            raise NotAdmitted(413, f"{shown(path.decode('latin-1'))} takes no body", "body_not_allowed")
        return page, page.check(request, client)


def _has_long_body(headers: Mapping[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or int(headers.get(b"content-length", b"0")) > COPIED_BYTES


class Clients(set[GatewayConnection]):
    """The connections of clients. If there are too many, new connections replace idle ones: first those without a valid
    key, then those that were idle longest."""

    def __init__(self, gateway: "Gateway") -> None:
        super().__init__()
        self.max_files = 1 << 20
        """Maximum number of files that this process may have open."""
        self.closed_idle = 0
        """Number of idle connections that were closed to make room for new ones."""
        self._for_grpc = 0
        """Number of descriptors for connections over gRPC."""
        self._gateway = gateway

    @property
    def limit(self) -> int:
        """Maximum number of clients. Each client may need a second descriptor, for the connection to an instance. Some
        descriptors are reserved for probes, engines and files."""
        instances = sum(len(lane.dispatcher.fleet) for lane in self._gateway.traffic.lanes.values())
        possible = (self.max_files - RESERVED_FILES - FILES_PER_INSTANCE * instances - self._for_grpc) // 2
        return min(self._gateway.limits.max_connections or MAX_CONNECTIONS, max(1, possible))

    def set_aside_for_grpc(self) -> int:
        """Reserve a third of the clients' descriptors for clients over gRPC. Returns the maximum number of such
        clients."""
        self._for_grpc = 0
        connections = max(1, self.limit // 3)
        self._for_grpc = 2 * connections
        return connections

    def enter(self, connection: GatewayConnection) -> bool:
        """Add a connection. Returns False if there are too many, and no connection is idle."""
        self.add(connection)
        if connection.is_local or len(self) <= (limit := self.limit):
            return True
        idle = [one for one in self if one.request is None and not one.is_local and one is not connection]
        # Close several at once, so that the search is rare. Clients without a valid key are closed first: if hundreds
        # of them connect, they have been idle for less time than known clients between two requests. In each group,
        # clients that are sending a body are closed last.
        longest = nsmallest(
            max(1, limit // 20),
            idle,
            key=lambda one: (one.key_memo is not None, one.parser.in_body, one.idle_since),
        )
        for client in longest:
            client.transport.close()
            self.discard(client)
        self.closed_idle += len(longest)
        return bool(longest)

    def problems(self) -> list[Reason]:
        """Reports settings that do not take effect as configured."""
        wanted, allowed = self._gateway.limits.max_connections, self.limit
        if wanted is None or allowed == wanted:
            return []
        facts = {"max_connections": wanted, "open_files": self.max_files, "allowed": allowed}
        return [Reason("connections-limited", facts)]


class Gateway:
    """The front door: a `ConnectionOwner` for its clients."""

    def __init__(self, settings: GatewaySpec, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.settings = settings
        self.limits = settings.limits
        self.buffered = BufferBudget(settings.max_buffered_bytes)
        self.upstream = Upstream(settings.upstream, loop)
        self.outbox = self.upstream.outbox
        clock = LoopClock(loop)
        self._watchdog = Watchdog(clock.now)
        self.traffic: Traffic = Traffic(clock, self.upstream, _dispatcher_settings(settings), self._watchdog)
        self.traffic.hooks.gone = self.upstream.instance_left
        self.metrics = GatewayMetrics()
        self.admission = Admission(settings, self.metrics.limited, self.upstream.in_flight)
        self.tenants: Callable[[], list[dict[str, Any]]] = self.admission.report
        """Returns how much of its limits each tenant has used; see `Tenant.report`."""
        self.metrics.sources.append(lambda page: tenant_metrics(page, self.tenants()))
        self.clients = Clients(self)
        self.draining = False
        """True if the gateway accepts no new requests, and finishes those in flight."""
        self.pages = Pages(settings)
        self.pages.pass_on(settings.paths, GatewayPage(self.infer, self.admission.tenant_of, WRITE, _json_limits))
        self._arrivals = ArrivalBatch(self.upstream)
        self.bodies = KnownBodies()
        self.long_bodies = LongBodies(loop)
        self.tasks = Tasks(loop)
        """Background work of the gateway, and of the plane behind it."""
        self.tasks.every(SWEEP, SWEEP_S, self._sweep)
        self._silences = SilenceWatch(self.traffic, self.upstream)
        self.tasks.every("silent instances", self._silences.interval_s, self._silences.look)
        self.turns = LoopTurns()
        self.tasks.every("loop beat", self.turns.interval_s, self.turns.beat)
        self.history = RequestHistory(settings.keep_records, self.traffic, self.admission)
        self.tasks.every("request records", COLLECT_S, self.history.collect)

    def configure(self, settings: GatewaySpec) -> None:
        """Apply those new settings that can change while the gateway runs."""
        self.settings = settings
        self.limits = settings.limits
        self.buffered.limit = settings.max_buffered_bytes
        self.upstream.configure(settings.upstream)
        self.traffic.settings = _dispatcher_settings(settings)
        self.traffic.prefix_index_bytes = settings.max_prefix_index_bytes
        self.admission.configure(settings)
        self.pages.hosts = HostCheck(settings)
        self.pages.pass_on(settings.paths, GatewayPage(self.infer, self.admission.tenant_of, WRITE, _json_limits))
        self.history.configure(settings.max_record_bytes)

    # Connections

    def connected(self, connection: GatewayConnection) -> bool:
        return self.clients.enter(connection)

    def disconnected(self, connection: GatewayConnection) -> None:
        self.clients.discard(connection)

    def refusal(self, status: int, message: str) -> bytes:
        self.metrics.unread[status] += 1
        return error_body(message, error_kind(status))

    # Requests

    def check(self, client: GatewayConnection, request: HttpRequest) -> None:
        """If a request will not be served, refuse it before its body is read."""
        try:
            _, tenant = self.pages.find(client, request)
            if tenant is not None:
                self.admission.check_limits(tenant)
        except NotAdmitted as error:
            self.metrics.unread[error.status] += 1
            self.history.turn_away(client, request, error)

    def serve(self, client: GatewayConnection, request: HttpRequest) -> None:
        try:
            page, tenant = self.pages.find(client, request)
        except NotAdmitted as error:
            self.history.turn_away(client, request, error)
        else:
            limits = None if len(request.body) < LONG_BYTES or page.json_limits is None else page.json_limits(request)
            if limits is None:
                page.serve(client, request, tenant)
            else:

                def serve(problem: str) -> None:
                    if problem:
                        error = NotAdmitted(413, problem, "body_too_complex")
                        self.history.turn_away(client, request, error, tenant)
                    else:
                        page.serve(client, request, tenant)

                self.long_bodies.add(client, request.body, limits, serve)

    def infer(
        self, client: GatewayConnection, http: HttpRequest, tenant: Tenant | None, *, part_id: str | None = None
    ) -> None:
        """Serve a request to a model. `part_id` is None unless the request is part of another request, which was
        admitted already. It is then the id of this part; if it is empty, the part gets a new id."""
        now, asked, request_id = time.monotonic(), "", part_id or ""
        try:
            api = None if http.path in INFERENCE else _api_of(http, self.traffic)
            if api is not None:
                body = api.body
            elif len(http.body) < LONG_BYTES:
                body = read_body(http.body)
            else:
                body = self.bodies.read(http.body)
            lane = self.traffic.by_model.get(body.model) or (None if body.model else only_lane(self.traffic))
            asked = body.model
            if lane is None:
                raise NotAdmitted(*unknown_model(asked, sorted(self.traffic.by_model)))
            name = "" if tenant is None else tenant.name
            request_id = request_id or self.admission.request_id(http)
            request = metadata(request_id, body, http.headers, now, name)
            charge: Charge | None = None
            if tenant is not None:
                plan, answer = lane.plan, None
                if tenant.is_limited or plan.price is not None:
                    answer = answer_tokens(body, http.path, plan.assumed_output_tokens)
                part = part_id is not None
                request, charge = self.admission.admit(request, tenant, now, answer, plan.price, part=part)
        except BadRequest as error:
            wrong = NotAdmitted(400, str(error), "invalid_body")
            self.history.turn_away(client, http, wrong, tenant, asked, request_id=request_id)
            return
        except NotAdmitted as error:
            self.history.turn_away(client, http, error, tenant, asked, request_id=request_id)
            return
        upstream = self.upstream
        upstream.retries.requests += 1
        counts = self.metrics.of(lane.name)
        in_flight = ModelRequest(client, http, charge, upstream=upstream, lane=lane, request=request, counts=counts)
        in_flight.api = api
        if body.stream and http.path in STREAMS_END_WITH_DONE:
            in_flight.usage_question = usage_question(body)
        client.serving = in_flight
        self._arrivals.add(in_flight, now)

    # Time and the end

    def _sweep(self) -> None:
        now = time.monotonic()
        for client in [client for client in self.clients if client.deadline < now]:
            self.tasks.attempt(SWEEP, client.timed_out)
        for late in self.upstream.late(now):
            self.tasks.attempt(SWEEP, late.timed_out)
        self.buffered.trim()
        self.admission.usage.save(now)
        fleets = [lane.dispatcher.fleet for lane in self.traffic.lanes.values()]
        self.upstream.sweep(now, {str(endpoint) for fleet in fleets for endpoint in fleet.roster})

    async def drain(self, timeout_s: float) -> int:
        """Accept no new requests, and wait for those in flight. Returns how many are still in flight after the time
        limit."""
        self.draining = True
        for client in list(self.clients):
            client.drain()
        until = time.monotonic() + timeout_s
        while self.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return self.in_flight

    def close(self) -> None:
        self.outbox.flush()
        self._watchdog.close()
        self.tasks.close()
        for client in list(self.clients):
            client.transport.abort()
        self._silences.close()
        self.upstream.close()
        for lane in self.traffic.lanes.values():
            lane.stop_timer()

    @property
    def in_flight(self) -> int:
        """Number of requests that were admitted and are not answered."""
        return len(self.upstream.in_flight) + len(self.long_bodies)


class ArrivalBatch:
    """Hands all new requests of one loop turn to their dispatchers together, because this uses the CPU caches
    better."""

    __slots__ = ("_new", "_upstream")

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._new: list[ModelRequest] = []

    def add(self, in_flight: ModelRequest, now: float) -> None:
        known = self._upstream.in_flight
        known[in_flight.request.request_id] = in_flight
        if self._new:
            self._new.append(in_flight)
        elif len(known) <= FEW:
            in_flight.lane.carry_out(self._decided(in_flight, now))
        else:
            self._new.append(in_flight)
            self._upstream.loop.call_soon(self.hand_over)

    def hand_over(self) -> None:
        """Let the dispatchers decide about the new requests, then carry the decisions out."""
        arrivals, self._new = self._new, []
        now, known = time.monotonic(), self._upstream.in_flight
        decided = [
            (in_flight.lane, self._decided(in_flight, now))
            for in_flight in arrivals
            if known.get(in_flight.request.request_id) is in_flight  # its client may have disconnected
        ]
        for lane, commands in decided:
            lane.carry_out(commands)

    def _decided(self, in_flight: ModelRequest, now: float) -> Sequence[DispatcherCommand]:
        try:
            return in_flight.lane.dispatcher.handle(Arrived((in_flight.request,)), now)
        except Exception as error:  # one failure must not affect the requests after it
            self._upstream.loop.call_exception_handler(
                {"message": "pointsman: a request could not be decided", "exception": error}
            )
            in_flight.refuse(Refusal(Outcome.REJECTED_OTHER, Reason("undecided", {"error": type(error).__name__})))
            return ()


def _json_limits(http: HttpRequest) -> JsonLimits | None:
    if http.path in INFERENCE:
        return MODEL_JSON
    if boundary_of(http.headers.get(b"content-type", b"")) is not None:
        return None
    return MESSAGES_JSON if http.path in (MESSAGES, COUNT_TOKENS) else MODEL_JSON


def _api_of(http: HttpRequest, traffic: Traffic) -> OtherApi:
    """The API of a request to a path outside the OpenAI API. Raises `BadRequest`."""
    if http.path != MESSAGES and http.path != COUNT_TOKENS:
        return OtherApi(http)

    def translates(model: str) -> bool:
        lane = traffic.by_model.get(model) or (None if model else only_lane(traffic))
        known = [] if lane is None else lane.dispatcher.fleet.instances()
        return not known or not all(one.serves_messages for one in known)

    return MessagesApi(http, translates=translates)


def _dispatcher_settings(settings: GatewaySpec) -> DispatcherSettings:
    return DispatcherSettings(max_tries=settings.upstream.max_tries, keep_records=settings.keep_records)


def unknown_model(model: str, known: Sequence[str]) -> tuple[int, str, str]:
    """Status, message and code of the error for a model that does not exist."""
    if not model:
        return 400, f"name a model; there are: {listed(known) or 'none'}", "model_missing"
    near = nearest(model, known)
    hint = f'did you mean "{near}"?' if near is not None else f"there are: {listed(known) or 'none'}"
    return 404, f'there is no model "{shown(model)}"; {hint}', "model_not_found"

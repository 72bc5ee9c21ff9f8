"""The gateway: accepts requests of clients, answers some itself, and passes the others to the dispatchers."""

import asyncio
import time
from collections.abc import Callable, Sequence

from pointsman.config.schema import GatewaySpec
from pointsman.errors import listed, nearest, shown
from pointsman.gateway.admission import Admission, Charge, NotAdmitted, Tenant
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.metrics import GatewayMetrics, tenant_metrics
from pointsman.gateway.model_request import ModelRequest
from pointsman.gateway.openai import BadRequest, answer_tokens, error_body, error_kind, metadata, read_body
from pointsman.gateway.upstream import Upstream
from pointsman.http.parser import HttpRequest
from pointsman.http.pool import FEW
from pointsman.reasons import Reason
from pointsman.routing.events import Arrived, DispatcherCommand, Outcome, Refusal
from pointsman.routing.routes import DispatcherSettings
from pointsman.runtimes.tasks import LoopClock, Tasks
from pointsman.runtimes.traffic import Traffic, only_lane

INFERENCE = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings", b"/v1/responses"})
"""Paths whose requests go to instances."""

SWEEP_S = 0.25
"""How often timeouts are checked."""
SWEEP = "gateway timeouts"

GatewayPage = Callable[[GatewayConnection, HttpRequest], None]


class Gateway:
    """The front door: a `ConnectionOwner` for its clients."""

    def __init__(self, settings: GatewaySpec, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.settings = settings
        self.limits = settings.limits
        self.upstream = Upstream(settings.upstream, loop)
        self.outbox = self.upstream.outbox
        self.traffic: Traffic = Traffic(LoopClock(loop), self.upstream, _dispatcher_settings(settings))
        self.traffic.hooks.gone = self.upstream.instance_left
        self.metrics = GatewayMetrics()
        self.admission = Admission(settings, self.metrics.limited, self.upstream.in_flight)
        self.metrics.sources.append(lambda page: tenant_metrics(page, self.admission.report()))
        self.clients: set[GatewayConnection] = set()
        self.draining = False
        """No new requests are accepted; those in flight are finished."""
        self.pages: dict[bytes, GatewayPage] = {}
        """What the gateway answers itself, by path."""
        self.page_trees: dict[bytes, GatewayPage] = {}
        """The same for everything below a path."""
        self._arrivals = ArrivalBatch(self.upstream)
        self.tasks = Tasks(loop)
        """Background work of the gateway, and of the plane behind it."""
        self.tasks.every(SWEEP, SWEEP_S, self._sweep)

    def configure(self, settings: GatewaySpec) -> None:
        """Use new settings, as far as they can change while it runs."""
        self.settings = settings
        self.limits = settings.limits
        self.upstream.configure(settings.upstream)
        self.traffic.settings = _dispatcher_settings(settings)
        self.admission.configure(settings)

    # Connections

    def connected(self, connection: GatewayConnection) -> bool:
        self.clients.add(connection)
        return connection.is_local or len(self.clients) <= self.limits.max_connections

    def disconnected(self, connection: GatewayConnection) -> None:
        self.clients.discard(connection)

    def refusal(self, status: int, message: str) -> bytes:
        self.metrics.unread[status] += 1
        return error_body(message, error_kind(status))

    # Requests

    def serve(self, client: GatewayConnection, request: HttpRequest) -> None:
        path = request.path
        if path in INFERENCE:
            if request.method == b"POST":
                self._infer(client, request)
            else:
                client.error(405, "send this as POST", lines=b"allow: POST\r\n")
            return
        page = self.pages.get(path)
        if page is None:
            page = next((page for tree, page in self.page_trees.items() if path.startswith(tree)), None)
        if page is not None:
            page(client, request)
        else:
            shown = path[:100].decode("latin-1")
            known = ", ".join(sorted(path.decode() for path in INFERENCE | self.pages.keys()))
            client.error(404, f"there is nothing at {shown}; there is {known}", "not_found")

    def _infer(self, client: GatewayConnection, http: HttpRequest) -> None:
        tenant: Tenant | None = None
        if self.admission.keys.required:
            try:
                tenant = self.admission.tenant_of(http, client)
            except NotAdmitted as error:
                client.refuse(error)
                return
        self.infer(client, http, tenant)

    def infer(
        self, client: GatewayConnection, http: HttpRequest, tenant: Tenant | None, *, part_id: str | None = None
    ) -> None:
        """Serve a request to a model. `part_id`: it is part of a request that was admitted already, and has this id, or
        a new one if that is empty."""
        now = time.monotonic()
        try:
            body = read_body(http.body)
            lane = self.traffic.by_model.get(body.model) or (None if body.model else only_lane(self.traffic))
            if lane is None:
                client.error(*unknown_model(body.model, sorted(self.traffic.by_model)))
                return
            name = "" if tenant is None else tenant.name
            request = metadata(part_id or self.admission.request_id(http), body, http.headers, now, name)
            charge: Charge | None = None
            if tenant is not None:
                plan, answer = lane.plan, None
                if tenant.is_limited or plan.price is not None:
                    answer = answer_tokens(body, http.path, plan.assumed_output_tokens)
                part = part_id is not None
                request, charge = self.admission.admit(request, tenant, now, answer, plan.price, part=part)
        except BadRequest as error:
            client.error(400, str(error), "invalid_body")
            return
        except NotAdmitted as error:
            client.refuse(error)
            return
        upstream = self.upstream
        upstream.retries.requests += 1
        counts = self.metrics.of(lane.name)
        in_flight = ModelRequest(client, http, charge, upstream=upstream, lane=lane, request=request, counts=counts)
        client.serving = in_flight
        self._arrivals.add(in_flight, now)

    # Time and the end

    def _sweep(self) -> None:
        now = time.monotonic()
        for client in [client for client in self.clients if client.deadline < now]:
            self.tasks.attempt(SWEEP, client.timed_out)
        for late in self.upstream.late(now):
            self.tasks.attempt(SWEEP, late.timed_out)
        fleets = [lane.dispatcher.fleet for lane in self.traffic.lanes.values()]
        self.upstream.sweep(now, {str(endpoint) for fleet in fleets for endpoint in fleet.roster})

    async def drain(self, timeout_s: float) -> int:
        """Accept nothing new, and wait for the requests in flight. How many are left when the time is over."""
        self.draining = True
        for client in list(self.clients):
            client.drain()
        until = time.monotonic() + timeout_s
        while self.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return self.in_flight

    def close(self) -> None:
        self.outbox.flush()
        self.tasks.close()
        for client in list(self.clients):
            client.transport.abort()
        self.upstream.close()
        for lane in self.traffic.lanes.values():
            lane.stop_timer()

    @property
    def in_flight(self) -> int:
        """Requests that were admitted and are not answered."""
        return len(self.upstream.in_flight)


class ArrivalBatch:
    """Hands new requests to their dispatchers, those of one turn of the loop in a row: the code for it stays warm."""

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
        except Exception as error:  # it must not take the requests behind it down
            self._upstream.loop.call_exception_handler(
                {"message": "pointsman: a request could not be decided", "exception": error}
            )
            in_flight.refuse(Refusal(Outcome.REJECTED_OTHER, Reason("undecided", {"error": type(error).__name__})))
            return ()


def _dispatcher_settings(settings: GatewaySpec) -> DispatcherSettings:
    return DispatcherSettings(max_tries=settings.upstream.max_tries, keep_records=settings.keep_records)


def unknown_model(model: str, known: Sequence[str]) -> tuple[int, str, str]:
    """Status, message and code."""
    if not model:
        return 400, f"name a model; there are: {listed(known) or 'none'}", "model_missing"
    near = nearest(model, known)
    hint = f'did you mean "{near}"?' if near is not None else f"there are: {listed(known) or 'none'}"
    return 404, f'there is no model "{shown(model)}"; {hint}', "model_not_found"

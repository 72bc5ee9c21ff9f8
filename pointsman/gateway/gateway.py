"""The gateway: knows all connections and requests under way, and brings them together.

It is the carrier of the dispatchers' commands: it sends, refuses and revokes as they say, and tells them what became
of it.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Container, Sequence
from difflib import get_close_matches

from pointsman.config.schema import GatewaySpec
from pointsman.gateway.client import ClientConnection
from pointsman.gateway.in_flight import InFlight, RetryBudget
from pointsman.gateway.metrics import GatewayMetrics
from pointsman.gateway.model_request import ModelRequest
from pointsman.gateway.openai import BadRequest, metadata, read_body
from pointsman.gateway.tenants import Keys, Tenant
from pointsman.gateway.upstream import FEW, Outbox, UpstreamPool
from pointsman.http.requests import HttpRequest
from pointsman.reasons import Reason
from pointsman.routing.dispatch_plan import DispatcherSettings
from pointsman.routing.endpoints import LIMIT_IF_UNKNOWN
from pointsman.routing.events import Arrived, DispatcherCommand, Outcome, Refusal, Refuse, Revoke, Send
from pointsman.runtimes.clock import LoopClock
from pointsman.runtimes.traffic import Lane, Traffic
from pointsman.types import ExecutionInstance

INFERENCE = frozenset(
    {b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings", b"/v1/responses"},
)
"""Paths whose requests go to instances."""

SWEEP_S = 0.25
"""How often timeouts are looked at."""

Page = Callable[[ClientConnection, HttpRequest], None]

LONGEST_START_S = 600
"""Nobody is told to come back later than after so many seconds."""


class Gateway:
    """The front door."""

    def __init__(self, settings: GatewaySpec, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.settings = settings
        self.limits = settings.limits
        self.upstream = settings.upstream
        self.traffic: Traffic = Traffic(LoopClock(loop), self, _dispatcher_settings(settings))
        self.traffic.gone = self._gone
        self.keys = Keys(settings.keys, settings.tenants, settings.admin_key_sha256)
        self.retries = RetryBudget(settings.upstream.retry_budget)
        self.metrics = GatewayMetrics()
        self.clients: set[ClientConnection] = set()
        self.draining = False
        """Nothing new is taken; what is under way is finished."""
        self.pages: dict[bytes, Page] = {}
        """What is answered here, by path."""
        self.page_trees: dict[bytes, Page] = {}
        """The same for everything below a path."""
        self._exchanges: dict[str, InFlight] = {}
        self.names_in_flight: Container[str] = ()
        """Ids of requests that are not sent anywhere themselves: their steps are."""
        self._arrivals: list[ModelRequest] = []
        """Those who have come in this turn of the loop and have not been handed to their dispatchers."""
        self.outbox = Outbox(loop, self._exchanges)
        self._pools: dict[str, UpstreamPool] = {}
        self._prefix = f"req-{secrets.token_hex(4)}-"
        self._count = 0
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)

    def configure(self, settings: GatewaySpec) -> None:
        """Take new settings over, as far as they can change while it runs."""
        self.settings = settings
        self.limits, self.upstream = settings.limits, settings.upstream
        self.traffic.settings = _dispatcher_settings(settings)
        self.retries.share = settings.upstream.retry_budget
        self.keys = self.keys.changed_to(settings.keys, settings.tenants, settings.admin_key_sha256)

    # Clients

    def admits(self, client: ClientConnection) -> bool:
        """Take a new connection in, if there is room."""
        self.clients.add(client)
        return client.is_local or len(self.clients) <= self.limits.max_connections

    def serve(self, client: ClientConnection, request: HttpRequest) -> None:
        """Answer a request, now or later."""
        path = request.path
        if path in INFERENCE:
            if request.method == b"POST":
                self._infer(client, request)
            else:
                client.error(405, "send this as POST", headers=b"allow: POST\r\n")
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

    def refused_unread(self, status: int) -> None:
        """A request could not even be read."""
        self.metrics.unread[status] += 1

    def _infer(self, client: ClientConnection, http: HttpRequest) -> None:
        tenant: Tenant | None = None
        if self.keys.required:
            tenant = self.keys.tenant_of(client, http)
            if tenant is None:
                client.error(401, "send your API key as: authorization: Bearer KEY", "invalid_api_key")
                return
        self.infer(client, http, tenant)

    def infer(
        self, client: ClientConnection, http: HttpRequest, tenant: Tenant | None, *, is_part: bool = False
    ) -> None:
        """Serve a request to a model. `is_part`: of a request that was let in already; its tokens still count."""
        now = time.monotonic()
        try:
            body = read_body(http.body)
            lane = self.traffic.by_model.get(body.model) or self._only_lane(body.model)
            if lane is None:
                self._unknown_model(client, body.model)
                return
            request = metadata(self.request_id(http), body, http.headers, now, "" if tenant is None else tenant.name)
        except BadRequest as error:
            client.error(400, str(error), "invalid_body")
            return
        if tenant is not None and not is_part:
            request = tenant.bounded(request)
            denial = tenant.denial(request, now)
            if denial is not None:
                self.metrics.turned_away[tenant.name] += 1
                retry = b"retry-after: %d\r\n" % denial.retry_after_s
                client.error(429, denial.why, "rate_limit_exceeded", retry)
                return
        self.retries.requests += 1
        counts = self.metrics.of(lane.plan.name)
        exchange = ModelRequest(client, http, tenant, gateway=self, lane=lane, request=request, counts=counts)
        client.serving = exchange
        self._exchanges[request.request_id] = exchange
        if not self._arrivals and len(self._exchanges) <= FEW:
            lane.carry_out(self._decided(exchange, now))
            return
        if not self._arrivals:
            self.loop.call_soon(self._arrive_together)
        self._arrivals.append(exchange)

    def _arrive_together(self) -> None:
        """Hand those who came in one turn of the loop to their dispatchers in a row: the code for it stays warm."""
        arrivals, self._arrivals = self._arrivals, []
        now, exchanges = time.monotonic(), self._exchanges
        decided = [
            (exchange.lane, self._decided(exchange, now))
            for exchange in arrivals
            if exchanges.get(exchange.request.request_id) is exchange  # its client may have gone
        ]
        for lane, commands in decided:
            lane.carry_out(commands)

    def _decided(self, exchange: ModelRequest, now: float) -> Sequence[DispatcherCommand]:
        """What is to be done now that this request has come."""
        try:
            return exchange.lane.dispatcher.handle(Arrived((exchange.request,)), now)
        except Exception as error:  # it must not take those behind it down
            self.loop.call_exception_handler(
                {"message": "pointsman: a request could not be decided", "exception": error}
            )
            exchange.refuse(Refusal(Outcome.REJECTED_OTHER, Reason("undecided", {"error": type(error).__name__})))
            return ()

    def _only_lane(self, model: str) -> Lane | None:
        """Who names no model means the one there is."""
        return None if model else self.traffic.only_lane()

    def _unknown_model(self, client: ClientConnection, model: str) -> None:
        known = sorted(self.traffic.by_model)
        if not model:
            client.error(400, f"name a model; there are: {', '.join(known) or 'none'}", "model_missing")
            return
        near = get_close_matches(model, known, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(known[:20]) or 'none'}"
        client.error(404, f'there is no model "{model[:200]}"; {hint}', "model_not_found")

    def request_id(self, http: HttpRequest) -> str:
        """The client's own, if it has one that nobody else has; else a new one."""
        given = http.headers.get(b"x-request-id")
        if given is not None:
            del http.headers[b"x-request-id"]
            if 0 < len(given) <= 128 and given.isascii() and given.decode("ascii").isprintable():
                name = given.decode("ascii")
                if name not in self._exchanges and name not in self.names_in_flight:
                    return name
        self._count += 1
        return f"{self._prefix}{self._count:x}"

    # The carrier of the dispatchers

    def send(self, lane: Lane, command: Send) -> None:
        """Send a request to an instance."""
        exchange = self._exchanges.get(command.request.request_id)
        if exchange is not None:
            exchange.send(command)

    def refuse(self, lane: Lane, command: Refuse) -> None:
        """Answer a request with a refusal."""
        exchange = self._exchanges.get(command.request.request_id)
        if exchange is not None:
            exchange.refuse(_with_absence(command.refusal, lane))

    def revoke(self, lane: Lane, command: Revoke) -> None:
        """Stop a request."""
        exchange = self._exchanges.get(command.request.request_id)
        if exchange is not None:
            exchange.revoke(command.refusal)

    def enter(self, in_flight: InFlight) -> None:
        """A request is under way: what is decided about it is told to this."""
        self._exchanges[in_flight.request.request_id] = in_flight

    def leave(self, in_flight: InFlight) -> None:
        """A request has ended."""
        self._exchanges.pop(in_flight.request.request_id, None)

    def retry_after(self, lane: Lane) -> int:
        """Seconds after which it is worth trying again: about as long as those who are here will take, or as long as it
        takes until somebody is."""
        dispatcher = lane.dispatcher
        instances = dispatcher.fleet.instances()
        latencies = [one.avg_latency_ms for one in instances if one.avg_latency_ms is not None]
        if not latencies:
            absence = lane.absence()
            wait_s = lane.start_up_s if absence is None or absence.retry_s is None else absence.retry_s
            return max(1, min(LONGEST_START_S, round(wait_s or 1)))
        places = sum(one.max_concurrency or LIMIT_IF_UNKNOWN for one in instances)
        waves = max(1.0, len(dispatcher) / max(places, 1))
        return max(1, min(60, round(waves * sum(latencies) / len(latencies) / 1000)))

    # Instances

    def _gone(self, instance_id: str) -> None:
        """Whatever an instance that has left still says comes too late: its requests wait for others, or are there."""
        for exchange in self._exchanges.values():
            if exchange.instance_id == instance_id:
                exchange.let_go()

    def pool_of(self, instance: ExecutionInstance) -> UpstreamPool:
        """The connections to an instance."""
        pool = self._pools.get(instance.instance_id)
        if pool is None or not (pool.instance is instance or pool.leads_to(instance)):
            if pool is not None:
                pool.close()
            pool = UpstreamPool(instance, self.loop, self.outbox, self.upstream.connect_timeout)
            self._pools[instance.instance_id] = pool
        return pool

    # Time

    def _sweep(self) -> None:
        now = time.monotonic()
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        for client in [client for client in self.clients if client.deadline < now]:
            client.timed_out()
        for exchange in [exchange for exchange in self._exchanges.values() if exchange.deadline < now]:
            exchange.timed_out()
        idle_since = now - self.upstream.idle_timeout
        for pool in self._pools.values():
            pool.close_idle(idle_since)
        serving = {str(endpoint) for lane in self.traffic.lanes.values() for endpoint in lane.dispatcher.fleet.roster}
        for gone in [name for name in self._pools if name not in serving and name not in self._in_use()]:
            self._pools.pop(gone).close()

    def _in_use(self) -> set[str]:
        return {exchange.instance_id for exchange in self._exchanges.values()}

    # The end

    async def drain(self, timeout_s: float) -> int:
        """Take nothing new, and wait for what is under way. How many requests had to be cut off."""
        self.draining = True
        for client in list(self.clients):
            client.drain()
        until = time.monotonic() + timeout_s
        while self._exchanges and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return len(self._exchanges)

    def cut_off(self, why: str) -> None:
        """Nobody is waited for any longer: whoever is not answered is told so."""
        refusal = Refusal(Outcome.EVICTED_SHUTTING_DOWN, Reason("cut-off", {"text": why}))
        for exchange in list(self._exchanges.values()):
            exchange.revoke(refusal)

    def close(self) -> None:
        """End everything."""
        self.outbox.flush()
        self._sweeper.cancel()
        for client in list(self.clients):
            client.transport.abort()
        for pool in self._pools.values():
            pool.close()
        for lane in self.traffic.lanes.values():
            lane.stop_timer()

    @property
    def in_flight(self) -> int:
        """Requests that have come and are not answered."""
        return len(self._exchanges)


def _with_absence(refusal: Refusal, lane: Lane) -> Refusal:
    """If it is for want of instances: with what the plane knows about that."""
    if refusal.outcome not in (Outcome.REJECTED_NO_ENDPOINTS, Outcome.EVICTED_NO_ENDPOINTS):
        return refusal
    absence = lane.absence()
    if absence is None:
        return refusal
    return Refusal(refusal.outcome, refusal.reason.having(absence=absence.why))


def _dispatcher_settings(settings: GatewaySpec) -> DispatcherSettings:
    return DispatcherSettings(max_tries=settings.upstream.max_tries, keep_records=settings.keep_records)

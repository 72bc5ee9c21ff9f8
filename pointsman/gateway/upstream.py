"""The way to the instances: requests in flight, where each was sent, and the connections that they take.

Two kinds of requests are carried by the same dispatchers to the same connections: clients' requests, and steps of
pipelines. What they have in common is `InFlight`; what is sent, and what becomes of the response, is each kind's own.
"""

import time
from asyncio import AbstractEventLoop, Task
from collections.abc import Container
from math import inf
from typing import TYPE_CHECKING, Protocol

import msgspec

from pointsman.config.schema import UpstreamSpec
from pointsman.http.pool import ClientConnection, ConnectionPool, Outbox
from pointsman.http.responses import PROGRESS_BYTES, ResponseHead
from pointsman.reasons import Reason
from pointsman.routing.endpoints import LIMIT_IF_UNKNOWN
from pointsman.routing.events import Cancelled, Failed, Outcome, Refusal, Refuse, Revoke, Send
from pointsman.types import ExecutionInstance, RequestMetadata

if TYPE_CHECKING:
    from pointsman.gateway.metrics import DeploymentCounts
    from pointsman.runtimes.traffic import Lane

MAX_RETRY_AFTER_S = 600
"""Maximum Retry-After, in seconds, while an instance starts."""
LATELY_S = 60.0
"""A problem of requests is shown until it has not occurred for this long."""


class Carried(Protocol):
    """A request that the dispatcher decides about."""

    instance_id: str
    deadline: float

    @property
    def request(self) -> RequestMetadata: ...

    def send(self, command: Send) -> None:
        """Send it to an instance; if it was on another, that one is let go."""

    def refuse(self, refusal: Refusal) -> None:
        """It will not be served, or not to its end."""

    def withdraw(self) -> None:
        """The dispatcher forgets it."""

    def let_go(self) -> None:
        """Ignore what the instance still sends."""

    def timed_out(self) -> None:
        """The instance has not answered in time."""


class InFlight(msgspec.Struct, eq=False, kw_only=True):
    """A request that is on an instance or waits for one: what both kinds have in common."""

    upstream: "Upstream"
    lane: "Lane"
    request: RequestMetadata
    counts: "DeploymentCounts"
    deadline: float = inf
    """When the instance times out."""
    instance_id: str = ""
    """Where it was sent last."""
    _pool: ConnectionPool | None = None
    _attempt: "ClientConnection | Task[None] | None" = None
    """The connection that it was sent on, or the task that makes one."""
    _fresh: bool = False
    """The last try was on a connection of its own."""
    _head: ResponseHead | None = None
    """Of a response that comes in pieces."""
    _unrenewed_bytes: int = 0
    """Of such a response, since its deadline was last moved."""

    def abandon(self) -> None:
        """Its client has disconnected."""
        self._leave()
        self.counts.abandoned += 1
        self.withdraw()

    def withdraw(self) -> None:
        self.lane.tell(Cancelled(self.request.request_id))
        self.lane.look_for_idle()

    def let_go(self) -> None:
        attempt, self._attempt = self._attempt, None
        self.deadline = inf
        if attempt is None:
            return
        if isinstance(attempt, ClientConnection):
            attempt.cancel(self)
        else:
            attempt.cancel()

    def pause(self) -> None:
        """The receiver of the response does not read fast enough: read no more from the instance."""
        if isinstance(self._attempt, ClientConnection) and not self._attempt.transport.is_closing():
            self._attempt.transport.pause_reading()
            self.deadline = inf

    def resume(self) -> None:
        if isinstance(self._attempt, ClientConnection) and not self._attempt.transport.is_closing():
            self._attempt.transport.resume_reading()
            self.deadline = time.monotonic() + self.upstream.settings.stall_timeout

    def connected(self, connection: ClientConnection) -> None:
        self._attempt = connection

    def _renew_by_bytes(self, payload: bytes, now: float) -> None:
        """Move the deadline if enough of a body without events has arrived: single bytes are no progress."""
        self._unrenewed_bytes += len(payload)
        if self._unrenewed_bytes >= PROGRESS_BYTES:
            self._unrenewed_bytes = 0
            self.deadline = now + self.upstream.settings.stall_timeout

    def _came_to_nothing(self, why: str, *, may_retry: bool, local: str = "") -> None:
        """This try has failed. The dispatcher decides what happens now. `local`: what is wrong on this side, which is
        no evidence against the instance."""
        lane, instance_id, now = self.lane, self.instance_id, time.monotonic()  # it may be on another before this ends
        if local:
            self.upstream.unsent.note(local, why, now)
            lane.tell(Failed(self.request.request_id, why, retry=may_retry, local=local))
            lane.look_for_idle()
            return
        lane.tell(Failed(self.request.request_id, why, retry=may_retry and self.upstream.retries.allows(now)))
        lane.failed(instance_id, why)

    def _leave(self) -> None:
        """Nothing more is decided about it, and nothing more is read from its instance."""
        self.let_go()
        self.upstream.in_flight.pop(self.request.request_id, None)

    def _count_refused(self, refusal: Refusal) -> tuple[int, int | None]:
        """The status of the answer, and its Retry-After in seconds; None if trying again is of no use."""
        status = 502 if refusal.outcome is Outcome.EVICTED_OTHER else refusal.status
        self.counts.statuses[status] += 1
        return status, retry_after_s(self.lane) if status in (429, 503) else None


class Unsent:
    """Requests that could not be sent lately, for reasons on this side."""

    def __init__(self) -> None:
        self._by_cause: dict[str, tuple[int, str, float]] = {}
        """Cause -> how many, the last error, and when that was."""

    def note(self, cause: str, why: str, now: float) -> None:
        count, _, at = self._by_cause.get(cause, (0, "", now))
        self._by_cause[cause] = (count + 1 if now - at < LATELY_S else 1, why, now)

    def problems(self, now: float) -> list[str]:
        return [
            str(Reason("requests-not-sent", {"requests": count, "cause": cause, "error": why}))
            for cause, (count, why, at) in self._by_cause.items()
            if now - at < LATELY_S
        ]


class RetryBudget:
    """How many retries the fleet can bear: a share of the requests, so that failures do not multiply the load.

    Every request adds a share of a retry; a reserve is allowed in any case, and refills with time.
    """

    def __init__(self, share: float, *, reserve: float = 50.0, per_second: float = 10.0) -> None:
        self.share = share
        """Of a retry, that each request adds."""
        self.requests = 0
        """That were admitted since the last call of `allows`."""
        self._most = self._left = reserve
        self._per_second = per_second
        self._at = 0.0

    def allows(self, now: float) -> bool:
        """Whether one more retry may be made now; it is counted if so."""
        earned = self.requests * self.share + (now - self._at) * self._per_second
        self._left = min(self._most, self._left + earned)
        self._at, self.requests = now, 0
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Upstream:
    """Carries out the commands of the dispatchers."""

    def __init__(self, settings: UpstreamSpec, loop: AbstractEventLoop) -> None:
        self.settings = settings
        self.loop = loop
        self.retries = RetryBudget(settings.retry_budget)
        self.in_flight: dict[str, Carried] = {}
        """By request id."""
        self.outbox = Outbox(loop, self.in_flight)
        self.unsent = Unsent()
        self._pools: dict[str, ConnectionPool] = {}
        """By instance id."""

    def configure(self, settings: UpstreamSpec) -> None:
        self.settings = settings
        self.retries.share = settings.retry_budget

    # Commands of the dispatchers

    def send(self, lane: "Lane", command: Send) -> None:
        in_flight = self.in_flight.get(command.request.request_id)
        if in_flight is not None:
            in_flight.send(command)

    def refuse(self, lane: "Lane", command: Refuse) -> None:
        in_flight = self.in_flight.get(command.request.request_id)
        if in_flight is not None:
            in_flight.refuse(_with_absence(command.refusal, lane))

    def revoke(self, lane: "Lane", command: Revoke) -> None:
        """Stop a request for more important work."""
        in_flight = self.in_flight.get(command.request.request_id)
        if in_flight is not None:
            in_flight.refuse(command.refusal)
            in_flight.withdraw()

    def cut_off(self, why: str) -> None:
        refusal = Refusal(Outcome.EVICTED_SHUTTING_DOWN, Reason("cut-off", {"text": why}))
        for in_flight in list(self.in_flight.values()):
            in_flight.refuse(refusal)
            in_flight.withdraw()

    # Instances

    def instance_left(self, instance_id: str) -> None:
        """Ignore what the instance still sends: its requests were sent to others, or wait."""
        for in_flight in self.in_flight.values():
            if in_flight.instance_id == instance_id:
                in_flight.let_go()

    def pool_of(self, instance: ExecutionInstance) -> ConnectionPool:
        pool = self._pools.get(instance.instance_id)
        if pool is None or not (pool.target is instance or pool.leads_to(instance)):
            if pool is not None:
                pool.close()
            pool = ConnectionPool(instance, self.loop, self.outbox, self.settings.connect_timeout)
            self._pools[instance.instance_id] = pool
        return pool

    def late(self, now: float) -> list[Carried]:
        """Requests whose time is over."""
        return [in_flight for in_flight in self.in_flight.values() if in_flight.deadline < now]

    def sweep(self, now: float, in_service: Container[str]) -> None:
        """Close connections that are idle or lead to instances that have left."""
        idle_since = now - self.settings.idle_timeout
        for pool in self._pools.values():
            pool.close_idle(idle_since)
        in_use = {in_flight.instance_id for in_flight in self.in_flight.values()}
        for gone in [name for name in self._pools if name not in in_service and name not in in_use]:
            self._pools.pop(gone).close()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def retry_after_s(lane: "Lane") -> int:
    """Seconds after which it is worth trying again: about as long as the requests in flight will take, or until an
    instance has started."""
    dispatcher = lane.dispatcher
    instances = dispatcher.fleet.instances()
    latencies = [one.avg_latency_ms for one in instances if one.avg_latency_ms is not None]
    if not latencies:
        absence = lane.unavailability()
        wait_s = lane.start_up_s if absence is None or absence.retry_s is None else absence.retry_s
        return max(1, min(MAX_RETRY_AFTER_S, round(wait_s or 1)))
    places = sum(one.max_concurrency or LIMIT_IF_UNKNOWN for one in instances)
    waves = max(1.0, len(dispatcher) / max(places, 1))
    return max(1, min(60, round(waves * sum(latencies) / len(latencies) / 1000)))


def _with_absence(refusal: Refusal, lane: "Lane") -> Refusal:
    """If it is for want of instances: with what the plane knows about that."""
    if refusal.outcome not in (Outcome.REJECTED_NO_ENDPOINTS, Outcome.EVICTED_NO_ENDPOINTS):
        return refusal
    absence = lane.unavailability()
    if absence is None:
        return refusal
    return Refusal(refusal.outcome, refusal.reason.having(absence=absence.why))

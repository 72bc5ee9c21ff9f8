"""The way to the instances: requests in flight, the instance that each was sent to, and the connections in use.

Two kinds of requests go through the same dispatchers to the same connections: clients' requests, and steps of
pipelines. `InFlight` is their common part. The two kinds differ in what is sent, and in what happens to the response.
"""

import time
from asyncio import AbstractEventLoop, Task
from collections.abc import Container
from contextlib import suppress
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from pointsman.config.schema import UpstreamSpec
from pointsman.gateway.openai import with_model, with_question
from pointsman.http.heads import Bytes
from pointsman.http.pool import ClientConnection, ConnectionPool, Outbox
from pointsman.http.responses import PROGRESS_BYTES, ResponseHead
from pointsman.http.responses import retry_after_s as asked_pause_s
from pointsman.parameters import read_key
from pointsman.reasons import Reason
from pointsman.routing.endpoints import ACCEPTS, LIMIT_IF_UNKNOWN
from pointsman.routing.events import Cancelled, Failed, Outcome, Refusal, Refuse, Revoke, Send
from pointsman.routing.outliers import FAILED, Doubt, kind_of
from pointsman.runtimes.traffic import accepting, settle, takes_requests, unavailability
from pointsman.types import ExecutionInstance, RequestMetadata

if TYPE_CHECKING:
    from pointsman.gateway.metrics import DeploymentCounts
    from pointsman.gateway.tenants import Charge
    from pointsman.runtimes.traffic import Lane

MAY_BE_UNKNOWN = frozenset({400, 422, 501})
"""Statuses with which an instance may refuse a field of the body that it does not support."""
RETRIED = frozenset({429, 500, 502, 503, 504})
"""Statuses after which another instance is always tried."""
KEPT = frozenset(
    {
        Outcome.REJECTED_CAPACITY,
        Outcome.EVICTED_TTL,
        Outcome.EVICTED_NO_ENDPOINTS,
        Outcome.EVICTED_NOT_SENT,
        Outcome.EVICTED_OTHER,
    }
)
"""Refusals for which the client gets an instance's answer instead, if there is such an answer."""

MAX_RETRY_AFTER_S = 600
"""Maximum Retry-After, in seconds, while an instance starts."""
NONE_EXPECTED_RETRY_S = 30
"""Retry-After, in seconds, if no instance is expected."""
KEYS_S = 2.0
"""How often the keys of engines are read again, because files may change."""
LATELY_S = 60.0
"""How long a problem with requests is shown after it last occurred."""


class Carried(Protocol):
    """A request for which the dispatcher makes decisions."""

    instance_id: str
    deadline: float

    @property
    def request(self) -> RequestMetadata: ...

    @property
    def is_movable(self) -> bool:
        """Whether the request may move from its present instance to another one."""

    def send(self, command: Send) -> None:
        """Send the request to an instance. A try on a previous instance is abandoned."""

    def refuse(self, refusal: Refusal) -> None:
        """Refuse the request, or end it early."""

    def withdraw(self, refusal: Refusal | None = None) -> None:
        """Remove the request from the dispatcher, because it was refused or its client has disconnected."""

    def let_go(self) -> None:
        """Ignore what the instance still sends."""

    def timed_out(self) -> None:
        """Handle an instance that has not answered in time."""


class InFlight(msgspec.Struct, eq=False, kw_only=True):
    """A request that is on an instance, or waits for an instance: the common part of both kinds of requests."""

    upstream: "Upstream"
    lane: "Lane"
    request: RequestMetadata
    counts: "DeploymentCounts"
    deadline: float = inf
    """When the instance times out."""
    instance_id: str = ""
    """The instance of the last try."""
    _pool: ConnectionPool | None = None
    _attempt: "ClientConnection | Task[None] | None" = None
    """The connection of the last try, or the task that opens this connection."""
    _fresh: bool = False
    """Whether the last try was on a new connection."""
    _head: ResponseHead | None = None
    """The head of the response, if the response arrives in pieces."""
    _unrenewed_bytes: int = 0
    """Bytes of such a response since the deadline was last extended."""
    _doubts: tuple[Doubt, ...] = ()
    """Errors from instances that the request was sent to; another instance's answer may contradict them."""
    usage_question: bytes | None = None
    """The `stream_options` that request usage, which the client does not get; None to request no usage."""
    _asked: bool = False
    """Whether this try asks for usage."""
    _unasked: bool = False
    """Whether this try does not ask for usage because the last try was refused, perhaps for that reason."""
    _command: Send | None = None
    """The last command to send the request."""
    _kept: "KeptAnswer | None" = None
    """An instance's error. The client gets this error unless another instance serves the request."""

    def abandon(self) -> None:
        """Give the request up, because its client has disconnected."""
        self._leave()
        self.counts.abandoned += 1
        self.withdraw()

    def withdraw(self, refusal: Refusal | None = None) -> None:
        self.lane.tell(Cancelled(self.request.request_id, refusal))
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
        """Stop reading from the instance, because the receiver of the response does not read fast enough."""
        if isinstance(self._attempt, ClientConnection) and not self._attempt.transport.is_closing():
            self._attempt.pace.let_read(on=False)
            self.deadline = inf

    def resume(self) -> None:
        if isinstance(self._attempt, ClientConnection) and not self._attempt.transport.is_closing():
            self._attempt.pace.let_read(on=True)
            self.deadline = time.monotonic() + self.upstream.settings.stall_timeout

    def connected(self, connection: ClientConnection) -> None:
        self._attempt = connection

    def _renew_by_bytes(self, payload: bytes, now: float) -> None:
        """Extend the deadline if enough of a body without events has arrived: single bytes are not progress."""
        self._unrenewed_bytes += len(payload)
        if self._unrenewed_bytes >= PROGRESS_BYTES:
            self._unrenewed_bytes = 0
            self.deadline = now + self.upstream.settings.stall_timeout

    def _asks_another(self, head: ResponseHead, body: bytes, retried: Container[int]) -> bool:
        """Whether to try another instance instead of passing on an error status."""
        status, lane = head.status, self.lane
        doubt = Doubt(self.instance_id, kind_of(status))
        if status not in retried and (status >= 500 or not wants_opinion(self, doubt)):
            return False
        why = answered_error(status, body)
        asked_s = asked_pause_s(head, time.time()) if status in (429, 503) else None
        takes_no_more = status == 429 or asked_s is not None
        if takes_no_more:
            lane.pause(self.instance_id, asked_s, why)
        if takes_no_more or status < 500:
            self._kept = KeptAnswer(self.instance_id, head, body)
        self.let_go()
        self._came_to_nothing(why, may_retry=True, doubt=doubt)
        return True

    def _came_to_nothing(self, why: Reason, *, may_retry: bool, local: str = "", doubt: Doubt | None = None) -> None:
        """Let the dispatcher decide what happens next, after a failed try or an error as answer. `local` names a
        problem on this side, which is not evidence against the instance."""
        lane, request_id, now = self.lane, self.request.request_id, time.monotonic()
        if local:
            self.upstream.unsent.note(local, why, now)
            lane.tell(Failed(request_id, why, retry=may_retry, local=local))
            lane.look_for_idle()
            return
        doubt = doubt or Doubt(self.instance_id, FAILED)  # the request may move before this returns
        self._doubts += (doubt,)
        retry = may_retry and self.upstream.retries.allows(now)
        lane.tell(Failed(request_id, why, retry=retry, answered=self._kept is not None))
        lane.failed(doubt.instance_id, why, doubt.kind)

    def _judge(self, status: int) -> None:
        """Count the instance's answer, and compare it with the answers of other instances."""
        lane = self.lane
        if status < 400:
            lane.worked(self.instance_id)
            if self._doubts:
                settle(lane, self._doubts, contradicted=True)
        else:
            doubt = Doubt(self.instance_id, kind_of(status))
            lane.erred(doubt)
            settle(lane, (*self._doubts, doubt), contradicted=False)
        self._doubts = ()

    def _leave(self) -> None:
        """Leave the dispatcher and the instance: ignore further decisions, and the rest of the response."""
        self.let_go()
        self.upstream.in_flight.pop(self.request.request_id, None)

    def _count_refused(self, refusal: Refusal) -> "RefusedAnswer":
        if self._doubts:
            settle(self.lane, self._doubts, contradicted=False)
        kept = self._kept if refusal.outcome in KEPT else None
        status = refusal.status if refusal.outcome is not Outcome.EVICTED_OTHER else 502
        status = status if kept is None else kept.head.status
        self.counts.statuses[status] += 1
        asked_s = None if kept is None else asked_pause_s(kept.head, time.time())
        if asked_s is None and refusal.reason.code == "all-paused":
            asked_s = refusal.reason.facts["left_s"]
        if asked_s is not None:
            return RefusedAnswer(status, ceil(asked_s), kept)
        return RefusedAnswer(status, retry_after_s(self.lane) if status in (429, 503) else None, kept)


def note_answer(one: InFlight, status: int | None, charge: "Charge | None") -> None:
    """Add the answer and its cost for the tenant to the record of a request."""
    record = one.lane.dispatcher.records.get(one.request.request_id)
    if record is not None:
        record.status = status
        record.cost = None if charge is None else charge.used


def answered_error(status: int, body: Bytes) -> Reason:
    return Reason("answered-error", {"status": status, "body": bytes(body[:200]).decode("utf-8", "replace")})


def no_response(why: str, error: OSError | None) -> Reason:
    return Reason("no-response" if error is None else "no-connection", {"error": why})


class KeptAnswer(NamedTuple):
    """An error that an instance answered with."""

    instance_id: str
    head: ResponseHead
    body: bytes


class RefusedAnswer(NamedTuple):
    """The answer to a request that is not served."""

    status: int
    retry_after_s: int | None
    """Retry-After; None if trying again is of no use."""
    kept: KeptAnswer | None
    """An instance's answer to pass on instead; None if there is none."""


def body_for(one: InFlight, command: Send, body: Bytes) -> Bytes:
    """The body for an instance: with its name for the model, and with a request for usage if it accepts that."""
    instance, one._command = command.endpoint.instance, command
    if instance.engine_names:
        served = instance.engine_names.get(one.request.model_name)
        body = body if served is None else with_model(body, served)
    if one.usage_question is not None:
        one._asked = not one._unasked and one.upstream.takes_usage.get(instance.instance_id, True)
        body = with_question(body, one.usage_question) if one._asked else body
    return body


def asked_too_much(one: InFlight, status: int) -> bool:
    """Send a request again without asking for usage, if the question may have caused the refusal."""
    if not one._asked or status not in MAY_BE_UNKNOWN or one.upstream.takes_usage.get(one.instance_id):
        return False
    assert one._command is not None
    one._asked, one._unasked, one._attempt = False, True, None
    one.upstream.in_flight[one.request.request_id].send(one._command)
    return True


def learn_usage(one: InFlight) -> None:
    """Note that a stream is served, which shows whether the instance accepts a request for usage."""
    if one._asked:
        one.upstream.takes_usage[one.instance_id] = True
    elif one._unasked:
        one.upstream.takes_usage[one.instance_id] = False


def wants_opinion(one: InFlight, doubt: Doubt) -> bool:
    """Whether to ask another instance about an error that may be the client's fault. False if an instance was asked
    before, if no other instance takes requests, or if failures may need the remaining retries.
    """
    lane, now, model = one.lane, time.monotonic(), one.request.model_name
    if one._kept is not None:
        return False
    tried = {doubt.instance_id, *(earlier.instance_id for earlier in one._doubts)}
    roster = lane.dispatcher.fleet.roster
    accepts = roster.column(ACCEPTS)
    return (
        any(
            accepts[row] and endpoint.serves(model) and str(endpoint) not in tried
            for row, endpoint in enumerate(roster)
        )
        and one.upstream.retries.has_spare(now)
        and lane.outliers.wants_opinion(doubt, accepting(lane.dispatcher), now)
    )


class Unsent:
    """Requests that recently could not be sent, for reasons on this side."""

    def __init__(self) -> None:
        self._by_cause: dict[str, tuple[int, Reason, float]] = {}
        """For each cause, the number of requests, the last error, and the time of this error."""

    def note(self, cause: str, why: Reason, now: float) -> None:
        count, _, at = self._by_cause.get(cause, (0, why, now))
        self._by_cause[cause] = (count + 1 if now - at < LATELY_S else 1, why, now)

    def problems(self, now: float) -> list[Reason]:
        return [
            Reason("requests-not-sent", {"requests": count, "cause": cause, "error": why})
            for cause, (count, why, at) in self._by_cause.items()
            if now - at < LATELY_S
        ]


class RetryBudget:
    """Limits the number of retries to a share of the requests, so that failures do not multiply the load.

    Every request adds a share of a retry. A reserve of retries is allowed in any case, and refills with time.
    """

    def __init__(self, share: float, *, reserve: float = 50.0, per_second: float = 10.0) -> None:
        self.share = share
        """The share of a retry that each request adds."""
        self.requests = 0
        """Number of requests admitted since the last call of `allows`."""
        self._most = self._left = reserve
        self._per_second = per_second
        self._at = 0.0

    def allows(self, now: float) -> bool:
        """Whether one more retry may be made now. If so, the retry is counted."""
        self._refill(now)
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def has_spare(self, now: float) -> bool:
        """Whether at least half of the retries is left, because second opinions must not use up those that failures
        need."""
        self._refill(now)
        return self._left >= max(self._most / 2, 1.0)

    def _refill(self, now: float) -> None:
        earned = self.requests * self.share + (now - self._at) * self._per_second
        self._left = min(self._most, self._left + earned)
        self._at, self.requests = now, 0


class Upstream:
    """Carries out the commands of the dispatchers."""

    def __init__(self, settings: UpstreamSpec, loop: AbstractEventLoop) -> None:
        self.settings = settings
        self.loop = loop
        self.retries = RetryBudget(settings.retry_budget)
        self.in_flight: dict[str, Carried] = {}
        """Requests in flight, by id."""
        self.outbox = Outbox(loop, self.in_flight)
        self.unsent = Unsent()
        self.pools: dict[str, ConnectionPool] = {}
        """Connection pools, by instance id."""
        self._keys_read_at = 0.0
        self.lacks: set[tuple[str, bytes]] = set()
        """Pairs of an instance and a path that the instance lacks although its engine should have it."""
        self.takes_usage: dict[str, bool] = {}
        """Whether each instance takes `stream_options.include_usage`, once that is known."""

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
            in_flight.refuse(_with_unavailability(command.refusal, lane))

    def revoke(self, lane: "Lane", command: Revoke) -> None:
        """Stop a request for more important work."""
        in_flight = self.in_flight.get(command.request.request_id)
        if in_flight is not None:
            in_flight.refuse(command.refusal)
            in_flight.withdraw(command.refusal)

    def cut_off(self, why: str) -> None:
        refusal = Refusal(Outcome.EVICTED_SHUTTING_DOWN, Reason("cut-off", {"text": why}))
        for in_flight in list(self.in_flight.values()):
            in_flight.refuse(refusal)
            in_flight.withdraw(refusal)

    # Instances

    def instance_left(self, instance_id: str) -> None:
        """Ignore what the instance still sends, because its requests were sent to other instances, or wait."""
        self.takes_usage.pop(instance_id, None)
        self.lacks = {one for one in self.lacks if one[0] != instance_id}
        for in_flight in self.in_flight.values():
            if in_flight.instance_id == instance_id:
                in_flight.let_go()

    def problems(self, now: float) -> list[Reason]:
        """Recent problems."""
        strict = sorted(name for name, takes in self.takes_usage.items() if not takes)
        unreported = [Reason("usage-refused", {"instances": strict})] if strict else []
        return self.unsent.problems(now) + unreported

    def pool_of(self, instance: ExecutionInstance) -> ConnectionPool:
        pool = self.pools.get(instance.instance_id)
        if pool is not None and pool.target is instance:
            return pool
        if pool is None or not pool.leads_to(instance):
            if pool is not None:
                pool.close()
            pool = ConnectionPool(instance, self.loop, self.outbox, self.settings.connect_timeout)
            self.pools[instance.instance_id] = pool
        _set_key(pool, instance)
        return pool

    def late(self, now: float) -> list[Carried]:
        """Requests that have exceeded their time limit."""
        return [in_flight for in_flight in self.in_flight.values() if in_flight.deadline < now]

    def sweep(self, now: float, in_service: Container[str]) -> None:
        """Close connections that are idle, and connections to instances that have left."""
        idle_since = now - self.settings.idle_timeout
        for pool in self.pools.values():
            pool.close_idle(idle_since)
        if now - self._keys_read_at > KEYS_S:
            self._keys_read_at = now
            for pool in self.pools.values():
                _set_key(pool, pool.target)
        in_use = {in_flight.instance_id for in_flight in self.in_flight.values()}
        for gone in [name for name in self.pools if name not in in_service and name not in in_use]:
            self.pools.pop(gone).close()

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def _set_key(pool: ConnectionPool, instance: object) -> None:
    """Send the engine's key. If the key can no longer be read, the last key is kept; probes report that."""
    source = getattr(instance, "key", "")
    if not source:
        pool.lines = b""
        return
    with suppress(ValueError):
        pool.lines = b"authorization: Bearer %b\r\n" % read_key(source).encode()


def retry_after_s(lane: "Lane") -> int:
    """Seconds after which it is worth trying again: the time that the requests in flight will take, or the time until
    an instance has started."""
    dispatcher = lane.dispatcher
    instances = dispatcher.fleet.instances()
    latencies = [one.avg_latency_ms for one in instances if one.avg_latency_ms is not None]
    if not latencies or not takes_requests(dispatcher):
        unavailable = unavailability(lane)
        if unavailable is None or unavailable.retry_s is None:
            wait_s = NONE_EXPECTED_RETRY_S if unavailable is not None and unavailable.none_expected else lane.start_up_s
        else:
            wait_s = unavailable.retry_s
        return max(1, min(MAX_RETRY_AFTER_S, round(wait_s or 1)))
    places = sum(one.max_concurrency or LIMIT_IF_UNKNOWN for one in instances)
    waves = max(1.0, len(dispatcher) / max(places, 1))
    return max(1, min(60, round(waves * sum(latencies) / len(latencies) / 1000)))


def _with_unavailability(refusal: Refusal, lane: "Lane") -> Refusal:
    """The refusal. If instances are missing, it contains the reason that the plane reports."""
    if refusal.outcome not in (Outcome.REJECTED_NO_ENDPOINTS, Outcome.EVICTED_NO_ENDPOINTS):
        return refusal
    unavailable = unavailability(lane)
    if unavailable is None:
        return refusal
    return Refusal(refusal.outcome, refusal.reason.having(absence=unavailable.why))

"""The table of requests: every request that has arrived and not left, waiting in a queue or sent to an instance.

Each model has its own queue, so that requests for one model do not hold up requests for another. The one rule: a
request is in the table exactly once, and only the table moves it: from waiting to sent, back to waiting, and out.
"""

from collections.abc import Mapping, Sequence

import msgspec

from pointsman.reasons import Reason
from pointsman.routing.endpoints import LIGHTNESS, Endpoint, EndpointTable
from pointsman.routing.events import DispatcherCommand, Outcome, Refusal, Refuse, Revoke
from pointsman.routing.plugins import ESTIMATED_OUTPUT_TOKENS, UNCACHED_REQUEST_TOKENS, RequestCycle
from pointsman.routing.queue import FlowControl, InFlightEviction, PoolSaturation, Queued
from pointsman.routing.records import Journal
from pointsman.routing.routes import DispatchPlan
from pointsman.selection import Column, SchedulingResult
from pointsman.types import RequestMetadata

# The ledger: every reservation is released exactly once


class Sent(msgspec.Struct, eq=False):
    """A request that an instance is serving."""

    item: Queued
    pool: "Pool"
    endpoint: Endpoint
    strategy: str
    lightness: float
    """The lightness of the endpoint just before the request was sent."""
    begun: bool = False
    """Whether part of the answer has been sent. If so, the request must not be sent again."""
    revoked: Refusal | None = None
    """The refusal of a request that is being stopped for more important work; else None."""


class Hold(msgspec.Struct, frozen=True):
    """One endpoint's share of a request in flight."""

    endpoint: Endpoint
    tokens: float
    """Prompt tokens that the endpoint has to compute; released with the first token of the answer."""
    prefill: bool = False
    """Whether the endpoint only prefills, so that it is released with the first token."""
    output: float = 0.0
    """The part of `tokens` that is expected for the answer; released when the answer ends."""


def holds_of(cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> list[Hold]:
    """The shares of a result: the first target of each profile, with the tokens that it has to compute.

    The endpoint that answers is held to the end, even if its profile is called "prefill".
    """
    uncached: Column | None = cycle.state.get(UNCACHED_REQUEST_TOKENS)
    output: float = cycle.state.get(ESTIMATED_OUTPUT_TOKENS, 0.0)
    prompt = float(cycle.request.input_tokens)
    if len(result.results) == 1:
        target = result.target
        return [Hold(target, prompt if uncached is None else float(uncached[target.row]), False, output)]
    return [
        Hold(
            run.targets[0],
            prompt if uncached is None else float(uncached[run.targets[0].row]),
            name == "prefill" != result.primary,
            output,
        )
        for name, run in result.results.items()
    ]


class Ledger:
    """Reservations by request, visible in the fleet's columns from the moment they are made."""

    def __init__(self, fleet: EndpointTable) -> None:
        self._load = fleet.load
        self._holds: dict[str, Sequence[Hold]] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._holds

    def reserve(self, request_id: str, holds: Sequence[Hold]) -> None:
        """Count a request on its endpoints. Raises if the request is in flight already."""
        if request_id in self._holds:
            raise ValueError(f'request "{request_id}" is already in flight')
        self._holds[request_id] = holds
        for hold in holds:
            self._load.reserve(hold.endpoint, hold.tokens)

    def first_token(self, request_id: str) -> None:
        """Release the tokens of a prompt that was computed, and the endpoints that only prefilled."""
        left = []
        for hold in self._holds.get(request_id, ()):
            if hold.prefill:
                self._load.release(hold.endpoint, hold.tokens)
            else:
                self._load.release_tokens(hold.endpoint, hold.tokens - hold.output)
                left.append(msgspec.structs.replace(hold, tokens=hold.output))
        if request_id in self._holds:
            self._holds[request_id] = left

    def release(self, request_id: str) -> bool:
        """Release a request that has ended. Returns False if it was not in flight."""
        holds = self._holds.pop(request_id, None)
        for hold in holds or ():
            self._load.release(hold.endpoint, hold.tokens)
        return holds is not None

    def holds(self, request_id: str) -> list[Hold]:
        return list(self._holds.get(request_id, ()))

    def on(self, endpoint: Endpoint) -> list[str]:
        """The requests that an endpoint has a share in, oldest first."""
        return [
            request_id for request_id, holds in self._holds.items() if any(hold.endpoint is endpoint for hold in holds)
        ]


MAX_POOLS = 1_000
"""Maximum number of requested models. Beyond it, requests for models without instances are refused."""


class Pool:
    """The requests for one model."""

    __slots__ = ("_fleet", "eviction", "model", "queue", "running", "saturation")

    queue: FlowControl
    eviction: InFlightEviction | None
    """Stops running requests for more important ones to the same model; None if nothing is stopped."""
    saturation: PoolSaturation | None
    """Measures how full the instances are; None if saturation does not hold requests back."""

    def __init__(self, model: str, plan: DispatchPlan, fleet: EndpointTable) -> None:
        self.model = model
        self.running = 0
        """Number of requests that were sent and have not ended."""
        self._fleet = fleet
        self.configure(plan)

    def configure(self, plan: DispatchPlan) -> None:
        """Start with an empty queue of the form that the plan specifies."""
        self.queue = plan.make_queue()
        self.eviction = None if plan.make_eviction is None else plan.make_eviction()
        self.saturation = None if plan.detector is None else PoolSaturation(plan.detector)

    @property
    def is_empty(self) -> bool:
        """Whether no instance serves the model."""
        return not len(self._fleet.serving(self.model))


class Pools:
    """The pool of each model. Clients choose the names: pools of models that no instance serves are bounded."""

    def __init__(self, plan: DispatchPlan, fleet: EndpointTable) -> None:
        self._plan = plan
        self._fleet = fleet
        self._by_model: dict[str, Pool] = {}
        self.busy: dict[str, Pool] = {}
        """All pools in which a request waits, and perhaps some in which none waits."""

    def of(self, model: str) -> Pool | None:
        """The pool of this model; None if requests wait for too many models that no instance serves."""
        pool = self._by_model.get(model)
        if pool is None:
            if len(self._by_model) >= MAX_POOLS and not len(self._fleet.serving(model)) and not self._forget():
                return None
            pool = self._by_model[model] = Pool(model, self._plan, self._fleet)
        self.busy[model] = pool
        return pool

    def idle(self, model: str) -> Pool | None:
        """The pool of this model if a new request may be sent without entering its queue."""
        pool = self._by_model.get(model)
        return pool if pool is not None and pool.queue.is_open else None

    def configure(self, plan: DispatchPlan) -> list[tuple[Pool, list[Queued]]]:
        """Give each pool an empty queue according to another plan. Returns the pools in which requests waited, with
        these requests in order."""
        self._plan = plan
        left = [(pool, list(pool.queue.waiting())) for pool in self.waiting()]
        for pool in self._by_model.values():
            before = pool.queue
            pool.configure(plan)
            pool.queue.continue_from(before)
        return left

    def _forget(self) -> int:
        """Forget pools that have neither requests nor instances. Returns how many."""
        idle = [m for m, pool in self._by_model.items() if not len(pool.queue) and not pool.running and pool.is_empty]
        for model in idle:
            del self._by_model[model]
        return len(idle)

    def waiting(self) -> list[Pool]:
        """The pools in which a request waits."""
        if not self.busy:
            return []
        waiting = [pool for pool in self.busy.values() if len(pool.queue)]
        if len(waiting) < len(self.busy):
            self.busy = {pool.model: pool for pool in waiting}
        return waiting

    def members_changed(self, now: float) -> None:
        for pool in self._by_model.values():
            pool.queue.pool_changed(pool.is_empty, now)

    def with_expired(self, now: float) -> list[Pool]:
        """The pools in which a request has waited too long."""
        return [pool for pool in self.waiting() if (due := pool.queue.next_expiry()) is not None and due <= now]

    def next_expiry(self) -> float | None:
        """When the next waiting request expires; None if none will expire unless something changes."""
        waiting = self.waiting()
        if not waiting:
            return None
        return min((due for pool in waiting if (due := pool.queue.next_expiry()) is not None), default=None)


class RequestTable:
    """The requests of one dispatcher. `waiting` and `sent` are for reading: only the methods change them."""

    __slots__ = ("_load", "_sent", "_waiting", "journal", "ledger", "pools", "sent", "waiting")

    waiting: Mapping[str, Queued]
    sent: Mapping[str, Sent]

    def __init__(self, plan: DispatchPlan, fleet: EndpointTable, journal: Journal) -> None:
        self.journal = journal
        self._load = fleet.load
        self.ledger = Ledger(fleet)
        self.pools = Pools(plan, fleet)
        self.waiting = self._waiting = dict[str, Queued]()
        self.sent = self._sent = dict[str, Sent]()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sent)

    def wait(self, item: Queued) -> None:
        """Add a request that its queue has accepted, as waiting."""
        self._waiting[item.request.request_id] = item

    def send(self, item: Queued, pool: Pool, endpoint: Endpoint, strategy: str, holds: Sequence[Hold]) -> Sent:
        """Add a request that did not wait, as sent to an instance, and reserve its share of the instance."""
        request_id = item.request.request_id
        sent = Sent(item, pool, endpoint, strategy, float(self._load.columns[LIGHTNESS][endpoint.row]))
        self.ledger.reserve(request_id, holds)
        pool.running += 1
        if pool.eviction is not None:
            pool.eviction.started(item)
        self._sent[request_id] = sent
        return sent

    def send_waiting(self, item: Queued, pool: Pool, endpoint: Endpoint, strategy: str, holds: Sequence[Hold]) -> Sent:
        """Move a request that was popped from the queue of its pool to its instance."""
        pool.queue.served(item)
        del self._waiting[item.request.request_id]
        return self.send(item, pool, endpoint, strategy, holds)

    def take_back(self, request_id: str, now: float) -> Sent | None:
        """Take back a request that has left its instance. Returns None if it was not sent, or was taken back before.

        Follow it with `wait_again`, or report the end of the request to the queue of the pool.
        """
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            self.ledger.release(request_id)
            pool = sent.pool
            pool.running -= 1
            if pool.eviction is not None:
                pool.eviction.ended(sent.item, now)
        return sent

    def wait_again(self, sent: Sent) -> None:
        """Let a request that was taken back wait in its old position. Raises what a user's ordering raises."""
        sent.pool.queue.put_back(sent.item)
        self._waiting[sent.item.request.request_id] = sent.item
        self.pools.busy[sent.pool.model] = sent.pool

    def revoke(self, request_id: str, refusal: Refusal, commands: list[DispatcherCommand]) -> None:
        """Mark a sent request as to be stopped. It leaves the table when the runtime reports that it has stopped."""
        sent = self._sent[request_id]
        sent.revoked = refusal
        commands.append(Revoke(sent.item.request, refusal))

    def refuse(self, request: RequestMetadata, refusal: Refusal, now: float, commands: list[DispatcherCommand]) -> None:
        self.leave(request, refusal, now)
        commands.append(Refuse(request, refusal))

    def leave(self, request: RequestMetadata, refusal: Refusal, now: float) -> None:
        """Remove a request whose client has gone or has its answer."""
        self._waiting.pop(request.request_id, None)
        self.journal.refused(request, refusal, now)

    def refuse_unordered(
        self, request: RequestMetadata, error: Exception, now: float, commands: list[DispatcherCommand]
    ) -> None:
        """Refuse a request on which a user's ordering raised."""
        self.journal.error(error)
        why = Reason("ordering-failed", {"error": f"{type(error).__name__}: {error}"})
        self.refuse(request, Refusal(Outcome.REJECTED_OTHER, why), now, commands)

    def configure(self, plan: DispatchPlan, now: float, commands: list[DispatcherCommand]) -> None:
        """Put waiting requests into the order of another plan. They keep waiting, and the time so far still counts."""
        waiting = self.pools.configure(plan)
        for sent in self._sent.values():  # first, so that they need not be compared with waiting ones
            sent.pool.queue.adopt(sent.item)
            if sent.pool.eviction is not None:
                sent.pool.eviction.started(sent.item)
        for pool, items in waiting:
            for item in items:
                try:
                    pool.queue.adopt(item)
                except Exception as error:
                    self.refuse_unordered(item.request, error, now, commands)

"""Requests on simulated engines. Like a gateway, this is the carrier of the dispatchers, but without connections."""

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any, NamedTuple, TypeAlias

import msgspec

from pointsman.reasons import Reason
from pointsman.routing.endpoints import Metrics
from pointsman.routing.events import Arrived, Cancelled, Ended, Failed, FirstToken, Refuse, Revoke, Send
from pointsman.routing.handlers.disagg import PREFILLER, address
from pointsman.runtimes.simulation.processes import VirtualClock
from pointsman.runtimes.traffic import Lane, TrafficHooks
from pointsman.simulator.performance import Job, Pace
from pointsman.types import RequestMetadata

RESET = Reason("connection-reset")
UNFIT = Reason("does-not-fit")


class LogEntry(NamedTuple):
    """Something that happened to a request."""

    at: float
    what: str
    """sent, first-token, failed; then, once, served or refused."""
    request_id: str
    where: str
    """The instance, or the outcome of a refusal."""


class SimulatedRequest(msgspec.Struct, eq=False):
    """A request between its arrival and its end."""

    lane: Lane
    request: RequestMetadata
    output_tokens: int
    hashes: Sequence[int]
    """Hashes of the blocks of its prompt, for prefix caches."""
    engine: "SimulatedEngine | None" = None
    job: Job | None = None
    """Its run on the engine; None while it waits."""
    begun: bool = False
    """Whether its answer has begun."""
    prefill: "SimulatedRequest | None" = None
    """Its prefill, while its prompt is read on another engine or its KV is in transfer."""
    decodes: "tuple[SimulatedRequest, str] | None" = None
    """For such a prefill: the request, and the instance that will write the answer. Otherwise None."""
    transferred: int = 0
    """Tokens of its prompt whose KV has arrived."""
    sent_at: float = nan
    """When the request was last sent; nan if it was never sent."""
    first_token_at: float = nan
    instance: str = ""
    """The instance to which it was last sent."""
    cached_tokens: int = 0
    """Tokens of its prompt that the instance had in its cache; known at the end."""


RequestListener: TypeAlias = Callable[[float, str, SimulatedRequest, str], None]
"""Called with the events of requests: the time, and the fields of `LogEntry`."""


class RequestLog:
    """The events of requests, in order."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []

    def note(self, at: float, what: str, one: SimulatedRequest, where: str) -> None:
        self.entries.append(LogEntry(at, what, one.request.request_id, where))


class SimulatedEngine:
    """Requests on a pace. The time of the pace is the time of the clock, unless a fault slows the engine down."""

    def __init__(
        self,
        instance_id: str,
        pace: Pace,
        clock: VirtualClock,
        began: Callable[["SimulatedEngine", SimulatedRequest], None],
        finished: Callable[["SimulatedEngine", SimulatedRequest, Job], None],
    ) -> None:
        """`began` is called with the first token of a request, `finished` with its last."""
        self.instance_id = instance_id
        self.requests: dict[str, SimulatedRequest] = {}
        self.pace = pace
        self._clock = clock
        self._began, self._finished = began, finished
        self._due = inf
        """When the pace is due next. A call at any other time is obsolete."""
        self._pass: PaceOfTime | None = None
        """How the pace's time passes; None if it passes like the clock."""
        self._metrics = Metrics()
        self._known_until = -inf
        """When its metrics change next, unless a request arrives or ends earlier."""

    def metrics(self, now: float) -> Metrics:
        """The metrics at this time of the clock. The same object as before if nothing has changed."""
        if now < self._known_until:
            return self._metrics
        load = self.pace.load(now if self._pass is None else self._pass.of(now))
        if self._pass is None:
            self._known_until = load.until
        found = Metrics(
            load.waiting, load.running, load.kv_usage, block_size=load.block_size, num_blocks=load.num_blocks
        )
        if found != self._metrics:
            self._metrics = found
        return self._metrics

    def set_rate(self, rate: float) -> None:
        """Set the speed of the engine to this multiple of its pace; with 0, it hangs."""
        now = self._clock.now()
        self._pass = PaceOfTime(now, self._time(), rate)
        self._due, self._known_until = inf, -inf
        self._wake()

    def submit(self, one: SimulatedRequest) -> bool:
        """Run a request. Returns False if it does not fit."""
        one.engine = self
        request, pace = one.request, self.pace
        self.requests[request.request_id] = one
        prompt_tokens = request.input_tokens or 1
        if not pace.fits(prompt_tokens, one.output_tokens):
            return False
        one.job = job = Job(prompt_tokens, one.output_tokens, one.hashes, one)
        job.transferred = one.transferred
        self._known_until = -inf
        pace.submit(job, self._time())
        self._wake()
        return True

    def drop(self, one: SimulatedRequest) -> None:
        job, one.engine, one.job = one.job, None, None
        del self.requests[one.request.request_id]
        if job is not None:
            self._known_until = -inf
            self.pace.cancel(job, self._time())
            self._wake()

    def _time(self) -> float:
        """The pace's time."""
        now = self._clock.now()
        return now if self._pass is None else self._pass.of(now)

    def _wake(self) -> None:
        due = self.pace.next_at
        if due is None:
            return
        if self._pass is not None:
            due = self._pass.when(due)
        if due < self._due:
            self._due = due
            self._clock.schedule(due, self._advance)

    def _advance(self) -> None:
        now = self._clock.now()
        if now < self._due:
            return
        self._due, self._known_until = inf, -inf
        if self._pass is not None:
            # Rounding must not put the pace's time before the end of a step.
            now = max(self._pass.of(now), self.pace.next_at or 0.0)
        for _, produced, finished in self.pace.advance(now):
            for job in produced:
                one: Any = job.owner
                if not one.begun and one.job is job:
                    one.begun = True
                    self._began(self, one)
            for job in finished:
                one = job.owner
                if one.job is job:
                    del self.requests[one.request.request_id]
                    one.engine = one.job = None
                    self._finished(self, one, job)
        self._wake()


class PaceOfTime(NamedTuple):
    """The time of an engine that is or was slowed down."""

    since: float
    """A time of the clock, at which the engine's time was `began`."""
    began: float
    rate: float

    def of(self, now: float) -> float:
        return self.began + (now - self.since) * self.rate

    def when(self, at: float) -> float:
        """The time of the clock; inf while the engine's time stands still."""
        return self.since + (at - self.began) / self.rate if self.rate else inf


class KvTransfer(NamedTuple):
    """The duration of a KV transfer from the engine that has read a prompt to the one that writes the answer."""

    base_s: float = 0.005
    token_s: float = 13e-6
    """Time per token over 25 GB/s: 80 layers of 8 heads with 128 numbers of 2 bytes, twice (for K and V)."""


class Prefills:
    """Prompts that one engine reads for answers from another engine."""

    def __init__(
        self,
        clock: VirtualClock,
        engine_of: Callable[[str], SimulatedEngine],
        transfer: KvTransfer,
        fail: Callable[[SimulatedRequest, Reason, bool], None],
    ) -> None:
        self._clock, self._engine_of, self._transfer, self._fail = clock, engine_of, transfer, fail

    def begin(self, one: SimulatedRequest, command: Send) -> bool:
        """Let the instance in its headers read the prompt. Returns False if the answering instance reads it."""
        at, fleet = command.headers.get(PREFILLER), one.lane.dispatcher.fleet
        found = None if at is None else next((each for each in fleet.roster if address(each) == at), None)
        if found is None or found is command.endpoint:
            return False
        prompt = SimulatedRequest(one.lane, one.request, 1, one.hashes)
        prompt.decodes = one, str(command.endpoint)
        one.prefill, one.transferred = prompt, 0
        if self._engine_of(str(found)).submit(prompt):
            return True
        self.drop(one)
        return False

    def drop(self, one: SimulatedRequest) -> None:
        """Drop the prompt of a request that is no longer sent to the instance."""
        prompt, one.prefill = one.prefill, None
        if prompt is not None and prompt.engine is not None:
            prompt.engine.drop(prompt)

    def ended(self, prompt: SimulatedRequest, tokens: int) -> None:
        """A prompt was read up to this many tokens. 0 if its engine has ended; the other engine then reads it again."""
        wait_s = self._transfer.base_s + tokens * self._transfer.token_s if tokens else 0.0
        self._clock.schedule(self._clock.now() + wait_s, self._arrived, prompt, tokens)

    def _arrived(self, prompt: SimulatedRequest, tokens: int) -> None:
        assert prompt.decodes is not None
        one, instance_id = prompt.decodes
        if one.prefill is prompt:  # otherwise the request was refused or sent elsewhere in the meantime
            one.prefill, one.transferred = None, tokens
            if not self._engine_of(instance_id).submit(one):
                self._fail(one, UNFIT, False)


class SimulatedEngines:
    """All engines: a `Carrier`, and the log of each request."""

    def __init__(
        self,
        clock: VirtualClock,
        default_pace: Callable[[], Pace],
        note: RequestListener,
        transfer: KvTransfer = KvTransfer(),  # noqa: B008
    ) -> None:
        """`default_pace`: for servers that the plane did not start. `note` is called with the events of requests."""
        self._note = note
        self._prefills = Prefills(clock, self.of, transfer, self._fail)
        self._clock = clock
        self._default_pace = default_pace
        self.each: dict[str, SimulatedEngine] = {}
        self.requests: dict[str, SimulatedRequest] = {}
        """Requests that have arrived and not ended."""
        self.emptied: Callable[[], None] = lambda: None
        """Called when the last request has ended."""

    def start(self, instance_id: str, pace: Pace) -> None:
        self.each[instance_id] = SimulatedEngine(instance_id, pace, self._clock, self._began, self._finished)

    def end(self, instance_id: str) -> None:
        """End an engine, and every connection to it."""
        engine = self.each.pop(instance_id, None)
        for one in [] if engine is None else list(engine.requests.values()):
            self._fail(one, RESET)

    def of(self, instance_id: str) -> SimulatedEngine:
        if instance_id not in self.each:
            self.start(instance_id, self._default_pace())
        return self.each[instance_id]

    def submit(self, lane: Lane, request: RequestMetadata, output_tokens: int, hashes: Sequence[int] = ()) -> None:
        """Let a request arrive. It gets exactly one `served` or `refused` in the log."""
        self.requests[request.request_id] = SimulatedRequest(lane, request, output_tokens, hashes)
        lane.tell(Arrived((request,)))

    def forget(self, hooks: TrafficHooks, instance_id: str) -> None:
        """Drop the requests of lanes with these hooks on an instance that has left them."""
        engine = self.each.get(instance_id)
        if engine is not None:
            for one in [one for one in engine.requests.values() if one.lane.hooks is hooks]:
                engine.drop(one)
                if one.decodes is not None:
                    self._prefills.ended(one, 0)

    # The carrier of the dispatchers

    def send(self, lane: Lane, command: Send) -> None:
        one, instance_id = self.requests[command.request.request_id], command.endpoint.instance.instance_id
        now = self._clock.now()
        if one.engine is not None:
            one.engine.drop(one)
        if one.prefill is not None:
            self._prefills.drop(one)
        one.transferred = 0
        one.sent_at, one.instance = now, instance_id
        self._note(now, "sent", one, instance_id)
        if command.headers and self._prefills.begin(one, command):
            return
        if not self.of(instance_id).submit(one):
            self._clock.call_soon(self._fail, one, UNFIT, False)

    def refuse(self, lane: Lane, command: Refuse | Revoke) -> None:
        one = self.requests.pop(command.request.request_id, None)
        if one is not None:
            if one.engine is not None:
                one.engine.drop(one)
            self._prefills.drop(one)
            self._note(self._clock.now(), "refused", one, command.refusal.outcome.value)
        lane.look_for_idle()
        if not self.requests:
            self.emptied()

    def revoke(self, lane: Lane, command: Revoke) -> None:
        self.refuse(lane, command)
        lane.tell(Cancelled(command.request.request_id))
        lane.look_for_idle()

    # What engines report

    def _began(self, engine: SimulatedEngine, one: SimulatedRequest) -> None:
        if one.decodes is not None:
            return
        one.first_token_at = now = self._clock.now()
        self._note(now, "first-token", one, engine.instance_id)
        one.lane.tell(FirstToken(one.request.request_id))

    def _finished(self, engine: SimulatedEngine, one: SimulatedRequest, job: Job) -> None:
        if one.decodes is not None:
            self._prefills.ended(one, job.prompt_tokens)
            return
        del self.requests[one.request.request_id]
        one.cached_tokens = job.cached_tokens
        self._note(self._clock.now(), "served", one, engine.instance_id)
        one.lane.tell(Ended(one.request.request_id, job.output_tokens, job.prompt_tokens, job.cached_tokens))
        one.lane.worked(engine.instance_id)
        if not self.requests:
            self.emptied()

    def _fail(self, one: SimulatedRequest, why: Reason, retry: bool = True) -> None:
        engine = one.engine
        if engine is not None:
            engine.drop(one)
            if one.decodes is not None:
                self._prefills.ended(one, 0)
                return
            self._note(self._clock.now(), "failed", one, engine.instance_id)
            one.lane.tell(Failed(one.request.request_id, why, retry))
            one.lane.failed(engine.instance_id, why)

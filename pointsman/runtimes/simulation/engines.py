"""Requests on simulated engines: the carrier of the dispatchers, as a gateway is, without connections."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pointsman.routing.endpoints import Metrics
from pointsman.routing.events import Arrived, Cancelled, Ended, Failed, FirstToken, Refuse, Revoke, Send
from pointsman.runtimes.interface import Clock, Timer
from pointsman.runtimes.traffic import Lane
from pointsman.simulator.performance import Job, Pace
from pointsman.types import RequestMetadata

RESET = "the connection was reset"


class LogEntry(NamedTuple):
    """Something that happened to a request."""

    at: float
    what: str
    """sent, first-token, failed; then, once, served or refused."""
    request_id: str
    where: str
    """The instance; of a refusal, its outcome."""


class SimulatedRequest:
    """A request between its arrival and its end."""

    __slots__ = ("begun", "engine", "hashes", "job", "lane", "output_tokens", "request")

    def __init__(self, lane: Lane, request: RequestMetadata, output_tokens: int, hashes: Sequence[int]) -> None:
        self.lane = lane
        self.request = request
        self.output_tokens = output_tokens
        self.hashes = hashes
        """Of the blocks of its prompt, for prefix caches."""
        self.engine: SimulatedEngine | None = None
        self.job: Job | None = None
        """Its run on that engine; None while it waits."""
        self.begun = False
        """Its answer has begun."""


class RequestLog:
    """What became of requests, in order."""

    def __init__(self, clock: Clock) -> None:
        self.entries: list[LogEntry] = []
        self._clock = clock

    def note(self, what: str, one: SimulatedRequest, where: str) -> None:
        self.entries.append(LogEntry(self._clock.now(), what, one.request.request_id, where))


class SimulatedEngine:
    def __init__(
        self,
        instance_id: str,
        pace: Pace,
        clock: Clock,
        began: Callable[["SimulatedEngine", SimulatedRequest], None],
        finished: Callable[["SimulatedEngine", SimulatedRequest, Job], None],
    ) -> None:
        """`began` is called with the first token of a request, `finished` with its last."""
        self.instance_id = instance_id
        self.requests: dict[str, SimulatedRequest] = {}
        self._pace = pace
        self._clock = clock
        self._began, self._finished = began, finished
        self._timer: Timer | None = None

    def metrics(self) -> Metrics:
        pace = self._pace
        return Metrics(
            waiting_queue_size=pace.waiting, running_requests_size=pace.running, kv_cache_usage=pace.kv_usage
        )

    def submit(self, one: SimulatedRequest) -> bool:
        """Run a request; False if it does not fit."""
        one.engine = self
        self.requests[one.request.request_id] = one
        prompt_tokens = max(one.request.input_tokens, 1)
        if not self._pace.fits(prompt_tokens, one.output_tokens):
            return False
        one.job = Job(prompt_tokens, one.output_tokens, one.hashes, owner=one)
        self._pace.submit(one.job, self._clock.now())
        self._wake()
        return True

    def drop(self, one: SimulatedRequest) -> None:
        job, one.engine, one.job = one.job, None, None
        del self.requests[one.request.request_id]
        if job is not None:
            self._pace.cancel(job, self._clock.now())
            self._wake()

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._pace.next_at
        self._timer = None if due is None else self._clock.call_at(due, self._advance)

    def _advance(self) -> None:
        self._timer = None
        for step in self._pace.advance(self._clock.now()):
            for job in step.produced:
                one: Any = job.owner
                if not one.begun and one.job is job:
                    one.begun = True
                    self._began(self, one)
            for job in step.finished:
                one = job.owner
                if one.job is job:
                    del self.requests[one.request.request_id]
                    one.engine = one.job = None
                    self._finished(self, one, job)
        self._wake()


class SimulatedEngines:
    """All engines: a `Carrier`, and the log of what became of each request."""

    def __init__(self, clock: Clock, default_pace: Callable[[], Pace]) -> None:
        """`default_pace`: of servers that the plane did not start."""
        self.log = RequestLog(clock)
        self._clock = clock
        self._default_pace = default_pace
        self._engines: dict[str, SimulatedEngine] = {}
        self._requests: dict[str, SimulatedRequest] = {}

    def start(self, instance_id: str, pace: Pace) -> None:
        self._engines[instance_id] = SimulatedEngine(instance_id, pace, self._clock, self._began, self._finished)

    def end(self, instance_id: str) -> None:
        """It has ended, and every connection to it with it."""
        engine = self._engines.pop(instance_id, None)
        for one in [] if engine is None else list(engine.requests.values()):
            self._fail(one, RESET)

    def of(self, instance_id: str) -> SimulatedEngine:
        if instance_id not in self._engines:
            self.start(instance_id, self._default_pace())
        return self._engines[instance_id]

    def submit(self, lane: Lane, request: RequestMetadata, output_tokens: int, hashes: Sequence[int] = ()) -> None:
        """A request arrives. It gets exactly one `served` or `refused` in the log."""
        self._requests[request.request_id] = SimulatedRequest(lane, request, output_tokens, hashes)
        lane.tell(Arrived((request,)))

    def forget(self, instance_id: str) -> None:
        """An instance has left its lane: what it still does for requests is not wanted any more."""
        engine = self._engines.get(instance_id)
        if engine is not None:
            for one in list(engine.requests.values()):
                engine.drop(one)

    # The carrier of the dispatchers

    def send(self, lane: Lane, command: Send) -> None:
        one, instance_id = self._requests[command.request.request_id], str(command.endpoint)
        if one.engine is not None:
            one.engine.drop(one)
        self.log.note("sent", one, instance_id)
        if not self.of(instance_id).submit(one):
            self._clock.call_soon(self._fail, one, "the prompt and its answer do not fit", False)

    def refuse(self, lane: Lane, command: Refuse | Revoke) -> None:
        one = self._requests.pop(command.request.request_id, None)
        if one is not None:
            if one.engine is not None:
                one.engine.drop(one)
            self.log.note("refused", one, command.refusal.outcome.value)
        lane.look_for_idle()

    def revoke(self, lane: Lane, command: Revoke) -> None:
        self.refuse(lane, command)
        lane.tell(Cancelled(command.request.request_id))
        lane.look_for_idle()

    # What engines report

    def _began(self, engine: SimulatedEngine, one: SimulatedRequest) -> None:
        self.log.note("first-token", one, engine.instance_id)
        one.lane.tell(FirstToken(one.request.request_id))

    def _finished(self, engine: SimulatedEngine, one: SimulatedRequest, job: Job) -> None:
        del self._requests[one.request.request_id]
        self.log.note("served", one, engine.instance_id)
        one.lane.tell(Ended(one.request.request_id, job.output_tokens, job.prompt_tokens, job.cached_tokens))
        one.lane.worked(engine.instance_id)

    def _fail(self, one: SimulatedRequest, why: str, retry: bool = True) -> None:
        engine = one.engine
        if engine is not None:
            engine.drop(one)
            self.log.note("failed", one, engine.instance_id)
            one.lane.tell(Failed(one.request.request_id, why, retry))
            one.lane.failed(engine.instance_id, why)

"""Watchers of a dispatcher: its shadow, and a canary, which is a candidate that decides for a share of the requests.

Enters: requests to decide on, and the records of ended requests. Leaves: choices, and the counts of both shares. The
one rule: where the candidate has no answer, the policy in force decides at once.
"""

from collections.abc import Callable, Iterable, Sequence
from math import exp, log
from typing import Any, TypeAlias
from zlib import crc32

import msgspec

from pointsman.routing.candidates import CandidatePolicy, result_of
from pointsman.routing.decisions import Choice, decide
from pointsman.routing.endpoints import Endpoint, EndpointTable
from pointsman.routing.events import DispatcherCommand, Ended
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.records import Record, Records
from pointsman.routing.routes import BatchPolicy, ConfiguredRoute, Route
from pointsman.routing.shadow import Shadow
from pointsman.routing.user_code import decisions_in
from pointsman.selection import Cycle, SchedulingFailure
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision

SESSION_HEADER = "x-session-id"
MAX_MEMBERS = 100_000
"""Maximum number of requests in flight whose share is remembered."""
_STEP = log(1.01)


class ShareLatencies(msgspec.Struct):
    """Counts of latencies in steps of 1 %, so that the counts of several gateways can be added up."""

    count: int = 0
    total_ms: float = 0.0
    steps: dict[int, int] = {}

    def note(self, ms: float) -> None:
        self.count += 1
        self.total_ms += ms
        step = round(log(max(ms, 1e-3)) / _STEP)
        self.steps[step] = self.steps.get(step, 0) + 1

    def add(self, other: "ShareLatencies") -> None:
        self.count += other.count
        self.total_ms += other.total_ms
        for step, count in other.steps.items():
            self.steps[step] = self.steps.get(step, 0) + count

    @property
    def mean(self) -> float | None:
        return self.total_ms / self.count if self.count else None

    def percentile(self, share: float) -> float | None:
        """A percentile of the latencies; None if no latency was counted."""
        seen, wanted = 0, share * self.count
        for step in sorted(self.steps):
            seen += self.steps[step]
            if seen >= wanted:
                return exp(step * _STEP)
        return None


class ShareCounts(msgspec.Struct):
    """Outcomes of one share of the requests."""

    requests: int = 0
    """Requests that have ended."""
    errors: int = 0
    met: int = 0
    missed: int = 0
    ttft: ShareLatencies = msgspec.field(default_factory=ShareLatencies)
    tpot: ShareLatencies = msgspec.field(default_factory=ShareLatencies)
    e2e: ShareLatencies = msgspec.field(default_factory=ShareLatencies)

    def note(self, record: Record) -> None:
        state = record.state
        if state == "abandoned":
            return  # the client has gone, which says nothing about the decision
        self.requests += 1
        if record.met_deadline is not None:
            self.met += record.met_deadline
            self.missed += not record.met_deadline
        if state != "served" or record.ended_at is None:
            self.errors += 1
            return
        whole_ms = (record.ended_at - record.arrived_at) * 1000
        self.e2e.note(whole_ms)
        if record.first_token_at is not None:
            first_ms = (record.first_token_at - record.arrived_at) * 1000
            self.ttft.note(first_ms)
            if (record.output_tokens or 0) > 1:
                self.tpot.note((whole_ms - first_ms) / (record.output_tokens - 1))  # type: ignore[operator]

    def add(self, other: "ShareCounts") -> None:
        for name in ("requests", "errors", "met", "missed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("ttft", "tpot", "e2e"):
            getattr(self, name).add(getattr(other, name))


class CanaryCounts(msgspec.Struct):
    """Counts of both shares at one gateway."""

    run: str
    """The id of its promotion."""
    in_force: ShareCounts = msgspec.field(default_factory=ShareCounts)
    candidate: ShareCounts = msgspec.field(default_factory=ShareCounts)
    stood_in: int = 0
    """Number of requests in the candidate's share for which the policy in force decided, because the candidate had no
    answer."""
    failures: int = 0
    """Number of these requests for which the candidate raised, blocked or was suspended."""
    problem: str = ""
    """The last failure of the candidate."""

    def add(self, other: "CanaryCounts") -> None:
        self.in_force.add(other.in_force)
        self.candidate.add(other.candidate)
        self.stood_in += other.stood_in
        self.failures += other.failures
        self.problem = self.problem or other.problem


class Canary:
    """A candidate that decides for a share of the requests."""

    def __init__(self, run: str, candidate: CandidatePolicy, share: float) -> None:
        self.candidate = candidate
        self.share = share
        self.counts = CanaryCounts(run)
        self._run = run.encode()
        self._members: dict[str, bool] = {}
        """Requests in flight, and whether they are in its share."""

    def takes(self, request: RequestMetadata) -> bool:
        """Whether a request is in the canary's share. Either all requests of a session are in it, or none."""
        key = request.headers.get(SESSION_HEADER) or request.request_id
        taken = crc32(key.encode("utf-8", "replace"), crc32(self._run)) < self.share * 2**32
        if len(self._members) < MAX_MEMBERS:
            self._members[request.request_id] = taken
        return taken

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | None:
        """The candidate's choice; None if the policy in force must decide."""
        candidate = self.candidate
        before = candidate.conduct.failures()
        choice = candidate.act(cycle, endpoints)
        if choice is None:
            self.counts.stood_in += 1
            if candidate.conduct.failures() > before or candidate.conduct.suspended(cycle.now) is not None:
                self.counts.failures += 1
                self.counts.problem = str(candidate.conduct.problem())
        return choice

    def ended(self, record: Record) -> None:
        taken = self._members.pop(record.request_id, None)
        if taken is not None:
            (self.counts.candidate if taken else self.counts.in_force).note(record)


class Watcher:
    """A layer between a dispatcher and its route, or its policy."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self.canary: Canary | None = None
        self.fleet: EndpointTable | None = None
        self.extractors = tuple(one for candidate in shadow.candidates for one in candidate.extractors)

    def attach(self, fleet: EndpointTable, records: Records, plugins: Iterable[Any]) -> None:
        """Attach it to the dispatcher that has these plugins."""
        self.fleet = fleet
        self.shadow.attach(fleet, records)
        acting = list(plugins)
        for candidate in self.shadow.candidates:
            candidate.share(acting)

    def route(self, route: Route) -> Route:
        return WatchedRoute(route, self)

    def policy(self, policy: BatchPolicy) -> BatchPolicy:
        return WatchedPolicy(policy, self)

    def first_token(self, endpoint: Endpoint, request: RequestMetadata, now: float) -> None:
        for candidate in self.shadow.candidates:
            candidate.progressed(now, "first_token", endpoint, request)

    def ended(self, endpoint: Endpoint, request: RequestMetadata, answer: Ended | None, now: float) -> None:
        for candidate in self.shadow.candidates:
            candidate.progressed(now, "ended", endpoint, request, answer)

    def departed(self, endpoint: Endpoint) -> None:
        self.shadow.departed(endpoint)


class WatchedRoute:
    """A `Route`: for the canary's share its route, and for the rest the route in force."""

    def __init__(self, route: Route, watcher: Watcher) -> None:
        self.inner = route
        self.name = route.name
        self._watcher = watcher
        self._producers = route.scheduler.producers if isinstance(route, ConfiguredRoute) else ()

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        watcher = self._watcher
        canary, shadow = watcher.canary, watcher.shadow
        if canary is not None and canary.takes(cycle.request):
            taken = canary.choose(cycle, endpoints)
            if taken is not None:
                for producer in self._producers:  # plugins in force keep track of where requests go
                    producer.produce(cycle, endpoints)
                return taken
        began = shadow.timer()
        choice = self.inner.choose(cycle, endpoints)
        seconds = shadow.timer() - began
        if type(choice) is Choice:
            if canary is None:
                shadow.decided(cycle, endpoints, choice, seconds)
            elif canary.candidate.has_own_state:
                shadow.enqueue(cycle, endpoints, choice.result, sampled=False)
        return choice


class WatchedPolicy:
    """A `BatchPolicy`: the policy in force, except that the canary decides for its share, one request at a time."""

    now: float | None = None
    seed: int = 0

    def __init__(self, policy: BatchPolicy, watcher: Watcher) -> None:
        self.inner = policy
        self.name = policy.name
        self.price_per_gpu_hour = policy.price_per_gpu_hour
        self._watcher = watcher

    def schedule(
        self, requests: list[RequestMetadata], instances: list[ExecutionInstance]
    ) -> Iterable[SchedulingDecision]:
        policy, watcher = self.inner, self._watcher
        policy.now, policy.seed = self.now, self.seed
        canary, shadow = watcher.canary, watcher.shadow
        mine = {one.request_id: one for one in requests if canary is not None and canary.takes(one)}
        began = shadow.timer()
        decisions = decisions_in(policy.schedule(requests, instances))
        seconds = shadow.timer() - began
        assert watcher.fleet is not None
        endpoints, now = watcher.fleet.roster, 0.0 if self.now is None else self.now
        asked = {one.request_id: one for one in requests}
        made = []
        for number, decision in enumerate(decisions):
            request = asked.get(decision.request_id)
            if canary is not None and decision.request_id in mine:
                choice = canary.choose(Cycle(mine[decision.request_id], now, self.seed + number), endpoints)
                made.append(decision if choice is None else choice.decision)
                continue
            made.append(decision)
            if canary is None and request is not None and decision.target_instance_id in watcher.fleet:
                self._show(request, decision, endpoints, now, seconds / len(decisions))
        return made

    def _show(
        self, request: RequestMetadata, decision: SchedulingDecision, endpoints: Endpoints, now: float, seconds: float
    ) -> None:
        assert self._watcher.fleet is not None
        target = self._watcher.fleet[decision.target_instance_id]
        how = ("best-by-rule", self.name, "schedule()", len(endpoints))
        decided = decide(request, target, endpoints, self.price_per_gpu_hour, how)
        cycle: RequestCycle = Cycle(request, now, self.seed)
        self._watcher.shadow.decided(cycle, endpoints, Choice(result_of(target, endpoints), decided), seconds)


# Watching without deciding

Handle: TypeAlias = Callable[[Any, float, list[DispatcherCommand]], None]


def tapped(handle: Handle, tap: Callable[[Any, float], None]) -> Handle:
    """A function that calls `tap` first, and then `handle`."""

    def handled(event: Any, now: float, commands: list[DispatcherCommand]) -> None:
        tap(event, now)
        handle(event, now, commands)

    return handled


def each_of(calls: Sequence[Callable[[Record], None]]) -> Callable[[Record], None]:
    """A function that calls all of these functions, one after the other."""

    def ended(record: Record) -> None:
        for call in calls:
            call(record)

    return ended

"""Fairness by recent service between programs, such as the sessions of agents; and how programs get their names."""

from collections.abc import Sequence
from math import exp2, log2
from typing import Literal, Protocol, runtime_checkable

from pointsman.routing.queue.fairness import Turns
from pointsman.routing.queue.items import FAIRNESS_ALIAS, FAIRNESS_HEADER, Queued, flow_of, header_of
from pointsman.types import MAX_NAME, RequestMetadata


@runtime_checkable
class FlowNamer(Protocol):
    """Names the flows of requests. Flows take turns, however many requests each of them has."""

    def name_flow(self, request: RequestMetadata) -> str:
        """The name of a request's flow, of at most 600 characters. Names are kept while their requests wait or run."""
        ...


SESSION_HEADERS = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
"""Headers in which agents name their session: Claude Code, OpenCode, Codex, older versions of Codex."""


class AgentIdentity:
    """Makes each session of an agent a separate flow, by the headers in which agents name their sessions.

    `additional_session_headers` are tried first. A fairness header takes precedence over all session headers. Each
    session belongs to one user: equal session names from different users are different flows.
    """

    def __init__(self, additional_session_headers: Sequence[str] = ()) -> None:
        if "" in additional_session_headers:
            raise ValueError("additionalSessionHeaders has an empty name; each must be that of a header")
        self._headers = (*(name.lower() for name in additional_session_headers), *SESSION_HEADERS)

    def name_flow(self, request: RequestMetadata) -> str:
        headers = request.headers
        if header_of(request, FAIRNESS_HEADER, FAIRNESS_ALIAS):
            return flow_of(request)
        session = next((value for name in self._headers if (value := headers.get(name, ""))), "")[:MAX_NAME]
        if not session:
            return flow_of(request)
        return f"{request.user_id}/{session}" if request.user_id else session


INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
MAX_PROGRAMS = 10_000
"""Maximum number of programs, because clients name them. Beyond it, programs that ended longest ago are dropped."""
FAR = 500.0
"""Number of half-lives after which the reference time moves, so that values stay small."""


class _Program:
    __slots__ = ("ended_at", "in_flight", "service")

    def __init__(self) -> None:
        self.service = 0.0
        """Weighted tokens as of the reference time, so that the values of idle programs need no update."""
        self.in_flight = 0
        self.ended_at = 0.0
        """When the program was last served, or began to wait."""


class ProgramAwareFairness:
    """The program with the least recent service is next, with some credit for how long its head has waited.

    Service is input tokens plus twice the output tokens of requests that have ended; it halves every
    `las_half_life_seconds`. A program scores `las_weight_service` * (1 - service) + `las_weight_head_wait` * wait.
    Service and wait are scaled among the waiting programs, from 0 for the least to 1 for the most. Among programs with
    equal scores, the one whose head came first is next. Bands share one account per program.
    """

    def __init__(
        self,
        strategy: Literal["las"] = "las",
        las_weight_service: float = 0.8,
        las_weight_head_wait: float = 0.2,
        las_decay_factor: float = 0.99997,
        las_half_life_seconds: float = 60.0,
        eviction_ttl_seconds: float = 3600.0,
        eviction_sweep_seconds: float = 300.0,
    ) -> None:
        if strategy != "las":
            raise ValueError(f'strategy is "{strategy}"; it must be las, for least attained service')
        given = {"lasWeightService": las_weight_service, "lasWeightHeadWait": las_weight_head_wait}
        for parameter, value in {**given, "lasHalfLifeSeconds": las_half_life_seconds}.items():
            if not value >= 0:
                raise ValueError(f"{parameter} is {value:g}; it must be 0 or more")
        if not 0 < las_decay_factor <= 1:
            raise ValueError(f"lasDecayFactor is {las_decay_factor:g}; it must be above 0 and at most 1")
        for parameter, value in {
            "evictionTtlSeconds": eviction_ttl_seconds,
            "evictionSweepSeconds": eviction_sweep_seconds,
        }.items():
            if not value > 0:
                raise ValueError(f"{parameter} is {value:g}; it must be above 0")
        self.weights = (las_weight_service, las_weight_head_wait)
        self._halvings_per_s = 1 / las_half_life_seconds if las_half_life_seconds else -log2(las_decay_factor)
        self._ttl_s, self._sweep_s = eviction_ttl_seconds, eviction_sweep_seconds
        self._swept_at = 0.0
        self._reference = 0.0
        self.programs: dict[str, _Program] = {}
        """Programs in the order in which they were last served."""

    def for_band(self) -> Turns:
        return _LeastServed(self)

    def program(self, name: str, now: float) -> _Program:
        program = self.programs.get(name)
        if program is None:
            program = self.programs[name] = _Program()
            program.ended_at = now
        return program

    def service(self, name: str, now: float) -> float:
        """The weighted tokens that a program was served, decayed up to now."""
        program = self.programs.get(name)
        return 0.0 if program is None else program.service * exp2((self._reference - now) * self._halvings_per_s)

    def served(self, name: str, tokens: float, now: float) -> None:
        if (now - self._reference) * self._halvings_per_s > FAR:
            fade = exp2((self._reference - now) * self._halvings_per_s)
            for one in self.programs.values():
                one.service *= fade
            self._reference = now
        program = self.programs.pop(name, None) or _Program()
        self.programs[name] = program
        program.service += tokens * exp2((now - self._reference) * self._halvings_per_s)
        program.ended_at = now
        if now - self._swept_at >= self._sweep_s or len(self.programs) > MAX_PROGRAMS:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Drop programs that have not been served for long and have no requests in flight."""
        self._swept_at = now
        too_many = len(self.programs) - MAX_PROGRAMS
        for name, one in list(self.programs.items()):
            if not one.in_flight and (now - one.ended_at > self._ttl_s or too_many > 0):
                del self.programs[name]
                too_many -= 1


class _LeastServed(Turns):
    """The turns of one band. `next` takes one step per waiting flow, because scores are relative to the other flows."""

    def __init__(self, policy: ProgramAwareFairness) -> None:
        self._policy = policy
        self._heads: dict[str, Queued] = {}

    def waits(self, flow: str, head: Queued) -> None:
        self._heads[flow] = head

    def leaves(self, flow: str) -> None:
        self._heads.pop(flow, None)

    def next(self) -> str | None:
        heads = self._heads
        if len(heads) < 2:
            return next(iter(heads), None)
        programs = self._policy.programs
        services = {name: one.service if (one := programs.get(name)) is not None else 0.0 for name in heads}
        least, most = min(services.values()), max(services.values())
        arrivals = [head.enqueued_at for head in heads.values()]
        first, last = min(arrivals), max(arrivals)
        by_service, by_wait = self._policy.weights
        of_service = by_service / (most - least) if most > least else 0.0
        of_wait = by_wait / (last - first) if last > first else 0.0

        def cost(name: str) -> tuple[float, int]:
            head = heads[name]
            return (services[name] - least) * of_service + (head.enqueued_at - first) * of_wait, head.seq

        return min(heads, key=cost)

    def taken(self, item: Queued) -> None:
        self._policy.program(item.flow, item.enqueued_at).in_flight += 1

    def returned(self, item: Queued) -> None:
        self._policy.program(item.flow, item.enqueued_at).in_flight -= 1

    def ended(self, item: Queued, output_tokens: int) -> None:
        program = self._policy.program(item.flow, item.enqueued_at)
        program.in_flight -= 1
        if item.ended_at is not None:
            tokens = INPUT_WEIGHT * item.request.input_tokens + OUTPUT_WEIGHT * output_tokens
            self._policy.served(item.flow, tokens, item.ended_at)

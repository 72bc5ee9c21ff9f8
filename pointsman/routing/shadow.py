"""Shadow policies: candidates that decide on live requests without acting, and how they compare.

Enters: each decision of the policy in force, with the numbers that it was made from. Leaves: per candidate, how often
it agrees, what its choices are expected to lead to, and where it differs most. The one rule: a candidate costs at most
its share of decision time, runs after the request was sent, and changes no decision, whatever it does.

Only requests that were really sent count. A candidate decides with the real load, and uses the prefix producers of the
policy in force if both have the same settings.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import ceil, inf, isfinite
from typing import Any, Protocol

import msgspec

from pointsman.reasons import Reason
from pointsman.routing.candidates import CandidatePolicy, uncached_tokens
from pointsman.routing.decisions import Choice
from pointsman.routing.endpoints import IN_FLIGHT_TOKENS, LOAD, Endpoint, EndpointTable
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.records import Record, Records
from pointsman.selection import Roster, SchedulingResult
from pointsman.types import RequestMetadata

BUDGET = 0.1
"""Maximum time of all candidates together, as a share of the time that the decisions of the policy in force take."""
MAX_QUEUED = 64
"""Maximum number of decisions that wait for the candidates. While so many wait, no more are sampled."""
MAX_CREDIT_S = 0.05
"""Maximum unused budget that is kept."""
MAX_OPEN = 1_000
"""Maximum number of sampled requests that wait for their first token."""
AT_ONCE = 8
"""How many of these requests are checked for each new sample."""
MAX_SAMPLES = 1_000
"""Percentiles are computed from this many of the newest samples per candidate."""
MAX_DIFFERENCES = 10
MIN_LEARNED = 20
"""Number of outcomes after which the predictions of the model of first tokens are used."""


class FirstTokenModel:
    """Predicts the seconds from a decision to the first token. The model is learned from outcomes. It is linear in the
    prompt tokens that the instance has to compute first and in its requests, with an offset for each instance.

    Recursive least squares; the last few hundred outcomes count.
    """

    KEEP = 0.998
    """The weight of an outcome once the next one is known."""

    def __init__(self) -> None:
        self.learned = 0
        self._weights = [0.0, 0.0, 0.0]
        self._spread = [[1e3 if row == column else 0.0 for column in range(3)] for row in range(3)]
        self._own: dict[str, float] = {}
        """The offset of each instance: how many seconds later its first tokens come than the shared model expects."""

    def expected(self, tokens: float, load: float, instance_id: str) -> float | None:
        """The expected time; None before enough outcomes are known."""
        if self.learned < MIN_LEARNED:
            return None
        return max(0.0, self._linear(_features(tokens, load)) + self._own.get(instance_id, 0.0))

    def learn(self, tokens: float, load: float, instance_id: str, seconds: float) -> None:
        x = _features(tokens, load)
        spread, keep = self._spread, self.KEEP
        pulled = [sum(row[i] * x[i] for i in range(3)) for row in spread]
        gain = [one / (keep + sum(x[i] * pulled[i] for i in range(3))) for one in pulled]
        error = seconds - self._linear(x)
        self._weights = [weight + step * error for weight, step in zip(self._weights, gain, strict=True)]
        self._spread = [[(spread[r][c] - gain[r] * pulled[c]) / keep for c in range(3)] for r in range(3)]
        left = seconds - self._linear(x)
        before = self._own.get(instance_id, 0.0)
        self._own[instance_id] = before + 0.1 * (left - before)
        self.learned += 1

    def forget(self, instance_id: str) -> None:
        self._own.pop(instance_id, None)

    def _linear(self, x: Sequence[float]) -> float:
        return sum(weight * value for weight, value in zip(self._weights, x, strict=True))


def _features(tokens: float, load: float) -> tuple[float, float, float]:
    return 1.0, tokens / 1000, load


# Counts as plain data, so that the counts of several gateways can be added up


class Sample(msgspec.Struct, array_like=True, gc=False):
    """One sampled request whose outcome is known: milliseconds to the first token, from the decision on."""

    candidate_ms: float
    in_force_ms: float
    """The expected time on the instance to which it was sent."""
    actual_ms: float


class Difference(msgspec.Struct, gc=False):
    """A request that a candidate would have sent elsewhere."""

    request_id: str
    instance: str
    """The instance to which it was sent."""
    candidate_instance: str
    gain_ms: float
    """How much earlier the first token was expected there."""
    actual_ms: float


class CandidateCounts(msgspec.Struct):
    """The results of one candidate."""

    name: str
    decided: int = 0
    agreed: int = 0
    unplaced: int = 0
    """Number of requests for which it found no instance."""
    errors: int = 0
    seconds: float = 0.0
    """CPU time."""
    costs: tuple[float, float, int] = (0.0, 0.0, 0)
    """Expected costs of its choices and of the choices in force, and the number of requests with both costs known."""
    samples: list[Sample] = []
    differences: list[Difference] = []
    own_state: bool = False
    """Whether it has state that only sampled requests update."""
    suspended_s: float | None = None
    problem: str = ""
    """Its last failure."""

    def add(self, other: "CandidateCounts") -> None:
        for name in ("decided", "agreed", "unplaced", "errors", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        ours, theirs = self.costs, other.costs
        self.costs = ours[0] + theirs[0], ours[1] + theirs[1], ours[2] + theirs[2]
        self.samples = self.samples + other.samples
        self.differences = _largest([*self.differences, *other.differences])
        self.suspended_s = max((one for one in (self.suspended_s, other.suspended_s) if one is not None), default=None)
        self.problem = self.problem or other.problem


class ShadowCounts(msgspec.Struct):
    """The counts of a shadow and of its candidates."""

    decisions: int = 0
    sampled: int = 0
    seconds: float = 0.0
    """Time that the decisions of the policy in force took."""
    overhead_s: float = 0.0
    """Time of the sampling itself."""
    budget: float = BUDGET
    candidates: list[CandidateCounts] = []

    def add(self, other: "ShadowCounts") -> None:
        for name in ("decisions", "sampled", "seconds", "overhead_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        known = {one.name: one for one in self.candidates}
        for theirs in other.candidates:
            if theirs.name in known:
                known[theirs.name].add(theirs)
            else:
                self.candidates.append(theirs)

    def report(self) -> dict[str, Any]:
        """The report that `pointsman shadow --json` prints."""
        used = self.overhead_s + sum(one.seconds for one in self.candidates)
        return {
            "decisions": self.decisions,
            "sampled": self.sampled,
            "sampled_share": self.sampled / self.decisions if self.decisions else None,
            "budget": self.budget,
            "cpu_share": used / self.seconds if self.seconds else None,
            "candidates": [_candidate_report(one) for one in self.candidates],
        }


def _candidate_report(one: CandidateCounts) -> dict[str, Any]:
    samples, (cost, in_force, priced) = one.samples, one.costs
    actual, expected = [each.actual_ms for each in samples], [each.in_force_ms for each in samples]
    # Both expectations are off by the same factor; the measured values show it.
    scale = sum(actual) / sum(expected) if sum(expected) > 0 else 1.0
    theirs = [each.candidate_ms * scale for each in samples]
    return {
        "name": one.name,
        "decided": one.decided,
        "agreement": one.agreed / one.decided if one.decided else None,
        "unplaced": one.unplaced,
        "errors": one.errors,
        "suspended_s": one.suspended_s,
        "problem": one.problem,
        "own_state": one.own_state,
        "seconds": one.seconds,
        "outcomes": len(samples),
        "ttft_ms": _spread_of(theirs),
        "in_force_ttft_ms": _spread_of(actual),
        "calibration": scale if samples else None,
        "error_ms": sum(abs(each.in_force_ms - each.actual_ms) for each in samples) / len(samples) if samples else None,
        "cost": cost / priced if priced else None,
        "in_force_cost": in_force / priced if priced else None,
        "differences": [msgspec.to_builtins(each) for each in one.differences],
    }


def _spread_of(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": sum(ordered) / len(ordered),
        "p50": percentile(ordered, 0.5),
        "p90": percentile(ordered, 0.9),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the sorted values that at least this share of them does not exceed."""
    return ordered[max(ceil(share * len(ordered)) - 1, 0)]


def _largest(differences: Iterable[Difference]) -> list[Difference]:
    return sorted(differences, key=lambda one: -abs(one.gain_ms))[:MAX_DIFFERENCES]


# The shadow of one dispatcher


class Decision(msgspec.Struct, gc=False):
    """A decision of the policy in force, and the numbers that it was made from."""

    request: RequestMetadata
    now: float
    seed: int
    endpoints: Endpoints
    target: Endpoint
    result: SchedulingResult[Endpoint]
    uncached: Any
    """Tokens of the prompt that each endpoint has to compute; None if the policy in force does not provide them."""
    cost: float | None
    sampled: bool
    """Whether the decision is compared. If not, it only updates the state of a candidate that decides for a share."""


class Opinion(msgspec.Struct, gc=False):
    """A candidate's decision for a request whose outcome is not known yet."""

    candidate: CandidatePolicy
    instance: str
    expected_s: float | None


class Awaited(msgspec.Struct, gc=False):
    """A sampled request that waits for its first token."""

    record: Record
    tokens: float
    load: float
    expected_s: float | None
    opinions: list[Opinion]


class ShadowClock(Protocol):
    """The time of dispatchers."""

    def now(self) -> float: ...

    def call_soon(self, call: Callable[..., None], *args: Any) -> Any:
        """Call once the current event has been handled."""
        ...


class Shadow:
    """The candidates of one dispatcher."""

    def __init__(
        self,
        candidates: Sequence[CandidatePolicy],
        budget: float,
        timer: Callable[[], float],
        clock: ShadowClock,
    ) -> None:
        """`timer` returns seconds, for the budget."""
        self.candidates = candidates
        self.counts = ShadowCounts(
            budget=budget, candidates=[CandidateCounts(one.name, own_state=one.has_own_state) for one in candidates]
        )
        self.timer = timer
        self.clock = clock
        self._queue: deque[Decision] = deque()
        self._is_due = False
        self._earned_s = 0.0
        """The budget that each candidate has earned, before what it has spent is subtracted."""
        self._least_s = 0.0
        """The smallest amount that any candidate has spent, suspended ones excepted."""
        self._part = budget / len(candidates) if candidates else 0.0
        self._model = FirstTokenModel()
        self._awaited: deque[Awaited] = deque()
        self._samples: list[deque[Sample]] = [deque(maxlen=MAX_SAMPLES) for _ in candidates]
        self._fleet: EndpointTable | None = None
        self._records: Records | None = None

    def attach(self, fleet: EndpointTable, records: Records) -> None:
        self._fleet, self._records = fleet, records

    # Called on the path of requests

    def decided(self, cycle: RequestCycle, endpoints: Endpoints, choice: Choice, seconds: float) -> None:
        """Sample a decision of the policy in force, if the budget allows. `seconds`: the time that it took."""
        counts = self.counts
        counts.decisions += 1
        counts.seconds += seconds
        self._earned_s = earned_s = self._earned_s + self._part * seconds
        if earned_s <= self._least_s or len(self._queue) >= MAX_QUEUED:
            return
        if any(one.may_spend(earned_s, cycle.now) for one in self.candidates):
            began = self.timer()
            counts.sampled += 1
            uncached = uncached_tokens(cycle)
            self.enqueue(cycle, endpoints, choice.result, uncached, choice.decided.expected_cost, sampled=True)
            self._note_overhead(self.timer() - began)

    def enqueue(
        self,
        cycle: RequestCycle,
        endpoints: Endpoints,
        result: SchedulingResult[Endpoint],
        uncached: Any = None,
        cost: float | None = None,
        *,
        sampled: bool,
    ) -> None:
        """Keep a decision for the candidates, with the load before it."""
        seen: Endpoints = Roster(
            endpoints.whole,
            {name: column.copy() for name, column in endpoints.columns.items()},
            rows=endpoints.rows,
            arrays=endpoints.arrays,
        )
        self._queue.append(
            Decision(cycle.request, cycle.now, cycle.seed, seen, result.target, result, uncached, cost, sampled)
        )
        if not self._is_due:
            self._is_due = True
            self.clock.call_soon(self.work)

    # Called later

    def work(self) -> None:
        """Let candidates decide on one request, and learn from requests whose first token has come since."""
        self._is_due = False
        began, asked_s = self.timer(), 0.0
        self._learn(AT_ONCE)
        if self._queue:
            decision = self._queue.popleft()
            fleet = self._fleet
            if fleet is not None and fleet.roster.whole is decision.endpoints.whole:
                asked_s = self._ask(decision)
        if self._queue:
            self._is_due = True
            self.clock.call_soon(self.work)
        self._note_overhead(self.timer() - began - asked_s)

    def _note_overhead(self, seconds: float) -> None:
        """Charge time that was spent for all candidates together to those that are not suspended."""
        self.counts.overhead_s += seconds
        now = self.clock.now()
        active = [one for one in self.candidates if one.may_spend(inf, now)]
        for candidate in active:
            candidate.spent_s += seconds / len(active)
        self._least_s = min(one.spent_s for one in active or self.candidates)

    def _ask(self, decision: Decision) -> float:
        """Let the candidates decide. Returns the seconds that they took."""
        assert self._records is not None
        record = self._records.get(decision.request.request_id)
        if record is not None and record.ended_at is not None:
            return 0.0  # plugins that learn where it went would never be notified of its end
        if not decision.sampled:
            for one in self.candidates:
                one.follow(decision)
            return self._account()
        least_s = max(0.0, self._earned_s - MAX_CREDIT_S)
        for one in self.candidates:  # unused budget is kept for a limited time
            one.spent_s = max(one.spent_s, least_s)
        asked = [one for one in self.candidates if one.may_spend(self._earned_s, decision.now)]
        choices = [one.decide(decision) for one in asked]
        taken_s = self._account()
        uncached = decision.uncached
        if uncached is None:
            uncached = next((one.uncached for one in choices if one.uncached is not None), None)
        columns, prompt = decision.endpoints.columns, float(decision.request.input_tokens)

        def work_at(endpoint: Endpoint) -> tuple[float, float]:
            own = prompt if uncached is None else float(uncached[endpoint.row])
            return float(columns[IN_FLIGHT_TOKENS][endpoint.row]) + own, float(columns[LOAD][endpoint.row])

        opinions = []
        target = str(decision.target)
        for candidate, choice in zip(asked, choices, strict=True):
            counts = self.counts.candidates[self.candidates.index(candidate)]
            if choice.failure:
                counts.unplaced += choice.failure == "unplaced"
                counts.errors += choice.failure == "failed"
                continue
            counts.decided += 1
            assert choice.endpoint is not None
            instance = str(choice.endpoint)
            counts.agreed += instance == target
            if choice.cost is not None and decision.cost is not None:
                total, in_force, number = counts.costs
                counts.costs = total + choice.cost, in_force + decision.cost, number + 1
            expected = self._model.expected(*work_at(choice.endpoint), instance)
            opinions.append(Opinion(candidate, instance, expected))
        if record is not None and record.instance == target:
            tokens, load = work_at(decision.target)
            expected = self._model.expected(tokens, load, target)
            self._awaited.append(Awaited(record, tokens, load, expected, opinions))
            if len(self._awaited) > MAX_OPEN:
                self._awaited.popleft()
        return taken_s

    def _account(self) -> float:
        """Charge candidates for their calls."""
        total_s = 0.0
        for counts, candidate in zip(self.counts.candidates, self.candidates, strict=True):
            total_s += candidate.taken_s
            counts.seconds += candidate.taken_s
            candidate.spent_s += candidate.taken_s
            candidate.taken_s = 0.0
        return total_s

    def _learn(self, most: int) -> None:
        """Collect the outcomes of sampled requests. Those that still wait for their first token stay."""
        for _ in range(min(most, len(self._awaited))):
            one = self._awaited.popleft()
            record = one.record
            if record.first_token_at is None or record.sent_at is None:
                if record.ended_at is None:
                    self._awaited.append(one)
                continue
            actual_s = record.first_token_at - record.sent_at
            instance = record.instance
            if one.expected_s is not None:
                self._compare(one, one.expected_s * 1000, actual_s * 1000)
            if isfinite(actual_s):
                self._model.learn(one.tokens, one.load, instance, actual_s)

    def _compare(self, one: Awaited, expected_ms: float, actual_ms: float) -> None:
        record = one.record
        for opinion in one.opinions:
            if opinion.expected_s is None:
                continue
            number = self.candidates.index(opinion.candidate)
            counts, theirs_ms = self.counts.candidates[number], opinion.expected_s * 1000
            self._samples[number].append(Sample(theirs_ms, expected_ms, actual_ms))
            if opinion.instance != record.instance:
                gain_ms = expected_ms - theirs_ms
                found = Difference(record.request_id, record.instance, opinion.instance, gain_ms, actual_ms)
                counts.differences = _largest([*counts.differences, found])

    def departed(self, endpoint: Endpoint) -> None:
        """Forget an instance that has left."""
        self._model.forget(str(endpoint))
        for candidate in self.candidates:
            candidate.departed(endpoint)

    # What is shown

    def told(self) -> ShadowCounts:
        """A copy of the counts, with samples and problems."""
        now = self.clock.now()
        self._learn(MAX_OPEN)
        made = msgspec.structs.replace(self.counts, candidates=[])
        for counts, candidate, samples in zip(self.counts.candidates, self.candidates, self._samples, strict=True):
            why, problem = candidate.conduct.suspended(now), candidate.conduct.problem()
            shown = {"suspended_s": None if why is None else why.facts["left_s"], "problem": str(problem or "")}
            made.candidates.append(msgspec.structs.replace(counts, samples=list(samples), **shown))
        return made


def suspensions(shadow: Shadow, deployment: str) -> list[Reason]:
    """The reasons why candidates of this shadow are suspended."""
    found, now = [], shadow.clock.now()
    for candidate in shadow.candidates:
        why = candidate.conduct.suspended(now)
        if why is not None:
            told = {"candidate": candidate.name, "deployment": deployment, "left_s": why.facts["left_s"]}
            found.append(Reason("candidate-suspended", {**told, "cause": why.facts["cause"]}))
    return found

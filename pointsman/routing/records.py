"""Records of requests: what was decided for each, and how it ended; and counters over all requests."""

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from pointsman.errors import PluginError
from pointsman.reasons import Reason
from pointsman.render.text import record_text
from pointsman.routing.decisions import Decided, Unplaced, decision_data
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.events import Ended, Outcome, Refusal
from pointsman.routing.user_code import Useless, UserCodeFailed
from pointsman.selection import SchedulingFailure, Trace
from pointsman.types import RequestMetadata, SchedulingDecision

if TYPE_CHECKING:
    from pointsman.routing.request_table import Sent


# Counters; docs/metrics.md explains each

WAITING_BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)
MAX_KINDS = 100
OTHERS = "(others)"
DEPARTED = "(departed)"


class Histogram:
    """Counts of values by upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = WAITING_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.total += value
        self.counts[bisect_left(self.bounds, value)] += 1

    def merge(self, other: "Histogram") -> None:
        """Add the counts of another histogram with the same bounds."""
        self.total += other.total
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """The cumulative form that Prometheus expects."""
        cumulative, total = {}, 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            cumulative[bound] = total
        return {"count": total, "sum": self.total, "buckets": cumulative}


class Account:
    """Counts for one strategy on one instance."""

    __slots__ = ("decisions", "met", "missed", "waited_s")

    def __init__(self) -> None:
        self.decisions = 0
        self.waited_s = Histogram()
        """Time from arrival to dispatch."""
        self.met = 0
        """Number of requests that ended within their deadline; `missed` counts those that did not."""
        self.missed = 0

    def add(self, other: "Account") -> None:
        self.decisions += other.decisions
        self.met += other.met
        self.missed += other.missed
        self.waited_s.merge(other.waited_s)

    @property
    def slo_attainment(self) -> float | None:
        """The share of deadlines that were met; None if there were no deadlines."""
        ended = self.met + self.missed
        return self.met / ended if ended else None


class Counters:
    """Counts since the dispatcher was created; they only grow."""

    def __init__(self) -> None:
        self.arrived = 0
        self.accounts: dict[tuple[str, str], Account] = {}
        """Accounts by strategy and instance; the instance is empty for requests that were never sent."""
        self.outcomes: Counter[str] = Counter()
        """How requests ended: served, or the outcome of their refusal."""
        self.retries: Counter[str] = Counter()
        """Failed tries, by instance."""
        self.closed: Counter[tuple[str, str]] = Counter()
        """Number of times that an instance was closed for a time, by instance and code of the reason."""
        self.broken_promises: Counter[str] = Counter()
        """Decisions by a user's policy that were not carried out, counted by the code of the reason."""
        self.policy_errors: Counter[str] = Counter()
        self.useless = Useless()

    def dispatched(self, strategy: str, instance_id: str, waited_s: float) -> None:
        account = self.accounts.get((strategy, instance_id)) or self._account(strategy, instance_id)
        account.decisions += 1
        account.waited_s.add(waited_s)

    def ended(self, strategy: str, instance_id: str, outcome: str, met_deadline: bool | None) -> None:
        self.outcomes[outcome] += 1
        if met_deadline is not None:
            account = self._account(strategy, instance_id)
            account.met += met_deadline
            account.missed += not met_deadline

    def broken_promise(self, reason: Reason) -> None:
        """Count a decision that was not carried out. If the instance was unfit, the key is why it was unfit."""
        self.broken_promises[reason.facts.get("cause", reason).code] += 1

    def policy_error(self, what: str) -> None:
        """Count an exception by its text. Texts may name requests, so all beyond the first `MAX_KINDS` count as one."""
        errors = self.policy_errors
        errors[what if what in errors or len(errors) < MAX_KINDS else OTHERS] += 1

    def departed(self, instance_id: str) -> None:
        """Move the counts of an instance that has left to `DEPARTED`, so that the number of names stays bounded."""
        for strategy, instance in [key for key in self.accounts if key[1] == instance_id]:
            self._account(strategy, DEPARTED).add(self.accounts.pop((strategy, instance)))
        if instance_id in self.retries:
            self.retries[DEPARTED] += self.retries.pop(instance_id)
        for instance, code in [key for key in self.closed if key[0] == instance_id]:
            self.closed[DEPARTED, code] += self.closed.pop((instance, code))

    def as_dict(self) -> dict[str, Any]:
        strategies, instances = self._summed(0), self._summed(1)
        total = Account()
        for account in self.accounts.values():
            total.add(account)
        return {
            "requests_arrived": self.arrived,
            "decisions": total.decisions,
            "decisions_by_strategy": {name: one.decisions for name, one in strategies.items() if one.decisions},
            "decisions_by_instance": {name: one.decisions for name, one in instances.items() if one.decisions},
            "outcomes": dict(self.outcomes),
            "retries_by_instance": dict(self.retries),
            "waiting_seconds": {n: one.waited_s.as_dict() for n, one in strategies.items() if one.decisions},
            "waiting_seconds_by_instance": {n: one.waited_s.as_dict() for n, one in instances.items() if one.decisions},
            "slo_attainment": total.slo_attainment,
            "slo_attainment_by_strategy": _attained(strategies),
            "slo_attainment_by_instance": _attained(instances),
            "broken_promises": dict(self.broken_promises),
            "policy_errors": dict(self.policy_errors),
        }

    def _account(self, strategy: str, instance_id: str) -> Account:
        account = self.accounts.get((strategy, instance_id))
        if account is None:
            account = self.accounts[strategy, instance_id] = Account()
        return account

    def _summed(self, part: int) -> dict[str, Account]:
        """The accounts summed by strategy (0) or by instance (1), sorted, without the empty name."""
        sums: dict[str, Account] = {}
        for key, account in self.accounts.items():
            sums.setdefault(key[part], Account()).add(account)
        sums.pop("", None)
        return dict(sorted(sums.items()))


def _attained(accounts: dict[str, Account]) -> dict[str, float]:
    shares = {name: account.slo_attainment for name, account in accounts.items()}
    return {name: share for name, share in shares.items() if share is not None}


class Record(msgspec.Struct, eq=False, gc=False):
    """One request from its arrival to its end.

    The request itself is not kept: its prompt may be large, and belongs to the user.
    """

    request_id: str
    model: str
    priority: int
    deadline_ms: float | None
    user_id: str
    cost_budget: float | None
    arrived_at: float
    input_tokens: int
    """An estimate until the engine has counted the tokens; `cached_tokens` of them were in its prefix cache."""
    cached_tokens: int | None = None
    strategy: str = ""
    trace: Trace | None = None
    """The trace of the last cycle for this request."""
    failure: SchedulingFailure[Endpoint] | None = None
    """Why the last cycle found no instance."""
    made: Decided | SchedulingDecision | None = None
    dropped: Reason | None = None
    """Why the policy's decision was not carried out, or why the policy did not decide."""
    failures: tuple[tuple[str, Reason], ...] = ()
    """(instance, reason) of each failed try."""
    sent_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    output_tokens: int | None = None
    status: int | None = None
    """Status of the answer that the client got; None if there is none."""
    cost: float | None = None
    """What its tenant is charged; None if there is no price."""
    refusal: Refusal | None = None

    @property
    def request(self) -> RequestMetadata:
        """The request without its prompt and headers."""
        return RequestMetadata(
            self.request_id,
            model_name=self.model,
            priority=self.priority,
            slo_deadline_ms=self.deadline_ms,
            user_id=self.user_id,
            arrival_time=self.arrived_at,
            cost_budget=self.cost_budget,
            prompt_tokens=self.input_tokens,
        )

    @property
    def decision(self) -> SchedulingDecision | None:
        """The decision, with its reason; None if there is none yet."""
        return self.made.decision if isinstance(self.made, Decided) else self.made

    @property
    def state(self) -> str:
        """waiting, running, served, failed (an instance answered with an error, or broke off), refused or abandoned."""
        if self.refusal is not None:
            outcome = self.refusal.outcome
            if outcome is Outcome.EVICTED_CANCELLED:
                return "abandoned"
            return "failed" if outcome is Outcome.EVICTED_OTHER or self.first_token_at is not None else "refused"
        if self.made is None:
            return "waiting"
        if self.ended_at is None:
            return "running"
        return "served" if self.status is None or self.status < 400 else "failed"

    @property
    def instance(self) -> str:
        """The instance to which it was sent; empty if it was not sent."""
        return "" if self.made is None else self.made.target_instance_id

    @property
    def predicted(self) -> tuple[float, float] | None:
        """Predicted TTFT (counted from when it was sent) and TPOT, in milliseconds; None without a prediction."""
        return self.made.predicted if isinstance(self.made, Decided) else None

    @property
    def met_deadline(self) -> bool | None:
        """Whether the answer came in time; None if there is no deadline, or the request has not ended."""
        if self.deadline_ms is None or self.ended_at is None:
            return None
        failed = self.refusal is not None or (self.status or 0) >= 400
        return not failed and (self.ended_at - self.arrived_at) * 1000 <= self.deadline_ms

    def reasons(self) -> dict[str, Reason]:
        """Why each instance was rejected when the request was last tried."""
        return {} if self.failure is None else {str(one): reason for one, _, reason in self.failure.reasons()}

    @property
    def tries(self) -> int:
        return len(self.failures) + (self.made is not None)

    def summary(self) -> dict[str, Any]:
        return summary_of(self)

    def as_dict(self) -> dict[str, Any]:
        failure, decision = self.failure, self.decision
        rejected = [] if failure is None else failure.reasons()
        unplaced = None if failure is None or decision is not None else Unplaced(self.request, failure).why
        return {
            **self.summary(),
            "decision": decision_data(decision),
            "predicted": self.predicted and dict(zip(("ttft_ms", "tpot_ms"), self.predicted, strict=True)),
            "dropped": None if self.dropped is None else self.dropped.as_dict(),
            "failed_tries": [
                {"instance": instance, "why": str(why), "reason": why.as_dict()} for instance, why in self.failures
            ],
            "refusal": None if self.refusal is None else self.refusal.as_dict(),
            "unplaced": None if unplaced is None else unplaced.as_dict(),
            "rejected": {str(one): {"filter": name, "reason": why.as_dict()} for one, name, why in rejected},
            "trace": None if self.trace is None else self.trace.as_dict(),
        }

    def __str__(self) -> str:
        return record_text(self.as_dict())


def summary_of(record: Any) -> dict[str, Any]:
    """A request in the form that lists show. `record`: a `Record`, or a row with the same fields."""
    arrived_at, sent_at = record.arrived_at, record.sent_at
    return {
        "request_id": record.request_id,
        "model": record.model,
        "tenant": record.user_id,
        "priority": record.priority,
        "state": record.state,
        "status": record.status,
        "strategy": record.strategy,
        "instance": record.instance,
        "tries": record.tries,
        "waited_ms": _ms(arrived_at, sent_at if sent_at is not None else record.ended_at),
        "first_token_ms": _ms(arrived_at, record.first_token_at),
        "total_ms": _ms(arrived_at, record.ended_at),
        "input_tokens": record.input_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "deadline_ms": record.deadline_ms,
        "met_deadline": record.met_deadline,
        "cost": record.cost,
    }


class Records:
    """The newest records, by request id."""

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._by_id: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, request: RequestMetadata, now: float) -> Record:
        records, request_id, arrival = self._by_id, request.request_id, request.arrival_time
        record = Record(
            request_id,
            request.model_name,
            request.priority,
            request.slo_deadline_ms,
            request.user_id,
            request.cost_budget,
            arrival if type(arrival) is float else request.arrived_at(now),
            request.input_tokens,
        )
        if request_id in records:
            earlier = records.pop(request_id)
            records[f"{request_id} {earlier.arrived_at}"] = earlier  # clients may use an id again
        records[request_id] = record
        if len(records) > self._limit:
            records.popitem(last=False)
        return record

    def get(self, request_id: str) -> Record | None:
        """The record of this request; None if it is no longer kept."""
        return self._by_id.get(request_id)

    def newest(self) -> list[Record]:
        """All records, newest first."""
        return list(reversed(self._by_id.values()))


def _ms(start: float, end: float | None) -> float | None:
    return None if end is None else round((end - start) * 1000, 3)


class Journal:
    """The records and counters of a dispatcher. Every request is counted, even if its record is dropped."""

    def __init__(self, keep_records: int, strategy: str) -> None:
        self.records = Records(keep_records)
        self.counters = Counters()
        self.listener: Callable[[Record], None] | None = None
        """Called with the record of each request that has ended, served or refused."""
        self.ended: deque[Record] = deque(maxlen=keep_records)
        """Records of requests that have ended, until they are taken from here."""
        self.strategy = strategy
        """The strategy under which a request is counted until a strategy has decided about it."""

    def arrived(self, request: RequestMetadata, now: float) -> Record:
        self.counters.arrived += 1
        return self.records.open(request, now)

    def went_at_once(
        self, sent: "Sent", made: Decided, trace: Trace | None, now: float, why: Reason | None = None
    ) -> None:
        """Record that a request was sent on arrival. `why`: why a stand-in decided; None if no stand-in decided."""
        self.counters.arrived += 1
        self.counters.dispatched(sent.strategy, made.target_instance_id, 0.0)
        record = self.records.open(sent.item.request, now)
        record.trace, record.strategy, record.made, record.sent_at = trace, sent.strategy, made, now
        if why is not None:
            record.dropped = why

    def tried(self, request: RequestMetadata, trace: Trace | None, failure: SchedulingFailure[Endpoint] | None) -> None:
        """Record that a cycle ran for a waiting request."""
        record = self.records.get(request.request_id)
        if record is not None:
            record.trace, record.failure = trace, failure

    def dropped(self, made: SchedulingDecision, broken: Reason, policy: str) -> None:
        """Record that a decision by a user's policy is not carried out."""
        self.counters.broken_promise(broken)
        record = self.records.get(made.request_id)
        if record is not None and record.made is None:  # a second decision about a sent request changes nothing
            facts = {"policy": policy, "instance": made.target_instance_id, "cause": broken}
            record.dropped = Reason("decision-dropped", facts)

    def sent(self, sent: "Sent", made: Decided | SchedulingDecision, why: Reason | None = None) -> None:
        item = sent.item
        self.counters.dispatched(sent.strategy, made.target_instance_id, item.taken_at - item.enqueued_at)
        record = self.records.get(made.request_id)
        if record is not None:
            record.strategy, record.made, record.failure = sent.strategy, made, None
            record.dropped = why or record.dropped
            record.sent_at = item.taken_at

    def first_token(self, request_id: str, now: float) -> None:
        record = self.records.get(request_id)
        if record is not None:
            record.first_token_at = now

    def failed(self, request: RequestMetadata, instance_id: str, why: Reason, *, local: str) -> None:
        if not local:
            self.counters.retries[instance_id] += 1
        record = self.records.get(request.request_id)
        if record is not None:
            record.failures += ((instance_id, why),)
            record.made = None

    def served(self, event: Ended, now: float) -> None:
        record = self.records.get(event.request_id)
        if record is not None:
            record.ended_at, record.output_tokens, record.status = now, event.output_tokens, event.status
            if event.input_tokens is not None:
                record.input_tokens, record.cached_tokens = event.input_tokens, event.cached_tokens
        self._ended("served", record)

    def refused(self, request: RequestMetadata, refusal: Refusal, now: float) -> None:
        record = self.records.get(request.request_id)
        if record is not None:
            record.refusal, record.ended_at = refusal, now
        self._ended(refusal.outcome.value, record)

    def error(self, error: Exception, whose: str = "") -> None:
        if isinstance(error, UserCodeFailed):
            if error.why.code == "policy-suspended":
                return  # the policy was not called
            self.counters.policy_error(f"{error.plugin}: {error.why}")
            return
        text = f"{type(error).__name__}: {error}"
        self.counters.policy_error(f"{whose}: {text}" if whose else text)
        last = str(error) if isinstance(error, PluginError) else text
        self.counters.useless = Useless(self.counters.useless.count + 1, last)

    def _ended(self, outcome: str, record: Record | None) -> None:
        if record is None:
            self.counters.ended(self.strategy, "", outcome, None)
            return
        self.counters.ended(record.strategy or self.strategy, record.instance, outcome, record.met_deadline)
        self.ended.append(record)
        if self.listener is not None:
            self.listener(record)

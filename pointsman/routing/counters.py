"""Counters of the dispatcher. docs/metrics.md explains each."""

from bisect import bisect_left
from collections import Counter
from typing import Any

from pointsman.reasons import Reason

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
        """Add the counts of another with the same bounds."""
        self.total += other.total
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """The cumulative form that Prometheus takes."""
        cumulative, total = {}, 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            cumulative[bound] = total
        return {"count": total, "sum": self.total, "buckets": cumulative}


class Account:
    """Counts of one strategy on one instance."""

    __slots__ = ("decisions", "met", "missed", "waited_s")

    def __init__(self) -> None:
        self.decisions = 0
        self.waited_s = Histogram()
        """Time from arrival to dispatch."""
        self.met = 0
        """Deadlines met by requests that have ended; `missed` are the others."""
        self.missed = 0

    def add(self, other: "Account") -> None:
        """Add the counts of another."""
        self.decisions += other.decisions
        self.met += other.met
        self.missed += other.missed
        self.waited_s.merge(other.waited_s)

    @property
    def slo_attainment(self) -> float | None:
        """The share of deadlines met; None if there were none."""
        ended = self.met + self.missed
        return self.met / ended if ended else None


class Counters:
    """Counts since the dispatcher was created; they only grow."""

    def __init__(self) -> None:
        self.arrived = 0
        self.accounts: dict[tuple[str, str], Account] = {}
        """By strategy and instance; the instance is empty for requests that were never sent."""
        self.outcomes: Counter[str] = Counter()
        """How requests ended: served, or the outcome of their refusal."""
        self.retries: Counter[str] = Counter()
        """Failed tries, by instance."""
        self.broken_promises: Counter[str] = Counter()
        """Decisions of a user's policy that were not carried out, by the code of the reason."""
        self.policy_errors: Counter[str] = Counter()
        """Exceptions of policies and plugins."""

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
        """Count a decision that was not carried out; one that names an unfit instance under what is wrong with that."""
        self.broken_promises[reason.facts.get("cause", reason).code] += 1

    def policy_error(self, what: str) -> None:
        """Count an exception. Its text may name requests: past `MAX_KINDS` texts the others are counted as one."""
        errors = self.policy_errors
        errors[what if what in errors or len(errors) < MAX_KINDS else OTHERS] += 1

    def departed(self, instance_id: str) -> None:
        """Move the counts of an instance that has left to `DEPARTED`, so that the number of names stays bounded."""
        for strategy, instance in [key for key in self.accounts if key[1] == instance_id]:
            self._account(strategy, DEPARTED).add(self.accounts.pop((strategy, instance)))
        if instance_id in self.retries:
            self.retries[DEPARTED] += self.retries.pop(instance_id)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
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

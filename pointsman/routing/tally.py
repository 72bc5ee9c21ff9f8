"""What the dispatcher counts. docs/metrics.md says what each number means and when to worry."""

from collections import Counter
from typing import Any

WAITING_BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """How often a value was up to each bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = WAITING_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.total += value
        for place, bound in enumerate(self.bounds):
            if value <= bound:
                self.counts[place] += 1
                return
        self.counts[-1] += 1

    @property
    def count(self) -> int:
        return sum(self.counts)

    def as_dict(self) -> dict[str, Any]:
        """The cumulative form that Prometheus takes."""
        cumulative, so_far = {}, 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            cumulative[bound] = so_far
        return {"count": so_far, "sum": self.total, "buckets": cumulative}


class Tally:
    """Counts since the dispatcher was made; they only grow."""

    def __init__(self) -> None:
        self.arrived = 0
        self.decisions: Counter[tuple[str, str]] = Counter()
        """By strategy and instance."""
        self.outcomes: Counter[str] = Counter()
        """How requests ended: served, or the outcome of their refusal."""
        self.retries: Counter[str] = Counter()
        """Tries that failed, by instance."""
        self.waited_s: dict[str, Histogram] = {}
        """Time from arrival to dispatch, by strategy."""
        self.deadlines: Counter[tuple[str, bool]] = Counter()
        """Ended requests with a deadline, by strategy and whether it was met."""
        self.broken_promises: Counter[str] = Counter()
        """Decisions of a policy that were not carried out, by what was wrong."""
        self.policy_errors: Counter[str] = Counter()
        """Exceptions of policies and plugins."""

    def dispatched(self, strategy: str, instance_id: str, waited_s: float) -> None:
        self.decisions[strategy, instance_id] += 1
        waited = self.waited_s.get(strategy)
        if waited is None:
            waited = self.waited_s[strategy] = Histogram()
        waited.add(waited_s)

    def ended(self, strategy: str, outcome: str, met_deadline: bool | None) -> None:
        self.outcomes[outcome] += 1
        if met_deadline is not None:
            self.deadlines[strategy, met_deadline] += 1

    def slo_attainment(self, strategy: str | None = None) -> float | None:
        """The share of ended requests with a deadline that met it; None if there were none."""
        met = missed = 0
        for (name, kept), count in self.deadlines.items():
            if strategy is None or name == strategy:
                met, missed = (met + count, missed) if kept else (met, missed + count)
        return met / (met + missed) if met + missed else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        strategies = {strategy for strategy, _ in self.decisions}
        return {
            "requests_arrived": self.arrived,
            "decisions": self.decisions.total(),
            "decisions_by_strategy": {
                name: sum(count for (strategy, _), count in self.decisions.items() if strategy == name)
                for name in sorted(strategies)
            },
            "decisions_by_instance": {
                name: sum(count for (_, instance), count in self.decisions.items() if instance == name)
                for name in sorted({instance for _, instance in self.decisions})
            },
            "outcomes": dict(self.outcomes),
            "retries_by_instance": dict(self.retries),
            "waiting_seconds": {strategy: waited.as_dict() for strategy, waited in self.waited_s.items()},
            "slo_attainment": self.slo_attainment(),
            "slo_attainment_by_strategy": {
                name: self.slo_attainment(name) for name in sorted({strategy for strategy, _ in self.deadlines})
            },
            "broken_promises": dict(self.broken_promises),
            "policy_errors": dict(self.policy_errors),
        }

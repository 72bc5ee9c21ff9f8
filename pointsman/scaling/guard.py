"""Around every policy: whatever it says, the target stays within bounds, and every change has a record.

Enters: a view and what the policy answered. Leaves: a record, if something changed. The one rule: an answer that makes
no sense changes nothing; the last good target holds, the problem is told once, and the policy is asked again.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec

from pointsman.scaling.calendar import in_utc
from pointsman.scaling.limits import ScalingLimits
from pointsman.scaling.policy import Wish, plain, understood
from pointsman.scaling.records import ReportThrottle, ScalingRecord
from pointsman.scaling.stabilization import Stabilization, Standing, allowed, within
from pointsman.scaling.view import DeploymentView

OURSELVES = "pointsman"
"""Who decides where neither a policy nor an order does."""


MOST_METRICS = 10
"""Numbers of somebody's own, in one record."""


class Override(msgspec.Struct, frozen=True):
    """Somebody ordered a number, and the policy is not followed until it is over."""

    replicas: int
    by: str
    until: float | None = None
    """None: until it is taken back."""

    def __str__(self) -> str:
        end = "until it is taken back" if self.until is None else f"until {in_utc(self.until)}"
        return f"{self.replicas} ordered by {self.who} {end}"

    @property
    def who(self) -> str:
        return self.by or "somebody"


class Memory(msgspec.Struct, kw_only=True):
    """All that a guard remembers: plain data."""

    target: int
    changed_at: float | None = None
    up_at: float | None = None
    down_at: float | None = None
    busy_at: float | None = None
    """When there last was a request, or when the guard first looked."""
    wants: Stabilization = msgspec.field(default_factory=Stabilization)
    override: Override | None = None
    problem: ReportThrottle = msgspec.field(default_factory=ReportThrottle)
    refused: ReportThrottle = msgspec.field(default_factory=ReportThrottle)
    notes: dict[str, Any] = {}
    """The policy's own."""


class Guard:
    """Holds the target of one deployment."""

    def __init__(
        self, deployment: str, limits: ScalingLimits, policy_name: str, state: Mapping[str, Any] | None = None
    ) -> None:
        self.deployment, self.limits, self.policy_name = deployment, limits, policy_name
        self._memory = _recalled(state) or Memory(target=limits.first)
        self.problem = self._memory.problem.words
        """What is wrong with the policy now; empty: nothing."""
        self.notes: MutableMapping[str, Any] = self._memory.notes
        """The policy's own: hand them to it as `view.state`."""

    @property
    def target(self) -> int:
        """What holds now."""
        return self._memory.target

    @property
    def ordered(self) -> Override | None:
        """What somebody ordered in place of the policy."""
        return self._memory.override

    def since_up_s(self, now: float) -> float | None:
        """Since the target last went up; None: never."""
        return None if self._memory.up_at is None else now - self._memory.up_at

    def since_down_s(self, now: float) -> float | None:
        """Since the target last went down; None: never."""
        return None if self._memory.down_at is None else now - self._memory.down_at

    def decide(self, view: DeploymentView, answer: object) -> ScalingRecord | None:
        """Take in what the policy answered. None: nothing changed, and nothing new is to be told."""
        memory, now, before = self._memory, view.now, self.target
        self.notes = view.state
        said = understood(answer, self.limits.time_limit_s)
        asked = said if isinstance(said, Wish) else Wish(self.target)
        wish = self._heard(view, asked)
        self.problem = said if isinstance(said, str) else ""
        memory.wants.note(now, within(wish.replicas, self.limits)[0], before)
        standing, over = self._standing(view), self._end_override(now)
        if memory.override is None:
            after, bounded = allowed(wish.replicas, memory.wants, self.limits, standing)
            why = wish.why or (f"{wish.replicas} wanted" if isinstance(said, Wish) else "")
            by = "" if wish is asked else OURSELVES
        else:
            after, bounded = within(memory.override.replicas, self.limits)
            why, by = str(memory.override), memory.override.who
        self._become(after, now)
        had_problem = memory.problem.words
        news = memory.problem.is_news(self.problem, now)
        again = f"{self.policy_name} answers again after it {had_problem}" if news and not self.problem else ""
        news |= memory.refused.is_news(wish.refused, now)
        if after == before and not news and not over:
            return None
        return ScalingRecord(
            deployment=self.deployment,
            at=now,
            policy=self.policy_name,
            by=by,
            before=before,
            after=after,
            wanted=said.replicas if isinstance(said, Wish) and memory.override is None else None,
            why="; ".join(filter(None, [why, over, again])),
            numbers=numbers_of(view),
            bounded=tuple(bounded),
            refused=wish.refused,
            problem=self.problem,
        )

    def override(self, replicas: int, until: float | None, by: str, now: float) -> ScalingRecord:
        """So many, whatever the policy says, until then. Bounds hold all the same."""
        ordered = Override(replicas, by, until)
        before = self.target
        after, bounded = within(replicas, self.limits)
        self._memory.override = ordered
        self._become(after, now)
        return self._ordered(before, now, str(ordered), ordered.who, tuple(bounded))

    def release(self, now: float) -> ScalingRecord | None:
        """The policy decides again. None: it did all the time."""
        ordered, self._memory.override = self._memory.override, None
        return None if ordered is None else self._ordered(self.target, now, f"taken back: {ordered}", OURSELVES)

    def give_way(self, why: str, now: float) -> ScalingRecord:
        """None at once, although nobody wanted that: somebody who is waited for needs the place."""
        before = self.target
        self._become(0, now)
        return self._ordered(before, now, why, OURSELVES)

    def state(self) -> dict[str, Any]:
        """Plain data: a guard that is made with it goes on the same."""
        self._memory.notes = plain(self.notes)
        saved: dict[str, Any] = msgspec.to_builtins(self._memory)
        return saved

    def _heard(self, view: DeploymentView, wish: Wish) -> Wish:
        """The same, but nobody waits in vain for a first replica: to want none is to want none while nobody asks."""
        if self.target or wish.replicas or wish.refused or not view.load:
            return wish
        return Wish(1, "a request waits, and there is no instance")

    def _standing(self, view: DeploymentView) -> Standing:
        memory, now = self._memory, view.now
        if view.load > 0 or memory.busy_at is None:
            memory.busy_at = now
        if view.idle_s is not None:
            memory.busy_at = now - view.idle_s
        memory.busy_at = min(memory.busy_at, now)  # a clock that was put back must not keep the last one for ever
        since = None if memory.changed_at is None else now - memory.changed_at
        return Standing(now, self.target, since, now - memory.busy_at, view.load > 0)

    def _end_override(self, now: float) -> str:
        """In words, if it is over now."""
        ordered = self._memory.override
        if ordered is None or ordered.until is None or now < ordered.until:
            return ""
        self._memory.override = None
        return f"over: {ordered}"

    def _become(self, after: int, now: float) -> None:
        memory = self._memory
        if after != memory.target:
            memory.changed_at = now
            memory.up_at, memory.down_at = (now, memory.down_at) if after > memory.target else (memory.up_at, now)
            memory.target = after

    def _ordered(self, before: int, now: float, why: str, by: str, bounded: tuple[str, ...] = ()) -> ScalingRecord:
        return ScalingRecord(
            deployment=self.deployment,
            at=now,
            policy=self.policy_name,
            by=by,
            before=before,
            after=self.target,
            why=why,
            bounded=bounded,
            problem=self.problem,
        )


def numbers_of(view: DeploymentView) -> dict[str, float]:
    """What a decision was made from, for its record."""
    numbers: dict[str, float | None] = {
        "replicas": view.replicas,
        "starting": view.starting,
        "unplaced": view.unplaced or None,
        "ongoing": view.ongoing,
        "queued": view.queued,
        "arrivals_per_s": view.arrivals_per_s.get(min(view.arrivals_per_s)) if view.arrivals_per_s else None,
        "latency_p90_ms": view.latency_ms.p90,
        "ttft_p90_ms": view.ttft_ms.p90,
        "tpot_p90_ms": view.tpot_ms.p90,
        "slo_attainment": view.slo_attainment,
        "kv_usage": view.kv_usage.last,
        "gpu_usage": view.gpu_usage.last,
        "tokens_per_s": view.tokens_per_s,
    }
    numbers |= {name: window.last for name, window in list(view.metrics.items())[:MOST_METRICS] if name not in numbers}
    return {name: round(float(number), 4) for name, number in numbers.items() if number is not None}


def _recalled(state: Mapping[str, Any] | None) -> Memory | None:
    """What was saved, if it was saved by something like this."""
    try:
        return msgspec.convert(state, Memory)
    except msgspec.ValidationError:
        return None

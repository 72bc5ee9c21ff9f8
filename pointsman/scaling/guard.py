"""The guard around every policy: targets stay within bounds, whatever the policy answers, and each change has a record.

Enters: a view and the answer of the policy. Leaves: a record, if something changed. The one rule: an answer that makes
no sense changes nothing; the last target stays, the problem is reported once, and the policy is called again.
"""

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec

from pointsman.reasons import Reason, reason_of
from pointsman.scaling.calendar import in_utc
from pointsman.scaling.limits import ScalingLimits
from pointsman.scaling.policy import DeploymentView, Wish, parse_answer, restored, savable_state
from pointsman.scaling.records import ReportThrottle, ScalingRecord

# Delays, steps, cool-downs and bounds


class Wanted(msgspec.Struct):
    """A desired number of replicas, and the time until which it was desired."""

    replicas: int
    until: float


class Stabilization(msgspec.Struct):
    """The largest and the smallest number wanted within a delay.

    A number holds until the next number comes. `falling` has the candidates for the largest: an entry is dropped if an
    equal or larger number follows. `rising` has the candidates for the smallest.
    """

    last: int | None = None
    falling: list[Wanted] = []
    rising: list[Wanted] = []

    def add(self, now: float, wanted: int, before: int) -> None:
        """Add the number that is desired from now on. `before` applies to the time before the first number."""
        last = before if self.last is None else self.last
        for entries in (self.falling, self.rising):
            for entry in entries:
                entry.until = min(entry.until, now)  # a clock that was set back must not keep an entry forever
            if entries:
                entries[-1].until = now
            else:
                entries.append(Wanted(last, now))
        while self.falling and self.falling[-1].replicas <= wanted:
            self.falling.pop()
        while self.rising and self.rising[-1].replicas >= wanted:
            self.rising.pop()
        self.falling.append(Wanted(wanted, now))
        self.rising.append(Wanted(wanted, now))
        self.last = wanted

    def largest(self, now: float, delay_s: float) -> int:
        """The largest number wanted within the delay, including now."""
        return _first_after(now - delay_s, self.falling)

    def smallest(self, now: float, delay_s: float) -> int:
        """The smallest number wanted within the delay, including now."""
        return _first_after(now - delay_s, self.rising)


def _first_after(then: float, entries: list[Wanted]) -> int:
    """The replicas of the first entry after `then`. Drops older entries; the last entry is current, and stays."""
    while len(entries) > 1 and entries[0].until <= then:
        entries.pop(0)
    return entries[0].replicas


class Standing(msgspec.Struct, frozen=True):
    """The state of a deployment when an answer comes."""

    now: float
    target: int
    since_change_s: float | None
    """None if the target has never changed."""
    idle_s: float
    """Time since the last request; 0 if there are requests now."""
    busy: bool


def within(replicas: int, limits: ScalingLimits) -> tuple[int, list[Reason]]:
    if replicas > limits.max_replicas:
        return limits.max_replicas, [Reason("scaling-max", {"max": limits.max_replicas})]
    if replicas < limits.min_replicas:
        return limits.min_replicas, [Reason("scaling-min", {"min": limits.min_replicas})]
    return replicas, []


def allowed(wanted: int, stabilization: Stabilization, limits: ScalingLimits, at: Standing) -> tuple[int, list[Reason]]:
    """The target that is allowed now. `stabilization` includes what is wanted now."""
    goal, bounds = within(wanted, limits)
    if not limits.min_replicas <= at.target <= limits.max_replicas:
        return within(at.target, limits)  # the limits were changed, and apply at once
    after = _delayed(goal, stabilization, limits, at, bounds)
    after = _cooled_down(after, limits, at, bounds)
    after = _stepped(after, limits, at, bounds)
    return _last_one(after, limits, at, bounds), bounds


def _delayed(goal: int, stabilization: Stabilization, limits: ScalingLimits, at: Standing, bounds: list[Reason]) -> int:
    if goal > at.target:
        smallest = stabilization.smallest(at.now, limits.up_delay_s)
        after = max(at.target, smallest, 1)  # the first replica is not delayed
        if after < goal:
            bounds.append(Reason("scaling-up-delay", {"goal": goal, "delay_s": limits.up_delay_s}))
        return after
    if at.target == 1:
        return goal  # see _last_one
    after = min(at.target, stabilization.largest(at.now, limits.down_delay_s))
    if after > goal:
        bounds.append(Reason("scaling-down-delay", {"goal": goal, "delay_s": limits.down_delay_s}))
    return after


def _cooled_down(after: int, limits: ScalingLimits, at: Standing, bounds: list[Reason]) -> int:
    since = at.since_change_s
    if after == at.target or at.target == 0 or since is None or not 0 <= since < limits.cooldown_s:
        return after
    bounds.append(Reason("scaling-cooldown", {"cooldown_s": limits.cooldown_s}))
    return at.target


def _stepped(after: int, limits: ScalingLimits, at: Standing, bounds: list[Reason]) -> int:
    up, change = after > at.target, abs(after - at.target)
    factor, code = (limits.up_factor, "scaling-up-factor") if up else (limits.down_factor, "scaling-down-factor")
    step = math.ceil(change * factor - 1e-9)
    if step < change:
        bounds.append(Reason(code, {"step": step, "change": change, "factor": factor}))
    if limits.max_step is not None and step > limits.max_step:
        step = limits.max_step
        bounds.append(Reason("scaling-max-step", {"step": step}))
    return at.target + step if up else at.target - step


def _last_one(after: int, limits: ScalingLimits, at: Standing, bounds: list[Reason]) -> int:
    if after > 0 or at.target == 0:
        return after
    if at.busy or at.idle_s < limits.idle_timeout_s:
        bounds.append(Reason("scaling-idle-timeout", {"idle_timeout_s": limits.idle_timeout_s}))
        return 1
    return 0


OURSELVES = "pointsman"
"""`by` of a record where neither the policy nor an operator decided."""
MAX_CUSTOM_METRICS = 10
"""Maximum number of custom metrics in one record."""


class Override(msgspec.Struct, frozen=True):
    """A target that an operator has set; it replaces the policy until it ends."""

    replicas: int
    by: str
    until: float | None = None
    """None if the override holds until it is released."""

    @property
    def who(self) -> str:
        return self.by or "an operator"

    def reason(self, code: str) -> Reason:
        until = None if self.until is None else in_utc(self.until)
        return Reason(code, {"replicas": self.replicas, "by": self.who, "until": until})


class Cap(msgspec.Struct, frozen=True):
    """A maximum number of replicas, whatever the policy wants."""

    replicas: int
    reason: Reason
    replaces: bool = False
    """Whether this reason replaces the reason of the policy."""


class GuardState(msgspec.Struct, kw_only=True):
    """The state of a guard, as plain data that survives restarts."""

    target: int
    changed_at: float | None = None
    up_at: float | None = None
    down_at: float | None = None
    busy_at: float | None = None
    """When there last was a request, or when the guard was first used."""
    stabilization: Stabilization = msgspec.field(default_factory=Stabilization)
    override: Override | None = None
    problem: ReportThrottle = msgspec.field(default_factory=ReportThrottle)
    refused: ReportThrottle = msgspec.field(default_factory=ReportThrottle)
    policy_state: dict[str, Any] = {}

    def set_target(self, target: int, now: float) -> None:
        if target != self.target:
            self.changed_at = now
            self.up_at, self.down_at = (now, self.down_at) if target > self.target else (self.up_at, now)
            self.target = target

    def standing(self, view: DeploymentView) -> Standing:
        now = view.now
        if view.load > 0 or self.busy_at is None:
            self.busy_at = now
        if view.idle_s is not None:
            self.busy_at = now - view.idle_s
        self.busy_at = min(self.busy_at, now)  # a clock that was set back must not keep the last replica forever
        since = None if self.changed_at is None else now - self.changed_at
        return Standing(now, self.target, since, now - self.busy_at, view.load > 0)

    def end_override(self, now: float) -> Reason | None:
        """End the override if its time is over. Returns None if its time is not over, or if there is no override."""
        override = self.override
        if override is None or override.until is None or now < override.until:
            return None
        self.override = None
        return override.reason("override-ended")


class Guard:
    """Holds the target of one deployment."""

    def __init__(
        self, deployment: str, limits: ScalingLimits, policy_name: str, state: Mapping[str, Any] | None = None
    ) -> None:
        self.deployment, self.limits, self.policy_name = deployment, limits, policy_name
        self._state: GuardState = restored(state, GuardState) or GuardState(target=limits.first)
        self.problem: Reason | None = None
        """What is wrong with the policy's last answer."""
        self.policy_state: MutableMapping[str, Any] = self._state.policy_state
        """The policy's state, which it sees as `view.state`."""

    @property
    def target(self) -> int:
        return self._state.target

    @property
    def override(self) -> Override | None:
        return self._state.override

    def since_up_s(self, now: float) -> float | None:
        """Time since the target last went up; None if it never did."""
        return None if self._state.up_at is None else now - self._state.up_at

    def since_down_s(self, now: float) -> float | None:
        """Time since the target last went down; None if it never did."""
        return None if self._state.down_at is None else now - self._state.down_at

    def decide(self, view: DeploymentView, answer: object, cap: Cap | None = None) -> ScalingRecord | None:
        """Apply the answer of the policy. Returns None if nothing changed and there is nothing new to report."""
        state, now, before = self._state, view.now, self.target
        self.policy_state = view.state
        parsed = parse_answer(answer, self.limits.time_limit_s)
        self.problem = parsed if isinstance(parsed, Reason) else None
        wish = parsed if isinstance(parsed, Wish) else Wish(self.target)
        wanted, reasons, by = self._wanted(view, wish, isinstance(parsed, Wish), cap)
        state.stabilization.add(now, within(wanted, self.limits)[0], before)
        standing, ended = state.standing(view), state.end_override(now)
        if state.override is None:
            after, bounds = allowed(wanted, state.stabilization, self.limits, standing)
        else:
            after, bounds = within(state.override.replicas, self.limits)
            reasons, by = [state.override.reason("override")], state.override.who
        state.set_target(after, now)
        reported = state.problem.last
        is_due = state.problem.is_due(self.problem, now, "" if self.problem is None else self.problem.code)
        recovered = is_due and self.problem is None
        refused = reason_of(self.policy_name, wish.refused) if wish.refused else None
        is_due |= state.refused.is_due(refused, now)
        if after == before and not is_due and ended is None:
            return None
        if ended is not None:
            reasons.append(ended)
        if recovered:
            reasons.append(Reason("policy-recovered", {"policy": self.policy_name, "problem": reported}))
        return ScalingRecord(
            deployment=self.deployment,
            at=now,
            policy=self.policy_name,
            by=by,
            before=before,
            after=after,
            wanted=wish.replicas if isinstance(parsed, Wish) and state.override is None else None,
            reasons=tuple(reasons),
            numbers=numbers_of(view),
            bounds=tuple(bounds),
            refused=wish.refused,
            failure=self.problem,
        )

    def set_override(self, replicas: int, until: float | None, by: str, now: float) -> ScalingRecord:
        """Set the target until a given time, regardless of the policy. Bounds still apply."""
        override, before = Override(replicas, by, until), self.target
        after, bounds = within(replicas, self.limits)
        self._state.override = override
        self._state.set_target(after, now)
        return self.record(before, now, override.reason("override"), override.who, self.problem, tuple(bounds))

    def release(self, now: float) -> ScalingRecord | None:
        """Follow the policy again. Returns None if it was followed already."""
        override, self._state.override = self._state.override, None
        if override is None:
            return None
        return self.record(self.target, now, override.reason("override-released"), OURSELVES, self.problem)

    def give_way(self, why: Reason, now: float) -> ScalingRecord:
        """Scale to 0 at once: another deployment needs the place."""
        before = self.target
        self._state.set_target(0, now)
        return self.record(before, now, why, OURSELVES, self.problem)

    def state(self) -> dict[str, Any]:
        """Plain data from which a new guard can continue."""
        self._state.policy_state = savable_state(self.policy_state)
        saved: dict[str, Any] = msgspec.to_builtins(self._state)
        return saved

    def _wanted(
        self, view: DeploymentView, wish: Wish, answered: bool, cap: Cap | None
    ) -> tuple[int, list[Reason], str]:
        """How many replicas are wanted in the end, the reasons, and what decided if the policy did not."""
        if not (self.target or wish.replicas or wish.refused) and view.load:
            return 1, [Reason("request-waits")], OURSELVES  # requests get one, even if the policy wants none
        own = Reason(self.policy_name, {"text": wish.why}) if wish.why else None
        if own is None and answered:
            own = Reason("policy-wants", {"replicas": wish.replicas})
        if cap is not None and wish.replicas > cap.replicas:
            return cap.replicas, [*filter(None, [None if cap.replaces else own, cap.reason])], ""
        return wish.replicas, [*filter(None, [own])], ""

    def record(
        self, before: int, now: float, why: Reason, by: str, failure: Reason | None, bounds: tuple[Reason, ...] = ()
    ) -> ScalingRecord:
        """A record of a target that does not come from an answer of the policy."""
        return ScalingRecord(
            deployment=self.deployment,
            at=now,
            policy=self.policy_name,
            by=by,
            before=before,
            after=self.target,
            reasons=(why,),
            bounds=bounds,
            failure=failure,
        )


def numbers_of(view: DeploymentView) -> dict[str, float]:
    """The numbers that a decision was made from, for its record."""
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
    custom = list(view.metrics.items())[:MAX_CUSTOM_METRICS]
    numbers |= {name: window.last for name, window in custom if name not in numbers}
    return {name: round(float(number), 4) for name, number in numbers.items() if number is not None}

"""What delays, steps, cool-downs and bounds leave of a wish, and which of them took effect."""

import math

import msgspec

from pointsman.reasons import Reason
from pointsman.scaling.limits import ScalingLimits


class Wanted(msgspec.Struct):
    """A number of replicas, and until when it was wanted."""

    replicas: int
    until: float


class Stabilization(msgspec.Struct):
    """The largest and the smallest number wanted within a delay.

    A number holds until the next one comes. `falling` has the candidates for the largest: an entry that is followed by
    an equal or larger one is dropped. `rising` has those for the smallest.
    """

    last: int | None = None
    falling: list[Wanted] = []
    rising: list[Wanted] = []

    def add(self, now: float, wanted: int, before: int) -> None:
        """A number is wanted from now on. `before` counts for the time before the first one."""
        last = before if self.last is None else self.last
        for entries in (self.falling, self.rising):
            for entry in entries:
                entry.until = min(entry.until, now)  # a clock that was set back must not keep an entry for ever
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
        _drop(self.falling, now - delay_s)
        return self.falling[0].replicas

    def smallest(self, now: float, delay_s: float) -> int:
        """The smallest number wanted within the delay, including now."""
        _drop(self.rising, now - delay_s)
        return self.rising[0].replicas


def _drop(entries: list[Wanted], before: float) -> None:
    """Drop what ended by then. The last entry holds now, and stays."""
    while len(entries) > 1 and entries[0].until <= before:
        entries.pop(0)


class Standing(msgspec.Struct, frozen=True):
    """The state of a deployment when an answer comes."""

    now: float
    target: int
    since_change_s: float | None
    """None if the target has never changed."""
    idle_s: float
    """Since the last request; 0 if there is one now."""
    busy: bool


def within(replicas: int, limits: ScalingLimits) -> tuple[int, list[Reason]]:
    """The nearest number between min and max."""
    if replicas > limits.max_replicas:
        return limits.max_replicas, [Reason("scaling-max", {"max": limits.max_replicas})]
    if replicas < limits.min_replicas:
        return limits.min_replicas, [Reason("scaling-min", {"min": limits.min_replicas})]
    return replicas, []


def allowed(wanted: int, stabilization: Stabilization, limits: ScalingLimits, at: Standing) -> tuple[int, list[Reason]]:
    """The target that is allowed now. `stabilization` includes what is wanted now."""
    goal, bounds = within(wanted, limits)
    if not limits.min_replicas <= at.target <= limits.max_replicas:
        return within(at.target, limits)  # the limits were changed, and hold at once
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

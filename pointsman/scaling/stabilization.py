"""What was wanted of late: the least and the most within a delay, in as many notes as there are different numbers."""

import math

import msgspec

from pointsman.scaling.limits import ScalingLimits


class Note(msgspec.Struct):
    """A number that was wanted, and until when."""

    replicas: int
    until: float


class Stabilization(msgspec.Struct):
    """A want holds until the next one is said. Before the first one, what was there was wanted.

    `falling` answers for the most: whoever is followed by as many or more can never be the most again, and goes.
    `rising` answers for the least in the same way.
    """

    last: int | None = None
    falling: list[Note] = []
    rising: list[Note] = []

    def note(self, now: float, wanted: int, before: int) -> None:
        """So many are wanted now; `before` stands for the time before the first want."""
        last = before if self.last is None else self.last
        for notes in (self.falling, self.rising):
            for note in notes:
                note.until = min(note.until, now)  # a clock that was put back must not keep a note for ever
            if notes:
                notes[-1].until = now  # it is the last want, and held until now
            else:
                notes.append(Note(last, now))
        while self.falling and self.falling[-1].replicas <= wanted:
            self.falling.pop()
        while self.rising and self.rising[-1].replicas >= wanted:
            self.rising.pop()
        self.falling.append(Note(wanted, now))
        self.rising.append(Note(wanted, now))
        self.last = wanted

    def most(self, now: float, delay_s: float) -> int:
        """The most that was wanted at any moment of the delay, now included."""
        _forget(self.falling, now - delay_s)
        return self.falling[0].replicas

    def least(self, now: float, delay_s: float) -> int:
        """The least that was wanted at any moment of the delay, now included."""
        _forget(self.rising, now - delay_s)
        return self.rising[0].replicas


def _forget(notes: list[Note], before: float) -> None:
    """Leave out what ended by then; the last note is what holds now."""
    while len(notes) > 1 and notes[0].until <= before:
        notes.pop(0)


# What bounds, delays, steps and cool-downs leave of a wish, and which of them took effect, in words.


class Standing(msgspec.Struct, frozen=True):
    """Where a deployment stands when a wish comes."""

    now: float
    target: int
    since_change_s: float | None
    """None: the target has never changed."""
    idle_s: float
    """Since somebody last asked; 0: there is a request now."""
    busy: bool
    """There is a request now."""


def within(replicas: int, limits: ScalingLimits) -> tuple[int, list[str]]:
    """The nearest number between min and max."""
    if replicas > limits.max_replicas:
        return limits.max_replicas, [f"at most {limits.max_replicas} (max)"]
    if replicas < limits.min_replicas:
        return limits.min_replicas, [f"at least {limits.min_replicas} (min)"]
    return replicas, []


def allowed(wanted: int, wants: Stabilization, limits: ScalingLimits, at: Standing) -> tuple[int, list[str]]:
    """The target that may hold now. `wants` has taken in what is wanted now."""
    goal, words = within(wanted, limits)
    if not limits.min_replicas <= at.target <= limits.max_replicas:
        # The limits were changed: what they say holds at once, and what is wanted begins from there.
        return within(at.target, limits)
    after = _delayed(goal, wants, limits, at, words)
    after = _rested(after, limits, at, words)
    after = _stepped(after, limits, at, words)
    return _last_one(after, limits, at, words), words


def _delayed(goal: int, wants: Stabilization, limits: ScalingLimits, at: Standing, words: list[str]) -> int:
    if goal > at.target:
        least = wants.least(at.now, limits.up_delay_s)
        after = max(at.target, least, 1)  # 1: somebody waits for the first one
        if after < goal:
            words.append(f"{goal} after {limits.up_delay_s:g} s (upDelay)")
        return after
    if at.target == 1:
        return goal  # the last one goes by its own rule
    after = min(at.target, wants.most(at.now, limits.down_delay_s))
    if after > goal:
        words.append(f"fewer after {limits.down_delay_s:g} s (downDelay)")
    return after


def _rested(after: int, limits: ScalingLimits, at: Standing, words: list[str]) -> int:
    since = at.since_change_s
    if after == at.target or at.target == 0 or since is None or not 0 <= since < limits.cooldown_s:
        return after
    words.append(f"no change for {limits.cooldown_s:g} s after the last one (cooldown)")
    return at.target


def _stepped(after: int, limits: ScalingLimits, at: Standing, words: list[str]) -> int:
    up = after > at.target
    way = abs(after - at.target)
    factor, name, more = (limits.up_factor, "upFactor", "more") if up else (limits.down_factor, "downFactor", "fewer")
    step = math.ceil(way * factor - 1e-9)
    if step < way:
        words.append(f"{step} of {way} {more} at once ({name} {factor:g})")
    if limits.max_step is not None and step > limits.max_step:
        step = limits.max_step
        words.append(f"{step} at a time (maxStep)")
    return at.target + step if up else at.target - step


def _last_one(after: int, limits: ScalingLimits, at: Standing, words: list[str]) -> int:
    if after > 0 or at.target == 0:
        return after
    if at.busy or at.idle_s < limits.idle_timeout_s:
        words.append(f"the last one goes after {limits.idle_timeout_s:g} s without a request (idleTimeout)")
        return 1
    return 0

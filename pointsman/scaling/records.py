"""Why a target is what it is: one record per change."""

from collections.abc import Mapping

import msgspec


class ScalingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a target, or something that kept one from happening."""

    deployment: str
    at: float
    """Seconds since the epoch."""
    policy: str
    by: str = ""
    """Who decided in place of the policy: whoever ordered it, or pointsman itself; empty: the policy."""
    before: int
    after: int
    wanted: int | None = None
    """By the policy; None: it did not say (it raised, was too slow, or somebody else decided)."""
    why: str = ""
    """In the words of the policy, or of whoever decided."""
    numbers: Mapping[str, float] = {}
    """What it was decided from: ongoing, queued, arrivals_per_s, replicas, ..."""
    bounded: tuple[str, ...] = ()
    """What kept it from what was wanted: at most 8 (max), 3 at a time (maxStep), fewer after 300 s (downDelay)."""
    refused: str = ""
    """What the policy would not allow itself."""
    problem: str = ""
    """What is wrong with the policy, or with the fleet: no room, and what would help."""

    def __str__(self) -> str:
        return f"{self.deployment}: {self.in_words()}"

    def as_json(self) -> str:
        """As it is saved."""
        return msgspec.json.encode(self).decode()

    def in_words(self) -> str:
        """From what to what, why, and what kept it from being what was wanted."""
        change = f"{self.before} -> {self.after}" if self.after != self.before else f"stays at {self.after}"
        refused = f"refused: {self.refused}" if self.refused else ""
        problem = f"problem: {self.problem}" if self.problem else ""
        said = [self.why, *self.bounded, refused, problem]
        return ": ".join(filter(None, [change, "; ".join(filter(None, said))]))


# Whether something is worth telling again.


EVERY_S = 60.0
"""What goes on in other words each time, or comes and goes, is told this often."""


class ReportThrottle(msgspec.Struct):
    """A state of affairs in words; empty: all is well. News is when it begins, when it has become another, but not
    every second, as words may have numbers in them; and when what was told is over."""

    words: str = ""
    """What was last told."""
    told_at: float | None = None

    def is_news(self, words: str, now: float) -> bool:
        """Take it in; True: tell it."""
        if words == self.words:
            return False
        if words and self.told_at is not None and 0 <= now - self.told_at < EVERY_S:
            return False
        self.words, self.told_at = words, now
        return True

"""One run of a flow: which calls are ready, which are to be given up, and how long each took.

Enters: what became of calls, and the time. Leaves: the numbers of steps to begin, or of those under way to give up.
The one rule: each step begins at most once, and after a failure nothing begins any more.
"""

from collections.abc import Sequence

from pointsman.pipeline.flow import Flow


class Run:
    """The state of one request on its way through a flow. Whoever carries it out keeps the results."""

    __slots__ = ("_flow", "_missing", "began", "began_at", "deadline", "ended_at", "failed_step", "left", "over")

    def __init__(self, flow: Flow, now: float, deadline: float | None = None) -> None:
        self._flow = flow
        self._missing = [len(step.needs) for step in flow.steps]
        self.began = now
        self.deadline = deadline
        """When the answer is due; None: at no particular time."""
        self.left = len(flow.steps)
        """Steps that have not ended."""
        self.began_at: list[float | None] = [None] * self.left
        """By step: when it began; when it ended, either way."""
        self.ended_at: list[float | None] = [None] * self.left
        self.failed_step: int | None = None
        self.over = False
        """Nothing is to be done any more: everything has ended, or something has failed, or it was given up."""

    def begin(self) -> Sequence[int]:
        """The steps that wait for nothing. Without any, the run is over at once."""
        self.over = not self.left
        ready = [place for place, missing in enumerate(self._missing) if not missing]
        for place in ready:
            self.began_at[place] = self.began
        return ready

    def finished(self, place: int, now: float) -> Sequence[int]:
        """A step has its result. The steps that are ready now."""
        if self.over or self.ended_at[place] is not None:
            return ()
        self.ended_at[place] = now
        self.left -= 1
        if not self.left:
            self.over = True
            return ()
        ready = []
        for fed in self._flow.steps[place].feeds:
            self._missing[fed] -= 1
            if not self._missing[fed]:
                self.began_at[fed] = now
                ready.append(fed)
        return ready

    def failed(self, place: int, now: float) -> Sequence[int]:
        """A step will have no result, and so neither has the run. Steps under way that are of no use any more."""
        if self.over or self.ended_at[place] is not None:
            return ()
        self.failed_step = place
        self.ended_at[place] = now
        return self.give_up(now)

    def give_up(self, now: float) -> Sequence[int]:
        """Nobody wants the answer any more, or it would come too late. Steps under way."""
        if self.over:
            return ()
        self.over = True
        under_way = self.under_way()
        for place in under_way:
            self.ended_at[place] = now
        return under_way

    def under_way(self) -> list[int]:
        """Steps that have begun and not ended."""
        ended = self.ended_at
        return [place for place, began in enumerate(self.began_at) if began is not None and ended[place] is None]

    def deadline_of(self, place: int, now: float) -> float | None:
        """When a step that begins now must have ended: with the run, or with its share of the time."""
        share = self._flow.steps[place].deadline_share
        if self.deadline is None or share is None:
            return self.deadline
        return min(self.deadline, now + share * (self.deadline - self.began))

"""Everything that one cycle considered, as data and as JSON. `render/text.py` makes a table of it.

A trace only collects references while the cycle runs; reasons are made when it is read.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec

from pointsman.reasons import Reason
from pointsman.selection.arrays import np
from pointsman.selection.columns import Column


class ScoreTrace(msgspec.Struct):
    """The scores of one scorer, before and after clamping to [0, 1]."""

    scorer: str
    weight: float
    raw: Column
    bounded: Column

    @property
    def clamped(self) -> int:
        """How many of the scores were outside [0, 1]."""
        if self.raw is self.bounded:
            return 0
        return int(np.count_nonzero(np.asarray(self.raw) != np.asarray(self.bounded)))


Score: TypeAlias = tuple[int, str, float, Column, Column]
"""(index in the profile, name, weight, raw scores, clamped scores) of one scorer."""


class ProfileTrace(msgspec.Struct, eq=False, gc=False):
    """One run of one profile. Thousands are kept, so it holds nothing that can be computed again."""

    profile: str
    considered: int
    """Number of candidates."""
    stages: Sequence[tuple[str, Any]] = ()
    survivors: Sequence[Any] = ()
    steady: Sequence[Score] = ()
    """Scores that runs share until the next measurement; `scored` has the scores from this run alone."""
    scored: tuple[Score, ...] = ()
    picker: str = ""
    targets: Sequence[Any] = ()

    @property
    def scores(self) -> list[ScoreTrace]:
        """The scores of each scorer, in the order of the profile."""
        return [ScoreTrace(*score[1:]) for score in sorted((*self.steady, *self.scored), key=itemgetter(0))]

    @property
    def totals(self) -> list[float]:
        """The weighted sum of each survivor."""
        scores = [(weight, bounded) for _, _, weight, _, bounded in (*self.steady, *self.scored)]
        return [sum(weight * float(bounded[at]) for weight, bounded in scores) for at in range(len(self.survivors))]

    def as_dict(self) -> dict[str, Any]:
        scores = self.scores
        return {
            "profile": self.profile,
            "candidates": self.considered,
            "rejected": [
                {"candidate": str(candidate), "filter": name, "reason": reason.as_dict()}
                for name, rejected in self.stages
                for candidate, reason in rejected
            ],
            "scored": [
                {
                    "candidate": str(candidate),
                    "total": total,
                    "scores": {score.scorer: float(score.bounded[position]) for score in scores},
                }
                for position, (candidate, total) in enumerate(zip(self.survivors, self.totals, strict=True))
            ],
            "weights": {score.scorer: score.weight for score in scores},
            "clamped": {score.scorer: score.clamped for score in scores if score.clamped},
            "picker": self.picker,
            "targets": [str(target) for target in self.targets],
        }


class Trace(msgspec.Struct, eq=False, gc=False):
    """One cycle: its profile runs in order, and notes on anything unusual."""

    profiles: tuple[ProfileTrace, ...] = ()
    remarks: tuple[Reason | Callable[[], Reason], ...] = ()
    """Notes, or functions that make a note when the trace is read, which is rare. These must not keep columns alive."""

    def note(self, reason: Reason) -> None:
        self.remarks += (reason,)

    @property
    def notes(self) -> tuple[Reason, ...]:
        return tuple(one if isinstance(one, Reason) else one() for one in self.remarks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "profiles": [profile.as_dict() for profile in self.profiles],
            "notes": [note.as_dict() for note in self.notes],
        }

    def as_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self.as_dict()).decode())

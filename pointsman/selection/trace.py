"""Why: everything that one cycle considered, as data, as a table and as JSON.

A trace only collects references while the cycle runs; words and tables are made when somebody reads it.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from pointsman.selection.arrays import np
from pointsman.selection.columns import Column
from pointsman.selection.text import text_table


class ScoreTrace(msgspec.Struct):
    """What one scorer said, before and after clamping to [0, 1]."""

    scorer: str
    weight: float
    raw: Column
    bounded: Column

    @property
    def clamped(self) -> int:
        """How many of its scores were outside [0, 1]."""
        if self.raw is self.bounded:
            return 0
        return int(np.count_nonzero(np.asarray(self.raw) != np.asarray(self.bounded)))


class ProfileTrace:
    """One run of one profile."""

    __slots__ = ("considered", "picker", "profile", "scored_by", "stages", "survivors", "targets", "totals")

    def __init__(self, profile: str, considered: int) -> None:
        self.profile = profile
        self.considered = considered
        """How many candidates there were."""
        self.stages: Sequence[tuple[str, Any]] = ()
        self.survivors: Sequence[Any] = ()
        self.scored_by: list[tuple[str, float, Column, Column]] = []
        """(scorer, weight, scores, scores within bounds)"""
        self.totals: Column = []
        self.picker = ""
        self.targets: Sequence[Any] = ()

    @property
    def scores(self) -> list[ScoreTrace]:
        """What each scorer said."""
        return [ScoreTrace(*one) for one in self.scored_by]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "profile": self.profile,
            "candidates": self.considered,
            "rejected": [
                {"candidate": str(who), "filter": name, "reason": why}
                for name, rejected in self.stages
                for who, why in rejected
            ],
            "scored": [
                {
                    "candidate": str(who),
                    "total": float(self.totals[position]),
                    "scores": {score.scorer: float(score.bounded[position]) for score in self.scores},
                }
                for position, who in enumerate(self.survivors)
                if len(self.totals)
            ],
            "weights": {score.scorer: score.weight for score in self.scores},
            "clamped": {score.scorer: score.clamped for score in self.scores if score.clamped},
            "picker": self.picker,
            "targets": [str(target) for target in self.targets],
        }

    def as_table(self) -> str:
        """One line per candidate: scores and total for those who stayed, the reason for those who left."""
        heads = [f"{score.scorer} x{score.weight:g}" for score in self.scores]
        chosen = {str(target): rank for rank, target in enumerate(self.targets, start=1)}
        rows: list[list[str]] = []
        if len(self.totals):
            order = sorted(range(len(self.survivors)), key=lambda position: -float(self.totals[position]))
            for position in order:
                who = str(self.survivors[position])
                rank = chosen.get(who)
                verdict = "" if rank is None else "chosen" if rank == 1 else f"chosen ({rank}.)"
                numbers = [f"{float(score.bounded[position]):.3f}" for score in self.scores]
                rows.append([who, *numbers, f"{float(self.totals[position]):.3f}", verdict])
        for name, rejected in self.stages:
            rows += [[str(who), *[""] * len(heads), "", f"{name}: {why}"] for who, why in rejected]
        lines = [f'profile "{self.profile}", {self.considered} candidates']
        lines += [
            f"{score.scorer}: {score.clamped} scores outside [0, 1] were clamped"
            for score in self.scores
            if score.clamped
        ]
        return "\n".join([*lines, text_table(["candidate", *heads, "total", "verdict"], rows)])


class Trace:
    """One cycle: its profile runs in order, and notes of anything unusual."""

    __slots__ = ("notes", "profiles")

    def __init__(self) -> None:
        self.profiles: list[ProfileTrace] = []
        self.notes: list[str] = []

    def begin(self, profile: str, candidates: Sequence[Any]) -> ProfileTrace:
        """Called by a profile that starts to run."""
        begun = ProfileTrace(profile, len(candidates))
        self.profiles.append(begun)
        return begun

    def note(self, text: str) -> None:
        """Something a reader of this trace should know."""
        self.notes.append(text)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"profiles": [profile.as_dict() for profile in self.profiles], "notes": self.notes}

    def as_json(self) -> str:
        """The same as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self.as_dict()).decode())

    def as_table(self) -> str:
        """The same as text for a terminal."""
        return "\n\n".join([*(profile.as_table() for profile in self.profiles), *self.notes])

    def __str__(self) -> str:
        return self.as_table()

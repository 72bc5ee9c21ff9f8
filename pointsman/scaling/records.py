"""Why a target is what it is: one record per change, or per problem that prevents one."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.reasons import Reason

REPORT_INTERVAL_S = 60.0
"""Minimum time between two reports of a problem that keeps changing, or comes and goes."""


class ScalingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a target, or something that prevented one."""

    deployment: str
    at: float
    """Seconds since the epoch."""
    policy: str
    by: str = ""
    """What decided in place of the policy: an operator, or pointsman; empty if the policy decided."""
    before: int
    after: int
    wanted: int | None = None
    """The target that the policy wants; None if it raised, was too slow, or was not followed."""
    reasons: tuple[Reason, ...] = ()
    bounds: tuple[Reason, ...] = ()
    """Limits, delays and steps that kept the target from what was wanted."""
    numbers: Mapping[str, float] = {}
    """The numbers on which the decision is based: ongoing, queued, arrivals_per_s, replicas, ..."""
    refused: str = ""
    """What the policy would have wanted but did not allow itself, in its own words."""
    failure: Reason | None = None
    """What is wrong with the policy, or with the fleet."""

    @property
    def why(self) -> str:
        return "; ".join(map(str, self.reasons))

    @property
    def bounded(self) -> tuple[str, ...]:
        return tuple(str(reason) for reason in self.bounds)

    @property
    def problem(self) -> str:
        """The failure as text; empty if there is none."""
        return "" if self.failure is None else str(self.failure)

    def __str__(self) -> str:
        return f"{self.deployment}: {self.in_words()}"

    def in_words(self) -> str:
        """The change, its reason, and what kept the target from being what the policy wanted."""
        change = f"{self.before} -> {self.after}" if self.after != self.before else f"stays at {self.after}"
        refused = f"refused: {self.refused}" if self.refused else ""
        problem = f"problem: {self.problem}" if self.failure else ""
        parts = [self.why, *self.bounded, refused, problem]
        return ": ".join(filter(None, [change, "; ".join(filter(None, parts))]))

    def as_dict(self) -> dict[str, Any]:
        """Plain data: texts for people, and under `reasons` their codes and facts."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["bounds"], fields["failure"]
        return {
            **fields,
            "why": self.why,
            "bounded": list(self.bounded),
            "problem": self.problem,
            "reasons": {
                "why": [reason.as_dict() for reason in self.reasons],
                "bounded": [reason.as_dict() for reason in self.bounds],
                "problem": None if self.failure is None else self.failure.as_dict(),
            },
        }

    def as_json(self) -> str:
        """The record in the form in which it is saved."""
        return msgspec.json.encode(self).decode()


class ReportThrottle(msgspec.Struct):
    """Decides whether a state is worth a record: when a problem begins, changes or ends, but not too often."""

    last: Reason | None = None
    """The problem that was last reported; None if there was no problem."""
    reported: dict[str, float] = {}
    """When a problem of each kind was last reported."""

    def is_due(self, problem: Reason | None, now: float, kind: str = "") -> bool:
        """Whether to report this problem; if so, it counts as reported. A problem of another kind is always reported.
        A problem of the same kind with about the same figures is not."""
        known, at = self.last, self.reported.get(kind)
        if problem is known or (problem is not None and known is not None and problem.is_like(known)):
            return False
        if problem is not None and at is not None and 0 <= now - at < REPORT_INTERVAL_S:
            return False
        self.last = None if problem is None else problem.plain()
        if problem is not None:
            self.reported[kind] = now
        return True

"""Why there is no place: every worker and every tier with a reason."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from pointsman.placement.asks import Ask
from pointsman.placement.fleet import Host
from pointsman.selection import SchedulingFailure, Trace

NOT_ALLOWED = "not allowed"
"""Begins what a tier says that is not open to an ask."""
NO_GPU = "no GPU"


class Refused(msgspec.Struct, frozen=True, eq=False):
    """An ask for which there is no place: a value, because that is an ordinary outcome."""

    ask: Ask
    failure: SchedulingFailure[Host]
    trace: Trace | None = None

    def reasons(self) -> dict[str, dict[str, str]]:
        """By tier and worker: why not."""
        return {
            tier: {str(who): f"{name}: {why}" for who, name, why in failure.reasons()}
            for tier, failure in self.failure.failures.items()
        }

    def in_words(self) -> str:
        """Why, in how many workers: first for those who are not asked in any tier, then by tier."""
        runs = self.failure.failures
        names = [{name for name, _ in run.stages} for run in runs.values()]
        demands = set.intersection(*names) if names else set()  # they turn the same workers away in every tier
        told: dict[str, Counter[str]] = {}
        for tier, run in runs.items():
            for name, rejected in run.stages:
                told.setdefault("not asked" if name in demands else tier, Counter())
                if name not in demands:
                    told[tier].update(_kind(str(why)) for _, why in rejected)
                elif run is next(iter(runs.values())):
                    told["not asked"].update(_kind(str(why)) for _, why in rejected)
        words = [f"{what}: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()) for what, kinds in told.items()]
        return "; ".join(words) or "there are no workers"

    def in_short(self) -> str:
        """Why, with figures: what is in the way in the first tier that is open to it, and for which workers have GPUs.
        If none is open, why not."""
        first: list[tuple[str, str]] = []
        for run in self.failure.failures.values():
            told = [(str(who), str(why)) for who, _, why in run.reasons()]
            if any(why.startswith(NOT_ALLOWED) for _, why in told):
                continue
            if any(why != NO_GPU for _, why in told):
                return _counted(told)
            first = first or told
        return _counted(first) if first else self.in_words()

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"instance": self.ask.instance_id, "why": self.in_words(), "reasons": self.reasons()}


def _counted(reasons: Sequence[tuple[str, str]]) -> str:
    """In full what is the same for all; else how many there are of each kind, with the figures of the first."""
    if len({why for _, why in reasons}) == 1:
        return reasons[0][1]
    kinds: dict[str, list[tuple[str, str]]] = {}
    for who, why in reasons:
        kinds.setdefault(_kind(why), []).append((who, why))
    return ", ".join(f"{len(found)} {kind}{_figures(found)}" for kind, found in kinds.items())


def _figures(reasons: Sequence[tuple[str, str]]) -> str:
    who, why = reasons[0]
    figures = why.partition(": ")[2]
    alike = all(other == why for _, other in reasons)
    return f" ({figures if alike else f'{who}: {figures}'})" if figures else ""


def _kind(why: str) -> str:
    """Reasons that differ only after the first colon are one kind; what is not allowed is told as it is."""
    return why if why.startswith(NOT_ALLOWED) else why.partition(":")[0]


# What would have to change for there to be a place. Every change is tried out on the fleet as it stands.

"""Why there is no place: every worker and every tier with a reason."""

from collections import Counter
from typing import Any

import msgspec

from pointsman.placement.asks import Ask
from pointsman.placement.fleet import Host
from pointsman.selection import SchedulingFailure, Trace


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
                    told[tier].update(_kind(why) for _, why in rejected)
                elif run is next(iter(runs.values())):
                    told["not asked"].update(_kind(why) for _, why in rejected)
        words = [f"{what}: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()) for what, kinds in told.items()]
        return "; ".join(words) or "there are no workers"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"instance": self.ask.instance_id, "why": self.in_words(), "reasons": self.reasons()}


def _kind(why: str) -> str:
    """Reasons that differ only after the first colon are one kind; what is not allowed is told as it is."""
    return why if why.startswith("not allowed") else why.partition(":")[0]

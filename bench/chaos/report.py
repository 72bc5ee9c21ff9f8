"""How the requests of each scenario ended, as one table, and which guarantees were violated."""

from collections import Counter
from collections.abc import Sequence, Set
from typing import NamedTuple

from bench.chaos.clients import Sample, Verdict
from bench.chaos.scenarios import Scenario
from pointsman.render.text import text_table

HEADS = (
    "fault", "requests", "served", "after a retry", "refused", "broken off", "client left", "lost", "doubled",
    "slowest s", "ready after s",
)  # fmt: skip


class Outcome(NamedTuple):
    scenario: Scenario
    samples: Sequence[Sample] = ()
    retried: Set[str] = frozenset()
    """Ids of requests that took more than one try, from the plane's records."""
    counted: int | None = None
    """Requests that the gateway counted as ended; None if a new gateway has other counts."""
    in_flight: int = 0
    """Requests that the gateway still counted after the load had ended."""
    settled_s: float | None = None
    """From the end of the load until every instance was ready; None if that did not happen."""
    skipped: str = ""
    """Why it was not run."""

    # How requests ended

    def ended(self, *verdicts: Verdict) -> list[Sample]:
        """Requests that ended in this way, except for those whose connection the fault itself has cut."""
        return [one for one in self.samples if one.verdict in verdicts and not self.scenario.was_cut(one)]

    @property
    def cut(self) -> list[Sample]:
        return [one for one in self.samples if self.scenario.was_cut(one)]

    @property
    def served_share(self) -> float:
        """The share of served requests, among those whose clients stayed."""
        stayed = len(self.samples) - len(self.ended(Verdict.DISCONNECTED))
        return len(self.ended(Verdict.SERVED)) / stayed if stayed else 0.0

    def refusals(self) -> Counter[tuple[str, str]]:
        """(status and code, an example of the message) -> how many"""
        refused = self.ended(Verdict.REFUSED, Verdict.UNREACHABLE, Verdict.INTERRUPTED)
        named = [(f"{one.status} {one.code}" if one.status else "connection refused", one.why) for one in refused]
        examples = dict(reversed(named))
        return Counter((name, examples[name]) for name, _ in named)

    # The table

    def row(self) -> list[str]:
        if self.skipped:
            return [self.scenario.name, f"skipped: {self.skipped}", *[""] * (len(HEADS) - 2)]
        served = self.ended(Verdict.SERVED)
        numbers = (
            len(self.samples),
            len(served),
            sum(one.request.request_id in self.retried for one in served),
            len(self.ended(Verdict.REFUSED, Verdict.UNREACHABLE)),
            len(self.ended(Verdict.INTERRUPTED)) + len(self.cut),
            len(self.ended(Verdict.DISCONNECTED)),
            len(self.ended(Verdict.LOST)),
            len(self.ended(Verdict.WRONG)),
        )
        slowest = max((one.ended - one.began for one in served), default=0.0)
        ready = "never" if self.settled_s is None else f"{self.settled_s:.1f}"
        return [self.scenario.name, *map(str, numbers), f"{slowest:.1f}", ready]

    # Guarantees

    def violations(self) -> list[str]:
        """Violated guarantees, each with the first examples."""
        if self.skipped:
            return []
        found = list(self.scenario.problems)
        for verdict, violation in VIOLATIONS.items():
            samples = self.ended(verdict)
            if samples and verdict not in self.scenario.allowed:
                examples = "".join(f"\n    {one.request.request_id}: {one.why}" for one in samples[:3])
                found.append(f"{violation}: {len(samples)}{examples}")
        if self.served_share < self.scenario.min_served:
            found.append(f"{self.served_share:.1%} of the requests were served, not {self.scenario.min_served:.0%}")
        if not self.ended(Verdict.SERVED):
            found.append("no request was served")
        if self.counted is not None and self.counted != len(self.samples):
            found.append(f"the gateway counted {self.counted} requests, the clients sent {len(self.samples)}")
        if self.in_flight:
            found.append(f"the gateway still counts {self.in_flight} requests in flight")
        if self.settled_s is None:
            found.append("not all instances became ready again")
        return [f"{self.scenario.name}: {one}" for one in found]


VIOLATIONS = {
    Verdict.LOST: "requests without a complete response or an error",
    Verdict.WRONG: "doubled, wrong or badly framed responses",
    Verdict.REFUSED: "requests that failed before their response began, with a healthy instance",
    Verdict.UNREACHABLE: "refused connections",
    Verdict.INTERRUPTED: "streams broken off with an error, although their instance was healthy",
}


def table(outcomes: Sequence[Outcome]) -> str:
    return text_table(HEADS, [one.row() for one in outcomes])


def refusals(outcomes: Sequence[Outcome]) -> str:
    """The errors of clients whose requests were refused or broken off."""
    rows = [
        [one.scenario.name, reason, str(count), message[:100]]
        for one in outcomes
        for (reason, message), count in one.refusals().most_common()
    ]
    return text_table(("fault", "status and code", "times", "for example"), rows) if rows else "none was refused"

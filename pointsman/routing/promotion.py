"""A promotion: from a canary's two shares to the decision whether its candidate takes effect.

Enters: the time, and the counts of both shares. Leaves: a verdict with its reason, once it can be given. The one rule:
unless the condition is known to hold, the policy in force stays.

    running -> promoted      the condition holds when the time is over
            -> rolled back it does not, too little is known, or the candidate fails, errs or is much worse before
"""

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from pointsman.errors import PointsmanError, did_you_mean
from pointsman.reasons import Reason
from pointsman.routing.canary import CanaryCounts, ShareCounts, ShareLatencies

MIN_REQUESTS = 30
"""Minimum number of requests with the compared metric in each share: fewer prove nothing."""
EARLY_REQUESTS = 100
"""Minimum number of requests in each share before a candidate can be judged to be much worse."""
MUCH_WORSE = 0.5
"""A candidate whose metric is worse by more than this share is stopped early."""
MAX_FAILURES = 3
"""A promotion ends after this many requests for which the candidate raised, blocked or was suspended."""
MAX_MORE_ERRORS = 0.02
"""Maximum excess of the candidate's share of failed requests, if there are at least `MIN_REQUESTS`."""

_LATENCIES = {"ttft": "time to the first token", "tpot": "time per output token", "e2e": "time to the whole answer"}
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_SHARES = {"errors": "share of failed requests", "attainment": "share of deadlines met"}
METRICS = (*(f"{name}_{figure}" for name in _LATENCIES for figure in ("mean", *_PERCENTILES)), *_SHARES)
_TERM = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=|<|>)\s*([+-]?\d+(?:\.\d+)?)\s*(%?)\s*")
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<": lambda one, other: one < other,
    "<=": lambda one, other: one <= other,
    ">": lambda one, other: one > other,
    ">=": lambda one, other: one >= other,
}


class WrongCondition(PointsmanError):
    """A condition that cannot be read."""


class Term(msgspec.Struct, frozen=True):
    """One comparison of the candidate's share with the other."""

    metric: str
    comparison: str
    limit: float
    """The limit for the relative change: -0.05 is 5 % less. For `errors` and `attainment`, it is for the difference."""

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.limit * 100:+g}%".replace("+0%", "0%")

    def holds(self, change: float) -> bool:
        return _HOLDS[self.comparison](change, self.limit)

    @property
    def smaller_is_better(self) -> bool:
        return self.metric != "attainment"


def read_condition(text: str) -> tuple[Term, ...]:
    """The terms of a condition such as `ttft_p90 < -5% and errors <= 0%`. Raises `WrongCondition`."""
    terms = []
    for part in re.split(r"\s+and\s+", text.strip()):
        match = _TERM.fullmatch(part)
        if match is None or not match[4]:
            form = "METRIC < -5%, with <, <=, > or >= and a change in percent; join several with: and"
            raise WrongCondition(f'the condition "{part.strip()[:80]}" is not of the form {form}')
        metric, comparison, limit, _ = match.groups()
        if metric not in METRICS:
            raise WrongCondition(f'unknown metric "{metric}"{did_you_mean(metric, METRICS)}')
        terms.append(Term(metric, comparison, float(limit) / 100))
    return tuple(terms)


def figure(metric: str, share: ShareCounts) -> tuple[float | None, int]:
    """A metric of one share (None if unknown), and the number of requests with that metric."""
    if metric == "errors":
        return (share.errors / share.requests if share.requests else None), share.requests
    if metric == "attainment":
        due = share.met + share.missed
        return (share.met / due if due else None), due
    name, _, which = metric.partition("_")
    latencies: ShareLatencies = getattr(share, name)
    found = latencies.mean if which == "mean" else latencies.percentile(_PERCENTILES[which])
    return found, latencies.count


def change_of(metric: str, counts: CanaryCounts) -> float | None:
    """How much the metric of the candidate's share differs from the other share; None if unknown."""
    (theirs, _), (ours, _) = figure(metric, counts.candidate), figure(metric, counts.in_force)
    if theirs is None or ours is None:
        return None
    if metric in _SHARES:
        return theirs - ours
    return theirs / ours - 1 if ours > 0 else None


class PromotionVerdict(msgspec.Struct, frozen=True):
    state: Literal["promoted", "rolled back"]
    why: Reason


class Promotion(msgspec.Struct):
    """A candidate that takes effect, or is rolled back."""

    run: str
    deployment: str
    candidate: str
    terms: tuple[Term, ...]
    share: float
    for_s: float
    began: float
    """When it began, on the clock of the plane."""
    counts: CanaryCounts
    """The most recent counts."""
    verdict: PromotionVerdict | None = None

    def observe(self, counts: CanaryCounts, now: float) -> PromotionVerdict | None:
        """Take in the counts of both shares. Returns the verdict, once there is one."""
        if self.verdict is None:
            self.counts = counts
            self.verdict = self._early(counts) or (self._final(counts) if now >= self.began + self.for_s else None)
        return self.verdict

    def give_up(self, why: Reason) -> PromotionVerdict:
        """End the promotion on request; the policy in force stays."""
        self.verdict = self.verdict or PromotionVerdict("rolled back", why)
        return self.verdict

    def _early(self, counts: CanaryCounts) -> PromotionVerdict | None:
        if counts.failures >= MAX_FAILURES:
            return _back("candidate-without-answer", failures=counts.failures, problem=counts.problem)
        ours, theirs = counts.in_force, counts.candidate
        if theirs.requests >= MIN_REQUESTS and theirs.errors:
            in_force = ours.errors / ours.requests if ours.requests else 0.0
            if theirs.errors / theirs.requests > in_force + MAX_MORE_ERRORS:
                facts = {"errors": theirs.errors, "requests": theirs.requests, "in_force": in_force}
                return _back("candidate-errs", **facts)
        for term in self.terms:
            number = min(figure(term.metric, ours)[1], figure(term.metric, theirs)[1])
            change = change_of(term.metric, counts)
            worse = None if change is None else change if term.smaller_is_better else -change
            if number >= EARLY_REQUESTS and worse is not None and worse > MUCH_WORSE and not term.holds(change or 0.0):
                return _back("candidate-much-worse", metric=term.metric, change=change, requests=number)
        return None

    def _final(self, counts: CanaryCounts) -> PromotionVerdict:
        found = {}
        for term in self.terms:
            number = min(figure(term.metric, counts.in_force)[1], figure(term.metric, counts.candidate)[1])
            change = change_of(term.metric, counts)
            if number < MIN_REQUESTS or change is None:
                return _back("too-few-to-compare", metric=term.metric, requests=number, needed=MIN_REQUESTS)
            found[term.metric] = change
        for term in self.terms:
            if not term.holds(found[term.metric]):
                return _back("condition-not-met", condition=str(term), change=found[term.metric])
        first = self.terms[0]
        facts = {"condition": " and ".join(map(str, self.terms)), "metric": first.metric, "change": found[first.metric]}
        return PromotionVerdict("promoted", Reason("condition-met", facts))

    def as_dict(self, now: float) -> dict[str, Any]:
        """Plain data for `status` and `shadow`."""
        shares = {"in_force": self.counts.in_force, "candidate": self.counts.candidate}
        shown = dict.fromkeys([*(term.metric for term in self.terms), "ttft_p50", "ttft_p90", "tpot_p90", "e2e_p90"])
        return {
            "run": self.run,
            "deployment": self.deployment,
            "candidate": self.candidate,
            "condition": " and ".join(map(str, self.terms)),
            "canary": self.share,
            "for_s": self.for_s,
            "elapsed_s": round(min(now - self.began, self.for_s), 1),
            "state": "running" if self.verdict is None else self.verdict.state,
            "why": None if self.verdict is None else self.verdict.why.as_dict(),
            "stood_in": self.counts.stood_in,
            "shares": {
                name: {"requests": one.requests, "errors": one.errors}
                | {metric: figure(metric, one)[0] for metric in (*shown, "attainment")}
                for name, one in shares.items()
            },
            "changes": {metric: change_of(metric, self.counts) for metric in (*shown, "errors", "attainment")},
        }


def _back(code: str, **facts: Any) -> PromotionVerdict:
    return PromotionVerdict("rolled back", Reason(code, facts))

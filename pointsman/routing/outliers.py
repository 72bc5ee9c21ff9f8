"""Outliers: instances whose errors stand out from those of their peers, and pauses that instances ask for.

Enters: the answers from instances, with the time. Leaves: outliers. The one rule: an instance is judged by comparison.

Each error has a kind: its 4xx status, 5xx, or a try that failed. A second opinion is the answer of another instance to
the same request. A success contradicts the error; the same error confirms it. The share of an instance's errors that
count is the share of second opinions that contradict them. Without second opinions, all errors count. If the clients
are wrong, second opinions confirm the errors, and none count. An instance stands out if in the last 30 to 60 s

- at least 5 errors of one kind count, and at least 3 were contradicted; without second opinions, at least 20 count,
- the share of these errors among its results exceeds the share at its peers by 10 points; by 50 points for 429, because
  an instance that answers 429 may only be the smallest,
- and the difference of the two shares is at least 4 standard errors, which are large if there are few second opinions.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import sqrt
from typing import NamedTuple

import msgspec

from pointsman.reasons import Reason

FAILED = "failed"
"""The kind of a try that ended without a complete answer."""
REFUSED = "429"

WINDOW_S = 30.0
"""Results older than two of these windows do not count."""
STALE_RESULTS = 10
"""Maximum number of good results from a time without errors that an instance keeps."""
MIN_CONTRADICTED = 3
MIN_ERRORS = 5
MIN_ERRORS_ALONE = 20
"""The minimum number of errors if there are no second opinions."""
MIN_DIFFERENCE = 0.1
MIN_REFUSED_DIFFERENCE = 0.5
MIN_STANDARD_ERRORS = 4.0
REPORT_INTERVAL_S = 1.0
"""Minimum interval between reports of one instance."""

MAX_SPARED = 7
"""While second opinions confirm errors of a kind, fewer errors get one: as few as one in 2 to the power of this."""
MAX_SPARED_OUTLIER = 3
"""Replaces MAX_SPARED for an instance that has more errors of the kind than its peers."""

FIRST_PAUSE_S = 0.1
"""The pause of an instance that asks for one without a length. It doubles with each further pause before a success."""
MAX_OWN_PAUSE_S = 10.0
MAX_PAUSE_S = 60.0
"""Maximum pause: an instance that asks for a longer one is tried again after this time."""


def kind_of(status: int) -> str:
    """The kind of error of a status."""
    return str(status) if status < 500 else "5xx"


class Doubt(NamedTuple):
    """An error of an instance that another instance may contradict."""

    instance_id: str
    kind: str


class Outlier(NamedTuple):
    """An instance that stands out: its results, compared with those of its peers."""

    instance_id: str
    kind: str
    errors: int
    results: int
    peer_errors: int
    peer_results: int
    contradicted: int
    """Errors after which another instance served the same request."""

    @property
    def reason(self) -> Reason:
        return Reason("stands-out", {name: value for name, value in self._asdict().items() if name != "instance_id"})


class ErrorCount(msgspec.Struct):
    """Errors of one kind, and the second opinions on them."""

    errors: int = 0
    asked: int = 0
    """Number of second opinions."""
    contradicted: int = 0


class ErrorShare(NamedTuple):
    """Errors of one kind at one or more instances, and how many of them count."""

    results: int
    found: int
    asked: int = 0
    contradicted: int = 0

    @property
    def errors(self) -> float:
        """The number of errors that count."""
        return self.found * self.contradicted / self.asked if self.asked else self.found

    def variance(self, error_share: float, contradicted_share: float) -> float:
        """The variance of the share of errors that count, if these are the true shares of errors among results, and of
        contradictions among opinions."""
        by_results = contradicted_share**2 * error_share * (1.0 - error_share) / self.results
        if not self.asked:
            return by_results
        return by_results + error_share**2 * contradicted_share * (1.0 - contradicted_share) / self.asked


class Streak(msgspec.Struct):
    """What an instance has done since its last success."""

    failures: int = 0
    """Number of tries that failed or were answered with 5xx."""
    refusals: int = 0
    """Number of pauses."""

    def pause_s(self, asked_s: float | None, *, is_paused: bool) -> float:
        """The pause of the instance: the time that it asks for, within limits."""
        if not is_paused:  # else this is one of several requests that were sent before the pause
            self.refusals += 1
        if asked_s is not None:
            return min(max(asked_s, FIRST_PAUSE_S), MAX_PAUSE_S)
        return min(FIRST_PAUSE_S * 2.0 ** min(max(self.refusals, 1) - 1, 30), MAX_OWN_PAUSE_S)


class Sparing(msgspec.Struct):
    """How many second opinions on one kind of error of an instance to skip."""

    confirmed: int = 0
    """Number of confirmed errors in a row."""
    skipped: int = 0


class ResultWindow:
    """The results of instances over a period."""

    def __init__(self) -> None:
        self.good: dict[str, int] = defaultdict(int)
        self.errors: dict[str, dict[str, ErrorCount]] = {}

    def of(self, doubt: Doubt) -> ErrorCount:
        return self.errors.setdefault(doubt.instance_id, {}).setdefault(doubt.kind, ErrorCount())

    def results(self, instance_id: str) -> int:
        found = self.errors.get(instance_id, {}).values()
        return self.good.get(instance_id, 0) + sum(one.errors for one in found)

    def forget(self, instance_id: str) -> None:
        self.good.pop(instance_id, None)
        self.errors.pop(instance_id, None)


class Outliers:
    """The results of the instances of one deployment."""

    def __init__(self) -> None:
        self._now, self._before = ResultWindow(), ResultWindow()
        self.good = self._now.good
        """Successes by instance. The caller counts them here directly, because counting must be fast."""
        self.streaks: dict[str, Streak] = defaultdict(Streak)
        """Streaks of instances whose last result was not a success. The caller removes one at its next success."""
        self._sparing: dict[Doubt, Sparing] = {}
        self._reported: dict[str, float] = {}
        """When each instance was last reported."""
        self._began = 0.0

    def joined(self) -> None:
        """Handle an instance that joins or comes back. It has no earlier results, so the earlier results of its peers
        are dropped: only results from the same time are compared."""
        for window in (self._now, self._before):
            window.good.clear()  # the caller counts in this object
            window.errors.clear()

    def forget(self, instance_id: str) -> None:
        """Forget an instance that takes no more requests."""
        self._now.forget(instance_id)
        self._before.forget(instance_id)
        self.streaks.pop(instance_id, None)
        self._reported.pop(instance_id, None)
        for doubt in [one for one in self._sparing if one.instance_id == instance_id]:
            del self._sparing[doubt]

    # What happens

    def erred(self, doubt: Doubt, now: float) -> None:
        """Count an error or a failure of an instance."""
        self._roll(now)
        self._now.of(doubt).errors += 1

    def contradicted(self, doubts: Iterable[Doubt], now: float) -> None:
        """Record that another instance has served the request of these errors."""
        self._roll(now)
        for doubt in doubts:
            count = self._now.of(doubt)
            count.asked += 1
            count.contradicted += 1
            self._sparing.pop(doubt, None)

    def confirmed(self, doubts: Iterable[Doubt], now: float) -> None:
        """Record that no instance has served the request of these errors: errors of one kind confirm each other."""
        self._roll(now)
        distinct = dict.fromkeys(doubts)
        kinds = [kind for _, kind in distinct]
        for doubt in distinct:
            if kinds.count(doubt.kind) > 1:
                self._now.of(doubt).asked += 1
                sparing = self._sparing.setdefault(doubt, Sparing())
                sparing.confirmed, sparing.skipped = sparing.confirmed + 1, 0

    # What follows

    def wants_opinion(self, doubt: Doubt, peers: Sequence[str], now: float) -> bool:
        """Whether to ask another instance about this error. A result of False is counted. At first every error is
        checked. While other instances confirm errors of this kind, fewer and fewer errors are checked.
        """
        sparing = self._sparing.get(doubt)
        if sparing is None:
            return True
        spared = min(sparing.confirmed, MAX_SPARED)
        if spared > MAX_SPARED_OUTLIER and self._differs(doubt, peers, now, raw=True) is not None:
            spared = MAX_SPARED_OUTLIER
        if sparing.skipped + 1 >= 2**spared:
            return True
        sparing.skipped += 1
        return False

    def find(self, doubt: Doubt, peers: Sequence[str], now: float) -> Outlier | None:
        """The instance of an error as an `Outlier`; None if it does not stand out by this kind of error, or was just
        reported.

        `peers`: all instances that take requests. The instance itself may be among them.
        """
        count = self._count(doubt)
        if count.asked:
            if count.contradicted < MIN_CONTRADICTED or self._share(doubt).errors < MIN_ERRORS:
                return None
        elif count.errors < MIN_ERRORS_ALONE:
            return None
        if now - self._reported.get(doubt.instance_id, -REPORT_INTERVAL_S) < REPORT_INTERVAL_S:
            return None
        shares = self._differs(doubt, peers, now)
        if shares is None:
            return None
        self._reported[doubt.instance_id] = now
        own, others = shares
        return Outlier(*doubt, round(own.errors), own.results, round(others.errors), others.results, count.contradicted)

    def _differs(
        self, doubt: Doubt, peers: Sequence[str], now: float, *, raw: bool = False
    ) -> tuple[ErrorShare, ErrorShare] | None:
        """The shares of an instance and of its peers, if its own share is clearly larger; else None. `raw`: ignore
        second opinions."""
        self._roll(now)
        own = self._share(doubt, raw=raw)
        each = [self._share(Doubt(peer, doubt.kind), raw=raw) for peer in peers if peer != doubt.instance_id]
        others = ErrorShare(*map(sum, zip(ErrorShare(0, 0), *each, strict=True)))
        if not own.results or not others.results:
            return None
        difference = own.errors / own.results - others.errors / others.results
        both = ErrorShare(*map(sum, zip(own, others, strict=True)))
        error_share = both.found / both.results
        contradicted_share = both.contradicted / both.asked if both.asked else 1.0
        error = sqrt(sum(one.variance(error_share, contradicted_share) for one in (own, others)))
        least = MIN_REFUSED_DIFFERENCE if doubt.kind == REFUSED else MIN_DIFFERENCE
        return (own, others) if difference >= least and difference >= MIN_STANDARD_ERRORS * error else None

    def _share(self, doubt: Doubt, *, raw: bool = False) -> ErrorShare:
        count = self._count(doubt)
        results = self._now.results(doubt.instance_id) + self._before.results(doubt.instance_id)
        return ErrorShare(results, count.errors) if raw else ErrorShare(results, *msgspec.structs.astuple(count))

    def _count(self, doubt: Doubt) -> ErrorCount:
        now, before = (window.errors.get(doubt.instance_id, {}).get(doubt.kind) for window in (self._now, self._before))
        found = [one for one in (now, before) if one is not None]
        return ErrorCount(*(sum(values) for values in zip(*map(msgspec.structs.astuple, found), strict=True)))

    def _roll(self, now: float) -> None:
        """Begin another window if it is due. This is called at errors only: successes are counted without a time."""
        age_s = now - self._began
        if age_s < WINDOW_S:
            return
        self._began = now
        self._before, good = ResultWindow(), self._now.good
        if age_s < 2 * WINDOW_S:
            self._before.errors = self._now.errors
            self._before.good.update(good)
        else:
            self._before.good.update({name: min(count, STALE_RESULTS) for name, count in good.items()})
        self._now.errors = {}
        good.clear()  # the caller counts in this object

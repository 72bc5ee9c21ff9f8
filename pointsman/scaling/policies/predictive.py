"""Replicas for the load that is expected when a replica that is launched now will be ready.

Enters: rates per bin, oldest first. Leaves: a level, and a margin in units of the recent variation of the load. The
one rule: a forecast at bin t uses only bins up to t, so that past forecasts can be scored.

A *shape* is a rule for the expected level. It mixes the present rate with the maximum of the last bins, adds the change
of the load at the same time of other days, and returns at least the rate of a day or a week before. The margin is the
smallest with which at most the allowed share of past load would have gone unserved. The policy uses the shape that
would have cost least with its margin.
"""

import math
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec

from pointsman.parameters import Above0, Spelled, Wait
from pointsman.scaling.policies.sizing import AtLeast1, Between0And1, checked
from pointsman.scaling.policy import DeploymentView, Wish
from pointsman.selection.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.float64]
else:
    Numbers = Any

DAY_S, WEEK_S = 86400.0, 7 * 86400.0
SEASONS = 7
"""Number of past days or weeks that are averaged."""
UNSETTLED = 6
"""Number of bins at the start that are not used for learning, because their variation is unknown."""


class Shape(msgspec.Struct, frozen=True):
    memory_bins: int = 1
    """The maximum of this many bins has the weight `memory`. The present rate has the rest of the weight."""
    memory: float = 0.0
    season_s: float = 0.0
    season: float = 0.0
    """Share of the change at this time of other days or weeks that is added."""
    before_s: float = 0.0
    """The forecast is at least the rate at this time before; 0 if this rule is not used."""

    def __str__(self) -> str:
        parts = [f"{self.memory:.0%} of the maximum in {self.memory_bins} bins"] if self.memory else []
        if self.season:
            parts.append(f"{self.season:.0%} of the change on other {'weeks' if self.season_s >= WEEK_S else 'days'}")
        if self.before_s:
            parts.append(f"at least the rate of a {'week' if self.before_s >= WEEK_S else 'day'} before")
        return " and ".join(parts) or "the present rate"


SHAPES = (
    Shape(),
    Shape(3, 0.3),
    Shape(12, 0.5),
    Shape(36, 0.8),
    Shape(3, 0.3, DAY_S, 0.5),
    Shape(3, 0.3, DAY_S, 1.0),
    Shape(before_s=DAY_S),
    Shape(before_s=WEEK_S),
    Shape(3, 0.3, before_s=WEEK_S),
)


class Habits(msgspec.Struct, frozen=True):
    """Settings of the learning."""

    shapes: tuple[Shape, ...] = SHAPES
    spread_bins: int = 12
    """Number of bins from which the recent variation is computed."""
    min_spread: float = 0.05
    """Minimum variation, as a share of the mean load, for loads that never varied."""


DEFAULT = Habits()


class Lesson(msgspec.Struct, frozen=True):
    shape: int
    margin: float
    """The margin, in units of the spread."""


def learn(rates: Numbers, ahead: int, allowed: float, bin_s: float, habits: Habits = DEFAULT) -> Lesson:
    """The shape and margin that would have cost least, with at most the allowed share of load unserved."""
    taught = slice(UNSETTLED, len(rates) - ahead)
    come, now = following(rates, ahead)[taught], rates[taught]
    moves = spread(rates, habits)[taught]
    short = allowed * float(come.sum())
    best, least = Lesson(0, 0.0), math.inf
    for index, shape in enumerate(habits.shapes):
        level = levels(rates, shape, ahead, bin_s)[taught]
        margin = smallest_margin((come - level) / moves, moves, short)
        cost = float(np.maximum(level + margin * moves, now).sum())
        if cost < least:
            best, least = Lesson(index, margin), cost
    return best


def levels(rates: Numbers, shape: Shape, ahead: int, bin_s: float) -> Numbers:
    """The level expected at each bin for `ahead` bins later."""
    level = rates
    if shape.memory:
        level = (1 - shape.memory) * rates + shape.memory * highest(rates, shape.memory_bins)
    if shape.season:
        level = np.maximum(level + shape.season * seasonal_change(rates, round(shape.season_s / bin_s), ahead), 0.0)
    if shape.before_s:
        level = np.maximum(level, before(rates, round(shape.before_s / bin_s), ahead))
    return level


def before(rates: Numbers, season: int, ahead: int) -> Numbers:
    """The rate a season before the bin that is forecast; 0 where unknown."""
    known = np.zeros(len(rates))
    if ahead < season < len(rates) + ahead:
        known[season - ahead :] = rates[: len(rates) - season + ahead]
    return known


def seasonal_change(rates: Numbers, season: int, ahead: int) -> Numbers:
    """Mean change of the load over `ahead` bins at this time of past seasons; 0 where unknown."""
    total, known = np.zeros(len(rates)), np.zeros(len(rates))
    if season <= ahead:
        return total
    for back in range(season, min(SEASONS * season, len(rates) - 1) + 1, season):
        total[back:] += rates[ahead : len(rates) - back + ahead] - rates[: len(rates) - back]
        known[back:] += 1
    return total / np.maximum(known, 1.0)


def spread(rates: Numbers, habits: Habits = DEFAULT) -> Numbers:
    """Variation from bin to bin, recent and overall; above 0."""
    moved = np.abs(np.diff(rates, prepend=rates[:1]))
    seen = np.arange(1, len(rates) + 1)
    total, bins = np.cumsum(moved), habits.spread_bins
    late = (total - np.concatenate([np.zeros(bins), total])[: len(rates)]) / np.minimum(seen, bins)
    mean = np.cumsum(rates) / seen
    spreads: Numbers = late + total / seen + habits.min_spread * mean + 1e-9
    return spreads


def highest(rates: Numbers, bins: int) -> Numbers:
    """The maximum of this many bins up to each bin."""
    padded = np.concatenate([np.full(bins - 1, -np.inf), rates])
    most: Numbers = np.lib.stride_tricks.sliding_window_view(padded, bins).max(axis=1)
    return most


def following(rates: Numbers, ahead: int) -> Numbers:
    """The maximum of the next `ahead` bins after each bin. At the end there are fewer bins."""
    most = rates.copy()
    most[:-1] = rates[1:]
    for step in range(2, ahead + 1):
        most[:-step] = np.maximum(most[:-step], rates[step:])
    return most


def smallest_margin(scores: Numbers, weights: Numbers, allowed: float) -> float:
    """The smallest margin, at least 0, for which the sum of weights * max(scores - margin, 0) is at most `allowed`."""
    order = np.argsort(-scores, kind="stable")
    scores, weights = scores[order], weights[order]
    weight, weighted = np.cumsum(weights), np.cumsum(weights * scores)
    # The shortfall with the margin at the n-th highest score; it grows with n.
    short = weighted - weight * scores
    last = int(np.searchsorted(short, allowed, side="right")) - 1
    return max(0.0, float((weighted[last] - allowed) / weight[last]))


MIN_ARRIVALS = 100.0
"""Arrivals in a window from which its rate is accurate to about a tenth."""
STEADY_S = 300.0
"""Preferred window for the duration of requests: after a jump in arrivals, requests in flight follow later."""
MAX_BINS = 2016
"""Bins of the history that are used, so that a call stays short: 14 days of 10 minutes."""
MAX_OVER_PEAK = 1.2
"""A forecast is at most this many times the highest load seen."""


class Predictive:
    """As many replicas as the expected load and a margin need, at least as many as the present load needs.

    The margin is learned so that about the share `unserved` of requests goes unserved. While there is little history, a
    fixed headroom is used.
    """

    habits: Habits = DEFAULT
    """Settings of the learning, for experiments."""

    def __init__(
        self,
        replica_per_s: Annotated[Above0 | None, Spelled("replicaPerSecond")] = None,
        ongoing_per_replica: Above0 | None = None,
        unserved: Between0And1 = 0.002,
        start_up_s: Annotated[Wait, Spelled("startUp")] = 60.0,
        react_s: Annotated[Wait, Spelled("react")] = 30.0,
        headroom: AtLeast1 = 1.5,
        learn_bins: int = 36,
        caution: Above0 = 0.75,
    ) -> None:
        """`replica_per_s`: requests that a replica serves per second. If it is None, the present duration of requests
        and `ongoing_per_replica` (default: the concurrency of a replica) determine it. `start_up_s` is used until a
        start was measured. `react_s` is the time for measuring and deciding. `headroom` applies to the first
        `learn_bins` bins. The margin is learned for the share `caution` of `unserved`, because the past is easier to
        fit than the future.
        """
        checked("replicaPerSecond", replica_per_s)
        checked("ongoingPerReplica", ongoing_per_replica)
        checked("caution", caution)
        for name, wait_s in (("startUp", start_up_s), ("react", react_s)):
            if wait_s < 0:
                raise ValueError(f"{name} must be 0 or more, found {wait_s:g}")
        if not 0 < unserved < 1:
            raise ValueError(f"unserved must be a share between 0 and 1, such as 0.002, found {unserved}")
        if headroom < 1:
            raise ValueError(f"headroom must be 1 or more, found {headroom}")
        self._replica_per_s, self.ongoing_per_replica = replica_per_s, ongoing_per_replica
        self._unserved, self._start_up_s, self._react_s = unserved, start_up_s, react_s
        self._headroom, self._learn_bins, self._caution = headroom, max(learn_bins, 12), caution

    def desired_replicas(self, view: DeploymentView) -> Wish:
        now, each = rate_now(view), self._each(view)
        if each is None:
            per_replica = self.ongoing_per_replica or view.max_concurrency or 1
            return Wish(_count(view.load, per_replica), "as many as the present requests need: no rate is known yet")
        lead_s = (self._start_up_s if view.start_up_s is None else view.start_up_s) + self._react_s
        ahead = max(1, round(lead_s / view.bin_s))
        if len(view.history) < max(self._learn_bins, UNSETTLED + 4 * ahead):
            load, how = self._headroom * now, f"{self._headroom:g} times the present rate, as there is little history"
        else:
            load, how = self._expected(view, now, lead_s, ahead)
        return Wish(
            max(_count(now, each), _count(load, each), self._needed_now(view)),
            f"{now:.4g}/s arrive now, {max(load, now):.4g}/s expected within {lead_s:.0f} s ({how}); "
            f"a replica serves {each:.3g}/s",
        )

    def _needed_now(self, view: DeploymentView) -> int:
        """Replicas for the present requests, if arrivals are too few to estimate the present rate."""
        per_replica = self.ongoing_per_replica or view.max_concurrency
        return _count(view.load, per_replica) if per_replica and has_few_arrivals(view) else 0

    def _each(self, view: DeploymentView) -> float | None:
        """Requests per second that a replica serves; None if unknown."""
        if self._replica_per_s is not None:
            return self._replica_per_s
        per_replica = self.ongoing_per_replica or view.max_concurrency
        for seconds in sorted(view.ongoing_windows, key=lambda length: abs(length - STEADY_S)):
            windows = (view.ongoing_windows, view.queued_windows)
            here = sum(one[seconds].mean or 0.0 for one in windows if seconds in one)
            rate = view.arrivals_per_s.get(seconds, 0.0)
            if per_replica and here and rate * seconds >= MIN_ARRIVALS:
                # Little's law. Waiting requests must count, because an overload would otherwise look like a small load.
                return per_replica * rate / here
        return None

    def _expected(self, view: DeploymentView, now: float, lead_s: float, ahead: int) -> tuple[float, str]:
        bins = view.history[-MAX_BINS:]
        rates = np.fromiter((one.per_second for one in bins), np.float64, len(bins))
        state = view.state
        if state.get("learned_at") != bins[-1].began or state.get("ahead") != ahead:
            # Load goes unserved only during a start: after that, there are as many replicas as it needs.
            exposed = max(lead_s, 1.0) / (ahead * view.bin_s)
            lesson = learn(rates, ahead, self._caution * self._unserved / exposed, view.bin_s, self.habits)
            state.update(learned_at=bins[-1].began, ahead=ahead, shape=lesson.shape, margin=lesson.margin)
        shape, margin = self.habits.shapes[state["shape"]], state["margin"]
        so_far = np.append(rates, now)
        level = float(levels(so_far, shape, ahead, view.bin_s)[-1])
        margin *= float(spread(so_far, self.habits)[-1])
        return min(level + margin, MAX_OVER_PEAK * float(so_far.max())), f"{level:.4g}: {shape}; margin {margin:.4g}"


def rate_now(view: DeploymentView) -> float:
    """The present rate, over the shortest window that has enough arrivals at the highest rate.

    A window longer than `STEADY_S` follows a rise only after its whole length. If only such a window has enough
    arrivals, or none has, the rate over `STEADY_S` counts too, if it is higher. In shorter windows a single arrival
    looks like a load.
    """
    rates = sorted(view.arrivals_per_s.items())
    if has_few_arrivals(view):
        return max((rate for seconds, rate in rates if seconds >= STEADY_S), default=rates[-1][1] if rates else 0.0)
    most = max(rate for _, rate in rates)
    return next(rate for seconds, rate in rates if most * seconds >= MIN_ARRIVALS)


def has_few_arrivals(view: DeploymentView) -> bool:
    """Whether a window of `STEADY_S` has too few arrivals for an accurate rate."""
    rates = view.arrivals_per_s
    short = max((seconds for seconds in rates if seconds <= STEADY_S), default=0.0)
    return max(rates.values(), default=0.0) * short < MIN_ARRIVALS


def _count(load: float, each: float) -> int:
    return math.ceil(load / each - 1e-9)

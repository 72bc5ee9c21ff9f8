"""Forecasts the load for the time when a replica that is launched now will be ready, learned from past load.

Enters: rates per bin, oldest first. Leaves: a level, and a margin in units of the recent variation of the load. The one
rule: a forecast at bin t uses only bins up to t, so that past forecasts can be scored.

A *shape* is a rule for the expected level: the present rate, mixed with the maximum of the last bins, shifted as the
load changed at this time of other days, and at least the rate of a day or a week before. The margin is the smallest one
with which at most the allowed share of past load would have gone unserved. The shape that would have cost least
with its margin is used.
"""

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from pointsman.selection.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.float64]
else:
    Numbers = Any

DAY_S, WEEK_S = 86400.0, 7 * 86400.0
SEASONS = 7
"""Days or weeks of which the mean is taken."""
UNSETTLED = 6
"""Bins at the start that are not learned from: their variation is unknown."""


class Shape(msgspec.Struct, frozen=True):
    """A rule for the expected level."""

    memory_bins: int = 1
    """The maximum of this many bins has the weight `memory`, the present rate the rest."""
    memory: float = 0.0
    season_s: float = 0.0
    season: float = 0.0
    """Share of the change at this time of other days or weeks that is added."""
    before_s: float = 0.0
    """At least the rate of this long before; 0: not used."""

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
    """Bins of the recent variation."""
    min_spread: float = 0.05
    """Share of the mean load, for loads that never varied."""


DEFAULT = Habits()


class Lesson(msgspec.Struct, frozen=True):
    """What was learned."""

    shape: int
    """Index of the shape."""
    margin: float
    """In units of the spread."""


def learn(rates: Numbers, ahead: int, allowed: float, bin_s: float, habits: Habits = DEFAULT) -> Lesson:
    """The shape and margin that would have cost least with at most the allowed share unserved."""
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
    """The maximum of the next `ahead` bins after each bin, of fewer at the end."""
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

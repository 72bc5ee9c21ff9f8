"""What load to be ready for when a replica that is ordered now has started, learned from the load so far.

Enters: rates per bin, the oldest first. Leaves: a level, plus a margin in units of how much the load moves of late. The
one rule: whatever is told about bin t is made from bins up to t, so what was learned is what would have happened.

A *shape* says what level is expected: what comes now, mixed with the most of the last bins, moved as the load moved at
this time of other days, and at least what came a day or a week before. The margin is the smallest with which no more
than the asked share of the past would have gone unserved. Of several shapes, the one that would have cost least with
its margin is followed.
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
"""Days, or weeks, of which the mean is taken."""
UNSETTLED = 6
"""The first bins teach nothing: how much they moved is not known yet."""


class Shape(msgspec.Struct, frozen=True):
    """What level is expected."""

    memory_bins: int = 1
    """The most of the last so many bins counts..."""
    memory: float = 0.0
    """...so much, and what comes now the rest."""
    season_s: float = 0.0
    season: float = 0.0
    """How much of the way is followed that the load went at this time of other days, or weeks."""
    before_s: float = 0.0
    """At least what came so long before; 0: nobody looks."""

    def __str__(self) -> str:
        parts = [f"{self.memory:.0%} of the most in {self.memory_bins} bins"] if self.memory else []
        if self.season:
            parts.append(f"{self.season:.0%} of the way of other {'weeks' if self.season_s >= WEEK_S else 'days'}")
        if self.before_s:
            parts.append(f"at least what came a {'week' if self.before_s >= WEEK_S else 'day'} before")
        return " and ".join(parts) or "what comes now"


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
    """How learning is done."""

    shapes: tuple[Shape, ...] = SHAPES
    spread_bins: int = 12
    """How far back "of late" goes."""
    least_spread: float = 0.05
    """Of the mean load: also what never moved may."""


DEFAULT = Habits()


class Lesson(msgspec.Struct, frozen=True):
    """What the past taught."""

    shape: int
    """Which of the shapes."""
    margin: float
    """In units of the spread."""


def learn(rates: Numbers, ahead: int, allowed: float, bin_s: float, habits: Habits = DEFAULT) -> Lesson:
    """The shape and margin that would have cost least, with no more than the allowed share unserved."""
    taught = slice(UNSETTLED, len(rates) - ahead)
    come, now = following(rates, ahead)[taught], rates[taught]
    moves = spread(rates, habits)[taught]
    short = allowed * float(come.sum())
    best, least = Lesson(0, 0.0), math.inf
    for place, shape in enumerate(habits.shapes):
        level = levels(rates, shape, ahead, bin_s)[taught]
        margin = smallest_margin((come - level) / moves, moves, short)
        cost = float(np.maximum(level + margin * moves, now).sum())
        if cost < least:
            best, least = Lesson(place, margin), cost
    return best


def levels(rates: Numbers, shape: Shape, ahead: int, bin_s: float) -> Numbers:
    """The level that each bin lets one expect for so many bins later."""
    level = rates
    if shape.memory:
        level = (1 - shape.memory) * rates + shape.memory * highest(rates, shape.memory_bins)
    if shape.season:
        level = np.maximum(level + shape.season * way(rates, round(shape.season_s / bin_s), ahead), 0.0)
    if shape.before_s:
        level = np.maximum(level, before(rates, round(shape.before_s / bin_s), ahead))
    return level


def before(rates: Numbers, season: int, ahead: int) -> Numbers:
    """What came a season before the bin that is looked ahead to; 0 where nobody knows."""
    known = np.zeros(len(rates))
    if ahead < season < len(rates) + ahead:
        known[season - ahead :] = rates[: len(rates) - season + ahead]
    return known


def way(rates: Numbers, season: int, ahead: int) -> Numbers:
    """How far the load went from this time of the season on, on average over the last few; 0 where nobody knows."""
    total, known = np.zeros(len(rates)), np.zeros(len(rates))
    if season <= ahead:
        return total
    for back in range(season, min(SEASONS * season, len(rates) - 1) + 1, season):
        total[back:] += rates[ahead : len(rates) - back + ahead] - rates[: len(rates) - back]
        known[back:] += 1
    return total / np.maximum(known, 1.0)


def spread(rates: Numbers, habits: Habits = DEFAULT) -> Numbers:
    """How much the load moves from bin to bin: of late, and always. Never nothing."""
    moved = np.abs(np.diff(rates, prepend=rates[:1]))
    seen = np.arange(1, len(rates) + 1)
    total, bins = np.cumsum(moved), habits.spread_bins
    late = (total - np.concatenate([np.zeros(bins), total])[: len(rates)]) / np.minimum(seen, bins)
    mean = np.cumsum(rates) / seen
    spreads: Numbers = late + total / seen + habits.least_spread * mean + 1e-9
    return spreads


def highest(rates: Numbers, bins: int) -> Numbers:
    """The most of the last so many bins, this one included."""
    padded = np.concatenate([np.full(bins - 1, -np.inf), rates])
    most: Numbers = np.lib.stride_tricks.sliding_window_view(padded, bins).max(axis=1)
    return most


def following(rates: Numbers, ahead: int) -> Numbers:
    """The most of the next so many bins, this one not included; as many as there are at the end."""
    most = rates.copy()
    most[:-1] = rates[1:]
    for step in range(2, ahead + 1):
        most[:-step] = np.maximum(most[:-step], rates[step:])
    return most


def smallest_margin(scores: Numbers, weights: Numbers, allowed: float) -> float:
    """The smallest margin, 0 or more, that leaves no more than allowed: the sum of weights * (scores - margin)+."""
    order = np.argsort(-scores, kind="stable")
    scores, weights = scores[order], weights[order]
    weight, weighted = np.cumsum(weights), np.cumsum(weights * scores)
    # With the margin at the n-th highest score, those before it are short by this much: it grows with n.
    short = weighted - weight * scores
    last = int(np.searchsorted(short, allowed, side="right")) - 1
    return max(0.0, float((weighted[last] - allowed) / weight[last]))

"""What a hole in a GPU is worth, by its size, if asks come in given proportions.

Cutting the demand out of as few whole GPUs as possible is the cutting-stock problem, and its linear program prices each
size of ask: 81 % of a GPU costs a whole one if hardly anybody asks for 19 %. A hole is worth the dearest asks that fit
in it together, so that one which nobody can use is worth nothing.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pointsman.selection.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
else:
    Floats = Any

PARTS = 100
"""Sizes are counted in hundredths of a GPU."""
MOST_STEPS = 500
"""Enough for a hundred sizes; prices that are not yet the best are good prices too."""
ROUNDING = 1e-9


def hole_values(demand: Mapping[int, float]) -> Floats:
    """What holes of 0, 1, ... PARTS hundredths are worth, in GPUs, if so many ask for each size, in hundredths."""
    sizes = sorted(demand, reverse=True)
    wanted = np.array([demand[size] for size in sizes])
    # Columns are ways to fill a GPU: at first with one size each. A better way replaces one until there is none.
    ways = np.diag([float(PARTS // size) for size in sizes])
    values = np.zeros(PARTS + 1)
    for _ in range(MOST_STEPS if sizes else 0):
        prices: Floats = np.linalg.solve(ways.T, np.ones(len(sizes))).astype(np.float64)
        values = _dearest(sizes, prices)
        if values[PARTS] <= 1 + ROUNDING:
            break
        better = _way(sizes, prices, values)
        used, change = np.linalg.solve(ways, np.stack([wanted, better], axis=1)).T
        lasts = np.full(len(sizes), np.inf)
        np.divide(used, change, out=lasts, where=change > ROUNDING)
        ways[:, int(np.argmin(lasts))] = better
    return values / max(1.0, float(values[PARTS]))


def _dearest(sizes: Sequence[int], prices: Floats) -> Floats:
    """By size of a hole: the highest sum of prices that fits."""
    values = np.zeros(PARTS + 1)
    for size, price in zip(sizes, prices, strict=True):
        for _ in range(PARTS // size if price > 0 else 0):
            values[size:] = np.maximum(values[size:], values[:-size] + price)
    return values


def _way(sizes: Sequence[int], prices: Floats, values: Floats) -> Floats:
    """How often each size is in the dearest filling of a whole GPU."""
    way = np.zeros(len(sizes))
    left = PARTS
    while left > 0:
        for place, size in enumerate(sizes):
            if size <= left and prices[place] > 0 and values[left - size] + prices[place] >= values[left] - ROUNDING:
                way[place] += 1
                left -= size
                break
        else:
            left -= 1
    return way

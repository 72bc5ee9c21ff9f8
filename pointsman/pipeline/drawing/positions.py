"""How far down everything is: in order, never too near to each other, and as near as possible to its neighbours."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

PASSES = 48


class Extent(msgspec.Struct, frozen=True):
    """What a box or a bend needs above and below the line on which it stands."""

    above: float
    below: float


class PositionLink(msgspec.Struct, frozen=True):
    """A part of a way from one layer to the next."""

    weight: float = 1.0
    """How much it wants to be straight."""
    leaves: float = 0.0
    """How far below the line of its source it begins."""
    arrives: float = 0.0
    """How far below the line of its target it ends."""


def positions(
    layers: Sequence[Sequence[int]],
    extents: Mapping[int, Extent],
    links: Mapping[tuple[int, int], PositionLink],
    gap: float,
) -> dict[int, float]:
    """The line on which each stands; the uppermost begins at 0."""
    beside: dict[int, list[tuple[int, float, float]]] = {one: [] for row in layers for one in row}
    for (source, target), link in sorted(links.items()):
        beside[source].append((target, link.arrives - link.leaves, link.weight))
        beside[target].append((source, link.leaves - link.arrives, link.weight))
    steps = [_steps(row, extents, gap) for row in layers]
    found: dict[int, float] = {}
    for row, distances in zip(layers, steps, strict=True):  # each stacked around the same middle, to begin with
        found.update({one: distance - distances[-1] / 2 for one, distance in zip(row, distances, strict=True)})
    weights = {one: sum(weight for _, _, weight in others) for one, others in beside.items()}
    for number in range(PASSES):
        for depth in range(len(layers)) if number % 2 == 0 else range(len(layers) - 1, -1, -1):
            row = layers[depth]
            wanted = [
                sum((found[other] + offset) * weight for other, offset, weight in beside[one]) / weights[one]
                if beside[one]
                else found[one]
                for one in row
            ]
            found.update(zip(row, settled(wanted, [weights[one] or 1.0 for one in row], steps[depth]), strict=True))
    top = min(found[one] - extents[one].above for one in found)
    return {one: place - top for one, place in found.items()}


def settled(wanted: Sequence[float], weights: Sequence[float], steps: Sequence[float]) -> list[float]:
    """As near as possible to what is wanted (least squares), and never nearer to each other than their steps are.

    Those who would be too near form a block, which stands where its members want it on average.
    """
    blocks: list[tuple[float, float, int]] = []  # (where it stands, weight, members)
    for want, weight, step in zip(wanted, weights, steps, strict=True):
        block = (want - step, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            there, heavy, members = blocks.pop()
            total = heavy + block[1]
            block = ((there * heavy + block[0] * block[1]) / total, total, members + block[2])
        blocks.append(block)
    lines = [there for there, _, members in blocks for _ in range(members)]
    return [line + step for line, step in zip(lines, steps, strict=True)]


def _steps(row: Sequence[int], extents: Mapping[int, Extent], gap: float) -> list[float]:
    """The least distance of each from the first."""
    steps = [0.0]
    for upper, lower in pairwise(row):
        steps.append(steps[-1] + extents[upper].below + gap + extents[lower].above)
    return steps

"""Which box goes into which layer, and in what order, so that lines cross as little as can be.

Everything is a number: boxes first, in an order in which edges go forward, then bends. A line that passes a layer has a
bend there, which takes room like a box, so that no line runs behind a box. Lines that leave a box by the same exit
share their bends: they are one line that branches.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from pointsman.render.graph import Edge, Parts

SWEEPS = 12
"""There and back again, to find a better order."""


class Layers(msgspec.Struct, frozen=True):
    """Boxes and bends from top to bottom, layer by layer, and the way of each edge through them."""

    layers: tuple[tuple[int, ...], ...]
    ways: tuple[tuple[int, ...], ...]
    """Of each edge: where it begins, its bends, where it ends."""
    links: frozenset[tuple[int, int]]
    """All parts of all ways, each once."""


def layers_of(parts: Parts) -> Layers:
    """The input alone in the first, the output alone in the last, and as few as possible between them."""
    depths = _depths(len(parts.boxes), parts.edges)
    rows: list[list[int]] = [[] for _ in range(max(depths) + 1)]
    for box, depth in enumerate(depths):
        rows[depth].append(box)
    ways = _ways(parts.edges, depths, rows)
    links = frozenset(pair for way in ways for pair in pairwise(way))
    return Layers(_ordered(rows, links), tuple(ways), links)


def _depths(count: int, edges: Sequence[Edge]) -> list[int]:
    """The longest way there. What waits for nothing stands just before whoever waits for it."""
    depths = [0] + [1] * (count - 1)
    for edge in sorted(edges, key=lambda edge: edge.target):
        depths[edge.target] = max(depths[edge.target], depths[edge.source] + 1)
    fed = {edge.target for edge in edges}
    for box in range(1, count - 1):
        if box not in fed:
            after = [depths[edge.target] for edge in edges if edge.source == box]
            depths[box] = max(min(after, default=0) - 1, 1)
    depths[-1] = max(depths[:-1]) + 1
    return depths


def _ways(edges: Sequence[Edge], depths: Sequence[int], rows: list[list[int]]) -> list[tuple[int, ...]]:
    """Puts bends into rows."""
    bends: dict[tuple[int, str, bool, int], int] = {}
    ways = []
    for edge in edges:
        way = [edge.source]
        for depth in range(depths[edge.source] + 1, depths[edge.target]):
            key = (edge.source, edge.part, edge.held, depth)
            if key not in bends:
                bends[key] = len(depths) + len(bends)
                rows[depth].append(bends[key])
            way.append(bends[key])
        ways.append((*way, edge.target))
    return ways


def _ordered(rows: list[list[int]], links: frozenset[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Each as near as possible to the middle of its neighbours; the best of some sweeps."""
    before: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for source, target in sorted(links):
        after.setdefault(source, []).append(target)
        before.setdefault(target, []).append(source)
    rows = [list(row) for row in rows]
    best, fewest = [list(row) for row in rows], _crossings(rows, after)
    for sweep in range(SWEEPS):
        if not fewest:
            break
        forth = sweep % 2 == 0
        order = range(1, len(rows)) if forth else range(len(rows) - 2, -1, -1)
        for depth in order:
            beside = rows[depth - 1 if forth else depth + 1]
            places = {one: place for place, one in enumerate(beside)}
            _sort(rows[depth], before if forth else after, places)
        crossings = _crossings(rows, after)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return tuple(map(tuple, best))


def _sort(row: list[int], neighbours: dict[int, list[int]], places: dict[int, int]) -> None:
    """By the mean place of neighbours; who has none keeps its own."""
    span = max(len(places) - 1, 1) / max(len(row) - 1, 1)
    middles = {
        one: sum(places[other] for other in others) / len(others) if (others := neighbours.get(one)) else place * span
        for place, one in enumerate(row)
    }
    row.sort(key=lambda one: middles[one])


def _crossings(rows: Sequence[Sequence[int]], after: dict[int, list[int]]) -> int:
    """How often two lines between the same layers cross."""
    found = 0
    for row, following in pairwise(rows):
        places = {one: place for place, one in enumerate(following)}
        ends: list[int] = []
        for one in row:
            here = sorted(places[target] for target in after.get(one, ()))
            for end in here:
                found += len(ends) - bisect_right(ends, end)
            for end in here:
                insort(ends, end)
    return found

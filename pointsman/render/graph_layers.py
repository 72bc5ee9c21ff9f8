"""Layers of a graph, each in an order that makes few edges cross.

Boxes are indexes, numbered so that every edge goes forward. An edge that passes a layer has a bend there, which takes
part in the ordering like a box. Edges that leave the same box share their bends.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import pairwise

SWEEPS = 12
"""Passes over the layers, alternately forward and backward."""


def layers_of(count: int, edges: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """The first box alone in the first layer, the last alone in the last, and as few layers as possible between."""
    depths = _depths(count, edges)
    rows: list[list[int]] = [[] for _ in range(max(depths) + 1)]
    for box, depth in enumerate(depths):
        rows[depth].append(box)
    links = _links(edges, depths, rows)
    return tuple(tuple(one for one in row if one < count) for row in _ordered(rows, links))


def _depths(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The longest path from the input. A box without an incoming edge stands just before the first box it feeds."""
    depths = [0] + [1] * (count - 1)
    for source, target in sorted(edges, key=lambda edge: edge[1]):
        depths[target] = max(depths[target], depths[source] + 1)
    fed = {target for _, target in edges}
    for box in range(1, count - 1):
        if box not in fed:
            after = [depths[target] for source, target in edges if source == box]
            depths[box] = max(min(after, default=0) - 1, 1)
    depths[-1] = max(depths[:-1]) + 1
    return depths


def _links(edges: Sequence[tuple[int, int]], depths: Sequence[int], rows: list[list[int]]) -> set[tuple[int, int]]:
    """Every edge in pieces from layer to layer; adds the bends between them to the rows."""
    bends: dict[tuple[int, int], int] = {}
    links: set[tuple[int, int]] = set()
    for source, target in edges:
        path = [source]
        for depth in range(depths[source] + 1, depths[target]):
            bend = bends.setdefault((source, depth), len(depths) + len(bends))
            if bend not in rows[depth]:
                rows[depth].append(bend)
            path.append(bend)
        links.update(pairwise([*path, target]))
    return links


def _ordered(rows: list[list[int]], links: set[tuple[int, int]]) -> list[list[int]]:
    """Each member as near as possible to the mean position of its neighbours; the best of some sweeps."""
    before: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for source, target in sorted(links):
        after.setdefault(source, []).append(target)
        before.setdefault(target, []).append(source)
    best, fewest = [list(row) for row in rows], _crossings(rows, after)
    for sweep in range(SWEEPS):
        if not fewest:
            break
        forward = sweep % 2 == 0
        for depth in range(1, len(rows)) if forward else range(len(rows) - 2, -1, -1):
            beside = rows[depth - 1 if forward else depth + 1]
            _sort(rows[depth], before if forward else after, {one: index for index, one in enumerate(beside)})
        crossings = _crossings(rows, after)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return best


def _sort(row: list[int], neighbours: dict[int, list[int]], indexes: dict[int, int]) -> None:
    """By the mean index of neighbours; a member without neighbours keeps its own."""
    span = max(len(indexes) - 1, 1) / max(len(row) - 1, 1)
    means = {
        one: sum(indexes[other] for other in beside) / len(beside) if (beside := neighbours.get(one)) else index * span
        for index, one in enumerate(row)
    }
    row.sort(key=lambda one: means[one])


def _crossings(rows: Sequence[Sequence[int]], after: dict[int, list[int]]) -> int:
    """How many pairs of links between the same layers cross."""
    found = 0
    for row, following in pairwise(rows):
        indexes = {one: index for index, one in enumerate(following)}
        ends: list[int] = []
        for one in row:
            here = sorted(indexes[target] for target in after.get(one, ()))
            for end in here:
                found += len(ends) - bisect_right(ends, end)
            for end in here:
                insort(ends, end)
    return found

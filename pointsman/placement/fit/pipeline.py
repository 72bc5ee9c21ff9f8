"""Pipelines: which stages, in which order, hold all layers of a model.

The order matters: the first stage and the last hold more than layers, and layers may differ. Enters: the room on each
GPU of every stage that there could be. Leaves: places in that list, in order.
"""

from collections import Counter
from collections.abc import Sequence
from math import prod

from pointsman.placement.needs import Cuts

MOST_SETS = 512
"""Sets of stages that are searched. Those with the same room count as one kind, so that most fleets have few sets."""


def largest_first(cuts: Cuts, rooms: Sequence[float]) -> list[int] | None:
    """The largest stages first, perhaps with one of the two largest kept for the end: quick, and right for most."""
    order = _largest(cuts, rooms)
    ways: list[tuple[Sequence[int], int | None]] = [(order, None)]
    if len(order) > 1:
        first, second, *others = order
        ways += [([first, *others], second), ([second, *others], first)]
    found = [filled for order, last in ways if (filled := _filled(cuts, rooms, order, last)) is not None]
    return min(found, key=len, default=None)


def in_any_order(cuts: Cuts, rooms: Sequence[float], most_sets: int = MOST_SETS) -> list[int] | None:
    """The fewest stages in whatever order they fit; None: in no order, if there are not more than so many sets.

    Beyond that only the largest are looked at. Whoever has come further with the same stages is never worse off: it is
    enough to know for each set of stages how far it comes.
    """
    largest = _largest(cuts, rooms)
    while _sets(rooms, largest) > most_sets:
        largest = largest[:-1]
    counts = Counter(rooms[place] for place in largest)
    kinds = list(counts)
    reached: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {(0,) * len(kinds): (0, ())}
    """How many of each kind are in use -> where they end at best, and the kinds in that order."""
    while reached:
        further: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        for used, (start, order) in reached.items():
            for kind, room in enumerate(kinds):
                if used[kind] == counts[room]:
                    continue
                stop = cuts.reach(start, room)
                if stop == cuts.layers:
                    return _places(rooms, largest, [kinds[one] for one in (*order, kind)])
                now = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                if stop > start and stop > further.get(now, (0, ()))[0]:
                    further[now] = stop, (*order, kind)
        reached = further
    return None


def _largest(cuts: Cuts, rooms: Sequence[float]) -> list[int]:
    """As many as there are layers: nobody needs more, and a larger stage does whatever a smaller one does."""
    return sorted(range(len(rooms)), key=lambda place: -rooms[place])[: cuts.layers]


def _filled(cuts: Cuts, rooms: Sequence[float], order: Sequence[int], last: int | None) -> list[int] | None:
    """The stages that are used if each takes as many layers as it can."""
    start, used = 0, list[int]()
    for place in order:
        stop = cuts.reach(start, rooms[place])
        if stop > start:
            used.append(place)
            start = stop
        if start == cuts.layers:
            return used
        if last is not None and cuts.reach(start, rooms[last]) == cuts.layers:
            return [*used, last]
    return None


def _sets(rooms: Sequence[float], places: Sequence[int]) -> int:
    return prod(count + 1 for count in Counter(rooms[place] for place in places).values())


def _places(rooms: Sequence[float], largest: Sequence[int], order: Sequence[float]) -> list[int]:
    """Stages with these rooms; of those with the same room the first."""
    waiting: dict[float, list[int]] = {}
    for place in sorted(largest, reverse=True):
        waiting.setdefault(rooms[place], []).append(place)
    return [waiting[room].pop() for room in order]

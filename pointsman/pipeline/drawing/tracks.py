"""Lines between two rows of boxes, in characters.

Links that would cross or touch share a track, which tells less than they do; the boxes themselves say what they take.
"""

from collections.abc import Sequence

UP, DOWN, LEFT, RIGHT = 1, 2, 4, 8
CORNERS = " ││││┘┐┤│└┌├─┴┬┼"
"""By the sum of directions."""


def tracks(links: Sequence[tuple[int, int]]) -> list[str]:
    """Links from a column above to a column below: a row of tracks, and one of arrows."""
    marks: dict[int, int] = {}
    for group in _groups(links):
        columns = [column for link in group for column in link]
        first, last = min(columns), max(columns)
        for column in range(first, last + 1):
            marks[column] = (LEFT if column > first else 0) | (RIGHT if column < last else 0)
        for above, below in group:
            marks[above] |= UP
            marks[below] |= DOWN
    end = max(marks, default=-1) + 1
    ends = {below for _, below in links}
    return [
        "".join(CORNERS[marks.get(column, 0)] for column in range(end)),
        "".join("▼" if column in ends else " " for column in range(end)).rstrip(),
    ]


def _groups(links: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Those whose columns overlap, from left to right."""
    groups: list[list[tuple[int, int]]] = []
    reached = -1
    for link in sorted(set(links), key=min):
        if groups and min(link) <= reached:
            groups[-1].append(link)
        else:
            groups.append([link])
        reached = max(reached, *link)
    return groups

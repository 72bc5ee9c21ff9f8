"""Where everything of an SVG goes: sizes of boxes, columns, where lines leave and arrive."""

from collections.abc import Iterable
from itertools import pairwise

import msgspec

from pointsman.drawing import cells
from pointsman.pipeline.drawing.layers import layers_of
from pointsman.pipeline.drawing.parts import Box, Edge, Parts, Role
from pointsman.pipeline.drawing.positions import Extent, PositionLink, positions

LETTER = 0.6
"""The width of a letter of a fixed width, for a font size of 1."""
NAME, DETAIL, SMALL = 13.0, 11.0, 10.0
"""Font sizes."""
SIDE, TOP = 14.0, 9.0
"""What is left free inside a box."""
CAPTION_LINE, NAME_LINE, DETAIL_LINE, NOTE_LINE = 14.0, 18.0, 15.0, 14.0
ROW = 18.0
"""A part of the input or the output has a row with an exit or entry of its own."""
ABOVE_ROWS = 7.0
NARROWEST, WIDEST = 96.0, 236.0
PORT = ROW
"""Between lines that arrive at a box: a label fits there."""
GAP, AROUND = 14.0, 5.0
"""Between all that is in a column, and what boxes keep free besides."""
BEND = 1.0
ARROW = 16.0
"""What a line runs straight before it arrives, if it has no label."""
LONGEST_LABEL = 90.0
SHORTEST_CURVE, LONGEST_CURVE = 44.0, 120.0


STRAIGHT = {0: 1.0, 1: 2.0, 2: 6.0}
"""How much a line wants to be straight, by how many of its two ends are bends."""
HELD = 0.05
"""The same for handles: the flow matters more."""
ROUNDS = 3
"""Where lines leave and arrive depends on where boxes are, and the other way round."""


class PlacedBox(msgspec.Struct, frozen=True):
    """A box and its place."""

    box: Box
    x: float
    y: float
    width: float
    height: float
    rows: tuple[tuple[float, str], ...] = ()
    """How far down its parts are, and what they are called."""


class EdgeLine(msgspec.Struct, frozen=True):
    """An edge and its way: curves from each odd point to the next, straight from each even one."""

    edge: Edge
    points: tuple[tuple[float, float], ...]
    label: str = ""
    """Which argument; beside the arrow."""
    room: float = 0.0
    """What the label has."""


class Placing:
    """Places boxes and lines once and for all."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._layers = layers_of(parts)
        self._depths = {one: depth for depth, row in enumerate(self._layers.layers) for one in row}
        self._arriving: dict[int, list[int]] = {}
        """By target: its edges."""
        self._leaving: dict[int, dict[tuple[str, bool], list[int]]] = {}
        """By source and exit."""
        for place, edge in enumerate(parts.edges):
            self._arriving.setdefault(edge.target, []).append(place)
            self._leaving.setdefault(edge.source, {}).setdefault((edge.part, edge.held), []).append(place)
        self._extents = {one: self._extent(one) for row in self._layers.layers for one in row}
        self._lines: dict[int, float] = {}
        self._exits: dict[tuple[int, str, bool], float] = {}
        self._entries: dict[int, float] = {}
        for _ in range(ROUNDS):
            self._lines = positions(self._layers.layers, self._extents, self._links(), GAP)
            self._exits = self._all_exits()
            self._entries = self._all_entries()
        self.height = max(self._lines[one] + extent.below for one, extent in self._extents.items())
        self._columns: list[tuple[float, float]] = []
        """Of each layer: where it begins, and how wide it is."""
        self._straight: list[float] = []
        """What lines run straight before they arrive at a layer."""
        self._set_columns()
        self.width = sum(self._columns[-1])
        self.boxes = tuple(self._placed())
        self.lines = tuple(self._line(place) for place in range(len(parts.edges)))

    # Sizes

    def _rows(self, one: int) -> int:
        """Parts that have a row of their own; a box that is taken or answered as a whole has none."""
        if self._parts.boxes[one].role is Role.INPUT:
            exits = self._leaving.get(one, {})
            return len(exits) if any(part for part, _ in exits) else 0
        if self._parts.boxes[one].role is Role.OUTPUT:
            edges = self._arriving.get(one, [])
            return len(edges) if any(self._parts.edges[edge].into for edge in edges) else 0
        return 0

    def _extent(self, one: int) -> Extent:
        if one >= len(self._parts.boxes):
            return Extent(BEND, BEND)
        words, rows = _height(self._parts.boxes[one]), self._rows(one)
        if rows:
            return Extent(AROUND + TOP + words + ABOVE_ROWS + rows * ROW / 2, rows * ROW / 2 + TOP + AROUND)
        ports = max(len(self._arriving.get(one, ())), len(self._leaving.get(one, ())))
        half = AROUND + max(2 * TOP + words, (ports + 0.5) * PORT) / 2
        return Extent(half, half)

    def _width(self, one: int) -> float:
        edges = self._parts.edges
        rows = [edges[place].into for place in self._arriving.get(one, ())] if self._rows(one) else []
        rows += [part for part, _ in self._leaving.get(one, {})] if self._rows(one) else []
        return min(max(_width(self._parts.boxes[one], rows), NARROWEST), WIDEST)

    # Where lines leave and arrive

    def _links(self) -> dict[tuple[int, int], PositionLink]:
        """With what is known by now of where they leave and arrive."""
        found: dict[tuple[int, int], PositionLink] = {}
        for place, (edge, way) in enumerate(zip(self._parts.edges, self._layers.ways, strict=True)):
            for source, target in pairwise(way):
                bends = (source != edge.source) + (target != edge.target)
                weight = STRAIGHT[bends] * (HELD if edge.held else 1)
                leaves = arrives = 0.0
                if self._lines:
                    known = self._exits[edge.source, edge.part, edge.held], self._entries[place]
                    leaves = known[0] - self._lines[source] if source == edge.source else 0.0
                    arrives = known[1] - self._lines[target] if target == edge.target else 0.0
                found[source, target] = PositionLink(weight, leaves, arrives)
        return found

    def _all_exits(self) -> dict[tuple[int, str, bool], float]:
        found = {}
        for source, exits in self._leaving.items():
            nexts = {
                key: [self._lines[self._layers.ways[place][1]] for place in places] for key, places in exits.items()
            }
            order = sorted(exits, key=lambda key: sum(nexts[key]) / len(nexts[key]))
            for (part, held), place in zip(order, self._spread(source, len(order)), strict=True):
                found[source, part, held] = place
        return found

    def _all_entries(self) -> dict[int, float]:
        """By edge."""
        found: dict[int, float] = {}
        for target, edges in self._arriving.items():
            order = sorted(edges, key=self._before)
            found.update(zip(order, self._spread(target, len(order)), strict=True))
        return found

    def _before(self, place: int) -> tuple[float, int]:
        """How far down an edge comes from."""
        way, edge = self._layers.ways[place], self._parts.edges[place]
        direct = len(way) == 2
        return (self._exits[edge.source, edge.part, edge.held] if direct else self._lines[way[-2]], place)

    def _spread(self, one: int, count: int) -> list[float]:
        apart = ROW if self._rows(one) else PORT
        return [self._lines[one] + (place - (count - 1) / 2) * apart for place in range(count)]

    # Columns

    def _set_columns(self) -> None:
        x = 0.0
        curves = [SHORTEST_CURVE] * len(self._layers.layers)
        for source, target in self._layers.links:
            steep = abs(self._lines[source] - self._lines[target]) * 0.22
            curves[self._depths[target]] = min(max(curves[self._depths[target]], steep), LONGEST_CURVE)
        for depth, row in enumerate(self._layers.layers):
            boxes = [one for one in row if one < len(self._parts.boxes)]
            labels = [cells(self._label(place)) for one in boxes for place in self._arriving.get(one, ())]
            straight = max(ARROW, min(max(labels, default=0) * SMALL * LETTER + ARROW, LONGEST_LABEL + ARROW))
            x += straight + curves[depth] if depth else 0
            self._straight.append(straight)
            self._columns.append((x, max(self._width(one) for one in boxes)))
            x += self._columns[-1][1]

    def _label(self, place: int) -> str:
        edge = self._parts.edges[place]
        return "" if self._rows(edge.target) else edge.into

    # Results

    def _placed(self) -> Iterable[PlacedBox]:
        for depth, row in enumerate(self._layers.layers):
            for one in row:
                if one < len(self._parts.boxes):
                    x, width = self._columns[depth]
                    extent, line = self._extents[one], self._lines[one]
                    box = self._parts.boxes[one]
                    rows = tuple(self._named_rows(one)) if self._rows(one) else ()
                    height = extent.above + extent.below - 2 * AROUND
                    yield PlacedBox(box, x, line - extent.above + AROUND, width, height, rows)

    def _named_rows(self, one: int) -> Iterable[tuple[float, str]]:
        if self._parts.boxes[one].role is Role.INPUT:
            return [(y, part) for (source, part, _), y in self._exits.items() if source == one]
        return [(self._entries[place], self._parts.edges[place].into) for place in self._arriving[one]]

    def _line(self, place: int) -> EdgeLine:
        edge, way = self._parts.edges[place], self._layers.ways[place]
        first = self._depths[edge.source]
        x, width = self._columns[first]
        y = self._exits[edge.source, edge.part, edge.held]
        points = [(x + width, y)]
        for depth, bend in enumerate(way[1:-1], start=first + 1):
            left, width = self._columns[depth]
            points += [(left - self._straight[depth], self._lines[bend]), (left + width, self._lines[bend])]
        last = first + len(way) - 1
        left, y = self._columns[last][0], self._entries[place]
        points += [(left - self._straight[last], y), (left, y)]
        return EdgeLine(edge, tuple(points), self._label(place), self._straight[last] - ARROW)


def _height(box: Box) -> float:
    """Of all lines of words."""
    caption, detail = CAPTION_LINE * bool(box.caption), DETAIL_LINE * bool(box.detail)
    return caption + NAME_LINE + detail + NOTE_LINE * len(box.notes)


def _width(box: Box, rows: Iterable[str]) -> float:
    """So that everything can be read."""
    marks = sum(mark_width(mark) + 4 for mark in box.marks)
    captioned = bool(box.caption)
    lengths = [
        cells(box.caption) * SMALL * LETTER + (marks + 8 if captioned and marks else 0),
        (cells(box.name) + 2 * (not box.detail)) * NAME * LETTER + (marks + 8 if not captioned and marks else 0),
        (cells(box.detail) + 2) * DETAIL * LETTER,
        *(cells(note) * SMALL * LETTER for note in box.notes),
        *(cells(row) * DETAIL * LETTER for row in rows),
    ]
    return max(lengths) + 2 * SIDE


def mark_width(mark: str) -> float:
    """Of the pill around it."""
    return cells(mark) * SMALL * LETTER + 10

"""How far down everything is: in order, never too near to each other, and as near as possible to its neighbours."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from pointsman.pipeline.graph import Graph, NodeKind
from pointsman.render.graph import Box, Edge, Parts, Role, headline, parts_of
from pointsman.render.graph_layers import layers_of
from pointsman.render.svg import Canvas, cells, colour, fitted, number

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
    for turn in range(PASSES):
        for depth in range(len(layers)) if turn % 2 == 0 else range(len(layers) - 1, -1, -1):
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


# Where everything of an SVG goes: sizes of boxes, columns, where lines leave and arrive.


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


# A graph as a standalone SVG: the input on the left, then calls layer by layer, the output on the right.


MARGIN = 32.0
LEAST_WIDTH = 460.0
STRIPE = 5.0
ROUND = 8.0

KINDS = {NodeKind.CLASS: "#4c78a8", NodeKind.FUNCTION: "#3f8f4a", NodeKind.MODEL: "#a2557f"}
INK, GREY, EDGE, PAPER = "#1f2430", "#566073", "#dfe4ea", "#f6f7f9"
ENDS = "#2b3445"
"""The paper of input and output."""
LINE, HANDLE = "#8793a5", "#b7791f"
DASHED = {"stroke_dasharray": "5 4"}

HEAD = f"""\
<style>
text {{ font-family: "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace; fill: {INK}; }}
.title, .lead, .legend {{ font-family: Inter, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }}
.title {{ font-size: 20px; font-weight: 600; }}
.lead {{ font-size: 13px; fill: {GREY}; }}
.legend {{ font-size: 11px; fill: {GREY}; }}
.name {{ font-size: {NAME:g}px; font-weight: 600; }}
.detail {{ font-size: {DETAIL:g}px; fill: {GREY}; }}
.small {{ font-size: {SMALL:g}px; fill: {GREY}; }}
.mark {{ font-size: {SMALL:g}px; text-anchor: middle; }}
.label {{ font-size: {SMALL:g}px; fill: {GREY}; text-anchor: end; }}
.row {{ font-size: {DETAIL:g}px; fill: #ffffff; }}
.end {{ font-size: {NAME:g}px; font-weight: 600; fill: #ffffff; }}
.ended {{ font-size: {SMALL:g}px; fill: #c3cbd8; }}
.edge:hover path {{ stroke: #d6006c; stroke-width: 2.5; }}
</style>
<defs>
<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" \
orient="auto"><path d="M0 0.5L8 4L0 7.5L1.6 4Z" fill="{LINE}"/></marker>
<marker id="held" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" \
orient="auto"><path d="M0 0.5L8 4L0 7.5L1.6 4Z" fill="{HANDLE}"/></marker>
</defs>"""


def graph_svg(name: str, graph: Graph) -> str:
    """The graph, drawn."""
    return _GraphSvg(parts_of(graph)).document(name, headline(graph))


class _GraphSvg:
    """Lines first, so that boxes are before them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._canvas = Canvas()
        self._dots = {node: colour(place) for place, node in enumerate(parts.shared, start=1)}

    def document(self, name: str, lead: str) -> str:
        placing = Placing(self._parts)
        width = max(placing.width + 2 * MARGIN, LEAST_WIDTH)
        left = (width - placing.width) / 2
        room = width - 2 * MARGIN
        self._canvas.text(MARGIN, MARGIN + 16, fitted(name, room, 24), "title")
        self._canvas.text(MARGIN, MARGIN + 38, fitted(lead, room, 13), "lead")
        below = self._legend(MARGIN + 56, width)
        self._canvas.open(transform=f"translate({number(left)} {number(below)})")
        for line in placing.lines:
            self._line(line)
        for placed in placing.boxes:
            self._box(placed)
        self._canvas.close()
        paper = f'{HEAD}\n<rect width="100%" height="100%" fill="{PAPER}"/>'
        return self._canvas.document(width, below + placing.height + MARGIN, f"{name}: {lead}", paper)

    def _legend(self, y: float, width: float) -> float:
        """Only what is in the picture; gives where the picture begins."""
        kinds = {box.kind for box in self._parts.boxes}
        chips = [(fill, kind.value) for kind, fill in KINDS.items() if kind in kinds]
        chips += [("handle", "called through a handle")] if any(edge.held for edge in self._parts.edges) else []
        chips += [("shared", "same colour: the same node")] if self._dots else []
        x = MARGIN
        for fill, words in chips:
            wide = 20 + len(words) * 6.6 + 14
            if x > MARGIN and x + wide > width - MARGIN:
                x, y = MARGIN, y + 20
            if fill == "handle":
                self._canvas.path(f"M{number(x)} {number(y + 6)}h14", stroke=HANDLE, stroke_width="1.5", **DASHED)
            elif fill == "shared":
                self._canvas.rect(x + 3, y + 2, 8, 8, colour(1), radius=4)
            else:
                self._canvas.rect(x, y, 12, 12, fill, radius=3)
            self._canvas.text(x + 20, y + 10, words, "legend")
            x += wide
        return y + 12 + MARGIN

    # Lines

    def _line(self, line: EdgeLine) -> None:
        edge, boxes = line.edge, self._parts.boxes
        source, target = boxes[edge.source].name, boxes[edge.target].name
        words = f"{source}{edge.part} → {target}" + (f", as {edge.into}" if edge.into else "")
        self._canvas.open(f"{source} has a handle to {target}" if edge.held else words, **{"class": "edge"})
        look = {"stroke": HANDLE, **DASHED} if edge.held else {"stroke": LINE}
        end = "url(#held)" if edge.held else "url(#arrow)"
        self._canvas.path(_way(line), stroke_width="1.5", marker_end=end, **look)
        self._canvas.close()
        label = fitted(line.label, line.room, SMALL)
        if label:
            x, y = line.points[-1]
            self._canvas.text(x - 11, y - 4, label, "label")

    # Boxes

    def _box(self, placed: PlacedBox) -> None:
        box = placed.box
        self._canvas.open(box.tip, **{"class": f"box {box.role.value}"})
        if box.kind is None:
            self._end(placed)
        else:
            self._node(placed, KINDS[box.kind])
        self._canvas.close()

    def _node(self, placed: PlacedBox, tone: str) -> None:
        box, x = placed.box, placed.x
        look = {"stroke": HANDLE, **DASHED} if box.role is Role.HELD else {"stroke": EDGE}
        self._canvas.rect(x, placed.y, placed.width, placed.height, "#ffffff", radius=ROUND, **look)
        self._canvas.path(_stripe(placed), fill=tone)
        left, room = x + SIDE, placed.width - 2 * SIDE
        words = CAPTION_LINE + NAME_LINE + DETAIL_LINE * bool(box.detail) + NOTE_LINE * len(box.notes)
        y = placed.y + (placed.height - words) / 2
        marks = self._marks(box, x + placed.width - SIDE + 4, y - 3, tone)
        self._canvas.text(left, y + 10, fitted(box.caption, room - marks, SMALL), "small", style=f"fill: {tone}")
        y += CAPTION_LINE
        indent = 0 if box.detail else self._dot(box, left, y + 4.5)
        self._canvas.text(left + indent, y + 13, fitted(box.name, room - indent, NAME), "name")
        y += NAME_LINE
        if box.detail:
            indent = self._dot(box, left, y + 3.5)
            self._canvas.text(left + indent, y + 11, fitted(box.detail, room - indent, DETAIL), "detail")
            y += DETAIL_LINE
        for note in box.notes:
            self._canvas.text(left, y + 11, fitted(note, room, SMALL), "small")
            y += NOTE_LINE

    def _dot(self, box: Box, x: float, y: float) -> float:
        """Before the name of a node that others call too; gives the room that it takes."""
        if box.node not in self._dots:
            return 0
        self._canvas.rect(x, y, 8, 8, self._dots[box.node], radius=4)
        return 13

    def _end(self, placed: PlacedBox) -> None:
        """The input or the output."""
        box, x = placed.box, placed.x
        self._canvas.rect(x, placed.y, placed.width, placed.height, ENDS, radius=ROUND)
        left, room = x + SIDE, placed.width - 2 * SIDE
        words = NAME_LINE + NOTE_LINE * len(box.notes)
        y = placed.y + (TOP if placed.rows else (placed.height - words) / 2)
        marks = self._marks(box, x + placed.width - SIDE + 4, y + 1, "#ffffff")
        self._canvas.text(left, y + 13, fitted(box.name, room - marks, NAME), "end")
        y += NAME_LINE
        for note in box.notes:
            self._canvas.text(left, y + 11, fitted(note, room, SMALL), "ended")
            y += NOTE_LINE
        for line, part in placed.rows:
            leaves = box.role is Role.INPUT
            self._canvas.path(f"M{number(x)} {number(line - ROW / 2)}h{number(placed.width)}", stroke="#465166")
            self._canvas.text(
                x + placed.width - SIDE if leaves else left,
                line + 4,
                fitted(part, room, DETAIL),
                "row",
                text_anchor="end" if leaves else "start",
            )

    def _marks(self, box: Box, right: float, y: float, tone: str) -> float:
        """Pills from right to left; gives the room that they take."""
        x = right
        for mark in reversed(box.marks):
            width = mark_width(mark)
            self._canvas.rect(x - width, y, width, 16, tone, radius=8, fill_opacity="0.14")
            self._canvas.text(x - width / 2, y + 11.5, mark, "mark", style=f"fill: {tone}")
            x -= width + 4
        return right - x


def _way(line: EdgeLine) -> str:
    """Curves between columns, straight through them."""
    x, y = line.points[0]
    way = f"M{number(x)} {number(y)}"
    for place, (right, there) in enumerate(line.points[1:]):
        if place % 2:
            way += f"H{number(right)}"
        else:
            middle = number((x + right) / 2)
            way += f"C{middle} {number(y)} {middle} {number(there)} {number(right)} {number(there)}"
        x, y = right, there
    return way


def _stripe(placed: PlacedBox) -> str:
    """The left edge of a box, round like it."""
    left, right, top = placed.x - 0.75, placed.x + STRIPE, placed.y
    turn, straight = f"a{ROUND:g} {ROUND:g} 0 0 0", number(placed.height - 2 * ROUND)
    return (
        f"M{number(left + ROUND)} {number(top)}{turn} {-ROUND:g} {ROUND:g}v{straight}{turn} {ROUND:g} {ROUND:g}"
        f"H{number(right)}V{number(top)}Z"
    )

"""A graph as a standalone SVG: the input on the left, then calls layer by layer, the output on the right."""

from pointsman.drawing import Canvas, colour, fitted, number
from pointsman.pipeline.drawing.parts import Box, Parts, Role, parts_of
from pointsman.pipeline.drawing.placing import (
    CAPTION_LINE,
    DETAIL,
    DETAIL_LINE,
    NAME,
    NAME_LINE,
    NOTE_LINE,
    ROW,
    SIDE,
    SMALL,
    TOP,
    EdgeLine,
    PlacedBox,
    Placing,
    mark_width,
)
from pointsman.pipeline.drawing.words import headline
from pointsman.pipeline.graph import Graph, NodeKind

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

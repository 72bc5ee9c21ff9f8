"""A graph in a terminal. The input is at the top, the calls are side by side below, the output is at the bottom."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from pointsman.errors import UnknownName
from pointsman.pipeline.graph import Graph, NodeKind
from pointsman.render.graph import Box, Edge, GraphParts, Role, headline, parts_of
from pointsman.render.text import cells, cut

MIN_WIDTH = 24
MAX_BOX_WIDTH, MAX_LIST_WIDTH = 60, 40
"""Maximum widths of a box, including borders: the first for its names, the second for the list of its inputs."""
APART = 2
SOLID, DASHED = ("─", "│"), ("╌", "╎")
UP, DOWN, LEFT, RIGHT = 1, 2, 4, 8
CORNERS = " ││││┘┐┤│└┌├─┴┬┼"
"""Line characters. The index of each is the sum of the directions in which it has a line."""


def graph_text(name: str, graph: Graph, width: int = 100) -> str:
    """A picture of the graph. A stage that is wider than `width` continues on the next line."""
    drawing = _GraphText(parts_of(graph), max(width, MIN_WIDTH))
    title = _wrapped([f"{name}:", *headline(graph).split()], max(width, MIN_WIDTH), " ")
    return "\n".join([*title, "", *drawing.flow(), *drawing.held()])


class _GraphText:
    def __init__(self, parts: GraphParts, width: int) -> None:
        self._parts = parts
        self._width = width
        stages = [[one for one in layer if parts.boxes[one].role is not Role.HELD] for layer in parts.layers]
        self._stages = [stage for stage in stages if stage]
        self._texts = [self._text_of(one) for one in range(len(parts.boxes))]
        self._wide = [min(max(map(cells, lines)) + 4, width) for lines in self._texts]

    def flow(self) -> list[str]:
        """The lines of the graph, from the input to the output."""
        rows = [self._rows(stage) for stage in self._stages]
        across = max(self._length(row) for stage in rows for row in stage)
        lines: list[str] = []
        for index, stage in enumerate(rows):
            if index:
                lines += self._between(rows[index - 1], stage, across)
            for row in stage:
                lines += self._boxes(row, across // 2 - self._length(row) // 2, SOLID)
        return lines

    def held(self) -> list[str]:
        """Nodes that no step calls."""
        boxes = [one for one, box in enumerate(self._parts.boxes) if box.role is Role.HELD]
        if not boxes:
            return []
        rows = [self._boxes(row, 0, DASHED) for row in self._rows(boxes)]
        return ["", "called through handles:", *(line for row in rows for line in row)]

    # Text of a box

    def _text_of(self, one: int) -> list[str]:
        box, edges = self._parts.boxes[one], self._parts.edges
        room, short = min(MAX_BOX_WIDTH, self._width) - 4, min(MAX_LIST_WIDTH, self._width) - 4
        lines = box.lines
        lines += _listed("←", [self._source(edge) for edge in edges if edge.target == one and not edge.held], short)
        held = [edge for edge in edges if edge.held]
        lines += _listed("held by", [self._parts.boxes[edge.source].node for edge in held if edge.target == one], short)
        lines += _listed("calls", [self._parts.boxes[edge.target].name for edge in held if edge.source == one], short)
        return [cut(_plain(line), room) for line in lines]

    def _source(self, edge: Edge) -> str:
        """Where a value comes from. The name of the value's argument comes first, if there is one."""
        box = self._parts.boxes[edge.source]
        value = box.name + (edge.part if edge.part.startswith((".", "[")) else "")
        return f"{edge.into}={value}" if edge.into and not edge.into.startswith("#") else value

    # Lines

    def _rows(self, stage: Sequence[int]) -> list[list[int]]:
        """Rows of boxes. Each row has as many boxes side by side as fit."""
        rows: list[list[int]] = []
        for one in stage:
            if rows and self._length([*rows[-1], one]) <= self._width:
                rows[-1].append(one)
            else:
                rows.append([one])
        return rows

    def _length(self, row: Sequence[int]) -> int:
        return sum(self._wide[one] for one in row) + APART * (len(row) - 1)

    def _boxes(self, row: Sequence[int], left: int, border: tuple[str, str]) -> Iterable[str]:
        high = max(len(self._texts[one]) for one in row)
        drawn = [_box(self._texts[one], self._wide[one], high, border) for one in row]
        return [(" " * left + (" " * APART).join(pieces)).rstrip() for pieces in zip(*drawn, strict=True)]

    def _middles(self, row: Sequence[int], across: int) -> dict[int, int]:
        """For each box, the column in which its middle is."""
        x, found = across // 2 - self._length(row) // 2, {}
        for one in row:
            found[one] = x + self._wide[one] // 2
            x += self._wide[one] + APART
        return found

    def _between(self, upper: list[list[int]], lower: list[list[int]], across: int) -> list[str]:
        """Lines from one stage to the next. If either stage has several rows, there is only an arrow."""
        if len(upper) > 1 or len(lower) > 1:
            return [" " * (across // 2) + "▼"]
        above, below = self._middles(upper[0], across), self._middles(lower[0], across)
        links = [
            (above[edge.source], below[edge.target])
            for edge in self._parts.edges
            if edge.source in above and edge.target in below
        ]
        return tracks(links)


def _box(texts: Sequence[str], width: int, high: int, border: tuple[str, str]) -> list[str]:
    flat, side = border
    inside = [
        f"{side} {line}{' ' * (width - 4 - cells(line))} {side}" for line in [*texts, *[""] * (high - len(texts))]
    ]
    edge = flat * (width - 2)
    return [f"┌{edge}┐", *inside, f"└{edge}┘"]


def _listed(before: str, values: Sequence[str], room: int) -> list[str]:
    """Distinct values after `before`. Further lines are indented to the first value. Empty if there are no values."""
    if not values:
        return []
    indent = cells(before) + 1
    values = [cut(_plain(value), room - indent - 1) for value in dict.fromkeys(values)]
    lines = _wrapped([*(f"{value}," for value in values[:-1]), values[-1]], room - indent, " ")
    return [f"{' ' * indent if index else before + ' '}{line}" for index, line in enumerate(lines)]


def _wrapped(parts: Sequence[str], width: int, between: str) -> list[str]:
    lines: list[str] = []
    for part in parts:
        if lines and cells(lines[-1] + between + part) <= width:
            lines[-1] += between + part
        else:
            lines.append(cut(_plain(part), width))
    return lines


def _plain(text: str) -> str:
    """A text whose line breaks and control characters are replaced."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)


# Lines between two rows of boxes


def tracks(links: Sequence[tuple[int, int]]) -> list[str]:
    """Links from columns above to columns below, as two rows: one with tracks, one with arrows."""
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
    """Groups of links whose columns overlap, from left to right."""
    groups: list[list[tuple[int, int]]] = []
    reached = -1
    for link in sorted(set(links), key=min):
        if groups and min(link) <= reached:
            groups[-1].append(link)
        else:
            groups.append([link])
        reached = max(reached, *link)
    return groups


# A graph as text for other tools: Mermaid and DOT.


SHAPES = {NodeKind.CLASS: ("[", "]"), NodeKind.FUNCTION: ("(", ")"), NodeKind.MODEL: ("{{", "}}")}
"""Shapes for Mermaid. The input and the output are stadiums instead."""
STYLES = {NodeKind.CLASS: "filled", NodeKind.FUNCTION: "filled,rounded", NodeKind.MODEL: "filled,bold"}
"""Styles for DOT."""


def draw(name: str, graph: Graph, path: Path | None) -> str:
    """The graph as text. With a path, the format follows its suffix, and the text is written to it. Without a path, the
    text is for a terminal."""
    if path is None:
        return graph_text(name, graph)
    if path.suffix not in FORMATS:
        raise UnknownName("suffix of a drawing", path.suffix, FORMATS)
    text = FORMATS[path.suffix](name, graph)
    path.write_text(text, encoding="utf-8")
    return text


def mermaid(name: str, graph: Graph) -> str:
    parts = parts_of(graph)
    title = msgspec.json.encode(_plain(f"{name}: {headline(graph)}")).decode()
    lines = ["---", f"title: {title}", "---", "flowchart LR"]
    for index, box in enumerate(parts.boxes):
        left, right = SHAPES[box.kind] if box.kind is not None else ("([", "])")
        label = "<br>".join(map(_mermaid, box.lines))
        lines.append(f'  n{index}{left}"{label}"{right}' + (":::held" if box.role is Role.HELD else ""))
    for edge in parts.edges:
        label, arrow = _label(edge), "-.->" if edge.held else "-->"
        lines.append(f"  n{edge.source} {arrow}" + (f'|"{_mermaid(label)}"| ' if label else " ") + f"n{edge.target}")
    if any(box.role is Role.HELD for box in parts.boxes):
        lines.append("  classDef held stroke-dasharray: 4 3")
    return "\n".join(lines) + "\n"


def dot(name: str, graph: Graph) -> str:
    """A digraph in DOT, the language of Graphviz. The tooltips of boxes have their details."""
    parts = parts_of(graph)
    lines = [
        f"digraph {_dot(name)} {{",
        f'  label={_dot(f"{name}: {headline(graph)}")} labelloc=t rankdir=LR fontname="sans-serif"',
        '  node [shape=box style=filled fillcolor="#f6f7f9" fontname="sans-serif"]',
        '  edge [fontname="sans-serif" fontsize=10]',
    ]
    for index, box in enumerate(parts.boxes):
        label = _dot("\n".join(box.lines))
        lines.append(f'  n{index} [label={label} tooltip={_dot(box.tip)} style="{_style(box)}"]')
    for edge in parts.edges:
        style = " style=dashed" if edge.held else ""
        lines.append(f"  n{edge.source} -> n{edge.target} [label={_dot(_label(edge))}{style}]")
    return "\n".join([*lines, "}"]) + "\n"


FORMATS: Mapping[str, Callable[[str, Graph], str]] = {
    ".mmd": mermaid,
    ".dot": dot,
    ".txt": lambda name, graph: graph_text(name, graph) + "\n",
}
"""Functions that write a graph, by the suffix of the file."""


def _label(edge: Edge) -> str:
    return " → ".join(filter(None, (edge.part, edge.into)))


def _style(box: Box) -> str:
    if box.kind is None:
        return "filled,rounded"
    return STYLES[box.kind] + (",dashed" if box.role is Role.HELD else "")


def _mermaid(text: str) -> str:
    """A text in quotes. Character codes replace the characters that Mermaid would interpret."""
    return "".join(f"#{ord(one)};" if one in '"#<>&`;\\' else one if one.isprintable() else "\ufffd" for one in text)


def _dot(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join("\\n" if one == "\n" else one if one.isprintable() else "\ufffd" for one in escaped) + '"'

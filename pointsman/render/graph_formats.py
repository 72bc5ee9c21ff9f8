"""A graph as text for other tools: Mermaid and DOT."""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from pointsman.errors import UnknownName
from pointsman.pipeline.graph import Graph, NodeKind
from pointsman.render.graph import Box, Edge, Role, headline, parts_of
from pointsman.render.graph_text import graph_text

SHAPES = {NodeKind.CLASS: ("[", "]"), NodeKind.FUNCTION: ("(", ")"), NodeKind.MODEL: ("{{", "}}")}
"""Of Mermaid; the input and the output are stadiums."""
STYLES = {NodeKind.CLASS: "filled", NodeKind.FUNCTION: "filled,rounded", NodeKind.MODEL: "filled,bold"}
"""Of DOT."""


def draw(name: str, graph: Graph, path: Path | None) -> str:
    """The graph in the format that the suffix of the path says, written there; without a path, for a terminal."""
    if path is None:
        return graph_text(name, graph)
    if path.suffix not in FORMATS:
        raise UnknownName("suffix of a drawing", path.suffix, FORMATS)
    text = FORMATS[path.suffix](name, graph)
    path.write_text(text, encoding="utf-8")
    return text


def mermaid(name: str, graph: Graph) -> str:
    """A flowchart in Mermaid."""
    parts = parts_of(graph)
    lines = ["---", f"title: {_yaml(f'{name}: {headline(graph)}')}", "---", "flowchart LR"]
    for index, box in enumerate(parts.boxes):
        left, right = SHAPES[box.kind] if box.kind is not None else ("([", "])")
        label = "<br>".join(map(_mermaid, box.lines))
        lines.append(f'  n{index}{left}"{label}"{right}' + (":::held" if box.role is Role.HELD else ""))
    for edge in parts.edges:
        label = _label(edge)
        arrow = "-.->" if edge.held else "-->"
        lines.append(f"  n{edge.source} {arrow}" + (f'|"{_mermaid(label)}"| ' if label else " ") + f"n{edge.target}")
    if any(box.role is Role.HELD for box in parts.boxes):
        lines.append("  classDef held stroke-dasharray: 4 3")
    return "\n".join(lines) + "\n"


def dot(name: str, graph: Graph) -> str:
    """A digraph in DOT, the language of Graphviz; boxes have their details as tooltips."""
    parts = parts_of(graph)
    lines = [
        f"digraph {_dot(name)} {{",
        f'  label={_dot(f"{name}: {headline(graph)}")} labelloc=t rankdir=LR fontname="sans-serif"',
        '  node [shape=box style=filled fillcolor="#f6f7f9" fontname="sans-serif"]',
        '  edge [fontname="sans-serif" fontsize=10]',
    ]
    for index, box in enumerate(parts.boxes):
        label, tip = _dot("\n".join(box.lines)), _dot(box.tip)
        lines.append(f'  n{index} [label={label} tooltip={tip} style="{_style(box)}"]')
    for edge in parts.edges:
        more = " style=dashed" if edge.held else ""
        lines.append(f"  n{edge.source} -> n{edge.target} [label={_dot(_label(edge))}{more}]")
    return "\n".join([*lines, "}"]) + "\n"


FORMATS: Mapping[str, Callable[[str, Graph], str]] = {
    ".mmd": mermaid,
    ".dot": dot,
    ".txt": lambda name, graph: graph_text(name, graph) + "\n",
}
"""By suffix."""


def _label(edge: Edge) -> str:
    return " → ".join(filter(None, (edge.part, edge.into)))


def _style(box: Box) -> str:
    if box.kind is None:
        return "filled,rounded"
    return STYLES[box.kind] + (",dashed" if box.role is Role.HELD else "")


def _mermaid(text: str) -> str:
    """Text inside quotes, with a character code for everything that Mermaid would interpret."""
    return "".join(f"#{ord(one)};" if one in '"#<>&`;\\' else one if one.isprintable() else "\ufffd" for one in text)


def _yaml(text: str) -> str:
    return msgspec.json.encode("".join(one if one.isprintable() else "\ufffd" for one in text)).decode()


def _dot(text: str) -> str:
    """A quoted string of DOT."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join("\\n" if one == "\n" else one if one.isprintable() else "\ufffd" for one in escaped) + '"'

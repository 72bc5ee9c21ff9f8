"""The content of a picture of a graph, as data: boxes, edges between boxes, and layers of boxes."""

from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any

import msgspec

from pointsman.pipeline.graph import (
    CALL,
    Access,
    Call,
    FromInput,
    FromStep,
    Graph,
    HandleTo,
    Node,
    NodeKind,
    Reference,
    Template,
    references,
)
from pointsman.pipeline.options import NodeOptions
from pointsman.render.text import cut, quantity

# Layers of a graph. The order within each layer makes few edges cross.
#
# Boxes are indexes, and every edge goes from a lower index to a higher one. An edge that passes a layer has a bend in
# that layer. The bend is ordered like a box. Edges that leave the same box share their bends.


SWEEPS = 12
"""Maximum number of passes over the layers. They go forward and backward in turn."""


def layers_of(count: int, edges: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """The boxes of each layer. The first box is alone in the first layer, and the last box alone in the last layer.

    There are as few layers between these as possible.
    """
    depths = _depths(count, edges)
    rows: list[list[int]] = [[] for _ in range(max(depths) + 1)]
    for box, depth in enumerate(depths):
        rows[depth].append(box)
    links = _links(edges, depths, rows)
    return tuple(tuple(one for one in row if one < count) for row in _ordered(rows, links))


def _depths(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The length of the longest path from the input to each box.

    A box without an incoming edge gets the layer before the first box that it feeds.
    """
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
    """Split every edge into links from layer to layer, and add the bends that join these links to the rows."""
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
    """Order each layer so that members are near the mean position of their neighbours.

    The result is the sweep with the fewest crossings.
    """
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
    """Sort a layer by the mean index of each member's neighbours. A member without neighbours keeps its own index."""
    span = max(len(indexes) - 1, 1) / max(len(row) - 1, 1)
    means = {
        one: sum(indexes[other] for other in beside) / len(beside) if (beside := neighbours.get(one)) else index * span
        for index, one in enumerate(row)
    }
    row.sort(key=lambda one: means[one])


def _crossings(rows: Sequence[Sequence[int]], after: dict[int, list[int]]) -> int:
    """Number of crossings: pairs of links that are between the same two layers and cross each other."""
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


ENTIRE_INPUT = "all of it"
"""Label of an edge that takes the entire input, if other edges take only parts of it."""
MAX_VALUE_LENGTH = 160
"""Maximum length of a value in a tooltip. Longer values are cut, because a configuration may fill a page."""


class Role(Enum):
    INPUT = "input"
    CALL = "call"
    HELD = "held"
    """A node that is called only through handles, never by a step."""
    OUTPUT = "output"


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """One box, as text."""

    role: Role
    name: str
    kind: NodeKind | None = None
    caption: str = ""
    """The code or model that the box runs. If a call's id differs from its target, the caption names the target."""
    marks: tuple[str, ...] = ()
    """Numbers of replicas and shards, if there is more than one."""
    node: str = ""
    notes: tuple[str, ...] = ()
    """Handles that have no edge, and the code that makes the input."""
    tip: str = ""
    """Details for a tooltip: the place of the code, constructor arguments, options that differ from defaults."""

    @property
    def lines(self) -> list[str]:
        return ["  ".join([self.name, *self.marks]), *([self.caption] if self.caption else []), *self.notes]


class Edge(msgspec.Struct, frozen=True):
    """An edge from one box to another, by index."""

    source: int
    target: int
    part: str = ""
    """The part of the input that the edge carries."""
    into: str = ""
    """The argument, or the part of the output, that the value becomes."""
    held: bool = False
    """Whether the edge is a handle. The source may call the target of a handle, but no result flows along the edge."""


class GraphParts(msgspec.Struct, frozen=True):
    """Boxes, edges and layers. The input is the first box, the output is the last, and every edge goes forward."""

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    layers: tuple[tuple[int, ...], ...]
    """Indexes of boxes by layer, from the input to the output. The order in each layer makes few edges cross."""


def parts_of(graph: Graph) -> GraphParts:
    """Everything that a picture of the graph shows."""
    return _Collector(graph).parts()


def headline(graph: Graph) -> str:
    """The size of a graph, such as "3 calls, 3 nodes, 7 processes"."""
    replicas = sum(
        node.options.num_replicas * node.options.shards for node in graph.nodes if node.kind is not NodeKind.MODEL
    )
    replicas += graph.ingress.num_replicas if graph.has_ingress else 0
    sizes = ((len(graph.calls), "call"), (len(graph.nodes), "node"), (replicas, "process"))
    return ", ".join(quantity(count, noun) for count, noun in sizes)


class _Collector:
    """Adds boxes in order. Edges refer to boxes by index."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._boxes: list[Box] = []
        self._edges: list[Edge] = []
        self._calls: dict[str, int] = {}
        """The box of each call, by the id of the call."""
        self._nodes: dict[str, int] = {}
        """The first box of each node, by the name of the node."""
        self._handles = _Handles(graph)
        templates = [graph.output, *(template for call in graph.calls for template in (call.args, call.kwargs))]
        self._inputs = {one for one in references(templates) if isinstance(one, FromInput)}

    def parts(self) -> GraphParts:
        graph = self._graph
        code = {"preprocessor": graph.preprocessor, "schema": graph.schema}
        notes = tuple(f"{role} {_name_in(where)}" for role, where in code.items() if where)
        marks = _marks(graph.ingress) if graph.has_ingress else ()
        self._add(Box(role=Role.INPUT, name="input", notes=notes, marks=marks, tip=_input_tip(graph)))
        for call in graph.calls:
            self._call(call)
        for name in self._handles.only_held:
            node = graph.node(name)
            self._nodes[name] = self._add(self._node_box(node, Role.HELD, name, _caption(node), _node_tip(node)))
        self._edges += [Edge(self._nodes[one], self._nodes[target], held=True) for one, target in self._handles.edges]
        self._output()
        layers = layers_of(len(self._boxes), [(edge.source, edge.target) for edge in self._edges])
        return GraphParts(tuple(self._boxes), tuple(self._edges), layers)

    def _add(self, box: Box) -> int:
        self._boxes.append(box)
        return len(self._boxes) - 1

    def _node_box(self, node: Node, role: Role, name: str, caption: str, tip: str) -> Box:
        unlinked = self._handles.without_edge(node.name) if node.name not in self._nodes else ()
        return Box(
            role=role,
            name=name,
            kind=node.kind,
            caption=caption,
            marks=_marks(node.options),
            node=node.name,
            notes=tuple(f"handle to {target}" for target in unlinked),
            tip=tip,
        )

    def _call(self, call: Call) -> None:
        node = self._graph.node(call.node)
        target = call.node if call.method == CALL else f"{call.node}.{call.method}"
        caption = f"{node.kind.value} {target}" if target != call.id else _caption(node)
        tip = _lines(f"{call.id} = {target}({_tip_arguments(call.args, call.kwargs)})", _node_tip(node))
        index = self._calls[call.id] = self._add(self._node_box(node, Role.CALL, call.id, caption, tip))
        self._nodes.setdefault(node.name, index)
        taken: dict[tuple[int, str], list[str]] = {}
        for where, reference in _arguments(call):
            if not isinstance(reference, HandleTo):
                taken.setdefault(self._source(reference), []).append(where)
        for (source, part), arguments in taken.items():
            self._edges.append(Edge(source, index, part, ", ".join(filter(None, arguments))))

    def _output(self) -> None:
        index = self._add(Box(role=Role.OUTPUT, name="output", tip="the response"))
        for where, reference in _uses(self._graph.output, ""):
            if not isinstance(reference, HandleTo):
                source, part = self._source(reference)
                self._edges.append(Edge(source, index, part, where))

    def _source(self, reference: FromInput | FromStep) -> tuple[int, str]:
        if isinstance(reference, FromStep):
            return self._calls[reference.call], ""
        return 0, part_of_input(reference.path) or (ENTIRE_INPUT if len(self._inputs) > 1 else "")


class _Handles:
    """Decides which handles become edges.

    A handle becomes an edge if only holders call its node. Otherwise it becomes a note. If steps call the node too, its
    boxes are those calls, and a handle calls none of them. A handle back to a holder would be an edge backward.
    """

    def __init__(self, graph: Graph) -> None:
        self._targets: dict[str, list[str]] = {}
        templates = [(node.name, (node.args, node.kwargs)) for node in graph.nodes]
        templates += [(call.node, (call.args, call.kwargs)) for call in graph.calls]
        for holder, template in templates:
            known = self._targets.setdefault(holder, [])
            found = (one.node for one in references(template) if isinstance(one, HandleTo))
            known += [name for name in dict.fromkeys(found) if name not in known]
        called = {call.node for call in graph.calls}
        self._visited: dict[str, None] = {}
        self._finished: list[str] = []
        for name in [*(call.node for call in reversed(graph.calls)), *(node.name for node in graph.nodes)]:
            self._visit(name)
        self.only_held = [name for name in reversed(self._finished) if name not in called]
        """Nodes that no step calls. Holders come before the nodes that they hold, unless they hold each other."""
        order = {name: index for index, name in enumerate(self.only_held)}
        self.edges = [
            (holder, target)
            for holder, targets in self._targets.items()
            for target in targets
            if target in order and order.get(holder, -1) < order[target]
        ]
        """Pairs of a holder and the node that it holds. The order follows the holders."""

    def _visit(self, name: str) -> None:
        if name in self._visited:
            return
        self._visited[name] = None
        for target in reversed(self._targets[name]):  # reversed, because `only_held` reverses the finished nodes again
            self._visit(target)
        self._finished.append(name)

    def without_edge(self, holder: str) -> list[str]:
        return [target for target in self._targets[holder] if (holder, target) not in self.edges]


# Arguments and captions


def part_of_input(path: Sequence[Access]) -> str:
    """A part of the input, written as in Python: [0].name"""
    return "".join(f".{step.key}" if step.attribute else f"[{step.key}]" for step in path)


def _arguments(call: Call) -> Iterator[tuple[str, Reference]]:
    """The references in the arguments of a call, each with its argument. A single positional argument has no number."""
    alone = len(call.args) == 1 and not call.kwargs
    for number, template in enumerate(call.args, start=1):
        yield from _uses(template, "" if alone else f"#{number}")
    for name, template in call.kwargs.items():
        yield from _uses(template, name)


def _uses(template: Template, where: str) -> Iterator[tuple[str, Reference]]:
    if isinstance(template, FromInput | FromStep | HandleTo):
        yield where, template
    elif isinstance(template, Mapping):
        for name, value in template.items():
            yield from _uses(value, f"{where}[{name}]" if where else name)
    elif isinstance(template, list | tuple):
        for index, value in enumerate(template):
            yield from _uses(value, f"{where}[{index}]")


def _caption(node: Node) -> str:
    return f"{node.kind.value} {_name_in(node.code)}".rstrip()


def _name_in(code: str) -> str:
    """The name in a reference to code: path/to/file.py:Name becomes Name."""
    return code.rpartition(":")[2]


def _marks(options: NodeOptions) -> tuple[str, ...]:
    number = str(options.num_replicas)
    if options.scaling is not None:
        number = f"{options.scaling.get('min', 1)}-{options.scaling.get('max', '')}"
    marks = (f"x{number}" if number != "1" else "", f"{options.shards} shards" if options.shards > 1 else "")
    return tuple(filter(None, marks))


# Tooltips


def _input_tip(graph: Graph) -> str:
    if not graph.has_ingress:
        return "the JSON of the request"
    code = {"preprocessor": graph.preprocessor, "schema": graph.schema}
    return _lines(
        "made from the request",
        *(f"{role}: {where}" for role, where in code.items() if where),
        *_changed_options(graph.ingress),
    )


def _node_tip(node: Node) -> str:
    version = f", version {node.version}" if node.version else ""
    made = _tip_arguments(node.args, node.kwargs)
    joined = "its method join merges the results of its shards" if node.joins else "results of its shards are a list"
    return _lines(
        f"node {node.name}: {node.kind.value} {node.code}{version}".rstrip(),
        f"made with ({made})" if made else "",
        joined if node.options.shards > 1 else "",
        *(_changed_options(node.options) if node.kind is not NodeKind.MODEL else ()),
    )


def _changed_options(options: NodeOptions) -> list[str]:
    """Options that differ from their defaults. Environment variables appear without values, which may be secrets."""
    defaults, found = NodeOptions(), []
    for name in options.__struct_fields__:
        value = getattr(options, name)
        if value != getattr(defaults, name):
            found.append(f"{name}: {', '.join(value) if name == 'env' else _value(value)}")
    return found


def _tip_arguments(args: Sequence[Template], kwargs: Mapping[str, Template]) -> str:
    given = [*map(_value, args), *(f"{name}={_value(one)}" for name, one in kwargs.items())]
    return cut(", ".join(given), MAX_VALUE_LENGTH)


def _value(template: Any) -> str:
    """A value as Python writes it. Names replace the references in it."""
    if isinstance(template, FromInput):
        return f"input{part_of_input(template.path)}"
    if isinstance(template, FromStep):
        return template.call
    if isinstance(template, HandleTo):
        return f"<{template.node}>"
    if isinstance(template, Mapping):
        text = "{" + ", ".join(f"{name!r}: {_value(one)}" for name, one in template.items()) + "}"
    elif isinstance(template, list | tuple):
        text = "[" + ", ".join(map(_value, template)) + "]"
    else:
        text = repr(template)
    return cut(text, MAX_VALUE_LENGTH)


def _lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)

"""Who has handles to whom: which nodes are drawn for their handles alone, and where a line would have to go back."""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
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
from pointsman.render.svg import cut


class HandleEdges:
    """A line goes to a node that only holders call. A handle to a node that steps call as well, or back to a holder, is
    only noted: the box of a call is not what the handle calls, and lines go one way."""

    def __init__(self, graph: Graph) -> None:
        self._to: dict[str, list[str]] = {}
        templates = [(node.name, (node.args, node.kwargs)) for node in graph.nodes]
        templates += [(call.node, (call.args, call.kwargs)) for call in graph.calls]
        for holder, template in templates:
            known = self._to.setdefault(holder, [])
            found = (one.node for one in references(template) if isinstance(one, HandleTo))
            known += [name for name in dict.fromkeys(found) if name not in known]
        self._called = {call.node for call in graph.calls}
        self._seen: set[str] = set()
        self._left: list[str] = []
        for name in [*(call.node for call in reversed(graph.calls)), *(node.name for node in graph.nodes)]:
            self._visit(name)
        self.only_held = [name for name in reversed(self._left) if name not in self._called]
        """Holders before those whom they hold, as far as there is such an order."""
        places = {name: place for place, name in enumerate(self.only_held)}
        self._line = {
            (holder, target)
            for holder, targets in self._to.items()
            for target in targets
            if target in places and places.get(holder, -1) < places[target]
        }

    def _visit(self, name: str) -> None:
        if name in self._seen:
            return
        self._seen.add(name)
        for target in reversed(self._to[name]):  # both backwards: what is left first comes last
            self._visit(target)
        self._left.append(name)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """(holder, held), in order."""
        pairs = [(holder, target) for holder, targets in self._to.items() for target in targets]
        return [pair for pair in pairs if pair in self._line]

    def notes(self, holder: str) -> list[str]:
        """Those to whom there is no line."""
        return [target for target in self._to[holder] if (holder, target) not in self._line]


# What whoever points at a box is told: where its code is, what it was made with, and its options.


LONGEST = 160
"""Of a value that is shown; a configuration may be a page."""


def input_tip(graph: Graph) -> str:
    """Of the input."""
    if not graph.has_ingress:
        return "what a request brings: its JSON"
    code = {"preprocessor": graph.preprocessor, "schema": graph.schema}
    return _lines(
        "what a request brings",
        *(f"{what}: {where}" for what, where in code.items() if where),
        *_options(graph.ingress),
    )


def call_tip(call: Call, told: str, node: Node) -> str:
    """Of a call, and of the node behind it."""
    return _lines(f"{call.id} = {told}({_tip_arguments(call.args, call.kwargs)})", node_tip(node))


def node_tip(node: Node) -> str:
    """Of a node."""
    version = f", version {node.version}" if node.version else ""
    made = _tip_arguments(node.args, node.kwargs)
    joined = "results of its shards are joined by its method join" if node.joins else "results of its shards are a list"
    return _lines(
        f"node {node.name}: {node.kind.value} {node.code}{version}".rstrip(),
        f"made with ({made})" if made else "",
        joined if node.options.shards > 1 else "",
        *(_options(node.options) if node.kind is not NodeKind.MODEL else ()),
    )


def part_of_input(path: Sequence[Access]) -> str:
    """As it was written: [0].name"""
    return "".join(f".{step.key}" if step.attribute else f"[{step.key}]" for step in path)


def _options(options: NodeOptions) -> list[str]:
    """Those that are not as they come. Of the environment only names: its values may be secrets."""
    usual, found = NodeOptions(), []
    for name in options.__struct_fields__:
        value = getattr(options, name)
        if value != getattr(usual, name):
            found.append(f"{name}: {', '.join(value) if name == 'env' else _value(value)}")
    return found


def _tip_arguments(args: Sequence[Template], kwargs: Mapping[str, Template]) -> str:
    return cut(", ".join([*map(_value, args), *(f"{name}={_value(one)}" for name, one in kwargs.items())]), LONGEST)


def _value(template: Any) -> str:
    """As Python would write it, with names in place of references."""
    if isinstance(template, FromInput):
        return f"input{part_of_input(template.path)}"
    if isinstance(template, FromStep):
        return template.call
    if isinstance(template, HandleTo):
        return f"<{template.node}>"
    if isinstance(template, Mapping):
        words = "{" + ", ".join(f"{name!r}: {_value(one)}" for name, one in template.items()) + "}"
    elif isinstance(template, list | tuple):
        words = "[" + ", ".join(map(_value, template)) + "]"
    else:
        words = repr(template)
    return cut(words, LONGEST)


def _lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)


# What is in a picture of a graph: boxes, and what goes from one to another.


WHOLE = "all of it"
"""The input, where others take parts of it."""


class Role(Enum):
    """What a box stands for."""

    INPUT = "input"
    CALL = "call"
    HELD = "held"
    """A node that no step calls, only who has a handle to it."""
    OUTPUT = "output"


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """One box, in words."""

    role: Role
    name: str
    kind: NodeKind | None = None
    caption: str = ""
    """What stands behind it."""
    detail: str = ""
    """Whose method is called; empty if the name says it."""
    marks: tuple[str, ...] = ()
    """Of how many replicas and shards."""
    node: str = ""
    notes: tuple[str, ...] = ()
    """What else is said: handles for which there is no line, the code that makes the input."""
    tip: str = ""


class Edge(msgspec.Struct, frozen=True):
    """From one box to another, by number."""

    source: int
    target: int
    part: str = ""
    """Of the input, which part."""
    into: str = ""
    """Which argument, or which part of the output."""
    held: bool = False
    """No result goes there: the source has a handle to the target."""


class Parts(msgspec.Struct, frozen=True):
    """Boxes in an order in which every edge goes forward: the input first, the output last."""

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]

    @property
    def shared(self) -> list[str]:
        """Nodes that more than one box calls."""
        nodes = [box.node for box in self.boxes if box.node]
        return [node for node in dict.fromkeys(nodes) if nodes.count(node) > 1]


def parts_of(graph: Graph) -> Parts:
    """Everything that is drawn of a graph."""
    return _Collecting(graph).parts()


class _Collecting:
    """Numbers boxes as they come."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._boxes: list[Box] = []
        self._edges: list[Edge] = []
        self._calls: dict[str, int] = {}
        """The box of a call."""
        self._nodes: dict[str, int] = {}
        """The first box of a node."""
        self._handles = HandleEdges(graph)
        templates = [graph.output, *(template for call in graph.calls for template in (call.args, call.kwargs))]
        self._inputs = {one for one in references(templates) if isinstance(one, FromInput)}

    def parts(self) -> Parts:
        self._input()
        for call in self._graph.calls:
            self._call(call)
        for name in self._handles.only_held:
            self._held(self._graph.node(name))
        for holder, target in self._handles.lines:
            self._edges.append(Edge(self._nodes[holder], self._nodes[target], held=True))
        self._output()
        return Parts(tuple(self._boxes), tuple(self._edges))

    def _add(self, box: Box) -> int:
        self._boxes.append(box)
        return len(self._boxes) - 1

    def _input(self) -> None:
        graph = self._graph
        code = {"preprocessor": graph.preprocessor, "schema": graph.schema}
        captions = tuple(f"{what} {_last(where)}" for what, where in code.items() if where)
        marks = _marks(graph.ingress) if graph.has_ingress else ()
        self._add(Box(role=Role.INPUT, name="input", notes=captions, marks=marks, tip=input_tip(graph)))

    def _call(self, call: Call) -> None:
        node = self._graph.node(call.node)
        told = call.node if call.method == CALL else f"{call.node}.{call.method}"
        place = self._calls[call.id] = self._add(
            Box(
                role=Role.CALL,
                name=call.id,
                kind=node.kind,
                caption=_caption(node),
                detail=told if told != call.id else "",
                marks=_marks(node.options),
                node=node.name,
                notes=self._notes(node) if node.name not in self._nodes else (),
                tip=call_tip(call, told, node),
            )
        )
        self._nodes.setdefault(node.name, place)
        taken: dict[tuple[int, str], list[str]] = {}
        for where, reference in _arguments(call):
            if not isinstance(reference, HandleTo):
                taken.setdefault(self._source(reference), []).append(where)
        for (source, part), places in taken.items():
            self._edges.append(Edge(source, place, part, ", ".join(filter(None, places))))

    def _held(self, node: Node) -> None:
        self._nodes[node.name] = self._add(
            Box(
                role=Role.HELD,
                name=node.name,
                kind=node.kind,
                caption=_caption(node),
                marks=_marks(node.options),
                node=node.name,
                notes=self._notes(node),
                tip=node_tip(node),
            )
        )

    def _output(self) -> None:
        place = self._add(Box(role=Role.OUTPUT, name="output", tip="what is answered"))
        for where, reference in _uses(self._graph.output, ""):
            if not isinstance(reference, HandleTo):
                source, part = self._source(reference)
                self._edges.append(Edge(source, place, part, where))

    def _source(self, reference: FromInput | FromStep) -> tuple[int, str]:
        if isinstance(reference, FromStep):
            return self._calls[reference.call], ""
        return 0, part_of_input(reference.path) or (WHOLE if len(self._inputs) > 1 else "")

    def _notes(self, node: Node) -> tuple[str, ...]:
        return tuple(f"handle to {target}" for target in self._handles.notes(node.name))


def _arguments(call: Call) -> Iterator[tuple[str, Reference]]:
    """What a call takes, and as which argument. One that is alone needs no number."""
    alone = len(call.args) == 1 and not call.kwargs
    for place, template in enumerate(call.args, start=1):
        yield from _uses(template, "" if alone else f"#{place}")
    for name, template in call.kwargs.items():
        yield from _uses(template, name)


def _uses(template: Template, where: str) -> Iterator[tuple[str, Reference]]:
    """References, and where in a value they are."""
    if isinstance(template, FromInput | FromStep | HandleTo):
        yield where, template
    elif isinstance(template, Mapping):
        for name, value in template.items():
            yield from _uses(value, f"{where}[{name}]" if where else name)
    elif isinstance(template, list | tuple):
        for place, value in enumerate(template):
            yield from _uses(value, f"{where}[{place}]")


def _caption(node: Node) -> str:
    return f"{node.kind.value} {_last(node.code)}".rstrip()


def _last(code: str) -> str:
    """path/to/file.py:Name -> Name"""
    return code.rpartition(":")[2]


def _marks(options: NodeOptions) -> tuple[str, ...]:
    number = str(options.num_replicas)
    if options.scaling is not None:
        number = f"{options.scaling.get('min', 1)}-{options.scaling.get('max', '')}"
    marks = (f"x{number}" if number != "1" else "", f"{options.shards} shards" if options.shards > 1 else "")
    return tuple(filter(None, marks))


# What is said above a picture.


def headline(graph: Graph) -> str:
    """How large it is."""
    replicas = sum(
        node.options.num_replicas * node.options.shards for node in graph.nodes if node.kind is not NodeKind.MODEL
    )
    replicas += graph.ingress.num_replicas if graph.has_ingress else 0
    return ", ".join(
        [counted(len(graph.calls), "call"), counted(len(graph.nodes), "node"), counted(replicas, "process")]
    )


def counted(count: int, what: str) -> str:
    """1 call, 2 calls, 3 processes."""
    ending = "" if count == 1 else "es" if what.endswith("s") else "s"
    return f"{count} {what}{ending}"

"""Pictures of graphs show every box and every edge, in a terminal, in Mermaid and in DOT, whatever the names are."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.errors import UnknownName
from pointsman.pipeline import Access, Call, FromInput, FromStep, Graph, HandleTo, Node, NodeKind, NodeOptions
from pointsman.pipeline.application import build
from pointsman.pipeline.graph import Template, references
from pointsman.pipeline.nodes import InputNode, deployment
from pointsman.render.graph import Box, GraphParts, parts_of
from pointsman.render.graph_text import dot, graph_text, mermaid, tracks
from pointsman.render.svg import fitted
from pointsman.render.text import cells, cut
from tests.properties import examples

INPUT = FromInput()


def part(*keys: int | str) -> FromInput:
    return FromInput(tuple(map(Access, keys)))


def node(name: str, kind: NodeKind = NodeKind.CLASS, *args: Template, **options: Any) -> Node:
    return Node(name=name, kind=kind, code=f"app.py:{name}", args=args, options=NodeOptions(**options))


def call(name: str, of: str, *args: Template, **kwargs: Template) -> Call:
    return Call(id=name, node=of, method="run", args=args, kwargs=kwargs)


def graph(*calls: Call, output: Template = None, nodes: tuple[Node, ...] = ()) -> Graph:
    """With the nodes that its calls need, if they are not given."""
    given = {one.name: one for one in nodes}
    made = {one.node: node(one.node) for one in calls if one.node not in given}
    return Graph(nodes=(*nodes, *made.values()), calls=calls, output=output or FromStep(calls[-1].id))


DIAMOND = msgspec.structs.replace(
    graph(
        call("m1_output", "m1", part(0)),
        call("m2_output", "m2", part(1)),
        Call(id="dag", node="ensemble", args=(FromStep("m1_output"), FromStep("m2_output"), part(2))),
        nodes=(node("ensemble", NodeKind.FUNCTION), node("m1", num_replicas=3)),
    ),
    preprocessor="diamond.py:request_to_data_int",
    ingress=NodeOptions(num_replicas=2),
)

HANDLES = graph(
    call("answer", "router", INPUT),
    nodes=(
        node("router", NodeKind.CLASS, HandleTo("cheap"), [HandleTo("llm")], num_replicas=2),
        node("cheap", NodeKind.CLASS, {"model": HandleTo("llm"), "back": HandleTo("router")}),
        node("llm", NodeKind.MODEL),
    ),
)


def joined(parts: GraphParts, *, held: bool = False) -> list[tuple[str, str]]:
    """(from, to) of every edge."""
    return sorted(
        (parts.boxes[edge.source].name, parts.boxes[edge.target].name) for edge in parts.edges if edge.held == held
    )


def named(parts: GraphParts, name: str) -> Box:
    [found] = [box for box in parts.boxes if box.name == name]
    return found


def layers(parts: GraphParts) -> list[list[str]]:
    return [[parts.boxes[one].name for one in layer] for layer in parts.layers]


# Boxes, edges and layers


def test_the_parts_of_a_diamond() -> None:
    parts = parts_of(DIAMOND)
    assert joined(parts) == [
        ("dag", "output"),
        ("input", "dag"),
        ("input", "m1_output"),
        ("input", "m2_output"),
        ("m1_output", "dag"),
        ("m2_output", "dag"),
    ]
    assert layers(parts) == [["input"], ["m1_output", "m2_output"], ["dag"], ["output"]]
    assert named(parts, "input").lines == ["input  x2", "preprocessor request_to_data_int"]
    assert named(parts, "m1_output").lines == ["m1_output  x3", "class m1.run"]
    assert named(parts, "dag").lines == ["dag", "function ensemble"]
    assert [(edge.part, edge.into) for edge in parts.edges] == [
        ("[0]", ""), ("[1]", ""), ("", "#1"), ("", "#2"), ("[2]", "#3"), ("", ""),
    ]  # fmt: skip


def test_layers_are_ordered_so_that_edges_do_not_cross() -> None:
    """Written so that all edges cross: the last of each layer is taken first."""
    first = [call(f"a{index}", "n", part(index)) for index in range(5)]
    then = [call(f"b{index}", "n", FromStep(f"a{4 - index}")) for index in range(5)]
    found = layers(parts_of(graph(*first, *then, output=[FromStep(one.id) for one in then])))
    assert [name[1] for name in found[1]] == [str(4 - int(name[1])) for name in found[2]]


def test_handles_are_edges_and_those_that_would_go_back_are_notes() -> None:
    parts = parts_of(HANDLES)
    assert joined(parts) == [("answer", "output"), ("input", "answer")]
    assert joined(parts, held=True) == [("answer", "cheap"), ("answer", "llm"), ("cheap", "llm")]
    assert "handle to router" in named(parts, "cheap").notes


def test_nodes_that_hold_each_other_have_an_edge_one_way() -> None:
    handles = graph(
        call("a", "a", INPUT),
        nodes=(
            node("a", NodeKind.CLASS, HandleTo("b")),
            node("b", NodeKind.CLASS, HandleTo("c")),
            node("c", NodeKind.CLASS, HandleTo("b")),
        ),
    )
    parts = parts_of(handles)
    assert joined(parts, held=True) == [("a", "b"), ("b", "c")]
    assert named(parts, "c").notes == ("handle to b",)


def test_shards_and_options_are_shown_and_secrets_are_not() -> None:
    large = node("large", num_replicas=2, shards=4, gpus=1)
    large = msgspec.structs.replace(
        large, joins=True, options=msgspec.structs.replace(large.options, env={"TOKEN": "secret"}), version="abc"
    )
    sharded = graph(call("said", "large", INPUT), nodes=(large,))
    box = named(parts_of(sharded), "said")
    assert box.marks == ("x2", "4 shards")
    for line in ("node large: class app.py:large, version abc", "said = large.run(input)", "gpus: 1", "env: TOKEN"):
        assert line in box.tip.splitlines()
    assert "its method join merges" in box.tip
    assert "secret" not in dot("shards", sharded)


def test_a_scaled_node_shows_its_bounds() -> None:
    grows = node("grows", scaling={"min": 0, "max": 4})
    parts = parts_of(graph(call("said", "grows", INPUT), nodes=(grows,)))
    assert named(parts, "said").marks == ("x0-4",)


def test_edges_name_parts_of_the_input_and_of_the_output() -> None:
    one = call("one", "n", FromInput((Access("user"), Access("name", attribute=True))))
    two = call("two", "n", INPUT, limit=[FromStep("one")])
    parts = parts_of(graph(one, two, output={"total": FromStep("two"), "parts": [FromStep("one"), 3, INPUT]}))
    assert [(edge.part, edge.into) for edge in parts.edges] == [
        ("[user].name", ""), ("all of it", "#1"), ("", "limit[0]"), ("", "total"), ("", "parts[0]"),
        ("all of it", "parts[2]"),
    ]  # fmt: skip


# Mermaid and DOT


def test_the_diamond_in_mermaid() -> None:
    assert mermaid("diamond", DIAMOND) == DIAMOND_MERMAID


DIAMOND_MERMAID = """\
---
title: "diamond: 3 calls, 3 nodes, 7 processes"
---
flowchart LR
  n0(["input  x2<br>preprocessor request_to_data_int"])
  n1["m1_output  x3<br>class m1.run"]
  n2["m2_output<br>class m2.run"]
  n3("dag<br>function ensemble")
  n4(["output"])
  n0 -->|"[0]"| n1
  n0 -->|"[1]"| n2
  n1 -->|"#35;1"| n3
  n2 -->|"#35;2"| n3
  n0 -->|"[2] → #35;3"| n3
  n3 --> n4
"""


def test_handles_are_dashed_in_mermaid_and_in_dot() -> None:
    text = mermaid("handles", HANDLES)
    assert text.count("-.->") == 3
    assert text.count(":::held") == 2
    text = dot("handles", HANDLES)
    assert len(re.findall("-> .* style=dashed]", text)) == 3
    assert text.count(",dashed") == 2


QUOTED = r'"(?:[^"\\]|\\.)*"'


def dot_edges(text: str) -> list[tuple[str, str]]:
    """(from, to), read back: every line is one statement, and every string is closed."""
    first, *lines, last = text.splitlines()
    assert re.fullmatch(rf"digraph {QUOTED} {{", first)
    assert last == "}"
    attributes = rf"(?: ?\w+=(?:{QUOTED}|\w+))+"
    assert all(re.fullmatch(rf"  (?:\w+(?: -> \w+)? \[{attributes}\]|{attributes})", line) for line in lines)
    return [match.groups() for line in lines if (match := re.match(r"  (n\d+) -> (n\d+)", line))]  # type: ignore[misc]


def mermaid_edges(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines()[4:] if not line.startswith("  classDef")]
    string = r'"[^"\\`<>&]*(?:<br>[^"\\`<>&]*)*"'
    box, edge = rf"  n\d+[\[({{]+{string}[\])}}]+(?::::held)?", rf"  (n\d+) (?:-\.->|-->)(?:\|{string}\|)? (n\d+)"
    assert all(re.fullmatch(f"(?:{box})|(?:{edge})", line) for line in lines)
    return [match.groups() for line in lines if (match := re.fullmatch(edge, line))]  # type: ignore[misc]


LONG = "a_name_that_is_as_long_as_names_may_get_"


@pytest.mark.parametrize("name", [LONG, "W" * 90, "名前" * 30, "<&>\"'" * 20, "\x00\x1b[31m\n", "e\u0301" * 50, "x"])
def test_any_name_can_be_drawn(name: str) -> None:
    of = node(name, NodeKind.CLASS, HandleTo(f"{name}2"), num_replicas=100, shards=16)
    long = graph(
        call(name, name, part(name), **{name: part(name, name)}),
        output={name: FromStep(name)},
        nodes=(of, node(f"{name}2", NodeKind.FUNCTION)),
    )
    assert len(dot_edges(dot(name, long))) == len(mermaid_edges(mermaid(name, long))) == 4
    for width in (1, 30, 80):
        lines = graph_text(name, long, width).splitlines()
        assert all(cells(line) <= max(width, 24) for line in lines)
        assert all(line.isprintable() for line in lines)


# Text


def test_the_diamond_in_a_terminal() -> None:
    assert graph_text("diamond", DIAMOND) + "\n" == DIAMOND_TEXT


DIAMOND_TEXT = """\
diamond: 3 calls, 3 nodes, 7 processes

┌──────────────────────────────────┐
│ input  x2                        │
│ preprocessor request_to_data_int │
└──────────────────────────────────┘
         ┌────────┴─────────┐
         ▼                  ▼
 ┌───────────────┐  ┌──────────────┐
 │ m1_output  x3 │  │ m2_output    │
 │ class m1.run  │  │ class m2.run │
 │ ← input[0]    │  │ ← input[1]   │
 └───────────────┘  └──────────────┘
         └────────┬─────────┘
                  ▼
┌──────────────────────────────────┐
│ dag                              │
│ function ensemble                │
│ ← m1_output, m2_output, input[2] │
└──────────────────────────────────┘
                  │
                  ▼
             ┌────────┐
             │ output │
             │ ← dag  │
             └────────┘
"""


def test_tracks() -> None:
    assert tracks([(3, 3)]) == ["   │", "   ▼"]
    assert tracks([(4, 1), (4, 8)]) == [" ┌──┴───┐", " ▼      ▼"]
    assert tracks([(1, 4), (8, 4), (4, 4)]) == [" └──┼───┘", "    ▼"]
    assert tracks([(1, 0), (5, 6)]) == ["┌┘   └┐", "▼     ▼"], "links that do not touch have two tracks"
    assert tracks([]) == ["", ""]


def test_a_wide_stage_continues_on_the_next_line() -> None:
    calls = [call(f"c{index}", f"n{index}", INPUT) for index in range(7)]
    wide = graph(*calls, call("join", "join", *(FromStep(one.id) for one in calls)))
    tops = [line.count("┌") for line in graph_text("wide", wide, 60).splitlines() if "┐" in line]
    assert tops == [1, 3, 3, 1, 1, 1]
    assert "← c0, c1, c2, c3, c4, c5, c6" in graph_text("wide", wide, 60)


def test_handles_and_outputs_in_a_terminal() -> None:
    router = node("router", NodeKind.CLASS, HandleTo("cheap"))
    handles = graph(
        call("answer", "router", INPUT),
        call("checked", "check", FromStep("answer"), by=part("user")),
        output={"answer": FromStep("answer"), "checked": FromStep("checked")},
        nodes=(router, node("cheap", shards=2)),
    )
    text = graph_text("handles", handles)
    for words in ("calls cheap", "held by router", "cheap  2 shards", "called through handles:", "╎ class cheap"):
        assert words in text
    assert "← answer, by=input[user]" in text
    assert "← answer=answer, checked=checked" in text


# Any graph


def reference(draw: st.DrawFn, before: list[str]) -> Template:
    from_step = draw(st.integers(0, 5)) > 0
    if before and from_step:
        return FromStep(draw(st.sampled_from(before[-15:])))
    return FromInput(draw(st.sampled_from([(), (Access(0),), (Access("user"), Access("name", attribute=True))])))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.sampled_from([1, 4, 15, 60]))
    names = [f"node_{index}" for index in range(draw(st.integers(1, 30)))]
    replicas = st.integers(0, 3)
    nodes = [
        node(
            name,
            draw(st.sampled_from(NodeKind)),
            *map(HandleTo, draw(st.lists(st.sampled_from(names), max_size=2))),
            num_replicas=draw(replicas),
            shards=draw(replicas) or 1,
        )
        for name in names
    ]
    calls: list[Call] = []
    for index in range(count):
        before = [one.id for one in calls]
        args = [reference(draw, before) for _ in range(draw(st.integers(0, 3)))]
        kwargs = {"many": [reference(draw, before), 7]} if draw(st.booleans()) else {}
        calls.append(call(f"call_{index}", draw(st.sampled_from(names)), *args, **kwargs))
    taken = {one.call for each in calls for one in references([each.args, each.kwargs]) if isinstance(one, FromStep)}
    output = [FromStep(one.id) for one in calls if one.id not in taken]
    return Graph(nodes=tuple(nodes), calls=tuple(calls), output=output if len(output) > 1 else output[0])


@settings(max_examples=examples(20), deadline=None)
@given(graphs())
def test_parts_of_any_graph(any_graph: Graph) -> None:
    parts = parts_of(any_graph)
    called = {one.node for one in any_graph.calls}
    names = [one.id for one in any_graph.calls] + [one.name for one in any_graph.nodes if one.name not in called]
    assert sorted(box.name for box in parts.boxes) == sorted([*names, "input", "output"])
    flows = {
        (one.call if isinstance(one, FromStep) else "input", target)
        for target, template in [
            *((each.id, [each.args, each.kwargs]) for each in any_graph.calls),
            ("output", any_graph.output),
        ]
        for one in references(template)
    }
    assert set(joined(parts)) == flows
    depth = {one: index for index, layer in enumerate(parts.layers) for one in layer}
    assert sorted(depth) == list(range(len(parts.boxes)))
    assert all(edge.source < edge.target and depth[edge.source] < depth[edge.target] for edge in parts.edges)
    edges = [(f"n{edge.source}", f"n{edge.target}") for edge in parts.edges]
    assert dot_edges(dot("any", any_graph)) == mermaid_edges(mermaid("any", any_graph)) == edges
    assert parts_of(any_graph) == parts


@settings(max_examples=examples(20), deadline=None)
@given(graphs(), st.integers(30, 120))
def test_any_graph_in_a_terminal(any_graph: Graph, width: int) -> None:
    text = graph_text("any", any_graph, width)
    assert all(cells(line) <= width for line in text.splitlines())
    heads = re.findall(r"[│╎] ((?:call|node)_\d+)(?=  | [│╎])", text)
    called = {one.node for one in any_graph.calls}
    assert sorted(heads) == sorted(
        [one.id for one in any_graph.calls] + [one.name for one in any_graph.nodes if one.name not in called]
    )
    order = [text.index(f" {one.id} ") for one in any_graph.calls]
    for index, one in enumerate(any_graph.calls):
        for before in references([one.args, one.kwargs]):
            if isinstance(before, FromStep):
                assert order[int(before.call.removeprefix("call_"))] < order[index], "what is needed stands above"
    assert graph_text("any", any_graph, width) == text


@pytest.mark.parametrize(
    ("words", "room", "left"),
    [
        ("abc", 3, "abc"),
        ("abcdef", 5, "abcd…"),
        ("abcdef", 3, ""),
        ("名前名前", 7, "名前名…"),
        ("名前名前", 6, "名前…"),
    ],
)
def test_text_is_cut_where_the_room_ends(words: str, room: int, left: str) -> None:
    assert cut(words, room) == left
    assert cells(left) <= room
    assert fitted(words, room * 6, 10) == left


@deployment
def double(value: int) -> int:
    return 2 * value


def test_an_application_draws_itself(tmp_path: Path) -> None:
    with InputNode() as dag_input:
        dag = double.bind(dag_input)
    app = build(dag, name="doubled")
    app.double.set_options(num_replicas=3)
    assert "│ dag  x3 " in app.draw()
    for name, begin in {"graph.mmd": "---\ntitle", "graph.dot": 'digraph "doubled"', "graph.txt": "doubled: 1"}.items():
        text = app.draw(tmp_path / name)
        assert text.startswith(begin)
        assert (tmp_path / name).read_text(encoding="utf-8") == text
    with pytest.raises(UnknownName, match=r'unknown suffix of a drawing "\.svg"; known: \.dot, \.mmd, \.txt'):
        app.draw("graph.svg")

"""Pictures of graphs: nothing is left out, nothing is in the way of anything, and every name can be drawn.

What is joined with what is read from where lines begin and end in the picture, not from what the program meant.
"""

import re
from itertools import combinations, pairwise
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.pipeline import Access, Call, FromInput, FromStep, Graph, HandleTo, Node, NodeKind, NodeOptions
from pointsman.pipeline.application import build
from pointsman.pipeline.graph import Template, references
from pointsman.pipeline.nodes import InputNode, deployment
from pointsman.render.graph_svg import graph_svg, settled
from pointsman.render.graph_text import graph_text, tracks
from pointsman.render.svg import cells, cut, fitted

SVG = "{http://www.w3.org/2000/svg}"
EVEN = 0.11
"""Places are written with one digit after the point."""

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


# The picture, read


class Shape(msgspec.Struct, frozen=True):
    """A box as it was drawn."""

    name: str
    x: float
    y: float
    right: float
    bottom: float
    words: tuple[str, ...]
    tip: str


class Drawn:
    """An SVG, read again."""

    def __init__(self, svg: str) -> None:
        self.root = ElementTree.fromstring(svg)
        self.width, self.height = map(float, self.root.attrib["viewBox"].split()[2:])
        style = self.root.findtext(f"{SVG}style") or ""
        self.sizes = {name: float(size) for name, size in re.findall(r"\.(\w+) \{ font-size: ([\d.]+)px", style)}
        self.anchors = dict(re.findall(r"\.(\w+) \{[^}]*text-anchor: (\w+)", style))
        [picture] = [one for one in self.root.iter(f"{SVG}g") if "transform" in one.attrib]
        self.left, self.top = map(float, re.findall(r"[\d.]+", picture.attrib["transform"]))
        self.groups = list(picture.iter(f"{SVG}g"))[1:]
        self.boxes = [self.box(one) for one in self.groups if one.attrib["class"].startswith("box")]
        paths = [one.find(f"{SVG}path") for one in self.groups if one.attrib["class"] == "edge"]
        self.paths = [one.attrib["d"] for one in paths if one is not None]

    def box(self, group: ElementTree.Element) -> Shape:
        rect = group.find(f"{SVG}rect")
        assert rect is not None
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        texts = group.findall(f"{SVG}text")
        [name] = [one.text or "" for one in texts if one.attrib["class"] in ("name", "end")]
        words = tuple(one.text or "" for one in texts)
        return Shape(name, x, y, x + width, y + height, words, group.findtext(f"{SVG}title") or "")

    def extent(self, text: ElementTree.Element) -> tuple[float, float]:
        """From where to where a text goes, in letters of a fixed width."""
        kind = str(text.attrib["class"])
        length = cells(text.text or "") * self.sizes[kind] * 0.6
        anchor = text.get("text-anchor") or self.anchors.get(kind, "start")
        begin = float(text.attrib["x"]) - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * length
        return begin, begin + length

    def joined(self) -> list[tuple[str, str]]:
        """(from, to) of every line, by where it begins and ends."""
        found = []
        for path in self.paths:
            ends = points(path)
            found.append((self.at(ends[0], "right"), self.at(ends[-1], "x")))
        return sorted(found)

    def at(self, point: tuple[float, float], side: str) -> str:
        [name] = [
            box.name
            for box in self.boxes
            if abs(getattr(box, side) - point[0]) < EVEN and box.y <= point[1] <= box.bottom
        ]
        return name

    def named(self, name: str) -> Shape:
        [found] = [box for box in self.boxes if box.name == name]
        return found


def points(path: str) -> list[tuple[float, float]]:
    """Where the parts of a path begin and end."""
    found: list[tuple[float, float]] = []
    for letter, values in re.findall(r"([MCH])([^MCH]*)", path):
        numbers = [float(value) for value in values.split()]
        found.append((numbers[0], found[-1][1]) if letter == "H" else (numbers[-2], numbers[-1]))
    return found


def sound(svg: str) -> Drawn:
    """A picture in which nothing is in the way of anything."""
    drawn = Drawn(svg)
    for one, other in combinations(drawn.boxes, 2):
        beside = one.right < other.x or other.right < one.x or one.bottom < other.y or other.bottom < one.y
        assert beside, f"{one.name} and {other.name} overlap"
    for box in drawn.boxes:
        assert box.x >= -EVEN
        assert box.y >= -EVEN
        assert drawn.left + box.right <= drawn.width
        assert drawn.top + box.bottom <= drawn.height
    for path in drawn.paths:
        way = points(path)
        assert all(0 <= drawn.top + y <= drawn.height for _, y in way)
        for (x, y), (right, there) in pairwise(way):
            assert x <= right + EVEN, f"{path} goes back"
            for box in drawn.boxes:  # a curve may be anywhere between its ends; what is straight is where it is
                over = x < box.right - EVEN and right > box.x + EVEN
                high, low = min(y, there), max(y, there)
                assert not (over and low > box.y and high < box.bottom), f"{path} runs behind {box.name}"
    for way, another in combinations(map(points, drawn.paths), 2):
        assert way[0] == another[0] or not set(way) & set(another), "only what leaves by the same exit may run together"
    for group in drawn.groups:
        rect = group.find(f"{SVG}rect")
        for text in group.findall(f"{SVG}text") if rect is not None else ():
            left, right = drawn.extent(text)
            assert left >= float(rect.attrib["x"]) - EVEN  # type: ignore[union-attr]
            assert right <= float(rect.attrib["x"]) + float(rect.attrib["width"]) + EVEN, text.text  # type: ignore[union-attr]
    return drawn


# SVG


def test_the_diamond() -> None:
    drawn = sound(graph_svg("diamond", DIAMOND))
    assert drawn.joined() == [
        ("dag", "output"),
        ("input", "dag"),
        ("input", "m1_output"),
        ("input", "m2_output"),
        ("m1_output", "dag"),
        ("m2_output", "dag"),
    ]
    first, second = drawn.named("m1_output"), drawn.named("m2_output")
    assert first.x == second.x, "side by side"
    assert set(drawn.named("input").words) == {"input", "preprocessor request_to_data_int", "x2", "[0]", "[1]", "[2]"}
    assert first.words == ("x3", "class m1", "m1_output", "m1.run")
    assert drawn.named("dag").words == ("function ensemble", "dag", "ensemble")
    labels = [one.text for one in drawn.root.iter(f"{SVG}text") if one.attrib["class"] == "label"]
    assert sorted(filter(None, labels)) == ["#1", "#2", "#3"], "an argument that is alone needs no label"
    assert drawn.root.findtext(f"{SVG}title") == "diamond: 3 calls, 3 nodes, 7 processes"


def test_a_chain_is_straight() -> None:
    calls = [call("c0", "n", INPUT), *(call(f"c{place}", "n", FromStep(f"c{place - 1}")) for place in range(1, 6))]
    drawn = sound(graph_svg("chain", graph(*calls)))
    names = ["input", *(one.id for one in calls), "output"]
    assert drawn.joined() == sorted(pairwise(names))
    assert len({round(y) for path in drawn.paths for _, y in points(path)}) == 1
    places = [drawn.named(name).x for name in names]
    assert places == sorted(set(places))


def test_what_leads_to_a_fork_is_straight() -> None:
    chain = [call("c0", "n", INPUT), *(call(f"c{place}", "n", FromStep(f"c{place - 1}")) for place in range(1, 5))]
    fork = [call(f"f{place}", "n", FromStep("c4")) for place in range(3)]
    join = call("join", "n", FromStep("c4"), *(FromStep(one.id) for one in fork))
    drawn = sound(graph_svg("fork", graph(*chain, *fork, join)))
    ways = [points(path) for path in drawn.paths]
    bent = [max(y for _, y in way) - min(y for _, y in way) for way in ways if drawn.at(way[-1], "x") <= "c4"]
    assert len(bent) == 5
    assert max(bent) < 6


def test_fan_out_does_not_cross() -> None:
    calls = [call(f"c{place}", f"n{place}", INPUT) for place in range(9)]
    join = call("join", "join", *(FromStep(one.id) for one in reversed(calls)))
    drawn = sound(graph_svg("fan", graph(*calls, join)))
    assert len(drawn.joined()) == 9 + 9 + 1
    begins = [points(path) for path in drawn.paths if drawn.at(points(path)[-1], "x") == "join"]
    assert [way[-1][1] for way in sorted(begins)] == sorted(way[-1][1] for way in begins)


def test_an_order_is_found_in_which_nothing_crosses() -> None:
    """Written so that all lines cross: the last of each is taken first."""
    first = [call(f"a{place}", "n", part(place)) for place in range(5)]
    then = [call(f"b{place}", "n", FromStep(f"a{4 - place}")) for place in range(5)]
    drawn = sound(graph_svg("crossed", graph(*first, *then, output=[FromStep(one.id) for one in then])))
    order = [sorted(names, key=lambda name: drawn.named(name).y) for names in (["a0", "a1", "a2"], ["b4", "b3", "b2"])]
    assert [name[1] for name in order[0]] == [str(4 - int(name[1])) for name in order[1]]


def test_a_shared_node_has_the_same_colour_wherever_it_is_called() -> None:
    twice = graph(
        call("once", "m1", INPUT), call("again", "m1", FromStep("once")), call("other", "m2", FromStep("again"))
    )
    drawn = sound(graph_svg("shared", twice))
    dots = {}
    for group, box in zip([one for one in drawn.groups if "box" in one.attrib["class"]], drawn.boxes, strict=True):
        dots[box.name] = [one.attrib["fill"] for one in group.findall(f"{SVG}rect") if one.attrib.get("rx") == "4"]
    assert len(dots["once"]) == 1
    assert dots["once"] == dots["again"]
    assert dots["other"] == []


def test_handles_are_dashed_lines_and_those_that_would_go_back_are_noted() -> None:
    handles = graph(
        call("answer", "router", INPUT),
        nodes=(
            node("router", NodeKind.CLASS, HandleTo("cheap"), [HandleTo("llm")], num_replicas=2),
            node("cheap", NodeKind.CLASS, {"model": HandleTo("llm"), "back": HandleTo("router")}),
            node("llm", NodeKind.MODEL),
        ),
    )
    svg = graph_svg("handles", handles)
    drawn = sound(svg)
    assert drawn.joined() == [
        ("answer", "cheap"),
        ("answer", "llm"),
        ("answer", "output"),
        ("cheap", "llm"),
        ("input", "answer"),
    ]
    dashed = [one for one in drawn.root.iter(f"{SVG}path") if one.get("marker-end") == "url(#held)"]
    assert len(dashed) == 3
    assert all(one.get("stroke-dasharray") for one in dashed)
    assert "handle to router" in drawn.named("cheap").words
    assert "called through a handle" in svg


def test_nodes_that_hold_each_other_are_drawn_all_the_same() -> None:
    handles = graph(
        call("a", "a", INPUT),
        nodes=(
            node("a", NodeKind.CLASS, HandleTo("b")),
            node("b", NodeKind.CLASS, HandleTo("c")),
            node("c", NodeKind.CLASS, HandleTo("b")),
        ),
    )
    drawn = sound(graph_svg("cycle", handles))
    assert drawn.joined() == [("a", "b"), ("a", "output"), ("b", "c"), ("input", "a")]
    assert "handle to b" in drawn.named("c").words


def test_shards_and_options_are_told() -> None:
    large = node("large", num_replicas=2, shards=4, gpus=1)
    large = msgspec.structs.replace(
        large, joins=True, options=msgspec.structs.replace(large.options, env={"TOKEN": "secret"}), version="abc"
    )
    svg = graph_svg("shards", graph(call("said", "large", INPUT), nodes=(large,)))
    box = sound(svg).named("said")
    assert {"x2", "4 shards"} <= set(box.words)
    for line in ("node large: class app.py:large, version abc", "said = large.run(input)", "gpus: 1", "env: TOKEN"):
        assert line in box.tip.splitlines()
    assert "joined by its method join" in box.tip
    assert "secret" not in svg


def test_a_node_that_is_scaled_tells_its_bounds() -> None:
    grows = node("grows", scaling={"min": 0, "max": 4})
    assert "x0-4" in sound(graph_svg("grows", graph(call("said", "grows", INPUT), nodes=(grows,)))).named("said").words


def test_several_outputs_and_parts_of_the_input_have_rows() -> None:
    one = call("one", "n", FromInput((Access("user"), Access("name", attribute=True))))
    two = call("two", "n", INPUT, limit=[FromStep("one")])
    drawn = sound(
        graph_svg("many", graph(one, two, output={"total": FromStep("two"), "parts": [FromStep("one"), 3, INPUT]}))
    )
    assert set(drawn.named("output").words) == {"output", "total", "parts[0]", "parts[2]"}
    assert set(drawn.named("input").words) == {"input", "[user].name", "all of it"}
    assert drawn.joined().count(("input", "output")) == 1
    labels = [text.text for text in drawn.root.iter(f"{SVG}text") if text.attrib["class"] == "label"]
    assert labels == ["#1", "limit[0]"]


LONG = "a_name_that_is_as_long_as_names_may_get_"


@pytest.mark.parametrize("name", [LONG, "W" * 90, "名前" * 30, "<&>\"'" * 20, "\x00\x1b[31m\n", "e\u0301" * 50, "x"])
def test_any_name_fits(name: str) -> None:
    of = node(name, NodeKind.CLASS, HandleTo(f"{name}2"), num_replicas=100, shards=16)
    long = graph(
        call(name, name, part(name), **{name: part(name, name)}),
        output={name: FromStep(name)},
        nodes=(of, node(f"{name}2", NodeKind.FUNCTION)),
    )
    drawn = sound(graph_svg(name, long))
    assert len(drawn.boxes) == 4
    assert len(drawn.joined()) == 4
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
    assert tracks([(1, 0), (5, 6)]) == ["┌┘   └┐", "▼     ▼"], "they do not touch: two tracks"
    assert tracks([]) == ["", ""]


def test_a_wide_stage_goes_on_in_the_next_line() -> None:
    calls = [call(f"c{place}", f"n{place}", INPUT) for place in range(7)]
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
    names = [f"node_{place}" for place in range(draw(st.integers(1, 30)))]
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
    for place in range(count):
        before = [one.id for one in calls]
        args = [reference(draw, before) for _ in range(draw(st.integers(0, 3)))]
        kwargs = {"many": [reference(draw, before), 7]} if draw(st.booleans()) else {}
        calls.append(call(f"call_{place}", draw(st.sampled_from(names)), *args, **kwargs))
    taken = {one.call for each in calls for one in references([each.args, each.kwargs]) if isinstance(one, FromStep)}
    output = [FromStep(one.id) for one in calls if one.id not in taken]
    return Graph(nodes=tuple(nodes), calls=tuple(calls), output=output if len(output) > 1 else output[0])


@settings(max_examples=20, deadline=None)
@given(graphs())
def test_any_graph(any_graph: Graph) -> None:
    svg = graph_svg("any", any_graph)
    drawn = sound(svg)
    called = {one.node for one in any_graph.calls}
    names = [one.id for one in any_graph.calls] + [one.name for one in any_graph.nodes if one.name not in called]
    assert sorted(box.name for box in drawn.boxes) == sorted([*names, "input", "output"])
    flows = {
        (one.call if isinstance(one, FromStep) else "input", target)
        for target, template in [
            *((each.id, [each.args, each.kwargs]) for each in any_graph.calls),
            ("output", any_graph.output),
        ]
        for one in references(template)
    }
    assert {pair for pair in drawn.joined() if not pair[1].startswith("node_")} == flows
    assert graph_svg("any", any_graph) == svg


@settings(max_examples=20, deadline=None)
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
    for place, one in enumerate(any_graph.calls):
        for before in references([one.args, one.kwargs]):
            if isinstance(before, FromStep):
                assert order[int(before.call.removeprefix("call_"))] < order[place], "what is needed stands above"
    assert graph_text("any", any_graph, width) == text


# Parts


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0.1, 9), st.floats(1, 50)), min_size=1, max_size=20))
def test_all_keep_their_distance_and_who_has_room_gets_what_it_wants(rows: list[tuple[float, float, float]]) -> None:
    wanted = [want for want, _, _ in rows]
    steps = [sum(gap for _, _, gap in rows[:place]) for place in range(len(rows))]
    found = settled(wanted, [weight for _, weight, _ in rows], steps)
    for place in range(1, len(rows)):
        assert found[place] - found[place - 1] >= steps[place] - steps[place - 1] - 1e-6
    if all(wanted[place] - wanted[place - 1] >= steps[place] - steps[place - 1] for place in range(1, len(rows))):
        assert found == pytest.approx(wanted)


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
def test_words_are_cut_where_the_room_ends(words: str, room: int, left: str) -> None:
    assert cut(words, room) == left
    assert cells(left) <= room
    assert fitted(words, room * 6, 10) == left


@deployment
def double(value: int) -> int:
    return 2 * value


def test_an_application_draws_itself() -> None:
    with InputNode() as dag_input:
        dag = double.bind(dag_input)
    app = build(dag, name="doubled")
    app.double.set_options(num_replicas=3)
    assert sound(app.draw()).joined() == [("dag", "output"), ("input", "dag")]
    assert "│ dag  x3 " in app.draw(text=True)

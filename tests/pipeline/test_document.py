"""A graph, its YAML, and the graph that is read back."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.config import load_application
from pointsman.pipeline import (
    Access,
    Call,
    FromInput,
    FromStep,
    Graph,
    HandleTo,
    Node,
    NodeKind,
    NodeOptions,
)
from pointsman.pipeline.document import graph_document, read, to_yaml, written
from tests.properties import examples

INPUT = FromInput((Access(0),))
WHOLE = "expected a list of keys, such as [0] or [user, {attribute: name}]; [] is the whole input"


def graph(**changes: Any) -> Graph:
    """Two nodes, one of which feeds the other."""
    whole: dict[str, Any] = {
        "nodes": (
            Node(name="m1", kind=NodeKind.CLASS, code="diamond.py:Model", args=(1,), version="3f2a90c1d4e5"),
            Node(name="ensemble", kind=NodeKind.FUNCTION, code="diamond.py:ensemble"),
        ),
        "calls": (
            Call(id="m1_output", node="m1", method="forward", args=(INPUT,)),
            Call(id="dag", node="ensemble", args=(FromStep("m1_output"), 2)),
        ),
        "output": FromStep("dag"),
    }
    return Graph(**(whole | changes))


def test_the_text_is_what_people_would_write() -> None:
    router = Node(
        name="router",
        kind=NodeKind.CLASS,
        code="shop.routing:Router",
        args=(HandleTo("m1"),),
        kwargs={"prompt": "Dear reader,\nbe brief.\n"},
        options=NodeOptions(num_replicas=3, memory_bytes=2 * 2**30, cpus=1.0, start_timeout_s=90.0, threads=2),
    )
    made = graph(
        nodes=(*graph().nodes, router),
        preprocessor="diamond.py:request_to_data_int",
        ingress=NodeOptions(num_replicas=2),
        python_path=("../lib",),
    )
    assert (
        to_yaml("diamond", made)
        == """\
apiVersion: pointsman/v1alpha1
kind: Application
name: diamond
nodes:
- name: m1
  class: diamond.py:Model
  args: [1]
  version: 3f2a90c1d4e5
- name: ensemble
  function: diamond.py:ensemble
- name: router
  class: shop.routing:Router
  args: [{$handle: m1}]
  kwargs:
    prompt: |
      Dear reader,
      be brief.
  replicas: 3
  threads: 2
  cpus: 1
  memory: 2Gi
  startTimeout: 90s
calls:
- {id: m1_output, node: m1, method: forward, args: [{$input: [0]}]}
- {id: dag, node: ensemble, args: [{$step: m1_output}, 2]}
output: {$step: dag}
ingress: {preprocessor: 'diamond.py:request_to_data_int', replicas: 2}
pythonPath: [../lib]
"""
    )


@pytest.mark.parametrize(
    ("template", "data"),
    [
        (FromInput(), {"$input": []}),
        (FromInput((Access(0), Access("n", attribute=True))), {"$input": [0, {"attribute": "n"}]}),
        ([FromStep("a"), {"b": HandleTo("c")}], [{"$step": "a"}, {"b": {"$handle": "c"}}]),
        ({"plain": [1, 2.5, None, True, "$x"]}, {"plain": [1, 2.5, None, True, "$x"]}),
    ],
)  # fmt: skip
def test_references_are_marked_with_a_dollar(template: Any, data: Any) -> None:
    assert written(template) == data
    assert read(data, lambda path, message: pytest.fail(message)) == template


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        ({"$setp": "a"}, ("$setp",), 'keys that begin with $ are references; did you mean "$step"?'),
        ([{"$step": "a", "b": 1}], (0,), "$step stands alone in its mapping"),
        ({"x": {"$step": 3}}, ("x", "$step"), "expected the id of a call"),
        ({"$handle": None}, ("$handle",), "expected the name of a node"),
        ({"$input": 0}, ("$input",), WHOLE),
        ({"$input": [0, True]}, ("$input", 1), "expected a key, an index, or {attribute: name}"),
    ],
)  # fmt: skip
def test_invalid_references_are_noted_with_their_paths(data: Any, path: Any, message: str) -> None:
    notes: list[Any] = []
    read(data, lambda *note: notes.append(note))
    assert notes == [(path, message)]


def test_defaults_are_left_out() -> None:
    document = graph_document("a", graph())
    assert [list(node) for node in document["nodes"]] == [["name", "class", "args", "version"], ["name", "function"]]
    assert "ingress" not in document
    assert "pythonPath" not in document


# Any graph

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,9}", fullmatch=True).filter(lambda name: name != "ingress")
texts = st.text(max_size=12) | st.sampled_from(
    ["1e9", "yes", "null", "2026-01-01", "1:30", "<<", "=", "- a", "a: b", " x\n y"]
)
keys = texts.filter(lambda key: not key.startswith("$"))
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)


def values(*references: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.one_of(leaves, *references),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


accesses = st.builds(Access, st.integers(-3, 9) | texts) | st.builds(Access, texts, st.just(True))
inputs = st.builds(lambda path: FromInput(tuple(path)), st.lists(accesses, max_size=3))
seconds = st.floats(1e-3, 1e6)
options = st.builds(
    NodeOptions,
    num_replicas=st.integers(0, 99),
    max_concurrency=st.integers(1, 99),
    threads=st.integers(1, 9),
    cpus=st.floats(0, 99),
    memory_bytes=st.integers(0, 2**45) | st.integers(0, 9).map(lambda size: size * 2**30),
    gpus=st.just(1),
    gpu_memory_bytes=st.integers(0, 2**40),
    gpu_share=st.none() | st.floats(0.01, 1),
    labels=st.dictionaries(texts, texts, max_size=2),
    idempotent=st.booleans(),
    deadline_share=st.none() | st.floats(0.01, 1),
    user_config=values(),
    scheduling=st.sampled_from([None, {"policy": "slo-aware", "parameters": {"urgentBelowMs": 5}}]),
    env=st.dictionaries(texts, texts, max_size=2),
    start_timeout_s=seconds,
    health_check_period_s=seconds,
    health_check_timeout_s=seconds,
    graceful_shutdown_s=seconds,
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph that a document can hold: handles lead to earlier nodes, results come from earlier calls."""
    nodes: list[Node] = []
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        handles = [st.sampled_from(nodes).map(lambda node: HandleTo(node.name))] if nodes else []
        kind = draw(st.sampled_from(NodeKind))
        is_class = kind is NodeKind.CLASS
        node = Node(
            name=name,
            kind=kind,
            code=draw(
                st.sampled_from(
                    ["m" if kind is NodeKind.MODEL else "a/b.py:C.D", "x" if kind is NodeKind.MODEL else "a.b:c"]
                )
            ),
            args=tuple(draw(st.lists(values(*handles), max_size=2))) if is_class else (),
            kwargs=draw(st.dictionaries(keys, values(*handles), max_size=2)) if is_class else {},
            options=NodeOptions() if kind is NodeKind.MODEL else draw(options),
            version=draw(texts),
            joins=is_class and draw(st.booleans()),
        )
        nodes.append(node)
    calls: list[Call] = []
    for number in range(draw(st.integers(1, 3))):
        steps = [st.sampled_from(calls).map(lambda call: FromStep(call.id))] if calls else []
        node = draw(st.sampled_from(nodes))
        methods = ["__call__"] if node.kind is NodeKind.FUNCTION else ["__call__", "forward"]
        call = Call(
            id=f"{node.name}.{number}",
            node=node.name,
            method=draw(st.sampled_from(methods)),
            args=tuple(draw(st.lists(values(inputs, *steps), max_size=2))),
            kwargs=draw(st.dictionaries(keys, values(inputs, *steps), max_size=2)),
        )
        calls.append(call)
    results = st.sampled_from(calls).map(lambda call: FromStep(call.id))
    return Graph(
        nodes=tuple(nodes),
        calls=tuple(calls),
        output=draw(values(inputs, results).filter(lambda output: output is not None)),
        preprocessor=draw(st.sampled_from(["", "a.py:f"])),
        schema=draw(st.sampled_from(["", "a.b:Model"])),
        ingress=draw(options),
        ingress_version=draw(texts),
        python_path=tuple(draw(st.lists(texts, max_size=2))),
    )  # fmt: skip


@settings(max_examples=examples(100), deadline=None)
@given(names, graphs())
def test_what_is_written_is_read_back_the_same(name: str, made: Graph) -> None:
    name = f"app-{name}"[:40]
    text = to_yaml(name, made)
    plan = load_application(text)
    assert plan.graph == made
    assert plan.text == text
    assert yaml.safe_load(text)["name"] == name

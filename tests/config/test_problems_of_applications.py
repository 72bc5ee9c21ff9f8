"""Everything that can be wrong with an `Application` document, each with its line."""
# ruff: noqa: E501 (a table: old text, new text, and the message)

import pytest

from pointsman.config import load_application
from pointsman.errors import ConfigError

GOOD = """\
kind: Application
name: app
nodes:
- name: a
  class: m.py:A
- name: b
  function: m.py:b
- name: llm
  model: smollm2
calls:
- {id: one, node: a, method: run, args: [{$input: []}]}
- {id: two, node: b, args: [{$step: one}]}
output: {$step: two}
"""


def found(text: str) -> list[str]:
    try:
        load_application(text, file="app.yaml")
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_the_good_one_is_good() -> None:
    assert found(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("name: app", "name: my app", "app.yaml:2: name: expected letters, digits, _ and -, at most 40, a letter or digit first, found \"my app\""),
        ("name: app", "name: metrics", 'app.yaml:2: name: "metrics" is taken: the gateway serves its own pages at /metrics; choose another'),
        ("name: app\n", "", 'app.yaml:1: field "name" is missing'),
        ("- name: llm", "- name: a", 'app.yaml:8: nodes[2].name: there is already a node "a" on line 4'),
        ("- name: llm", "- name: b.c", "app.yaml:8: nodes[2].name: expected letters, digits, _ and -, at most 40, a letter or digit first, found \"b.c\""),
        ("- name: llm", "- name: ingress", 'app.yaml:8: nodes[2].name: "ingress" is the name of the ingress; choose another one'),
        ("  class: m.py:A\n", "  replicas: 2\n", "app.yaml:4: nodes[0]: this node has no code; give it a class, a function or a model"),
        ("  class: m.py:A\n", "  class: m.py:A\n  function: m.py:b\n", "app.yaml:6: nodes[0].function: this node is a class already; keep one of them"),
        ("class: m.py:A", "class: A", "app.yaml:5: nodes[0].class: expected path/to/file.py:Name or package.module:Name, found \"A\""),
        ("class: m.py:A", "class: ''", "app.yaml:5: nodes[0].class: must not be empty"),
        ("class: m.py:A", "class: m.py:A\n  replica: 2", 'app.yaml:6: nodes[0].replica: unknown field; did you mean "replicas"?'),
        ("class: m.py:A", "class: m.py:A\n  threads: 0", "app.yaml:6: nodes[0].threads: must be at least 1, found 0"),
        ("class: m.py:A", "class: m.py:A\n  gpuShare: 2", "app.yaml:6: nodes[0].gpuShare: must be at most 1, found 2"),
        ("class: m.py:A", "class: m.py:A\n  gpuMemory: 8Gi", "app.yaml:6: nodes[0].gpuMemory: is given without gpus; add their number, such as gpus: 1"),
        ("class: m.py:A", "class: m.py:A\n  startTimeout: soon", 'app.yaml:6: nodes[0].startTimeout: "soon" is not a duration; write for example 200ms, 60s or 1m30s'),
        ("class: m.py:A", "class: m.py:A\n  scheduling: {policy: slo-awar}", 'app.yaml:6: nodes[0].scheduling.policy: there is no scheduling policy "slo-awar"; did you mean "slo-aware"?'),
        ("class: m.py:A", "class: m.py:A\n  scheduling: {polcy: fifo}", 'app.yaml:6: nodes[0].scheduling.polcy: unknown field; did you mean "policy"?'),
        ("class: m.py:A", "class: m.py:A\n  args: [{$handle: c}]", 'app.yaml:6: nodes[0].args: there is no node "c"; known: a, b, llm'),
        ("class: m.py:A", "class: m.py:A\n  args: [{$handle: a}]", "app.yaml:4: nodes[0]: these nodes hold handles to each other: a -> a"),
        ("class: m.py:A", "class: m.py:A\n  args: [{$step: one}]", "app.yaml:6: nodes[0].args: the input and the results of calls come with each request; give them to calls"),
        ("class: m.py:A", "class: m.py:A\n  kwargs: {x: {$hand: a}}", 'app.yaml:6: nodes[0].kwargs.x.$hand: keys that begin with $ are references; did you mean "$handle"?'),
        ("function: m.py:b", "function: m.py:b\n  args: [1]", "app.yaml:8: nodes[1].args: belongs to a class, and this node is a function"),
        ("function: m.py:b", "function: m.py:b\n  shards: 2", "app.yaml:8: nodes[1].shards: a function has no shards; write a class, which gets its rank"),
        ("model: smollm2", "model: smollm2\n  replicas: 2", "app.yaml:10: nodes[2].replicas: belongs to the deployment in the manifest; set it there"),
        ("output:", "- {id: one, node: b}\noutput:", 'app.yaml:13: calls[2].id: there is already a call "one" on line 11'),
        ("output:", "- {id: 'a b', node: b}\noutput:", "app.yaml:13: calls[2].id: expected letters, digits, _, - and dots, found \"a b\""),
        ("node: b", "node: bb", 'app.yaml:12: calls[1].node: there is no node "bb"; did you mean "b"?'),
        ("node: b, ", "node: b, method: run, ", 'app.yaml:12: calls[1].method: node "b" is a function, and has no methods'),
        ("method: run", "method: _run", "app.yaml:11: calls[0].method: expected the name of a method, found \"_run\""),
        ("$step: one", "$step: oen", 'app.yaml:12: calls[1].args: there is no call "oen"; did you mean "one"?'),
        ("$input: []", "$step: two", "app.yaml:11: calls[0].args: these calls wait for each other: two -> one -> two"),
        ("- {id: one", "- {id: zero, node: b, args: [{$step: two}]}\n- {id: one", 'app.yaml:11: calls[0].args: call "two" comes later, on line 13; put it before this one'),
        ("$input: []", "$input: 0", "app.yaml:11: calls[0].args[0].$input: expected a list of keys, such as [0] or [user, {attribute: name}]; [] is the whole input"),
        ("$input: []", "$handle: a", "app.yaml:11: calls[0].args: a handle is given to a class, under args of its node"),
        ("output: {$step: two}", "output: {$step: three}", 'app.yaml:13: output: there is no call "three"; known: one, two'),
        ("output: {$step: two}\n", "", 'app.yaml:1: field "output" is missing'),
        ("output: {$step: two}", "output:", "app.yaml:13: output: must not be empty: what is answered, such as {$step: ID}"),
        ("output:", "ingress: {schema: Model}\noutput:", "app.yaml:13: ingress.schema: expected path/to/file.py:Name or package.module:Name, found \"Model\""),
        ("output:", "ingress: {replicas: -1}\noutput:", "app.yaml:13: ingress.replicas: must be at least 0, found -1"),
        ("kind: Application", "kind: Aplication", 'app.yaml:1: kind: unknown kind "Aplication"; did you mean "Application"?'),
    ],
)  # fmt: skip
def test_one_mistake_is_one_problem_with_its_line(old: str, new: str, problem: str) -> None:
    assert old in GOOD
    assert found(GOOD.replace(old, new, 1)) == [problem]


def test_all_mistakes_at_once() -> None:
    text = GOOD.replace("name: app", "name: v1").replace("node: b", "node: x").replace("$step: two", "$step: nine")
    text = text.replace("class: m.py:A", "class: A\n  threads: 0\n  scheduling: {policy: none}")
    assert len(found(text)) == 6


@pytest.mark.parametrize("text", ["", "nodes: []", "[]", "kind: Pointsman", "name: a\nnodes: 3\noutput: 1", "kind: 3"])
def test_other_documents_have_problems(text: str) -> None:
    assert found(text) != []


def test_calls_are_needed() -> None:
    text = GOOD[: GOOD.index("calls:")] + "output: 1\n"
    assert found(text) == ["app.yaml:1: there are no calls; list calls of nodes, in order, under calls"]

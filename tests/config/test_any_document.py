"""Whatever is in a file, the answer is a plan or a list of problems."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pointsman.config import Problem, json_schema, load
from pointsman.errors import ConfigError
from tests.properties import examples

DOCUMENTS = [yaml.safe_load(file.read_text()) for file in sorted((Path(__file__).parent / "published").glob("*.yaml"))]
DOCUMENTS += [
    yaml.safe_load(file.read_text()) for file in sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
]
APPLICATION = """\
kind: Application
name: app
nodes:
- {name: a, class: "m.py:A", args: [1, {$handle: llm}], kwargs: {x: [2]}, replicas: 2, shards: 2, userConfig: {y: 1}}
- {name: b, function: "m:b", memory: 1Gi, gpus: 1, gpuShare: 0.5, startTimeout: 5s, scheduling: {policy: fifo}}
- {name: c, function: "m:c", scaling: {min: 0, max: 3, upDelay: 2s}}
- {name: llm, model: m}
calls:
- {id: one, node: a, method: run, args: [{$input: [0, {attribute: z}]}]}
- {id: two, node: b, kwargs: {v: [{$step: one}]}}
output: [{$step: two}, {$input: []}]
ingress: {preprocessor: "m.py:f", replicas: 2}
pythonPath: [lib]
scaling: {policy: panic, parameters: {target: 2}, max: 4}
"""
DOCUMENTS.append(yaml.safe_load(APPLICATION))
SCALED = """\
deployments:
- name: m
  model: m
  engine: {type: simulated}
  scaling:
    policy: max-of
    parameters:
      policies:
      - {policy: budget, parameters: {policy: {policy: panic, parameters: {target: 3}}, perHour: 9}}
      - {policy: scheduled, parameters: {entries: [{cron: 0 9 * * *, replicas: 2, duration: 8h}], timeZone: +01:00}}
    min: 0
    max: 4
    costPerReplicaHour: 2
    interval: 5s
    metrics: [{name: a, url: "http://p:9090", query: up}]
"""
DOCUMENTS.append(yaml.safe_load(SCALED))

WRONG = st.sampled_from(
    [None, "", "x", 0, -1, 1.5, True, [], {}, [None], {"x": 1}, ["x"], "queue-scorer", float("nan")]
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in inside for place in places(value, (*path, key)))]


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    data = copy.deepcopy(data)
    parent = data
    for step in path[:-1]:
        parent = parent[step]
    if value is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return data


def problems_of(text: str) -> tuple[object, ...]:
    """None if there is a plan. A refusal without a problem would be a riddle."""
    try:
        load(text)
    except ConfigError as error:
        return error.problems or pytest.fail("refused without a problem")
    return ()


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    data = draw(st.sampled_from(DOCUMENTS))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(data)))
        data = changed(data, path, draw(WRONG | st.just(...)) if path else draw(WRONG))
    return data


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged())
def test_a_damaged_document_gives_a_plan_or_problems_with_lines(data: Any) -> None:
    text = yaml.safe_dump(data, sort_keys=False)
    for problem in problems_of(text):
        assert isinstance(problem, Problem)
        assert 1 <= problem.line <= text.count("\n") + 1


@settings(max_examples=examples(100), deadline=None)
@given(st.text(alphabet=st.sampled_from("ab:-[]{}&*<> \n\t'\"#|?!%@`,0"), max_size=60))
def test_any_text_gives_a_plan_or_problems(text: str) -> None:
    problems_of(text)


def test_the_same_document_gives_the_same_problems_each_time() -> None:
    text = "plugins:\n- type: nope\n- type: queue-scorer\n  parameter: {}\n"
    assert problems_of(text) == problems_of(text) != ()
    assert json_schema() == json_schema()

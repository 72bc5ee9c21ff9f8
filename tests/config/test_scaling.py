"""The `scaling` of deployments, nodes and applications: what it builds, and everything that can be wrong with it."""
# ruff: noqa: E501 (tables: what was written, and what is said of it)

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.config import load_application, load_manifest
from pointsman.config.plan import DeploymentPlan, ScalingPlan
from pointsman.config.registry import scaling_policies
from pointsman.errors import ConfigError
from pointsman.scaling import SCALING_POLICIES, Budget, MaxOf, QueueDepth, TargetOngoing

OWN = """
def hours(view, day: int = 3):
    "As many as by day."
    return day

class Own:
    def __init__(self, most: int = 2): self.most = most
    def desired_replicas(self, view): return self.most

class Nothing:
    pass

NUMBER = 5
"""
APPLICATION = """\
kind: Application
name: app
nodes:
- name: a
  class: m.py:A
- name: b
  function: m.py:b
calls:
- {id: one, node: a, args: [{$input: []}]}
- {id: two, node: b, args: [{$step: one}]}
output: {$step: two}
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_scaling.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_scaling", None)


def manifest(scaling: str, more: str = "") -> str:
    return f"deployments:\n- name: m\n  model: m\n  engine: {{type: simulated}}\n{more}  scaling: {scaling}\n"


def plan(scaling: str, more: str = "") -> DeploymentPlan:
    [made] = load_manifest(manifest(scaling, more)).deployments
    return made


def scaling(text: str, more: str = "") -> ScalingPlan:
    made = plan(text, more).scaling
    assert made is not None
    return made


def found(text: str) -> list[str]:
    try:
        load_application(text, file="f") if "Application" in text else load_manifest(text, file="f")
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_the_default_is_so_many_requests_per_instance() -> None:
    made = scaling("{max: 8}")
    assert isinstance(made.policy, TargetOngoing)
    assert made.policy_name == "target-ongoing"
    assert (made.limits.min_replicas, made.limits.max_replicas, made.limits.first) == (1, 8, 1)
    assert plan("{max: 8}").desired.replicas == 1


def test_every_limit_reaches_the_guard() -> None:
    limits = scaling(
        "{min: 0, max: 8, initial: 2, upDelay: 1s, downDelay: 2s, upFactor: 0.5, downFactor: 0.25, maxStep: 3, "
        "cooldown: 4s, idleTimeout: 5s, interval: 6s, timeLimit: 7s}"
    ).limits
    assert (limits.min_replicas, limits.max_replicas, limits.initial_replicas) == (0, 8, 2)
    assert (limits.up_delay_s, limits.down_delay_s, limits.cooldown_s, limits.idle_timeout_s) == (1, 2, 4, 5)
    assert (limits.up_factor, limits.down_factor, limits.max_step) == (0.5, 0.25, 3)
    assert (limits.interval_s, limits.time_limit_s) == (6, 7)


def test_replicas_beside_it_are_how_many_there_are_at_first() -> None:
    made = plan("{min: 0, max: 8}", "  replicas: 3\n")
    assert made.desired.replicas == 3
    assert made.scaling is not None
    assert made.scaling.limits.first == 3
    assert plan("{min: 0, max: 8}").desired.replicas == 0
    assert "0 to 8 x simulated" in made.summary()


def test_policies_of_ones_own_are_classes_or_functions() -> None:
    assert scaling("{policy: 'own_scaling:Own', parameters: {most: 5}, max: 8}").policy.most == 5
    assert scaling("{policy: 'own_scaling:hours', max: 8}").policy(None) == 3
    assert scaling("{policy: 'own_scaling:hours', parameters: {day: 6}, max: 8}").policy(None) == 6


def test_policies_may_be_inside_others() -> None:
    inner = "{policy: max-of, parameters: {policies: [{policy: target-ongoing, parameters: {target: 7}}, {policy: queue-depth}]}}"
    made = scaling(f"{{policy: budget, parameters: {{perHour: 3, policy: {inner}}}, max: 8, costPerReplicaHour: 2}}")
    assert isinstance(made.policy, Budget)
    assert made.cost_per_replica_hour == 2
    most = made.policy.policy
    assert isinstance(most, MaxOf)
    first, second = most.policies
    assert isinstance(first, TargetOngoing)
    assert first.target == 7
    assert isinstance(second, QueueDepth)


def test_the_recipe_is_of_the_policy_and_not_of_its_limits() -> None:
    assert scaling("{max: 8}").recipe == scaling("{max: 3, min: 0, policy: target-ongoing}").recipe
    assert scaling("{max: 8}").recipe != scaling("{max: 8, parameters: {target: 9}}").recipe


def test_every_built_in_policy_is_known_and_says_what_it_is_for() -> None:
    assert {kind.name for kind in scaling_policies()} == set(SCALING_POLICIES)
    assert [kind.name for kind in scaling_policies() if not kind.summary] == []


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("{max: 0}", "f:5: deployments[0].scaling.max: must be at least 1, found 0"),
        ("{min: 1}", 'f:5: deployments[0].scaling: field "max" is missing'),
        ("{min: 3, max: 2}", "f:5: deployments[0].scaling.max: must be at least min, which is 3, found 2"),
        ("{max: 2, initial: 3}", "f:5: deployments[0].scaling.initial: must be between min and max of its scaling, 1 and 2, found 3"),
        ("{max: 2, upDelay: -1s}", 'f:5: deployments[0].scaling.upDelay: must be at least 0, found "-1s"'),
        ("{max: 2, upFactor: 2}", "f:5: deployments[0].scaling.upFactor: must be at most 1, found 2"),
        ("{max: 2, polcy: x}", 'f:5: deployments[0].scaling.polcy: unknown field; did you mean "policy"?'),
        ("{max: 2, policy: ''}", "f:5: deployments[0].scaling.policy: must not be empty"),
        ("{max: 2, policy: target-ongoin}", 'f:5: deployments[0].scaling.policy: there is no scaling policy "target-ongoin"; did you mean "target-ongoing"?'),
        ("{max: 2, parameters: {targt: 2}}", 'f:5: deployments[0].scaling.parameters.targt: unknown parameter; did you mean "target"?'),
        ("{max: 2, parameters: {target: 0}}", "f:5: deployments[0].scaling: target must be above 0, found 0"),
        ("{max: 2, policy: 'own_scaling:Nothing'}", 'f:5: deployments[0].scaling.policy: "own_scaling:Nothing" is not a scaling policy: it needs a method desired_replicas(view)'),
        ("{max: 2, policy: 'own_scaling:NUMBER'}", 'f:5: deployments[0].scaling.policy: "own_scaling:NUMBER" is not a class or function but a int'),
        ("{max: 2, policy: 'own_scaling:hours', parameters: {dya: 2}}", 'f:5: deployments[0].scaling.parameters.dya: unknown parameter; did you mean "day"?'),
        ("{max: 2, policy: 'own_scaling:hours', parameters: {day: many}}", 'f:5: deployments[0].scaling.parameters.day: expected a whole number, found "many"'),
        ("{max: 2, policy: max-of, parameters: {policies: [{policy: nope}]}}", 'f:5: deployments[0].scaling.parameters.policies[0].policy: there is no scaling policy "nope"; known: budget, max-of, min-of, '),
        ("{max: 2, policy: max-of, parameters: {policies: [{parameters: {}}]}}", 'f:5: deployments[0].scaling.parameters.policies[0]: field "policy" is missing'),
        ("{max: 2, policy: max-of, parameters: {policies: []}}", "f:5: deployments[0].scaling: policies is empty; name at least one"),
        ("{max: 2, metrics: [{name: '', url: 'http://p', query: up}]}", "f:5: deployments[0].scaling.metrics[0].name: must not be empty"),
        ("{max: 2, metrics: [{name: a, url: 'p:9090', query: up}]}", "f:5: deployments[0].scaling.metrics[0].url: expected http://host:port of a Prometheus, found 'p:9090'"),
    ],
)  # fmt: skip
def test_problems_with_their_lines(written: str, problem: str) -> None:
    [told] = found(manifest(written))
    assert told.startswith(problem)


def test_problems_with_what_stands_beside_it() -> None:
    [told] = found(manifest("{max: 2}", "  replicas: 3\n"))
    assert told == "f:5: deployments[0].replicas: must be between min and max of its scaling, 1 and 2, found 3"
    [told] = found(manifest("{max: 2, initial: 1}", "  replicas: 2\n"))
    assert told == "f:6: deployments[0].scaling.initial: replicas beside it says the same; keep one of them"
    [told] = found(manifest("{max: 2}").replace("engine: {type: simulated}", "endpoints: [{url: 'http://a:1'}]"))
    assert told.startswith("f:5: deployments[0].scaling: starts and stops instances of an engine, and there is none")


def nodes(text: str) -> dict[str, ScalingPlan | None]:
    return {one.name: one.scaling for one in load_application(text).deployments}


def test_a_node_is_scaled_as_a_deployment_is() -> None:
    own = APPLICATION.replace(
        "class: m.py:A", "class: m.py:A\n  replicas: 2\n  scaling: {max: 4, parameters: {target: 3}}"
    )
    made = nodes(own)
    assert made["app.b"] is None
    assert made["app.a"] is not None
    assert made["app.a"].policy.target == 3
    assert made["app.a"].limits.first == 2


def test_a_built_in_policy_of_an_application_is_asked_for_each_node() -> None:
    text = (
        APPLICATION.replace("class: m.py:A", "class: m.py:A\n  scaling: {max: 9}")
        + "scaling: {max: 4, parameters: {target: 3}}\n"
    )
    application = load_application(text)
    assert application.scaling is None
    made = nodes(text)
    assert made["app.a"] is not None
    assert made["app.b"] is not None
    assert (made["app.a"].limits.max_replicas, made["app.b"].limits.max_replicas) == (9, 4)
    assert made["app.a"].policy.target == made["app.b"].policy.target == 3


def test_a_policy_of_ones_own_is_asked_once_for_all_that_have_none_themselves() -> None:
    text = APPLICATION.replace("class: m.py:A", "class: m.py:A\n  scaling: {policy: queue-depth, max: 9}")
    application = load_application(text + "scaling: {policy: 'own_scaling:hours', max: 4}\n")
    assert application.scaling is not None
    assert application.scaling.policy(None) == 3
    first, second = application.deployments
    assert first.scaling is not None
    assert isinstance(first.scaling.policy, QueueDepth)
    assert second.scaling is not None
    assert second.scaling.policy is None
    assert second.scaling.limits.max_replicas == 4
    assert "scaling: {policy: 'own_scaling:hours', max: 4}" in application.text


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("class: m.py:A", "class: m.py:A\n  scaling: {max: 0}", "f:6: nodes[0].scaling.max: must be at least 1, found 0"),
        ("function: m.py:b", "model: llm\n  scaling: {max: 2}", "f:8: nodes[1].scaling: is of a deployment of the manifest; say it there"),
        ("output:", "scaling: {max: 0}\noutput:", "f:11: scaling.max: must be at least 1, found 0"),
        ("output:", "scaling: {policy: nope, max: 2}\noutput:", 'f:11: scaling.policy: there is no scaling policy "nope"'),
    ],
)  # fmt: skip
def test_problems_of_applications(old: str, new: str, problem: str) -> None:
    told = found(APPLICATION.replace(old, new, 1))
    assert told
    assert told[0].startswith(problem)

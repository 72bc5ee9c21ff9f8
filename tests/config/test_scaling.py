"""The `scaling` of deployments, nodes and applications: what it builds, and everything that can be wrong with it."""
# ruff: noqa: E501 (tables: what was written, and the message)

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from pointsman.config import load_application, load_manifest
from pointsman.config.plan import DeploymentPlan
from pointsman.config.registry import scaling_policies
from pointsman.errors import ConfigError
from pointsman.parameters import unmarked
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.events import Arrived, Refuse, TimerFired
from pointsman.scaling import (
    SCALING_POLICIES,
    Budget,
    MaxOf,
    QueueDepth,
    ScalingLimits,
    ScheduleEntry,
    TargetOngoing,
)
from pointsman.scaling.limits import MetricQuery, ScalingPlan
from pointsman.types import RequestMetadata

OWN = """
def hours(view, day: int = 3):
    "As many as by day."
    return day

class Own:
    def __init__(self, most: int = 2): self.most = most
    def desired_replicas(self, view): return self.most

class Nothing:
    pass

class Waiting:
    async def desired_replicas(self, view): return 2

class Picky:
    def __init__(self, most: int = 2):
        if most > 9: raise ValueError(f"most is {most}; it must be at most 9")
    def desired_replicas(self, view): return 2

async def waiting(view): return 2
def yielding(view): yield 2

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
    assert made.limits == ScalingLimits(max_replicas=8), "the same by default as in Python"
    assert scaling("{min: 2, max: 2}").limits.first == 2


def test_every_limit_reaches_the_guard() -> None:
    limits = scaling(
        "{min: 0, max: 8, initial: 2, upDelay: 1s, downDelay: 2s, upFactor: 0.5, downFactor: 0.25, maxStep: 3, "
        "cooldown: 4s, idleTimeout: 5s, interval: 6s, timeLimit: 7s, wait: 8s, turn: 9s}"
    ).limits
    assert (limits.min_replicas, limits.max_replicas, limits.initial_replicas) == (0, 8, 2)
    assert (limits.up_delay_s, limits.down_delay_s, limits.cooldown_s, limits.idle_timeout_s) == (1, 2, 4, 5)
    assert (limits.up_factor, limits.down_factor, limits.max_step) == (0.5, 0.25, 3)
    assert (limits.interval_s, limits.time_limit_s, limits.wait_s, limits.turn_s) == (6, 7, 8, 9)
    assert scaling("{max: 8, interval: 100ms}").limits.interval_s == 0.1, "not too short"


FLOW = "  scheduling: {config: {featureGates: [flowControl], flowControl: {noEndpointRequestTTL: 7s}}}\n"


@pytest.mark.parametrize(
    ("section", "more", "words"),
    [
        ("{min: 0, max: 2}", "", "the limit is 300 s (scaling.wait)"),
        ("{min: 0, max: 2}", "  scheduling: {policy: fifo}\n", "the limit is 300 s (scaling.wait)"),
        ("{min: 0, max: 2, wait: 9s}", "  scheduling: {policy: fifo}\n", "the limit is 9 s (scaling.wait)"),
        ("{min: 1, max: 2, wait: 9s}", "", "the limit is 9 s (scaling.wait)"),
        ("{min: 1, max: 2}", "", "the limit is 60 s (flowControl.noEndpointRequestTTL)"),
        ("{min: 0, max: 2}", FLOW, "the limit is 7 s (flowControl.noEndpointRequestTTL)"),
        ("{min: 0, max: 2, wait: 9s}", FLOW, "the limit is 9 s (scaling.wait)"),
    ],
)
def test_how_long_requests_wait_for_a_first_instance(section: str, more: str, words: str) -> None:
    dispatcher = Dispatcher(plan(section, more).dispatch_plan())
    dispatcher.handle(Arrived((RequestMetadata("r", model_name="m"),)), 0.0)
    [refused] = [one for one in dispatcher.handle(TimerFired(), 1e6) if isinstance(one, Refuse)]
    assert words in str(refused.refusal.reason)


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
    assert first.ongoing_per_replica == 7
    assert isinstance(second, QueueDepth)


def test_what_a_prometheus_is_asked_is_part_of_it() -> None:
    made = scaling("{max: 2, metrics: [{name: pages, url: 'https://p:9090/x', query: sum(pages)}]}")
    assert made.metrics == (MetricQuery("pages", "https://p:9090/x", "sum(pages)"),)


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
        ("{max: 2, parameters: 5}", "f:5: deployments[0].scaling.parameters: expected a mapping (field: value), found 5"),
        ("{max: 2, parameters: {targt: 2}}", 'f:5: deployments[0].scaling.parameters.targt: unknown parameter; did you mean "target"?'),
        ("{max: 2, parameters: {target: 0}}", "f:5: deployments[0].scaling.parameters.target: must be above 0, found 0"),
        ("{max: 2, parameters: {lookBack: 0s}}", 'f:5: deployments[0].scaling.parameters.lookBack: must be above 0, found "0s"'),
        ("{max: 2, policy: panic, parameters: {stableWindow: 5s}}", "f:5: deployments[0].scaling.parameters.stableWindow: stableWindow must not be shorter than panicWindow, found 5 s and 6 s"),
        ("{max: 2, policy: slo-attainment, parameters: {target: 99}}", "f:5: deployments[0].scaling.parameters.target: must be below 1, found 99"),
        ("{max: 2, policy: token-throughput, parameters: {kvTarget: 80}}", "f:5: deployments[0].scaling.parameters.kvTarget: must be at most 1, found 80"),
        ("{max: 2, policy: token-throughput, parameters: {kvTarget: null}}", "f:5: deployments[0].scaling.parameters.tokensPerSPerReplica: tokensPerSPerReplica or kvTarget must be given"),
        ("{max: 2, policy: predictive, parameters: {unserved: 2}}", "f:5: deployments[0].scaling.parameters.unserved: must be below 1, found 2"),
        ("{max: 2, policy: scheduled, parameters: {timeZone: Mars, entries: [{cron: 0 9 * * *, replicas: 1}]}}", 'f:5: deployments[0].scaling.parameters.timeZone: there is no time zone "Mars" here; write for example'),
        ("{max: 2, policy: scheduled, parameters: {entries: [{cron: 0 8 31 2 *, replicas: 1}]}}", 'f:5: deployments[0].scaling.parameters.entries[0].cron: "0 8 31 2 *" never comes: there is no day 31 in feb'),
        ("{max: 2, policy: scheduled, parameters: {entries: []}}", "f:5: deployments[0].scaling.parameters.entries: entries is empty; write for example"),
        ("{max: 2, interval: 99ms}", "f:5: deployments[0].scaling.interval: must be at least 100ms, found 99ms: measuring and calling the policy take"),
        ("{max: 2, policy: 'own_scaling:waiting'}", 'f:5: deployments[0].scaling.policy: "own_scaling:waiting" is async or yields; it must be a plain function'),
        ("{max: 2, policy: 'own_scaling:yielding'}", 'f:5: deployments[0].scaling.policy: "own_scaling:yielding" is async or yields; it must be a plain function'),
        ("{max: 2, policy: 'own_scaling:Waiting'}", 'f:5: deployments[0].scaling.policy: "desired_replicas of own_scaling:Waiting" is async or yields; it must be'),
        ("{max: 2, policy: 'own_scaling:Picky', parameters: {most: 10}}", "f:5: deployments[0].scaling.parameters.most: most is 10; it must be at most 9"),
        ("{max: 2, policy: 'own_scaling:Nothing'}", 'f:5: deployments[0].scaling.policy: "own_scaling:Nothing" is not a scaling policy: it needs a method desired_replicas(view)'),
        ("{max: 2, policy: 'own_scaling:NUMBER'}", 'f:5: deployments[0].scaling.policy: "own_scaling:NUMBER" is not a class or function but a int'),
        ("{max: 2, policy: 'own_scaling:hours', parameters: {dya: 2}}", 'f:5: deployments[0].scaling.parameters.dya: unknown parameter; did you mean "day"?'),
        ("{max: 2, policy: 'own_scaling:hours', parameters: {day: many}}", 'f:5: deployments[0].scaling.parameters.day: expected a whole number, found "many"'),
        ("{max: 2, policy: max-of, parameters: {policies: [{policy: nope}]}}", 'f:5: deployments[0].scaling.parameters.policies[0].policy: there is no scaling policy "nope"; known: budget, max-of, min-of, '),
        ("{max: 2, policy: max-of, parameters: {policies: [{parameters: {}}]}}", 'f:5: deployments[0].scaling.parameters.policies[0]: field "policy" is missing'),
        ("{max: 2, policy: max-of, parameters: {policies: []}}", "f:5: deployments[0].scaling.parameters.policies: policies is empty; name at least one"),
        ("{max: 2, metrics: [{name: '', url: 'http://p', query: up}]}", "f:5: deployments[0].scaling.metrics[0].name: must not be empty"),
        ("{max: 2, metrics: [{name: a, url: 'http://p:abc', query: up}]}", "f:5: deployments[0].scaling.metrics[0].url: expected http://host:port of a Prometheus, found \"http://p:abc\""),
        ("{max: 2, metrics: [{name: a, url: 'http://p:99999/x', query: up}]}", "f:5: deployments[0].scaling.metrics[0].url: expected http://host:port of a Prometheus, found \"http://p:99999/x\""),
        ("{max: 2, metrics: [{name: a, url: 'http://[::1', query: up}]}", "f:5: deployments[0].scaling.metrics[0].url: expected http://host:port of a Prometheus, found \"http://[::1\""),
        ("{max: 2, metrics: [{name: a, url: 'p:9090', query: up}]}", "f:5: deployments[0].scaling.metrics[0].url: expected http://host:port of a Prometheus, found \"p:9090\""),
        ("{max: 2, metrics: [{name: a, url: 'http://p', query: up}, {name: a, url: 'http://p', query: down}]}", 'f:5: deployments[0].scaling.metrics[1].name: there is already a metric "a" on line 5'),
    ],
)  # fmt: skip
def test_problems_with_their_lines(written: str, problem: str) -> None:
    [message] = found(manifest(written))
    assert message.startswith(problem)


NEEDED: dict[str, dict[str, Any]] = {
    "budget": {"policy": TargetOngoing(), "per_hour": 5.0},
    "scheduled": {"entries": [ScheduleEntry("0 9 * * *", 1)]},
}


def outside(annotation: Any) -> Iterator[float]:
    """Numbers that are just not what a parameter may be."""
    kind, marks = unmarked(annotation)
    for one in get_args(kind):
        yield from outside(one)
    for meta in (mark for mark in marks if isinstance(mark, msgspec.Meta)):
        yield from (bound for bound in (meta.gt, meta.lt) if bound is not None)
        yield from (bound - 0.1 for bound in (meta.ge,) if bound is not None)
        yield from (bound + 0.1 for bound in (meta.le,) if bound is not None)


@pytest.mark.parametrize(
    ("policy", "parameter", "value"),
    [
        (kind.name, name, value)
        for kind in scaling_policies()
        for name, field in kind.parameters.items()
        for value in outside(field.annotation)
    ],
)
def test_parameters_have_the_same_bounds_in_configuration_and_in_python(
    policy: str, parameter: str, value: float
) -> None:
    messages = found(manifest(f"{{max: 2, policy: {policy}, parameters: {{{parameter}: {value}}}}}"))
    assert any(f"scaling.parameters.{parameter}: must be " in one for one in messages)
    kind = next(kind for kind in scaling_policies() if kind.name == policy)
    with pytest.raises(ValueError, match=f"^{parameter} "):
        kind.build(**NEEDED.get(policy, {}) | {kind.parameters[parameter].name: value})


WRONG = """\
deployments:
- name: m
  model: m
  engine: {type: simulated}
  scaling:
    max: 3
    min: 4
    upDelay: never
    interval: 5ms
    parameters:
      target: -1
      lookBack: soon
      foo: 1
    metrics:
    - {name: a, url: p, query: up}
"""


def test_all_problems_of_a_section_are_told_at_once_each_at_its_line() -> None:
    section = "deployments[0].scaling"
    assert [message.removeprefix("f:").partition(": measuring")[0] for message in found(WRONG)] == [
        f"6: {section}.max: must be at least min, which is 4, found 3",
        f'8: {section}.upDelay: "never" is not a duration; write for example 200ms, 60s or 1m30s',
        f"9: {section}.interval: must be at least 100ms, found 5ms",
        f"11: {section}.parameters.target: must be above 0, found -1",
        f'12: {section}.parameters.lookBack: "soon" is not a duration; write for example 200ms, 60s or 1m30s',
        f"13: {section}.parameters.foo: unknown parameter; known: lookBack, target",
        f'15: {section}.metrics[0].url: expected http://host:port of a Prometheus, found "p"',
    ]


INNER = """\
deployments:
- name: m
  model: m
  engine: {type: simulated}
  scaling:
    max: 3
    policy: max-of
    parameters:
      policies:
      - policy: budget
        parameters:
          policy:
            policy: target-ongoing
            parameters:
              target: 0
          perHour: -1
      - policy: scheduled
        parameters:
          timeZone: Mars
          entries:
          - cron: 0 8 * *
            replicas: -1
            duration: x
"""


def test_problems_of_policies_inside_others_are_at_their_lines_too() -> None:
    policies = "deployments[0].scaling.parameters.policies"
    messages = [problem.removeprefix("f:").partition(";")[0] for problem in found(INNER)]
    assert messages == [
        f"15: {policies}[0].parameters.policy.parameters.target: must be above 0, found 0",
        f"16: {policies}[0].parameters.perHour: must be above 0, found -1",
        f'19: {policies}[1].parameters.timeZone: there is no time zone "Mars" here',
        f'21: {policies}[1].parameters.entries[0].cron: "0 8 * *" has 4 fields',
        f"22: {policies}[1].parameters.entries[0].replicas: must be at least 0, found -1",
        f'23: {policies}[1].parameters.entries[0].duration: "x" is not a duration',
    ]


BUDGET = "policy: budget, parameters: {policy: {policy: target-ongoing}, %s}"


@pytest.mark.parametrize(
    ("money", "beside", "problem"),
    [
        ("perHour: 5", "", "scaling: a budget must know what a replica costs; write costPerReplicaHour, above 0, in this section"),
        ("perHour: 5", "costPerReplicaHour: 0", "scaling.costPerReplicaHour: a budget must know"),
        ("perHour: 1, costPerReplicaHour: 1", "", "scaling.parameters.perHour: 1 does not pay for min, which is 2 and costs 2; raise it, or lower min"),
        ("perMonth: 1000", "costPerReplicaHour: 1", "scaling.parameters.perMonth: 1000 does not pay for min, which is 2 and costs 1344; raise it, or lower min"),
        ("perHour: 1, costPerReplicaHour: 0.1", "costPerReplicaHour: 1", "scaling.parameters.perHour: 1 does not pay"),
        ("perHour: 2, costPerReplicaHour: 1", "", None),
        ("perMonth: 1344, costPerReplicaHour: 1", "", None),
    ],
)  # fmt: skip
def test_a_budget_must_be_able_to_do_its_work(money: str, beside: str, problem: str | None) -> None:
    messages = found(manifest(f"{{min: 2, max: 3, {BUDGET % money}, {beside}}}"))
    assert len(messages) == (problem is not None)
    assert all(one.startswith(f"f:5: deployments[0].{problem}") for one in messages)


def test_a_budget_inside_another_policy_is_looked_at_too() -> None:
    budget = BUDGET % "perHour: 1, costPerReplicaHour: 1"
    [message] = found(manifest(f"{{min: 2, max: 3, policy: min-of, parameters: {{policies: [{{{budget}}}]}}}}"))
    assert message.startswith("f:5: deployments[0].scaling.parameters.policies[0].parameters.perHour: 1 does not pay")


def test_what_a_schedule_will_never_get_gives_a_warning() -> None:
    entries = "{entries: [{cron: 0 8 * * *, replicas: 50}, {cron: 0 20 * * *, replicas: 3}]}"
    message = '"0 8 * * *" wants 50, and there are never more than 3 (max)'
    alone = f"{{max: 3, policy: scheduled, parameters: {entries}}}"
    [warning] = load_manifest(manifest(alone)).warnings
    assert (warning.field, warning.message) == ("deployments[0].scaling.parameters", message)
    inside = f"{{max: 3, policy: max-of, parameters: {{policies: [{{policy: scheduled, parameters: {entries}}}]}}}}"
    [warning] = load_manifest(manifest(inside)).warnings
    assert (warning.field, warning.message) == ("deployments[0].scaling.parameters.policies[0].parameters", message)
    application = APPLICATION.replace("class: m.py:A", f"class: m.py:A\n  scaling: {alone}")
    assert message in [one.message for one in load_application(application).warnings]


def test_nothing_is_a_value_of_parameters_that_may_be_nothing() -> None:
    both = "{max: 2, policy: token-throughput, parameters: {tokensPerSPerReplica: 5, kvTarget: null}}"
    assert scaling(both).policy.kv is None


def test_problems_with_what_stands_beside_it() -> None:
    [message] = found(manifest("{max: 2}", "  replicas: 3\n"))
    assert message == "f:5: deployments[0].replicas: must be between min and max of its scaling, 1 and 2, found 3"
    [message] = found(manifest("{max: 2, initial: 1}", "  replicas: 2\n"))
    assert message == "f:6: deployments[0].scaling.initial: replicas sets the same number; keep one of them"
    [message] = found(manifest("{max: 2}").replace("engine: {type: simulated}", "endpoints: [{url: 'http://a:1'}]"))
    assert message.startswith("f:5: deployments[0].scaling: starts and stops instances of an engine, and there is none")


def nodes(text: str) -> dict[str, ScalingPlan | None]:
    return {one.name: one.scaling for one in load_application(text).deployments}


def test_a_node_is_scaled_as_a_deployment_is() -> None:
    own = APPLICATION.replace(
        "class: m.py:A", "class: m.py:A\n  replicas: 2\n  scaling: {max: 4, parameters: {target: 3}}"
    )
    made = nodes(own)
    assert made["app.b"] is None
    assert made["app.a"] is not None
    assert made["app.a"].policy.ongoing_per_replica == 3
    assert made["app.a"].limits.first == 2
    from_none = nodes(APPLICATION.replace("class: m.py:A", "class: m.py:A\n  scaling: {min: 0, max: 4}"))["app.a"]
    assert from_none is not None
    assert from_none.limits.first == 0


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
    assert made["app.a"].policy.ongoing_per_replica == made["app.b"].policy.ongoing_per_replica == 3
    made = nodes(text.replace("{max: 9}", "{policy: queue-depth, max: 9}"))
    assert made["app.a"] is not None
    assert isinstance(made["app.a"].policy, QueueDepth), "and its parameters are its own"


def test_a_policy_of_ones_own_is_asked_once_for_all_that_have_none_themselves() -> None:
    text = APPLICATION.replace("class: m.py:A", "class: m.py:A\n  scaling: {policy: queue-depth, max: 9}")
    application = load_application(text + "scaling: {policy: 'own_scaling:hours', max: 4}\n")
    assert application.scaling is not None
    assert application.scaling.policy(None) == 3
    first, second = application.deployments
    assert first.scaling is not None
    assert isinstance(first.scaling.policy, QueueDepth)
    assert second.scaling is not None
    assert (second.scaling.policy, second.scaling.policy_name, second.scaling.recipe) == (None, "", "[]")
    assert second.scaling.limits.max_replicas == 4
    assert "scaling: {policy: 'own_scaling:hours', max: 4}" in application.text


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("class: m.py:A", "class: m.py:A\n  scaling: {max: 0}", "f:6: nodes[0].scaling.max: must be at least 1, found 0"),
        ("function: m.py:b", "model: llm\n  scaling: {max: 2}", "f:8: nodes[1].scaling: belongs to the deployment in the manifest; set it there"),
        ("output:", "scaling: {max: 0}\noutput:", "f:11: scaling.max: must be at least 1, found 0"),
        ("output:", "scaling: {max: 2, parameters: {targt: 2}}\noutput:", 'f:11: scaling.parameters.targt: unknown parameter; did you mean "target"?'),
        ("output:", "scaling: {max: 2, parameters: 5}\noutput:", "f:11: scaling.parameters: expected a mapping (field: value), found 5"),
        ("output:", "scaling: {max: 2, parameters: {target: 0}}\noutput:", "f:11: scaling.parameters.target: must be above 0, found 0"),
        ("output:", "scaling: {max: 2, policy: []}\noutput:", "f:11: scaling.policy: expected text, found a list"),
        ("output:", "scaling: {policy: nope, max: 2}\noutput:", 'f:11: scaling.policy: there is no scaling policy "nope"'),
    ],
)  # fmt: skip
def test_problems_of_applications(old: str, new: str, problem: str) -> None:
    [message] = found(APPLICATION.replace(old, new, 1))
    assert message.startswith(problem)


def test_what_is_wrong_with_the_policy_of_an_application_is_told_once_and_its_nodes_are_looked_at_all_the_same() -> (
    None
):
    text = APPLICATION.replace("class: m.py:A", "class: m.py:A\n  scaling: {max: 9, upDelay: x}")
    messages = found(text + "scaling: {max: 4, parameters: {target: 0}}\n")
    assert [one.partition(":")[2].partition(": ")[2].partition(":")[0] for one in messages] == [
        "nodes[0].scaling.upDelay",
        "scaling.parameters.target",
    ]

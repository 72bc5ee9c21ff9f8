"""All scaled deployments on virtual time: which policy is due, what it sees, and what becomes of its answer."""

from collections.abc import Mapping
from typing import Any

import pytest

from pointsman.errors import PointsmanError, UnknownName
from pointsman.scaling import ApplicationView, DeploymentView, ScalingLimits, TooSlow
from pointsman.scaling.autoscaler import (
    Autoscaler,
    DeploymentScaling,
    Invocation,
    PolicyPlan,
    ScalingChange,
    ScalingSetup,
)
from pointsman.scaling.deployment import Load, ReplicaCounts, policy_problems
from pointsman.scaling.limits import ScalingPlan

NOON = 1_741_176_000.0


def plan(policy: Any = lambda view: 1, recipe: str = "1", **limits: Any) -> ScalingPlan:
    made = ScalingLimits(**{"max_replicas": 4, "interval_s": 10.0, **limits})
    return ScalingPlan(policy=policy, policy_name="policy", limits=made, recipe=recipe)


def alone(**plans: ScalingPlan) -> ScalingSetup:
    policies = tuple(PolicyPlan(name=name, plan=made, nodes={name: name}) for name, made in plans.items())
    return ScalingSetup({name: DeploymentScaling(plan=made) for name, made in plans.items()}, policies)


def autoscaler(setup: ScalingSetup, saved: Mapping[str, str] | None = None) -> Autoscaler:
    made = Autoscaler()
    made.configure(setup, saved or {})
    return made


def prepared(scaler: Autoscaler, key: str, now: float, **load: Any) -> Invocation:
    policy = scaler.policies[key]
    names = [one.name for one in scaler.members(policy)]
    made = scaler.invoke(policy, dict.fromkeys(names, Load(**load)), dict.fromkeys(names, ReplicaCounts()), now)
    assert made is not None
    return made


def called(scaler: Autoscaler, key: str, now: float, **load: Any) -> ScalingChange:
    policy = scaler.policies[key]
    policy.begin()
    invocation = prepared(scaler, key, now, **load)
    change = scaler.answered(invocation, invocation.call(), now)
    policy.end(now)
    return change


def due(scaler: Autoscaler, now: float) -> list[str]:
    return [one.plan.key for one in scaler.due(now)]


def test_a_policy_is_due_at_once_then_after_each_interval() -> None:
    scaler = autoscaler(alone(a=plan(), b=plan(interval_s=2.0)))
    assert due(scaler, NOON) == ["a", "b"]
    assert scaler.next_due_s(NOON) == 0.0
    for name in "ab":
        called(scaler, name, NOON)
    assert due(scaler, NOON + 1) == []
    assert scaler.next_due_s(NOON + 1) == 1.0
    assert due(scaler, NOON + 2) == ["b"]
    assert due(scaler, NOON + 10) == ["a", "b"]


def test_a_policy_that_runs_is_not_due_and_one_that_was_woken_meanwhile_is_due_again() -> None:
    scaler = autoscaler(alone(a=plan()))
    policy = scaler.policies["a"]
    policy.begin()
    assert (due(scaler, NOON + 60), scaler.next_due_s(NOON + 60)) == ([], None)
    scaler.wake("a")
    assert due(scaler, NOON + 60) == []
    policy.end(NOON + 60)
    assert due(scaler, NOON + 60) == ["a"]


def test_a_waiting_request_makes_its_policy_due_and_no_other() -> None:
    scaler = autoscaler(alone(a=plan(), b=plan()))
    for name in "ab":
        called(scaler, name, NOON)
    scaler.wake("b")
    scaler.wake("unknown")
    assert due(scaler, NOON + 1) == ["b"]


def test_a_clock_that_is_set_back_delays_no_policy_by_more_than_its_interval() -> None:
    scaler = autoscaler(alone(a=plan()))
    called(scaler, "a", NOON)
    assert due(scaler, NOON - 3600) == ["a"]
    assert scaler.next_due_s(NOON - 3600) == 0.0


def test_an_answer_changes_the_target_and_is_recorded() -> None:
    scaler = autoscaler(alone(a=plan(lambda view: 3)))
    change = called(scaler, "a", NOON)
    assert (change.retarget, [(one.before, one.after) for one in change.records]) == (True, [(1, 3)])
    assert scaler.targets() == {"a": 3}
    assert called(scaler, "a", NOON + 10) == ScalingChange()


def test_targets_keep_to_the_limits_of_the_setup_that_is_asked_about() -> None:
    scaler = autoscaler(alone(a=plan(lambda view: 4)))
    called(scaler, "a", NOON)
    assert scaler.targets(alone(a=plan(max_replicas=2))) == {"a": 2}
    assert scaler.targets(alone(a=plan(min_replicas=6, max_replicas=8))) == {"a": 6}
    assert scaler.targets(ScalingSetup({"a": DeploymentScaling(replicas=9)})) == {}
    assert scaler.targets() == {"a": 4}


def test_a_target_survives_a_new_configuration_and_a_restart() -> None:
    scaler = autoscaler(alone(a=plan(lambda view: 3), b=plan()))
    called(scaler, "a", NOON)
    assert scaler.configure(alone(a=plan(lambda view: 3)), {}) == ["b"]
    assert scaler.targets() == {"a": 3}
    again = autoscaler(alone(a=plan(lambda view: 3)), scaler.state())
    assert again.targets() == {"a": 3}
    assert autoscaler(alone(a=plan()), {"a": "written by another version"}).targets() == {"a": 1}


def counts(view: DeploymentView | ApplicationView) -> object:
    view.state["calls"] = view.state.get("calls", 0) + 1
    return 1 if isinstance(view, DeploymentView) else {}


def test_the_state_of_a_policy_survives_a_restart_and_is_not_for_another() -> None:
    scaler = autoscaler(alone(a=plan(counts)))
    for step in range(3):
        called(scaler, "a", NOON + step)
    again = autoscaler(alone(a=plan(counts)), scaler.state())
    assert again.deployments["a"].guard.policy_state == {"calls": 3}
    again.configure(alone(a=plan(counts, recipe="2")), {})
    assert again.deployments["a"].guard.policy_state == {}
    assert autoscaler(alone(a=plan(recipe="2")), scaler.state()).deployments["a"].guard.policy_state == {}


def test_a_call_that_is_too_slow_changes_neither_target_nor_state() -> None:
    scaler = autoscaler(alone(a=plan(counts)))
    invocation = prepared(scaler, "a", NOON)
    scaler.answered(invocation, TooSlow(0.5), NOON)
    invocation.call()  # it goes on, and writes to what it was given
    assert scaler.deployments["a"].guard.policy_state == {}
    assert [str(one) for one in policy_problems(scaler.deployments.values())] == [
        'the scaling policy policy of "a" took more than 0.5 s (timeLimit); the target stays 1'
    ]


def test_the_answer_of_a_policy_that_was_replaced_meanwhile_does_not_count() -> None:
    scaler = autoscaler(alone(a=plan(lambda view: 3)))
    invocation = prepared(scaler, "a", NOON)
    scaler.configure(alone(a=plan(lambda view: 2, recipe="2")), {})
    assert scaler.answered(invocation, 3, NOON) == ScalingChange()
    assert scaler.targets() == {"a": 1}


# Applications


def application(policy: Any) -> ScalingSetup:
    """Node "x" has two shards, node "y" one deployment."""
    inner = plan(None)
    nodes = {"app.x.0": "x", "app.y": "y"}
    return ScalingSetup(
        {
            "app.x.0": DeploymentScaling(plan=inner),
            "app.x.1": DeploymentScaling(follows="app.x.0"),
            "app.y": DeploymentScaling(plan=inner),
            "fixed": DeploymentScaling(replicas=2),
            "external": DeploymentScaling(replicas=0, external=True),
        },
        (PolicyPlan(name="app", plan=plan(policy), nodes=nodes, of_application=True),),
    )


def test_the_policy_of_an_application_sees_all_its_nodes_and_all_shards_follow() -> None:
    seen: list[ApplicationView] = []

    def together(view: ApplicationView) -> dict[str, int]:
        seen.append(view)
        return {"x": 2, "y": 3}

    scaler = autoscaler(application(together))
    called(scaler, "application app", NOON, running=5)
    assert {name: (view.name, view.ongoing) for name, view in seen[0].deployments.items()} == {
        "x": ("x", 5.0),
        "y": ("y", 5.0),
    }
    assert scaler.targets() == {"app.x.0": 2, "app.x.1": 2, "app.y": 3}
    scaler.wake("app.x.1")
    assert due(scaler, NOON + 1) == ["application app"]


def test_nodes_that_are_left_out_stay_and_a_bad_answer_is_bad_for_all() -> None:
    answers: list[object] = [{"y": 3}, {"z": 1}]
    scaler = autoscaler(application(lambda view: answers.pop(0)))
    called(scaler, "application app", NOON)
    assert scaler.targets() == {"app.x.0": 1, "app.x.1": 1, "app.y": 3}
    called(scaler, "application app", NOON + 10)
    assert len(policy_problems(scaler.deployments.values())) == 2


def test_the_state_of_an_applications_policy_survives_a_restart() -> None:
    scaler = autoscaler(application(counts))
    called(scaler, "application app", NOON)
    again = autoscaler(application(counts), scaler.state())
    assert again.policies["application app"].state == {"calls": 1}


# Operators


@pytest.mark.parametrize("name", ["app.x.0", "app.x.1", "app/x", "app.x"])
def test_a_node_is_found_by_any_of_its_names(name: str) -> None:
    assert autoscaler(application(counts)).find(name).name == "app.x.0"


def test_a_deployment_that_is_not_scaled_is_not_found() -> None:
    scaler = autoscaler(application(counts))
    with pytest.raises(UnknownName, match='unknown deployment "n"'):
        scaler.find("n")
    with pytest.raises(PointsmanError, match=r'"fixed" has a fixed number of instances, which is 2; give it'):
        scaler.find("fixed")
    with pytest.raises(PointsmanError, match=r'"external" has no engine: its servers are started by others'):
        scaler.find("external")


def test_an_override_holds_until_it_ends_or_is_released() -> None:
    scaler = autoscaler(alone(a=plan(max_replicas=3, down_delay_s=0.0)))
    called(scaler, "a", NOON)
    assert scaler.override("a", 3, 60.0, "Ada", NOON).retarget
    assert scaler.override("a", 3, 60.0, "Ada", NOON + 1) == ScalingChange(), "external scalers repeat themselves"
    called(scaler, "a", NOON + 50)
    assert scaler.targets() == {"a": 3}
    [over] = called(scaler, "a", NOON + 61).records
    assert "ended: 3 ordered by Ada" in over.why
    assert scaler.targets() == {"a": 1}
    scaler.override("a", 2, None, "Ada", NOON + 70)
    scaler.override("a", None, None, "Ada", NOON + 80)
    assert due(scaler, NOON + 80) == ["a"]
    called(scaler, "a", NOON + 80)
    assert scaler.targets() == {"a": 1}
    with pytest.raises(PointsmanError, match=r"between 1 and 3 \(scaling.min and max\), found 7"):
        scaler.override("a", 7, None, "Ada", NOON)

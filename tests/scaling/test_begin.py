"""Scaling that begins while instances run: it starts with their number, and `downDelay` holds from there."""

import msgspec

from pointsman.scaling.autoscaler import Autoscaler, DeploymentScaling, PolicyPlan, ScalingSetup
from pointsman.scaling.deployment import Load, ReplicaCounts, begin_records
from pointsman.scaling.limits import ScalingLimits, ScalingPlan


def scaled(**limits: object) -> ScalingSetup:
    """A deployment whose policy always wants one replica."""
    bounds = msgspec.convert({"min_replicas": 1, "max_replicas": 8, **limits}, ScalingLimits)
    plan = ScalingPlan(policy=lambda view: 1, policy_name="one", limits=bounds, recipe="[]")
    return ScalingSetup({"m": DeploymentScaling(plan=plan)}, (PolicyPlan(name="m", plan=plan, nodes={"m": "m"}),))


FIXED = ScalingSetup({"m": DeploymentScaling(replicas=8)})


def decide(scaler: Autoscaler, now: float) -> int:
    invocation = scaler.invoke(scaler.policies["m"], {"m": Load()}, {"m": ReplicaCounts(ready=8)}, now)
    assert invocation is not None
    scaler.answered(invocation, invocation.call(), now)
    return scaler.targets()["m"]


def test_the_number_that_runs_is_where_scaling_starts_and_down_delay_holds_it() -> None:
    scaler = Autoscaler()
    scaler.configure(FIXED, {})
    assert scaler.targets(scaled(), {}, {"m": 8}) == {"m": 8}, "as a plan shows it"
    scaler.configure(scaled(down_delay_s=300.0), {}, running={"m": 8})
    assert scaler.targets() == {"m": 8}
    [record] = begin_records(scaler.deployments.values(), 5.0)
    assert (record.before, record.after, record.why) == (8, 8, "scaling begins with the 8 that run")
    assert begin_records(scaler.deployments.values(), 6.0) == [], "it is recorded once"
    assert [decide(scaler, now) for now in (10.0, 200.0, 309.0, 311.0)] == [8, 8, 8, 1]


def test_it_starts_within_the_limits() -> None:
    scaler = Autoscaler()
    scaler.configure(FIXED, {})
    scaler.configure(scaled(max_replicas=4), {}, running={"m": 8})
    assert scaler.targets() == {"m": 4}
    [record] = begin_records(scaler.deployments.values(), 5.0)
    assert (record.before, record.after, record.bounded) == (8, 4, ("at most 4 (max)",))


def test_a_deployment_without_instances_starts_as_its_limits_say() -> None:
    scaler = Autoscaler()
    scaler.configure(scaled(initial_replicas=3), {}, running={"other": 5})
    assert scaler.targets() == {"m": 3}
    assert begin_records(scaler.deployments.values(), 1.0) == []


def test_after_a_restart_the_saved_target_goes_on_unless_the_number_was_fixed_meanwhile() -> None:
    before = Autoscaler()
    before.configure(scaled(initial_replicas=2), {})
    saved = before.state()
    after = Autoscaler()
    after.configure(scaled(), saved, running={"m": 8})
    assert after.targets() == {"m": 2}
    fixed = Autoscaler()
    fixed.configure(FIXED, saved)
    fixed.configure(scaled(), saved, running={"m": 8})
    assert fixed.targets() == {"m": 8}

"""A scaled deployment: start-ups, replicas, and what it can spare."""

from typing import Any

import pytest

from pointsman.control import InstanceStatus, Phase
from pointsman.control.instances import replica_counts
from pointsman.control.preemption import spare_replicas
from pointsman.reasons import Reason
from pointsman.scaling import DeploymentView, ScalingLimits, Wish
from pointsman.scaling.deployment import SavedDeployment, ScaledDeployment, scaling_summary
from pointsman.scaling.limits import ScalingPlan


def scaled(name: str = "m", followers: tuple[str, ...] = (), **limits: Any) -> ScaledDeployment:
    plan = ScalingPlan(policy=None, policy_name="any", limits=ScalingLimits(max_replicas=8, **limits), recipe="")
    made = ScaledDeployment(name, plan, plan, SavedDeployment())
    made.followers = followers
    return made


def instance(name: str, phase: Phase = Phase.READY, **facts: Any) -> InstanceStatus:
    fields: dict[str, Any] = {
        "host": "",
        "port": 0,
        "tls": False,
        "process": "1",
        "in_service": phase is Phase.READY,
        "restarts": 0,
        "reason": None,
        "since": 0.0,
        "until": None,
        "drain_asked": False,
        "endpoint": None,
        **facts,
    }
    return InstanceStatus(id=name, deployment=name.rpartition("-")[0], phase=phase, **fields)


def see(one: ScaledDeployment, instances: list[InstanceStatus], now: float) -> None:
    one.observed.observe_replicas(replica_counts(instances, one.members), now)


def test_each_start_up_is_counted_once() -> None:
    one = scaled()
    see(one, [instance("m-1", Phase.STARTING)], 0.0)
    assert one.observed.start_up_s is None
    see(one, [instance("m-1", start_up_s=4.0)], 1.0)
    assert one.observed.start_up_s == 4.0
    see(one, [instance("m-1", Phase.UNHEALTHY, start_up_s=4.0), instance("m-2", start_up_s=9.0)], 2.0)
    see(one, [instance("m-1", start_up_s=4.0), instance("m-2", start_up_s=9.0)], 3.0)
    assert one.observed.start_up_s == (4.0 + 9.0) / 2, "the first was not started again"
    see(one, [instance("m-1", Phase.BACKING_OFF, process=None, start_up_s=4.0)], 4.0)
    see(one, [instance("m-1", process="2", start_up_s=8.0)], 5.0)
    assert one.observed.start_up_s == 8.0, "the median of 4, 9 and 8"
    see(one, [instance("m-1", process="3")], 6.0)
    assert one.observed.start_up_s == 8.0, "it was adopted, and its start was not seen"


def test_a_replica_of_a_sharded_node_is_one_instance_of_each_shard() -> None:
    one = scaled("m.0", ("m.1",))
    shards = [
        instance("m.0-1"),
        instance("m.0-2"),
        instance("m.1-1"),
        instance("m.1-2", Phase.BACKING_OFF, unplaced=True),
        instance("other-1"),
    ]
    see(one, shards, 0.0)
    assert (one.observed.replicas.ready, one.observed.replicas.starting, one.observed.replicas.unplaced) == (1, 1, 1)


@pytest.mark.parametrize(
    ("ready", "limits", "loaded_s", "start_up_s", "free"),
    [
        (3, {"min_replicas": 1}, 60.0, 1.0, 2),  # all but the last
        (3, {"min_replicas": 2}, 60.0, 1.0, 1),
        (1, {"min_replicas": 1}, 1e6, 1.0, 0),  # it must have one
        (2, {"min_replicas": 0}, 29.0, 1.0, 1),  # its turn is 30 s
        (2, {"min_replicas": 0}, 31.0, 1.0, 2),
        (1, {"min_replicas": 0, "turn_s": 5.0}, 6.0, 1.0, 1),
        (1, {"min_replicas": 0, "turn_s": 5.0}, 6.0, 2.0, 0),  # five times as long as it took to start
        (1, {"min_replicas": 0, "turn_s": 5.0}, 11.0, 2.0, 1),
        (3, {"min_replicas": 1}, 3.0, 4.0, 0),  # it has just come: as long as it took to start
        (3, {"min_replicas": 1}, 11.0, 600.0, 2),  # or ten seconds
    ],
)
def test_spare_replicas(ready: int, limits: dict[str, Any], loaded_s: float, start_up_s: float, free: int) -> None:
    one = scaled(**limits)
    see(one, [instance(f"m-{number}", start_up_s=start_up_s) for number in range(ready)], 100.0)
    assert spare_replicas(one, 100.0 + loaded_s) == free
    one.guard.set_override(ready, None, "an operator", 100.0)
    assert spare_replicas(one, 100.0 + loaded_s) == 0, "ordered to stay"


def test_a_sharded_node_has_no_spare_replicas() -> None:
    one = scaled("m.0", ("m.1",), min_replicas=0)
    see(one, [instance("m.0-1", start_up_s=1.0), instance("m.1-1", start_up_s=1.0)], 0.0)
    assert (one.observed.replicas.ready, spare_replicas(one, 1e6)) == (1, 0)


def test_the_summary_has_the_last_change_and_its_bounds() -> None:
    one = scaled(min_replicas=1)
    assert scaling_summary(one)["last"] is None
    one.guard.limits = ScalingLimits(min_replicas=3, max_replicas=8)
    one.decide(DeploymentView(name="m", now=100.0, replicas=1, target=1), Wish(0, "no requests: 0"))
    one.note(Reason("waits-for-room"), 101.0, Reason("instances-unplaced"))
    last = scaling_summary(one)["last"]
    assert (last["before"], last["after"], last["why"]) == (1, 3, "no requests: 0")
    assert last["bounded"] == ["at least 3 (min)"]
    assert [record.by for record in one.records] == ["", "pointsman"]

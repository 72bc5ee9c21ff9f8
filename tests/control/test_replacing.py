"""Rollouts change only what differs, and never cost a ready instance."""

from typing import Any

import pytest

from pointsman.control.desired import DesiredDeployment
from pointsman.control.events import (
    Answered,
    Applied,
    ControllerEvent,
    ControllerTimer,
    DrainAsked,
    Exited,
    Launch,
    RequestsFail,
)
from pointsman.reasons import Reason
from tests.control.worlds import World, deployment, launched, said, wish


def running(*deployments: DesiredDeployment) -> World:
    world = World()
    world.apply(*deployments)
    world.behave()
    return world


def test_more_replicas_start_only_the_difference() -> None:
    world = running(deployment(replicas=1))
    assert world.apply(deployment(replicas=3)) == ["Launch m-2", "Launch m-3"]


def test_fewer_replicas_stop_only_the_difference_newest_first() -> None:
    world = running(deployment(replicas=3))
    assert world.apply(deployment(replicas=1)) == [
        "Update m-2, closed",
        "AwaitDrained m-2",
        "Update m-3, closed",
        "AwaitDrained m-3",
    ]


def test_surplus_instances_that_do_not_serve_are_stopped_first() -> None:
    world = running(deployment(replicas=3))
    world.tell(Exited("m-1", "exit code 1"))
    assert world.apply(deployment(replicas=2)) == []
    assert world.phases() == {"m-2": "ready", "m-3": "ready"}


def test_an_instance_gets_the_smallest_free_number() -> None:
    world = running(deployment(replicas=3))
    world.tell(DrainAsked("m-2"))
    world.behave(1.0)
    assert world.ready() == ["m-1", "m-3", "m-4"]
    assert world.apply(deployment(replicas=4)) == ["Launch m-2"]


def test_an_instance_of_a_removed_deployment_does_not_come_back() -> None:
    world = running(deployment())
    world.apply()
    assert world.apply(deployment()) == ["Launch m-2"]


@pytest.mark.parametrize(
    "change", [{"max_concurrency": 7}, {"labels": {"zone": "b"}}, {"aliases": ("chat",)}, {"engine_slots": 3}]
)
def test_settings_that_need_no_restart_are_updated(change: dict[str, Any]) -> None:
    world = running(deployment(replicas=2))
    assert world.apply(deployment(replicas=2, **change)) == ["Update m-1", "Update m-2"]
    assert world.apply(deployment(replicas=2, **change)) == []


def test_a_starting_instance_is_admitted_with_the_latest_settings() -> None:
    world = World()
    world.apply(deployment())
    assert world.apply(deployment(max_concurrency=7)) == []
    world.behave()
    assert world.in_service["m-1"].max_concurrency == 7


def test_a_closed_instance_is_updated_and_stays_closed() -> None:
    world = running(deployment(replicas=1))
    world.tell(DrainAsked("m-1"))
    assert world.apply(deployment(replicas=1, labels={"zone": "b"})) == []
    assert world.in_service["m-1"].labels == {}, "it is to leave, and is left as it is"


def test_a_new_recipe_replaces_instances_one_by_one() -> None:
    world = running(deployment(replicas=2))
    log = world.apply(deployment(replicas=2, version=1))
    while world.pending:
        log += said(world.tell(world.pending.popleft()))
    assert log == [
        "Launch m-3",
        "Probe m-3, readiness",
        "Admit m-3",
        "Update m-1, closed",
        "AwaitDrained m-1",
        "Launch m-4",
        "Withdraw m-1",
        "Terminate m-1",
        "Probe m-4, readiness",
        "Admit m-4",
        "Update m-2, closed",
        "AwaitDrained m-2",
        "Withdraw m-2",
        "Terminate m-2",
    ]
    assert world.ready() == ["m-3", "m-4"]


def test_a_broken_recipe_costs_no_ready_instance() -> None:
    world = running(deployment(replicas=2))
    world.apply(deployment(replicas=2, version=1))
    for _ in range(2):
        world.tell(Exited("m-3", "exit code 1: no such model"))
        world.tell(ControllerTimer(), (world.status("m-3").until or 0.0) + 0.001)
    assert world.ready() == ["m-1", "m-2"]
    assert str(world.status("m-1").reason) == "to be replaced: engine.version 0 -> 1"
    assert world.status("m-3").restarts == 2


def test_going_back_to_the_old_recipe_keeps_what_runs() -> None:
    world = running(deployment(replicas=2))
    world.apply(deployment(replicas=2, version=1))
    assert world.apply(deployment(replicas=2)) == ["Terminate m-3"]
    assert world.status("m-1").reason is None
    world.behave(1.0)
    assert world.ready() == ["m-1", "m-2"]


def test_an_instance_that_does_not_serve_is_restarted_in_its_place() -> None:
    world = running(deployment(replicas=3))
    world.tell(Exited("m-1", "exit code 1"))
    world.tell(Exited("m-2", "exit code 1"))
    world.behave(1.0)
    world.tell(Exited("m-1", "exit code 1"))
    world.tell(Exited("m-2", "exit code 1"))
    world.tell(Exited("m-3", "exit code 1"))
    world.tell(ControllerTimer(), world.now + 1.5)
    assert world.phases() == {"m-1": "backing off", "m-2": "backing off", "m-3": "starting"}
    assert world.apply(deployment(replicas=3, version=1)) == ["Terminate m-3", "Launch m-1", "Launch m-2"]
    assert said(world.tell(Exited("m-3", "ended"))) == ["Launch m-3"], "at once, whatever the backoff was"
    world.behave(1.0)
    assert {one: world.status(one).reason for one in world.ready()} == dict.fromkeys(["m-1", "m-2", "m-3"])
    world.tell(Exited("m-3", "exit code 1"))
    assert world.phases()["m-3"] == "backing off", "the first time with the new recipe"
    assert world.status("m-3").until == world.now + 1.0


def test_an_outdated_instance_that_crashes_restarts_with_the_new_recipe() -> None:
    world = running(deployment(replicas=2))
    world.apply(deployment(replicas=2, version=1))
    assert said(world.tell(Exited("m-1", "exit code 1"))) == ["Withdraw m-1", "Launch m-1"]


def test_a_new_recipe_and_more_replicas_at_once() -> None:
    world = running(deployment(replicas=1))
    assert world.apply(deployment(replicas=3, version=1)) == ["Launch m-2", "Launch m-3", "Launch m-4"]
    world.behave(1.0)
    assert world.ready() == ["m-2", "m-3", "m-4"]


def test_a_new_recipe_and_fewer_replicas_at_once() -> None:
    world = running(deployment(replicas=3))
    world.apply(deployment(replicas=1, version=1))
    assert world.phases() == {"m-1": "draining", "m-2": "draining", "m-3": "ready", "m-4": "starting"}


def test_scaling_down_during_a_rollout_stops_instances_that_are_not_ready() -> None:
    world = running(deployment(replicas=3))
    world.tell(Exited("m-3", "exit code 1"))
    assert world.apply(deployment(replicas=3, version=1)) == ["Launch m-3", "Launch m-4"]
    assert world.apply(deployment(replicas=2, version=1)) == ["Terminate m-4"]
    assert world.ready() == ["m-1", "m-2"]


def test_an_instance_of_the_old_recipe_keeps_its_model_and_limits_until_it_is_replaced() -> None:
    world = running(deployment(engine_slots=4))
    assert world.apply(deployment(version=1, model="other", engine_slots=8)) == ["Launch m-2"]
    assert (world.in_service["m-1"].model_name, world.in_service["m-1"].max_concurrency) == ("llama", 4)
    world.behave(1.0)
    assert (world.in_service["m-2"].model_name, world.in_service["m-2"].max_concurrency) == ("other", 8)


def test_without_an_engine_nothing_is_started() -> None:
    world = running(deployment(replicas=2))
    world.apply(deployment(replicas=2, engine=None))
    world.behave(1.0)
    assert world.phases() == {}


def test_only_a_removed_deployment_is_drained() -> None:
    world = running(deployment("m"), deployment("x"))
    assert world.apply(deployment("x")) == ["Update m-1, closed", "AwaitDrained m-1"]
    world.behave(1.0)
    assert world.phases() == {"x-1": "ready"}


@pytest.mark.parametrize("trouble", [RequestsFail("m-2", Reason("status 500")), DrainAsked("m-2")])
def test_the_least_useful_instances_are_stopped_first(trouble: ControllerEvent) -> None:
    world = running(deployment(replicas=3))
    world.apply(deployment(replicas=3, version=1))
    world.tell(trouble)
    world.tell(launched("m-4"))
    world.tell(Answered("m-4", readiness=True))
    assert (world.phases()["m-1"], world.phases()["m-2"]) == ("ready", "draining")


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_a_rollout_keeps_all_ready_instances_with_a_surge_of_one(replicas: int) -> None:
    world = running(deployment(replicas=replicas))
    commands = world.tell(Applied(wish(deployment(replicas=replicas, version=1))))
    while world.pending:
        commands += world.tell(world.pending.popleft())
        staying = [one for one, phase in world.phases().items() if phase not in ("draining", "stopping")]
        assert len(world.ready()) >= replicas
        assert len(staying) <= replicas + 1
    assert sum(isinstance(command, Launch) for command in commands) == replicas
    assert len(world.ready()) == len(world.phases()) == replicas


def test_of_equal_instances_the_coldest_is_stopped() -> None:
    world = World()
    world.apply(deployment(replicas=3))
    world.behave()
    warmth = {"m-1": 10.0, "m-2": 0.0, "m-3": 40.0}
    world.tell(Applied(wish(deployment(replicas=1)), warmth=warmth))
    world.settle()
    assert world.ready() == ["m-3"]

"""Scaling and preemption on virtual time: up, down, from zero, in turns, and on a full machine."""

from typing import Any

import pytest

from pointsman.control.events import WorkerSeen
from pointsman.scaling.deployment import policy_problems
from pointsman.types import Worker
from tests.control.scaled_worlds import GIB, ScaledWorld, needing, plan


def test_more_requests_bring_more_instances_and_fewer_take_them_away() -> None:
    world = ScaledWorld((needing(1), plan(min_replicas=1)))
    world.until(lambda: world.ready() == ["m-1"])
    assert world.changes() == []
    for number in range(6):
        world.request(f"r{number}")
    world.until(lambda: world.ready() == ["m-1", "m-2", "m-3"])
    assert world.one().target == 3
    assert sorted(world.sent) == [f"r{number}" for number in range(6)]
    first = world.one().records[0]
    assert first.policy == "policy"
    assert "per replica" in first.why
    assert first.numbers["ongoing"] + first.numbers["queued"] == 6
    world.end(*list(world.on))
    world.until(lambda: len(world.phases()) == 1)
    assert world.changes()[-1][1] == 1


def test_a_deployment_scales_from_zero_at_once_and_back_after_its_idle_timeout() -> None:
    world = ScaledWorld((needing(1), plan(min_replicas=0, interval_s=3600.0, idle_timeout_s=300.0)))
    world.run(1.0)
    assert (world.phases(), world.one().wanted) == ({}, 0)
    world.request("first")
    world.until(lambda: world.sent == ["first"], 1.0)  # and not when the policy is due again
    assert world.changes() == [(0, 1)]
    world.end("first")
    world.configure({"m": plan(min_replicas=0, idle_timeout_s=300.0)})
    world.run(290.0)
    assert world.ready() == ["m-1"]
    world.until(lambda: world.phases() == {}, 20.0)
    assert world.changes() == [(0, 1), (1, 0)]


def test_a_request_is_served_although_the_policy_fails() -> None:
    def fails(view: object) -> int:
        raise RuntimeError("no idea")

    world = ScaledWorld((needing(1), plan(fails, min_replicas=0)))
    world.run(1.0)
    world.request("r")
    world.until(lambda: world.sent == ["r"])


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (RuntimeError("no idea"), "raised RuntimeError: no idea"),
        (-3, "returned -3; it must be a whole number"),
        ("many", "returned 'many'; it must be a whole number"),
    ],
)
def test_a_bad_answer_changes_nothing_and_is_reported_once(answer: object, problem: str) -> None:
    def bad(view: object) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    world = ScaledWorld((needing(1), plan(bad, min_replicas=0, initial_replicas=2)))
    world.until(lambda: world.ready() == ["m-1", "m-2"])
    world.until(lambda: world.one().errors > 5)
    assert [problem in one for one in world.problems()] == [True]
    [told] = policy_problems(world.autoscaler.deployments.values())
    assert told.code == "scaling-policy-fails"
    assert str(told).startswith('the scaling policy policy of "m" ')
    assert problem in str(told)
    assert world.ready() == ["m-1", "m-2"]


# Too little room


def test_two_deployments_share_a_machine_that_has_room_for_one() -> None:
    world = ScaledWorld(*((needing(3, name), plan(min_replicas=0, idle_timeout_s=3600.0)) for name in "ab"), gib=4)
    world.request("a1", "a")
    world.until(lambda: world.sent == ["a1"])
    world.request("b1", "b")
    world.until(lambda: world.problems("b"))
    assert world.ready() == ["a-1"]
    assert world.problems("b")[-1].startswith("1 of 1 has no place")
    world.end("a1")
    world.until(lambda: world.sent == ["a1", "b1"])
    assert list(world.phases()) == ["b-1"]
    assert world.changes("a") == [(0, 1), (1, 0)]
    assert "makes room for b" in world.reasons("a")[-1]
    assert "a, which is idle, makes room for it" in world.reasons("b")[-1]
    world.request("a2", "a")
    world.until(lambda: world.one("a").target == 1)
    world.end("b1")
    world.until(lambda: world.sent == ["a1", "b1", "a2"])
    assert list(world.phases()) == ["a-1"]


def test_two_busy_deployments_take_turns() -> None:
    limits: dict[str, Any] = {"min_replicas": 0, "max_replicas": 1, "turn_s": 30.0, "idle_timeout_s": 3600.0}
    world = ScaledWorld(*((needing(3, name), plan(**limits)) for name in "ab"), gib=4, slots=1)
    for request in ("a1", "a2", "b1", "b2"):
        world.request(request, request[0])
    world.until(lambda: world.sent == ["a1"])
    world.run(29.0)
    assert world.phases()["a-1"] == "ready", "its turn is not over"
    world.until(lambda: world.phases()["a-1"] == "draining", 2.0)
    world.end("a1")
    world.until(lambda: world.sent == ["a1", "b1"])
    world.until(lambda: world.phases()["b-1"] == "draining")
    world.end("b1")
    world.until(lambda: world.sent == ["a1", "b1", "a2"])
    world.end("a2")
    world.until(lambda: world.sent == ["a1", "b1", "a2", "b2"])
    assert world.changes("b") == [(0, 1)], "its target never changes"
    assert "a-1 of a, which has had its turn, makes room for it" in world.reasons("b")
    assert "b-1 makes room for a, which has requests and no instance" in world.reasons("b")


def test_a_spare_replica_makes_room_for_a_deployment_that_has_none() -> None:
    several = plan(min_replicas=1, max_replicas=2, down_delay_s=3600.0)
    world = ScaledWorld((needing(3, "a"), several), (needing(3, "b"), plan(min_replicas=0)), gib=7)
    for number in range(4):
        world.request(f"a{number}", "a")
    world.until(lambda: world.ready() == ["a-1", "a-2"])
    world.request("b1", "b")
    world.until(lambda: world.phases()["a-2"] == "draining")
    world.end(*(request for request, instance in list(world.on.items()) if instance == "a-2"))
    world.until(lambda: world.sent[-1] == "b1")
    assert world.status("a-1").restarts == 0
    assert world.one("a").target == 2, "it comes back when there is room"
    assert any("a-2 of a, which has spare replicas" in why for why in world.reasons("b"))
    world.end("b1")
    world.until(lambda: world.ready() == ["a-1", "a-2"])


@pytest.mark.parametrize(
    ("minimum", "priority"), [(1, 0), (0, 1)], ids=["it must have one replica", "it has a higher priority"]
)
def test_a_deployment_that_may_not_yield_makes_no_room(minimum: int, priority: int) -> None:
    stays = plan(min_replicas=minimum, initial_replicas=1, idle_timeout_s=3600.0)
    world = ScaledWorld((needing(3, "a", priority=priority), stays), (needing(3, "b"), plan(min_replicas=0)), gib=4)
    world.until(lambda: world.ready() == ["a-1"])
    world.run(60.0)
    world.request("b1", "b")
    world.until(lambda: world.problems("b"))
    world.run(60.0)
    assert world.changes("a") == []
    assert world.ready() == ["a-1"]


def test_an_instance_that_fits_no_worker_is_reported() -> None:
    world = ScaledWorld((needing(100), plan(min_replicas=1)), gib=4)
    world.run(10.0)
    short = "too little memory: needs 100.0 GiB, 4.0 GiB free"
    [record] = world.one().records
    assert record.problem == f"1 of 1 has no place: {short}"
    assert record.why == f"no worker could take it, even if it were empty: {short}"
    assert record.by == "pointsman"
    assert (world.status("m-1").unplaced, str(world.status("m-1").reason)) == (True, f"no place: {short}")


def test_a_full_machine_is_reported_once_and_used_when_there_is_room() -> None:
    world = ScaledWorld((needing(3), plan(min_replicas=1)), gib=4)
    world.until(lambda: world.ready() == ["m-1"])
    for number in range(6):
        world.request(f"r{number}")
    world.until(lambda: world.one().target == 3 and world.problems())
    world.run(10.0)
    steps, told = world.changes(), world.problems()
    assert told == ["2 of 3 have no place: too little memory: needs 3.0 GiB, 1.0 GiB free"]
    replicas = world.one().observed.replicas
    assert (replicas.ready, replicas.starting, replicas.unplaced) == (1, 2, 2)
    world.tell(WorkerSeen(Worker(name="here", cpus=64, memory_bytes=16 * GIB)))
    world.until(lambda: world.ready() == ["m-1", "m-2", "m-3"])
    assert {one.reason or "" for one in world.controller.instances()} == {""}
    assert (world.changes(), world.problems()) == (steps, told), (
        "the target did not change, and nothing new was reported"
    )

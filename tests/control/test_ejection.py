"""Instances that stand out from their peers get no requests for a time, and prove themselves before they come back."""

import pytest

from pointsman.control.desired import DesiredDeployment
from pointsman.control.events import Answered, Applied, ControllerTimer, Exited, ProbeNotMade, Silent, StandsOut
from pointsman.control.instances import Phase
from pointsman.control.status import deployments_status
from pointsman.reasons import Reason
from tests.control.worlds import World, deployment, said, server, servers, wish, with_lifecycle

WHY = Reason(
    "stands-out",
    {"kind": "401", "errors": 9, "results": 10, "peer_errors": 0, "peer_results": 40, "contradicted": 8},
)
TICK = ControllerTimer()


def stands_out(number: int = 1, *, contradicted: bool = True) -> StandsOut:
    return StandsOut(f"m-{number}", WHY, contradicted)


def ready(spec: DesiredDeployment) -> World:
    """A world in which all instances are ready, at 0 s."""
    world = World()
    world.apply(spec)
    world.behave()
    assert {one.phase for one in world.controller.instances()} == {Phase.READY}
    world.pending.clear()
    return world


def phases(world: World) -> list[str]:
    return list(world.phases().values())


def test_it_gets_no_requests_and_is_probed_when_its_time_is_over() -> None:
    world = ready(deployment(replicas=4))
    assert said(world.tell(stands_out(), 1.0)) == ["Update m-1, closed"]
    assert phases(world) == ["ejected", "ready", "ready", "ready"]
    assert "Probe m-1, readiness" not in said(world.tell(TICK, 5.9))
    assert "Probe m-1, readiness" in said(world.tell(TICK, 6.0))
    assert said(world.tell(Answered("m-1", readiness=False), 6.1)) == []
    assert said(world.tell(Answered("m-1", readiness=True), 6.2)) == ["Update m-1"]
    assert phases(world) == ["ready"] * 4


def test_status_and_dispatchers_know_why_and_until_when() -> None:
    world = ready(deployment(replicas=2))
    world.tell(stands_out(), 1.0)
    status = world.status("m-1")
    assert (status.until, status.in_service) == (6.0, True)
    assert status.reason is not None
    assert status.reason.code == "ejected"
    assert str(status.reason) == "ejected: 5 s: it answered 401 to 9 of 10 requests, its peers to 0 of 40"
    assert world.in_service["m-1"].closed == status.reason
    assert status.reason.facts["until"] == 6.0
    desired = world.controller.desired
    assert desired is not None
    [shown] = deployments_status(desired, world.controller.instances(), lambda _: None, (), 2.5)
    assert [(one["phase"], one["until_s"]) for one in shown["instances"]] == [("ejected", 3.5), ("ready", None)]
    world.tell(TICK, 6.0)
    world.tell(Answered("m-1", readiness=True), 6.0)
    assert world.in_service["m-1"].closed is None


def test_each_ejection_is_longer_until_it_has_done_well_for_long_enough() -> None:
    world = ready(with_lifecycle(deployment(replicas=3), probe_interval_s=1000.0))
    now, lengths = 1.0, []
    for pause in (1.0, 1.0, 39.0, 1.0, 1.0, 40.0, 1.0):
        world.tell(stands_out(), now)
        until = world.status("m-1").until
        assert until is not None
        lengths.append(until - now)
        world.tell(TICK, until)
        world.tell(Answered("m-1", readiness=True), until)
        now = until + pause
    assert lengths == [5.0, 10.0, 20.0, 40.0, 40.0, 40.0, 5.0]


def test_one_that_does_not_prove_itself_stays_out_for_longer_and_is_restarted_then() -> None:
    world = ready(deployment(replicas=3))
    world.tell(stands_out(), 1.0)
    world.tell(TICK, 6.0)
    assert said(world.tell(Silent("m-1", "it answered 401"), 6.5)) == ["Update m-1, closed"]
    status = world.status("m-1")
    assert (status.phase, status.until) == (Phase.EJECTED, 16.5)
    assert "time 2 in a row" in str(status.reason)
    world.tell(TICK, 16.5)
    assert said(world.tell(Silent("m-1", "it answered 401"), 17.0)) == ["Withdraw m-1", "Terminate m-1"]
    assert str(world.status("m-1").reason) == (
        "it answered 401 to 9 of 10 requests, its peers to 0 of 40; and a probe failed: it answered 401"
    )


def test_an_external_server_that_does_not_prove_itself_is_taken_out_of_service() -> None:
    world = ready(servers(server("a"), server("b"), server("c")))
    world.tell(StandsOut("a", WHY, contradicted=True), 1.0)
    for now in (6.0, 16.0):
        world.tell(TICK, now)
        world.tell(Silent("a", "it answered 401"), now)
    assert world.phases() == {"a": "unhealthy", "b": "ready", "c": "ready"}
    assert "a" not in world.in_service


def test_a_probe_that_could_not_be_made_is_made_later() -> None:
    world = ready(deployment(replicas=3))
    world.tell(stands_out(), 1.0)
    world.tell(TICK, 6.0)
    assert said(world.tell(ProbeNotMade("m-1", "too many open files"), 6.0)) == []
    assert world.status("m-1").until == 8.0
    assert "Probe m-1, readiness" in said(world.tell(TICK, 8.0))


def test_without_contradiction_a_probe_at_once_decides() -> None:
    """One client with bad requests may be all that is wrong."""
    world = ready(deployment(replicas=3))
    assert said(world.tell(stands_out(contradicted=False), 1.0)) == ["Update m-1, closed", "Probe m-1, readiness"]
    assert said(world.tell(Answered("m-1", readiness=True), 1.1)) == ["Update m-1"]
    world.tell(stands_out(contradicted=False), 2.0)
    world.tell(Silent("m-1", "it answered 401"), 2.1)
    assert world.status("m-1").until == 7.1


@pytest.mark.parametrize(
    ("replicas", "share", "ejected"),
    [(1, 0.5, 0), (2, 0.5, 1), (3, 0.5, 1), (4, 0.5, 2), (5, 0.5, 2), (4, 0.1, 1), (4, 1.0, 3), (4, 0.0, 0)],
)
def test_at_most_a_share_is_ejected_and_never_the_last(replicas: int, share: float, ejected: int) -> None:
    world = ready(with_lifecycle(deployment(replicas=replicas), max_ejected=share))
    for number in range(1, replicas + 1):
        world.tell(stands_out(number), 1.0)
    assert phases(world).count("ejected") == ejected
    spared = world.status(f"m-{ejected + 1}").reason
    assert spared is not None
    assert spared.code == "not-ejected"
    assert f"not ejected: {replicas - ejected} are ready, {ejected} ejected" in str(spared)


def test_deployments_do_not_count_for_each_other() -> None:
    world = ready(deployment(replicas=2))
    world.apply(deployment(replicas=2), deployment("x", replicas=2))
    world.behave()
    world.tell(stands_out())
    world.tell(StandsOut("x-1", WHY, contradicted=True))
    assert phases(world) == ["ejected", "ready", "ejected", "ready"]


def test_if_no_other_is_ready_it_is_probed_before_its_time_once() -> None:
    world = ready(deployment(replicas=2))
    world.tell(stands_out(), 1.0)
    commands = said(world.tell(Exited("m-2", "exit code 1"), 2.0))
    assert commands[-1] == "Probe m-1, readiness"
    assert said(world.tell(Silent("m-1", "it answered 401"), 2.5)) == ["Update m-1, closed"]
    assert world.status("m-1").until == 12.5
    world.tell(stands_out(), 3.0)  # it is not ready: ignored
    assert world.status("m-1").until == 12.5


def test_if_no_other_is_ready_it_comes_back_as_soon_as_it_has_proved_itself() -> None:
    world = ready(deployment(replicas=2))
    world.tell(stands_out(), 1.0)
    world.tell(Exited("m-2", "exit code 1"), 2.0)
    assert said(world.tell(Answered("m-1", readiness=True), 2.1)) == ["Update m-1"]


def test_it_leaves_and_crashes_like_any_instance_in_service() -> None:
    world = ready(deployment(replicas=3))
    world.tell(stands_out(1), 1.0)
    assert said(world.tell(Exited("m-1", "exit code 1"), 1.5)) == ["Withdraw m-1"]
    assert world.phases()["m-1"] == "backing off"
    world.tell(stands_out(3), 1.6)
    world.tell(Applied(wish(deployment(replicas=2))), 1.7)
    assert "m-1" not in world.phases(), "the one that does not serve goes first"
    world.tell(Applied(wish(deployment(replicas=1))), 1.8)
    assert world.phases() == {"m-2": "ready", "m-3": "draining"}


def test_one_that_leaves_while_it_is_ejected_does_not_come_back_unproved() -> None:
    world = ready(deployment(replicas=2))
    world.tell(stands_out(2), 1.0)
    world.tell(Applied(wish(deployment(replicas=1))), 2.0)
    assert world.phases() == {"m-1": "ready", "m-2": "draining"}
    world.tell(Applied(wish(deployment(replicas=2))), 3.0)
    assert world.phases()["m-2"] == "draining"

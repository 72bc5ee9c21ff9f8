"""The controller and time: backoff, timeouts, timers, and lifecycles that change."""

import pytest

from pointsman.control.controller import Controller
from pointsman.control.events import (
    Admit,
    Applied,
    ControllerEvent,
    Drained,
    Exited,
    LaunchFailed,
    PlaceNeeded,
    PlaneStopping,
    Probe,
    RequestsFail,
    WakeController,
)
from pointsman.control.instances import Phase
from pointsman.reasons import Reason
from pointsman.types import ExecutionInstance
from tests.control.test_controller import ANSWERS, CRASH, ONE, REFUSED, TICK, WORKS
from tests.control.worlds import HOST, PORT, World, deployment, launched, said, wish, with_lifecycle


def crash_and_see(world: World) -> float:
    """The delay before its restart."""
    world.tell(CRASH)
    status = world.status("m-1")
    assert status.until is not None
    waits = status.until - world.now
    world.behave(waits)
    assert world.ready() == ["m-1"]
    return waits


def test_the_backoff_doubles_up_to_its_limit_and_falls_back_after_a_long_time_ready() -> None:
    world = World()
    world.apply(ONE)
    world.behave()
    assert [crash_and_see(world) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 50, 50]
    world.behave(49.0)
    assert crash_and_see(world) == 50
    world.behave(51.0)
    assert crash_and_see(world) == 1
    assert world.status("m-1").restarts == 10


def test_the_backoff_stays_finite_after_many_failures() -> None:
    world = World()
    world.apply(ONE)
    for _ in range(2000):
        world.tell(LaunchFailed("m-1", "no"))
        world.tell(TICK, (world.status("m-1").until or 0.0) + 0.001)
    assert world.status("m-1").restarts == 2000


def test_the_timeout_of_the_first_probes_grows_with_the_start() -> None:
    world = World()
    world.apply(ONE)
    waits = []
    for at, event in [(1, launched("m-1")), (2, REFUSED), (3, TICK), (30, REFUSED), (33, TICK)]:
        waits += [c.timeout_s for c in world.tell(event, at) if isinstance(c, Probe)]
    assert waits == [5.0, 5.0, 33.0]


def test_a_ready_instance_has_the_configured_probe_timeout() -> None:
    world = World()
    world.apply(ONE)
    world.behave(99.0)
    [probe] = [c for c in world.tell(TICK, 200.0) if isinstance(c, Probe)]
    assert (probe.readiness, probe.timeout_s) == (False, 5.0)
    [probe] = [c for c in world.tell(RequestsFail("m-1", Reason("reset")), 201.0) if isinstance(c, Probe)]
    assert (probe.readiness, probe.timeout_s) == (True, 5.0)


def test_what_dispatchers_are_told() -> None:
    world = World()
    spec = deployment(aliases=("chat", "small"), engine_slots=8, labels={"zone": "a"})
    world.apply(spec)
    world.tell(launched("m-1"))
    [admit] = [c for c in world.tell(WORKS) if isinstance(c, Admit)]
    assert admit.deployment == "m"
    assert admit.instance == ExecutionInstance(
        instance_id="m-1",
        host=HOST,
        port=PORT,
        model_name="llama",
        adapters=frozenset({"chat", "small"}),
        engine_names={"chat": "llama", "small": "llama"},
        max_concurrency=8,
        gpu_count=0,
        labels={"zone": "a"},
    )


def test_the_limit_of_the_deployment_comes_before_that_of_the_engine() -> None:
    world = World()
    world.apply(deployment(max_concurrency=2, engine_slots=8))
    world.behave()
    assert world.in_service["m-1"].max_concurrency == 2


def test_one_timer_is_set_for_what_is_due_next() -> None:
    controller = Controller()

    def timers(event: ControllerEvent, now: float) -> list[float]:
        return [c.at for c in controller.handle(event, now) if isinstance(c, WakeController)]

    assert timers(Applied(wish(ONE)), 0.0) == [100.0]
    assert timers(launched("m-1"), 1.0) == []
    assert timers(WORKS, 2.0) == [4.0], "its first probe"
    assert timers(Drained("unknown"), 3.0) == [], "it is set already"
    assert timers(TICK, 3.9) == [4.0], "a clock that is a little fast"
    assert timers(TICK, 4.0) == [], "an answer is awaited, and nothing is due"
    assert timers(ANSWERS, 5.0) == [7.0]
    assert timers(CRASH, 6.0) == [], "in a second it is started again"
    assert timers(TICK, 7.0) == [107.0]


def test_an_event_that_comes_late_does_what_is_due_as_well() -> None:
    world = World()
    world.apply(deployment(replicas=2))
    world.behave()
    assert said(world.tell(Exited("m-2", "exit code 1"), 5.0)) == ["Withdraw m-2", "Probe m-1, health"]


def test_an_instance_that_becomes_ready_at_its_deadline_is_not_killed() -> None:
    world = World()
    world.apply(ONE)
    world.tell(launched("m-1"))
    assert said(world.tell(WORKS, 100.0)) == ["Admit m-1"]


def test_a_new_lifecycle_takes_effect_at_once_without_restarts() -> None:
    world = World()
    world.apply(ONE)
    assert world.apply(with_lifecycle(ONE, start_timeout_s=20.0), at=1.0) == []
    assert world.wake_at == 20.0
    assert said(world.tell(TICK, 20.0)) == ["Kill m-1"]
    world.apply(at=21.0)
    assert world.status("m-1").phase is Phase.STOPPING


def test_a_new_lifecycle_applies_to_draining_instances() -> None:
    world = World()
    world.apply(ONE)
    world.behave()
    world.tell(PlaceNeeded("m-1", Reason("place-awaited")))
    world.apply(with_lifecycle(ONE, drain_timeout_s=1.0))
    assert world.phases()["m-1"] == "draining"
    assert "Withdraw m-1" in said(world.tell(TICK, 1.0))


def test_a_draining_instance_comes_back_before_a_new_one_is_started() -> None:
    world = World()
    three = deployment(replicas=3)
    world.apply(three)
    world.behave()
    assert world.apply(ONE) == ["Update m-2, closed", "AwaitDrained m-2", "Update m-3, closed", "AwaitDrained m-3"]
    assert world.apply(deployment(replicas=2)) == ["Update m-2"]
    assert world.phases() == {"m-1": "ready", "m-2": "ready", "m-3": "draining"}
    assert world.status("m-2").reason is None
    assert said(world.tell(Drained("m-2"))) == [], "the drain was cancelled"
    assert world.apply(deployment(replicas=4)) == ["Update m-3", "Launch m-4"]


def test_a_doubted_or_outdated_instance_does_not_come_back() -> None:
    world = World()
    world.apply(deployment(replicas=2))
    world.behave()
    world.tell(RequestsFail("m-2", Reason("status 500")))
    world.apply(ONE)
    assert world.phases()["m-2"] == "draining"
    assert world.apply(deployment(replicas=2)) == ["Launch m-3"], "requests failed on it"
    world.behave()
    world.apply(ONE)
    assert "Launch m-4" in world.apply(deployment(replicas=2, version=1)), "m-3 is of another version"


@pytest.mark.parametrize("hurry", [PlaneStopping(), PlaceNeeded("m-2", Reason("place-awaited"))])
def test_a_surplus_instance_has_no_drain_timeout_until_its_place_is_needed(hurry: ControllerEvent) -> None:
    world = World()
    world.apply(deployment(replicas=2))
    world.behave()
    world.apply(ONE)
    assert world.phases()["m-2"] == "draining"
    assert world.status("m-2").until is None
    world.tell(TICK, 10_000.0)
    assert world.phases()["m-2"] == "draining", "its requests may take as long as they need"
    world.tell(hurry, 10_001.0)
    assert world.status("m-2").until == 10_061.0
    assert "Withdraw m-2" in said(world.tell(TICK, 10_061.0))

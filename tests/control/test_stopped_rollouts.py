"""A new recipe that does not start is given up after a few attempts, as long as the one before serves."""

from collections.abc import Callable

import msgspec
import pytest

from pointsman.control.events import Applied, ControllerTimer, Exited, Launch, LaunchFailed
from pointsman.control.reconcile import What
from pointsman.reasons import Reason
from tests.control.worlds import QUICK, World, deployment, launched, said, wish

WHY = "exit code 1: no such model"
STOPPED = f"rollout stopped: {WHY}; the earlier version still serves; deploy again to retry"


def running(replicas: int = 2) -> World:
    world = World()
    world.apply(deployment(replicas=replicas))
    world.behave()
    return world


def fail(world: World, instance: str, times: int = 3) -> None:
    """It fails to start this many times, and is restarted in between while that is allowed."""
    for attempt in range(times):
        world.tell(launched(instance))
        world.tell(Exited(instance, WHY))
        until = world.status(instance).until
        if attempt < times - 1:
            assert until is not None
            world.tell(ControllerTimer(), until)


def stopped(replicas: int = 2) -> World:
    world = running(replicas)
    world.apply(deployment(replicas=replicas, version=1))
    fail(world, f"m-{replicas + 1}")
    return world


def test_a_rollout_is_stopped_after_three_attempts() -> None:
    world = stopped()
    status = world.status("m-3")
    assert (status.phase.value, status.until, status.halted, str(status.reason)) == ("backing off", None, True, STOPPED)
    world.behave(10_000.0)
    assert world.ready() == ["m-1", "m-2"]
    assert world.status("m-3").restarts == 2
    assert not world.processes.keys() - {"m-1", "m-2"}


def test_failed_launches_count_as_attempts() -> None:
    world = running()
    world.apply(deployment(replicas=2, version=1))
    for _ in range(3):
        world.tell(LaunchFailed("m-3", "no such file"))
        world.tell(ControllerTimer(), world.status("m-3").until or world.now)
    assert world.status("m-3").halted


def test_launches_that_the_plane_has_not_the_means_for_do_not_count() -> None:
    world = running()
    world.apply(deployment(replicas=2, version=1))
    for _ in range(10):
        world.tell(LaunchFailed("m-3", "too many open files", local="files"))
        world.tell(ControllerTimer(), world.status("m-3").until)
    status = world.status("m-3")
    assert (status.halted, status.restarts, status.has_failed) == (False, 0, False)


def test_start_timeouts_count_as_attempts() -> None:
    world = running()
    world.apply(deployment(replicas=2, version=1))
    for _ in range(3):
        world.tell(launched("m-3"))
        world.tell(ControllerTimer(), world.now + QUICK.start_timeout_s + 1)
        world.tell(Exited("m-3", "killed by SIGKILL"))
        world.tell(ControllerTimer(), world.status("m-3").until or world.now)
    assert world.status("m-3").halted
    assert "not ready 100 s after its launch" in str(world.status("m-3").reason)


def test_the_number_of_attempts_is_configurable() -> None:
    world = running()
    lifecycle = msgspec.structs.replace(QUICK, start_attempts=1)
    world.apply(deployment(replicas=2, version=1, lifecycle=lifecycle))
    fail(world, "m-3", times=1)
    assert world.status("m-3").halted


def test_without_earlier_instances_attempts_are_unlimited() -> None:
    world = World()
    world.apply(deployment(replicas=1))
    fail(world, "m-1", times=6)
    assert not world.status("m-1").halted
    assert world.status("m-1").until is not None


def test_becoming_ready_resets_the_attempts() -> None:
    world = running(1)
    world.apply(deployment(replicas=2, version=1))
    fail(world, "m-2", times=2)
    world.tell(ControllerTimer(), world.status("m-2").until or 0.0)
    world.behave(0.5)
    assert "m-2" in world.ready()


def again(world: World) -> list[str]:
    """Apply the same state again, by hand."""
    return said(world.tell(Applied(wish(deployment(replicas=2, version=1)), retry=frozenset({"m"}))))


@pytest.mark.parametrize(
    ("begin_anew", "wanted"),
    [
        (lambda world: world.apply(deployment(replicas=2, version=2)), ["Launch m-3"]),
        (again, ["Launch m-3"]),
        (lambda world: world.apply(deployment(replicas=2, version=1)), []),
        (lambda world: world.apply(deployment(replicas=2)), []),
    ],
    ids=["another recipe", "the same, to be tried again", "the same", "back to the one before"],
)
def test_what_restarts_a_stopped_rollout(begin_anew: Callable[[World], list[str]], wanted: list[str]) -> None:
    world = stopped()
    assert begin_anew(world) == wanted


def test_another_recipe_has_all_its_attempts() -> None:
    world = stopped()
    world.apply(deployment(replicas=2, version=2))
    fail(world, "m-3", times=2)
    assert not world.status("m-3").halted
    world.behave(100.0)
    assert world.ready() == ["m-3", "m-4"]
    assert all(not one.halted for one in world.controller.instances())


def test_going_back_removes_the_broken_instance() -> None:
    world = stopped()
    world.apply(deployment(replicas=2))
    assert world.ready() == ["m-1", "m-2"]
    assert world.phases().keys() == {"m-1", "m-2"}
    assert world.status("m-1").reason is None


def test_the_preview_has_retried_rollouts() -> None:
    world = stopped()
    desired = wish(deployment(replicas=2, version=1))
    assert world.controller.preview(desired) == []
    [step] = world.controller.preview(desired, retry={"m"})
    assert (step.what, step.subject, str(step.why)) == (
        What.RESTART, "m-3", "its stopped rollout is tried again",
    )  # fmt: skip
    assert world.controller.preview(desired, retry={"other"}) == []


def test_a_crashed_instance_comes_back_with_its_recipe_during_a_stopped_rollout() -> None:
    world = stopped(1)
    world.tell(Exited("m-1", "killed by SIGKILL"))
    assert world.status("m-2").halted, "the one before will be back"
    commands = world.tell(ControllerTimer(), world.status("m-1").until or 0.0)
    [launch] = [one for one in commands if isinstance(one, Launch)]
    assert (launch.instance_id, launch.recipe) == ("m-1", deployment(replicas=1).recipe)
    world.tell(launched("m-1"))
    world.behave(1.0)
    assert world.ready() == ["m-1"]


def test_a_rollout_resumes_if_the_earlier_version_fails_to_start() -> None:
    world = stopped(1)
    world.tell(Exited("m-1", "killed by SIGKILL"))
    world.tell(ControllerTimer(), world.status("m-1").until or 0.0)
    fail(world, "m-1")
    [left] = world.controller.instances()
    assert (left.halted, left.recipe) == (False, deployment(replicas=1, version=1).recipe)


# For good


FINAL = Reason("no-package", {"package": "vllm", "remedy": "run: pip install vllm"})
FINAL_ENDS = [Exited("m-1", "exit code 1", FINAL), LaunchFailed("m-1", "no such file", final=FINAL)]


@pytest.mark.parametrize("end", FINAL_ENDS, ids=["exited", "not launched"])
def test_what_cannot_start_is_tried_once_and_again_when_it_is_applied_again(end: Exited | LaunchFailed) -> None:
    world = World()
    world.apply(deployment(replicas=1))
    if isinstance(end, Exited):
        world.tell(launched("m-1"))
    assert "Launch m-1" not in said(world.tell(end))
    status = world.status("m-1")
    assert (status.final, status.until, status.restarts, status.has_failed) == (True, None, 0, True)
    assert str(status.reason) == f"{FINAL}; then apply it again"
    for _ in range(3):
        assert said(world.tell(ControllerTimer(), world.now + 1000.0)) == []
    assert said(world.tell(Applied(wish(deployment(replicas=1))))) == [], "scaling, or a file of endpoints"
    [step] = world.controller.preview(wish(deployment(replicas=1)), ["m"])
    assert (step.what, step.subject, step.why.code) == (What.RESTART, "m-1", "tried-again")
    assert said(world.tell(Applied(wish(deployment(replicas=1)), retry=frozenset({"m"})))) == ["Launch m-1"]
    world.tell(launched("m-1"))
    world.behave()
    assert (world.ready(), world.status("m-1").final, world.status("m-1").reason) == (["m-1"], False, FINAL)


def test_another_recipe_is_tried_at_once() -> None:
    world = World()
    world.apply(deployment(replicas=1))
    world.tell(launched("m-1"))
    world.tell(FINAL_ENDS[0])
    assert said(world.tell(Applied(wish(deployment(replicas=1, version=1))))) == ["Launch m-1"]
    assert not world.status("m-1").final


def test_a_rollout_that_cannot_start_is_stopped_after_one_attempt() -> None:
    world = running()
    world.apply(deployment(replicas=2, version=1))
    world.tell(launched("m-3"))
    world.tell(Exited("m-3", "exit code 1", FINAL))
    assert world.status("m-3").halted
    told = f"rollout stopped: {FINAL}; the earlier version still serves; deploy again to retry"
    assert str(world.status("m-3").reason) == told
    for name in ("m-1", "m-2"):
        world.tell(Exited(name, "killed by SIGKILL"))
    assert world.status("m-3").final


def test_a_crash_of_an_instance_that_was_ready_is_never_final() -> None:
    world = running(1)
    world.tell(Exited("m-1", "exit code 78", FINAL))
    assert not world.status("m-1").final
    assert world.status("m-1").until is not None

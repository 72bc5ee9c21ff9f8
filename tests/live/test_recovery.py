"""Whoever is killed -9, plane or supervisor or both: what should run comes back, and nothing is left behind."""

import os
import signal
import socket
import time

from bench.chaos.clients import Verdict
from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from tests.live.manifests import llama, manifest, simulated

ENGINES = ("pointsman.simulator", "pointsman.engines.")
"""In the command line of an engine."""
CLIENTS = 6
GRACE_S = 5.0
"""How long a supervisor waits for the next plane."""


def engines(plane: LivePlane) -> set[int]:
    """Engine processes that live, whoever knows of them."""
    return {pid for pid, command in plane.processes().items() if any(engine in command for engine in ENGINES)}


def serves(load: Load, since: float) -> bool:
    """Whether a request that was sent after this time has been served."""
    return any(one.began > since and one.verdict is Verdict.SERVED for one in list(load.samples))


def orphans(plane: LivePlane) -> set[int]:
    """Engines that the plane does not know of."""
    return engines(plane) - {one["pid"] for one in plane.instances().values()}


def free_port() -> int:
    """One that clients find again when the plane has been started again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def test_a_plane_that_is_killed_under_load_adopts_its_engines(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 3), llama("tiny", 1), listen=f"127.0.0.1:{free_port()}"))
    before, supervisors, generation = plane.pids(), plane.supervisors(), plane.status()["generation"]
    with Load(plane.url, ["m"], clients=CLIENTS) as load:
        plane.until(lambda: len(load.samples) > 30, "load")
        plane.kill()
        killed_at = time.monotonic()
        up_s = plane.up()
        plane.until(lambda: serves(load, killed_at), "served again")
        served_s = time.monotonic() - killed_at
        plane.until(lambda: load.verdicts()["served"] > 60, "load")
    print(f"\nkill -9 of the plane: all ready after {up_s:.2f} s, the first new request served after {served_s:.2f} s")
    print(f"requests: {dict(load.verdicts())}")
    assert len(supervisors) == 1
    if up_s < GRACE_S - 1:  # a machine that is too busy for that finds new ones instead
        assert plane.pids() == before
        assert plane.supervisors() == supervisors
    assert orphans(plane) == set()
    assert plane.status()["generation"] == generation
    # What was under way when the plane died is cut off; nothing is wrong, before, then or after.
    assert load.bad(Verdict.LOST, Verdict.UNREACHABLE) == []
    assert all(one.began <= killed_at for one in load.samples if one.verdict is Verdict.LOST)


def test_a_plane_that_is_killed_and_not_started_again_leaves_nothing(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 2), llama("tiny", 1)))
    assert len(engines(plane)) == 3
    plane.kill()
    began = time.monotonic()
    assert len(engines(plane)) == 3
    plane.until(lambda: plane.processes() == {}, "nothing left", 30.0)
    print(f"\nkill -9 of the plane, nobody comes back: no process left after {time.monotonic() - began:.1f} s")
    again_s = plane.up()
    print(f"started again after that: all ready in {again_s:.2f} s")
    assert len(plane.pids()) == 3
    assert orphans(plane) == set()


def test_plane_and_supervisor_are_killed(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 2), llama("tiny", 1)))
    before, [supervisor] = plane.pids(), plane.supervisors()
    plane.kill()
    os.kill(supervisor, signal.SIGKILL)
    up_s = plane.up()
    print(f"\nkill -9 of plane and supervisor: all ready after {up_s:.2f} s")
    assert set(plane.pids()) == set(before)
    assert not set(plane.pids().values()) & set(before.values())
    assert orphans(plane) == set()
    assert len(plane.supervisors()) == 1
    with Load(plane.url, ["m"], clients=3) as load:
        plane.until(lambda: len(load.samples) > 10, "load")
    assert load.bad() == []


def test_the_supervisor_is_killed_under_load(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 3)))
    before, [supervisor] = plane.pids(), plane.supervisors()
    with Load(plane.url, ["m"], clients=CLIENTS) as load:
        plane.until(lambda: len(load.samples) > 30, "load")
        os.kill(supervisor, signal.SIGKILL)
        killed_at = time.monotonic()
        plane.until(lambda: serves(load, killed_at), "served again")
        served_s = time.monotonic() - killed_at
        plane.until(plane.is_settled, "everything ready again")
        ready_s = time.monotonic() - killed_at
        plane.until(lambda: load.verdicts()["served"] > 90, "load")
    print(f"\nkill -9 of the supervisor: served again after {served_s:.2f} s, all ready after {ready_s:.2f} s")
    print(f"requests: {dict(load.verdicts())}")
    # Its engines die with it, all at once, so that there is nobody to try for a moment: whoever was under way then may
    # be told so. Whoever came later has only waited.
    assert load.bad(Verdict.BROKEN_OFF, Verdict.REFUSED) == []
    assert all(one.began < killed_at + served_s for one in load.samples if one.verdict is not Verdict.SERVED)
    assert load.verdicts()["refused"] + load.verdicts()["broken off"] <= 2 * CLIENTS
    assert set(plane.pids()) == set(before)
    assert len(plane.supervisors()) == 1
    assert plane.supervisors() != [supervisor]
    assert orphans(plane) == set()
    assert plane.status()["problems"] == []

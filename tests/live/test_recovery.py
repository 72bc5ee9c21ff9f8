"""kill -9 of the plane, the supervisor or both: every instance comes back and no process is orphaned."""

import os
import signal
import socket
import time

from bench.chaos.clients import Verdict
from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from tests.live.manifests import llama, manifest, simulated

ENGINES = ("pointsman.simulator", "pointsman.engines.")
"""Parts of the command lines of engines."""
CLIENTS = 6
GRACE_S = 5.0
"""How long a supervisor waits for a new plane."""


def engines(plane: LivePlane) -> set[int]:
    """The pids of all live engine processes."""
    return {pid for pid, command in plane.processes().items() if any(engine in command for engine in ENGINES)}


def has_served(load: Load, since: float) -> bool:
    """Whether a request sent after this time has been served."""
    return any(one.began > since and one.verdict is Verdict.SERVED for one in list(load.samples))


def orphans(plane: LivePlane) -> set[int]:
    """Engines that the plane does not know about."""
    return engines(plane) - {int(one["process"] or 0) for one in plane.instances().values()}


def free_port() -> int:
    """A fixed port, so that clients reconnect to the restarted plane."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def test_a_plane_killed_under_load_adopts_its_engines_after_a_restart(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 3), llama("tiny", 1), listen=f"127.0.0.1:{free_port()}"))
    before, supervisors, generation = plane.pids(), plane.supervisors(), plane.status()["generation"]
    with Load(plane.url, ["m"], clients=CLIENTS) as load:
        plane.until(lambda: len(load.samples) > 30, "load")
        plane.kill()
        killed_at = time.monotonic()
        up_s = plane.up()
        plane.until(lambda: has_served(load, killed_at), "served again")
        served_s = time.monotonic() - killed_at
        plane.until(lambda: load.verdicts()["served"] > 60, "load")
    print(f"\nkill -9 of the plane: all ready after {up_s:.2f} s, the first new request served after {served_s:.2f} s")
    print(f"requests: {dict(load.verdicts())}")
    assert len(supervisors) == 1
    if up_s < GRACE_S - 1:  # on a machine slower than that, the engines are new
        assert plane.pids() == before
        assert plane.supervisors() == supervisors
    assert orphans(plane) == set()
    assert plane.status()["generation"] == generation
    # Only requests in flight when the plane died are lost; no response is wrong.
    assert load.unexpected(Verdict.LOST, Verdict.UNREACHABLE) == []
    assert all(one.began <= killed_at for one in load.samples if one.verdict is Verdict.LOST)


def test_a_plane_killed_and_not_restarted_leaves_no_process(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 2), llama("tiny", 1)))
    assert len(engines(plane)) == 3
    plane.kill()
    began = time.monotonic()
    assert len(engines(plane)) == 3
    plane.until(lambda: plane.processes() == {}, "nothing left", 30.0)
    print(f"\nkill -9 of the plane, no restart: no process left after {time.monotonic() - began:.1f} s")
    restart_s = plane.up()
    print(f"restarted after that: all ready in {restart_s:.2f} s")
    assert len(plane.pids()) == 3
    assert orphans(plane) == set()


def test_plane_and_supervisor_are_restarted_after_both_are_killed(plane: LivePlane) -> None:
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
    assert load.unexpected() == []


def test_a_supervisor_killed_under_load_is_restarted_with_its_engines(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 3)))
    before, [supervisor] = plane.pids(), plane.supervisors()
    with Load(plane.url, ["m"], clients=CLIENTS) as load:
        plane.until(lambda: len(load.samples) > 30, "load")
        os.kill(supervisor, signal.SIGKILL)
        killed_at = time.monotonic()
        plane.until(lambda: has_served(load, killed_at), "served again")
        served_s = time.monotonic() - killed_at
        plane.until(plane.is_settled, "everything ready again")
        ready_s = time.monotonic() - killed_at
        plane.until(lambda: load.verdicts()["served"] > 90, "load")
    print(f"\nkill -9 of the supervisor: served again after {served_s:.2f} s, all ready after {ready_s:.2f} s")
    print(f"requests: {dict(load.verdicts())}")
    # Its engines die with it, so for a moment there is no instance to retry on: requests in flight may fail. Later
    # requests only wait.
    assert load.unexpected(Verdict.INTERRUPTED, Verdict.REFUSED) == []
    assert all(one.began < killed_at + served_s for one in load.samples if one.verdict is not Verdict.SERVED)
    assert load.verdicts()["refused"] + load.verdicts()["interrupted"] <= 2 * CLIENTS
    assert set(plane.pids()) == set(before)
    assert len(plane.supervisors()) == 1
    assert plane.supervisors() != [supervisor]
    assert orphans(plane) == set()
    assert plane.status()["problems"] == []

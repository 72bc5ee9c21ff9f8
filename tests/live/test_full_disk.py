"""The state directory cannot be written: the plane serves, repairs, scales and stops, says so, and catches up later.

Two real ways, see bench/chaos/disks.py: a full disk of its own (where disks can be mounted), and a limit on the size of
files, which is set on the running plane. The limit also keeps the plane from writing its output.
"""

import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from bench.chaos.disks import SmallDisk, allow_writes, can_mount, forbid_writes
from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from tests.live.manifests import manifest, simulated

GRACE_S = 5.0
"""How long a supervisor waits for a new plane."""
SCALED = {"min": 1, "max": 3, "interval": "200ms"}


class BrokenDisk:
    """A plane whose state directory can be made unwritable while it runs."""

    def __init__(self, plane: LivePlane, disk: SmallDisk | None) -> None:
        self.plane = plane
        self._disk = disk

    def fail(self) -> None:
        if self._disk is None:
            forbid_writes(self.plane.process.pid)
        else:
            self._disk.fill()

    def work_again(self) -> None:
        if self._disk is None:
            if self.plane.process.poll() is None:
                allow_writes(self.plane.process.pid)
        else:
            self._disk.free()


@pytest.fixture(params=["full disk", "limit on files"])
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokenDisk]:
    is_disk = request.param == "full disk"
    if is_disk and not can_mount():
        pytest.skip("no disk can be mounted here")
    disk = SmallDisk(tmp_path / "state") if is_disk else None
    plane = LivePlane(tmp_path)
    try:
        yield BrokenDisk(plane, disk)
    finally:
        try:
            plane.close()
        finally:
            if disk is not None:
                disk.close()


def deployments(replicas: int = 2) -> str:
    scaled = {key: value for key, value in simulated("s", 1).items() if key != "replicas"}
    return manifest(simulated("m", replicas), {**scaled, "scaling": SCALED})


def metric(plane: LivePlane, name: str) -> float:
    text = httpx.get(f"{plane.url}/metrics", timeout=30).text
    [line] = [line for line in text.splitlines() if line.startswith(f"pointsman_{name} ")]
    return float(line.rpartition(" ")[2])


def problem(plane: LivePlane) -> str:
    """What the status says of the store."""
    return next((one["text"] for one in plane.status()["problems"] if one["code"] == "store-behind"), "")


def kill_one(plane: LivePlane) -> None:
    """Kill an engine, and wait until another is ready in its place."""
    before = plane.pids("m")
    victim = min(before)
    os.kill(before[victim], signal.SIGKILL)
    plane.until(lambda: plane.pids("m").get(victim, before[victim]) != before[victim], "a new engine")


def kill_and_adopt(plane: LivePlane, pids: dict[str, int]) -> None:
    """kill -9 of the plane. The next one finds its processes; all of them new if it comes later than the grace time."""
    plane.kill()
    if plane.up() < GRACE_S - 1:
        assert plane.pids() == pids
    assert plane.pids().keys() == pids.keys()


def test_everything_but_changes_of_operators_goes_on(broken: BrokenDisk) -> None:
    plane = broken.plane
    plane.up(deployments())
    with Load(plane.url, ["m"], clients=2) as load:
        broken.fail()
        kill_one(plane)
        assert "changes wait to be stored" in problem(plane)
        assert metric(plane, "unsaved_changes") > 0
        assert metric(plane, "store_failures_total") > 0
        failures = metric(plane, "store_failures_total")
        plane.until(lambda: metric(plane, "store_failures_total") > failures, "further tries")
        # Also if the supervisor dies now.
        [supervisor] = plane.supervisors()
        os.kill(supervisor, signal.SIGKILL)
        plane.until(lambda: plane.supervisors() not in ([], [supervisor]) and plane.is_settled(), "all back again")
        served = load.verdicts()["served"]
        plane.until(lambda: load.verdicts()["served"] > served + 20, "requests served")

        # A change that cannot be stored is refused, and nothing changes.
        before = plane.status()["generation"]
        refused = plane.pointsman("apply", plane.write(deployments(3), "more.yaml"))
        assert refused.returncode == 1
        assert "nothing was changed, because" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert (plane.status()["generation"], len(plane.pids("m"))) == (before, 2)
        # Scaling is in force at once.
        assert plane.pointsman("scale", "s", "--replicas", "2").returncode == 0
        plane.until(lambda: len(plane.pids("s")) == 2, "two instances")

        broken.work_again()
        plane.until(lambda: not problem(plane), "everything is stored")
        assert metric(plane, "unsaved_changes") == 0
        assert plane.pointsman("apply", plane.folder / "more.yaml").returncode == 0
        plane.until(plane.is_settled, "three instances")
    # A kill -9 after that finds the truth.
    pids = plane.pids()
    kill_and_adopt(plane, pids)
    assert (len(plane.pids("m")), len(plane.pids("s"))) == (3, 2)


def test_a_plane_killed_while_nothing_can_be_stored_loses_no_process(broken: BrokenDisk) -> None:
    plane = broken.plane
    plane.up(deployments())
    broken.fail()
    kill_one(plane)
    assert problem(plane)
    pids = plane.pids()
    kill_and_adopt(plane, pids)  # the disk may still be full
    assert httpx.post(f"{plane.url}/v1/completions", json={"model": "m", "prompt": "x"}, timeout=60).status_code == 200
    kill_one(plane)
    broken.work_again()
    plane.until(lambda: not problem(plane), "everything is stored")
    with sqlite3.connect(plane.state / "pointsman.sqlite") as db:
        stored = dict(db.execute("select id, pid from instances"))
    db.close()
    assert stored == plane.pids()


def test_a_plane_stops_in_order_while_nothing_can_be_stored(broken: BrokenDisk) -> None:
    plane = broken.plane
    plane.up(deployments())
    broken.fail()
    kill_one(plane)
    assert plane.stop() == 0
    assert plane.processes() == {}
    broken.work_again()
    plane.up()
    assert len(plane.pids("m")) == 2


def test_a_plane_starts_on_a_full_disk_with_what_it_last_ran(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("no disk can be mounted here")
    disk, plane = SmallDisk(tmp_path / "state"), LivePlane(tmp_path)
    try:
        plane.up(deployments())
        assert plane.stop() == 0
        disk.fill()
        # A manifest that is new cannot be stored, so it does not run.
        refused = plane.pointsman("up", plane.write(deployments(3), "more.yaml"))
        assert refused.returncode == 1
        assert "nothing was changed" in refused.stderr
        assert "free space on its disk" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert plane.processes() == {}
        plane.up()
        assert len(plane.pids("m")) == 2
        assert "free space on its disk" in problem(plane)
        disk.free()
        plane.until(lambda: not problem(plane), "everything is stored")
        pids = plane.pids()
        kill_and_adopt(plane, pids)
        plane.close()
    finally:
        disk.close()


def test_a_store_that_another_program_has_locked_is_written_later(plane: LivePlane) -> None:
    plane.up(deployments())
    db = sqlite3.connect(plane.state / "pointsman.sqlite", isolation_level=None)
    db.execute("begin immediate")
    kill_one(plane)
    assert "another program has locked it" in problem(plane)
    refused = plane.pointsman("apply", plane.write(deployments(3), "more.yaml"))
    assert "another program has locked it" in refused.stderr
    db.execute("rollback")
    plane.until(lambda: not problem(plane), "everything is stored")
    stored = dict(db.execute("select id, pid from instances"))
    db.close()
    assert stored == plane.pids()

"""Planes and supervisors that are killed: what still runs is adopted, and nothing is left behind."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pointsman.config.revision import ManifestText
from pointsman.errors import PointsmanError
from pointsman.runtimes.machine.store import FILE
from pointsman.runtimes.machine.supervisor_link import ProcessesRunning, SupervisorTerms, open_supervisor
from tests.runtimes.local.planes import LIFECYCLE, manifest, run, running, simulated, stage
from tests.runtimes.local.processes import eventually, group, is_alive, parent, until
from tests.runtimes.local.test_plane import ROOT

# Deaths


def test_one_plane_per_directory(state: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(simulated())) as scene:
            await scene.until_ready("m-1")
            with pytest.raises(PointsmanError, match=rf"a plane runs in .* already \(pid {os.getpid()}\)"):
                await stage(state).plane.start()
            assert scene.plane.ready

    run(story())


PLANE = """
import asyncio, sys
from pathlib import Path
import msgspec
from pointsman.config.revision import ManifestText
from tests.runtimes.local.planes import run, stage

async def main():
    scene = stage(Path(sys.argv[1]), orphan_grace_s=float(sys.argv[2]))
    await scene.plane.start(msgspec.json.decode(sys.argv[3], type=ManifestText))
    while not scene.plane.ready:
        await asyncio.sleep(0.01)
    print(msgspec.json.encode(scene.pids()).decode(), flush=True)
    await asyncio.sleep(600)

run(main())
"""


def killed_plane(state: Path, wanted: ManifestText, grace_s: float) -> dict[str, int]:
    """Run a plane in a process of its own until it is ready, and kill it. The processes that it had."""
    command = [sys.executable, "-c", PLANE, str(state), str(grace_s), msgspec.json.encode(wanted).decode()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as plane:
        assert plane.stdout is not None
        pids: dict[str, int] = msgspec.json.decode(plane.stdout.readline())
        plane.kill()
    assert all(map(is_alive, pids.values()))
    return pids


def test_after_a_kill_the_next_plane_adopts_what_still_runs(state: Path) -> None:
    wanted = manifest(simulated("a"), simulated("b"))

    async def story() -> None:
        pids = killed_plane(state, wanted, grace_s=30.0)
        os.kill(pids["b-1"], signal.SIGKILL)  # one of them dies before the next plane starts
        until(lambda: not is_alive(pids["b-1"]))
        async with running(state, None) as scene:
            assert scene.plane.documents.generation == 1
            await scene.until_ready("a-1", "b-1")
            assert scene.pids()["a-1"] == pids["a-1"]
            assert scene.pids()["b-1"] != pids["b-1"]
            assert scene.instances()["a-1"]["restarts"] == 0

    run(story())


def test_adopted_processes_that_are_not_desired_are_stopped(state: Path) -> None:
    async def story() -> None:
        pids = killed_plane(state, manifest(simulated("a"), simulated("b"), simulated("c")), grace_s=30.0)
        async with running(state, manifest(simulated("a", slots=4), simulated("c"))) as scene:
            await scene.until_ready("a-1", "c-1")
            assert scene.instances()["a-1"]["max_concurrency"] == 4
            assert not is_alive(pids["a-1"])
            await eventually(lambda: not is_alive(pids["b-1"]), "b is stopped")
            assert scene.pids()["c-1"] == pids["c-1"]

    run(story())


def test_a_process_that_the_store_does_not_know_is_adopted_by_its_note(state: Path) -> None:
    """The store could not be written when it was started, or knows only the process before it."""

    async def story() -> None:
        wanted = manifest(simulated("a"), simulated("b"), simulated("c"))
        pids = killed_plane(state, wanted, grace_s=30.0)
        with sqlite3.connect(state / FILE) as db:
            db.execute("delete from instances where id = 'a-1'")
            db.execute("update instances set pid = null, port = 1 where id = 'b-1'")
            db.execute("update instances set pid = 1, born = 'x', port = 2 where id = 'c-1'")
        db.close()
        async with running(state, None) as scene:
            await scene.until_ready("a-1", "b-1", "c-1")
            assert scene.pids() == pids

    run(story())


def test_an_unknown_process_is_killed(state: Path) -> None:
    async def story() -> None:
        link, _ = await open_supervisor(state, SupervisorTerms(30.0, 1.0))
        for name, note in (("m-1", ""), ("x", "{}")):
            link.start(name, ["sleep", "600"], dict(os.environ), "/", state / f"{name}.log", note)
        link.ask(ask="list")
        known = await link.answer()
        assert isinstance(known, ProcessesRunning)
        strangers = [one.pid for one in known.instances]
        assert len(strangers) == 2
        link.close()
        async with running(state, manifest(simulated())) as scene:
            await scene.until_ready("m-1")
            assert not any(map(is_alive, strangers))
        await link.process.wait()

    run(story())


def test_after_the_grace_time_nothing_is_left_and_the_next_plane_starts_again(state: Path) -> None:
    pids = killed_plane(state, manifest(simulated()), grace_s=0.1)
    until(lambda: not any(map(is_alive, pids.values())), "the end of all")

    async def story() -> None:
        async with running(state, None) as scene:
            await scene.until_ready("m-1")
            assert scene.pids() != pids

    run(story())


def test_when_plane_and_supervisor_are_killed_the_next_plane_kills_the_remaining_processes(state: Path) -> None:
    """An engine that dies with its supervisor may leave children of its own; they have its group and its mark."""
    engine = f"{sys.executable} -m pointsman.simulator --model family --port {{port}}"
    family = f"""
  - name: family
    model: family
    engine:
      type: command
      parameters:
        command: [sh, -c, "sleep 600 & exec {engine}"]
{LIFECYCLE}"""
    pids = killed_plane(state, manifest(family), grace_s=30.0)
    children = group(pids["family-1"])
    assert len(children) == 2
    os.kill(parent(pids["family-1"]), signal.SIGKILL)
    until(lambda: not is_alive(pids["family-1"]))
    assert any(map(is_alive, children))

    async def story() -> None:
        async with running(state, manifest(simulated())) as scene:
            assert not any(map(is_alive, children))
            await scene.until_ready("m-1")

    run(story())


def test_when_the_supervisor_is_killed_everything_is_restarted(state: Path) -> None:
    async def story() -> None:
        async with running(state, manifest(simulated(replicas=2))) as scene:
            await scene.until_ready("m-1", "m-2")
            before = scene.pids()
            supervisor = scene.runtime._processes.supervisor
            assert supervisor is not None
            os.kill(supervisor.process.pid, signal.SIGKILL)
            await scene.until(lambda: scene.instances()["m-1"]["restarts"] == 1, "a restart")
            await scene.until_ready("m-1", "m-2")
            assert scene.instances()["m-1"]["reason"] == "its supervisor died, and took it along"
            assert not any(map(is_alive, before.values()))
            assert scene.plane.status()["problems"] == []

    run(story())

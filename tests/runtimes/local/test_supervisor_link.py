"""Clearing up after a dead supervisor, with real processes; a stranger's process is never touched."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pointsman.runtimes.machine.children import born
from pointsman.runtimes.machine.supervisor_link import MARK, clear, lives
from tests.runtimes.local.processes import group, is_alive, until
from tests.shortages import no_descriptors

CHILD = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
FAMILY = ["sh", "-c", "sleep 600 & exec sleep 601"]


@contextmanager
def process(argv: list[str], mark: str = "m-1") -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(argv, start_new_session=True, env=os.environ | {MARK: mark})
    try:
        yield started
    finally:
        for pid in group(started.pid):
            os.kill(pid, 9)
        started.wait()


def test_a_group_is_killed_as_a_whole() -> None:
    with process(FAMILY) as leader:
        until(lambda: len(group(leader.pid)) == 2)
        assert asyncio.run(clear("m-1", leader.pid, born(leader.pid)))
        assert group(leader.pid) == []


def test_the_group_of_a_dead_leader_is_killed_if_it_is_marked() -> None:
    with process(FAMILY) as leader:
        until(lambda: len(group(leader.pid)) == 2)
        started = born(leader.pid)
        leader.kill()
        leader.wait()
        assert len(group(leader.pid)) == 1
        assert asyncio.run(clear("m-2", leader.pid, started))
        assert len(group(leader.pid)) == 1, "it is the child of another instance"
        assert asyncio.run(clear("m-1", leader.pid, started))
        assert group(leader.pid) == []


def test_another_process_with_the_same_pid_is_left_alone() -> None:
    with process(CHILD) as stranger:
        boot, _, ticks = born(stranger.pid).partition("/")
        for other in (f"{boot}/{int(ticks) - 1}", f"another-boot/{ticks}", "", "nonsense", f"{boot}/"):
            assert asyncio.run(clear("m-1", stranger.pid, other))
            assert is_alive(stranger.pid)


def test_a_missing_process_has_no_start_time() -> None:
    with process(CHILD) as child:
        pid, started = child.pid, born(child.pid)
        assert started == born(pid) != ""
        assert lives(pid, started)
        assert not lives(pid, f"{started}0")
        child.kill()
        until(lambda: not lives(pid, started))  # dead, and not reaped yet
    assert born(pid) == ""
    assert asyncio.run(clear("m-1", pid, started))


def test_what_cannot_be_looked_at_is_not_gone() -> None:
    with process(CHILD) as child:
        started = born(child.pid)
        with no_descriptors():
            assert lives(child.pid, started)
        child.kill()
        child.wait()
        with no_descriptors():
            assert not lives(child.pid, started)

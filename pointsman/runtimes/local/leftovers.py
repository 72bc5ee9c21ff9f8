"""Process groups that lost their keeper, known by pid and start time: nobody else's process is ever signalled."""

import asyncio
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pointsman.runtimes.local.keeper import born

MARK = "POINTSMAN_INSTANCE"
"""In the environment of every engine: the instance that it is."""
PATIENCE_S = 5.0
"""A killed process may take this long to vanish."""


class Member(NamedTuple):
    """A living process of a group."""

    pid: int
    group: int
    session: int
    ticks: int
    """Its start, since the start of the machine."""


async def clear(instance_id: str, pid: int, started: str) -> bool:
    """Kill what is left of the group of an instance that was started as `pid`. Whether nothing is left."""
    waited_s = 0.0
    while waited_s < PATIENCE_S:
        left = _left(instance_id, pid, started)
        if not left:
            return True
        for one in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        await asyncio.sleep(0.01)
        waited_s += 0.01
    return False


def lives(pid: int, started: str) -> bool:
    """Whether the process that was started as `pid` then still runs."""
    if not started or born(pid) != started:
        return False
    return not Path("/proc/self/stat").exists() or any(one.pid == pid for one in _living([str(pid)]))


def _left(instance_id: str, pid: int, started: str) -> list[int]:
    """Living processes of its group, if it is still its group."""
    if not started or pid <= 1:
        return []
    try:
        os.killpg(pid, 0)  # asks only
    except (ProcessLookupError, PermissionError):
        return []
    if not Path("/proc/self/stat").exists():
        return [pid] if born(pid) == started else []
    now = born(pid)
    if now not in ("", started):
        return []  # somebody else has the number now
    boot, _, ticks = started.partition("/")
    if not ticks.isdecimal() or Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() != boot:
        return []  # of another life of this machine
    members = [one for one in _living() if one.group == one.session == pid and one.ticks >= int(ticks)]
    # While its leader is there the group is ours. Without, the number may have been given away and orphaned again.
    return [one.pid for one in members if now or _is_marked(one.pid, instance_id)]


def _living(numbers: Iterable[str] | None = None) -> Iterator[Member]:
    """All processes, or those of these numbers, that are not dead and only waiting to be reaped."""
    for number in (path.name for path in Path("/proc").iterdir()) if numbers is None else numbers:
        if number.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    yield Member(int(number), int(fields[2]), int(fields[3]), int(fields[19]))


def _is_marked(pid: int, instance_id: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{MARK}={instance_id}".encode() in environment

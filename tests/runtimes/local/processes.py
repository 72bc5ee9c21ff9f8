"""Looking at real processes, and waiting for what must come, with a deadline."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

TIMEOUT_S = 20.0
"""Far more than anything here takes."""


def until(condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what or condition}"
        time.sleep(0.01)


async def eventually(condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what or condition}"
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Zombies are dead."""
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def parent(pid: int) -> int:
    return int(_stat(pid)[1])


def group(number: int) -> list[int]:
    """The living processes of a group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(_stat(int(folder.name))[2]) == number and is_alive(int(folder.name)):
                found.append(int(folder.name))
    return found


def _stat(pid: int) -> list[str]:
    """What the system says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def marked(setting: str) -> dict[int, str]:
    """Living processes that were started with this setting in their environment, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if setting.encode() in (folder / "environ").read_bytes() and is_alive(int(folder.name)):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found

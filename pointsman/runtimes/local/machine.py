"""This machine as a worker: its name, and the CPUs and memory that we may use."""

import os
import socket
from math import ceil
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """What there is for instances to run on."""

    name: str
    cpus: int
    memory_bytes: int | None
    """None: the system does not say."""


def this_machine(cgroup: Path = Path("/sys/fs/cgroup")) -> Machine:
    """What the system says, and the control group that we are in where that says less."""
    return Machine(name=socket.gethostname(), cpus=_cpus(cgroup), memory_bytes=_memory(cgroup))


def _cpus(cgroup: Path) -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        cpus = min(cpus, ceil(int(quota) / int(period)))
    return max(cpus, 1)


def _memory(cgroup: Path) -> int | None:
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = _read(cgroup / "memory.max")
    return min(memory, int(limit)) if limit.isdecimal() else memory


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""

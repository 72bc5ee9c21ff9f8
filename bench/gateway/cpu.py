"""Resource use of processes from /proc: CPU time of all threads in nanoseconds, and resident memory."""

import os
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for member in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            for thread in (PROC / str(member) / "task").iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def cpu_ns(pids: list[int]) -> int:
    """User and system time of all live threads. It lags by a tick while a thread runs."""
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for thread in (PROC / str(pid) / "task").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):
                    total += int((thread / "schedstat").read_text().split()[0])
    return total


def resident_mb(pids: list[int]) -> float:
    """The sum of their resident sets."""
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in (PROC / str(pid) / "status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1])
    return total / 1024


def busy_s(core: int) -> float:
    """Busy time of a core since boot, all processes and time stolen by the hypervisor included."""
    for line in (PROC / "stat").read_text().splitlines():
        if line.startswith(f"cpu{core} "):
            user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
            return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    raise ValueError(f"there is no core {core}")

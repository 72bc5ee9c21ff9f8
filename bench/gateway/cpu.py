"""What processes have used, from /proc: CPU time to the nanosecond over all threads, and resident memory."""

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
    """On a core so far, user and system, over all threads that live; read while they rest, else it lags by a tick."""
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
    """How long a core has worked so far, for whomever; time that the hypervisor gave to others counts too."""
    for line in (PROC / "stat").read_text().splitlines():
        if line.startswith(f"cpu{core} "):
            user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
            return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    raise ValueError(f"there is no core {core}")

"""The memory of the machine that others use."""

from collections.abc import Iterable
from pathlib import Path

from pointsman.runtimes.local.detection.files import kib, number, text


def foreign_memory(total: int, ours: Iterable[int], root: Path) -> int:
    """What neither we have nor anybody could get, of `total` that we may use at all; 0 if the system does not say."""
    available = kib(root / "proc/meminfo", "MemAvailable")
    left = [size for size in (available, _left_in_group(total, root / "sys/fs/cgroup")) if size is not None]
    if not left or not total:
        return 0
    # What is mapped from files can be had again, so it counts as available already; only what is written is ours.
    own = sum(kib(root / "proc" / str(pid) / "status", "RssAnon") or 0 for pid in ours)
    return min(max(total - min(left) - own, 0), total)


def _left_in_group(total: int, cgroup: Path) -> int | None:
    """What our control group may still have, if it has a limit."""
    limit, current = number(cgroup / "memory.max"), number(cgroup / "memory.current")
    if limit is None or current is None:
        return None
    lines = (line.split() for line in text(cgroup / "memory.stat").splitlines())
    cached = next((int(words[1]) for words in lines if len(words) == 2 and words[0] == "inactive_file"), 0)
    return max(min(limit, total) - max(current - cached, 0), 0)

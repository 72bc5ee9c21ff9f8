"""What Linux reports under /proc and /sys: memory, control groups, PCI topology, process trees."""

import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from pathlib import Path

import msgspec

from pointsman.types import Gpu


def text(path: Path) -> str:
    """The content of a file, stripped; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The number in a file, decimal or as 0x1002; None if there is none."""
    try:
        return int(text(path), 0)
    except ValueError:
        return None


def kib(path: Path, name: str) -> int | None:
    """The value, in bytes, of a line such as "MemAvailable: 1024 kB"; None if there is no such line."""
    for line in text(path).splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if key == name and words and words[0].isdecimal():
            return int(words[0]) * 1024
    return None


def groups(neighbours: Mapping[str, Sequence[str]], word: str) -> dict[str, str]:
    """Device -> the name of its group, such as nvlink-0. Devices in a group reach each other, perhaps over switches."""
    together: dict[str, set[str]] = {}
    for device, others in neighbours.items():
        merged = {device, *others}
        for one in list(merged):
            merged |= together.get(one, set())
        for one in merged:
            together[one] = merged
    names: dict[int, str] = {}
    found = {}
    for device in neighbours:
        group = together[device]
        if sum(one in neighbours for one in group) > 1:
            found[device] = names.setdefault(id(group), f"{word}-{len(names)}")
    return found


def foreign_memory(total: int, ours: Iterable[int], root: Path) -> int:
    """Memory that other programs use, of `total` that this process may use; 0 if the system does not say."""
    available = kib(root / "proc/meminfo", "MemAvailable")
    left = [size for size in (available, _left_in_group(total, root / "sys/fs/cgroup")) if size is not None]
    if not left or not total:
        return 0
    # Pages mapped from files can be reclaimed, so they count as available already; only anonymous pages are added.
    own = sum(kib(root / "proc" / str(pid) / "status", "RssAnon") or 0 for pid in ours)
    return min(max(total - min(left) - own, 0), total)


def _left_in_group(total: int, cgroup: Path) -> int | None:
    """The amount that the control group of this process may still use; None if it has no limit."""
    limit, current = number(cgroup / "memory.max"), number(cgroup / "memory.current")
    if limit is None or current is None:
        return None
    lines = (line.split() for line in text(cgroup / "memory.stat").splitlines())
    cached = next((int(words[1]) for words in lines if len(words) == 2 and words[0] == "inactive_file"), 0)
    return max(min(limit, total) - max(current - cached, 0), 0)


NVIDIA, AMD = 0x10DE, 0x1002
"""PCI vendors."""
DISPLAY = 0x03
"""The PCI class of GPUs."""


def with_topology(gpus: Sequence[tuple[Gpu, str]], sys: Path) -> list[Gpu]:
    """GPUs, given with their PCI addresses, with NUMA node and PCIe switch."""
    ports = [_root_port(address, sys) for _, address in gpus]
    shared = Counter(ports)
    placed = []
    for (gpu, address), port in zip(gpus, ports, strict=True):
        node = number(sys / "bus/pci/devices" / pci_address(address) / "numa_node")
        # GPUs behind the same root port share a switch.
        switch = port if shared[port] > 1 else ""
        numa = node if node is not None and node >= 0 else None
        placed.append(msgspec.structs.replace(gpu, numa=numa, pcie=switch))
    return placed


def pci_address(address: str) -> str:
    """The form that Linux uses, 0000:3b:00.0; NVML writes 00000000:3B:00.0."""
    domain, _, rest = address.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return address


def count_of_gpus(sys: Path, vendor: int) -> int:
    """GPUs of a vendor that are plugged in."""
    return sum(
        number(device / "vendor") == vendor and (number(device / "class") or 0) >> 16 == DISPLAY
        for device in (sys / "bus/pci/devices").glob("*")
    )


def _root_port(address: str, sys: Path) -> str:
    """The root port of a device; empty if it has none."""
    device = sys / "bus/pci/devices" / pci_address(address)
    if not device.exists():
        return ""
    parts = device.resolve().parts
    root = max((index for index, part in enumerate(parts) if part.startswith("pci0")), default=None)
    below = parts[root + 1 : -1] if root is not None else ()
    return below[0] if below else ""


def family(pids: Iterable[int], proc: Path) -> frozenset[int]:
    """Processes with all their descendants: engines start one process per GPU."""
    found = set(pids)
    if not found:
        return frozenset()
    children: dict[int, list[int]] = {}
    for folder in proc.glob("[0-9]*"):
        # "12 (any (name) at all) S 7 ...": the parent is the second word after the last parenthesis
        words = text(folder / "stat").rpartition(")")[2].split()
        if len(words) > 1 and words[1].isdecimal() and folder.name.isdecimal():
            children.setdefault(int(words[1]), []).append(int(folder.name))
    new = list(found)
    while new:
        born = [child for child in children.get(new.pop(), ()) if child not in found]
        found.update(born)
        new += born
    return frozenset(found)


class Machine(msgspec.Struct, frozen=True):
    """CPUs and memory that this process may use."""

    name: str
    cpus: int
    memory_bytes: int | None
    """None if unknown."""


def this_machine(cgroup: Path = Path("/sys/fs/cgroup")) -> Machine:
    """The machine: what the system has, or what the control group of this process allows, if that is less."""
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

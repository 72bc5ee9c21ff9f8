"""The small files through which Linux tells what it knows."""

import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from pathlib import Path

import msgspec

from pointsman.types import Gpu


def text(path: Path) -> str:
    """What a file says, without blanks around it; empty: it is not there, or not for us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """A whole number, also as 0x1002; None: there is none."""
    try:
        return int(text(path), 0)
    except ValueError:
        return None


def kib(path: Path, name: str) -> int | None:
    """The bytes of a line such as "MemAvailable: 1024 kB"; None: there is no such line."""
    for line in text(path).splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if key == name and words and words[0].isdecimal():
            return int(words[0]) * 1024
    return None


# Who reaches whom: from links between devices to groups of GPUs.


def groups(neighbours: Mapping[str, Sequence[str]], word: str) -> dict[str, str]:
    """Each device that reaches another of them, directly or over switches -> the name of its group: nvlink-0."""
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


# The memory of the machine that others use.


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


# Where GPUs are plugged in: NUMA nodes, and PCIe switches that several of them share.


NVIDIA, AMD = 0x10DE, 0x1002
DISPLAY = 0x03
"""The class of devices that GPUs are in."""


def with_places(gpus: Sequence[tuple[Gpu, str]], sys: Path) -> list[Gpu]:
    """The GPUs, each told with its PCI address, with their NUMA node and switch."""
    ports = [_root_port(address, sys) for _, address in gpus]
    shared = Counter(ports)
    placed = []
    for (gpu, address), port in zip(gpus, ports, strict=True):
        node = number(sys / "bus/pci/devices" / pci_address(address) / "numa_node")
        # From a port of the processor leads one cable: who share it meet at a switch.
        switch = port if shared[port] > 1 else ""
        numa = node if node is not None and node >= 0 else None
        placed.append(msgspec.structs.replace(gpu, numa=numa, pcie=switch))
    return placed


def pci_address(address: str) -> str:
    """As Linux writes it, 0000:3b:00.0; NVIDIA's library has 00000000:3B:00.0."""
    domain, _, rest = address.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return address


def count_of_gpus(sys: Path, vendor: int) -> int:
    """Devices of this maker that draw or compute."""
    return sum(
        number(device / "vendor") == vendor and (number(device / "class") or 0) >> 16 == DISPLAY
        for device in (sys / "bus/pci/devices").glob("*")
    )


def _root_port(address: str, sys: Path) -> str:
    """The port of the processor behind which a device is; empty: it is not behind any."""
    device = sys / "bus/pci/devices" / pci_address(address)
    if not device.exists():
        return ""
    way = device.resolve().parts
    root = max((place for place, part in enumerate(way) if part.startswith("pci0")), default=None)
    below = way[root + 1 : -1] if root is not None else ()
    return below[0] if below else ""


# Which processes belong to our instances: engines start processes of their own, one per GPU.


def family(pids: Iterable[int], proc: Path) -> frozenset[int]:
    """These processes and all that descend from them."""
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


# This machine as a worker: its name, and the CPUs and memory that we may use.


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

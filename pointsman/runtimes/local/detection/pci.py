"""Where GPUs are plugged in: NUMA nodes, and PCIe switches that several of them share."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pointsman.runtimes.local.detection.files import number
from pointsman.types import Gpu

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

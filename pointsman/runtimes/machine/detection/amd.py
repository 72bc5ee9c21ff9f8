"""AMD GPUs, from what their driver (amdgpu) writes under /sys."""

from collections.abc import Collection
from pathlib import Path

from pointsman.runtimes.machine.detection.system import AMD, groups, number, text, with_topology
from pointsman.types import Gpu

MIN_BYTES = 2**30
"""GPUs with less memory are integrated into a processor."""
MODELS = {
    0x7408: "AMD Instinct MI250X",
    0x740C: "AMD Instinct MI250X",
    0x740F: "AMD Instinct MI210",
    0x738C: "AMD Instinct MI100",
    0x74A1: "AMD Instinct MI300X",
    0x74A5: "AMD Instinct MI325X",
    0x75A3: "AMD Instinct MI355X",
    0x744C: "AMD Radeon RX 7900 XTX",
}
"""Names of GPUs whose driver does not report a name."""


def amd_gpus(sys: Path, ours: Collection[int], visible: str | None) -> list[Gpu]:
    """The usable GPUs, by PCI address. `visible`: HIP_VISIBLE_DEVICES."""
    devices = amd_devices(sys)
    hives = {device.name: text(device / "xgmi_hive_info/xgmi_hive_id") for device in devices}
    links = groups({name: [f"hive {hive}"] if hive else [] for name, hive in hives.items()}, "xgmi")
    compute_ids = _compute_ids(sys)
    found = []
    for index, device in enumerate(devices):
        total = number(device / "mem_info_vram_total") or 0
        if total < MIN_BYTES or not _is_named(index, visible):
            continue
        used = number(device / "mem_info_vram_used") or 0
        own = _used_by_ours(sys, compute_ids.get(device.name), ours)
        gpu = Gpu(
            index=index,
            memory_bytes=total,
            model=text(device / "product_name") or MODELS.get(number(device / "device") or 0, "AMD GPU"),
            vendor="amd",
            used_bytes=min(max(used - own, 0), total),
            link=links.get(device.name, ""),
        )
        found.append((gpu, device.name))
    return with_topology(found, sys)


def amd_devices(sys: Path) -> list[Path]:
    """The folder of each card, by PCI address, which is the order of their indices."""
    found = [
        (card / "device").resolve()
        for card in (sys / "class/drm").glob("card[0-9]*")
        if number(card / "device/vendor") == AMD and (card / "device/mem_info_vram_total").exists()
    ]
    return sorted(found, key=lambda device: device.name)


def _is_named(index: int, visible: str | None) -> bool:
    return visible is None or str(index) in [word.strip() for word in visible.split(",")]


def _compute_ids(sys: Path) -> dict[str, str]:
    """PCI address -> the id that the compute driver (KFD) gives a GPU."""
    ids = {}
    for node in (sys / "class/kfd/kfd/topology/nodes").glob("*"):
        lines = (line.split() for line in text(node / "properties").splitlines())
        properties = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}
        gpu_id, location = text(node / "gpu_id"), properties.get("location_id", 0)
        if gpu_id not in ("", "0"):
            bus, slot, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 0x7
            ids[f"{properties.get('domain', 0):04x}:{bus:02x}:{slot:02x}.{function}"] = gpu_id
    return ids


def _used_by_ours(sys: Path, compute_id: str | None, ours: Collection[int]) -> int:
    if compute_id is None:
        return 0
    return sum(number(sys / f"class/kfd/kfd/proc/{pid}/vram_{compute_id}") or 0 for pid in ours)

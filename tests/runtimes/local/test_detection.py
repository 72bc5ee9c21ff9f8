"""This machine as a worker: drivers and /sys as they would be, written by the tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.runtimes.machine.detection import detect, unseen
from pointsman.runtimes.machine.detection.system import family, groups, pci_address
from pointsman.types import Worker

MIB, GIB = 2**20, 2**30


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


# NVIDIA


class Error(Exception):
    """What the library raises."""


class Info(msgspec.Struct):
    """One of its structs: the fields that are read."""

    total: int = 0
    used: int = 0
    busId: str | bytes = ""  # noqa: N815
    pid: int = 0
    usedGpuMemory: int | None = None  # noqa: N815
    gpu: int = 0


class Card(msgspec.Struct):
    """A GPU of the library below."""

    bus: str
    name: str | bytes = "NVIDIA H100 80GB HBM3"
    total: int = 80 * GIB
    used: int = 0
    uuid: str = "GPU-0"
    processes: dict[int, int | None] = {}
    links: dict[int, str] = {}
    """Number -> what is at its other end; empty: it is not told."""
    divided: bool = False
    own_memory: bool = True
    busy: int | None = 0
    """Percent; None: it is not told."""


class Library:
    """A small NVML: the module's names, over cards that a test describes."""

    NVMLError: type[Exception] = Error
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, *cards: Card, driver: bool = True) -> None:
        self._cards = cards
        self._driver = driver
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self._driver:
            raise Error("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        return self._cards[index]

    def nvmlDeviceGetName(self, handle: Card) -> str | bytes:  # noqa: N802
        return handle.name

    def nvmlDeviceGetUUID(self, handle: Card) -> str | bytes:  # noqa: N802
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: Card) -> Info:  # noqa: N802
        if not handle.own_memory:
            raise Error("Not Supported")
        return Info(total=handle.total, used=handle.used)

    def nvmlDeviceGetPciInfo(self, handle: Card) -> Info:  # noqa: N802
        return Info(busId=handle.bus)

    def nvmlDeviceGetMigMode(self, handle: Card) -> Sequence[int]:  # noqa: N802
        if "H100" not in str(handle.name):
            raise Error("Not Supported")
        return [int(handle.divided), 0]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Card) -> list[Info]:  # noqa: N802
        return [Info(pid=pid, usedGpuMemory=used) for pid, used in handle.processes.items()]

    def nvmlDeviceGetUtilizationRates(self, handle: Card) -> Info:  # noqa: N802
        if handle.busy is None:
            raise Error("Not Supported")
        return Info(gpu=handle.busy)

    def nvmlDeviceGetNvLinkState(self, handle: Card, link: int) -> int:  # noqa: N802
        if not handle.links:
            raise Error("Not Supported")
        return int(link in handle.links)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Card, link: int) -> Info:  # noqa: N802
        if not handle.links[link]:
            raise Error("Not Supported")
        return Info(busId=handle.links[link].encode())


def found(*cards: Card, root: Path, visible: str | None = None, ours: Sequence[int] = ()) -> Worker:
    library = Library(*cards)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    worker = detect(ours, nvml=library, root=root, environ=environ)
    assert not library.open, "what was opened is closed"
    return worker


def test_gpus_with_their_memory_and_names(tmp_path: Path) -> None:
    cards = [Card("00000000:3B:00.0", used=500 * MIB), Card("00000000:5E:00.0", name=b"Tesla T4", total=15360 * MIB)]
    worker = found(*cards, root=tmp_path)
    told = [(gpu.index, gpu.model, gpu.vendor, gpu.memory_bytes, gpu.used_bytes) for gpu in worker.gpus]
    assert told == [
        (0, "NVIDIA H100 80GB HBM3", "nvidia", 80 * GIB, 500 * MIB),
        (1, "Tesla T4", "nvidia", 15360 * MIB, 0),
    ]
    assert all((gpu.link, gpu.pcie, gpu.numa) == ("", "", None) for gpu in worker.gpus)
    assert not worker.unified_memory


def test_memory_of_our_instances_does_not_count_as_used(tmp_path: Path) -> None:
    write(tmp_path, {"proc/10/stat": "10 (vllm serve) S 1 10", "proc/11/stat": "11 (Worker) (TP0)) S 10 10"})
    card = Card("0:1:0.0", used=70 * GIB, processes={10: GIB, 11: 60 * GIB, 12: 5 * GIB, 13: None})
    [mine] = found(card, root=tmp_path, ours=[10]).gpus
    assert mine.used_bytes == 9 * GIB, "a child of ours is ours; a process of others is not"
    [nobodys] = found(card, root=tmp_path).gpus
    assert nobodys.used_bytes == 70 * GIB
    [unknown] = found(card, root=tmp_path, ours=[13]).gpus
    assert unknown.used_bytes == 70 * GIB, "what is not told is counted"
    [odd] = found(msgspec.structs.replace(card, used=GIB), root=tmp_path, ours=[10]).gpus
    assert odd.used_bytes == 0


@pytest.mark.parametrize(
    ("links", "groups_of"),
    [
        ([{}, {}], ["", ""]),
        ([{0: "00000000:02:00.0"}, {0: "00000000:01:00.0"}], ["nvlink-0", "nvlink-0"]),
        ([{0: "0:F0:00.0", 1: "0:F1:00.0"}, {1: "0:F0:00.0"}, {}], ["nvlink-0", "nvlink-0", ""]),
        ([{0: "0:2:00.0"}, {0: "0:1:00.0"}, {3: "0:4:00.0"}, {}], ["nvlink-0", "nvlink-0", "nvlink-1", "nvlink-1"]),
        ([{0: ""}, {0: ""}], ["nvlink-0", "nvlink-0"]),
        ([{0: "0:77:00.0"}, {}], ["", ""]),
    ],
    ids=["none", "direct", "over a switch", "two pairs", "a hidden switch", "to no GPU here"],
)
def test_nvlink(tmp_path: Path, links: list[dict[int, str]], groups_of: list[str]) -> None:
    def four(text: str) -> str:
        domain, bus, rest = text.split(":")
        return f"{int(domain, 16):08X}:{int(bus, 16):02X}:{rest}"

    cards = [
        Card(f"00000000:{place + 1:02X}:00.0", links={n: other and four(other) for n, other in ends.items()})
        for place, ends in enumerate(links)
    ]
    assert [gpu.link for gpu in found(*cards, root=tmp_path).gpus] == groups_of


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2, 0", [0, 2]),
        ("GPU-b", [1]),
        ("0,-1,2", [0]),
        ("GPU-a,GPU-c12", [0, 2]),
        ("7", []),
    ],
)
def test_visible_devices_limit_the_gpus(tmp_path: Path, visible: str | None, indices: list[int]) -> None:
    cards = [Card(f"0:{place}:0.0", uuid=uuid) for place, uuid in enumerate(["GPU-a1", "GPU-b1", "GPU-c123"])]
    assert [gpu.index for gpu in found(*cards, root=tmp_path, visible=visible).gpus] == indices


def test_a_gpu_in_mig_mode_is_left_out_and_the_others_keep_their_index(tmp_path: Path) -> None:
    worker = found(Card("0:1:0.0", divided=True), Card("0:2:0.0"), root=tmp_path)
    assert [gpu.index for gpu in worker.gpus] == [1]


def test_gpus_without_memory_of_their_own(tmp_path: Path) -> None:
    worker = found(Card("0:1:0.0", name="NVIDIA GB10", own_memory=False), root=tmp_path)
    assert worker.unified_memory
    assert worker.gpus[0].memory_bytes == worker.memory_bytes > 0


def test_no_driver_is_fine(tmp_path: Path) -> None:
    assert detect(nvml=Library(Card("0:1:0.0"), driver=False), root=tmp_path, environ={}).gpus == ()


def test_a_driver_that_stops_answering(tmp_path: Path) -> None:
    class Gone(Library):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise Error("GPU is lost")

    library = Gone(Card("0:1:0.0"))
    assert detect(nvml=library, root=tmp_path, environ={}).gpus == ()
    assert not library.open


# Where they are plugged in


def plugged(root: Path, *ways: str) -> Path:
    """Devices by their way from the processor: port/switch/.../device."""
    for way in ways:
        device = root / "sys/devices/pci0000:00" / way
        device.mkdir(parents=True)
        link = root / "sys/bus/pci/devices" / device.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
    return root


def test_numa_nodes_and_switches(tmp_path: Path) -> None:
    plugged(
        tmp_path,
        "0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0",
        "0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0",
        "0000:00:02.0/0000:05:00.0",
        "0000:06:00.0",
    )
    nodes = {"03": 0, "04": 0, "05": 1, "06": -1}
    write(tmp_path, {f"sys/bus/pci/devices/0000:{bus}:00.0/numa_node": node for bus, node in nodes.items()})
    worker = found(*[Card(f"00000000:{bus}:00.0") for bus in nodes], root=tmp_path)
    assert [gpu.numa for gpu in worker.gpus] == [0, 0, 1, None]
    assert [gpu.pcie for gpu in worker.gpus] == ["0000:00:01.0", "0000:00:01.0", "", ""]


@pytest.mark.parametrize(
    ("told", "written"),
    [("00000000:3B:00.0", "0000:3b:00.0"), ("00010000:01:00.0", "10000:01:00.0"), ("nonsense", "nonsense")],
)
def test_addresses(told: str, written: str) -> None:
    assert pci_address(told) == written


def test_gpus_without_a_driver_are_reported(tmp_path: Path) -> None:
    devices = "sys/bus/pci/devices"
    write(tmp_path, {f"{devices}/a/vendor": "0x10de", f"{devices}/a/class": "0x030200"})
    write(tmp_path, {f"{devices}/b/vendor": "0x10de", f"{devices}/b/class": "0x040300"})  # its sound
    worker = detect(nvml=Library(driver=False), root=tmp_path, environ={})
    assert str(unseen(worker, tmp_path)) == (
        "1 NVIDIA GPU is plugged in and cannot be asked; install the driver, and pip install nvidia-ml-py"
    )
    assert unseen(found(Card("0:1:0.0"), root=tmp_path), tmp_path) is None
    assert unseen(worker, tmp_path / "elsewhere") is None


# AMD


def amd(root: Path, number: int, bus: str, files: dict[str, object], *, vendor: str = "0x1002") -> None:
    device = f"sys/devices/pci0000:00/0000:{bus}:00.0"
    write(root, {f"{device}/{name}": content for name, content in ({"vendor": vendor} | files).items()})
    card = root / f"sys/class/drm/card{number}"
    card.mkdir(parents=True)
    (card / "device").symlink_to(root / device)
    (root / f"sys/class/drm/card{number}-DP-1").mkdir()


def test_amd_gpus(tmp_path: Path) -> None:
    total = 196592 * MIB
    hive = {"xgmi_hive_info/xgmi_hive_id": "17", "device": "0x74a1"}
    amd(tmp_path, 2, "05", {"mem_info_vram_total": total, "mem_info_vram_used": 10 * GIB, **hive})
    amd(
        tmp_path, 1, "15", {"mem_info_vram_total": total, "mem_info_vram_used": GIB, **hive, "product_name": "MI300X-O"}
    )
    amd(tmp_path, 0, "25", {"mem_info_vram_total": 512 * MIB, "mem_info_vram_used": 0})
    amd(tmp_path, 3, "35", {}, vendor="0x8086")
    node = "sys/class/kfd/kfd/topology/nodes/1"
    write(
        tmp_path, {f"{node}/gpu_id": "4711", f"{node}/properties": f"cpu_cores_count 0\nlocation_id {5 << 8}\ndomain 0"}
    )
    write(tmp_path, {"sys/class/kfd/kfd/proc/99/vram_4711": 7 * GIB})
    worker = detect([99], nvml=Library(driver=False), root=tmp_path, environ={})
    told = [(gpu.index, gpu.model, gpu.vendor, gpu.memory_bytes, gpu.used_bytes, gpu.link) for gpu in worker.gpus]
    assert told == [
        (0, "AMD Instinct MI300X", "amd", total, 3 * GIB, "xgmi-0"),
        (1, "MI300X-O", "amd", total, GIB, "xgmi-0"),
    ]
    only = detect(nvml=Library(driver=False), root=tmp_path, environ={"HIP_VISIBLE_DEVICES": "1"})
    assert [gpu.index for gpu in only.gpus] == [1]


# Memory and processes


@pytest.mark.parametrize(
    ("files", "ours", "used"),
    [
        ({}, [], lambda total: 0),
        ({"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {GIB // 1024} kB"}, [], lambda total: total - GIB),
        (
            {"proc/meminfo": f"MemAvailable: {GIB // 1024} kB", "proc/7/status": f"RssAnon:\t{GIB // 1024} kB"},
            [7, 8],
            lambda total: total - 2 * GIB,
        ),
        ({"proc/meminfo": "MemAvailable: 99999999999 kB"}, [], lambda total: 0),
        ({"proc/meminfo": "nonsense"}, [], lambda total: 0),
        (
            {
                "proc/meminfo": "MemAvailable: 99999999999 kB",
                "sys/fs/cgroup/memory.max": 2 * GIB,
                "sys/fs/cgroup/memory.current": GIB,
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB // 4}",
            },
            [],
            lambda total: GIB * 3 // 4,
        ),
    ],
    ids=["unknown", "machine", "ours", "more than there is", "nonsense", "control group"],
)
def test_memory_of_other_programs(
    tmp_path: Path, files: dict[str, object], ours: list[int], used: Callable[[int], int]
) -> None:
    worker = detect(ours, nvml=Library(driver=False), root=write(tmp_path, files), environ={})
    assert worker.used_memory_bytes == used(worker.memory_bytes)


def test_the_family_of_a_process(tmp_path: Path) -> None:
    parents = {10: 1, 11: 10, 12: 11, 13: 1, 14: 13, 15: 12}
    write(tmp_path, {f"{pid}/stat": f"{pid} (a ) b) R {parent} 0" for pid, parent in parents.items()})
    write(tmp_path, {"self/stat": "9 (x) R 10 0", "16/stat": "gone"})
    assert family([10], tmp_path) == {10, 11, 12, 15}
    assert family([14, 99], tmp_path) == {14, 99}
    assert family([], tmp_path) == frozenset()


def test_groups_are_closed() -> None:
    assert groups({"a": ["x"], "b": ["y"], "c": ["x", "y"], "d": []}, "l") == {"a": "l-0", "b": "l-0", "c": "l-0"}


# This one


def test_this_machine() -> None:
    worker = detect(labels={"rack": "r1"}, files=["m"])
    assert worker.cpus >= 1
    assert 0 <= worker.used_memory_bytes < worker.memory_bytes
    assert (worker.labels, worker.files) == ({"rack": "r1"}, frozenset({"m"}))


def test_a_mac_has_one_gpu_that_shares_its_memory(tmp_path: Path) -> None:
    worker = detect(nvml=Library(driver=False), root=tmp_path, environ={}, system="Darwin-arm64")
    assert worker.unified_memory
    assert [(gpu.vendor, gpu.memory_bytes) for gpu in worker.gpus] == [("apple", int(worker.memory_bytes * 0.75))]

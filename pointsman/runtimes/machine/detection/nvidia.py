"""NVIDIA GPUs, from its management library (NVML; `pip install nvidia-ml-py`)."""

from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from pointsman.runtimes.machine.detection.system import groups, pci_address, with_topology
from pointsman.types import Gpu

HIDDEN_SWITCH = "a switch that is not shown"


class Nvml(Protocol):
    """The part of the module `pynvml` that is used."""

    NVMLError: type[Exception]
    NVML_NVLINK_MAX_LINKS: int

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: N802
    def nvmlDeviceGetName(self, handle: Any) -> str | bytes: ...  # noqa: N802
    def nvmlDeviceGetUUID(self, handle: Any) -> str | bytes: ...  # noqa: N802
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetMigMode(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int: ...  # noqa: N802
    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Any, link: int) -> Any: ...  # noqa: N802


def installed_nvml() -> Nvml | None:
    """The library; None if it is not installed. Even with the library, the driver may be missing."""
    try:
        return cast(Nvml, import_module("pynvml"))
    except ImportError:
        return None


def nvidia_gpus(
    nvml: Nvml, machine_bytes: int, ours: Collection[int], sys: Path, visible: str | None
) -> tuple[list[Gpu], bool]:
    """The usable GPUs, and whether they use the machine's memory. `visible`: CUDA_VISIBLE_DEVICES."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return [], False
    try:
        return _Driver(nvml, machine_bytes, ours).gpus(sys, visible)
    except nvml.NVMLError:  # the driver was unloaded, or does not answer
        return [], False
    finally:
        nvml.nvmlShutdown()


class _Driver:
    """The library while it is open."""

    def __init__(self, nvml: Nvml, machine_bytes: int, ours: Collection[int]) -> None:
        self._nvml = nvml
        self._machine_bytes = machine_bytes
        self._ours = ours

    def gpus(self, sys: Path, visible: str | None) -> tuple[list[Gpu], bool]:
        handles = {
            index: self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())
        }
        handles = {index: handle for index, handle in handles.items() if not self._is_divided(handle)}
        if visible is not None:
            handles = {index: handle for index, handle in handles.items() if self._is_named(index, handle, visible)}
        sizes = {index: self._memory(handle) for index, handle in handles.items()}
        addresses = {index: self._address(handle) for index, handle in handles.items()}
        links = groups({addresses[index]: self._neighbours(handle) for index, handle in handles.items()}, "nvlink")
        found = []
        for index, handle in handles.items():
            total, used = sizes[index] or (self._machine_bytes, 0)
            gpu = Gpu(
                index=index,
                memory_bytes=total,
                model=_text(self._nvml.nvmlDeviceGetName(handle)),
                used_bytes=min(max(used - self._used_by_ours(handle), 0), total),
                link=links.get(addresses[index], ""),
            )
            found.append((gpu, addresses[index]))
        return with_topology(found, sys), bool(found) and not any(sizes.values())

    def _is_divided(self, handle: Any) -> bool:
        """Whether a GPU is in MIG mode. If so, an instance cannot have the whole GPU."""
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(handle)[0])
        except self._nvml.NVMLError:
            return False

    def _is_named(self, index: int, handle: Any, visible: str) -> bool:
        """Whether CUDA_VISIBLE_DEVICES names a GPU, read as CUDA does: indices and prefixes of UUIDs, up to the first
        word that is neither."""
        uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
        for word in (word.strip() for word in visible.split(",")):
            if not word.isdecimal() and not word.startswith("GPU-"):
                return False
            if word == str(index) or (word.startswith("GPU-") and uuid.startswith(word)):
                return True
        return False

    def _memory(self, handle: Any) -> tuple[int, int] | None:
        """(total, used) of a GPU; None if it has no memory of its own."""
        try:
            info = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError:
            return None
        return int(info.total), int(info.used)

    def _address(self, handle: Any) -> str:
        return pci_address(_text(self._nvml.nvmlDeviceGetPciInfo(handle).busId))

    def _used_by_ours(self, handle: Any) -> int:
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError:
            return 0
        return sum(int(one.usedGpuMemory or 0) for one in processes if one.pid in self._ours)

    def _neighbours(self, handle: Any) -> list[str]:
        """The GPUs or switches at the other ends of a GPU's NVLinks."""
        found = []
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not self._nvml.nvmlDeviceGetNvLinkState(handle, link):
                    continue
            except self._nvml.NVMLError:  # the GPU has no such link
                continue
            try:
                found.append(pci_address(_text(self._nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)))
            except self._nvml.NVMLError:  # a virtual machine may see links without their switch
                found.append(HIDDEN_SWITCH)
        return found


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value

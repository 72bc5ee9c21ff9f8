"""How busy GPUs are, read from NVML for NVIDIA, and from the files of the driver under /sys for AMD.

Both sources report the share of the last interval in which any program computed anything. A GPU that does not report
this share (because it is in MIG mode, or from another vendor) has no number, and is not read again for a while.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from threading import Lock, Thread

from pointsman.control import InstanceStatus, Phase
from pointsman.runtimes.machine.detection.amd import amd_devices
from pointsman.runtimes.machine.detection.nvidia import Nvml, installed_nvml
from pointsman.runtimes.machine.detection.system import number
from pointsman.runtimes.policy_runner import PolicyRunner
from pointsman.types import Gpu, Worker

VENDORS = ("nvidia", "amd")
"""Vendors whose GPUs can be read."""
RETRY_S = 60.0
"""A GPU that did not report its usage is not read again for this long."""
GPU_INTERVAL_S = 1.0
"""Minimum interval between readings. Drivers measure over about the same time."""
GPU_TIME_LIMIT_S = 0.2
"""Time limit for a reading; without an answer, a policy is called without GPU usage."""
GPU_IDLE_S = 60.0
"""Drivers that are not read for this long are closed."""


class GpuDrivers:
    """The drivers of this machine. They may be slow, so they are called on a thread."""

    def __init__(
        self, nvml: Nvml | None = None, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`nvml`: NVIDIA's library (default: the installed one). `root`: the folder with /sys."""
        self._given = nvml
        self._open: Nvml | None = None
        """The library, which stays open because opening it takes longer than reading."""
        self._sys = root / "sys"
        self._clock = clock
        self._retry_at: dict[int, float] = {}
        """GPUs that did not report their usage, and when to read them again."""
        self._lock = Lock()

    def busy(self, gpus: Iterable[Gpu]) -> dict[int, float]:
        """The share in use, 0 to 1, by index. GPUs that do not report a share are left out."""
        with self._lock:
            now = self._clock()
            due = [gpu for gpu in gpus if self._retry_at.get(gpu.index, now) <= now]
            percents = {
                **self._nvidia([gpu.index for gpu in due if gpu.vendor == "nvidia"]),
                **self._amd([gpu.index for gpu in due if gpu.vendor == "amd"]),
            }
            known = {index: percent / 100 for index, percent in percents.items() if 0 <= percent <= 100}
            self._retry_at |= {gpu.index: now + RETRY_S for gpu in due if gpu.index not in known}
            return known

    def close(self) -> None:
        """Close the driver, so that an administrator can replace it. `busy` opens it again."""
        with self._lock:
            self._close_nvml()

    def _nvidia(self, indices: list[int]) -> dict[int, int]:
        nvml = self._opened() if indices else None
        if nvml is None:
            return {}
        found = {}
        for index in indices:
            with suppress(nvml.NVMLError):  # in MIG mode, or lost
                found[index] = int(nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByIndex(index)).gpu)
        if not found:  # a driver that was replaced must be opened again
            self._close_nvml()
        return found

    def _opened(self) -> Nvml | None:
        nvml = self._open or self._given or installed_nvml()
        if self._open is None and nvml is not None:
            with suppress(nvml.NVMLError):
                nvml.nvmlInit()
                self._open = nvml
        return self._open

    def _close_nvml(self) -> None:
        nvml, self._open = self._open, None
        if nvml is not None:
            with suppress(nvml.NVMLError):  # it is already gone
                nvml.nvmlShutdown()

    def _amd(self, indices: list[int]) -> dict[int, int]:
        devices = amd_devices(self._sys) if indices else []
        found = {index: number(devices[index] / "gpu_busy_percent") for index in indices if index < len(devices)}
        return {index: percent for index, percent in found.items() if percent is not None}


class GpuUsage:
    """`GpuMeter` of the interface, for the GPUs of this machine."""

    def __init__(
        self,
        drivers: GpuDrivers | None = None,
        clock: Callable[[], float] = time.monotonic,
        limit_s: float = GPU_TIME_LIMIT_S,
        idle_s: float = GPU_IDLE_S,
    ) -> None:
        self._drivers = drivers or GpuDrivers()
        self._clock = clock
        self._limit_s, self._idle_s = limit_s, idle_s
        self._gpus: dict[tuple[str, int], Gpu] = {}
        """GPUs by worker and index, as places name them."""
        self._busy: dict[int, float] = {}
        self._runner = PolicyRunner("GPU usage")
        self._read_at: float | None = None
        self._reading: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None

    def see(self, worker: Worker) -> None:
        self._gpus = {(worker.name, gpu.index): gpu for gpu in worker.gpus if gpu.vendor in VENDORS}

    async def read(self, deployments: Collection[str], instances: Sequence[InstanceStatus]) -> None:
        if not self._gpus or not any(self._gpus_of(one) for one in instances if one.deployment in deployments):
            return
        in_flight = self._reading is not None and not self._reading.done()
        if not in_flight and (self._read_at is None or self._clock() - self._read_at >= GPU_INTERVAL_S):
            self._begin({gpu.index: gpu for one in instances for gpu in self._gpus_of(one)}.values())
        if self._reading is not None:
            await asyncio.wait([self._reading])  # other policies may wait for this reading too

    def of(self, deployments: Collection[str], instances: Iterable[InstanceStatus]) -> float | None:
        each = [self._gpus_of(one) for one in instances if one.deployment in deployments]
        known = [[self._busy[gpu.index] for gpu in gpus if gpu.index in self._busy] for gpus in each]
        shares = [fmean(some) for some in known if some]
        return fmean(shares) if shares else None

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._idle is not None:
            self._idle.cancel()
            self._close_drivers()

    def _gpus_of(self, instance: InstanceStatus) -> list[Gpu]:
        """The GPUs of an instance that can be read. None of them while it starts: loading a model is not load."""
        if instance.place is None or instance.phase is not Phase.READY:
            return []
        return [self._gpus[gpu] for gpu in instance.place.gpus if gpu in self._gpus]

    def _begin(self, gpus: Collection[Gpu]) -> None:
        self._read_at = self._clock()
        self._reading = asyncio.get_running_loop().create_task(self._read(gpus))

    async def _read(self, gpus: Collection[Gpu]) -> None:
        self._busy = await self.measured(gpus)

    async def measured(self, gpus: Collection[Gpu]) -> dict[int, float]:
        """The share in use by index, read now; empty if the drivers take longer than the limit."""
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._close_drivers)
        busy = await self._runner.run(lambda: self._drivers.busy(gpus), self._limit_s)
        return busy if isinstance(busy, dict) else {}

    def _close_drivers(self) -> None:
        self._idle = None
        Thread(target=self._drivers.close, name="close GPU drivers", daemon=True).start()

"""How busy GPUs are: NVIDIA's by its library (NVML), AMD's by what their driver writes under /sys.

Both makers mean the same: the share of the last moment in which anything at all was computed, by anybody. A GPU that
does not say (one in MIG mode, one of another maker) has no number, and is left in peace for a while.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from threading import Lock, Thread

from pointsman.control import InstanceStatus, Phase
from pointsman.runtimes.local.detection.amd import amd_devices
from pointsman.runtimes.local.detection.nvidia import Nvml, installed_nvml
from pointsman.runtimes.local.detection.system import number
from pointsman.runtimes.policy_runner import PolicyRunner
from pointsman.types import Gpu, Worker

MAKERS = ("nvidia", "amd")
"""Whose GPUs can be asked."""
ASK_AGAIN_S = 60.0
"""Whoever did not say how busy it is, is not asked before then."""

GPU_INTERVAL_S = 1.0
"""Drivers measure over about as long."""
GPU_TIME_LIMIT_S = 0.2
"""A policy is called without GPU usage rather than later."""
GPU_IDLE_S = 60.0
"""Drivers that are not read for this long are closed."""


class GpuDrivers:
    """Asks the drivers of this machine. They may take their time, so this is called on a thread."""

    def __init__(
        self, nvml: Nvml | None = None, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`nvml`: NVIDIA's library, the installed one if left out. `root`: where /sys is."""
        self._given = nvml
        self._open: Nvml | None = None
        """Stays open: to open it takes longer than all that is asked of it."""
        self._sys = root / "sys"
        self._clock = clock
        self._peace: dict[int, float] = {}
        """GPUs that did not say, and until when they are not asked."""
        self._one_at_a_time = Lock()

    def busy(self, gpus: Iterable[Gpu]) -> dict[int, float]:
        """The share of each that is in use, 0 to 1, by index. Those that do not say are not in the answer."""
        with self._one_at_a_time:
            now = self._clock()
            asked = [gpu for gpu in gpus if self._peace.get(gpu.index, now) <= now]
            told = {
                **self._nvidia([gpu.index for gpu in asked if gpu.vendor == "nvidia"]),
                **self._amd([gpu.index for gpu in asked if gpu.vendor == "amd"]),
            }
            known = {index: percent / 100 for index, percent in told.items() if 0 <= percent <= 100}
            self._peace |= {gpu.index: now + ASK_AGAIN_S for gpu in asked if gpu.index not in known}
            return known

    def close(self) -> None:
        """Let go of the driver, which may be in the way of whoever looks after it. Who asks opens it again."""
        with self._one_at_a_time:
            self._let_go()

    def _nvidia(self, indices: list[int]) -> dict[int, int]:
        nvml = self._opened() if indices else None
        if nvml is None:
            return {}
        told = {}
        for index in indices:
            with suppress(nvml.NVMLError):  # it is divided, or lost
                told[index] = int(nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByIndex(index)).gpu)
        if not told:  # a driver that was replaced talks to nobody who opened the one before
            self._let_go()
        return told

    def _opened(self) -> Nvml | None:
        nvml = self._open or self._given or installed_nvml()
        if self._open is None and nvml is not None:
            with suppress(nvml.NVMLError):
                nvml.nvmlInit()
                self._open = nvml
        return self._open

    def _let_go(self) -> None:
        nvml, self._open = self._open, None
        if nvml is not None:
            with suppress(nvml.NVMLError):  # it is gone already
                nvml.nvmlShutdown()

    def _amd(self, indices: list[int]) -> dict[int, int]:
        devices = amd_devices(self._sys) if indices else []
        told = {index: number(devices[index] / "gpu_busy_percent") for index in indices if index < len(devices)}
        return {index: percent for index, percent in told.items() if percent is not None}


class GpuUsage:
    """Of the GPUs of this machine that our instances have."""

    def __init__(
        self,
        drivers: GpuDrivers | None = None,
        clock: Callable[[], float] = time.monotonic,
        limit_s: float = GPU_TIME_LIMIT_S,
        let_go_s: float = GPU_IDLE_S,
    ) -> None:
        self._drivers = drivers or GpuDrivers()
        self._clock = clock
        self._limit_s, self._let_go_s = limit_s, let_go_s
        self._gpus: dict[tuple[str, int], Gpu] = {}
        """By worker and index, as places name them."""
        self._busy: dict[int, float] = {}
        self._runner = PolicyRunner("GPU usage")
        self._read_at: float | None = None
        self._reading: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None

    def see(self, worker: Worker) -> None:
        """This machine has these GPUs."""
        self._gpus = {(worker.name, gpu.index): gpu for gpu in worker.gpus if gpu.vendor in MAKERS}

    async def read(self, deployments: Collection[str], instances: Sequence[InstanceStatus]) -> None:
        """Read all of them again, if these deployments have any and it is time."""
        if not self._gpus or not any(self._gpus_of(one) for one in instances if one.deployment in deployments):
            return
        in_flight = self._reading is not None and not self._reading.done()
        if not in_flight and (self._read_at is None or self._clock() - self._read_at >= GPU_INTERVAL_S):
            self._begin({gpu.index: gpu for one in instances for gpu in self._gpus_of(one)}.values())
        if self._reading is not None:
            await asyncio.shield(self._reading)  # others wait for it too

    def of(self, deployments: Collection[str], instances: Iterable[InstanceStatus]) -> float | None:
        """The share in use, 0 to 1: of the GPUs of each instance, and of these the mean. None: nobody says."""
        each = [self._gpus_of(one) for one in instances if one.deployment in deployments]
        told = [[self._busy[gpu.index] for gpu in gpus if gpu.index in self._busy] for gpus in each]
        shares = [fmean(some) for some in told if some]
        return fmean(shares) if shares else None

    def close(self) -> None:
        """Ask nobody any more."""
        if self._reading is not None:
            self._reading.cancel()
        if self._idle is not None:
            self._idle.cancel()
            self._let_go()

    def _gpus_of(self, instance: InstanceStatus) -> list[Gpu]:
        """That we can ask about; of an instance that starts, none: to load a model is not to be busy."""
        if instance.place is None or instance.phase is not Phase.READY:
            return []
        return [self._gpus[gpu] for gpu in instance.place.gpus if gpu in self._gpus]

    def _begin(self, gpus: Collection[Gpu]) -> None:
        loop = asyncio.get_running_loop()
        self._read_at = self._clock()
        self._reading = loop.create_task(self._read(gpus))
        if self._idle is not None:
            self._idle.cancel()
        self._idle = loop.call_later(self._let_go_s, self._let_go)

    async def _read(self, gpus: Collection[Gpu]) -> None:
        told = await self._runner.run(lambda: self._drivers.busy(gpus), self._limit_s)
        self._busy = told if isinstance(told, dict) else {}

    def _let_go(self) -> None:
        self._idle = None
        Thread(target=self._drivers.close, name="closes GPU drivers", daemon=True).start()

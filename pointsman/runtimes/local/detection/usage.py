"""How busy GPUs are: NVIDIA's by its library (NVML), AMD's by what their driver writes under /sys.

Both makers mean the same: the share of the last moment in which anything at all was computed, by anybody. A GPU that
does not say (one in MIG mode, one of another maker) has no number, and is left in peace for a while.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from pointsman.runtimes.local.detection.amd import amd_devices
from pointsman.runtimes.local.detection.nvidia import Nvml, installed_nvml
from pointsman.runtimes.local.detection.system import number
from pointsman.types import Gpu

MAKERS = ("nvidia", "amd")
"""Whose GPUs can be asked."""
ASK_AGAIN_S = 60.0
"""Whoever did not say how busy it is, is not asked before then."""


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

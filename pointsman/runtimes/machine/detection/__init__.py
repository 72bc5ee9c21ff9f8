"""This machine as a worker: CPUs, memory and GPUs, and how much of them other programs use.

Enters: what the system, drivers and control group report, and the processes of the plane's instances. Leaves: a
`Worker`. The one rule: what these instances use does not count as used, because they have claims. Usage that cannot
be attributed counts as used, so that the error is on the safe side. A machine may have no GPU, or no driver.
"""

import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from pointsman.reasons import Reason
from pointsman.runtimes.machine.detection.amd import amd_gpus
from pointsman.runtimes.machine.detection.nvidia import Nvml, installed_nvml, nvidia_gpus
from pointsman.runtimes.machine.detection.system import NVIDIA, count_of_gpus, family, foreign_memory, this_machine
from pointsman.types import Gpu, Worker

__all__ = ["Nvml", "detect", "unseen"]

METAL_SHARE = 0.75
"""Share of a Mac's memory that macOS lets its GPU use."""


def detect(
    ours: Iterable[int] = (),
    *,
    labels: Mapping[str, str] | None = None,
    files: Iterable[str] = (),
    nvml: Nvml | None = None,
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    system: str = "",
) -> Worker:
    """Detect the resources of this machine. `ours`: pids of the plane's instances; their descendants are included.
    `nvml`: NVIDIA's library (default: the installed one). `root`: the folder with /proc and /sys. `system`: such as
    Darwin-arm64."""
    environ = os.environ if environ is None else environ
    nvml = installed_nvml() if nvml is None else nvml
    machine = this_machine(root / "sys/fs/cgroup")
    memory = machine.memory_bytes or 0
    pids = family(ours, root / "proc")
    gpus: list[Gpu] = []
    unified = False
    if nvml is not None:
        gpus, unified = nvidia_gpus(nvml, memory, pids, root / "sys", environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:  # a machine with cards of both vendors needs a fleet file
        gpus = amd_gpus(root / "sys", pids, environ.get("HIP_VISIBLE_DEVICES"))
    if (system or f"{platform.system()}-{platform.machine()}") == "Darwin-arm64":
        gpus, unified = [Gpu(index=0, memory_bytes=int(memory * METAL_SHARE), model="Apple", vendor="apple")], True
    return Worker(
        name=machine.name,
        cpus=machine.cpus,
        memory_bytes=memory,
        gpus=tuple(gpus),
        labels=dict(labels or {}),
        used_memory_bytes=foreign_memory(memory, pids, root),
        unified_memory=unified,
        files=frozenset(files),
    )


def unseen(worker: Worker, root: Path = Path("/")) -> Reason | None:
    """GPUs that are plugged in but not detected; None if there are none."""
    plugged = count_of_gpus(root / "sys", NVIDIA)
    if not plugged or any(gpu.vendor == "nvidia" for gpu in worker.gpus):
        return None
    return Reason("gpus-not-detected", {"gpus": plugged})

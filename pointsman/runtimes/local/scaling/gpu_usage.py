"""How busy the GPUs of deployments are, for scaling policies.

Drivers are asked on a thread, when a policy is about to look and one second has passed since the last time; whoever has
no GPU does not wait for them. A driver that hangs costs one thread, and its GPUs have no number until it answers.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import fmean
from threading import Thread

from pointsman.control import InstanceStatus, Phase
from pointsman.runtimes.local.detection.usage import MAKERS, GpuDrivers
from pointsman.runtimes.local.scaling.thinking import PolicyRunner
from pointsman.types import Gpu, Worker

EVERY_S = 1.0
"""Drivers measure over about as long."""
LIMIT_S = 0.2
"""A policy looks without the number rather than later."""
LET_GO_S = 60.0
"""Drivers that nobody asks for so long are closed."""


class GpuUsage:
    """Of the GPUs of this machine that our instances have."""

    def __init__(
        self,
        drivers: GpuDrivers | None = None,
        clock: Callable[[], float] = time.monotonic,
        limit_s: float = LIMIT_S,
        let_go_s: float = LET_GO_S,
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
        if not in_flight and (self._read_at is None or self._clock() - self._read_at >= EVERY_S):
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
        told = await self._runner.ask(lambda: self._drivers.busy(gpus), self._limit_s)
        self._busy = told if isinstance(told, dict) else {}

    def _let_go(self) -> None:
        self._idle = None
        Thread(target=self._drivers.close, name="closes GPU drivers", daemon=True).start()

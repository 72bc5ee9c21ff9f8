"""Reads the metrics of instances in service, over and over.

What could not be read is not reported: the numbers of an instance grow old, and it is never taken for idle because of
that. Between two readings, and for as long as reading fails, our own count of requests in flight stands for its load.
"""

import asyncio
import time
from collections.abc import Callable

from pointsman.control.desired import Address
from pointsman.engines import Engine, Samples
from pointsman.routing.endpoints import Metrics
from pointsman.runtimes.local.asking import ProbeConnection, Unanswered

Measured = Callable[[str, str, Metrics], None]
"""(deployment, instance, metrics)"""
LONGEST_WAIT = 4.0
"""Times the interval: an answer that takes longer is not waited for."""


class Reading:
    """How reading the metrics of one instance goes."""

    def __init__(self, deployment: str, instance_id: str, address: Address, engine: Engine) -> None:
        self.deployment, self.instance_id, self.engine = deployment, instance_id, engine
        self.line = ProbeConnection(address)
        self.failures = 0
        """In a row."""
        self.why = ""
        """What the last failure was."""
        self.task: asyncio.Task[None] | None = None

    async def once(self, timeout_s: float) -> Metrics:
        """Read once; raises `Unanswered`."""
        answer = await self.line.ask("GET", self.engine.metrics_path, timeout_s=timeout_s)
        if answer.status != 200:
            raise Unanswered(f"GET {self.engine.metrics_path} was answered with {answer.status}")
        metrics = self.engine.metrics(Samples(answer.body))
        if metrics is None:
            raise Unanswered(f"{self.engine.metrics_path} has none of the numbers that {self.engine.name} reports")
        return metrics


class Scraper:
    """Follows instances and tells what their engines say of themselves."""

    def __init__(self, measured: Measured, interval_s: float) -> None:
        self._measured = measured
        self._interval_s = interval_s
        self._readings: dict[str, Reading] = {}

    def follow(self, deployment: str, instance_id: str, address: Address, engine: Engine) -> None:
        """Read its metrics from now on, if it has any."""
        self.forget(instance_id)
        if engine.metrics_path:
            reading = self._readings[instance_id] = Reading(deployment, instance_id, address, engine)
            reading.task = asyncio.get_running_loop().create_task(self._read(reading))

    def forget(self, instance_id: str) -> None:
        """Do not read it any more."""
        reading = self._readings.pop(instance_id, None)
        if reading is not None:
            if reading.task is not None:
                reading.task.cancel()
            reading.line.close()

    def close(self) -> None:
        """Read nobody any more."""
        for instance_id in list(self._readings):
            self.forget(instance_id)

    def problems(self) -> list[str]:
        """Whose metrics cannot be read, and why."""
        return [
            f"the metrics of {reading.instance_id} could not be read {reading.failures} times in a row: {reading.why}"
            for reading in self._readings.values()
            if reading.failures > 1
        ]

    async def _read(self, reading: Reading) -> None:
        due = time.monotonic()
        while True:
            try:
                metrics = await reading.once(self._interval_s * LONGEST_WAIT)
            except Unanswered as error:
                reading.failures, reading.why = reading.failures + 1, str(error)
            except Exception as error:  # an adapter of the user's own
                reading.failures, reading.why = reading.failures + 1, f"{type(error).__name__}: {error}"
            else:
                reading.failures, reading.why = 0, ""
                self._measured(reading.deployment, reading.instance_id, metrics)
            now = time.monotonic()
            due = max(due + self._interval_s, now)  # what was missed is not made up for
            await asyncio.sleep(due - now)

"""Asks instances whether they work, one question per instance at a time."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pointsman.control.desired import Address
from pointsman.control.events import Answered, ControllerEvent, Silent
from pointsman.engines import Engine, ProbeRequest, Samples
from pointsman.http.probe_client import ProbeConnection, Unanswered, ask
from pointsman.routing.endpoints import Metrics
from pointsman.runtimes.local.shared import HEADER


class Prober:
    """Puts questions to instances and tells the answers; a new question to an instance takes the place of the old."""

    def __init__(self, tell: Callable[[ControllerEvent], None]) -> None:
        self._tell = tell
        self._asking: dict[str, asyncio.Task[None]] = {}

    def probe(
        self, instance_id: str, address: Address, question: ProbeRequest, *, readiness: bool, timeout_s: float
    ) -> None:
        """Ask now; tell `Answered` or `Silent` within the time limit."""
        self.forget(instance_id)
        work = self._probe(instance_id, address, question, readiness, timeout_s)
        self._asking[instance_id] = asyncio.get_running_loop().create_task(work)

    def forget(self, instance_id: str) -> None:
        """The answer does not matter any more."""
        task = self._asking.pop(instance_id, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Ask nobody any more."""
        for instance_id in list(self._asking):
            self.forget(instance_id)

    async def _probe(
        self, instance_id: str, address: Address, question: ProbeRequest, readiness: bool, timeout_s: float
    ) -> None:
        why = await _refusal(address, question, timeout_s, is_work=readiness)
        self._asking.pop(instance_id, None)
        self._tell(Silent(instance_id, why) if why else Answered(instance_id, readiness))


async def _refusal(address: Address, question: ProbeRequest, timeout_s: float, *, is_work: bool) -> str:
    """Why a probe failed; empty: it did not. `is_work`: what it did must be there to be seen, too."""
    try:
        answer = await ask(address, question.method, question.path, question.body, timeout_s=timeout_s)
    except Unanswered as error:
        return str(error)
    said = " ".join(answer.body[:200].decode("utf-8", "replace").split())
    if 200 <= answer.status < 300:
        wrong = is_work and not _is_json_object(answer.body)
        return f"{question.method} {question.path} was answered with something else than JSON: {said}" if wrong else ""
    return f"{question.method} {question.path} was answered with {answer.status}{f': {said}' if said else ''}"


def _is_json_object(body: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(body), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


# Reads the metrics of instances in service, over and over.
#
# What could not be read is not reported: the numbers of an instance grow old, and it is never taken for idle because of
# that. Between two readings, and for as long as reading fails, our own count of requests in flight stands for its load.


Measured = Callable[[str, str, Metrics, Samples], None]
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

    async def once(self, timeout_s: float) -> tuple[Metrics, Samples]:
        """Read once; raises `Unanswered`."""
        answer = await self.line.ask("GET", self.engine.metrics_path, timeout_s=timeout_s)
        if answer.status != 200:
            raise Unanswered(f"GET {self.engine.metrics_path} was answered with {answer.status}")
        samples = Samples(answer.body)
        metrics = self.engine.metrics(samples)
        if metrics is None:
            raise Unanswered(f"{self.engine.metrics_path} has none of the numbers that {self.engine.name} reports")
        return metrics, samples


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
                metrics, samples = await reading.once(self._interval_s * LONGEST_WAIT)
            except Unanswered as error:
                reading.failures, reading.why = reading.failures + 1, str(error)
            except Exception as error:  # an adapter of the user's own
                reading.failures, reading.why = reading.failures + 1, f"{type(error).__name__}: {error}"
            else:
                reading.failures, reading.why = 0, ""
                self._measured(reading.deployment, reading.instance_id, metrics, samples)
            now = time.monotonic()
            due = max(due + self._interval_s, now)  # what was missed is not made up for
            await asyncio.sleep(due - now)


# Tells replicas their user config: new ones know it from their launch, others are told whenever it has changed.


TIMEOUT_S = 30.0
PATH = "/configure"


class KnownConfig(msgspec.Struct):
    """A replica, and what it was last told."""

    deployment: str
    told: bytes | None
    """JSON; None: nobody knows, because an earlier plane has told it."""
    address: Address | None = None
    """None: it is not in service."""
    problem: str = ""


class Configuring:
    """The user configs in force, and who knows them."""

    def __init__(self, secret: Callable[[], str]) -> None:
        self._secret = secret
        self._configs: dict[str, bytes] = {}
        """By deployment, as JSON; none: None."""
        self._replicas: dict[str, KnownConfig] = {}
        self._telling: dict[str, asyncio.Task[None]] = {}

    def configure(self, configs: Mapping[str, Any]) -> None:
        """These hold from now on."""
        self._configs = {name: msgspec.json.encode(config) for name, config in configs.items()}
        self.look()

    def launched(self, instance_id: str, deployment: str) -> bytes:
        """It is started with what holds now: this, as JSON."""
        told = self._wanted(deployment)
        self._replicas[instance_id] = KnownConfig(deployment, told)
        return told

    def admitted(self, instance_id: str, deployment: str, address: Address) -> None:
        """It is in service: from now on it is told what changes."""
        known = self._replicas.setdefault(instance_id, KnownConfig(deployment, None))
        known.address = address
        self._tell(instance_id, known)

    def forget(self, instance_id: str) -> None:
        """It is not in service any more."""
        self._replicas.pop(instance_id, None)
        task = self._telling.pop(instance_id, None)
        if task is not None:
            task.cancel()

    def look(self) -> None:
        """Tell whoever has not been told yet."""
        for instance_id, known in self._replicas.items():
            self._tell(instance_id, known)

    def problems(self) -> list[str]:
        """Who could not be told, and why."""
        return [known.problem for known in self._replicas.values() if known.problem]

    def close(self) -> None:
        """Tell nobody any more."""
        for task in self._telling.values():
            task.cancel()
        self._telling.clear()

    def _wanted(self, deployment: str) -> bytes:
        return self._configs.get(deployment, b"null")

    def _tell(self, instance_id: str, known: KnownConfig) -> None:
        wanted = self._wanted(known.deployment)
        nothing_to_say = wanted == known.told or (known.told is None and wanted == b"null")
        if known.address is None or nothing_to_say or instance_id in self._telling:
            return
        work = self._ask(instance_id, known, known.address, wanted)
        self._telling[instance_id] = asyncio.get_running_loop().create_task(work)

    async def _ask(self, instance_id: str, known: KnownConfig, address: Address, config: bytes) -> None:
        headers = f"{HEADER}: {self._secret()}\r\n"
        try:
            answer = await ask(address, "POST", PATH, config, timeout_s=TIMEOUT_S, headers=headers)
        except Unanswered as error:  # told again when somebody looks next
            known.problem = f"{instance_id} could not be told its user config: {error}"
        else:
            known.told = config
            said = " ".join(answer.body[:300].decode("utf-8", "replace").split())
            refused = f"{instance_id} refused its user config ({answer.status}): {said}"
            known.problem = "" if answer.status < 300 else refused
        self._telling.pop(instance_id, None)
        if known.told == config:  # it may have changed in the meantime
            self._tell(instance_id, known)

"""What a plane asks of instances and tells them, over HTTP: probes, metrics, and the user config of replicas."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pointsman.control.desired import Address
from pointsman.control.events import Answered, ControllerEvent, ProbeNotMade, Silent
from pointsman.engines import Engine, ProbeRequest, Samples
from pointsman.http.client import HttpClient, NoResponse, fetch
from pointsman.reasons import Reason
from pointsman.routing.endpoints import Metrics
from pointsman.runtimes.interface import Measured, Tell

SCRAPE_TIMEOUT = 4.0
"""Times the scrape interval."""
CONFIGURE_TIMEOUT_S = 30.0
CONFIGURE_PATH = "/configure"
SECRET_HEADER = "x-pointsman-secret"


class HttpProbes:
    """`Probes` of the interface, for instances that are HTTP servers.

    Metrics that cannot be read are not reported: they grow old, and the count of requests in flight stands for the load
    of the instance, which is therefore never taken for idle.
    """

    def __init__(self, tell: Tell, measured: Measured, scrape_interval_s: float) -> None:
        self._tell = tell
        self._measured = measured
        self._interval_s = scrape_interval_s
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._unmade: dict[str, NoResponse] = {}
        """Why the last probe of an instance could not be made."""
        self._scrapes: dict[str, Scrape] = {}

    def probe(
        self, instance_id: str, address: Address, question: ProbeRequest, readiness: bool, timeout_s: float
    ) -> None:
        self.forget(instance_id)
        work = self._probe(instance_id, address, question, readiness, timeout_s)
        self._asking[instance_id] = asyncio.get_running_loop().create_task(work)

    def forget(self, instance_id: str) -> None:
        """The process of an instance has ended: its probe is not answered."""
        self._unmade.pop(instance_id, None)
        task = self._asking.pop(instance_id, None)
        if task is not None:
            task.cancel()

    def follow(self, deployment: str, instance_id: str, address: Address, engine: Engine) -> None:
        self.unfollow(instance_id)
        if engine.metrics_path:
            scrape = self._scrapes[instance_id] = Scrape(deployment, instance_id, address, engine)
            scrape.task = asyncio.get_running_loop().create_task(self._scrape(scrape))

    def unfollow(self, instance_id: str) -> None:
        scrape = self._scrapes.pop(instance_id, None)
        if scrape is not None:
            if scrape.task is not None:
                scrape.task.cancel()
            scrape.connection.close()

    def problems(self) -> list[str]:
        unread = [
            f"the metrics of {scrape.instance_id} could not be read {scrape.failures} times in a row: {scrape.why}"
            for scrape in self._scrapes.values()
            if scrape.failures > 1
        ]
        causes = {error.local: str(error) for error in self._unmade.values()}
        counts = Counter(error.local for error in self._unmade.values())
        return unread + [
            str(Reason("probes-not-made", {"instances": counts[cause], "cause": cause, "error": causes[cause]}))
            for cause in sorted(causes)
        ]

    def close(self) -> None:
        for instance_id in list(self._asking):
            self.forget(instance_id)
        for instance_id in list(self._scrapes):
            self.unfollow(instance_id)

    async def _probe(
        self, instance_id: str, address: Address, question: ProbeRequest, readiness: bool, timeout_s: float
    ) -> None:
        try:
            failure = await _failure(address, question, timeout_s, is_work=readiness)
        except NoResponse as error:
            self._unmade[instance_id] = error
            event: ControllerEvent = ProbeNotMade(instance_id, str(error))
        else:
            event = Silent(instance_id, failure) if failure else Answered(instance_id, readiness)
        self._asking.pop(instance_id, None)
        self._tell(event)

    async def _scrape(self, scrape: "Scrape") -> None:
        due = time.monotonic()
        while True:
            try:
                metrics, samples = await scrape.once(self._interval_s * SCRAPE_TIMEOUT)
            except NoResponse as error:
                scrape.failures, scrape.why = scrape.failures + 1, str(error)
            except Exception as error:  # an adapter of the user's own
                scrape.failures, scrape.why = scrape.failures + 1, f"{type(error).__name__}: {error}"
            else:
                scrape.failures, scrape.why = 0, ""
                self._measured(scrape.deployment, scrape.instance_id, metrics, samples)
            now = time.monotonic()
            due = max(due + self._interval_s, now)  # missed scrapes are not made up for
            await asyncio.sleep(due - now)


class Scrape:
    """The metrics of one instance."""

    def __init__(self, deployment: str, instance_id: str, address: Address, engine: Engine) -> None:
        self.deployment, self.instance_id, self.engine = deployment, instance_id, engine
        self.connection = HttpClient(address)
        self.failures = 0
        """In a row."""
        self.why = ""
        """Of the last failure."""
        self.task: asyncio.Task[None] | None = None

    async def once(self, timeout_s: float) -> tuple[Metrics, Samples]:
        """Read once; raises `NoResponse`."""
        answer = await self.connection.fetch("GET", self.engine.metrics_path, timeout_s=timeout_s)
        if answer.status != 200:
            raise NoResponse(f"GET {self.engine.metrics_path} was answered with {answer.status}")
        samples = Samples(answer.body)
        metrics = self.engine.metrics(samples)
        if metrics is None:
            raise NoResponse(f"{self.engine.metrics_path} has none of the numbers that {self.engine.name} reports")
        return metrics, samples


async def _failure(address: Address, question: ProbeRequest, timeout_s: float, *, is_work: bool) -> str:
    """Why a probe failed; empty if it did not. `is_work`: the answer must also be a JSON object.

    Raises `NoResponse` if it could not be made, for a reason on this side.
    """
    try:
        answer = await fetch(address, question.method, question.path, question.body, timeout_s=timeout_s)
    except NoResponse as error:
        if error.local:
            raise
        return str(error)
    text = " ".join(answer.body[:200].decode("utf-8", "replace").split())
    if 200 <= answer.status < 300:
        wrong = is_work and not _is_json_object(answer.body)
        return f"{question.method} {question.path} was answered with something else than JSON: {text}" if wrong else ""
    return f"{question.method} {question.path} was answered with {answer.status}{f': {text}' if text else ''}"


def _is_json_object(body: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(body), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


class ConfiguredReplica(msgspec.Struct):
    """A replica, and the user config that it has."""

    deployment: str
    config: bytes | None
    """JSON; None if unknown, because an earlier plane configured it."""
    address: Address | None = None
    """None if it is not in service."""
    problem: str = ""


class UserConfigs:
    """The user configs in force. Replicas are started with theirs, and those in service hear of every change."""

    def __init__(self, secret: Callable[[], str]) -> None:
        self._secret = secret
        self._configs: dict[str, bytes] = {}
        """By deployment, as JSON."""
        self._replicas: dict[str, ConfiguredReplica] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}

    def configure(self, configs: Mapping[str, Any]) -> None:
        """Put other configs in force, by deployment."""
        self._configs = {name: msgspec.json.encode(config) for name, config in configs.items()}
        self.retry()

    def launched(self, instance_id: str, deployment: str) -> bytes:
        """The config that a replica is started with, as JSON."""
        config = self._wanted(deployment)
        self._replicas[instance_id] = ConfiguredReplica(deployment, config)
        return config

    def admitted(self, instance_id: str, deployment: str, address: Address) -> None:
        replica = self._replicas.setdefault(instance_id, ConfiguredReplica(deployment, None))
        replica.address = address
        self._update(instance_id, replica)

    def forget(self, instance_id: str) -> None:
        self._replicas.pop(instance_id, None)
        task = self._sending.pop(instance_id, None)
        if task is not None:
            task.cancel()

    def retry(self) -> None:
        """Send configs to replicas that do not have theirs."""
        for instance_id, replica in self._replicas.items():
            self._update(instance_id, replica)

    def problems(self) -> list[str]:
        return [replica.problem for replica in self._replicas.values() if replica.problem]

    def close(self) -> None:
        for task in self._sending.values():
            task.cancel()
        self._sending.clear()

    def _wanted(self, deployment: str) -> bytes:
        return self._configs.get(deployment, b"null")

    def _update(self, instance_id: str, replica: ConfiguredReplica) -> None:
        wanted = self._wanted(replica.deployment)
        is_known = wanted == replica.config or (replica.config is None and wanted == b"null")
        if replica.address is None or is_known or instance_id in self._sending:
            return
        work = self._send(instance_id, replica, replica.address, wanted)
        self._sending[instance_id] = asyncio.get_running_loop().create_task(work)

    async def _send(self, instance_id: str, replica: ConfiguredReplica, address: Address, config: bytes) -> None:
        headers = f"{SECRET_HEADER}: {self._secret()}\r\n"
        try:
            answer = await fetch(
                address, "POST", CONFIGURE_PATH, config, timeout_s=CONFIGURE_TIMEOUT_S, headers=headers
            )
        except NoResponse as error:  # sent again by the next `retry`
            replica.problem = f"{instance_id} could not be told its user config: {error}"
        else:
            replica.config = config
            text = " ".join(answer.body[:300].decode("utf-8", "replace").split())
            refused = f"{instance_id} refused its user config ({answer.status}): {text}"
            replica.problem = "" if answer.status < 300 else refused
        self._sending.pop(instance_id, None)
        if replica.config == config:  # another may be in force by now
            self._update(instance_id, replica)

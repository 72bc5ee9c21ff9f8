"""What scaling policies see: requests and replicas, custom metrics of replicas and of a Prometheus, and GPU usage.

A number that cannot be read is left out: the policy sees the earlier ones grow old, and the problem is reported.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from urllib.parse import quote, urlsplit

import msgspec

from pointsman.control import Controller, Phase
from pointsman.control.desired import Address
from pointsman.control.instances import replica_counts
from pointsman.engines import Samples
from pointsman.http.client import NoResponse, fetch
from pointsman.routing.records import Record
from pointsman.runtimes.interface import GpuMeter
from pointsman.runtimes.traffic import Traffic
from pointsman.scaling.deployment import Load, ReplicaCounts, ScaledDeployment
from pointsman.scaling.limits import MetricQuery
from pointsman.scaling.measurements import Measurements

CUSTOM = "pointsman_custom_metric"
PATH = "/metrics"
TIMEOUT_S = 5.0
QUERY = "/api/v1/query?query="


class MetricSources:
    """Observes the scaled deployments of a plane."""

    def __init__(
        self, traffic: Traffic, controller: Controller, clock: Callable[[], float], gpu_usage: GpuMeter
    ) -> None:
        self._traffic = traffic
        self._controller = controller
        self._clock = clock
        self._gpu_usage = gpu_usage
        self._custom: dict[str, CustomMetrics] = {}

    def configure(self, one: ScaledDeployment) -> None:
        """Observe a deployment whose lane is open."""
        lane, clock = self._traffic.lanes[one.name], self._clock
        lane.dispatcher.listen(lambda record: _request_ended(one.observed.measurements, record, clock()))
        if one.name not in self._custom:
            self._custom[one.name] = CustomMetrics(
                lambda: self._addresses(one), lambda name, value: one.observed.measurements.metric(clock(), name, value)
            )
        custom = self._custom[one.name]
        custom.queries, custom.interval_s = one.plan.metrics, one.plan.limits.interval_s
        if lane.plan.is_replica or one.plan.metrics:
            custom.start()

    def forget(self, deployment: str) -> None:
        self._custom.pop(deployment).close()

    def close(self) -> None:
        for custom in self._custom.values():
            custom.close()
        self._gpu_usage.close()

    def problems(self) -> list[str]:
        return [f'"{name}": {why}' for name, one in self._custom.items() for why in one.problems()]

    def replicas(self, deployments: Iterable[ScaledDeployment]) -> dict[str, ReplicaCounts]:
        instances = self._controller.instances()
        return {one.name: replica_counts(instances, one.members) for one in deployments}

    def load(self, one: ScaledDeployment, *, gpus: bool = False) -> Load:
        """The load of a deployment; with the usage of its GPUs as last read, if wanted."""
        lane = self._traffic.lanes[one.name]
        lane.start_up_s = one.observed.start_up_s
        dispatcher, desired = lane.dispatcher, lane.plan.desired
        usages = [each.metrics.kv_cache_usage for each in dispatcher.fleet.roster if each.metrics is not None]
        return Load(
            running=dispatcher.running,
            waiting=len(dispatcher) - dispatcher.running,
            arrived=dispatcher.counters.arrived,
            kv_usage=sum(usages) / len(usages) if usages else None,
            gpu_usage=self._gpu_usage.of(one.members, self._controller.instances()) if gpus else None,
            max_concurrency=desired.max_concurrency or desired.engine_slots,
            start_timeout_s=desired.lifecycle.start_timeout_s,
        )

    async def read_gpus(self, deployments: Iterable[ScaledDeployment]) -> None:
        names = {name for one in deployments for name in one.members}
        await self._gpu_usage.read(names, self._controller.instances())

    def _addresses(self, one: ScaledDeployment) -> list[Address]:
        """Replicas that may have custom metrics."""
        lane = self._traffic.lanes.get(one.name)
        if lane is None or not lane.plan.is_replica:
            return []
        ready = [each for each in self._controller.instances() if each.phase is Phase.READY]
        return [Address(each.host, each.port, each.tls) for each in ready if each.deployment in one.members]


def _request_ended(measurements: Measurements, record: Record, now: float) -> None:
    """A request that was refused counts for deadlines only."""
    if record.ended_at is None or record.refusal is not None:
        measurements.ended(now, met_slo=record.met_deadline)
        return
    latency_s = record.ended_at - record.arrived_at
    first_s = None if record.first_token_at is None else record.first_token_at - record.arrived_at
    tokens = record.output_tokens or 0
    per_token_ms = None
    if first_s is not None and tokens > 1:
        per_token_ms = (latency_s - first_s) * 1000 / (tokens - 1)
    measurements.ended(
        now,
        latency_ms=latency_s * 1000,
        ttft_ms=None if first_s is None else first_s * 1000,
        tpot_ms=per_token_ms,
        met_slo=record.met_deadline,
        tokens=record.input_tokens + tokens,
    )


class CustomMetrics:
    """Reads the numbers for one deployment, over and over."""

    def __init__(self, replicas: Callable[[], Sequence[Address]], tell: Callable[[str, float], None]) -> None:
        """`replicas`: those that take requests. `tell`: (name, value) is called with each number."""
        self.queries: tuple[MetricQuery, ...] = ()
        self.interval_s = 1.0
        self._replicas = replicas
        self._tell = tell
        self._problems: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read from now on."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())

    def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()

    def problems(self) -> list[str]:
        """What could not be read, and why."""
        return list(self._problems.values())

    async def _follow(self) -> None:
        while True:
            try:
                await self.once()
            except Exception as error:  # of ours: the next round may go better
                failed = {"message": "pointsman: reading custom metrics failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(failed)
            await asyncio.sleep(self.interval_s)

    async def once(self) -> None:
        """Read everything once."""
        asked = [self._of_replica(address) for address in self._replicas()]
        asked += [self._of_prometheus(query) for query in self.queries]
        await asyncio.gather(*asked)
        names = {query.name for query in self.queries}
        self._problems = {name: why for name, why in self._problems.items() if name in names}

    async def _of_replica(self, address: Address) -> None:
        try:
            answer = await fetch(address, "GET", PATH, timeout_s=TIMEOUT_S)
        except NoResponse:  # its probes say what is wrong with it
            return
        for name, value in Samples(answer.body).labelled(CUSTOM, "name") if answer.status == 200 else ():
            self._tell(name, value)

    async def _of_prometheus(self, query: MetricQuery) -> None:
        try:
            value = await answer_of(query)
        except NoResponse as error:
            self._problems[query.name] = f'metric "{query.name}" cannot be read from {query.url}: {error}'
        else:
            if value is not None and isfinite(value):
                self._problems.pop(query.name, None)
                self._tell(query.name, value)
                return
            found = "finds nothing" if value is None else f"gives {value}"
            self._problems[query.name] = f'metric "{query.name}": its query {found} at {query.url}'


class Result(msgspec.Struct):
    """One series of an answer."""

    value: tuple[float, str]


class Data(msgspec.Struct, rename="camel"):
    """What a query found: a list of series, or a number and its time."""

    result_type: str
    result: msgspec.Raw = msgspec.Raw()


class MetricAnswer(msgspec.Struct):
    """The answer of a Prometheus."""

    status: str = ""
    data: Data | None = None
    error: str = ""


async def answer_of(query: MetricQuery) -> float | None:
    """What a Prometheus says now: the sum of what it found; None: nothing. Raises `NoResponse`."""
    try:
        parts = urlsplit(query.url)
        port = parts.port
    except ValueError as error:
        raise NoResponse(f"this is no address: {error}") from None
    tls = parts.scheme == "https"
    address = Address(parts.hostname or "", port or (443 if tls else 80), tls)
    path = f"{parts.path.rstrip('/')}{QUERY}{quote(query.query, safe='')}"
    answer = await fetch(address, "GET", path, timeout_s=TIMEOUT_S)
    try:
        told = msgspec.json.decode(answer.body, type=MetricAnswer)
        if told.data is None:
            raise NoResponse(told.error or f"it answered with {answer.status}")
        if told.data.result_type == "scalar":
            return float(msgspec.json.decode(told.data.result, type=tuple[float, str])[1])
        if told.data.result_type != "vector":
            raise NoResponse(f"the query must give numbers of now, and gives a {told.data.result_type}")
        found = [float(one.value[1]) for one in msgspec.json.decode(told.data.result, type=list[Result])]
    except (msgspec.MsgspecError, ValueError) as error:
        raise NoResponse(f"it answered with {answer.status}, and not as a Prometheus does: {error}") from None
    return sum(found) if found else None

"""Numbers of somebody's own, for scaling policies: read from replicas that recorded them, and from a Prometheus.

What could not be read is no number: the policy sees those of before grow old, and the problem is told.
"""

import asyncio
from collections.abc import Callable, Sequence
from math import isfinite
from urllib.parse import quote, urlsplit

import msgspec

from pointsman.control.desired import Address
from pointsman.engines import Samples
from pointsman.http.probe_client import Unanswered, ask
from pointsman.scaling.limits import MetricQuery

CUSTOM = "pointsman_custom_metric"
PATH = "/metrics"
TIMEOUT_S = 5.0
QUERY = "/api/v1/query?query="


class Gatherer:
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
        """Read nobody any more."""
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
            answer = await ask(address, "GET", PATH, timeout_s=TIMEOUT_S)
        except Unanswered:  # its probes say what is wrong with it
            return
        for name, value in Samples(answer.body).labelled(CUSTOM, "name") if answer.status == 200 else ():
            self._tell(name, value)

    async def _of_prometheus(self, query: MetricQuery) -> None:
        try:
            value = await answer_of(query)
        except Unanswered as error:
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
    """What a Prometheus says now: the sum of what it found; None: nothing. Raises `Unanswered`."""
    try:
        parts = urlsplit(query.url)
        port = parts.port
    except ValueError as error:
        raise Unanswered(f"this is no address: {error}") from None
    tls = parts.scheme == "https"
    address = Address(parts.hostname or "", port or (443 if tls else 80), tls)
    path = f"{parts.path.rstrip('/')}{QUERY}{quote(query.query, safe='')}"
    answer = await ask(address, "GET", path, timeout_s=TIMEOUT_S)
    try:
        told = msgspec.json.decode(answer.body, type=MetricAnswer)
        if told.data is None:
            raise Unanswered(told.error or f"it answered with {answer.status}")
        if told.data.result_type == "scalar":
            return float(msgspec.json.decode(told.data.result, type=tuple[float, str])[1])
        if told.data.result_type != "vector":
            raise Unanswered(f"the query must give numbers of now, and gives a {told.data.result_type}")
        found = [float(one.value[1]) for one in msgspec.json.decode(told.data.result, type=list[Result])]
    except (msgspec.MsgspecError, ValueError) as error:
        raise Unanswered(f"it answered with {answer.status}, and not as a Prometheus does: {error}") from None
    return sum(found) if found else None

"""The data layer: the instances of a dispatcher, with what was observed and what was sent to them.

Enters: instances, measurements (with their time), reservations. Leaves: a roster whose columns are always current.
The one rule: plugins only read. A value that was never measured is marked as such; it never counts as zero load.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isnan, nan
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from pointsman.errors import ConfigError, UnknownName
from pointsman.reasons import Reason
from pointsman.selection import Column, Roster
from pointsman.selection.columns import ARRAYS_FROM, column_of
from pointsman.types import ExecutionInstance

T = TypeVar("T")

# The columns of a fleet's roster. Engines report the first five; see Metrics.
WAITING = "waiting_queue_size"
RUNNING = "running_requests_size"
KV_USAGE = "kv_cache_usage"
MEASURED_AT = "measured_at"
"""When the engine was last measured; -inf if never."""
HOLDS_UNTIL = "holds_until"
"""When the measurements of an idle engine, which is measured less often, expire; -inf if their age alone decides."""
SENT_SINCE_MEASURED = "sent_since_measured"
"""Number of requests sent from the backlog since the last measurement, which does not include them."""
IN_FLIGHT_REQUESTS = "in_flight_requests"
IN_FLIGHT_TOKENS = "in_flight_tokens"
THEIR_TOKENS = "their_tokens"
"""Tokens in flight that other dispatchers have sent."""
LOAD = "load"
"""Requests on the instance: those in flight from this dispatcher, and any others that the instance reported."""
LIMIT = "max_concurrency"
"""The maximum number of requests; inf if no limit is known."""
IS_FULL = "is_full"
"""1 while the load is at the limit or above."""
LIGHTNESS = "lightness"
"""limit / (limit + load): 1 when idle, 0.5 at the limit. An unknown limit counts as LIMIT_IF_UNKNOWN."""
EXPECTED_MS = "expected_ms"
"""The average latency, stretched by the load: average / lightness."""
ACCEPTS = "can_accept_request"
LATENCY_MS = "avg_latency_ms"
"""The average latency; nan if it was never measured. Unknown throughputs and prices are nan too."""
THROUGHPUT = "throughput_tokens_per_sec"
"""Prompt and answer tokens per second, summed over all requests on the instance: declared at first, then learned."""
GPUS = "gpu_count"
PRICE = "price_per_hour"
"""The price of the whole instance."""

LIMIT_IF_UNKNOWN = 256
"""The default concurrency of most engines."""

THROUGHPUT_MEMORY = 5_000.0
"""The weight, in tokens, of the throughput declared or learned so far."""


class Metrics(msgspec.Struct, frozen=True):
    """What an engine reports about itself at one moment."""

    waiting_queue_size: float = 0.0
    running_requests_size: float = 0.0
    kv_cache_usage: float = 0.0
    """Share in use, 0 to 1."""
    active_models: frozenset[str] = frozenset()
    """Adapters loaded now."""
    waiting_models: frozenset[str] = frozenset()
    """Adapters requested and not loaded yet."""
    max_active_models: int = 0
    block_size: int = 0
    """Tokens per KV block; 0 if unknown."""
    num_blocks: int = 0


class Attribute(Generic[T]):
    """The name of a fact of type T about an endpoint."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Observed(msgspec.Struct, Generic[T], frozen=True):
    """A value and when it was observed."""

    value: T
    at: float

    def age(self, now: float) -> float:
        """Seconds since the observation."""
        return now - self.at


@runtime_checkable
class Extractor(Protocol):
    """Reads attributes out of what a data source delivered for one endpoint."""

    def extract(self, source: Any, endpoint: "Endpoint") -> Iterable[tuple[Attribute[Any], Any]]:
        """Yields (attribute, value) pairs; each value is kept with the time."""
        ...


METRICS: Attribute[Metrics] = Attribute("metrics")
"""An extractor that yields this attribute fills the columns."""


class Endpoint:
    """One row of a fleet: an instance, its measurements, its attributes."""

    __slots__ = (
        "_attributes",
        "closed",
        "id",
        "instance",
        "metrics",
        "requests",
        "rests",
        "row",
        "theirs",
        "worked_at",
    )

    def __init__(self, instance: ExecutionInstance, row: int) -> None:
        self.id = f"{instance.namespace}/{instance.instance_id}"
        self.instance = instance
        self.metrics: Metrics | None = None
        """None if the engine was never measured."""
        self.closed: Reason | None = instance.closed
        """Why it takes no requests, if the reason is known; it may have the fact `until`."""
        self.row = row
        """Its index in the columns of the fleet; -1 once it has left."""
        self.requests = 0
        """Number of requests that were sent to it."""
        self.worked_at = -inf
        """When it last answered a request from this dispatcher; -inf if never."""
        self.rests = False
        """Whether it is idle, and therefore observed less often until a request is sent to it."""
        self.theirs = (0.0, 0.0)
        """Requests and tokens that other dispatchers have in flight on it; they are included in the columns."""
        self._attributes: dict[str, Observed[Any]] = {}

    @property
    def labels(self) -> dict[str, str]:
        return self.instance.labels

    def observed(self, attribute: Attribute[T]) -> Observed[T] | None:
        """The attribute with its time; None if it was never observed."""
        return self._attributes.get(attribute.name)

    def serves(self, model: str) -> bool:
        """Whether it serves this model name. Every endpoint serves the empty name."""
        return not model or model == self.instance.model_name or model in self.instance.adapters

    def __str__(self) -> str:
        return self.instance.instance_id

    __repr__ = __str__


class LoadColumns:
    """The columns that change with every request: load, requests in flight, expected latency."""

    __slots__ = ("columns", "woken")

    def __init__(self) -> None:
        self.columns: Mapping[str, Column] = {}
        """The columns of the fleet."""
        self.woken: list[Endpoint] = []
        """Resting endpoints that were sent a request."""

    @property
    def all_full(self) -> bool:
        """Whether no instance has room, so that none can take a request."""
        full = self.columns[IS_FULL]
        return bool(len(full)) and 0.0 not in full

    def metrics_age(self, endpoint: Endpoint, now: float) -> float | None:
        """Seconds since the engine was last measured; None if it never was."""
        return None if endpoint.metrics is None else now - float(self.columns[MEASURED_AT][endpoint.row])

    def set(self, endpoint: Endpoint, load: float) -> None:
        columns, row, limit = self.columns, endpoint.row, endpoint.instance.max_concurrency
        columns[LOAD][row] = load
        columns[IS_FULL][row] = 1.0 if load >= columns[LIMIT][row] else 0.0
        light = columns[LIGHTNESS][row] = lightness(load, limit)
        columns[EXPECTED_MS][row] = columns[LATENCY_MS][row] / light

    def reserve(self, endpoint: Endpoint, tokens: float) -> None:
        """Count one more request from this dispatcher, at once, because the next decision must include it."""
        if endpoint.row < 0:
            return
        columns, row = self.columns, endpoint.row
        endpoint.requests += 1
        if endpoint.rests:
            endpoint.rests = False
            self.woken.append(endpoint)
        columns[IN_FLIGHT_REQUESTS][row] += 1.0
        columns[IN_FLIGHT_TOKENS][row] += tokens
        self.set(endpoint, columns[LOAD][row] + 1.0)

    def release(self, endpoint: Endpoint, tokens: float) -> None:
        if endpoint.row < 0:
            return
        columns = self.columns
        left = columns[IN_FLIGHT_REQUESTS][endpoint.row] - 1.0
        columns[IN_FLIGHT_REQUESTS][endpoint.row] = left
        # Without requests there are no tokens: fractions must not leave a residue.
        columns[IN_FLIGHT_TOKENS][endpoint.row] = columns[IN_FLIGHT_TOKENS][endpoint.row] - tokens if left else 0.0
        load = columns[LOAD][endpoint.row] - 1.0
        self.set(endpoint, load if load > 0.0 else 0.0)

    def release_tokens(self, endpoint: Endpoint, tokens: float) -> None:
        """Release the tokens of a prompt that was processed; the request itself continues."""
        if endpoint.row >= 0:
            self.columns[IN_FLIGHT_TOKENS][endpoint.row] -= tokens

    def sent_from_backlog(self, endpoint: Endpoint) -> None:
        """Count a request that was sent from the queue; the last measurement does not include it."""
        if endpoint.row >= 0:
            self.columns[SENT_SINCE_MEASURED][endpoint.row] += 1.0

    def rest(self, endpoint: Endpoint, until: float | None) -> None:
        """Observe an idle endpoint less often; its measurements count as current until `until`."""
        endpoint.rests = self.columns[IN_FLIGHT_REQUESTS][endpoint.row] <= endpoint.theirs[0]
        if endpoint.rests and until is not None:
            self.columns[HOLDS_UNTIL][endpoint.row] = until

    def wake(self, now: float) -> list[Endpoint]:
        """The resting endpoints that were sent a request since the last call. Their measurements are out of date."""
        woken = self.woken[:]
        self.woken.clear()
        for endpoint in woken:
            if endpoint.row >= 0:
                self.columns[HOLDS_UNTIL][endpoint.row] = min(now, self.columns[HOLDS_UNTIL][endpoint.row])
        return woken

    def learn_latency(self, endpoint: Endpoint, latency_ms: float, lightness_then: float) -> None:
        """Learn from a request that was sent at this lightness and took this long. The average moves by a fifth."""
        if endpoint.row < 0 or not latency_ms > 0:  # the clock is coarse, or was set back
            return
        columns, row = self.columns, endpoint.row
        unstretched = latency_ms * lightness_then
        before = columns[LATENCY_MS][row]
        average = unstretched if isnan(before) else before + 0.2 * (unstretched - before)
        columns[LATENCY_MS][row] = average
        columns[EXPECTED_MS][row] = average / columns[LIGHTNESS][row]

    def learn_throughput(self, endpoint: Endpoint, tokens: float, seconds: float, lightness_then: float) -> None:
        """Learn from a request of `tokens` that took this long. The lightness when it was sent serves to estimate the
        tokens of all requests that shared the instance. The average is over times per token, because cost is
        proportional to them."""
        if endpoint.row < 0 or not (tokens > 0 and seconds > 0):
            return
        columns, row, limit = self.columns, endpoint.row, endpoint.instance.max_concurrency
        most = LIMIT_IF_UNKNOWN if limit is None else limit or 1
        others = (most / lightness_then - most + columns[LOAD][row]) / 2  # the mean of the lightness then and now
        per_token, before = seconds / (tokens * (1.0 + others)), columns[THROUGHPUT][row]
        if not isnan(before):
            share = tokens / (tokens + THROUGHPUT_MEMORY)
            per_token = (1.0 - share) / before + share * per_token
        columns[THROUGHPUT][row] = 1.0 / per_token


class EndpointTable:
    """All endpoints, and one roster of them whose columns follow every change."""

    def __init__(self, instances: Sequence[ExecutionInstance] = ()) -> None:
        self._by_id: dict[str, Endpoint] = {}
        self.pauses: dict[str, float] = {}
        """Instances that asked for a pause, and when it ends."""
        self.silent: set[str] = set()
        """Instances that this dispatcher has closed because they are silent."""
        self._stamp = [0]
        """The number of measurements so far, in a list that rosters share."""
        self.load = LoadColumns()
        self._reset([], {})
        self._join(instances)

    def __len__(self) -> int:
        return len(self._endpoints)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._by_id

    def __getitem__(self, instance_id: str) -> Endpoint:
        try:
            return self._by_id[instance_id]
        except KeyError:
            raise UnknownName("instance", instance_id, self._by_id) from None

    def serving(self, model: str) -> Roster[Endpoint]:
        roster = self._serving.get(model)
        if roster is None:
            without = [endpoint.row for endpoint in self._endpoints if not endpoint.serves(model)]
            roster = self.roster.without(without) if without else self.roster
            if len(roster):  # clients choose the names, so only served names are cached
                self._serving[model] = roster
        return roster

    def instances(self) -> list[ExecutionInstance]:
        """Copies of the instances, with their current load and with what was learned about them. A paused instance is
        marked as not accepting requests."""
        current = (self._columns[name] for name in (LOAD, LATENCY_MS, THROUGHPUT, ACCEPTS))
        return [
            msgspec.structs.replace(
                endpoint.instance,
                current_load=int(load),
                avg_latency_ms=None if isnan(latency_ms) else float(latency_ms),
                throughput_tokens_per_sec=None if isnan(throughput) else float(throughput),
                can_accept_request=bool(accepts),
                labels=dict(endpoint.labels),
            )
            for endpoint, load, latency_ms, throughput, accepts in zip(self._endpoints, *current, strict=True)
        ]

    def add(self, instance: ExecutionInstance) -> Endpoint:
        self._join([_own(instance)])
        return self._by_id[instance.instance_id]

    def update(self, instance: ExecutionInstance) -> Endpoint:
        """Replace the record of an instance; its measurements and this dispatcher's reservations stay."""
        endpoint = self[instance.instance_id]
        columns = dict(self._columns)
        ours = columns[IN_FLIGHT_REQUESTS][endpoint.row]
        before, endpoint.instance = endpoint.instance, _own(instance)
        instance = endpoint.instance
        declared = {name: read(instance) for name, read in _DECLARED.items()}
        if isnan(declared[LATENCY_MS]):
            del declared[LATENCY_MS]  # what was learned stays
        if isnan(declared[THROUGHPUT]) or declared[THROUGHPUT] == known(before.throughput_tokens_per_sec):
            del declared[THROUGHPUT]
        if instance.instance_id in self.pauses or instance.instance_id in self.silent:
            declared[ACCEPTS] = 0.0
        else:
            endpoint.closed = instance.closed
        for name, value in declared.items():
            columns[name][endpoint.row] = value
        load = instance.current_load or _reported_load(
            endpoint.metrics
        )  # an owner may rely on the engine's reports for the load
        self.load.set(endpoint, max(float(ours), load))
        self._reset(list(self._endpoints), columns)
        return endpoint

    def remove(self, instance_id: str) -> Endpoint:
        """Remove an instance. Its endpoint stays valid for its holders, but no longer counts anywhere."""
        gone = self[instance_id]
        del self._by_id[instance_id]
        self.pauses.pop(instance_id, None)
        self.silent.discard(instance_id)
        left = [endpoint for endpoint in self._endpoints if endpoint is not gone]
        rows = [endpoint.row for endpoint in left]
        columns = {name: [float(column[row]) for row in rows] for name, column in self._columns.items()}
        for row, endpoint in enumerate(left):
            endpoint.row = row
        gone.row = -1
        self._reset(left, columns)
        return gone

    def _join(self, instances: Sequence[ExecutionInstance]) -> None:
        duplicates = [i.instance_id for i in instances if i.instance_id in self._by_id]
        if duplicates or len({instance.instance_id for instance in instances}) != len(instances):
            twice = ", ".join(duplicates) or "within one list"
            raise ConfigError([f"instance ids must be unique; given twice: {twice}"])
        joined = [Endpoint(instance, row) for row, instance in enumerate(instances, start=len(self._endpoints))]
        self._by_id.update((endpoint.instance.instance_id, endpoint) for endpoint in joined)
        fresh = {name: [start] * len(instances) for name, start in _START.items()}
        fresh |= {name: list(map(read, instances)) for name, read in (_DECLARED | _LOADED).items()}
        columns = {name: [*self._columns.get(name, ()), *column] for name, column in fresh.items()}
        self._reset([*self._endpoints, *joined], columns)

    def _reset(self, endpoints: list[Endpoint], columns: Mapping[str, Column | list[float]]) -> None:
        arrays = len(endpoints) >= ARRAYS_FROM
        self._endpoints = endpoints
        self._columns = self.load.columns = {name: column_of(column, arrays) for name, column in columns.items()}
        self.roster: Roster[Endpoint] = Roster(endpoints, self._columns, stamp=self._stamp)
        """All endpoints, with live columns. The list of members is replaced whenever membership, served models or block
        sizes change, and only then. So plugins may cache what they derive from these, by the identity of the list."""
        self._stamp[0] += 1
        self._serving: dict[str, Roster[Endpoint]] = {}

    def measure(self, instance_id: str, metrics: Metrics, now: float) -> None:
        survey(self, [(str(self[instance_id]), metrics)], now)


def survey(fleet: EndpointTable, readings: Iterable[tuple[str, Metrics]], now: float) -> None:
    """Record what engines report at this time. Instances that have left are skipped."""
    columns, in_flight, loads = fleet._columns, fleet._columns[IN_FLIGHT_REQUESTS], fleet._columns[LOAD]
    for instance_id, metrics in readings:
        if (endpoint := fleet._by_id.get(instance_id)) is None:
            continue
        row, before, endpoint.metrics = endpoint.row, endpoint.metrics, metrics
        columns[MEASURED_AT][row], columns[SENT_SINCE_MEASURED][row] = now, 0.0
        if before is not metrics:  # otherwise the engine has repeated an earlier report
            if before is None or before.block_size != metrics.block_size or before.num_blocks != metrics.num_blocks:
                fleet._reset(list(fleet._endpoints), columns)  # the columns remain the same objects
            fleet._stamp[0] += 1
            columns[WAITING][row] = metrics.waiting_queue_size
            columns[RUNNING][row] = metrics.running_requests_size
            columns[KV_USAGE][row] = metrics.kv_cache_usage
        load = max(in_flight[row], _reported_load(metrics))
        if load != loads[row]:
            fleet.load.set(endpoint, float(load))


def close(fleet: EndpointTable, endpoint: Endpoint, why: Reason) -> None:
    """Send no new requests to an instance, even if its owner says that it accepts them."""
    endpoint.closed = why
    fleet._columns[ACCEPTS][endpoint.row] = 0.0
    fleet._reset(list(fleet._endpoints), fleet._columns)


def reopen(fleet: EndpointTable, endpoints: Iterable[Endpoint]) -> None:
    """Send requests to instances again, unless their owners say that they accept none."""
    for endpoint in endpoints:
        endpoint.closed = endpoint.instance.closed
        fleet._columns[ACCEPTS][endpoint.row] = float(endpoint.instance.can_accept_request)
    fleet._reset(list(fleet._endpoints), fleet._columns)


def share(fleet: EndpointTable, instance_id: str, requests: float, tokens: float) -> None:
    """Set what other dispatchers have in flight on an instance now."""
    endpoint, columns = fleet[instance_id], fleet.load.columns
    row, (requests_before, tokens_before) = endpoint.row, endpoint.theirs
    endpoint.theirs = requests, tokens
    columns[THEIR_TOKENS][row] = tokens
    in_flight = columns[IN_FLIGHT_REQUESTS][row] + requests - requests_before
    columns[IN_FLIGHT_REQUESTS][row] = in_flight
    ours = in_flight > requests
    columns[IN_FLIGHT_TOKENS][row] = columns[IN_FLIGHT_TOKENS][row] + tokens - tokens_before if ours else tokens
    # The engine's report may include them already. Then the load is too high until the engine is measured again.
    fleet.load.set(endpoint, max(in_flight, columns[LOAD][row] + requests - requests_before))


def observe(fleet: EndpointTable, instance_id: str, attribute: Attribute[T], value: T, now: float) -> None:
    if attribute is METRICS:
        assert isinstance(value, Metrics)
        fleet.measure(instance_id, value, now)
    fleet[instance_id]._attributes[attribute.name] = Observed(value, now)
    fleet._stamp[0] += 1


def ingest(fleet: EndpointTable, extractor: Extractor, instance_id: str, source: Any, now: float) -> None:
    """Let an extractor read what a data source delivered for an endpoint. What it yields before it raises is kept."""
    for attribute, value in extractor.extract(source, fleet[instance_id]):
        observe(fleet, instance_id, attribute, value, now)


def _own(instance: ExecutionInstance) -> ExecutionInstance:
    """A copy. If the owner changed the original, some columns would change, and others would not."""
    return msgspec.structs.replace(instance, labels=dict(instance.labels))


def _reported_load(metrics: Metrics | None) -> float:
    return 0.0 if metrics is None else metrics.waiting_queue_size + metrics.running_requests_size


def lightness(load: float, limit: int | None) -> float:
    most = LIMIT_IF_UNKNOWN if limit is None else limit or 1
    return most / (most + load)


def known(measurement: float | None) -> float:
    """A measurement, or nan if there is none; a latency or throughput of zero means that there is none."""
    return nan if measurement is None or not measurement > 0 else float(measurement)


def hourly_price(instance: ExecutionInstance) -> float:
    """The hourly price of the whole instance; nan if its owner has set none."""
    if instance.price_per_hour is not None:
        return float(instance.price_per_hour)
    per_gpu = instance.price_per_gpu_hour
    return nan if per_gpu is None or not instance.gpu_count else float(per_gpu * instance.gpu_count)


_DECLARED: dict[str, Callable[[ExecutionInstance], float]] = {
    LIMIT: lambda i: inf if i.max_concurrency is None else float(i.max_concurrency),
    ACCEPTS: lambda i: float(i.can_accept_request),
    LATENCY_MS: lambda i: known(i.avg_latency_ms),
    THROUGHPUT: lambda i: known(i.throughput_tokens_per_sec),
    GPUS: lambda i: float(i.gpu_count),
    PRICE: hourly_price,
}
_LOADED: dict[str, Callable[[ExecutionInstance], float]] = {
    LOAD: lambda i: float(i.current_load),
    IS_FULL: lambda i: float(i.max_concurrency is not None and i.current_load >= i.max_concurrency),
    LIGHTNESS: lambda i: lightness(i.current_load, i.max_concurrency),
    EXPECTED_MS: lambda i: known(i.avg_latency_ms) / lightness(i.current_load, i.max_concurrency),
}
_ZERO = (WAITING, RUNNING, KV_USAGE, SENT_SINCE_MEASURED, IN_FLIGHT_REQUESTS, IN_FLIGHT_TOKENS, THEIR_TOKENS)
_START = dict.fromkeys(_ZERO, 0.0) | {MEASURED_AT: -inf, HOLDS_UNTIL: -inf}
COLUMNS = frozenset({*_START, *_DECLARED, *_LOADED})
"""The names of all columns."""

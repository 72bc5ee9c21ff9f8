"""Cases with which policies are checked, the same on every run, and a seed for the global generator of `random`."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from pointsman.render.text import one_line, text_table
from pointsman.routing.endpoints import EndpointTable, Metrics
from pointsman.scaling import DeploymentView, Rate, Window
from pointsman.types import ExecutionInstance, RequestMetadata, RequestPriority

SEEDS = (1, 5)
"""Two seeds. For any range of 2 to 8, their first number, shuffle and sample differ."""


def drawn(values: Mapping[str, Sequence[Any]], rng: random.Random) -> dict[str, Any]:
    return {field: rng.choice(choices) for field, choices in values.items()}


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed the global generator, and restore it afterwards. A policy that uses it decides differently for each seed."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


# Requests and instances


MODELS = ("small", "large")
MAX_SIZE = 8
"""Maximum number of requests, and maximum number of instances."""
MAX_WIDTH = 40
"""Maximum number of characters of a value in a table."""

REQUEST_VALUES: Mapping[str, Sequence[Any]] = {
    "prompt": ("", "hello", "tell me a story " * 40),
    "max_tokens": (None, 1, 100, 1000),
    "model_name": (*MODELS, "unknown"),
    "priority": (*RequestPriority, RequestPriority(7)),
    "slo_deadline_ms": (None, None, None, 0.0, 100.0, 60_000.0),
    "user_id": ("", "alice", "bob"),
    "arrival_time": (0.0, 1.0, 50.0, 99.0, 100.0),
    "cost_budget": (None, None, None, 0.0, 0.0001, 10.0),
    "headers": ({}, {"x-session-id": ""}, {"x-session-id": "7"}, {"x-slo-ttft-ms": ""}, {"x-slo-ttft-ms": "7"}),
}
INSTANCE_VALUES: Mapping[str, Sequence[Any]] = {
    "model_name": MODELS,
    "can_accept_request": (True, True, True, False),
    "current_load": (0, 0, 1, 2, 3, 4),
    "max_concurrency": (None, None, 0, 1, 2, 4),
    "avg_latency_ms": (None, 1.0, 37.5, 1000.0),
    "throughput_tokens_per_sec": (None, 1.0, 250.5, 10_000.0),
    "gpu_count": (1, 1, 2, 8),
    "labels": ({}, {}, {"pointsman/rack": "a"}, {"llm-d.ai/role": "decode"}, {"llm-d.ai/role": "a"}),
}
METRIC_VALUES: Mapping[str, Sequence[Any]] = {
    "waiting_queue_size": (0.0, 1.0, 5.0, 50.0),
    "running_requests_size": (0.0, 1.0, 5.0, 50.0),
    "kv_cache_usage": (0.0, 0.25, 0.99, 1.0),
    "active_models": (frozenset(), frozenset(MODELS[:1]), frozenset(MODELS)),
    "max_active_models": (0, 1, 4),
}

Entry = TypeVar("Entry", bound=msgspec.Struct)
T = TypeVar("T")


class RequestCase(msgspec.Struct):
    """The input of a scheduling policy or plugin."""

    requests: list[RequestMetadata]
    instances: list[ExecutionInstance]
    metrics: list[Metrics | None]
    """Metrics of each instance. None for an instance that was never measured."""
    seed: int = 0

    def fleet(self) -> EndpointTable:
        fleet = EndpointTable(self.instances)
        for instance, metrics in zip(self.instances, self.metrics, strict=True):
            if metrics is not None:
                fleet.measure(instance.instance_id, metrics, 100.0)
        return fleet

    def __str__(self) -> str:
        return "\n".join([_table("requests", self.requests), _table("instances", self.instances)])


def request_cases(count: int) -> list[RequestCase]:
    """Cases that are the same on every run, small ones first. The first case always offers a choice."""
    rng = random.Random(0)
    cases = [random_case(rng) for _ in range(count)]
    return [equal_case(3, 2), *sorted(cases, key=lambda case: len(case.requests) + len(case.instances))]


def random_case(rng: random.Random) -> RequestCase:
    """A case with some requests and instances. In every second case, one request occurs twice."""
    requests = [RequestMetadata(f"r{n}", **drawn(REQUEST_VALUES, rng)) for n in range(rng.randint(0, MAX_SIZE))]
    if requests and rng.random() < 0.5:
        requests.append(requests[0])
    size = rng.randint(0, MAX_SIZE)
    instances = [ExecutionInstance(instance_id=f"i{n}", **drawn(INSTANCE_VALUES, rng)) for n in range(size)]
    metrics = [None if rng.random() < 0.5 else Metrics(**drawn(METRIC_VALUES, rng)) for _ in instances]
    return RequestCase(requests, instances, metrics, rng.randint(0, 3))


def equal_case(requests: int, instances: int) -> RequestCase:
    """A case with equal requests, and with equal, idle, measured instances."""
    return RequestCase(
        [RequestMetadata(f"r{n}", "hello", 100, "small", arrival_time=float(n)) for n in range(requests)],
        [
            ExecutionInstance(
                instance_id=f"i{n}",
                model_name="small",
                max_concurrency=requests,
                avg_latency_ms=100.0,
                throughput_tokens_per_sec=1000.0,
            )
            for n in range(instances)
        ],
        [Metrics()] * instances,
    )


def smaller_cases(case: RequestCase) -> Iterator[RequestCase]:
    """Cases with one request, instance or value less. The cases that remove most come first."""
    requests, instances, metrics = case.requests, case.instances, case.metrics
    for index in range(len(requests)):
        yield msgspec.structs.replace(case, requests=_without(requests, index))
    for index in range(len(instances)):
        left = _without(instances, index)
        yield msgspec.structs.replace(case, instances=left, metrics=_without(metrics, index))
    for index, request in enumerate(requests):
        for simpler_request in _simpler(request):
            yield msgspec.structs.replace(case, requests=_with(requests, index, simpler_request))
    for index, instance in enumerate(instances):
        for simpler_instance in _simpler(instance):
            yield msgspec.structs.replace(case, instances=_with(instances, index, simpler_instance))
        if metrics[index] is not None:
            yield msgspec.structs.replace(case, metrics=_with(metrics, index, None))


def _simpler(entry: Entry) -> Iterator[Entry]:
    """Variants of the item, each with one value set to its default."""
    for name in _not_default(entry):
        if name != entry.__struct_fields__[0]:
            yield msgspec.structs.replace(entry, **{name: getattr(_default(entry), name)})


def _not_default(entry: msgspec.Struct) -> dict[str, Any]:
    """The item's id and its values that differ from the default."""
    default = _default(entry)
    values = {name: getattr(entry, name) for name in entry.__struct_fields__}
    first = entry.__struct_fields__[0]
    return {name: value for name, value in values.items() if name == first or value != getattr(default, name)}


def _default(entry: Entry) -> Entry:
    """A request or instance with the same id, and with defaults for everything else."""
    first = entry.__struct_fields__[0]
    plain = {"arrival_time": 0.0} if isinstance(entry, RequestMetadata) else {}  # its default is the current time
    return type(entry)(**{first: getattr(entry, first)}, **plain)


def _table(title: str, entries: Sequence[msgspec.Struct]) -> str:
    if not entries:
        return f"no {title}"
    shown = [_not_default(entry) for entry in entries]
    heads = list(dict.fromkeys(name for values in shown for name in values))
    rows = [[one_line(str(values.get(name, "")), MAX_WIDTH) for name in heads] for values in shown]
    return "\n".join("    " + line for line in text_table(heads, rows).splitlines())


def _without(items: list[T], index: int) -> list[T]:
    return items[:index] + items[index + 1 :]


def _with(items: list[T], index: int, item: T) -> list[T]:
    return [*items[:index], item, *items[index + 1 :]]


# Views of a deployment


NOW = 1_741_176_000.0
"""A Wednesday at noon."""
WINDOW_LENGTHS_S = (30.0, 300.0, 3600.0)

DEFAULT_VIEW = DeploymentView(name="chat", now=NOW, replicas=1, target=1, max_replicas=8, cost_per_replica_hour=1.0)


def flat(value: float, seconds: float = 300.0) -> Window:
    return Window(seconds, value, value, value, value, value, value, 10)


def _windows(*values: float) -> tuple[Window, ...]:
    return (Window(300.0), *map(flat, values))


def _by_length(*values: float) -> tuple[dict[float, Window], ...]:
    return ({}, *({length: flat(value, length) for length in WINDOW_LENGTHS_S} for value in values))


def _history(bins: int) -> tuple[Rate, ...]:
    return tuple(Rate(NOW - (bins - n) * 600.0, float(n % 7)) for n in range(bins))


VIEW_VALUES: Mapping[str, Sequence[Any]] = {
    "now": tuple(NOW + hours * 3600.0 for hours in range(14 * 24)),
    "replicas": range(7),
    "starting": range(3),
    "target": range(9),
    "min_replicas": range(3),
    "max_replicas": range(2, 9),
    "max_concurrency": (None, 1, 4, 16),
    "ongoing": (0.0, 1.0, 7.0, 40.0),
    "queued": (0.0, 0.0, 1.0, 50.0),
    "ongoing_windows": _by_length(0.0, 0.5, 40.0),
    "queued_windows": _by_length(0.0, 0.5, 50.0),
    "arrivals_per_s": ({}, *(dict.fromkeys(WINDOW_LENGTHS_S, rate) for rate in (0.0, 0.1, 3.0, 100.0))),
    "history": tuple(_history(bins) for bins in (0, 1, 6, 7, 60)),
    "ttft_ms": _windows(1.0, 250.5, 10_000.0),
    "tpot_ms": _windows(1.0, 37.5, 500.0),
    "latency_ms": _windows(1.0, 800.5, 100_000.0),
    "slo_attainment": (None, 0.0, 0.5, 0.99, 1.0),
    "kv_usage": _windows(0.0, 0.5, 1.0),
    "gpu_usage": _windows(0.0, 0.5, 1.0),
    "tokens_per_s": (None, 0.0, 0.5, 1000.0, 100_000.0),
    "metrics": ({}, {"pages": flat(0.0)}, {"depth": flat(-10.0)}, {"pages": flat(1000.0), "depth": flat(0.5)}),
    "start_up_s": (None, 0.0, 30.0, 600.0),
    "cost_per_replica_hour": (None, 0.5, 2.0),
    "since_up_s": (None, 0.0, 59.5, 4000.0),
    "since_down_s": (None, 0.0, 59.5, 4000.0),
    "idle_s": (None, 0.0, 59.5, 4000.0),
    "unplaced": range(3),
}


def scaling_cases(count: int) -> list[DeploymentView]:
    """Views that are the same on every run. The default view is the first."""
    rng = random.Random(0)
    views = [DeploymentView(name="chat", **drawn(VIEW_VALUES, rng)) for _ in range(count)]
    return [DEFAULT_VIEW, *(msgspec.structs.replace(one, unplaced=min(one.unplaced, one.starting)) for one in views)]


def smaller_views(view: DeploymentView) -> Iterator[DeploymentView]:
    """Variants of the view, each with one value set to that of the default view."""
    for name in view.__struct_fields__:
        if name != "state" and getattr(view, name) != getattr(DEFAULT_VIEW, name):
            yield msgspec.structs.replace(view, **{name: getattr(DEFAULT_VIEW, name)}, state={})


def shown(view: DeploymentView) -> str:
    """The values of a view that differ from the default view, on one line."""
    values = {
        name: _brief(getattr(view, name))
        for name in view.__struct_fields__
        if name in ("replicas", "target") or getattr(view, name) != getattr(DEFAULT_VIEW, name)
    }
    return "    a view with " + ", ".join(f"{name} {value}" for name, value in values.items() if name != "state")


def _brief(value: Any) -> str:
    if isinstance(value, Window):
        return "unmeasured" if value.mean is None else f"{value.mean:g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_brief(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple):
        return f"of {len(value)} bins"
    if value is None:
        return "unknown"
    return f"{value:g}" if isinstance(value, float) else str(value)

"""Situations to try policies in: from nothing at all to everything full, duplicated and unmeasured."""

from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st

from pointsman.render.text import one_line, text_table
from pointsman.routing.endpoints import EndpointTable, Metrics
from pointsman.types import ExecutionInstance, Priority, RequestMetadata

MODELS = ("small", "large")
LONGEST = 40
"""Characters of a fact, where it is shown."""

T = TypeVar("T", bound=msgspec.Struct)

REQUESTS = st.builds(
    RequestMetadata,
    request_id=st.just("?"),
    prompt=st.sampled_from(["", "hello", "tell me a story " * 40]),
    max_tokens=st.none() | st.integers(1, 1000),
    model_name=st.sampled_from([*MODELS, "unknown"]),
    priority=st.sampled_from(list(Priority)).map(int),
    slo_deadline_ms=st.none() | st.sampled_from([0.0, 100.0, 60_000.0]),
    user_id=st.sampled_from(["", "alice", "bob"]),
    arrival_time=st.none() | st.integers(0, 100).map(float),
    cost_budget=st.none() | st.sampled_from([0.0, 0.0001, 10.0]),
    headers=st.dictionaries(st.sampled_from(["x-session-id", "x-slo-ttft-ms"]), st.sampled_from(["", "7"]), max_size=1),
)
INSTANCES = st.builds(
    ExecutionInstance,
    instance_id=st.just("?"),
    model_name=st.sampled_from(MODELS),
    can_accept_request=st.sampled_from([True, True, True, False]),
    current_load=st.integers(0, 4),
    max_concurrency=st.none() | st.integers(0, 4),
    avg_latency_ms=st.none() | st.floats(1, 1000),
    throughput_tokens_per_sec=st.none() | st.floats(1, 10_000),
    gpu_count=st.integers(1, 8),
    labels=st.dictionaries(st.sampled_from(["pointsman/rack", "llm-d.ai/role"]), st.sampled_from(["a", "decode"])),
)
METRICS = st.none() | st.builds(
    Metrics,
    waiting_queue_size=st.integers(0, 50).map(float),
    running_requests_size=st.integers(0, 50).map(float),
    kv_cache_usage=st.floats(0, 1),
    active_models=st.frozensets(st.sampled_from(MODELS)),
    max_active_models=st.integers(0, 4),
)


class Situation(msgspec.Struct):
    """What a policy is confronted with."""

    requests: list[RequestMetadata]
    instances: list[ExecutionInstance]
    metrics: list[Metrics | None]
    """Of each instance; None: never measured."""
    seed: int = 0

    def fleet(self) -> EndpointTable:
        """The instances as endpoints, with their metrics."""
        fleet = EndpointTable(self.instances)
        for instance, metrics in zip(self.instances, self.metrics, strict=True):
            if metrics is not None:
                fleet.measure(instance.instance_id, metrics, 100.0)
        return fleet

    def __str__(self) -> str:
        parts = [_table("requests", self.requests), _table("instances", self.instances)]
        return "\n".join(part for part in parts if part)


@st.composite
def situations(draw: st.DrawFn, most: int = 8) -> Situation:
    """Up to so many requests and instances; now and then a request is there twice."""
    requests = [
        msgspec.structs.replace(request, request_id=f"r{number}")
        for number, request in enumerate(draw(st.lists(REQUESTS, max_size=most)))
    ]
    twice: bool = draw(st.booleans())
    if requests and twice:
        requests.append(requests[0])
    instances = [
        msgspec.structs.replace(instance, instance_id=f"i{number}")
        for number, instance in enumerate(draw(st.lists(INSTANCES, max_size=most)))
    ]
    metrics = draw(st.lists(METRICS, min_size=len(instances), max_size=len(instances)))
    return Situation(requests, instances, metrics, draw(st.integers(0, 3)))


def crowd(requests: int, instances: int) -> Situation:
    """Many equal requests for many equal, idle, measured instances."""
    return Situation(
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


def _table(title: str, things: list[Any]) -> str:
    """What is not as by default, one line each."""
    if not things:
        return f"no {title}"
    facts = [_said(thing) for thing in things]
    heads = list(dict.fromkeys(name for said in facts for name in said))
    rows = [[one_line(str(said.get(name, "")), LONGEST) for name in heads] for said in facts]
    return "\n".join("    " + line for line in text_table(heads, rows).splitlines())


def _said(thing: msgspec.Struct) -> dict[str, Any]:
    default = plain(thing)
    said = {name: getattr(thing, name) for name in thing.__struct_fields__}
    first = thing.__struct_fields__[0]
    return {name: value for name, value in said.items() if name == first or value != getattr(default, name)}


def plain(thing: T) -> T:
    """The same request or instance with nothing said of it but its id."""
    first = thing.__struct_fields__[0]
    return type(thing)(**{first: getattr(thing, first)})

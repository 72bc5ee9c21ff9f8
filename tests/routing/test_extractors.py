"""Extractors read the location of instances from labels, and more of what engines report than their adapters do."""

from collections.abc import Sequence
from typing import Any

import pytest

from pointsman.engines.prometheus import Samples
from pointsman.routing.endpoints import KV_USAGE, WAITING, Attribute, EndpointTable, Metrics, ingest
from pointsman.routing.extractors import CoreMetricsExtractor, CustomMetric, EngineConfig, MetricSpec, TopologyExtractor
from pointsman.routing.extractors import metric_spec as spec
from pointsman.routing.topology import Location
from pointsman.types import ExecutionInstance
from tests.routing.fleets import Candidate, fleet_of

# Locations

LABELS = {
    "kubernetes.io/hostname": "h1",
    "topology.kubernetes.io/rack": "r1",
    "topology.kubernetes.io/zone": "z1",
    "topology.kubernetes.io/region": "eu",
    "cabinet": "c7",
}


@pytest.mark.parametrize(
    ("parameters", "labels", "host", "expected"),
    [
        ({}, LABELS, "10.0.0.1", Location("h1", "r1", "z1", "eu")),
        ({}, {}, "10.0.0.1", Location("10.0.0.1")),
        ({}, {}, "", Location()),
        ({"rack": "cabinet"}, LABELS, "", Location("h1", "c7", "z1", "eu")),
        ({"hostname": "node"}, LABELS, "10.0.0.1", Location("10.0.0.1", "r1", "z1", "eu")),
    ],
)
def test_a_location_is_read_from_labels(
    parameters: dict[str, str], labels: dict[str, str], host: str, expected: Location
) -> None:
    instance = ExecutionInstance(instance_id="i", labels=labels, host=host)
    assert TopologyExtractor(**parameters).location(instance) == expected


@pytest.mark.parametrize(
    ("one", "other", "level"),
    [
        (Location("h", "r", "z", "g"), Location("h", "r", "z", "g"), 0),
        (Location("h", "r", "z", "g"), Location("i", "r", "z", "g"), 1),
        (Location("h", "r", "z", "g"), Location("i", "s", "z", "g"), 2),
        (Location("h", "r", "z", "g"), Location("i", "s", "y", "g"), 3),
        (Location("h", "r", "z", "g"), Location("i", "s", "y", "f"), None),
        (Location(), Location(), None),
        (Location("", "r"), Location("", "r"), 1),
    ],
)
def test_the_nearest_common_level(one: Location, other: Location, level: int | None) -> None:
    assert one.common(other) == other.common(one) == level


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("host=h1,rack=r2,zone=z,region=eu", Location("h1", "r2", "z", "eu")),
        ("rack=r2", Location("", "r2")),
        ("nonsense,rack=r2,floor=3,=x", Location("", "r2")),
        ("", Location()),
    ],
)
def test_a_location_in_a_header(written: str, expected: Location) -> None:
    assert Location.read(written) == expected


# Metrics


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("depth", MetricSpec("depth")),
        ("vllm:num_requests_waiting", MetricSpec("vllm:num_requests_waiting")),
        ("depth{tier=gold}", MetricSpec("depth", {"tier": "gold"})),
        ('depth{tier="gold", pool = "a b"}', MetricSpec("depth", {"tier": "gold", "pool": "a b"})),
        ("depth{}", MetricSpec("depth")),
    ],
)
def test_metrics_are_selected_by_name_and_labels(text: str, expected: MetricSpec | None) -> None:
    assert spec(text, "metricSpec") == expected


@pytest.mark.parametrize("text", ["{tier=gold}", "depth{tier}", "sum(depth)", "depth{tier=~gold}", "depth[5m]", "a b"])
def test_text_that_is_no_metric_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a metric such as"):
        spec(text, "metricSpec")


REPORT = """\
custom_queue_depth{tier="gold"} 7
custom_queue_depth{tier="tin"} 30
custom_waiting 4
custom_cache 0.25
info{block="32",blocks="100"} 1
lora{running_lora_adapters="a, b",waiting_lora_adapters="c",max_lora="4"} 12
vllm:nixl_num_failed_transfers_total 3
"""


def reported(extractor: CoreMetricsExtractor, labels: dict[str, str] | None = None) -> tuple[EndpointTable, Any]:
    fleet = fleet_of([Candidate(Metrics(waiting_queue_size=1.0), labels=labels or {})])
    ingest(fleet, extractor, "0", Samples(REPORT), 5.0)
    return fleet, fleet["0"]


def value_of(endpoint: Any, key: str) -> float | None:
    seen = endpoint.observed(Attribute(key))
    return None if seen is None else seen.value


def depth(optional: bool = False, metric: str = "custom_queue_depth{tier=gold}") -> Sequence[CustomMetric]:
    return (CustomMetric("custom.queue_depth", metric, optional),)


def test_custom_metrics_become_attributes() -> None:
    fleet, endpoint = reported(
        CoreMetricsExtractor(engine_configs=[EngineConfig("vllm", custom_metrics=tuple(depth()))])
    )
    assert value_of(endpoint, "custom.queue_depth") == 7.0
    assert endpoint.observed(Attribute("custom.queue_depth")).at == 5.0
    assert value_of(endpoint, "NixlFailedTransfers") is None, (
        "a configuration of the same name replaces the built-in one"
    )
    assert fleet.roster.column(WAITING)[0] == 1.0, "what is not configured is as the adapter reads it"


def test_the_label_of_an_endpoint_names_its_engine() -> None:
    extractor = CoreMetricsExtractor(engine_configs=[EngineConfig("mine", custom_metrics=tuple(depth()))])
    _, by_default = reported(extractor)
    assert value_of(by_default, "custom.queue_depth") is None
    assert value_of(by_default, "NixlFailedTransfers") == 3.0
    _, labelled = reported(extractor, {"llm-d.ai/engine-type": "mine"})
    assert value_of(labelled, "custom.queue_depth") == 7.0
    other = CoreMetricsExtractor("kind", "mine", [EngineConfig("mine", custom_metrics=tuple(depth()))])
    _, mine = reported(other, {"kind": "sglang"})
    assert value_of(mine, "custom.queue_depth") is None
    assert value_of(reported(other)[1], "custom.queue_depth") == 7.0


def test_a_configuration_says_where_the_core_metrics_are() -> None:
    config = EngineConfig(
        "vllm",
        queued_requests_spec="custom_waiting",
        kv_usage_spec="custom_cache",
        running_requests_spec="absent",
        lora_spec="lora",
        cache_info_spec="info",
        cache_block_size_label_name="block",
        cache_num_blocks_label_name="blocks",
    )
    fleet, endpoint = reported(CoreMetricsExtractor(engine_configs=[config]))
    assert (fleet.roster.column(WAITING)[0], fleet.roster.column(KV_USAGE)[0]) == (4.0, 0.25)
    wanted = Metrics(4.0, 0.0, 0.25, frozenset({"a", "b"}), frozenset({"c"}), 4, 32, 100)
    assert endpoint.metrics == wanted


def test_a_metric_that_is_not_reported_is_an_error_unless_optional() -> None:
    configs = [
        EngineConfig("vllm", custom_metrics=(*depth(), CustomMetric("x", "nowhere"), CustomMetric("y", "no", True)))
    ]
    fleet = fleet_of([Candidate(Metrics())])
    with pytest.raises(LookupError, match=r"does not report nowhere$"):
        ingest(fleet, CoreMetricsExtractor(engine_configs=configs), "0", Samples(REPORT), 5.0)
    assert value_of(fleet["0"], "custom.queue_depth") == 7.0, "what was found is kept"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"default_engine": "vlm"}, 'defaultEngine is "vlm"; it must be in engineConfigs or built in.*vllm'),
        ({"engine_configs": [EngineConfig("")]}, 'engineConfigs has the name ""'),
        ({"engine_configs": [EngineConfig("default")]}, 'engineConfigs has the name "default"'),
        ({"engine_configs": [EngineConfig("a", kv_usage_spec="x{")]}, "engineConfigs has kv_usage_spec"),
        ({"engine_configs": [EngineConfig("a", custom_metrics=(CustomMetric("", "x"),))]}, "without attributeKey"),
        ({"engine_configs": [EngineConfig("a", custom_metrics=(CustomMetric("x", ""),))]}, "without attributeKey"),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoreMetricsExtractor(**parameters)

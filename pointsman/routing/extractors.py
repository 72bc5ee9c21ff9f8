"""Extractors: facts that filters and scorers read about endpoints, from their labels and from what they report.

Enters: the labels of an instance, or the text of its metrics. Leaves: its location, or attributes with their age. The
one rule: what an engine does not report is missing, never zero.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Protocol

import msgspec

from pointsman.errors import did_you_mean
from pointsman.parameters import NoEffect, Parameters, Spelled
from pointsman.routing.endpoints import METRICS, Attribute, Endpoint, Metrics
from pointsman.routing.topology import Location
from pointsman.types import ExecutionInstance

__all__ = ["CoreMetricsExtractor", "FileDiscovery", "TopologyExtractor"]


class FileDiscovery:
    """Names the file that lists the endpoints of a deployment; the plane reads it, and watches it for changes."""

    def __init__(self, path: str, watch_file: Annotated[bool, NoEffect("the file is always watched")] = False) -> None:
        if not path:
            raise ValueError("path is empty; it must be that of a file")
        self._path = path

    def endpoints_file(self) -> str:
        return self._path


class TopologyExtractor:
    """Reads the location of an instance from its labels; each parameter names a label. The labels of an instance are
    those of its worker, of its deployment and its own. Without the label of the host, two instances with the same
    address are on the same host.
    """

    def __init__(
        self,
        hostname: str = "kubernetes.io/hostname",
        rack: str = "topology.kubernetes.io/rack",
        zone: str = "topology.kubernetes.io/zone",
        region: str = "topology.kubernetes.io/region",
    ) -> None:
        self._labels = (hostname, rack, zone, region)

    def location(self, instance: ExecutionInstance) -> Location:
        """Where an instance is; levels that are not known are empty."""
        host, rack, zone, region = (instance.labels.get(label, "") for label in self._labels)
        return Location(host or instance.host, rack, zone, region)


# What engines report


class EngineReport(Protocol):
    """The metrics that an engine reported at one moment."""

    def value(self, name: str, **labels: str) -> float | None: ...
    def labels(self, name: str) -> list[dict[str, str]]: ...
    def newest_labels(self, name: str) -> dict[str, str]: ...


class MetricSpec(msgspec.Struct, frozen=True):
    """Selects samples by name and by labels."""

    name: str
    labels: dict[str, str] = {}

    def read(self, report: EngineReport) -> float | None:
        return report.value(self.name, **self.labels)


_SPEC = re.compile(r"\s*([a-zA-Z_:][\w:]*)\s*(?:\{(.*)\})?\s*")
_MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)\s*=\s*(?:"([^"]*)"|([^"~=,}\s][^",}\s]*))\s*')


def metric_spec(text: str, parameter: str) -> MetricSpec | None:
    """Read NAME or NAME{label=value,...}; quotes around values are optional. None for empty text. Raises ValueError."""
    if not text.strip():
        return None
    spec = _SPEC.fullmatch(text)
    matchers = [_MATCHER.fullmatch(part) for part in (spec[2] or "").split(",") if part.strip()] if spec else [None]
    if spec is None or None in matchers:
        wanted = "it must be a metric such as vllm:num_requests_waiting{engine=0}"
        raise ValueError(f'engineConfigs has {parameter} "{text}"; {wanted}')
    labels = {found[1]: found[2] if found[3] is None else found[3] for found in matchers if found is not None}
    return MetricSpec(spec[1], labels)


_ADAPTERS = "adapters in use are read from loraSpec"


class CustomMetric(Parameters, frozen=True):
    """One more number that an engine reports, and the attribute that it becomes."""

    attribute_key: str
    metric_spec: str
    optional: bool = False


class EngineConfig(Parameters, frozen=True):
    """Where one kind of engine reports its numbers. Those that are not given are read as its adapter reads them."""

    name: str
    queued_requests_spec: str = ""
    running_requests_spec: str = ""
    kv_usage_spec: Annotated[str, Spelled("kvUsageSpec")] = ""
    lora_spec: Annotated[str, Spelled("loraSpec")] = ""
    lora_loaded_spec: Annotated[str, Spelled("loraLoadedSpec"), NoEffect(_ADAPTERS)] = ""
    lora_gpu_loaded_spec: Annotated[str, Spelled("loraGPULoadedSpec"), NoEffect(_ADAPTERS)] = ""
    lora_gpu_slots_spec: Annotated[str, Spelled("loraGPUSlotsSpec")] = ""
    cache_info_spec: str = ""
    cache_block_size_label_name: str = "block_size"
    cache_num_blocks_label_name: str = "num_gpu_blocks"
    cache_block_size_spec: str = ""
    cache_num_blocks_spec: str = ""
    custom_metrics: tuple[CustomMetric, ...] = ()


BUILT_IN = (
    EngineConfig(
        "vllm",
        custom_metrics=tuple(
            CustomMetric(key, f"vllm:nixl_num_{name}_total", True)
            for key, name in {
                "NixlFailedTransfers": "failed_transfers",
                "NixlFailedNotifications": "failed_notifications",
                "NixlKVExpiredRequests": "kv_expired_reqs",
            }.items()
        ),
    ),
    *map(EngineConfig, ("sglang", "atom", "trtllm-serve", "triton-tensorrt-llm", "triton")),
)
"""Engines that may be named without a configuration; their adapters read what they report."""

NUMBERS = {
    "queued_requests_spec": "waiting_queue_size",
    "running_requests_spec": "running_requests_size",
    "kv_usage_spec": "kv_cache_usage",
    "lora_gpu_slots_spec": "max_active_models",
    "cache_block_size_spec": "block_size",
    "cache_num_blocks_spec": "num_blocks",
}
"""Parameter that selects a number -> the field of `Metrics` that this number becomes."""


class _Reading:
    """How the report of one kind of engine is read."""

    def __init__(self, config: EngineConfig) -> None:
        if not config.name or config.name == "default":
            raise ValueError(f'engineConfigs has the name "{config.name}"; it must be that of an engine')
        self._config = config
        given = {field: metric_spec(getattr(config, field), field) for field in NUMBERS}
        self._numbers = {NUMBERS[field]: spec for field, spec in given.items() if spec is not None}
        self._lora = metric_spec(config.lora_spec, "loraSpec")
        self._cache = metric_spec(config.cache_info_spec, "cacheInfoSpec")
        self.custom: list[tuple[CustomMetric, MetricSpec]] = []
        for one in config.custom_metrics:
            spec = metric_spec(one.metric_spec, f'metricSpec of "{one.attribute_key}"')
            if not one.attribute_key or spec is None:
                raise ValueError("engineConfigs has customMetrics without attributeKey or metricSpec; give both")
            self.custom.append((one, spec))

    def metrics(self, report: EngineReport, adapter: Metrics) -> Metrics | None:
        """The adapter's metrics, with the numbers that this configuration selects; None if it selects none."""
        if not (self._numbers or self._lora or self._cache):
            return None
        found: dict[str, Any] = {}
        for field, spec in self._numbers.items():
            value = spec.read(report)
            if value is not None:
                found[field] = value if isinstance(getattr(adapter, field), float) else int(value)
        if self._lora is not None and (labels := report.newest_labels(self._lora.name)):
            found |= {
                "active_models": _names(labels.get("running_lora_adapters", "")),
                "waiting_models": _names(labels.get("waiting_lora_adapters", "")),
            } | ({"max_active_models": int(labels["max_lora"])} if labels.get("max_lora", "").isdecimal() else {})
        for labels in report.labels(self._cache.name)[:1] if self._cache is not None else ():
            names = (self._config.cache_block_size_label_name, self._config.cache_num_blocks_label_name)
            for field, name in zip(("block_size", "num_blocks"), names, strict=True):
                if labels.get(name, "").isdecimal():
                    found[field] = int(labels[name])
        return msgspec.structs.replace(adapter, **found)


class CoreMetricsExtractor:
    """Reads more of what engines report than their adapters do: `customMetrics` become attributes of endpoints.

    The label `engine_label_key` of an endpoint names its engine; without that label it is `default_engine`. An engine
    configuration may also say where an engine reports its queue, KV cache and adapters.
    """

    def __init__(
        self,
        engine_label_key: str = "llm-d.ai/engine-type",
        default_engine: str = "vllm",
        engine_configs: Sequence[EngineConfig] = (),
    ) -> None:
        configs = {config.name: config for config in (*BUILT_IN, *engine_configs)}
        if default_engine not in configs:
            raise ValueError(
                f'defaultEngine is "{default_engine}"; it must be in engineConfigs or built in'
                f"{did_you_mean(default_engine, configs)}"
            )
        self._label = engine_label_key
        self._readings = {name: _Reading(config) for name, config in configs.items()}
        self._default = self._readings[default_engine]

    @property
    def attributes(self) -> set[str]:
        """The attributes that it can provide."""
        return {one.attribute_key for reading in self._readings.values() for one, _ in reading.custom}

    def extract(self, source: EngineReport, endpoint: Endpoint) -> Iterable[tuple[Attribute[Any], Any]]:
        reading = self._readings.get(endpoint.labels.get(self._label, ""), self._default)
        if endpoint.metrics is not None and (metrics := reading.metrics(source, endpoint.metrics)) is not None:
            yield METRICS, metrics
        yield from self._custom(reading, source)

    def _custom(self, reading: _Reading, source: EngineReport) -> Iterator[tuple[Attribute[Any], Any]]:
        missing = []
        for one, spec in reading.custom:
            value = spec.read(source)
            if value is not None:
                yield Attribute(one.attribute_key), value
            elif not one.optional:
                missing.append(one.metric_spec)
        if missing:  # attributes that were found are kept; missing metrics are counted and shown
            raise LookupError(f"the engine does not report {', '.join(missing)}")


def _names(written: str) -> frozenset[str]:
    return frozenset(name.strip() for name in written.split(",") if name.strip())

"""The published `EndpointPickerConfig` as types. Fields that end in "ref" hold the name of a plugin of the document."""

# ruff: noqa: RUF012 (each struct gets an empty list or mapping of its own)

from typing import Annotated, Any, Literal

from pointsman.config.validation import Section
from pointsman.parameters import Duration, Quantity, Spelled


class PluginSpec(Section, frozen=True):
    """One plugin to build."""

    type: str
    """A built-in type, or your own class as package.module:Name."""
    name: str = ""
    """The name in references; default: its type."""
    parameters: dict[str, Any] = {}
    weight: float = 1.0
    """The weight of its scores in profiles without one; the published picker has weights in profiles only."""


class ProfileEntry(Section, frozen=True):
    """A plugin's place in a profile."""

    plugin_ref: str
    weight: float | None = None
    """The weight of its scores, if it is a scorer."""


class ProfileSpec(Section, frozen=True):
    """Filters, scorers and a picker under one name."""

    name: str
    plugins: list[ProfileEntry] = []


class PluginName(Section, frozen=True):
    """Refers to a plugin."""

    plugin_ref: str


class DetectorRef(Section, frozen=True):
    """Refers to a saturation detector."""

    plugin_ref: str = ""


class BandTemplate(Section, frozen=True):
    """Limits and policies of a priority band."""

    priority: int = 0
    max_requests: Quantity | None = None
    max_bytes: Quantity | None = None
    default_request_ttl: Annotated[Duration | None, Spelled("defaultRequestTTL")] = None
    fairness_policy_ref: str = ""
    ordering_policy_ref: str = ""


class BandSpec(BandTemplate, frozen=True):
    """The band of one priority."""

    priority: int


class FlowControlSpec(Section, frozen=True):
    """Queueing in front of the engines. Needs the feature gate `flowControl`."""

    max_requests: Quantity | None = None
    max_bytes: Quantity | None = None
    default_request_ttl: Annotated[Duration | None, Spelled("defaultRequestTTL")] = None
    no_endpoint_request_ttl: Annotated[Duration | None, Spelled("noEndpointRequestTTL")] = None
    default_priority_band: BandTemplate | None = None
    default_negative_priority_band: BandTemplate | None = None
    priority_bands: list[BandSpec] = []
    usage_limit_policy_plugin_ref: str = ""
    band_selection_policy_plugin_ref: str = ""
    saturation_detector: DetectorRef | None = None
    enable_eviction: bool = False


class SourceSpec(Section, frozen=True):
    """A data source and what reads it."""

    plugin_ref: str
    extractors: list[PluginName] = []


class DiscoverySpec(Section, frozen=True):
    """Discovery of endpoints and other pickers; the first field is the old form."""

    plugin_ref: str = ""
    endpoints: PluginName | None = None
    peers: PluginName | None = None


class CrossReplicaSpec(Section, frozen=True):
    """State shared between replicas of the picker."""

    syncer_plugin_ref: str = ""
    sync_interval: Duration | None = None
    publish_timeout: Duration | None = None


class DataLayerSpec(Section, frozen=True):
    """Where facts about endpoints come from."""

    inject_defaults: bool = True
    sources: list[SourceSpec] = []
    discovery: DiscoverySpec | None = None
    peer_discovery: PluginName | None = None
    cross_replica: CrossReplicaSpec | None = None
    cross_replica_syncer_plugin_ref: str = ""
    cross_replica_sync_interval: Duration | None = None


class RequestHandlerSpec(Section, frozen=True):
    """How requests are read."""

    parsers: list[PluginName] = []
    propagate_priority: bool = False


class PickerBody(Section, frozen=True):
    """Plugins, and profiles of them that pick an endpoint for each request."""

    feature_gates: list[str] = []
    plugins: list[PluginSpec] = []
    scheduling_profiles: list[ProfileSpec] = []
    flow_control: FlowControlSpec | None = None
    data_layer: DataLayerSpec | None = None
    request_handler: RequestHandlerSpec | None = None
    saturation_detector: DetectorRef | None = None
    """Old; read if flowControl.saturationDetector is unset."""
    parser: PluginName | None = None
    """Old; read if requestHandler.parsers is unset."""


PickerVersion = Literal["llm-d.ai/v1", "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"]


class EndpointPickerConfig(PickerBody, frozen=True):
    """A published endpoint picker's configuration."""

    api_version: PickerVersion = "llm-d.ai/v1alpha1"
    kind: Literal["EndpointPickerConfig"] = "EndpointPickerConfig"


class InlinePicker(PickerBody, frozen=True):
    """The body of an EndpointPickerConfig inside another document."""

    api_version: PickerVersion | None = None
    kind: Literal["EndpointPickerConfig"] | None = None

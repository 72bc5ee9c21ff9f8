"""The documents that can be loaded, as types: the published `EndpointPickerConfig`, and our own `Pointsman`.

Fields are snake case here and camel case in YAML; those that end in "ref" hold the name of a plugin of the document.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from pointsman.config.schema import (
    ApplicationDocument,
    Count,
    EndpointSpec,
    EngineSpec,
    GatewaySpec,
    LifecycleSpec,
    PlacementSpec,
    PriceSpec,
    ScalingSpec,
    WorkerSpec,
)
from pointsman.config.validation import Quantity, Section
from pointsman.parameters import Duration, ExistingFile, FileName, Spelled

# ruff: noqa: RUF012 (each struct gets an empty list or mapping of its own)


# EndpointPickerConfig


class PluginSpec(Section, frozen=True):
    """One plugin to build."""

    type: str
    """A built-in type, or your own class as package.module:Name."""
    name: str = ""
    """What others call it; its type if left out."""
    parameters: dict[str, Any] = {}
    weight: float = 1.0
    """How much its scores count in profiles that do not say; the published picker has it in profiles only."""


class ProfileEntry(Section, frozen=True):
    """A plugin's place in a profile."""

    plugin_ref: str
    weight: float | None = None
    """How much its scores count here, if it is a scorer."""


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
    """Where endpoints and other pickers are found; the first field is the old form."""

    plugin_ref: str = ""
    endpoints: PluginName | None = None
    peers: PluginName | None = None


class CrossReplicaSpec(Section, frozen=True):
    """How replicas of the picker tell each other what they know."""

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
    """Plugins, and how they work together to pick an endpoint for each request."""

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


# Pointsman


class InlinePicker(PickerBody, frozen=True):
    """The body of an EndpointPickerConfig inside another document."""

    api_version: PickerVersion | None = None
    kind: Literal["EndpointPickerConfig"] | None = None


class SchedulingSpec(Section, frozen=True):
    """How requests of a deployment are scheduled: by a policy, or by the plugins of an EndpointPickerConfig."""

    policy: str = ""
    """A built-in policy, or your own class as package.module:Name."""
    parameters: dict[str, Any] = {}
    config: InlinePicker | None = None


class DeploymentSpec(Section, frozen=True):
    """A named set of equal instances of one model."""

    name: str
    model: str
    """What clients call it."""
    aliases: list[str] = []
    """Further names that clients may use."""
    replicas: Annotated[int, Meta(ge=0)] = 1
    """Instances of `engine` to run."""
    engine: EngineSpec | None = None
    endpoints: list[EndpointSpec] = []
    """Servers that somebody else started; beside those of `engine`, or instead of them."""
    endpoints_file: Annotated[str, FileName(must_exist=False)] = ""
    """A YAML list of more of them, watched for changes."""
    max_concurrency: Count | None = None
    """Requests at once on each instance; left out: what the engine says."""
    labels: dict[str, str] = {}
    lifecycle: LifecycleSpec = LifecycleSpec()
    placement: PlacementSpec = PlacementSpec()
    price: PriceSpec | None = None
    scaling: ScalingSpec | None = None
    """How many instances there are; left out: always `replicas`."""
    scheduling: SchedulingSpec | None = None


class Pointsman(Section, frozen=True):
    """Our own document."""

    api_version: Literal["pointsman/v1alpha1"] = "pointsman/v1alpha1"
    kind: Literal["Pointsman"] = "Pointsman"
    workers: list[WorkerSpec] = []
    """Empty: this machine."""
    deployments: list[DeploymentSpec] = []
    applications: list[ExistingFile] = []
    """Files of `Application` documents, each a pipeline."""
    gateway: GatewaySpec = GatewaySpec()


KINDS: dict[str, type[Section]] = {
    "EndpointPickerConfig": EndpointPickerConfig,
    "Pointsman": Pointsman,
    "Application": ApplicationDocument,
}

"""The documents as types: `Pointsman`, `Application`, and the published `EndpointPickerConfig`.

Fields are snake case here and camel case in YAML. A section that another package declares has that package's type.
"""

from typing import Annotated, Any, Literal

from pointsman.config.machines import ResourcesSpec, RuntimeSpec, RuntimeType, SelectorSpec, WorkerSpec
from pointsman.config.validation import Section
from pointsman.control.desired import DesiredEndpoint, DesiredEngine, Lifecycle
from pointsman.parameters import (
    Above0,
    Amount,
    Bytes,
    Count,
    Duration,
    ExistingFile,
    FileName,
    FileOrName,
    NoEffect,
    Number,
    Quantity,
    Size,
    Spelled,
    Time,
)
from pointsman.pipeline.graph import CALL
from pointsman.pipeline.options import NodeOptions
from pointsman.placement.asks import Arrangement, PlacementRules, TierName
from pointsman.routing.producers.prefix_index import MAX_INDEX_BYTES
from pointsman.routing.routes import DEFAULT_SETTINGS
from pointsman.routing.shadow import BUDGET
from pointsman.routing.user_code import TIME_LIMIT_S
from pointsman.scaling.limits import MetricQuery, ScalingLimits

# The published `EndpointPickerConfig`; a field that ends in "ref" holds the name of a plugin

# ruff: noqa: RUF012 (each struct gets its own empty list or mapping)


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
    default_request_ttl: Annotated[
        Duration | None, Spelled("defaultRequestTTL"), NoEffect("that of flowControl applies to all bands")
    ] = None
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
    band_selection_policy_plugin_ref: Annotated[str, NoEffect("bands go by priority")] = ""
    saturation_detector: DetectorRef | None = None
    enable_eviction: bool = False


class SourceSpec(Section, frozen=True):
    """A data source and what reads it."""

    plugin_ref: str
    extractors: list[PluginName] = []


_ALONE = "a plane has one dispatcher for each deployment, and no replicas of it"


class DiscoverySpec(Section, frozen=True):
    """Discovery of endpoints and other pickers; the first field is the old form."""

    plugin_ref: str = ""
    endpoints: PluginName | None = None
    peers: Annotated[PluginName | None, NoEffect(_ALONE)] = None


class CrossReplicaSpec(Section, frozen=True):
    """State shared between replicas of the picker."""

    syncer_plugin_ref: str = ""
    sync_interval: Duration | None = None
    publish_timeout: Duration | None = None


class DataLayerSpec(Section, frozen=True):
    """Where facts about endpoints come from."""

    inject_defaults: Annotated[bool, NoEffect("the plane always measures its instances")] = True
    sources: Annotated[
        list[SourceSpec], NoEffect("the plane measures its instances, and every extractor reads what they report")
    ] = []
    discovery: DiscoverySpec | None = None
    peer_discovery: Annotated[PluginName | None, NoEffect(_ALONE)] = None
    cross_replica: Annotated[CrossReplicaSpec | None, NoEffect(_ALONE)] = None
    cross_replica_syncer_plugin_ref: Annotated[str, NoEffect(_ALONE)] = ""
    cross_replica_sync_interval: Annotated[Duration | None, NoEffect(_ALONE)] = None


_READ = "requests are read by the gateway"


class RequestHandlerSpec(Section, frozen=True):
    """How requests are read."""

    parsers: Annotated[list[PluginName], NoEffect(_READ)] = []
    propagate_priority: Annotated[bool, NoEffect("the engine gets the request as the client sent it")] = False


class PickerBody(Section, frozen=True):
    """Plugins, and profiles of them that pick an endpoint for each request."""

    feature_gates: list[str] = []
    plugins: list[PluginSpec] = []
    scheduling_profiles: list[ProfileSpec] = []
    flow_control: FlowControlSpec | None = None
    data_layer: DataLayerSpec | None = None
    request_handler: RequestHandlerSpec | None = None
    saturation_detector: DetectorRef | None = None
    """Old form; used if flowControl.saturationDetector is unset."""
    parser: Annotated[PluginName | None, NoEffect(_READ)] = None
    """Old form; used if requestHandler.parsers is unset."""


PickerVersion = Literal["llm-d.ai/v1", "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"]


class EndpointPickerConfig(PickerBody, frozen=True):
    """A published endpoint picker's configuration."""

    api_version: PickerVersion = "llm-d.ai/v1alpha1"
    kind: Literal["EndpointPickerConfig"] = "EndpointPickerConfig"


class InlinePicker(PickerBody, frozen=True):
    """The body of an EndpointPickerConfig inside another document."""

    api_version: PickerVersion | None = None
    kind: Literal["EndpointPickerConfig"] | None = None


class EndpointSpec(DesiredEndpoint, frozen=True, kw_only=True):
    """A server that is already running."""

    name: str = ""
    """Its name in the id of its instance; default: its host and port."""


class PlacementSpec(PlacementRules, frozen=True, kw_only=True):
    """Where instances may be, and which place is best."""

    arrangement: Arrangement = Arrangement.SPREAD
    selector: SelectorSpec = SelectorSpec()
    tiers: list[TierName] = []
    """Ways to fit, in order; empty: those that the fields below allow."""
    gpus: list[str] = []
    """Only these GPUs, as worker/0; empty: any."""
    resources: ResourcesSpec | None = None
    """Default: an estimate from the files of the model."""
    model_files: FileOrName = ""
    """The files to estimate from; default: those that the engine loads."""
    context: Count | None = None
    """Tokens per request, for the estimate; default: those of the engine. `concurrency`: requests at once."""
    concurrency: Count | None = None


class TlsSpec(Section, frozen=True):
    """HTTPS with this certificate."""

    cert_file: ExistingFile
    key_file: ExistingFile


class TenantSpec(Section, frozen=True):
    """The limits of a tenant. Absent ones are unlimited."""

    name: str
    requests_per_minute: Above0 | None = None
    tokens_per_minute: Above0 | None = None
    """Prompt and response together."""
    cost_budget: Above0 | None = None
    """Maximum cost of its requests per `cost_period`."""
    cost_period: Time = 86400.0
    max_priority: int | None = None
    """A higher priority is lowered to this."""


class KeySpec(Section, frozen=True):
    """An API key, as its hash; `pointsman key` creates both."""

    sha256: str
    tenant: str
    name: str = ""
    """A name for logs."""


class PriceSpec(Section, frozen=True):
    """Prices of instances, for policies that consider cost and for budgets of requests; prices of tokens, for budgets
    of tenants."""

    per_gpu_hour: Amount | None = None
    per_instance_hour: Amount | None = None
    """Price of the whole instance instead of `per_gpu_hour`; for instances on CPUs."""
    tokens_per_second: Above0 | None = None
    """Throughput of an instance until it is measured; default: 1,000 per GPU, 50 on CPUs."""
    per_million_input_tokens: Amount = 0.0
    per_million_output_tokens: Amount = 0.0
    assumed_output_tokens: Count | None = None
    """Tokens reserved for an answer whose request sets no limit; default: what the engine's parameters allow, else
    4096."""


class LimitsSpec(Section, frozen=True):
    """Limits on clients."""

    max_header_bytes: Bytes = 64 * 1024
    max_headers: Count = 200
    """Header lines of one request."""
    max_body_bytes: Bytes = 32 * 1024 * 1024
    max_chunks: Count = 100_000
    """Chunks of one body."""
    max_connections: Count | None = None
    """Default: 10,000, or as many as the limit on open files allows."""
    header_timeout: Time = 10.0
    """Maximum time from the first byte of a request to the end of its headers, and from connecting to that byte."""
    body_timeout: Time = 60.0
    """Maximum time from the end of the headers to the end of the body."""
    idle_timeout: Time = 75.0
    """Maximum time between two requests on one connection."""
    write_timeout: Time = 60.0
    """A client that does not read its response for this long is disconnected."""


class UpstreamSpec(Section, frozen=True):
    """Connections to instances."""

    connect_timeout: Time = 2.0
    first_token_timeout: Time = 300.0
    """Maximum time from sending a request to its response: the first event with data of a stream, else all of it."""
    stall_timeout: Time = 60.0
    """Maximum time between two events with data of a stream; of a longer response, for each 64 KiB."""
    idle_timeout: Time = 30.0
    """Unused connections are closed after this time."""
    max_tries: Count = DEFAULT_SETTINGS.max_tries
    retry_budget: Amount = 0.2
    """Maximum retries per request over the last minutes, beyond a few that are always allowed."""


PATHS = (
    "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/pooling", "/classify",
    "/tokenize", "/detokenize",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
    "/v1/images/generations", "/v1/images/edits",
)  # fmt: skip
"""Paths of vLLM, and of other engines that have the same ones."""


EACH_NODE = "node"
"""A host to listen at: it stands for the address of each node that has a gateway."""


class GatewaySpec(Section, frozen=True):
    """Where requests enter."""

    listen: str = "127.0.0.1:8080"
    """host:port; port 0 takes a free one; node:8080 is the address of each of `nodes`."""
    processes: Count = 1
    """Processes that serve clients; with several, the process of the plane serves none itself."""
    nodes: list[str] = []
    """Nodes of a cluster that have gateways, `processes` on each; empty: one gateway, in the process of the plane."""
    grpc_listen: str = ""
    """host:port for gRPC; empty: none."""
    tls: TlsSpec | None = None
    admin_key_sha256: str = ""
    """Serves /admin/v1 over HTTP to clients with this key; empty: the admin API is on a local socket only."""
    keys: list[KeySpec] = []
    """Empty: no key is needed."""
    tenants: list[TenantSpec] = []
    limits: LimitsSpec = LimitsSpec()
    max_buffered_bytes: Bytes = 512 * 1024 * 1024
    """Bytes of requests in memory, for all clients together. Requests beyond it are refused with 503."""
    allowed_hosts: list[str] = []
    """Names, besides those of this machine, that browsers and clients may use in Host and Origin."""
    public_pages: bool | None = None
    """Serve /metrics and schemas of applications without a key; default: unless there are keys and it listens beyond
    this machine."""
    paths: tuple[str, ...] = PATHS
    """More paths of engines that are passed on to instances, besides those of OpenAI's and Anthropic's APIs."""
    upstream: UpstreamSpec = UpstreamSpec()
    drain_timeout: Time = 30.0
    """Time that running streams get to end after SIGTERM."""
    keep_records: Count = DEFAULT_SETTINGS.keep_records
    """Records of requests kept per deployment, the newest."""
    max_record_bytes: Size = 64 * 1024 * 1024
    """Records of requests on disk, for the next plane; 0: none."""
    max_prefix_index_bytes: Bytes = MAX_INDEX_BYTES
    """Memory for what instances have in their prefix caches, whatever they report; for all deployments together."""


class ScalingSpec(ScalingLimits, frozen=True, kw_only=True):
    """The number of instances, and the policy that decides it."""

    policy: str = "target-ongoing"
    """A built-in policy, or your own class or function as package.module:Name."""
    parameters: dict[str, Any] = {}
    max_replicas: Annotated[Count, Spelled("max")]
    cost_per_replica_hour: Amount | None = None
    """Cost of a replica, for policies that consider it."""
    metrics: list[MetricQuery] = []


class PolicySpec(Section, frozen=True):
    """A policy, or the plugins of an EndpointPickerConfig."""

    policy: str = ""
    """A built-in policy, or your own class as package.module:Name."""
    parameters: dict[str, Any] = {}
    config: InlinePicker | None = None


class CandidateSpec(PolicySpec, frozen=True):
    """A policy beside the one in force. Its name is by default that of its file or policy."""

    name: str = ""


class SchedulingSpec(PolicySpec, frozen=True):
    """How requests of a deployment are scheduled: by a policy, or by the plugins of an EndpointPickerConfig."""

    time_limit: Time = TIME_LIMIT_S
    """Time limit of one call of a policy or plugin of your own; built-in ones have none."""
    shadow: list[CandidateSpec | str] = []
    """Candidates that decide without acting: files, names of policies, or sections."""
    shadow_budget: Above0 = BUDGET
    """Maximum time of all candidates together, as a share of the time that decisions take."""


class DeploymentSpec(Section, frozen=True):
    """A named set of equal instances of one model."""

    name: str
    model: str
    """The name that clients use."""
    aliases: list[str] = []
    """More names that clients may use; engines get the name that they serve."""
    adapters: list[str] = []
    """LoRA adapters that the engine serves, by the names that clients and the engine use."""
    replicas: Number = 1
    """Instances of `engine` to run."""
    engine: DesiredEngine | None = None
    endpoints: list[EndpointSpec] = []
    """Servers that are already running; in addition to those of `engine`, or instead of them."""
    endpoints_file: Annotated[str, FileName(must_exist=False)] = ""
    """A YAML list of more endpoints, watched for changes."""
    max_concurrency: Count | None = None
    """Requests at once on each instance; default: that of the engine."""
    labels: dict[str, str] = {}
    lifecycle: Lifecycle = Lifecycle()
    placement: PlacementSpec = PlacementSpec()
    price: PriceSpec | None = None
    scaling: ScalingSpec | None = None
    """Default: the number is always `replicas`."""
    scheduling: SchedulingSpec | None = None


class Pointsman(Section, frozen=True):
    """The manifest."""

    api_version: Literal["pointsman/v1alpha1"] = "pointsman/v1alpha1"
    kind: Literal["Pointsman"] = "Pointsman"
    workers: list[WorkerSpec] = []
    """Empty: this machine."""
    runtime: RuntimeSpec | RuntimeType = RuntimeSpec()
    """Its type, or more. Takes effect when the plane starts."""
    deployments: list[DeploymentSpec] = []
    applications: list[ExistingFile] = []
    """Files of `Application` documents, each a pipeline."""
    gateway: GatewaySpec = GatewaySpec()


class NodeSpec(NodeOptions, frozen=True, kw_only=True):
    """One node: a class, a function, or a model of the manifest."""

    name: str
    class_: Annotated[str, Spelled("class")] = ""
    """path/to/file.py:Name, relative to this file, or package.module:Name."""
    function: str = ""
    model: str = ""
    """A model, or an alias of one, that the manifest serves."""
    args: list[Any] = []
    """Arguments of the class: plain data; {$handle: NODE} is a handle to another node."""
    kwargs: dict[str, Any] = {}
    version: str = ""
    """Version of the code. Replicas of another version are replaced."""
    joins: bool = False
    """Whether its method `join` gets the results of its shards."""


class CallSpec(Section, frozen=True, kw_only=True):
    """A method of a node, called once per request."""

    id: str
    node: str
    method: str = CALL
    args: list[Any] = []
    """{$input: [0]} is a part of the input, {$step: ID} the result of an earlier call."""
    kwargs: dict[str, Any] = {}


class IngressSpec(NodeOptions, frozen=True, kw_only=True):
    """The first stage of HTTP requests, if it has a preprocessor or a schema."""

    preprocessor: str = ""
    """The function that builds the input from a request; default: its JSON is the input."""
    schema: str = ""
    """The class that the input must be an instance of."""
    version: str = ""


class ApplicationDocument(Section, frozen=True, kw_only=True):
    """A pipeline, as `pointsman build` writes it."""

    api_version: Literal["pointsman/v1alpha1"] = "pointsman/v1alpha1"
    kind: Literal["Application"] = "Application"
    name: str
    """Its path on the gateway is /NAME."""
    nodes: list[NodeSpec]
    calls: list[CallSpec] = []
    """The calls, in order of execution."""
    output: Any
    """Usually {$step: ID} of the last call; several are a list or a mapping."""
    ingress: IngressSpec = IngressSpec()
    python_path: list[str] = []
    """More folders of modules, relative to this file."""
    scaling: dict[str, Any] | None = None
    """One scaling section for all nodes: the policy gets them all, and the limits apply to nodes without their own."""


KINDS: dict[str, type[Section]] = {
    "EndpointPickerConfig": EndpointPickerConfig,
    "Pointsman": Pointsman,
    "Application": ApplicationDocument,
}

"""The documents as types: `Pointsman`, `Application`, and the published `EndpointPickerConfig`.

Fields are in snake case here and in camel case in YAML. If another package declares a section, its type is used.
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

# The published `EndpointPickerConfig`. A field whose name ends in "ref" holds the name of a plugin

# ruff: noqa: RUF012 (each struct gets its own empty list or mapping)


class PluginSpec(Section, frozen=True):
    """One plugin to build."""

    type: str
    """A built-in type, or your own class as package.module:Name."""
    name: str = ""
    """The name that references use. The default is the type."""
    parameters: dict[str, Any] = {}
    weight: float = 1.0
    """The weight of the scores in profiles that set no weight. The published picker has weights only in profiles."""


class ProfileEntry(Section, frozen=True):
    """A plugin's place in a profile."""

    plugin_ref: str
    weight: float | None = None
    """The weight of the scores, if the plugin is a scorer."""


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
    """The old form, which is used if flowControl.saturationDetector is unset."""
    parser: Annotated[PluginName | None, NoEffect(_READ)] = None
    """The old form, which is used if requestHandler.parsers is unset."""


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
    """The name that the id of the instance contains. The default is the host and port."""


class PlacementSpec(PlacementRules, frozen=True, kw_only=True):
    """Where instances may be, and which place is best."""

    arrangement: Arrangement = Arrangement.SPREAD
    selector: SelectorSpec = SelectorSpec()
    tiers: list[TierName] = []
    """Ways to fit, in order. If empty, all ways that the fields below allow."""
    gpus: list[str] = []
    """The only GPUs that instances may have, such as worker/0. If empty, any GPU."""
    resources: ResourcesSpec | None = None
    """The need of an instance. The default is an estimate from the files of the model."""
    model_files: FileOrName = ""
    """The files to estimate from. The default is the files that the engine loads."""
    context: Count | None = None
    """Tokens per request, for the estimate; by default as the engine is set. `concurrency` is requests at once."""
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
    """Tokens of prompts and responses together."""
    cost_budget: Above0 | None = None
    """Maximum cost of its requests per `cost_period`."""
    cost_period: Time = 86400.0
    max_priority: int | None = None
    """The highest priority that requests can have. A higher priority is lowered to this one."""


class KeySpec(Section, frozen=True):
    """An API key, as its hash; `pointsman key` creates both."""

    sha256: str
    tenant: str
    name: str = ""
    """The name of the key in logs."""


class PriceSpec(Section, frozen=True):
    """Prices of instances, for policies that consider cost and for budgets of requests; prices of tokens, for budgets
    of tenants."""

    per_gpu_hour: Amount | None = None
    per_instance_hour: Amount | None = None
    """The price of a whole instance, instead of `per_gpu_hour`; meant for instances on CPUs."""
    tokens_per_second: Above0 | None = None
    """Throughput of an instance until it is measured. The default is 1,000 per GPU and 50 on CPUs."""
    per_million_input_tokens: Amount = 0.0
    per_million_output_tokens: Amount = 0.0
    assumed_output_tokens: Count | None = None
    """Tokens reserved for an answer whose request sets no limit. The default is what the engine's parameters allow, or
    else 4096."""


class LimitsSpec(Section, frozen=True):
    """Limits on clients."""

    max_header_bytes: Bytes = 64 * 1024
    max_headers: Count = 200
    """Maximum number of header lines in one request."""
    max_body_bytes: Bytes = 32 * 1024 * 1024
    max_chunks: Count = 100_000
    """Maximum number of chunks in one body."""
    max_connections: Count | None = None
    """The default is 10,000, or as many as the limit on open files allows."""
    header_timeout: Time = 10.0
    """Maximum time from connecting to the first byte of a request, and from that byte to the end of the headers."""
    body_timeout: Time = 60.0
    """Maximum time from the end of the headers to the end of the body."""
    idle_timeout: Time = 75.0
    """Maximum time between two requests on one connection."""
    write_timeout: Time = 60.0
    """If a client does not read its response for this long, it is disconnected."""


class UpstreamSpec(Section, frozen=True):
    """Connections to instances."""

    connect_timeout: Time = 2.0
    first_token_timeout: Time = 300.0
    """Maximum time from sending a request to the first event with data, or to a whole response if not a stream."""
    stall_timeout: Time = 60.0
    """Maximum time between two events with data in a stream, or for each 64 KiB of a longer response."""
    idle_timeout: Time = 30.0
    """Connections that are unused for this long are closed."""
    max_tries: Count = DEFAULT_SETTINGS.max_tries
    retry_budget: Amount = 0.2
    """Maximum retries per request over the last minutes, in addition to a few that are always allowed."""


PATHS = (
    "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/pooling", "/classify",
    "/tokenize", "/detokenize",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
    "/v1/images/generations", "/v1/images/edits",
)  # fmt: skip
"""Paths that vLLM serves, and other engines with the same paths."""


EACH_NODE = "node"
"""A host to listen at. It stands for the address of each node that has a gateway."""


class GatewaySpec(Section, frozen=True):
    """Where requests enter."""

    listen: str = "127.0.0.1:8080"
    """host:port. Port 0 takes a free port. node:8080 stands for the address of each node in `nodes`."""
    processes: Count = 1
    """Number of processes that serve clients. If there are several, the plane's own process serves no clients."""
    nodes: list[str] = []
    """Nodes of a cluster that have gateways, `processes` on each. If empty, only the plane's machine has a gateway."""
    grpc_listen: str = ""
    """host:port for gRPC. If empty, gRPC is not served."""
    tls: TlsSpec | None = None
    admin_key_sha256: str = ""
    """Clients with this key may use /admin/v1 over HTTP. If empty, the admin API is only on a local socket."""
    keys: list[KeySpec] = []
    """If empty, clients need no key."""
    tenants: list[TenantSpec] = []
    limits: LimitsSpec = LimitsSpec()
    max_buffered_bytes: Bytes = 512 * 1024 * 1024
    """Bytes of requests in memory, for all clients together. Requests beyond the limit are refused with 503."""
    allowed_hosts: list[str] = []
    """Names that browsers and clients may use in Host and Origin, besides the names of this machine."""
    public_pages: bool | None = None
    """Whether /metrics and schemas of applications need no key. By default they need a key only if there are keys and
    the gateway listens beyond this machine."""
    paths: tuple[str, ...] = PATHS
    """More paths that are passed on to instances, besides the paths of OpenAI's and Anthropic's APIs."""
    upstream: UpstreamSpec = UpstreamSpec()
    drain_timeout: Time = 30.0
    """Time that running streams have to end after SIGTERM."""
    keep_records: Count = DEFAULT_SETTINGS.keep_records
    """Number of the newest records of requests that are kept per deployment."""
    max_record_bytes: Size = 64 * 1024 * 1024
    """Bytes of records that are kept on disk for the next plane. 0 keeps no records on disk."""
    max_prefix_index_bytes: Bytes = MAX_INDEX_BYTES
    """Memory for the index of prefix caches, for all deployments together. It holds whatever instances report."""


class ScalingSpec(ScalingLimits, frozen=True, kw_only=True):
    """The number of instances, and the policy that decides it."""

    policy: str = "target-ongoing"
    """A built-in policy, or your own class or function as package.module:Name."""
    parameters: dict[str, Any] = {}
    max_replicas: Annotated[Count, Spelled("max")]
    cost_per_replica_hour: Amount | None = None
    """Cost of a replica, for policies that consider costs."""
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
    """Time limit for one call to your own policy or plugin. Built-in policies and plugins have no time limit."""
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
    """More names that clients may use. An engine always gets the name that it serves."""
    adapters: list[str] = []
    """LoRA adapters that the engine serves. Clients and the engine use the same names."""
    replicas: Number = 1
    """Number of instances of `engine` to run."""
    engine: DesiredEngine | None = None
    endpoints: list[EndpointSpec] = []
    """Servers that are already running, in addition to the instances of `engine` or instead of them."""
    endpoints_file: Annotated[str, FileName(must_exist=False)] = ""
    """A file with a YAML list of more endpoints. The file is watched for changes."""
    max_concurrency: Count | None = None
    """Maximum number of requests at once on each instance. The default is the engine's number."""
    labels: dict[str, str] = {}
    lifecycle: Lifecycle = Lifecycle()
    placement: PlacementSpec = PlacementSpec()
    price: PriceSpec | None = None
    scaling: ScalingSpec | None = None
    """How the number of instances changes. By default it is always `replicas`."""
    scheduling: SchedulingSpec | None = None


class Pointsman(Section, frozen=True):
    """The manifest."""

    api_version: Literal["pointsman/v1alpha1"] = "pointsman/v1alpha1"
    kind: Literal["Pointsman"] = "Pointsman"
    workers: list[WorkerSpec] = []
    """If empty, there is only this machine."""
    runtime: RuntimeSpec | RuntimeType = RuntimeSpec()
    """The type of the runtime, or a whole section. Changes take effect when the plane starts."""
    deployments: list[DeploymentSpec] = []
    applications: list[ExistingFile] = []
    """Files with `Application` documents. Each document is a pipeline."""
    gateway: GatewaySpec = GatewaySpec()


class NodeSpec(NodeOptions, frozen=True, kw_only=True):
    """One node: a class, a function, or a model of the manifest."""

    name: str
    class_: Annotated[str, Spelled("class")] = ""
    """path/to/file.py:Name (relative to this file) or package.module:Name."""
    function: str = ""
    model: str = ""
    """A model that the manifest serves, by its name or an alias."""
    args: list[Any] = []
    """Arguments of the class, as plain data. {$handle: NODE} is a handle to another node."""
    kwargs: dict[str, Any] = {}
    version: str = ""
    """Version of the code. Replicas with another version are replaced."""
    joins: bool = False
    """Whether the method `join` of the class gets the results of all shards."""


class CallSpec(Section, frozen=True, kw_only=True):
    """A method of a node, called once per request."""

    id: str
    node: str
    method: str = CALL
    args: list[Any] = []
    """Arguments. {$input: [0]} is a part of the input, and {$step: ID} is the result of an earlier call."""
    kwargs: dict[str, Any] = {}


class IngressSpec(NodeOptions, frozen=True, kw_only=True):
    """The first stage of HTTP requests, if it has a preprocessor or a schema."""

    preprocessor: str = ""
    """The function that builds the input from a request. By default the JSON of the request is the input."""
    schema: str = ""
    """The class of which the input must be an instance."""
    version: str = ""


class ApplicationDocument(Section, frozen=True, kw_only=True):
    """A pipeline, as `pointsman build` writes it."""

    api_version: Literal["pointsman/v1alpha1"] = "pointsman/v1alpha1"
    kind: Literal["Application"] = "Application"
    name: str
    """The name. The path of the application on the gateway is /NAME."""
    nodes: list[NodeSpec]
    calls: list[CallSpec] = []
    """The calls, in order of execution."""
    output: Any
    """Usually {$step: ID} for the last call. Several results are written as a list or a mapping."""
    ingress: IngressSpec = IngressSpec()
    python_path: list[str] = []
    """More folders with modules, relative to this file."""
    scaling: dict[str, Any] | None = None
    """A scaling section for all nodes. Its policy gets all nodes. Its limits apply to nodes without their own."""


KINDS: dict[str, type[Section]] = {
    "EndpointPickerConfig": EndpointPickerConfig,
    "Pointsman": Pointsman,
    "Application": ApplicationDocument,
}

"""The `scaling` of a deployment, a node or an application, as types."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from pointsman.config.validation import Quantity, Section
from pointsman.parameters import Duration, ExistingFile, FileName, Spelled
from pointsman.pipeline.graph import CALL
from pointsman.routing.dispatch_plan import DEFAULT_SETTINGS

# What runs and how it is reached, as the parts of a `Pointsman` document: workers, engines, endpoints, gateway.


# ruff: noqa: RUF012 (each struct gets an empty list or mapping of its own)


Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[Quantity, Meta(ge=1)]
Rate = Annotated[float, Meta(gt=0)]
Amount = Annotated[float, Meta(ge=0)]
Time = Annotated[Duration, Meta(gt=0)]


class WorkerSpec(Section, frozen=True):
    """A machine that may run instances."""

    name: str
    labels: dict[str, str] = {}


class EngineSpec(Section, frozen=True):
    """What runs the model."""

    type: str
    """llama.cpp, vllm, sglang, command, simulated, or your own class as package.module:Name."""
    parameters: dict[str, Any] = {}


class EndpointSpec(Section, frozen=True):
    """A server that somebody else started."""

    url: str
    """http://host:port"""
    name: str = ""
    """Its host and port if left out."""
    engine: str = "openai"
    """Whose metrics it speaks: vllm, llama.cpp, sglang, simulated. openai: none; our own counts must do."""
    max_concurrency: Count | None = None
    labels: dict[str, str] = {}


class LifecycleSpec(Section, frozen=True):
    """How long things may take."""

    start_timeout: Time = 120.0
    probe_interval: Time = 2.0
    probe_timeout: Time = 5.0
    failures_until_unhealthy: Count = 2
    drain_timeout: Time = 60.0
    stop_grace: Time = 10.0
    backoff: Time = 0.5
    backoff_max: Time = 60.0
    start_attempts: Count = 3


class ExpressionSpec(Section, frozen=True):
    """One demand on one label."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] = []


class SelectorSpec(Section, frozen=True):
    """Demands on the labels of workers, as Kubernetes writes them."""

    match_labels: dict[str, str] = {}
    match_expressions: list[ExpressionSpec] = []


class ResourcesSpec(Section, frozen=True):
    """What an instance needs, said by hand instead of worked out from the files of its model."""

    gpus: Annotated[int, Meta(ge=0)] = 1
    gpu_memory: Bytes | None = None
    """On each of its GPUs."""
    gpu_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Of each of its GPUs: others may have the rest."""
    memory: Bytes | None = None
    """Of the machine."""


class PlacementSpec(Section, frozen=True):
    """Where instances may be, and which place is best."""

    arrangement: Literal["spread", "binpack"] = "spread"
    """spread: over workers and racks; binpack: on few, so that large holes stay whole."""
    selector: SelectorSpec = SelectorSpec()
    workers: list[str] = []
    """Chosen by hand; empty: any."""
    gpus: list[str] = []
    """The same for GPUs, as worker/0."""
    gpu_models: list[str] = []
    """GPUs that it may have; empty: any that its engine runs on."""
    several_gpus: bool = True
    """It may be divided among GPUs of one worker."""
    several_workers: bool = False
    """It may be divided among workers."""
    partial_offload: bool = False
    """Some of its layers may be on the CPU."""
    cpu: bool = False
    """It may do without a GPU, also if its engine usually has one."""
    mixed_gpus: bool = False
    """GPUs of different models may be in one instance."""
    exclusive: bool = False
    """No other instance may be on its GPUs."""
    all_or_nothing: bool = False
    """Replicas are started only if there is a place for all of them."""
    near: str = ""
    """A deployment whose instances it should be near to."""
    priority: int = 0
    preempts: bool = False
    """Instances of negative priority may be stopped to make room."""
    overcommit: bool = False
    """It is placed although it does not fit."""
    cpus: Amount = 0.0
    resources: ResourcesSpec | None = None
    """Left out: worked out from the files of the model."""
    model_files: Annotated[str, FileName(or_name=True)] = ""
    """What it is worked out from; left out: what the engine loads."""
    context: Count | None = None
    """Tokens of a request that room is kept for, and how many requests; left out: what the engine says."""
    concurrency: Count | None = None


class TlsSpec(Section, frozen=True):
    """HTTPS with this certificate."""

    cert_file: ExistingFile
    key_file: ExistingFile


class TenantSpec(Section, frozen=True):
    """Who may send how much. What is left out is not limited."""

    name: str
    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None
    """Prompt and answer together."""
    cost_budget: Rate | None = None
    """The most that its requests may cost per `cost_period`."""
    cost_period: Time = 86400.0
    max_priority: int | None = None
    """Requests that ask for more get this."""


class KeySpec(Section, frozen=True):
    """An API key, by its hash: `pointsman key` makes both."""

    sha256: str
    tenant: str
    name: str = ""
    """To tell keys apart in logs."""


class PriceSpec(Section, frozen=True):
    """What tokens cost, for budgets."""

    per_million_input_tokens: Amount = 0.0
    per_million_output_tokens: Amount = 0.0


class LimitsSpec(Section, frozen=True):
    """What clients may do."""

    max_header_bytes: Bytes = 64 * 1024
    max_body_bytes: Bytes = 32 * 1024 * 1024
    max_connections: Count = 10_000
    max_pipelined: Count = 16
    """Requests read ahead on one connection while the first is served."""
    header_timeout: Time = 10.0
    """From the first byte of a request to the end of its headers; also from connecting to the first byte."""
    body_timeout: Time = 60.0
    """From the end of the headers to the end of the body."""
    idle_timeout: Time = 75.0
    """Between two requests on one connection."""
    write_timeout: Time = 60.0
    """A client that does not read its answer for so long is cut off."""


class UpstreamSpec(Section, frozen=True):
    """How instances are talked to."""

    connect_timeout: Time = 2.0
    first_token_timeout: Time = 300.0
    """From sending a request to the first byte of its answer."""
    stall_timeout: Time = 60.0
    """Between two pieces of a stream."""
    idle_timeout: Time = 30.0
    """Unused connections are closed after this."""
    max_tries: Count = DEFAULT_SETTINGS.max_tries
    retry_budget: Amount = 0.2
    """Retries per request over the last minutes, beyond a few that are always allowed; more are refused."""


class GatewaySpec(Section, frozen=True):
    """The front door."""

    listen: str = "127.0.0.1:8080"
    """host:port; port 0 takes a free one."""
    grpc_listen: str = ""
    """The same for gRPC; empty: none."""
    tls: TlsSpec | None = None
    admin_key_sha256: str = ""
    """Opens /admin/v1 over HTTP to whoever has the key; empty: the admin API is on a local socket only."""
    keys: list[KeySpec] = []
    """Empty: everybody may send requests."""
    tenants: list[TenantSpec] = []
    limits: LimitsSpec = LimitsSpec()
    upstream: UpstreamSpec = UpstreamSpec()
    drain_timeout: Time = 30.0
    """On SIGTERM, streams under way get this long to end."""
    keep_records: Count = DEFAULT_SETTINGS.keep_records
    """Decision records kept, the newest."""


# ruff: noqa: RUF012 (each struct gets an empty list or mapping of its own)


DEFAULT_POLICY = "target-ongoing"
Number = Annotated[int, Meta(ge=0)]
Wait = Annotated[Duration, Meta(ge=0)]
Factor = Annotated[float, Meta(gt=0, le=1)]


class MetricSpec(Section, frozen=True):
    """A number that a Prometheus knows, for the policy."""

    name: str
    """Where the policy finds it: view.metrics[NAME]."""
    url: str
    """Of the Prometheus: http://host:port"""
    query: str
    """In its own language; the values that come back are added up."""


class ScalingSpec(Section, frozen=True, kw_only=True):
    """How many instances there are, and who decides that."""

    policy: str = DEFAULT_POLICY
    """A built-in policy, or a class or function of your own as package.module:Name."""
    parameters: dict[str, Any] = {}
    min: Number = 1
    max: Count
    initial: Number | None = None
    up_delay: Wait = 0.0
    """More are wanted for so long before there are more."""
    down_delay: Wait = 300.0
    up_factor: Factor = 1.0
    """Of the difference to what is wanted, what is added at once."""
    down_factor: Factor = 1.0
    max_step: Count | None = None
    cooldown: Wait = 0.0
    """Between two changes."""
    idle_timeout: Wait = 300.0
    """With `min` 0: the last one goes when nobody has asked for so long."""
    wait: Wait | None = None
    """While there is no instance: how long requests wait for the first one."""
    turn: Wait = 30.0
    """With `min` 0: how long it keeps its last place while it is busy and another is waited for."""
    interval: Time = 1.0
    """How often the policy is asked."""
    time_limit: Time = 0.5
    """What it may take to answer."""
    cost_per_replica_hour: Amount | None = None
    """Of one instance, for policies that look at it."""
    metrics: list[MetricSpec] = []


# An `Application` document as types: nodes, calls of them, and what is answered.


# ruff: noqa: RUF012 (each struct gets an empty list or mapping of its own)


Share = Annotated[float, Meta(gt=0, le=1)]
Size = Annotated[Quantity, Meta(ge=0)]


class OptionsSpec(Section, frozen=True, kw_only=True):
    """What can be said of a node. The defaults are those of `NodeOptions`."""

    replicas: Annotated[int, Meta(ge=0)] = 1
    shards: Count = 1
    """Processes that make up one replica: a call goes to all of them."""
    max_concurrency: Count = 16
    """Calls that a replica is given at once."""
    threads: Count = 1
    """How many of them run side by side, where the code is not async."""
    cpus: Amount = 0.0
    memory: Size = 0
    """Of the machine."""
    gpus: Annotated[int, Meta(ge=0)] = 0
    gpu_memory: Size = 0
    """On each of its GPUs."""
    gpu_share: Share | None = None
    """Of each of its GPUs; others may have the rest."""
    labels: dict[str, str] = {}
    """That a worker must have to be chosen."""
    idempotent: bool = False
    """A call may be made again if its replica dies."""
    deadline_share: Share | None = None
    """Of the time that a request has in all, what a call of this node may take."""
    user_config: Any = None
    """Handed to `reconfigure`, before the first call and whenever it changes."""
    scheduling: dict[str, Any] | None = None
    """As of a deployment; left out: fifo."""
    scaling: dict[str, Any] | None = None
    """As of a deployment; left out: always `replicas`."""
    env: dict[str, str] = {}
    start_timeout: Time = 120.0
    health_check_period: Time = 2.0
    health_check_timeout: Time = 5.0
    graceful_shutdown: Time = 60.0
    """What calls under way get to end before a replica is stopped."""


class NodeSpec(OptionsSpec, frozen=True, kw_only=True):
    """One node: a class, a function, or a model of the manifest."""

    name: str
    class_: Annotated[str, Spelled("class")] = ""
    """path/to/file.py:Name, relative to this file, or package.module:Name."""
    function: str = ""
    model: str = ""
    """A model, or an alias of one, that the manifest serves."""
    args: list[Any] = []
    """Of the class: plain data; {$handle: NODE} is a handle to another node."""
    kwargs: dict[str, Any] = {}
    version: str = ""
    """Of the code. Another version is another program: its replicas are replaced."""
    joins: bool = False
    """What its shards return goes to its method `join`."""


class CallSpec(Section, frozen=True, kw_only=True):
    """A method of a node, called once per request."""

    id: str
    node: str
    method: str = CALL
    args: list[Any] = []
    """{$input: [0]} is a part of the input, {$step: ID} the result of a call before."""
    kwargs: dict[str, Any] = {}


class IngressSpec(OptionsSpec, frozen=True, kw_only=True):
    """What HTTP requests pass through first, if it has a preprocessor or a schema."""

    preprocessor: str = ""
    """Where the function is that makes the input of a request; left out: its JSON is the input."""
    schema: str = ""
    """Where the class is that the input must be one of."""
    version: str = ""


class ApplicationDocument(Section, frozen=True, kw_only=True):
    """A pipeline, as `pointsman build` writes it."""

    api_version: Literal["pointsman/v1alpha1"] = "pointsman/v1alpha1"
    kind: Literal["Application"] = "Application"
    name: str
    """Where it is reached, as /NAME."""
    nodes: list[NodeSpec]
    calls: list[CallSpec] = []
    """In an order in which they can be made."""
    output: Any
    """Usually {$step: ID} of the last call; several are a list or a mapping."""
    ingress: IngressSpec = IngressSpec()
    python_path: list[str] = []
    """Folders where modules are found besides, relative to this file."""
    scaling: dict[str, Any] | None = None
    """Of all nodes at once: the policy sees them all, and its limits hold for nodes that have none of their own."""

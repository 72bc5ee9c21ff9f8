"""Our own documents as types: `Pointsman` and `Application`. The published one is in `picker_schema`.

Fields are snake case here and camel case in YAML. A section whose settings another package declares has that package's
type, or one derived from it.
"""

# ruff: noqa: RUF012 (each struct gets an empty list or mapping of its own)

from typing import Annotated, Any, Literal

from pointsman.config.picker_schema import EndpointPickerConfig, InlinePicker
from pointsman.config.validation import Section
from pointsman.control.desired import DesiredEndpoint, DesiredEngine, Lifecycle
from pointsman.parameters import (
    Above0,
    Amount,
    Bytes,
    Count,
    ExistingFile,
    FileName,
    FileOrName,
    Number,
    Share,
    Spelled,
    Time,
)
from pointsman.pipeline.graph import CALL
from pointsman.pipeline.options import NodeOptions
from pointsman.placement.asks import Arrangement, PlacementRules
from pointsman.routing.dispatch_plan import DEFAULT_SETTINGS
from pointsman.scaling.limits import MetricQuery, ScalingLimits
from pointsman.selection import LabelExpression

DEFAULT_POLICY = "target-ongoing"


class WorkerSpec(Section, frozen=True):
    """A machine that may run instances."""

    name: str
    labels: dict[str, str] = {}


class EndpointSpec(DesiredEndpoint, frozen=True, kw_only=True):
    """A server that somebody else started."""

    name: str = ""
    """Its host and port if left out."""


class SelectorSpec(Section, frozen=True):
    """Demands on the labels of workers, as Kubernetes writes them."""

    match_labels: dict[str, str] = {}
    match_expressions: list[LabelExpression] = []


class ResourcesSpec(Section, frozen=True):
    """What an instance needs, said by hand instead of worked out from the files of its model."""

    gpus: Number = 1
    gpu_memory: Bytes | None = None
    """On each of its GPUs."""
    gpu_share: Share | None = None
    """Of each of its GPUs: others may have the rest."""
    memory: Bytes | None = None
    """Of the machine."""


class PlacementSpec(PlacementRules, frozen=True, kw_only=True):
    """Where instances may be, and which place is best."""

    arrangement: Arrangement = Arrangement.SPREAD
    selector: SelectorSpec = SelectorSpec()
    gpus: list[str] = []
    """Chosen by hand, as worker/0; empty: any."""
    resources: ResourcesSpec | None = None
    """Left out: worked out from the files of the model."""
    model_files: FileOrName = ""
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
    requests_per_minute: Above0 | None = None
    tokens_per_minute: Above0 | None = None
    """Prompt and answer together."""
    cost_budget: Above0 | None = None
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


class ScalingSpec(ScalingLimits, frozen=True, kw_only=True):
    """How many instances there are, and who decides that."""

    policy: str = DEFAULT_POLICY
    """A built-in policy, or a class or function of your own as package.module:Name."""
    parameters: dict[str, Any] = {}
    max_replicas: Annotated[Count, Spelled("max")]
    cost_per_replica_hour: Amount | None = None
    """Of one instance, for policies that look at it."""
    metrics: list[MetricQuery] = []


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
    replicas: Number = 1
    """Instances of `engine` to run."""
    engine: DesiredEngine | None = None
    endpoints: list[EndpointSpec] = []
    """Servers that somebody else started; beside those of `engine`, or instead of them."""
    endpoints_file: Annotated[str, FileName(must_exist=False)] = ""
    """A YAML list of more of them, watched for changes."""
    max_concurrency: Count | None = None
    """Requests at once on each instance; left out: what the engine says."""
    labels: dict[str, str] = {}
    lifecycle: Lifecycle = Lifecycle()
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


class NodeSpec(NodeOptions, frozen=True, kw_only=True):
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


class IngressSpec(NodeOptions, frozen=True, kw_only=True):
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


KINDS: dict[str, type[Section]] = {
    "EndpointPickerConfig": EndpointPickerConfig,
    "Pointsman": Pointsman,
    "Application": ApplicationDocument,
}

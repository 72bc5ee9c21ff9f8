"""What runs and how it is reached, as the parts of a `Pointsman` document: workers, engines, endpoints, gateway."""
# ruff: noqa: RUF012 (each struct gets an empty list or mapping of its own)

from typing import Annotated, Any, Literal

from msgspec import Meta

from pointsman.config.quantities import Quantity
from pointsman.config.section import Section
from pointsman.parameters import Duration, ExistingFile, FileName

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
    max_tries: Count = 5
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
    keep_records: Count = 10_000
    """Decision records kept, the newest."""

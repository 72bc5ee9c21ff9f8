"""The values shared by all packages: requests, instances, decisions, workers and their GPUs.

Requests and decisions are immutable. An instance is the caller's own record of a running model server. The caller may
update this record; Pointsman only reads it. Unknown numbers are `None`, never zero.
"""

import time
from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Any

import msgspec

from pointsman.reasons import Reason

MAX_NAME = 256
"""Maximum length of a name that a client sends, such as a model, tenant, session or request id. Names are kept in
records and tables. This limit, times the number of names, bounds the memory that names take."""


class RequestPriority(IntEnum):
    """How important a request is: a higher value goes first; requests below NORMAL may be shed under load.

    Any whole number is a priority. A priority that is not listed below has its number as its name.
    """

    CRITICAL = 2
    HIGH = 1
    NORMAL = 0
    LOW = -1
    BACKGROUND = -2

    @classmethod
    def _missing_(cls, value: object) -> "RequestPriority | None":
        if not isinstance(value, int):
            return None
        made = int.__new__(cls, value)
        made._name_, made._value_ = str(value), value
        return made


class ParallelismType(Enum):
    """How an instance splits its model over GPUs."""

    NONE = "none"
    TENSOR_PARALLEL = "tensor"
    PIPELINE_PARALLEL = "pipeline"
    DATA_PARALLEL = "data"
    EXPERT_PARALLEL = "expert"
    HYBRID = "hybrid"


_MEDIA = tuple(b'"%b"' % kind for kind in (b"image_url", b"input_image", b"input_audio", b"video_url", b"audio_url"))
"""Types of prompt parts that are not text."""


class Stamp(float):
    """The time at which a request was created. It is used if a request is given no arrival time."""

    __slots__ = ()

    @classmethod
    def now(cls) -> "Stamp":
        return cls(time.time())


class RequestMetadata(msgspec.Struct, frozen=True, gc=False):
    """The properties of one request that scheduling uses."""

    request_id: str
    prompt: str | bytes | memoryview | tuple[str | bytes, ...] = ""
    max_tokens: int | None = None
    model_name: str = ""
    """Empty if any model will do."""
    priority: int = RequestPriority.NORMAL
    slo_deadline_ms: float | None = None
    """The answer is due this long after `arrival_time`."""
    user_id: str = ""
    arrival_time: float | None = msgspec.field(default_factory=Stamp.now)
    """Arrival in seconds, on the clock of the dispatcher. The default is a `Stamp` from the wall clock. The dispatcher
    replaces a `Stamp` or None with its own time.
    """
    cost_budget: float | None = None
    """The maximum cost of this request, in the currency of `price_per_gpu_hour`."""
    timeout_s: float | None = None
    """The maximum time in the queue. None if the limit of the queue applies."""
    headers: Mapping[str, str] = {}
    """Headers of the request. Names are in lower case."""
    prompt_tokens: int | None = None
    """Tokens of the prompt, counted by a tokenizer. If None, they are estimated as a quarter of the prompt's bytes."""
    token_ids: tuple[int, ...] | None = None
    cache_salt: str = ""
    multimodal: bool | None = None
    """Whether the prompt has parts that are not text. If None, `is_multimodal` searches the prompt for them."""
    streams: bool = True
    """Whether the answer comes token by token. If not, the time of its first token is unknown."""

    @property
    def is_multimodal(self) -> bool:
        """Whether the prompt has parts that are not text. Searches the whole prompt unless `multimodal` is set."""
        if self.multimodal is not None or not isinstance(self.prompt, bytes | memoryview):
            return bool(self.multimodal)
        prompt = bytes(self.prompt)
        return any(mark in prompt for mark in _MEDIA)

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt: the counted number if it is known, else one token per four bytes."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        if self.token_ids is not None:
            return len(self.token_ids)
        prompt = self.prompt
        return -(-(sum(map(len, prompt)) if isinstance(prompt, tuple) else len(prompt)) // 4)

    @property
    def prompt_bytes(self) -> int:
        """Size of the prompt. Each character of a text counts as one byte, which is close enough for a bound."""
        return sum(map(len, self.prompt)) if isinstance(self.prompt, tuple) else len(self.prompt)

    @property
    def deadline(self) -> float | None:
        """When the answer is due, on the clock of `arrival_time`. None without a deadline or an arrival time."""
        if self.slo_deadline_ms is None or self.arrival_time is None:
            return None
        return self.arrival_time + self.slo_deadline_ms / 1000

    def arrived_at(self, now: float) -> float:
        """When the request arrived, on the clock of `now`. This is `now` if the request has no arrival time."""
        given = self.arrival_time
        return now if given is None or isinstance(given, Stamp) else float(given)


def arrived(request: RequestMetadata, now: float) -> RequestMetadata:
    """The request with an arrival time on the clock of `now`."""
    return msgspec.structs.replace(request, arrival_time=request.arrived_at(now))


class ExecutionInstance(msgspec.Struct, kw_only=True):
    """A running model server, with the properties that its owner maintains."""

    instance_id: str
    host: str = ""
    """Empty if unknown."""
    port: int = 0
    tls: bool = False
    model_name: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    gpu_count: int = 1
    """Number of GPUs. 0 if the instance runs on CPUs."""
    can_accept_request: bool = True
    """Set by the instance's health check or by an operator. Whether the instance has room is derived from its load."""
    closed: Reason | None = None
    """Why the instance cannot accept requests. None if it can, or if the reason is unknown."""
    current_load: int = 0
    """Number of requests that run on the instance now."""
    max_concurrency: int | None = None
    """Maximum number of concurrent requests. None if unknown."""
    avg_latency_ms: float | None = None
    throughput_tokens_per_sec: float | None = None
    """Throughput of the whole instance, summed over all its requests."""
    price_per_gpu_hour: float | None = None
    """None if the policy's price applies."""
    price_per_hour: float | None = None
    """Price of the whole instance. None if the price of its GPUs applies."""
    adapters: frozenset[str] = frozenset()
    """Further model names that the instance serves (LoRA adapters, aliases)."""
    engine_names: Mapping[str, str] = {}
    """The engine's own model names, by the names that clients use; "" maps to the name for requests without a model."""
    serves_messages: bool = False
    """Whether the instance's engine has Anthropic's API. If not, requests to that API are translated."""
    key: str = ""
    """Where the API key of the engine is found, as `key_source` writes it. This is never the key itself. Empty if the
    engine needs no key."""
    labels: dict[str, str] = {}
    namespace: str = ""

    @property
    def parallelism(self) -> ParallelismType:
        if self.tensor_parallel_size > 1:
            return ParallelismType.HYBRID if self.pipeline_parallel_size > 1 else ParallelismType.TENSOR_PARALLEL
        return ParallelismType.PIPELINE_PARALLEL if self.pipeline_parallel_size > 1 else ParallelismType.NONE


class SchedulingDecision(msgspec.Struct, frozen=True, gc=False):
    """Which instance a request goes to, why, and the expected latency and cost."""

    request_id: str
    target_instance_id: str
    parallelism_strategy: ParallelismType = ParallelismType.NONE
    estimated_latency_ms: float | None = None
    estimated_cost: float | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    reason: Reason | str = ""
    """Why this instance was chosen: a `Reason` with a code and facts. A user's policy may give plain text instead."""
    confidence: float = 1.0
    """The policy's certainty, from 0 to 1. `explain` shows it; it has no other effect."""
    metadata: dict[str, Any] = {}
    """Anything else that the policy keeps with the decision. `explain` shows it; it has no other effect."""


class WorkerStatus(Enum):
    """Whether a worker takes new instances."""

    READY = "ready"
    DRAINING = "draining"
    """Running instances may stay. No new instances are placed on this worker."""
    LOST = "lost"


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """Index of the GPU according to the driver."""
    memory_bytes: int
    model: str = ""
    vendor: str = "nvidia"
    used_bytes: int = 0
    """Measured use by processes other than our instances."""
    link: str = ""
    """The link (NVLink, xGMI) that connects GPUs of one worker. GPUs with the same value are connected by it. Empty if
    PCIe connects them."""
    pcie: str = ""
    """GPUs of one worker with the same value share a PCIe switch."""
    numa: int | None = None
    shareable: bool = True
    """Whether instances that allow sharing may share this GPU."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that runs instances."""

    name: str
    cpus: float
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    labels: Mapping[str, str] = {}
    status: WorkerStatus = WorkerStatus.READY
    used_memory_bytes: int = 0
    """Measured use by processes other than our instances."""
    reserved_memory_bytes: int = 0
    """Bytes that are reserved for the system and never given to instances."""
    reserved_gpu_bytes: int = 0
    """Bytes on each GPU that are reserved for the system and never given to instances."""
    unified_memory: bool = False
    """Whether the GPUs of this worker use the memory of the machine."""
    files: frozenset[str] = frozenset()
    """Models whose files are on this worker."""
    price_per_gpu_hour: float | None = None
    """None if the deployment's price applies."""

"""The values shared by all packages: requests, instances, decisions, workers and their GPUs.

Requests and decisions are immutable. An instance is the caller's own record of a running model server: the caller may
update it, Pointsman only reads it. Unknown numbers are `None`, never zero.
"""

import time
from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Any

import msgspec

from pointsman.reasons import Reason

MAX_NAME = 256
"""Characters of any name that a client may send: model, tenant, session, request id and the like. Names are kept in
records and tables, so their number times this bounds the memory that they take."""


class RequestPriority(IntEnum):
    """How important a request is: a higher value goes first; requests below NORMAL may be shed under load.

    Any whole number is a priority; one between or beyond these has its number as its name.
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
    """The time at which a request was created, for a request without an arrival time."""

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
    """Empty: any model will do."""
    priority: int = RequestPriority.NORMAL
    slo_deadline_ms: float | None = None
    """The answer is due this long after `arrival_time`."""
    user_id: str = ""
    arrival_time: float | None = msgspec.field(default_factory=Stamp.now)
    """Seconds, on the clock of the dispatcher. By default a `Stamp` of the wall clock. The dispatcher replaces that,
    and None, with its own time.
    """
    cost_budget: float | None = None
    """The maximum cost of this request, in the currency of `price_per_gpu_hour`."""
    timeout_s: float | None = None
    """The maximum time in the queue; None: the limit of the queue."""
    headers: Mapping[str, str] = {}
    """Names are in lower case."""
    prompt_tokens: int | None = None
    """Counted by a tokenizer; None: estimated as a quarter of the prompt's bytes."""
    token_ids: tuple[int, ...] | None = None
    cache_salt: str = ""
    multimodal: bool | None = None
    """Whether the prompt has parts that are not text; None: unknown, and `is_multimodal` searches the prompt."""
    streams: bool = True
    """Whether the answer comes token by token. If not, its first token is not seen."""

    @property
    def is_multimodal(self) -> bool:
        """Whether the prompt has parts that are not text. Searches all of it unless `multimodal` is set."""
        if self.multimodal is not None or not isinstance(self.prompt, bytes | memoryview):
            return bool(self.multimodal)
        prompt = bytes(self.prompt)
        return any(mark in prompt for mark in _MEDIA)

    @property
    def input_tokens(self) -> int:
        """Prompt tokens: counted if known, else one per four bytes."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        if self.token_ids is not None:
            return len(self.token_ids)
        prompt = self.prompt
        return -(-(sum(map(len, prompt)) if isinstance(prompt, tuple) else len(prompt)) // 4)

    @property
    def prompt_bytes(self) -> int:
        """Size of the prompt. Text counts by its characters, which is close enough for a bound."""
        return sum(map(len, self.prompt)) if isinstance(self.prompt, tuple) else len(self.prompt)

    @property
    def deadline(self) -> float | None:
        """When the answer is due, on the clock of `arrival_time`; None if it has no deadline or arrival time."""
        if self.slo_deadline_ms is None or self.arrival_time is None:
            return None
        return self.arrival_time + self.slo_deadline_ms / 1000

    def arrived_at(self, now: float) -> float:
        """When it arrived, on the clock of `now`; `now` if the request has no arrival time."""
        given = self.arrival_time
        return now if given is None or isinstance(given, Stamp) else float(given)


def arrived(request: RequestMetadata, now: float) -> RequestMetadata:
    """The request, with its arrival time on the clock of `now`."""
    return msgspec.structs.replace(request, arrival_time=request.arrived_at(now))


class ExecutionInstance(msgspec.Struct, kw_only=True):
    """A running model server, with the properties that its owner maintains."""

    instance_id: str
    host: str = ""
    """Empty: unknown."""
    port: int = 0
    tls: bool = False
    model_name: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    gpu_count: int = 1
    """0: it runs on CPUs."""
    can_accept_request: bool = True
    """Set by its health check or operator. Whether it has room is derived from the load."""
    closed: Reason | None = None
    """Why it cannot accept requests; None if it can, or if the reason is unknown."""
    current_load: int = 0
    """Requests running on it now."""
    max_concurrency: int | None = None
    """Maximum of concurrent requests; None: unknown."""
    avg_latency_ms: float | None = None
    throughput_tokens_per_sec: float | None = None
    """Throughput of the whole instance, over all its requests."""
    price_per_gpu_hour: float | None = None
    """None: the price of the policy."""
    price_per_hour: float | None = None
    """Price of the whole instance; None: the price of its GPUs."""
    adapters: frozenset[str] = frozenset()
    """Further model names that it serves (LoRA adapters, aliases)."""
    engine_names: Mapping[str, str] = {}
    """The engine's names of models that clients know by other names; under "", the name for requests without one."""
    serves_messages: bool = False
    """Whether its engine has Anthropic's API; if not, requests to that API are translated."""
    key: str = ""
    """Where the API key of its engine is found, as `key_source` writes it; never the key. Empty if it needs none."""
    labels: dict[str, str] = {}
    namespace: str = ""

    @property
    def parallelism(self) -> ParallelismType:
        if self.tensor_parallel_size > 1:
            return ParallelismType.HYBRID if self.pipeline_parallel_size > 1 else ParallelismType.TENSOR_PARALLEL
        return ParallelismType.PIPELINE_PARALLEL if self.pipeline_parallel_size > 1 else ParallelismType.NONE


class SchedulingDecision(msgspec.Struct, frozen=True, gc=False):
    """Which instance a request goes to, why, and the latency and cost that are expected."""

    request_id: str
    target_instance_id: str
    parallelism_strategy: ParallelismType = ParallelismType.NONE
    estimated_latency_ms: float | None = None
    estimated_cost: float | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    reason: Reason | str = ""
    """Print it, or read its code and facts; a user's policy may give text."""
    confidence: float = 1.0
    """The policy's certainty, from 0 to 1. `explain` shows it; it has no other effect."""
    metadata: dict[str, Any] = {}
    """Anything else that the policy keeps with the decision. `explain` shows it; it has no other effect."""


class WorkerStatus(Enum):
    """Whether a worker takes new instances."""

    READY = "ready"
    DRAINING = "draining"
    """Running instances may stay; no new ones are placed."""
    LOST = "lost"


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """Its index according to the driver."""
    memory_bytes: int
    model: str = ""
    vendor: str = "nvidia"
    used_bytes: int = 0
    """Measured use by processes other than our instances."""
    link: str = ""
    """GPUs of one worker with the same link are connected by it (NVLink, xGMI); empty: by PCIe."""
    pcie: str = ""
    """GPUs of one worker with the same value share a PCIe switch."""
    numa: int | None = None
    shareable: bool = True
    """Whether instances that allow sharing may share it."""


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
    """Reserved for the system, never given to instances."""
    reserved_gpu_bytes: int = 0
    """Reserved on each GPU for the system, never given to instances."""
    unified_memory: bool = False
    """Whether its GPUs use the memory of the machine."""
    files: frozenset[str] = frozenset()
    """Models whose files are on this worker."""
    price_per_gpu_hour: float | None = None
    """None: that of the deployment."""

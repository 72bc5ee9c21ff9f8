"""The values that everybody passes around: requests, instances, decisions, workers and their GPUs.

Requests and decisions never change once made. An instance is the caller's own record of a running model server:
the caller may update it, Pointsman only reads it. Unknown numbers are `None`, never zero.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum

import msgspec

from pointsman.reasons import Reason


class Priority(IntEnum):
    """How important a request is: higher goes first, and what is below NORMAL may be shed under pressure."""

    CRITICAL = 2
    HIGH = 1
    NORMAL = 0
    LOW = -1
    BACKGROUND = -2


class ParallelismType(Enum):
    """How the chosen instance splits its model over GPUs."""

    NONE = "none"
    TENSOR = "tensor"
    PIPELINE = "pipeline"
    HYBRID = "hybrid"


class RequestMetadata(msgspec.Struct, frozen=True, gc=False):
    """One request, as far as deciding needs to know it."""

    request_id: str
    prompt: str | bytes | memoryview | tuple[str | bytes, ...] = ""
    max_tokens: int | None = None
    model_name: str = ""
    """Empty: any model will do."""
    priority: int = Priority.NORMAL
    slo_deadline_ms: float | None = None
    """The answer is wanted this long after `arrival_time`."""
    user_id: str = ""
    arrival_time: float | None = None
    """Seconds, on the clock of whoever schedules. The in-process manager fills it in."""
    cost_budget: float | None = None
    """The most this request may cost, in the currency of `price_per_gpu_hour`."""
    timeout_s: float | None = None
    """The client gives up after waiting this long; None: when the queue does."""
    headers: Mapping[str, str] = {}
    """Lower-cased names."""
    prompt_tokens: int | None = None
    """Counted by a tokenizer; otherwise a quarter of the prompt's bytes stands in for it."""
    token_ids: tuple[int, ...] | None = None
    cache_salt: str = ""
    multimodal: bool | None = None
    """Whether it has parts that are not text; None: look into the prompt, if it is the JSON of the OpenAI API."""

    @property
    def is_multimodal(self) -> bool:
        """Whether it has parts that are not text. Looking into a long prompt takes time, so only ask if it matters."""
        if self.multimodal is not None or not isinstance(self.prompt, bytes | memoryview):
            return bool(self.multimodal)
        prompt = bytes(self.prompt)
        return any(mark in prompt for mark in (b'"image_url"', b'"input_image"', b'"input_audio"'))

    @property
    def input_tokens(self) -> int:
        """Prompt tokens: counted if somebody counted, else one per four bytes."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        if self.token_ids is not None:
            return len(self.token_ids)
        return -(-self.prompt_bytes // 4)

    @property
    def prompt_bytes(self) -> int:
        """Size of the prompt; non-ASCII text counts by its characters, which is near enough for a bound."""
        if isinstance(self.prompt, tuple):
            return sum(map(len, self.prompt))
        return len(self.prompt)

    @property
    def deadline(self) -> float | None:
        """When the answer is due, on the clock of `arrival_time`; None without a deadline or an arrival."""
        if self.slo_deadline_ms is None or self.arrival_time is None:
            return None
        return self.arrival_time + self.slo_deadline_ms / 1000


class ExecutionInstance(msgspec.Struct, kw_only=True):
    """A running model server and what its owner knows of it."""

    instance_id: str
    host: str = ""
    """Empty: not told."""
    port: int = 0
    tls: bool = False
    """It is spoken to over HTTPS."""
    model_name: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    gpu_count: int = 1
    can_accept_request: bool = True
    """The word of its health check or operator; whether there is room is judged from the load."""
    current_load: int = 0
    """Requests running on it now."""
    max_concurrency: int | None = None
    """The most it may run at once; None: no limit known."""
    avg_latency_ms: float | None = None
    throughput_tokens_per_sec: float | None = None
    """Of the whole instance, over all requests it runs."""
    price_per_gpu_hour: float | None = None
    """Overrides the policy's price for this instance."""
    adapters: frozenset[str] = frozenset()
    """Further model names it answers to (LoRA adapters, aliases)."""
    labels: dict[str, str] = {}
    namespace: str = ""

    @property
    def parallelism(self) -> ParallelismType:
        """Read from its tensor- and pipeline-parallel sizes."""
        if self.tensor_parallel_size > 1:
            return ParallelismType.HYBRID if self.pipeline_parallel_size > 1 else ParallelismType.TENSOR
        return ParallelismType.PIPELINE if self.pipeline_parallel_size > 1 else ParallelismType.NONE


class SchedulingDecision(msgspec.Struct, frozen=True, gc=False):
    """Which instance a request goes to, what is expected of it, and why."""

    request_id: str
    target_instance_id: str
    parallelism_strategy: ParallelismType = ParallelismType.NONE
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    estimated_latency_ms: float | None = None
    estimated_cost: float | None = None
    reason: Reason | str = ""
    """Print it, or take its code and facts; a user's policy may give text."""


class WorkerStatus(Enum):
    """Whether a worker takes instances."""

    READY = "ready"
    DRAINING = "draining"
    """What runs there may stay; nothing new comes."""
    LOST = "lost"


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a worker."""

    index: int
    """As its driver counts."""
    memory_bytes: int
    model: str = ""
    vendor: str = "nvidia"
    used_bytes: int = 0
    """In use by anybody but our instances, as measured."""
    link: str = ""
    """GPUs of one worker with the same link reach each other over it (NVLink, xGMI); empty: over PCIe."""
    pcie: str = ""
    """The same for a PCIe switch."""
    numa: int | None = None
    shareable: bool = True
    """Several instances may share it, if they allow it too."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that runs instances."""

    name: str
    cpus: float
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    labels: Mapping[str, str] = {}
    status: WorkerStatus = WorkerStatus.READY
    used_memory_bytes: int = 0
    """In use by anybody but our instances, as measured."""
    reserved_memory_bytes: int = 0
    """Kept for the system: never given to instances. So are the next, of each GPU."""
    reserved_gpu_bytes: int = 0
    unified_memory: bool = False
    """Its GPUs use the memory of the machine."""
    files: frozenset[str] = frozenset()
    """Models whose files it has."""

"""The need of an instance, from a model and its serving parameters: how each engine uses memory."""

from collections.abc import Sequence
from functools import reduce
from math import gcd
from typing import Protocol

import msgspec

from pointsman.errors import PointsmanError, UnknownName
from pointsman.placement.asks import Need
from pointsman.placement.estimate.architecture import Architecture, Model
from pointsman.placement.estimate.gguf import EMBEDDERS
from pointsman.placement.estimate.safetensors import Adapter

MIB, GIB = 1 << 20, 1 << 30


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    context: int
    """Tokens in one request, prompt and response together."""
    concurrency: int = 1
    """Number of concurrent requests, each with a full context."""
    kv_dtype: str = "auto"
    batch_tokens: int | None = None
    """Tokens computed in one step. None means the default of the engine."""
    max_sequences: int | None = None
    """Number of requests that the engine allocates memory for. None means its default, or `concurrency` if larger."""
    flash_attention: bool = True

    def __post_init__(self) -> None:
        for name in ("context", "concurrency", "batch_tokens", "max_sequences"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 1 << 40:
                raise PointsmanError(f"{name} must be at least 1, found {value}")


class EngineMemory(Protocol):
    """How one engine uses memory."""

    name: str
    usable_share: float
    """Share of a GPU that the engine uses for weights, KV cache and activations."""
    tensor_parallel: bool

    def kv_bits(self, model: Model, dtype: str) -> float:
        """Bits per number in the KV cache."""

    def kv_tokens(self, serving: Serving, window: int | None) -> int:
        """Tokens that a layer with this window keeps, for all requests together."""

    def keeps_nothing(self, model: Model) -> bool:
        """Whether there is no KV cache at all."""

    def activation_bytes(self, model: Model, serving: Serving) -> int:
        """Bytes on each GPU for one step."""

    def overhead_bytes(self, model: Model, serving: Serving) -> int:
        """Bytes on each GPU for the engine itself."""

    def host_bytes(self, model: Model, serving: Serving) -> int:
        """Bytes of the machine's memory that are needed even if the model is on GPUs."""

    def ends(self, model: Model) -> tuple[int, int]:
        """Weights outside layers: (bytes kept with the first layer, bytes kept with the last layer)."""

    def assumptions(self, model: Model, serving: Serving) -> list[str]:
        """What an estimate for this engine assumes."""


def bits_of(dtype: str, known: dict[str, float]) -> float:
    try:
        return known[dtype.lower()]
    except KeyError:
        raise UnknownName("data type of a KV cache", dtype, known) from None


# llama.cpp. The formulas agree with the buffer sizes that it logs: docs/estimate.md has the table.

_LLAMA_CPP_KV_BITS: dict[str, float] = {
    "f16": 16, "bf16": 16, "f32": 32, "float16": 16, "bfloat16": 16, "float32": 32, "q8_0": 8.5, "q5_1": 6,
    "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5,
}  # fmt: skip
CELLS = 256
"""The number of cells in llama.cpp's KV cache is a multiple of this."""
LLAMA_CPP_BATCH_TOKENS = 256
"""Pointsman's setting; the default of llama.cpp is 512."""
LLAMA_CPP_GPU_BYTES = 512 * MIB
"""Bytes on a GPU for the context and the workspaces of the driver."""
LLAMA_CPP_PROCESS_BYTES = 36 * MIB
"""Bytes of the process: Python, the library and its threads."""
TOKENIZER_ENTRY_BYTES = 350
"""Bytes for each entry of the vocabulary."""


class LlamaCppMemory:
    """llama.cpp with a separate KV cache for every slot. Embeddings stay in the machine's memory."""

    name = "llama.cpp"
    usable_share = 1.0
    tensor_parallel = False  # llama.cpp assigns whole layers to GPUs

    def kv_bits(self, model: Model, dtype: str) -> float:
        return 16 if dtype == "auto" else bits_of(dtype, _LLAMA_CPP_KV_BITS)

    def kv_tokens(self, serving: Serving, window: int | None) -> int:
        context = _cells(serving.context)
        if window is None:
            return context * serving.concurrency
        return min(context, _cells(window + self._batch(serving))) * serving.concurrency

    def keeps_nothing(self, model: Model) -> bool:
        return model.architecture.embeds and model.architecture.name in EMBEDDERS

    def activation_bytes(self, model: Model, serving: Serving) -> int:
        """The peak size of the buffer for one step, plus the buffer for the results."""
        shape, context = model.architecture, _cells(serving.context)
        batch = context if shape.embeds else self._batch(serving)  # embeddings are computed in one step
        logits = 0 if shape.embeds else 4 * shape.vocabulary * serving.concurrency
        # For each token throughout the step: five vectors, and the mask over the cells.
        stream = 4 * (5 * shape.hidden + 7) + (2 if serving.flash_attention else 4) * context
        work = 12 * shape.intermediate  # gate, up and their product
        if not serving.flash_attention:
            keys = 5 * max(shape.kv_heads, default=0) * shape.key_dim
            work = max(work, 4 * (shape.attention_heads * context + keys - 7))
        return batch * stream + max(batch * work, logits) + logits

    def overhead_bytes(self, model: Model, serving: Serving) -> int:
        return LLAMA_CPP_GPU_BYTES

    def host_bytes(self, model: Model, serving: Serving) -> int:
        inputs = 0 if model.tied else model.input_bytes
        return LLAMA_CPP_PROCESS_BYTES + TOKENIZER_ENTRY_BYTES * model.architecture.vocabulary + inputs

    def ends(self, model: Model) -> tuple[int, int]:
        # Tied embeddings go where the output goes; others stay in the machine's memory.
        return 0, model.output_bytes + (model.input_bytes if model.tied else 0)

    def assumptions(self, model: Model, serving: Serving) -> list[str]:
        attention = "flash attention" if serving.flash_attention else "no flash attention"
        notes = [f"llama.cpp with steps of {self._batch(serving):,} tokens, {attention}, a context per slot"]
        notes.append("its cache of earlier prompts is not counted (promptCacheMib)")
        if model.architecture.embeds and self.keeps_nothing(model):
            notes.append("an embedding model: nothing is kept between requests")
        return notes

    def _batch(self, serving: Serving) -> int:
        return min(serving.batch_tokens or LLAMA_CPP_BATCH_TOKENS, _cells(serving.context) * serving.concurrency)


def _cells(tokens: int) -> int:
    return -(-tokens // CELLS) * CELLS


# vLLM. The constants are fitted to what it reported on real GPUs: docs/estimate.md has the table.

_VLLM_KV_BITS: dict[str, float] = {
    "float16": 16, "f16": 16, "bfloat16": 16, "bf16": 16, "float32": 32, "f32": 32, "fp8": 8, "fp8_e4m3": 8,
    "fp8_e5m2": 8,
}  # fmt: skip
BLOCK = 16
"""Tokens per block of vLLM's KV cache: requests take whole blocks."""
VLLM_BATCH_TOKENS = 8192
SEQUENCES = 256
"""Defaults of vLLM. On GPUs of 70 GiB or more, newer releases allocate for 1024 requests: set max_sequences."""
SAMPLER_BYTES = 12
"""Bytes per request and vocabulary entry: logits, a copy and probabilities, with 4 bytes each."""
VLLM_GPU_BYTES = 11 * GIB // 10
"""Bytes on a GPU for the CUDA context, workspaces and communication."""
VLLM_HOST_BYTES = 4 * GIB
"""Bytes of the machine's memory for the processes of vLLM."""


class VllmMemory:
    """vLLM. Weights and activations are computed in 16 bits, and the KV cache consists of blocks."""

    name = "vllm"
    usable_share = 0.9  # the default of gpu_memory_utilization; CUDA graphs are in the rest
    tensor_parallel = True

    def kv_bits(self, model: Model, dtype: str) -> float:
        if dtype == "auto":
            return model.architecture.kv_bits or 16
        return bits_of(dtype, _VLLM_KV_BITS)

    def kv_tokens(self, serving: Serving, window: int | None) -> int:
        context = -(-serving.context // BLOCK) * BLOCK
        if window is None:
            return context * serving.concurrency
        kept = min(context, -(-window // BLOCK) * BLOCK)
        # The tokens of a step stay in the cache until the step ends, even beyond the window.
        step = min(self._batch(serving), (context - kept) * serving.concurrency)
        return kept * serving.concurrency + step

    def keeps_nothing(self, model: Model) -> bool:
        return model.architecture.embeds

    def activation_bytes(self, model: Model, serving: Serving) -> int:
        shape = model.architecture
        # Each layer holds at the same time: gate, up and their product; residual, input and output; results of experts.
        layer = self._batch(serving) * 2 * (3 * shape.intermediate + (4 + shape.experts_used) * shape.hidden)
        sampler = 0 if shape.embeds else self._sequences(serving) * shape.vocabulary * SAMPLER_BYTES
        return max(layer, sampler)

    def overhead_bytes(self, model: Model, serving: Serving) -> int:
        return VLLM_GPU_BYTES

    def host_bytes(self, model: Model, serving: Serving) -> int:
        return VLLM_HOST_BYTES

    def ends(self, model: Model) -> tuple[int, int]:
        return model.input_bytes, model.output_bytes

    def assumptions(self, model: Model, serving: Serving) -> list[str]:
        shape = model.architecture
        batch = f"steps of {self._batch(serving):,} tokens and {self._sequences(serving):,} requests"
        notes = [f"vLLM computes {batch}; activations are counted whole on each GPU"]
        if shape.embeds:
            notes.append("an embedding model: nothing is kept between requests")
        own = f"vLLM's own {VLLM_GPU_BYTES / GIB:.1f} GiB per GPU is fitted to what it has reported"
        notes.append(f"{own}; {VLLM_HOST_BYTES // GIB} GiB of RAM for its processes is assumed")
        if shape.vocabulary % 64:
            notes.append("the vocabulary is padded to a multiple of 64 before it is divided")
        return notes

    def _batch(self, serving: Serving) -> int:
        return serving.batch_tokens or VLLM_BATCH_TOKENS

    def _sequences(self, serving: Serving) -> int:
        return serving.max_sequences or max(SEQUENCES, serving.concurrency)


MAX_TENSOR_PARALLEL = 64
VOCABULARY_PAD = 64
ENGINES: tuple[EngineMemory, ...] = (VllmMemory(), LlamaCppMemory())


def engine_memory(name: str) -> EngineMemory:
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise UnknownName("engine", name, [engine.name for engine in ENGINES])


def need_of(
    model: Model, serving: Serving, engine: EngineMemory, adapters: Sequence[Adapter] = (), draft: Model | None = None
) -> Need:
    first, last = engine.ends(model)
    layers = list(model.layer_bytes)
    for adapter in adapters:
        for layer, size in enumerate(adapter.layer_bytes[: len(layers)]):
            layers[layer] += size
        first += adapter.other_bytes
    kv = kv_layer_bytes(model, serving, engine)
    activations = engine.activation_bytes(model, serving)
    if draft is not None:  # the draft runs where the last layer runs
        last += draft.weight_bytes
        kv[-1] += sum(kv_layer_bytes(draft, serving, engine))
        activations = max(activations, engine.activation_bytes(draft, serving))
    shape = model.architecture
    return Need(
        model=model.name,
        layer_bytes=tuple(layers),
        first_bytes=first,
        last_bytes=last,
        kv_layer_bytes=tuple(kv),
        kv_splits=_kv_splits(shape),
        activation_bytes=activations,
        overhead_bytes=engine.overhead_bytes(model, serving),
        host_bytes=engine.host_bytes(model, serving),
        context=serving.context if any(kv) else 0,
        tensor_parallel_sizes=tensor_parallel_sizes(shape) if engine.tensor_parallel else (1,),
    )


def kv_layer_bytes(model: Model, serving: Serving, engine: EngineMemory) -> list[int]:
    """The KV cache of each layer, for all requests together."""
    shape = model.architecture
    if engine.keeps_nothing(model):
        return [0] * shape.layers
    bits = engine.kv_bits(model, serving.kv_dtype)
    tokens = {window: engine.kv_tokens(serving, window) for window in set(shape.windows)}
    return [int(shape.kv_numbers(layer) * tokens[shape.windows[layer]] * bits) // 8 for layer in range(shape.layers)]


def kv_bytes_per_token(model: Model, engine: EngineMemory, dtype: str = "auto") -> int:
    """Bytes for one more token while no window is full."""
    if engine.keeps_nothing(model):
        return 0
    shape = model.architecture
    return int(sum(map(shape.kv_numbers, range(shape.layers))) * engine.kv_bits(model, dtype)) // 8


def tensor_parallel_sizes(shape: Architecture) -> tuple[int, ...]:
    """Numbers of GPUs that can share each layer. Heads, feed-forward part and padded vocabulary must divide evenly. KV
    heads must divide evenly or be copied evenly."""
    heads, kv_heads = shape.attention_heads, _kv_splits(shape)
    vocabulary = -(-shape.vocabulary // VOCABULARY_PAD) * VOCABULARY_PAD

    def divides(size: int) -> bool:
        alone = shape.latent_dim > 0 or not kv_heads
        kv_even = alone or kv_heads % size == 0 or size % kv_heads == 0
        return heads % size == 0 and kv_even and vocabulary % size == 0 and shape.intermediate % size == 0

    return tuple(size for size in range(1, min(MAX_TENSOR_PARALLEL, max(heads, 1)) + 1) if size == 1 or divides(size))


def _kv_splits(shape: Architecture) -> int:
    """Number of parts of the KV cache. A latent cache has no heads to divide, so every GPU keeps the whole cache."""
    return 1 if shape.latent_dim else max(reduce(gcd, shape.kv_heads, 0), 1)

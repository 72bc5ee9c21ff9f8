"""From a model and how it is served to what an instance needs."""

from collections.abc import Sequence
from functools import reduce
from math import gcd

from pointsman.errors import UnknownName
from pointsman.placement.estimate.adapters import Adapter
from pointsman.placement.estimate.architecture import Architecture, Model
from pointsman.placement.estimate.llama_cpp import LlamaCppMemory
from pointsman.placement.estimate.serving import EngineMemory, Serving
from pointsman.placement.estimate.vllm import VllmMemory
from pointsman.placement.needs import Need

MOST_GPUS = 64
"""The largest tensor-parallel size that is looked at."""
VOCABULARY_PAD = 64
ENGINES: tuple[EngineMemory, ...] = (VllmMemory(), LlamaCppMemory())


def engine_memory(name: str) -> EngineMemory:
    """The memory model of an engine."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise UnknownName("engine", name, [engine.name for engine in ENGINES])


def need_of(
    model: Model,
    serving: Serving,
    engine: EngineMemory,
    adapters: Sequence[Adapter] = (),
    draft: Model | None = None,
) -> Need:
    """What one instance needs."""
    first, last = engine.ends(model)
    layers = list(model.layer_bytes)
    for adapter in adapters:
        for layer, size in enumerate(adapter.layer_bytes[: len(layers)]):
            layers[layer] += size
        first += adapter.other_bytes
    kv = kv_layer_bytes(model, serving, engine)
    activations = engine.activation_bytes(model, serving)
    if draft is not None:  # it runs where the last layer does
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
    """What one more token costs while no window is full."""
    if engine.keeps_nothing(model):
        return 0
    shape = model.architecture
    return int(sum(map(shape.kv_numbers, range(shape.layers))) * engine.kv_bits(model, dtype)) // 8


def tensor_parallel_sizes(shape: Architecture) -> tuple[int, ...]:
    """Numbers of GPUs that can share each layer: heads, feed-forward part and padded vocabulary divide evenly, KV heads
    divide or are repeated evenly."""
    heads, kv_heads = shape.attention_heads, _kv_splits(shape)
    vocabulary = -(-shape.vocabulary // VOCABULARY_PAD) * VOCABULARY_PAD

    def divides(size: int) -> bool:
        alone = shape.latent_dim > 0 or not kv_heads
        kv_even = alone or kv_heads % size == 0 or size % kv_heads == 0
        return heads % size == 0 and kv_even and vocabulary % size == 0 and shape.intermediate % size == 0

    return tuple(size for size in range(1, min(MOST_GPUS, max(heads, 1)) + 1) if size == 1 or divides(size))


def _kv_splits(shape: Architecture) -> int:
    """A latent cache has no heads to divide by: every GPU keeps all of it."""
    return 1 if shape.latent_dim else max(reduce(gcd, shape.kv_heads, 0), 1)

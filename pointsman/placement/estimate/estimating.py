"""`estimate`: from a path to what an instance needs, part by part and with every assumption."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from pointsman.errors import PointsmanError, why_unusable
from pointsman.placement.asks import Need
from pointsman.placement.estimate.architecture import Architecture, Model
from pointsman.placement.estimate.gguf import gguf_model
from pointsman.placement.estimate.hugging_face import CONFIG, hugging_face_model
from pointsman.placement.estimate.memory import (
    SEQUENCES,
    EngineMemory,
    Serving,
    engine_memory,
    kv_bytes_per_token,
    need_of,
)
from pointsman.placement.estimate.reading import UnreadableModel
from pointsman.placement.estimate.safetensors import Adapter, read_adapter

QUANTISED_BITS = {
    "fp8": 8, "ptpc_fp8": 8, "experts_int8": 8, "w8a8": 8, "int8": 8, "bitsandbytes": 4, "mxfp4": 4, "int4": 4,
}  # fmt: skip
"""Bits per weight after loading, by the beginning of the method's name."""
AUTO, VLLM, LLAMA_CPP = "auto", "vllm", "llama.cpp"


class Part(msgspec.Struct, frozen=True):
    """One row of the table: bytes in total, and on the fullest GPU."""

    name: str
    bytes: int
    gpu_bytes: int | None
    """Bytes on the fullest GPU; None if they are counted in another part."""
    of: str = ""
    """The other part in which these bytes are counted."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance needs, and the inputs and assumptions of that estimate."""

    model: Model
    serving: Serving
    engine: EngineMemory
    need: Need
    adapters: tuple[Adapter, ...] = ()
    draft: Model | None = None
    notes: tuple[str, ...] = ()
    """Assumptions."""

    @property
    def architecture(self) -> Architecture:
        return self.model.architecture

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes for one more token in one request while no window is full, without the draft model."""
        return kv_bytes_per_token(self.model, self.engine, self.serving.kv_dtype)

    def served(self, **changes: int) -> "Estimate":
        """The estimate for another context or concurrency."""
        serving = msgspec.structs.replace(self.serving, **changes)
        need = need_of(self.model, serving, self.engine, self.adapters, self.draft)
        return msgspec.structs.replace(self, serving=serving, need=need)

    def stages(self, tp: int = 1, pp: int = 1) -> tuple[int, ...]:
        """Layers in each pipeline stage, divided as evenly as their sizes allow."""
        need = self.need
        if tp not in need.tensor_parallel_sizes:
            sizes = ", ".join(map(str, need.tensor_parallel_sizes))
            raise PointsmanError(
                f"{need.model} cannot be divided among {tp} GPUs by {self.engine.name}; sizes: {sizes}"
            )
        staged = (need.layers,) if pp == 1 else need.staged(tp, [need.gpu_bytes(tp)] * pp)
        if staged is None:
            raise PointsmanError(f"{need.model} has {need.layers} layers: that is too few for {pp} pipeline stages")
        return staged

    def parts(self, tp: int = 1, pp: int = 1) -> list[Part]:
        """Bytes of each part, in total and on the fullest GPU of this split."""
        need, gpus = self.need, tp * pp
        start, stop = fullest(need, tp, self.stages(tp, pp))
        adapters = sum(adapter.bytes for adapter in self.adapters)
        draft = 0 if self.draft is None else self.draft.weight_bytes
        ends = (need.first_bytes if start == 0 else 0) + (need.last_bytes if stop == need.layers else 0)
        weights = -(-(sum(need.layer_bytes[start:stop]) + ends) // tp)
        kv = -(-sum(need.kv_layer_bytes[start:stop]) // min(tp, need.kv_splits))
        repeats = tp // min(tp, need.kv_splits)
        parts = [Part("weights", need.weight_bytes, weights)]
        if adapters:
            parts.append(Part("adapters", adapters, None, "weights"))
        if draft:
            parts.append(Part("draft", draft, None, "weights"))
        parts.append(Part("KV cache", need.kv_bytes * repeats, kv))
        parts.append(Part("activations", need.activation_bytes * gpus, need.activation_bytes))
        parts.append(Part(f"{self.engine.name} itself", need.overhead_bytes * gpus, need.overhead_bytes))
        return parts

    def gpu_bytes(self, tp: int = 1, pp: int = 1) -> int:
        """Bytes on the fullest GPU."""
        return _gpu_bytes(self, tp, self.stages(tp, pp))


def fullest(need: Need, tp: int, stages: Sequence[int]) -> tuple[int, int]:
    """The stage that takes the most per GPU, as its first layer and the layer after its last."""
    ends = list(accumulate(stages))
    ranges = zip([0, *ends[:-1]], ends, strict=True)
    return max(ranges, key=lambda stage: need.stage_bytes(stage[0], stage[1], tp))


def estimate(
    path: str | Path,
    *,
    context: int,
    concurrency: int = 1,
    kv_dtype: str = "auto",
    engine: str = AUTO,
    adapters: Sequence[str | Path] = (),
    draft: str | Path | None = None,
    batch_tokens: int | None = None,
    max_sequences: int | None = None,
    flash_attention: bool = True,
    quantization: str = "",
) -> Estimate:
    """What one instance of a model needs, from the headers of its files.

    The default engine is llama.cpp for GGUF and vLLM for anything else.
    """
    serving = Serving(
        context=context,
        concurrency=concurrency,
        kv_dtype=kv_dtype,
        batch_tokens=batch_tokens,
        max_sequences=max_sequences,
        flash_attention=flash_attention,
    )
    model = quantised_on_load(read_model(Path(path)), quantization)
    natural = LLAMA_CPP if model.format == "GGUF" else VLLM
    memory = engine_memory(natural if engine == AUTO else engine)
    loaded = tuple(read_adapter(Path(adapter)) for adapter in adapters)
    drafting = None if draft is None else read_model(Path(draft))
    notes = [*model.notes, *memory.assumptions(model, serving)]
    trained = model.architecture.trained_context
    if trained and context > trained:
        notes.append(f"the context is longer than the {trained:,} tokens that the model was trained for")
    if drafting is not None:
        notes.append(f"the draft {drafting.name} runs with the last layer, with its own KV cache")
    return Estimate(
        model=model,
        serving=serving,
        engine=memory,
        need=need_of(model, serving, memory, loaded, drafting),
        adapters=loaded,
        draft=drafting,
        notes=tuple(notes),
    )


def quantised_on_load(model: Model, method: str) -> Model:
    """The model after an engine has quantised the matrices of the layers while loading them."""
    bits = next((bits for name, bits in QUANTISED_BITS.items() if method.lower().startswith(name)), None)
    known = {"F32": 32, "float32": 32, "F16": 16, "BF16": 16, "float16": 16, "bfloat16": 16, "half": 16}
    stored = known.get(model.largest_dtype)
    if not method or method == "None" or stored is None:
        return model  # the files are already quantised, and `method` only names how
    if bits is None:
        why = f"weights are counted as in the files: what quantization {method} makes of them is not known"
        return msgspec.structs.replace(model, notes=(*model.notes, why))
    layers = tuple(size * bits // stored for size in model.layer_bytes)
    note = f"quantised to {bits} bits when it is loaded ({method})"
    return msgspec.structs.replace(model, layer_bytes=layers, notes=(*model.notes, note))


def read_model(path: Path) -> Model:
    """A model from a GGUF file or a Hugging Face folder."""
    try:
        is_there = path.exists()
    except OSError as error:
        raise UnreadableModel(path, why=why_unusable(path, error)) from None
    if not is_there:
        raise UnreadableModel(path, why=_why_missing(path))
    if path.is_dir():
        if (path / CONFIG).exists():
            return hugging_face_model(path)
        files = sorted(path.glob("*.gguf"))
        firsts = [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
        models = [file for file in firsts if not file.name.startswith("mmproj")]
        if len(models) == 1:
            return gguf_model(models[0])
        found = f"{len(models)} GGUF files; name one of them" if models else "neither"
        raise UnreadableModel(path, f"a folder with {CONFIG}, or with one GGUF file", found)
    if path.suffix == ".safetensors" or path.name == CONFIG:
        return hugging_face_model(path.parent)
    return gguf_model(path)


def _why_missing(path: Path) -> str:
    if path.suffix or path.is_absolute() or len(path.parts) != 2:
        return f"there is no such {'file' if path.suffix else 'file or folder'}"
    return "there is no such folder; if this is the name of a model on a hub, download it, and give its folder"


# Whether an estimate fits on a GPU model, how many GPUs that takes, and how far context and concurrency can grow there

MAX_CONTEXT = 1 << 24
MAX_REQUESTS = 1 << 16
MAX_TOKENS = 1 << 34
DRIVER_BYTES = 1 << 29
"""Approximate memory that a driver keeps for itself, out of the memory that it reports."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    gpu: str
    memory_bytes: int
    usable_bytes: int
    """The most memory of a GPU that the engine uses."""
    gpu_bytes: int
    """Bytes on the fullest GPU, with the requested split."""
    fits: bool
    gpus: int | None
    """The smallest tensor-parallel size that fits; None if no size fits."""
    context: int
    """The largest context that fits with the requested concurrency, up to the trained context; 0 if none fits."""
    concurrency: int
    """The largest concurrency that fits with the requested context; 0 if none fits."""
    gpu_layers: int
    """Number of layers that one GPU can hold while the other layers stay on the CPU."""
    kv_tokens: int
    """Tokens that the KV cache can hold for all requests together; 0 if there is no KV cache."""


def fit(
    estimate: Estimate, memory_bytes: int, tp: int = 1, pp: int = 1, gpu: str = "", share: float | None = None
) -> Fit:
    """How an estimate fits on one size of GPU. `share` is the used part of the GPU; None means the engine's default."""
    usable = usable_bytes(estimate, memory_bytes, share)
    stages = estimate.stages(tp, pp)

    def holds(changed: Estimate) -> bool:
        return _gpu_bytes(changed, tp, stages) <= usable

    longest = estimate.architecture.trained_context or MAX_CONTEXT
    need, needed = estimate.need, _gpu_bytes(estimate, tp, stages)
    return Fit(
        gpu=gpu,
        memory_bytes=memory_bytes,
        usable_bytes=usable,
        gpu_bytes=needed,
        fits=needed <= usable,
        gpus=next((size for size in need.tensor_parallel_sizes if need.gpu_bytes(size) <= usable), None),
        context=largest(lambda tokens: holds(estimate.served(context=tokens)), longest),
        concurrency=largest(lambda requests: holds(estimate.served(concurrency=requests)), MAX_REQUESTS),
        # The last layers go to the GPU first, so that more layers never take less.
        gpu_layers=largest(lambda layers: need.offloaded(layers)[0] <= usable, need.layers),
        kv_tokens=kv_tokens(estimate, usable, tp, pp),
    )


def usable_bytes(estimate: Estimate, memory_bytes: int, share: float | None = None) -> int:
    """The most that the engine uses of a GPU whose driver reports this much memory."""
    return int(max(memory_bytes - DRIVER_BYTES, 0) * (estimate.engine.usable_share if share is None else share))


def _gpu_bytes(estimate: Estimate, tp: int, stages: Sequence[int]) -> int:
    start, stop = fullest(estimate.need, tp, stages)
    return estimate.need.stage_bytes(start, stop, tp)


def kv_tokens(estimate: Estimate, usable: int, tp: int = 1, pp: int = 1) -> int:
    """Tokens of one long request that fit beside everything else. vLLM reports this number as its KV cache size."""
    if not estimate.kv_bytes_per_token:
        return 0
    # The activations stay as they are for the requested concurrency.
    sequences = estimate.serving.max_sequences or max(SEQUENCES, estimate.serving.concurrency)
    alone = estimate.served(concurrency=1, max_sequences=sequences)
    stages = estimate.stages(tp, pp)
    return largest(lambda tokens: _gpu_bytes(alone.served(context=tokens), tp, stages) <= usable, MAX_TOKENS)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which `holds` is true; 0 if there is none. `holds` must be monotonic."""
    if holds(most):
        return most
    low, high = 0, 1
    while high < most and holds(high):
        low, high = high, high * 2
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

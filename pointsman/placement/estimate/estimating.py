"""`estimate`: from a path to what an instance needs, with every part and every assumption."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from pointsman.errors import PointsmanError
from pointsman.placement.estimate.adapters import Adapter, read_adapter
from pointsman.placement.estimate.architecture import Architecture, Model
from pointsman.placement.estimate.gguf_model import gguf_model
from pointsman.placement.estimate.hugging_face import CONFIG, hugging_face_model
from pointsman.placement.estimate.memory import engine_memory, kv_bytes_per_token, need_of
from pointsman.placement.estimate.reading import UnreadableModel
from pointsman.placement.estimate.serving import EngineMemory, Serving
from pointsman.placement.needs import Need

AUTO, VLLM, LLAMA_CPP = "auto", "vllm", "llama.cpp"


class Part(msgspec.Struct, frozen=True):
    """One row of the table: what something takes in all, and on the fullest GPU."""

    name: str
    bytes: int
    gpu_bytes: int | None
    """None: it is counted in another part."""
    of: str = ""
    """That part."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance needs, and where that comes from."""

    model: Model
    serving: Serving
    engine: EngineMemory
    need: Need
    adapters: tuple[Adapter, ...] = ()
    draft: Model | None = None
    notes: tuple[str, ...] = ()
    """What was assumed."""

    @property
    def architecture(self) -> Architecture:
        return self.model.architecture

    @property
    def kv_bytes_per_token(self) -> int:
        """What one more token of one request costs while no window is full; without a draft."""
        return kv_bytes_per_token(self.model, self.engine, self.serving.kv_dtype)

    def served(self, **changes: int) -> "Estimate":
        """The same with another context or concurrency."""
        serving = msgspec.structs.replace(self.serving, **changes)
        need = need_of(self.model, serving, self.engine, self.adapters, self.draft)
        return msgspec.structs.replace(self, serving=serving, need=need)

    def stages(self, tp: int = 1, pp: int = 1) -> tuple[int, ...]:
        """Layers of each pipeline stage, as even as their sizes allow."""
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
        """What each part costs, in all and on the fullest GPU of this split."""
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
        """What the fullest GPU takes."""
        start, stop = fullest(self.need, tp, self.stages(tp, pp))
        return self.need.stage_bytes(start, stop, tp)


def fullest(need: Need, tp: int, stages: Sequence[int]) -> tuple[int, int]:
    """The stage whose GPUs take most: its first layer, and the one after its last."""
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
) -> Estimate:
    """What one instance of a model needs, from its files alone; weights are never read.

    Where no engine is named, it is llama.cpp for GGUF and vLLM for anything else.
    """
    serving = Serving(
        context=context,
        concurrency=concurrency,
        kv_dtype=kv_dtype,
        batch_tokens=batch_tokens,
        max_sequences=max_sequences,
        flash_attention=flash_attention,
    )
    model = read_model(Path(path))
    natural = LLAMA_CPP if model.format == "GGUF" else VLLM
    memory = engine_memory(natural if engine == AUTO else engine)
    loaded = tuple(read_adapter(Path(adapter)) for adapter in adapters)
    drafting = None if draft is None else read_model(Path(draft))
    notes = [*model.notes, *memory.assumptions(model, serving)]
    trained = model.architecture.trained_context
    if trained and context > trained:
        notes.append(f"the context is longer than the {trained:,} tokens that the model was made for")
    if drafting is not None:
        notes.append(f"the draft {drafting.name} runs with the last layer, with a KV cache of its own")
    return Estimate(
        model=model,
        serving=serving,
        engine=memory,
        need=need_of(model, serving, memory, loaded, drafting),
        adapters=loaded,
        draft=drafting,
        notes=tuple(notes),
    )


def read_model(path: Path) -> Model:
    """A model from a GGUF file or a folder in the form of Hugging Face."""
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

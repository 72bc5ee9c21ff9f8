"""llama.cpp's memory. The formulas agree with the buffers that it logs: docs/estimate.md has the table."""

from pointsman.placement.estimate.architecture import Model
from pointsman.placement.estimate.gguf_model import EMBEDDERS
from pointsman.placement.estimate.serving import MIB, Serving, bits_of

_LLAMA_CPP_KV_BITS: dict[str, float] = {
    "f16": 16, "bf16": 16, "f32": 32, "float16": 16, "bfloat16": 16, "float32": 32, "q8_0": 8.5, "q5_1": 6,
    "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5,
}  # fmt: skip
CELLS = 256
"""Cells of its KV cache come in multiples of this."""
LLAMA_CPP_BATCH_TOKENS = 256
"""What our server is started with; llama.cpp's own default is 512."""
GPU_OVERHEAD = 512 * MIB
"""Context and workspaces of the GPU's driver."""
PROCESS = 36 * MIB
"""Python, the library, its threads."""
WORD = 350
"""Bytes of the tokenizer, for each word of the vocabulary."""


class LlamaCppMemory:
    """llama.cpp with a KV cache of its own for every slot; embeddings stay in the machine's memory."""

    name = "llama.cpp"
    usable_share = 1.0
    tensor_parallel = False  # it gives whole layers to GPUs

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
        """The buffer for one step, at the place where most is in it, and the one for the results."""
        shape, context = model.architecture, _cells(serving.context)
        batch = context if shape.embeds else self._batch(serving)  # what is embedded is computed in one step
        logits = 0 if shape.embeds else 4 * shape.vocabulary * serving.concurrency
        # Of each token, all the way: five vectors, and which of the cells it may look at.
        stream = 4 * (5 * shape.hidden + 7) + (2 if serving.flash_attention else 4) * context
        work = 12 * shape.intermediate  # gate, up and their product
        if not serving.flash_attention:
            keys = 5 * max(shape.kv_heads, default=0) * shape.key_dim
            work = max(work, 4 * (shape.attention_heads * context + keys - 7))
        return batch * stream + max(batch * work, logits) + logits

    def overhead_bytes(self, model: Model, serving: Serving) -> int:
        return GPU_OVERHEAD

    def host_bytes(self, model: Model, serving: Serving) -> int:
        inputs = 0 if model.tied else model.input_bytes
        return PROCESS + WORD * model.architecture.vocabulary + inputs

    def ends(self, model: Model) -> tuple[int, int]:
        # Embeddings that are the output too go where the output goes; others never leave the machine's memory.
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

"""vLLM's memory. The constants are fitted to what it reported on real GPUs: docs/estimate.md has the table."""

from pointsman.placement.estimate.architecture import Model
from pointsman.placement.estimate.serving import GIB, Serving, bits_of

_VLLM_KV_BITS: dict[str, float] = {
    "float16": 16, "f16": 16, "bfloat16": 16, "bf16": 16, "float32": 32, "f32": 32, "fp8": 8, "fp8_e4m3": 8,
    "fp8_e5m2": 8,
}  # fmt: skip
BLOCK = 16
"""Tokens of a block of its KV cache: requests take whole ones."""
VLLM_BATCH_TOKENS = 8192
SEQUENCES = 256
"""Its defaults. On GPUs of 70 GiB and more, newer releases prepare for 1024 requests: say so with max_sequences."""
SAMPLER_BYTES = 12
"""For each request and word of the vocabulary: logits, a copy and probabilities, 4 bytes each."""
OVERHEAD = 11 * GIB // 10
"""CUDA context, workspaces, communication."""
HOST = 4 * GIB
"""Its processes in the machine's memory."""


class VllmMemory:
    """vLLM: weights and activations are computed in 16 bits, the KV cache is in blocks."""

    name = "vllm"
    usable_share = 0.9  # its gpu_memory_utilization; CUDA graphs are in the rest
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
        # What one step computes is in the cache until the step is over, also beyond the window.
        step = min(self._batch(serving), (context - kept) * serving.concurrency)
        return kept * serving.concurrency + step

    def keeps_nothing(self, model: Model) -> bool:
        return model.architecture.embeds

    def activation_bytes(self, model: Model, serving: Serving) -> int:
        shape = model.architecture
        # In each layer at once: gate, up and their product; the residual, input and output; what experts return.
        token = 2 * (3 * shape.intermediate + (4 + shape.experts_used) * shape.hidden)
        layer = self._batch(serving) * token
        sampler = 0 if shape.embeds else self._sequences(serving) * shape.vocabulary * SAMPLER_BYTES
        return max(layer, sampler)

    def overhead_bytes(self, model: Model, serving: Serving) -> int:
        return OVERHEAD

    def host_bytes(self, model: Model, serving: Serving) -> int:
        return HOST

    def ends(self, model: Model) -> tuple[int, int]:
        return model.input_bytes, model.output_bytes

    def assumptions(self, model: Model, serving: Serving) -> list[str]:
        shape = model.architecture
        batch = f"steps of {self._batch(serving):,} tokens and {self._sequences(serving):,} requests"
        notes = [f"vLLM computes {batch}; activations are counted whole on each GPU"]
        if shape.embeds:
            notes.append("an embedding model: nothing is kept between requests")
        own = f"vLLM's own {OVERHEAD / GIB:.1f} GiB per GPU is fitted to what it has reported"
        notes.append(f"{own}; {HOST // GIB} GiB of RAM for its processes is assumed")
        if shape.vocabulary % 64:
            notes.append("the vocabulary is padded to a multiple of 64 before it is divided")
        return notes

    def _batch(self, serving: Serving) -> int:
        return serving.batch_tokens or VLLM_BATCH_TOKENS

    def _sequences(self, serving: Serving) -> int:
        return serving.max_sequences or max(SEQUENCES, serving.concurrency)

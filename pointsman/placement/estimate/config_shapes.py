"""The tensors that a decoder must have by its config.json alone, for folders that have nothing else."""

from collections.abc import Iterator
from typing import NamedTuple

from pointsman.placement.estimate.architecture import Architecture, Tensor
from pointsman.placement.estimate.quantisation import Quantisation
from pointsman.placement.estimate.reading import Fields

UNGATED = frozenset(
    {"gpt2", "gpt_neox", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "bert", "roberta", "xlm-roberta", "starcoder2"}
    | {"mpt", "gptj", "codegen", "distilbert"}
)
"""Families whose feed-forward part has two matrices; all others have three."""
QUERY_NORM = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2"})
TIED = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "bloom", "falcon"})
"""Families that use their embeddings as output unless they say otherwise."""


class FeedForward(NamedTuple):
    """How wide the feed-forward part of a layer is, by kind of layer."""

    dense: int
    expert: int
    """Each of them."""
    shared: int
    """What every token passes through beside its experts, in all."""


def feed_forward(text: Fields, hidden: int) -> FeedForward:
    """As config.json says it, in any of its dialects."""
    dense = text.whole("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size") or 4 * hidden
    expert = text.whole("moe_intermediate_size", "expert_intermediate_size") or dense
    shared = text.whole("shared_expert_intermediate_size") or (text.whole("n_shared_experts") or 0) * expert
    return FeedForward(dense, expert, shared)


def computed_tensors(
    shape: Architecture, text: Fields, dtype_bits: int, quantisation: Quantisation
) -> Iterator[Tensor]:
    """One tensor for each part of each layer, with the size that it must have."""

    def plain(name: str, numbers: int) -> Tensor:
        return Tensor(name, numbers * dtype_bits // 8, numbers)

    def matrix(name: str, numbers: int) -> Tensor:
        return Tensor(name, int(numbers * quantisation.bits_per_number / 8), numbers)

    hidden = shape.hidden
    yield plain("model.embed_tokens.weight", shape.vocabulary * hidden)
    attention, feeds = _attention(shape, text), [_feed_forward(shape, text, layer) for layer in range(shape.layers)]
    norms = 2 * hidden + (shape.key_dim * 2 if shape.name in QUERY_NORM else 0)
    norms += (text.whole("kv_lora_rank") or 0) + (text.whole("q_lora_rank") or 0)
    for layer, feed in enumerate(feeds):
        yield matrix(f"model.layers.{layer}.self_attn.weight", attention)
        yield matrix(f"model.layers.{layer}.mlp.weight", feed)
        yield plain(f"model.layers.{layer}.norms.weight", norms + _biases(shape, text))
    yield plain("model.norm.weight", hidden)
    tied = text.get("tie_word_embeddings")
    if not shape.embeds and not (tied if isinstance(tied, bool) else shape.name in TIED):
        yield plain("lm_head.weight", shape.vocabulary * hidden)


def _attention(shape: Architecture, text: Fields) -> int:
    hidden, heads = shape.hidden, shape.attention_heads
    if not shape.latent_dim:
        queries, keys = heads * shape.key_dim, shape.kv_heads[0] * shape.key_dim
        return 2 * hidden * queries + 2 * hidden * keys
    lora, rope = text.whole("kv_lora_rank") or 0, text.whole("qk_rope_head_dim") or 0
    q_lora = text.whole("q_lora_rank")
    queries = q_lora * (hidden + heads * shape.key_dim) if q_lora else hidden * heads * shape.key_dim
    up = lora * heads * (shape.key_dim - rope + shape.value_dim)
    return queries + hidden * (lora + rope) + up + heads * shape.value_dim * hidden


def _feed_forward(shape: Architecture, text: Fields, layer: int) -> int:
    hidden, matrices = shape.hidden, 2 if shape.name in UNGATED else 3
    width = feed_forward(text, hidden)
    every = text.whole("decoder_sparse_step", "moe_layer_freq") or 1
    only_dense = text.wholes("mlp_only_layers") or []
    is_dense = layer < (text.whole("first_k_dense_replace") or 0) or layer in only_dense or layer % every != every - 1
    if not shape.experts or is_dense:
        return matrices * hidden * width.dense
    return matrices * hidden * (shape.experts * width.expert + width.shared) + hidden * shape.experts


def _biases(shape: Architecture, text: Fields) -> int:
    """Of the queries, keys and values: Qwen2 has them always, others if they say so."""
    if text.get("attention_bias") is not True and shape.name not in ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"):
        return 0
    return (shape.attention_heads + 2 * shape.kv_heads[0]) * shape.key_dim

"""A model from a Hugging Face folder: its shape from config.json, its sizes from the headers of safetensors.

Without safetensors the sizes are computed from config.json, and a note says so.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pointsman.placement.estimate.architecture import MAX_LAYERS, Architecture, Model, ModelWeights, Tensor
from pointsman.placement.estimate.reading import Fields, UnreadableModel, json_object
from pointsman.placement.estimate.safetensors import DTYPE_BITS, Stored, read_weights

# The attention of each layer: the whole context, a window, or no cache at all

_WITHOUT_CACHE = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv", "moe", "mlp")


def windows_of(text: Fields, layers: int, notes: list[str]) -> tuple[int | None, ...]:
    """The maximum number of tokens that each layer keeps. None means all tokens; 0 means none."""
    found = _by_kind(text, layers) or _by_rule(text, layers)
    shared = text.whole("num_kv_shared_layers") or 0
    if shared:
        found[max(layers - shared, 0) :] = [0] * min(shared, layers)
    recurrent = sum(window == 0 for window in found) - min(shared, layers)
    if recurrent > 0:
        state = "their state (a few MiB per request) is not counted"
        notes.append(f"{recurrent} of {layers} layers are recurrent; {state}")
    return tuple(found)


def _by_kind(text: Fields, layers: int) -> list[int | None] | None:
    """The windows according to a list with the kind of each layer; None if there is no such list."""
    kinds = text.get("layer_types") or text.get("layers_block_type") or text.get("block_types")
    pattern = text.text("hybrid_override_pattern")
    if not kinds and pattern:
        kinds = ["attention" if mark == "*" else "mamba" for mark in pattern]
    if not isinstance(kinds, list) or len(kinds) != layers:
        return None
    sliding, chunk = text.whole("sliding_window") or None, text.whole("attention_chunk_size") or None

    def window(kind: object) -> int | None:
        if kind in _WITHOUT_CACHE:
            return 0
        return {"sliding_attention": sliding, "chunked_attention": chunk}.get(str(kind))

    return [window(kind) for kind in kinds]


def _by_rule(text: Fields, layers: int) -> list[int | None]:
    """The windows according to the size of the window and the rule of the family."""
    window = text.whole("sliding_window") or None
    interval = text.whole("full_attention_interval") or text.whole("attn_layer_period")
    if window is None and interval:
        offset = text.whole("attn_layer_offset")
        first = interval - 1 if offset is None else offset
        return [None if layer % interval == first % interval else 0 for layer in range(layers)]
    if window is None or text.get("use_sliding_window") is False:
        return [None] * layers
    family = text.text("model_type")
    if family.startswith("qwen"):  # its first layers attend to everything
        first = text.whole("max_window_layers") or 0
        return [None if layer < first else window for layer in range(layers)]
    usual = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}
    every = text.whole("sliding_window_pattern") or usual.get(family)
    if every:
        return [None if (layer + 1) % every == 0 else window for layer in range(layers)]
    return [window] * layers


# Quantised models: how many numbers a packed tensor holds, and how many bytes a number takes

DTYPES = {
    "float32": 32, "float": 32, "float16": 16, "half": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8,
}  # fmt: skip
_ADDITIONS = (
    "scales", "qzeros", "g_idx", "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale", "k_scale",
    "v_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "absmax", "quant_map", "nested_absmax",
    "nested_quant_map", "_scales", "SCB",
)  # fmt: skip
_PACKED = ("qweight", "weight_packed")


class Quantisation(msgspec.Struct, frozen=True):
    """How the weights of layers are stored. No method here quantises embeddings or output."""

    method: str = ""
    """The method; empty if the weights are not quantised."""
    bits: int = 16
    group: int = 0
    """How many numbers share a scale. 0 means so many that the size of the scales can be ignored."""
    kv_bits: int | None = None

    @property
    def bits_per_number(self) -> float:
        """Bits per number, including scales as in AWQ and GPTQ: 16 bits each, and a zero point as large as a number."""
        return self.bits + (16 + self.bits) / self.group if self.group else float(self.bits)


def quantisation_of(config: Mapping[str, Any], dtype_bits: int) -> Quantisation:
    """The declared quantisation: fp8, awq, gptq, bitsandbytes, compressed-tensors, mxfp4, modelopt."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(given, dict):
        return Quantisation(bits=dtype_bits)
    method = str(given.get("quant_method") or given.get("quant_algo") or "unknown").lower()
    group = _whole(given.get("group_size") or given.get("q_group_size"))
    bits = _whole(given.get("bits") or given.get("w_bit"))
    scheme = _first_scheme(given)
    if scheme:
        weights = found if isinstance(found := scheme.get("weights"), dict) else {}
        bits, group = bits or _whole(weights.get("num_bits")), group or _whole(weights.get("group_size"))
    if not bits:
        bits = 4 if given.get("load_in_4bit") or "4" in method else 8
    if given.get("load_in_4bit") and not group:
        group = 64
    if method == "mxfp4":
        group = 32
    scheme_of_cache = given.get("kv_cache_scheme")
    kv_bits = _whole(scheme_of_cache.get("num_bits")) if isinstance(scheme_of_cache, dict) else 0
    if "fp8" in str(given.get("kv_cache_quant_algo") or "").lower():
        kv_bits = 8
    return Quantisation(method, min(bits, 32), group, kv_bits or None)


def parameters_of(tensor: Stored, quantisation: Quantisation) -> int:
    if not quantisation.method:
        return tensor.numbers
    last = tensor.name.rpartition(".")[2]
    if last in _ADDITIONS or last.endswith(("_scales", "_scale_inv")) or ".quant_state." in tensor.name:
        return 0
    bits = DTYPE_BITS.get(tensor.dtype, 8)
    packed = last in _PACKED or last.endswith("_blocks") or (tensor.dtype == "U8" and quantisation.bits < 8)
    return tensor.numbers * bits // quantisation.bits if packed else tensor.numbers


def _first_scheme(given: Mapping[str, Any]) -> dict[str, Any]:
    groups = given.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    return first if isinstance(first, dict) else {}


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 < value < 1 << 20 else 0


# The tensors of a decoder computed from config.json alone, for folders without safetensors

UNGATED = frozenset(
    {"gpt2", "gpt_neox", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "bert", "roberta", "xlm-roberta", "starcoder2"}
    | {"mpt", "gptj", "codegen", "distilbert"}
)
"""Families whose feed-forward part has two matrices; the others have three."""
QUERY_NORM = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2"})
TIED = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "bloom", "falcon"})
"""Families that use their embeddings as output by default."""


class FeedForward(NamedTuple):
    """Width of the feed-forward part of a layer, by kind of layer."""

    dense: int
    expert: int
    """Width of each expert."""
    shared: int
    """Width of all shared experts together."""


def feed_forward(text: Fields, hidden: int) -> FeedForward:
    """The feed-forward layers that config.json describes, in any of its dialects."""
    dense = text.whole("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size") or 4 * hidden
    expert = text.whole("moe_intermediate_size", "expert_intermediate_size") or dense
    shared = text.whole("shared_expert_intermediate_size") or (text.whole("n_shared_experts") or 0) * expert
    return FeedForward(dense, expert, shared)


def computed_tensors(
    shape: Architecture, text: Fields, dtype_bits: int, quantisation: Quantisation
) -> Iterator[Tensor]:
    """One tensor with a computed size for each part of each layer."""

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
    """Number of biases for queries, keys and values. Qwen2 always has these; others have them if so configured."""
    if text.get("attention_bias") is not True and shape.name not in ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"):
        return 0
    return (shape.attention_heads + 2 * shape.kv_heads[0]) * shape.key_dim


CONFIG = "config.json"
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_PARTS = {"vision_config": "vision", "visual": "vision", "audio_config": "audio"}


def hugging_face_model(folder: Path) -> Model:
    config = json_object(folder / CONFIG)
    text = _with_defaults(Fields(folder / CONFIG, _text_config(config)))
    dtype = _dtype(config) or _dtype(text.values)
    quantisation = quantisation_of(config if "quantization_config" in config else text.values, DTYPES.get(dtype, 16))
    notes: list[str] = []
    architecture = _architecture(folder, config, text, quantisation.kv_bits, notes)
    weights = ModelWeights(architecture.layers)
    bytes_by_type: Counter[str] = Counter()
    stored = read_weights(folder)
    if stored:
        for one in stored:
            weights.add(Tensor(one.name, one.bytes, parameters_of(one, quantisation)))
            bytes_by_type[one.dtype] += one.bytes
        largest = bytes_by_type.most_common(1)[0][0]
    else:
        notes.append("there are no safetensors beside config.json: weights are computed from it")
        if architecture.parts:
            notes.append(f"the parts for {' and '.join(architecture.parts)} are not in these weights")
        for tensor in computed_tensors(architecture, text, DTYPES.get(dtype, 16), quantisation):
            weights.add(tensor)
        largest = quantisation.method or dtype or "bfloat16"
    if weights.unused:
        notes.append(f"{weights.unused:,} bytes belong to layers beyond the last (for drafts); left out")
    if quantisation.method:
        notes.append(f"quantised: {quantisation.method}, {quantisation.bits} bits")
    return Model(
        name=folder.name or str(folder.resolve().name),
        architecture=architecture,
        format="safetensors" if stored else "config.json only",
        layer_bytes=tuple(weights.layers),
        input_bytes=weights.input,
        output_bytes=weights.output,
        parameters=weights.parameters,
        largest_dtype=largest,
        tied=not weights.has_output,
        notes=tuple(notes),
    )


WITHOUT_ATTENTION = ("mamba", "falcon_mamba", "rwkv")
"""Families that keep nothing per token."""
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "sliding_window": 4096,
    },
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256_000},
    "gemma": {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256_000},
}  # fmt: skip
"""Defaults in the published code of each family. Some configurations (such as that of gemma-3-4b-it) omit them."""


def _with_defaults(text: Fields) -> Fields:
    return Fields(text.path, {**_DEFAULTS.get(text.text("model_type"), {}), **text.values})


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text part of a configuration. In the configuration of a multimodal model, this part is nested."""
    for name in _TEXT_CONFIGS:
        inner = config.get(name)
        if isinstance(inner, dict):
            return {**config, **_text_config(inner)}
    return config


def _dtype(values: Any) -> str:
    dtype = values.get("torch_dtype") or values.get("dtype")
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else ""


def _architecture(
    folder: Path, config: dict[str, Any], text: Fields, kv_bits: int | None, notes: list[str]
) -> Architecture:
    layers = text.needed("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if layers > MAX_LAYERS:
        raise UnreadableModel(folder / CONFIG, f"at most {MAX_LAYERS:,} layers", f"{layers:,}")
    hidden = text.needed("hidden_size", "n_embd", "d_model", "dim")
    heads = text.whole("num_attention_heads", "n_head", "num_heads", "n_heads") or 0
    if not heads and not text.text("model_type").startswith(WITHOUT_ATTENTION):
        raise UnreadableModel(folder / CONFIG, "num_attention_heads, without which its KV cache has no size", "nothing")
    grouped = 1 if text.get("multi_query") is True else None
    kv_heads = text.whole("num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads") or grouped or heads
    head_dim = text.whole("head_dim", "attention_head_dim", "kv_channels") or (hidden // heads if heads else 0)
    lora_rank = text.whole("kv_lora_rank") or 0
    rope_dim = text.whole("qk_rope_head_dim") or 0
    return Architecture(
        name=text.text("model_type") or "unknown",
        layers=layers,
        hidden=hidden,
        intermediate=_intermediate(text, hidden),
        attention_heads=heads,
        kv_heads=(kv_heads,) * layers,
        key_dim=(text.whole("qk_nope_head_dim") or 0) + rope_dim if lora_rank else head_dim,
        value_dim=text.whole("v_head_dim") or head_dim if lora_rank else head_dim,
        latent_dim=lora_rank + rope_dim if lora_rank else 0,
        windows=windows_of(text, layers, notes),
        vocabulary=text.whole("vocab_size", "padded_vocab_size") or 0,
        experts=text.whole("n_routed_experts", "num_local_experts", "num_experts") or 0,
        experts_used=text.whole("num_experts_per_tok", "num_experts_per_token", "moe_topk") or 0,
        trained_context=text.whole("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"),
        embeds=_embeds(folder, config),
        kv_bits=kv_bits,
        parts=tuple(sorted({part for key, part in _PARTS.items() if config.get(key)})),
    )


def _intermediate(text: Fields, hidden: int) -> int:
    """Width of the feed-forward part that one token uses."""
    width = feed_forward(text, hidden)
    used = text.whole("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    if not used:
        return width.dense
    return max(used * width.expert + width.shared, width.dense if text.whole("first_k_dense_replace") else 0)


def _embeds(folder: Path, config: dict[str, Any]) -> bool:
    """Whether this is an embedding model. A file of sentence-transformers or the name of a class says so."""
    if (folder / "modules.json").exists() or (folder / "1_Pooling").is_dir():
        return True
    classes = config.get("architectures")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    generating = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForSeq2SeqLM", "ForVision2Seq")
    return bool(names) and not any(part in name for name in names for part in generating)

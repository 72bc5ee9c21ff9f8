"""A Hugging Face folder in our words: config.json for the shape, headers of safetensors for the sizes.

Without safetensors the sizes are computed from config.json, and a note says so.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from pointsman.placement.estimate.architecture import MOST_LAYERS, Architecture, Model, ModelWeights, Tensor
from pointsman.placement.estimate.config_shapes import computed_tensors, feed_forward
from pointsman.placement.estimate.quantisation import DTYPES, parameters_of, quantisation_of
from pointsman.placement.estimate.reading import Fields, UnreadableModel, json_object
from pointsman.placement.estimate.safetensors import read_weights
from pointsman.placement.estimate.windows import windows_of

CONFIG = "config.json"
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_PARTS = {"vision_config": "vision", "visual": "vision", "audio_config": "audio"}


def hugging_face_model(folder: Path) -> Model:
    """A model from its folder."""
    config = json_object(folder / CONFIG)
    text = Fields(folder / CONFIG, _text_config(config))
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


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that is about language: of a multimodal model, it is nested."""
    for name in _TEXT_CONFIGS:
        inner = config.get(name)
        if isinstance(inner, dict):
            return {**config, **_text_config(inner)}
    return config


def _dtype(values: Any) -> str:
    told = values.get("torch_dtype") or values.get("dtype")
    return told.removeprefix("torch.") if isinstance(told, str) else ""


def _architecture(
    folder: Path, config: dict[str, Any], text: Fields, kv_bits: int | None, notes: list[str]
) -> Architecture:
    layers = text.needed("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if layers > MOST_LAYERS:
        raise UnreadableModel(folder / CONFIG, f"at most {MOST_LAYERS:,} layers", f"{layers:,}")
    hidden = text.needed("hidden_size", "n_embd", "d_model", "dim")
    heads = text.whole("num_attention_heads", "n_head", "num_heads", "n_heads") or 0
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
    """Of what one token passes through."""
    width = feed_forward(text, hidden)
    used = text.whole("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    if not used:
        return width.dense
    return max(used * width.expert + width.shared, width.dense if text.whole("first_k_dense_replace") else 0)


def _embeds(folder: Path, config: dict[str, Any]) -> bool:
    """Whether its work is vectors: sentence-transformers say so in a file, others by the name of their class."""
    if (folder / "modules.json").exists() or (folder / "1_Pooling").is_dir():
        return True
    classes = config.get("architectures")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    writes = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForSeq2SeqLM", "ForVision2Seq")
    return bool(names) and not any(part in name for name in names for part in writes)

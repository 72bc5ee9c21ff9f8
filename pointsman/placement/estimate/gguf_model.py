"""GGUF metadata in our words: what kind of model it is, and where its weights stand."""

from collections import Counter
from pathlib import Path

from pointsman.placement.estimate.architecture import MOST_LAYERS, Architecture, Model, ModelWeights
from pointsman.placement.estimate.gguf import GgufFile, Skipped, read_gguf
from pointsman.placement.estimate.reading import Fields, UnreadableModel

EMBEDDERS = frozenset(
    {"bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert"}
    | {"gemma-embedding", "t5encoder"}
)
"""Families that read a text at once and keep no cache."""
WINDOW_EVERY = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "llama4": 4, "exaone4": 4, "olmo2": 4,
}  # fmt: skip
"""Of so many layers in turn, all but the last look back only as far as the window."""


def gguf_model(path: Path) -> Model:
    """A model from its GGUF file."""
    file = read_gguf(path)
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise UnreadableModel(path, "general.architecture, the family of the model", "nothing")
    if file.metadata.get("general.type") in ("adapter", "mmproj") or name == "clip":
        raise UnreadableModel(path, "the weights of a language model", f"a file of type {name}")
    fields = Fields(path, file.metadata, f"{name}.")
    notes: list[str] = []
    architecture = _architecture(file, name, fields, notes)
    weights = ModelWeights(architecture.layers)
    bytes_by_type: Counter[str] = Counter()
    for tensor in file.tensors:
        weights.add(tensor.counted)
        bytes_by_type[tensor.dtype] += tensor.bytes
    if weights.unused:
        notes.append(f"{weights.unused:,} bytes belong to layers that the metadata does not count; left out")
    title = file.metadata.get("general.name")
    return Model(
        name=title if isinstance(title, str) and title else path.stem,
        architecture=architecture,
        format="GGUF",
        layer_bytes=tuple(weights.layers),
        input_bytes=weights.input,
        output_bytes=weights.output,
        parameters=weights.parameters,
        largest_dtype=bytes_by_type.most_common(1)[0][0] if bytes_by_type else "",
        tied=not weights.has_output,
        notes=tuple(notes),
    )


def _architecture(file: GgufFile, name: str, fields: Fields, notes: list[str]) -> Architecture:
    layers = fields.needed("block_count")
    if layers > MOST_LAYERS:
        raise UnreadableModel(file.path, f"at most {MOST_LAYERS:,} layers", f"{layers:,}")
    hidden = fields.needed("embedding_length")
    heads_of_layers = fields.wholes("attention.head_count")
    heads = max(heads_of_layers, default=0) if heads_of_layers else fields.whole("attention.head_count") or 0
    kv_heads = fields.wholes("attention.head_count_kv")
    if kv_heads is None or len(kv_heads) != layers:
        given = None if kv_heads else fields.whole("attention.head_count_kv")
        kv_heads = [heads if given is None else given] * layers
    dim = hidden // heads if heads else 0
    lora_rank = fields.whole("attention.kv_lora_rank")
    # Files from before the latent cache have full keys and values for every head.
    latent = bool(lora_rank) and fields.whole("attention.key_length_mla") is not None
    embeds = name in EMBEDDERS or fields.get("attention.causal") is False
    used = fields.whole("expert_used_count") or 0
    feed = max(fields.wholes("feed_forward_length") or [fields.whole("feed_forward_length") or 0])
    expert = fields.whole("expert_feed_forward_length") or feed
    shared = (fields.whole("expert_shared_count") or 0) * expert
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=max(feed, used * expert + shared),
        attention_heads=heads,
        kv_heads=tuple(kv_heads),
        key_dim=fields.whole("attention.key_length") or dim,
        value_dim=fields.whole("attention.value_length") or dim,
        latent_dim=(lora_rank or 0) + (fields.whole("rope.dimension_count") or 0) if latent else 0,
        windows=_windows(name, fields, layers, notes),
        vocabulary=_vocabulary(file, fields),
        experts=fields.whole("expert_count") or 0,
        experts_used=used,
        trained_context=fields.whole("context_length") or None,
        embeds=embeds,
    )


def _vocabulary(file: GgufFile, fields: Fields) -> int:
    for tensor in file.tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return tensor.shape[1]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return fields.whole("vocab_size") or (tokens.length if isinstance(tokens, Skipped) else 0)


def _windows(name: str, fields: Fields, layers: int, notes: list[str]) -> tuple[int | None, ...]:
    window = fields.whole("attention.sliding_window")
    if not window:
        return (None,) * layers
    told = fields.get("attention.sliding_window_pattern")
    if isinstance(told, list) and len(told) == layers:
        return tuple(window if slides else None for slides in told)
    every = told if isinstance(told, int) and told > 0 else WINDOW_EVERY.get(name)
    if every is None:
        notes.append(f"which layers use the window of {window:,} tokens is not known for {name}; counted as none")
        return (None,) * layers
    return tuple(window if layer % every < every - 1 else None for layer in range(layers))

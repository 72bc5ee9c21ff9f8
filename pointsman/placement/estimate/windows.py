"""How far back each layer of a Hugging Face model looks: the whole context, a window, or no cache at all."""

from pointsman.placement.estimate.reading import Fields

_KEEP_NOTHING = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv", "moe", "mlp")


def windows_of(text: Fields, layers: int, notes: list[str]) -> tuple[int | None, ...]:
    """For each layer the tokens that it keeps at most; None: all, 0: none."""
    found = _by_kind(text, layers) or _by_rule(text, layers)
    shared = text.whole("num_kv_shared_layers") or 0
    if shared:
        found[max(layers - shared, 0) :] = [0] * min(shared, layers)
    recurrent = sum(window == 0 for window in found) - min(shared, layers)
    if recurrent > 0:
        notes.append(
            f"{recurrent} of {layers} layers are recurrent; their state (a few MiB per request) is not counted"
        )
    return tuple(found)


def _by_kind(text: Fields, layers: int) -> list[int | None] | None:
    """From a list that names the kind of each layer, if there is one."""
    kinds = text.get("layer_types") or text.get("layers_block_type") or text.get("block_types")
    pattern = text.text("hybrid_override_pattern")
    if not kinds and pattern:
        kinds = ["attention" if mark == "*" else "mamba" for mark in pattern]
    if not isinstance(kinds, list) or len(kinds) != layers:
        return None
    sliding, chunk = text.whole("sliding_window") or None, text.whole("attention_chunk_size") or None

    def window(kind: object) -> int | None:
        if kind in _KEEP_NOTHING:
            return 0
        return {"sliding_attention": sliding, "chunked_attention": chunk}.get(str(kind))

    return [window(kind) for kind in kinds]


def _by_rule(text: Fields, layers: int) -> list[int | None]:
    """From the window alone and what the family does with it."""
    window = text.whole("sliding_window") or None
    interval = text.whole("full_attention_interval") or text.whole("attn_layer_period")
    if window is None and interval:
        offset = text.whole("attn_layer_offset")
        place = interval - 1 if offset is None else offset
        return [None if layer % interval == place % interval else 0 for layer in range(layers)]
    if window is None or text.get("use_sliding_window") is False:
        return [None] * layers
    family = text.text("model_type")
    if family.startswith("qwen"):  # the first ones look back at everything
        first = text.whole("max_window_layers") or 0
        return [None if layer < first else window for layer in range(layers)]
    every = text.whole("sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}.get(
        family
    )
    if every:
        return [None if (layer + 1) % every == 0 else window for layer in range(layers)]
    return [window] * layers

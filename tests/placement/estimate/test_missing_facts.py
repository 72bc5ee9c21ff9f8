"""What a configuration leaves out is known from its family, or refused; it is never zero."""

import json
from pathlib import Path

import pytest

from pointsman.placement.estimate import UnreadableModel, estimate

GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}  # fmt: skip
"""As google/gemma-3-4b-it is published, without its vision part: head counts are left to the defaults of its family."""


def write(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_gemma_3_has_a_kv_cache(tmp_path: Path) -> None:
    found = estimate(write(tmp_path, GEMMA_3_4B), context=131_072)
    assert found.kv_bytes_per_token == 34 * 2 * 4 * 256 * 2
    full, windowed = max(found.need.kv_layer_bytes), min(found.need.kv_layer_bytes)
    assert full == 131_072 * 2 * 4 * 256 * 2
    assert 0 < windowed < full / 10, "five of six layers have a window of 1,024 tokens"


def test_head_counts_that_no_default_gives_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    with pytest.raises(UnreadableModel, match="num_attention_heads"):
        estimate(write(tmp_path, config), context=128)


def test_a_model_without_attention_needs_none(tmp_path: Path) -> None:
    config = {
        "architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2,
        "vocab_size": 100,
    }  # fmt: skip
    assert estimate(write(tmp_path, config), context=128).need.kv_bytes == 0

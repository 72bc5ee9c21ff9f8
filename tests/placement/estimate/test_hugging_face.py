"""Hugging Face folders: shapes, windows, quantisations, parts, and folders that are damaged."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from pointsman.placement.estimate import UnreadableModel, estimate, read_model
from tests.placement.estimate.models import (
    LLAMA_8B,
    TINY_CONFIG,
    decoder_shapes,
    write_known,
    write_model,
    write_safetensors,
)


def config_only(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None,) * 4),
        ({"sliding_window": 128}, (128,) * 4),
        ({"sliding_window": 128, "use_sliding_window": False}, (None,) * 4),
        ({"sliding_window": 128, "model_type": "gemma2"}, (128, None) * 2),
        ({"sliding_window": 128, "sliding_window_pattern": 3}, (128, 128, None, 128)),
        ({"sliding_window": 128, "model_type": "qwen2", "max_window_layers": 3}, (None, None, None, 128)),
        ({"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"] * 2}, (None, 128) * 2),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, (0, 0, 0, None)),
        ({"full_attention_interval": 4}, (0, 0, 0, None)),
        ({"layers_block_type": ["mamba", "attention"] * 2}, (0, None) * 2),
        ({"num_kv_shared_layers": 2}, (None, None, 0, 0)),
        ({"attention_chunk_size": 64, "layer_types": ["chunked_attention"] * 4}, (64,) * 4),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert read_model(config_only(tmp_path, TINY_CONFIG | changes)).architecture.windows == windows


def test_the_text_config_of_a_multimodal_model_is_nested(tmp_path: Path) -> None:
    config = {"model_type": "llava", "text_config": TINY_CONFIG, "vision_config": {"hidden_size": 32}}
    config["architectures"] = ["LlavaForConditionalGeneration"]
    shapes = {f"language_model.{name}": shape for name, shape in decoder_shapes(TINY_CONFIG).items()}
    plain = read_model(write_model(tmp_path / "plain", TINY_CONFIG, decoder_shapes(TINY_CONFIG)))
    shapes |= {"vision_tower.encoder.layers.0.mlp.weight": (32, 32), "multi_modal_projector.weight": (160, 32)}
    found = read_model(write_model(tmp_path / "llava", config, shapes))
    assert found.architecture.parts == ("vision",)
    assert found.architecture.layers == 4
    assert found.layer_bytes == plain.layer_bytes
    assert found.input_bytes == plain.input_bytes + 2 * (32 * 32 + 160 * 32)


def test_layers_for_drafts_are_left_out(tmp_path: Path) -> None:
    shapes = decoder_shapes(TINY_CONFIG)
    plain = read_model(write_model(tmp_path / "plain", TINY_CONFIG, shapes))
    more = read_model(
        write_model(tmp_path / "mtp", TINY_CONFIG, shapes | {"model.layers.4.eh_proj.weight": (160, 320)})
    )
    assert more.weight_bytes == plain.weight_bytes
    assert "102,400 bytes belong to layers beyond the last" in more.notes[0]


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": 32}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
PACKED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
}


@pytest.mark.parametrize(
    ("quantisation", "tensors", "dtypes"),
    [
        (AWQ, {"qweight": (64, 8), "qzeros": (2, 8), "scales": (2, 64)}, {"qweight": "I32", "qzeros": "I32"}),
        (GPTQ, {"qweight": (16, 64), "scales": (2, 64), "g_idx": (64,)}, {"qweight": "I32", "g_idx": "I32"}),
        (BNB, {"weight": (2048, 1), "absmax": (64,)}, {"weight": "U8", "absmax": "U8"}),
        (FP8, {"weight": (64, 64), "weight_scale_inv": (1, 1)}, {"weight": "F8_E4M3", "weight_scale_inv": "F32"}),
        (PACKED, {"weight_packed": (64, 8), "weight_scale": (64, 2)}, {"weight_packed": "I32"}),
    ],
)
def test_packed_weights_count_with_their_parameters(
    quantisation: dict[str, Any], tensors: dict[str, tuple[int, ...]], dtypes: dict[str, str], tmp_path: Path
) -> None:
    config_only(tmp_path, TINY_CONFIG | {"quantization_config": quantisation})
    names = {f"model.layers.0.mlp.{last}": shape for last, shape in tensors.items()}
    write_safetensors(tmp_path / "model.safetensors", names, **dtypes)
    found = read_model(tmp_path)
    assert found.parameters == 64 * 64
    assert found.notes[-1].startswith(f"quantised: {quantisation['quant_method']}, ")
    assert found.architecture.kv_bits == (8 if "kv_cache_scheme" in quantisation else None)


@pytest.mark.parametrize(
    ("quantisation", "bits"), [(AWQ, 4 + 20 / 32), (GPTQ, 8 + 24 / 32), (FP8, 8), (BNB, 4 + 20 / 64)]
)
def test_computed_weights_are_as_small_as_their_quantisation(
    quantisation: dict[str, Any], bits: float, tmp_path: Path
) -> None:
    plain = read_model(config_only(tmp_path / "plain", LLAMA_8B))
    found = read_model(config_only(tmp_path / "small", LLAMA_8B | {"quantization_config": quantisation}))
    assert found.parameters == plain.parameters
    assert sum(found.layer_bytes) / sum(plain.layer_bytes) == pytest.approx(bits / 16, rel=1e-3)
    assert found.input_bytes == plain.input_bytes


def test_embedding_models_keep_nothing(tmp_path: Path) -> None:
    by_class = config_only(tmp_path / "bert", TINY_CONFIG | {"architectures": ["BertModel"], "model_type": "bert"})
    by_file = config_only(tmp_path / "qwen", TINY_CONFIG)
    (by_file / "modules.json").write_text("[]")
    for folder in (by_class, by_file):
        found = estimate(folder, context=512, concurrency=32)
        assert found.architecture.embeds
        assert found.need.kv_bytes == 0
    assert not estimate(config_only(tmp_path / "chat", TINY_CONFIG), context=512).architecture.embeds


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected a JSON object"),
        (b"[1]", "expected a JSON object, found \\["),
        (b"{" * 5000, "expected a JSON object"),
        (b"[" * 100_000, "expected a JSON object"),
        (b"{}", "a whole number >= 1 as num_hidden_layers or n_layer or num_layers or n_layers, found nothing"),
        (b'{"num_hidden_layers": -3}', "a whole number >= 0 as num_hidden_layers, found -3"),
        (b'{"num_hidden_layers": 4}', "as hidden_size or n_embd or d_model or dim, found nothing"),
        (b'{"num_hidden_layers": 99999999999, "hidden_size": 8}', "at most 10,000 layers"),
    ],
)
def test_configurations_that_make_no_sense(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UnreadableModel, match=words) as raised:
        read_model(tmp_path)
    assert str(tmp_path / "config.json") in str(raised.value)


def header(value: object) -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"abc", "8 bytes of the length of the header at byte 0, found only 3 more; it is truncated"),
        (struct.pack("<Q", 1 << 62), "a header of at most 134,217,728 bytes, found 4,611,686,018,427,387,904"),
        (struct.pack("<Q", 50) + b"{}", "50 bytes of the header at byte 8, found only 2 more; it is truncated"),
        (header([]), "expected a JSON object, found \\["),
        (header({"x": 3}), 'dtype, shape and data_offsets of tensor "x", found 3'),
        (header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}), 'tensor "x" to be F32 of shape'),
        (header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), "8 bytes, the end of .* truncated"),
        (header({"x": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}), "dtype, shape and data_offsets"),
        (header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}), "the bytes from 8 to 0"),
    ],
)
def test_safetensors_that_are_damaged(content: bytes, words: str, tmp_path: Path) -> None:
    config_only(tmp_path, TINY_CONFIG)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnreadableModel, match=words):
        read_model(tmp_path)


def test_a_download_that_is_not_complete(tmp_path: Path) -> None:
    folder = write_known(tmp_path, "llama-8b", shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(UnreadableModel, match=r"model-00002-of-00003\.safetensors .* it is truncated"):
        read_model(folder)
    shard.unlink()
    with pytest.raises(UnreadableModel, match=r"expected model-00002-of-00003\.safetensors beside it"):
        read_model(folder)

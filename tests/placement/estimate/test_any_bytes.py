"""Any bytes: the readers return or raise our error, and allocate no more memory than the file justifies."""

import json
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pointsman.errors import PointsmanError
from pointsman.placement.estimate import estimate
from pointsman.placement.estimate.safetensors import read_adapter
from tests.placement.estimate.models import TINY_CONFIG, TINY_GGUF

TINY_HEAD = TINY_GGUF.read_bytes()[:1200]
ROOM = 4 << 20
"""Maximum memory to read a file of a few KiB."""
patient = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
odd = st.one_of(json_values, st.sampled_from([0, 1, 7, 2**31, 2**63, 2**70, -1, "full_attention", [1, 2]]))


def try_it(path: Path) -> None:
    refused = ""
    tracemalloc.start()
    try:
        assert estimate(path, context=4096, concurrency=4).need.gpu_bytes() >= 0
    except PointsmanError as error:
        refused = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < ROOM
    assert not refused or refused.startswith(str(path))


@patient
@given(content=st.binary(max_size=400))
def test_any_bytes_as_gguf(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for head in (b"", b"GGUF\x03\0\0\0"):
        path.write_bytes(head + content)
        try_it(path)


@patient
@given(place=st.integers(4, len(TINY_HEAD) - 8), junk=st.binary(min_size=1, max_size=8))
def test_a_real_gguf_with_a_few_bytes_changed(place: int, junk: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = TINY_GGUF.read_bytes()
    path.write_bytes(data[:place] + junk + data[place + len(junk) :])
    try_it(path)


@patient
@given(content=st.binary(max_size=400))
def test_any_bytes_as_safetensors_and_as_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    weights = tmp_path / "model.safetensors"
    for data in (content, struct.pack("<Q", len(content)) + content):
        weights.write_bytes(data)
        try_it(tmp_path)
    weights.unlink()
    for name in ("model.safetensors.index.json", "config.json"):
        (tmp_path / name).write_bytes(content)
        try_it(tmp_path)
        (tmp_path / name).unlink()


@patient
@given(header=st.dictionaries(st.text(max_size=8), json_values | st.fixed_dictionaries({
    "dtype": st.sampled_from(["F32", "BF16", "Q", 3]),
    "shape": st.lists(st.integers(-1, 2**64), max_size=3),
    "data_offsets": st.lists(st.integers(-1, 2**64), max_size=3),
}), max_size=3))  # fmt: skip
def test_any_header_of_safetensors(header: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    try_it(tmp_path)


FIELDS = [
    *TINY_CONFIG, "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "sliding_window", "layer_types",
    "sliding_window_pattern", "max_window_layers", "num_experts_per_tok", "n_routed_experts", "quantization_config",
    "text_config", "vision_config", "num_kv_shared_layers", "full_attention_interval", "hybrid_override_pattern",
    "mlp_only_layers", "decoder_sparse_step", "moe_intermediate_size", "attn_layer_offset",
]  # fmt: skip


@patient
@given(changes=st.dictionaries(st.sampled_from(FIELDS), odd, max_size=4))
def test_any_values_in_a_configuration(changes: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG | changes))
    try_it(tmp_path)


@patient
@given(config=st.binary(max_size=60), weights=st.binary(max_size=200))
def test_any_bytes_as_an_adapter(config: bytes, weights: bytes, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(PointsmanError):
        read_adapter(tmp_path)

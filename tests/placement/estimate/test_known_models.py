"""Well-known models, from headers of their shapes: published totals, and what engines have reported."""

from pathlib import Path

import pytest

from pointsman.placement.estimate import estimate, kv_tokens, usable_bytes
from pointsman.placement.gpu_models import known_gpu
from tests.placement.estimate.models import KNOWN, write_known

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "billions", "kib_per_token", "sizes", "kv_splits"),
    [
        ("llama-8b", 8.03, 128, (1, 2, 4, 8, 16, 32), 8),
        ("llama-70b", 70.6, 320, (1, 2, 4, 8, 16, 32, 64), 8),
        ("qwen3-32b", 32.8, 256, (1, 2, 4, 8, 16, 32, 64), 8),
        ("deepseek-lite", 15.7, 576 * 2 * 27 / 1024, (1, 2, 4, 8, 16), 1),
    ],
)
def test_totals(
    name: str, billions: float, kib_per_token: float, sizes: tuple[int, ...], kv_splits: int, tmp_path: Path
) -> None:
    found = estimate(write_known(tmp_path, name), context=4096)
    assert found.model.parameters / 1e9 == pytest.approx(billions, abs=0.05)
    assert found.kv_bytes_per_token == kib_per_token * 1024
    assert found.need.kv_bytes == found.kv_bytes_per_token * 4096
    assert found.need.tensor_parallel_sizes == sizes
    assert found.need.kv_splits == kv_splits
    assert found.need.weight_bytes == 2 * found.model.parameters
    assert len(found.need.layer_bytes) == KNOWN[name]["num_hidden_layers"]
    embeddings = 2 * KNOWN[name]["vocab_size"] * KNOWN[name]["hidden_size"]
    assert (found.need.first_bytes, found.need.last_bytes) == (embeddings, embeddings + 2 * KNOWN[name]["hidden_size"])


@pytest.mark.parametrize("name", KNOWN)
def test_config_alone_gives_the_same_weights_and_says_so(name: str, tmp_path: Path) -> None:
    whole = write_known(tmp_path, name)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((whole / "config.json").read_bytes())
    computed, read = estimate(bare, context=512), estimate(whole, context=512)
    assert computed.model.parameters == read.model.parameters
    assert computed.need.layer_bytes == read.need.layer_bytes
    assert computed.model.format == "config.json only"
    assert any("computed" in note for note in computed.notes)
    assert not any("computed" in note for note in read.notes)


def test_every_gpu_keeps_the_whole_latent_cache(tmp_path: Path) -> None:
    need = estimate(write_known(tmp_path, "deepseek-lite"), context=32768).need
    weights = -(-need.weight_bytes // 4)
    assert need.gpu_bytes(4) == weights + need.kv_bytes + need.activation_bytes + need.overhead_bytes


def test_kv_heads_are_divided_and_beyond_their_number_repeated(tmp_path: Path) -> None:
    found = estimate(write_known(tmp_path, "llama-70b"), context=8192)
    kv = {tp: next(part for part in found.parts(tp) if part.name == "KV cache") for tp in (1, 4, 8, 16)}
    assert [part.gpu_bytes for part in kv.values()] == [found.need.kv_bytes // parts for parts in (1, 4, 8, 8)]
    assert kv[16].bytes == 2 * kv[8].bytes


@pytest.mark.parametrize(
    ("name", "gpu", "tp", "options", "reported", "tolerance"),
    [
        # Published: 307,328 tokens per pod at gpu_memory_utilization 0.9. Nothing was fitted to it.
        ("qwen3-32b", "H100 80GB", 2, {"max_sequences": 1024}, 307_328, 0.015),
        ("qwen3-32b", "H100 80GB", 2, {}, 307_328, 0.02),
        # The constants are fitted to these.
        ("qwen3-32b", "H100 NVL", 1, {"max_sequences": 1024, "batch_tokens": 4096}, 81_648, 0.005),
        ("llama-8b", "H100 NVL", 1, {"max_sequences": 1024, "batch_tokens": 4096}, 542_960, 0.005),
    ],
)
def test_vllm_reports_about_as_many_kv_tokens(
    name: str, gpu: str, tp: int, options: dict[str, int], reported: int, tolerance: float, tmp_path: Path
) -> None:
    found = estimate(write_known(tmp_path, name), context=32768, engine="vllm", **options)  # type: ignore[arg-type]
    known = known_gpu(gpu)
    assert known is not None
    tokens = kv_tokens(found, usable_bytes(found, known.memory_bytes, share=0.9), tp)
    assert tokens / reported == pytest.approx(1, abs=tolerance)

"""How serving parameters change an estimate."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.errors import PointsmanError, UnknownName
from pointsman.placement.estimate import UnreadableModel, estimate, fit
from pointsman.placement.estimate.estimating import largest
from tests.placement.estimate.models import (
    TINY_CONFIG,
    TINY_GGUF,
    GgufWriter,
    decoder_shapes,
    write_known,
    write_model,
    write_safetensors,
)

GIB = 1 << 30


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_known(tmp_path, "llama-8b")


@pytest.mark.parametrize(
    ("engine", "dtype", "bits"),
    [
        ("vllm", "auto", 16), ("vllm", "fp8", 8), ("vllm", "FP8_E5M2", 8), ("vllm", "float32", 32),
        ("llama.cpp", "auto", 16), ("llama.cpp", "q8_0", 8.5), ("llama.cpp", "q4_0", 4.5), ("llama.cpp", "f32", 32),
    ],
)  # fmt: skip
def test_data_types_of_the_cache(engine: str, dtype: str, bits: float, llama: Path) -> None:
    found = estimate(llama, context=4096, kv_dtype=dtype, engine=engine)
    assert found.need.kv_bytes == 65536 * 4096 * bits / 8


def test_what_is_unknown_is_named(llama: Path) -> None:
    with pytest.raises(UnknownName, match='unknown data type of a KV cache "fp9"; did you mean "fp8"'):
        estimate(llama, context=4096, kv_dtype="fp9")
    with pytest.raises(UnknownName, match='unknown engine "vlm"; did you mean "vllm"'):
        estimate(llama, context=4096, engine="vlm")
    with pytest.raises(PointsmanError, match="context must be at least 1, found 0"):
        estimate(llama, context=0)
    with pytest.raises(PointsmanError, match="cannot be divided among 3 GPUs by vllm; sizes: 1, 2, 4"):
        estimate(llama, context=512).parts(tp=3)
    with pytest.raises(PointsmanError, match="has 32 layers: that is too few for 33 pipeline stages"):
        estimate(llama, context=512).parts(pp=33)


@pytest.mark.parametrize(
    ("engine", "context", "concurrency", "kept"),
    [
        ("vllm", 64, 3, 3 * 64),  # the window is not full
        ("vllm", 1024, 3, 3 * 128 + 100),  # and what one step writes
        ("llama.cpp", 4096, 3, 3 * 256),  # whole groups of 256 cells, for each slot
    ],
)
def test_a_window_bounds_what_is_kept(engine: str, context: int, concurrency: int, kept: int, tmp_path: Path) -> None:
    config = TINY_CONFIG | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2}
    folder = write_model(tmp_path, config, decoder_shapes(TINY_CONFIG))
    found = estimate(folder, context=context, concurrency=concurrency, engine=engine, batch_tokens=100)
    per_token = 2 * 160 * 2
    assert found.need.kv_layer_bytes == (kept * per_token, concurrency * context * per_token) * 2


def test_adapters_are_added_to_their_layers(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 16, "target_modules": ["q_proj"]}))
    at = "base_model.model.model.layers"
    shapes = {f"{at}.{layer}.self_attn.q_proj.lora_{part}.weight": (16, 4096) for layer in (0, 5) for part in "AB"}
    write_safetensors(folder / "adapter_model.safetensors", shapes, "F32")
    alone, twice = estimate(llama, context=512).need, estimate(llama, context=512, adapters=[folder, folder]).need
    more = [after - before for before, after in zip(alone.layer_bytes, twice.layer_bytes, strict=True)]
    # Two adapters of two matrices each; the file has 32 bits, engines compute in 16.
    assert {layer: size for layer, size in enumerate(more) if size} == dict.fromkeys((0, 5), 2 * 2 * 16 * 4096 * 2)


def test_an_adapter_as_gguf(tmp_path: Path) -> None:
    lora = GgufWriter().entry("general.type", "adapter").entry("general.architecture", "llama")
    path = lora.tensor("blk.3.attn_q.weight.lora_a", (160, 8), 1, 160 * 8 * 2).write(tmp_path / "lora.gguf")
    alone, more = estimate(TINY_GGUF, context=512), estimate(TINY_GGUF, context=512, adapters=[path])
    assert more.need.layer_bytes[3] - alone.need.layer_bytes[3] == 160 * 8 * 2
    assert more.adapters[0].rank == 8
    with pytest.raises(UnreadableModel, match=r"expected an adapter, found general\.type"):
        estimate(TINY_GGUF, context=512, adapters=[TINY_GGUF])
    with pytest.raises(UnreadableModel, match="none cannot be read as a model: there is no such file or folder"):
        estimate(TINY_GGUF, context=512, adapters=[tmp_path / "none"])


def test_a_draft_model_adds_its_weights_and_its_cache(llama: Path, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", TINY_CONFIG, decoder_shapes(TINY_CONFIG))
    alone, both = estimate(llama, context=512), estimate(llama, context=512, draft=draft)
    other = estimate(draft, context=512)
    assert both.need.weight_bytes == alone.need.weight_bytes + other.need.weight_bytes
    assert both.need.kv_bytes == alone.need.kv_bytes + other.need.kv_bytes
    assert both.need.kv_layer_bytes[:-1] == alone.need.kv_layer_bytes[:-1]
    [row] = [part for part in both.parts() if part.of]
    assert (row.name, row.bytes, row.of) == ("draft", other.need.weight_bytes, "weights")


def test_stages_hold_everything_once(llama: Path) -> None:
    found = estimate(llama, context=8192, concurrency=4)
    stages = found.stages(tp=2, pp=4)
    assert sum(stages) == 32
    assert max(stages) - min(stages) <= 3
    assert found.gpu_bytes(tp=2, pp=4) == sum(part.gpu_bytes or 0 for part in found.parts(tp=2, pp=4))
    assert found.gpu_bytes(2, 4) < found.gpu_bytes(2, 2) < found.gpu_bytes(2, 1) < found.gpu_bytes(1, 1)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("size", [16, 24, 40, 80])
def test_the_largest_that_fits_fits_and_no_larger_one(tp: int, pp: int, size: int, llama: Path) -> None:
    found = estimate(llama, context=8192, concurrency=4)
    one = fit(found, size * GIB, tp, pp)
    stages = found.stages(tp, pp)

    def takes(**changes: int) -> int:
        need, start, most = found.served(**changes).need, 0, 0
        for count in stages:
            most, start = max(most, need.stage_bytes(start, start + count, tp)), start + count
        return most

    assert one.fits == (found.gpu_bytes(tp, pp) <= one.usable_bytes)
    for name, value, bound in (("context", one.context, 131072), ("concurrency", one.concurrency, 1 << 16)):
        assert value == 0 or takes(**{name: value}) <= one.usable_bytes
        assert value == bound or takes(**{name: value + 1}) > one.usable_bytes
    for gpus in found.need.tensor_parallel_sizes:
        assert (found.need.gpu_bytes(gpus) <= one.usable_bytes) == (one.gpus is not None and gpus >= one.gpus)


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_largest(bound: int, most: int) -> None:
    assert largest(lambda number: number <= bound, most) == min(bound, most)


@given(st.integers(1, 1 << 20), st.integers(1, 512), st.sampled_from(["vllm", "llama.cpp"]))
def test_more_is_never_less(context: int, concurrency: int, engine: str) -> None:
    def takes(context: int, concurrency: int) -> int:
        need = estimate(TINY_GGUF, context=context, concurrency=concurrency, engine=engine).need
        assert min(need.kv_bytes, need.activation_bytes, need.cpu_bytes) > 0
        return need.gpu_bytes()

    assert takes(context, concurrency) <= min(takes(context * 2, concurrency), takes(context, concurrency + 1))

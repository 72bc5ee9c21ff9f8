"""GGUF: the tiny model, files that tests write, and files that are damaged."""

import os
import shutil
import struct
from itertools import pairwise
from pathlib import Path

import pytest

from pointsman.placement.estimate import UnreadableModel, estimate, read_model
from pointsman.placement.estimate.gguf import GGML_TYPES, read_gguf
from tests.placement.estimate.models import TINY_CONFIG, TINY_GGUF, GgufWriter, decoder_shapes, write_model

LLAMA = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 64,
    "llama.feed_forward_length": 256, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.context_length": 4096,
}  # fmt: skip


def writer(changes: dict[str, object] | None = None, version: int = 3) -> GgufWriter:
    made = GgufWriter(version)
    for key, value in (LLAMA | (changes or {})).items():
        if value is not None:
            made.entry(key, value)
    return made.tensor("token_embd.weight", (64, 100), 0, 64 * 100 * 4)


def test_the_tiny_model() -> None:
    found = estimate(TINY_GGUF, context=1024)
    shape, model = found.architecture, found.model
    assert (shape.name, shape.layers, shape.hidden, shape.intermediate) == ("llama", 4, 160, 448)
    assert (shape.attention_heads, shape.kv_heads, shape.key_dim, shape.vocabulary) == (5, (5,) * 4, 32, 1536)
    assert (model.parameters, model.largest_dtype, model.tied) == (1_516_960, "Q8_0", True)
    assert found.engine.name == "llama.cpp"
    assert found.need.kv_bytes == 4 * 2 * 160 * 2 * 1024
    assert found.need.tensor_parallel_sizes == (1,)
    assert abs(TINY_GGUF.stat().st_size - model.weight_bytes) < 64 << 10  # the header is the difference


def test_both_formats_of_the_tiny_model_agree(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", TINY_CONFIG, decoder_shapes(TINY_CONFIG), dtype="F16")
    plain, quantised = read_model(folder), read_model(TINY_GGUF)
    assert plain.parameters == quantised.parameters
    for name in ("layers", "hidden", "intermediate", "attention_heads", "kv_heads", "key_dim", "vocabulary", "windows"):
        assert getattr(plain.architecture, name) == getattr(quantised.architecture, name)


def test_every_layer_has_its_own_size() -> None:
    need = estimate(TINY_GGUF, context=512).need
    sizes = [need.offloaded(layers)[0] for layers in range(1, need.layers + 1)]
    steps = {after - before for before, after in pairwise(sizes[:-1])}
    assert steps == {need.layer_bytes[0] + need.kv_layer_bytes[0]}


@pytest.mark.parametrize("number", GGML_TYPES)
def test_every_type_of_the_table_is_sized_in_blocks(number: int, tmp_path: Path) -> None:
    kind = GGML_TYPES[number]
    size = 512 // kind.block * kind.bytes
    path = writer().tensor("blk.0.ffn_up.weight", (512,), number, size).write(tmp_path / "m.gguf")
    assert read_gguf(path).tensors[-1][2:] == (kind.name, size)
    assert read_model(path).layer_bytes == (size, 0)


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions(version: int, tmp_path: Path) -> None:
    file = read_gguf(writer(version=version).write(tmp_path / "m.gguf"))
    assert (file.version, file.metadata["llama.context_length"]) == (version, 4096)


def test_a_model_in_parts(tmp_path: Path) -> None:
    first = writer().write(tmp_path / "m-00001-of-00002.gguf")
    second = GgufWriter().tensor("blk.1.ffn_up.weight", (64, 256), 1, 64 * 256 * 2)
    with pytest.raises(UnreadableModel, match=r"all 2 parts of it, found no m-00002-of-00002\.gguf beside it"):
        read_model(first)
    second.write(tmp_path / "m-00002-of-00002.gguf")
    assert read_model(first) == read_model(tmp_path)
    assert read_model(first).layer_bytes == (0, 64 * 256 * 2)


def test_shapes_that_differ_by_layer(tmp_path: Path) -> None:
    path = writer({"llama.attention.head_count_kv": [2, 0], "llama.feed_forward_length": [128, 512]})
    shape = read_model(path.write(tmp_path / "m.gguf")).architecture
    assert (shape.kv_heads, shape.intermediate) == ((2, 0), 512)
    assert [shape.kv_numbers(layer) for layer in (0, 1)] == [2 * 2 * 16, 0]


def renamed(name: str, **more: object) -> dict[str, object]:
    """The metadata above, as another family has it."""
    own = {key.replace("llama.", f"{name}."): value for key, value in LLAMA.items()}
    gone = {key: None for key in LLAMA if key.startswith("llama.")}
    return {**gone, **own, "general.architecture": name, **{f"{name}.{key}": value for key, value in more.items()}}


def test_windows_by_family_and_by_pattern(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    window = {"attention.sliding_window": 512}
    known = read_model(writer(renamed("gemma2", **window)).write(path))
    assert known.architecture.windows == (512, None)
    told = read_model(
        writer(renamed("new", **window, **{"attention.sliding_window_pattern": [False, True]})).write(path)
    )
    assert told.architecture.windows == (None, 512)
    unknown = read_model(writer(renamed("new", **window)).write(path))
    assert unknown.architecture.windows == (None, None)
    assert "which layers use the window" in unknown.notes[0]


def test_latent_attention_and_experts(tmp_path: Path) -> None:
    mla = {"attention.kv_lora_rank": 512, "rope.dimension_count": 64, "attention.key_length_mla": 192}
    experts = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 300, "expert_shared_count": 1}
    shape = read_model(writer(renamed("deepseek2", **mla, **experts)).write(tmp_path / "m.gguf")).architecture
    assert (shape.latent_dim, shape.kv_numbers(0)) == (576, 576)
    assert (shape.experts, shape.experts_used, shape.intermediate) == (8, 2, 900)


def test_an_embedding_model_keeps_nothing(tmp_path: Path) -> None:
    path = writer(renamed("bert", **{"attention.causal": False})).write(tmp_path / "m.gguf")
    found = estimate(path, context=512, concurrency=8)
    assert found.architecture.embeds
    assert (found.need.kv_bytes, found.need.context, found.kv_bytes_per_token) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": None}, "expected general.architecture, the family of the model, found nothing"),
        ({"llama.block_count": None}, "a whole number >= 1 as llama.block_count, found nothing"),
        ({"llama.block_count": "two"}, 'a whole number >= 0 as llama.block_count, found "two"'),
        ({"llama.block_count": 1 << 40}, "at most 10,000 layers, found 1,099,511,627,776"),
        ({"general.alignment": 0}, "a number >= 1 as general.alignment, found 0"),
        ({"general.type": "mmproj"}, "the weights of a language model"),
    ],
)
def test_metadata_that_makes_no_sense(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableModel, match=words):
        read_model(writer(changes).write(tmp_path / "m.gguf"))


def test_files_that_are_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content, words in (
        (b"", "GGUF weights, found fewer than 4 bytes"),
        (b"PK\x03\x04 and so on", 'found a file that begins with "PK'),
        (struct.pack("<4sI", b"GGUF", 1), "version 2 or 3, found version 1"),
        (struct.pack(">4sI", b"GGUF", 3), "found version 3 in big-endian order"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 5), "it is truncated"),
    ):
        path.write_bytes(content)
        with pytest.raises(UnreadableModel, match=words) as raised:
            read_model(path)
        assert str(path) in str(raised.value)
    with pytest.raises(UnreadableModel, match="there is no such file"):
        read_model(tmp_path / "none.gguf")
    with pytest.raises(UnreadableModel, match="with one GGUF file, found neither"):
        read_model(shutil.copytree(tmp_path, tmp_path / "empty", ignore=lambda *_: ["m.gguf", "empty"]))


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    size = TINY_GGUF.stat().st_size
    for length in [*range(0, 400, 7), *range(400, size, 40_001), size - 1]:
        shutil.copy(TINY_GGUF, path)
        os.truncate(path, length)
        with pytest.raises(UnreadableModel):
            read_model(path)


def test_an_unknown_type_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableModel, match='a known data type of tensor "x", found type 77'):
        read_model(writer().tensor("x", (4,), 77, 16).write(tmp_path / "m.gguf"))

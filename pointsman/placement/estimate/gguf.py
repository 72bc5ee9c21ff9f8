"""GGUF: the header of a file, and the model that its metadata describes. The weights are never read.

A model in several files (`-00001-of-00003`) is read through its first file. The others must be in the same folder.
"""

import re
import struct
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pointsman.errors import shown_bytes
from pointsman.parameters import quoted
from pointsman.placement.estimate.architecture import MAX_LAYERS, Architecture, Model, ModelWeights, Tensor
from pointsman.placement.estimate.reading import Fields, Source, UnreadableModel

# The data types of GGUF: numbers per block, and bytes per block


class GgmlType(NamedTuple):
    """A data type, whose numbers are stored in blocks."""

    name: str
    block: int
    bytes: int


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4), 1: GgmlType("F16", 1, 2), 2: GgmlType("Q4_0", 32, 18), 3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22), 7: GgmlType("Q5_1", 32, 24), 8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 36), 10: GgmlType("Q2_K", 256, 84), 11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144), 13: GgmlType("Q5_K", 256, 176), 14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292), 16: GgmlType("IQ2_XXS", 256, 66), 17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98), 19: GgmlType("IQ1_S", 256, 50), 20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110), 22: GgmlType("IQ2_S", 256, 82), 23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1), 25: GgmlType("I16", 1, 2), 26: GgmlType("I32", 1, 4), 27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8), 29: GgmlType("IQ1_M", 256, 56), 30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54), 35: GgmlType("TQ2_0", 256, 66), 39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
}  # fmt: skip


MAGIC = b"GGUF"
MAX_TEXT_BYTES = 4096
"""Longer texts are skipped: chat templates say nothing about memory."""
MAX_LIST_LENGTH = 16_384
"""Longer lists are skipped. Lists with an entry per layer matter; lists with an entry per vocabulary entry do not."""

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_TEXT, _LIST = 8, 9
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class Skipped(NamedTuple):
    """Stands for a list that was too long to keep."""

    length: int


class GgufTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int

    @property
    def counted(self) -> Tensor:
        return Tensor(self.name, self.bytes, prod(self.shape))


class GgufFile(NamedTuple):
    """The header, combined from all parts."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file, combined from all of its parts. Raises UnreadableModel for any other file."""
    files = [_read_one(part) for part in parts_of(path)]
    return files[0]._replace(path=path, tensors=tuple(tensor for file in files for tensor in file.tensors))


def parts_of(path: Path) -> list[Path]:
    """All parts of a file, in order. `path` is any one of the parts."""
    found = _PART.fullmatch(path.name)
    if found is None or int(found[3]) == 0:
        return [path]
    count = int(found[3])
    parts = []
    for number in range(1, count + 1):
        part = path.with_name(f"{found[1]}-{number:05d}-of-{found[3]}.gguf")
        if not part.exists():
            raise UnreadableModel(path, f"all {count} parts of it", f"no {part.name} beside it")
        parts.append(part)
    return parts


def _read_one(path: Path) -> GgufFile:
    with Source(path) as source:
        magic = source.take(4, "the mark GGUF") if source.size >= 4 else b""
        if magic != MAGIC:
            source.fail(
                "GGUF weights", f"a file that begins with {shown_bytes(magic)}" if magic else "fewer than 4 bytes"
            )
        version = _number(source, "<I", "the version")
        if version not in (2, 3):
            big = struct.unpack(">I", struct.pack("<I", version))[0]
            found = f"{big} in big-endian order" if big in (2, 3) else str(version)
            source.fail("GGUF of version 2 or 3", f"version {found}")
        tensor_count, entries = _number(source, "<Q", "the number of tensors"), _number(source, "<Q", "of entries")
        # The minimum of an entry: a length, a type and a byte. Of a tensor: a length, a rank, a type and an offset.
        source.demand(entries * 13 + tensor_count * 24, f"{entries:,} entries and {tensor_count:,} tensors")
        metadata = {}
        for _ in range(entries):
            key = _text(source, "the name of an entry")
            metadata[key] = _value(source, _number(source, "<I", "the type of an entry"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or not 0 < alignment <= 1 << 30:
            source.fail("a number >= 1 as general.alignment", quoted(alignment, 80))
        rows = [_row(source) for _ in range(tensor_count)]
        start = -(-source.position // alignment) * alignment
        tensors = tuple(_checked(source, rows, start))
    return GgufFile(path, version, metadata, tensors)


def _row(source: Source) -> tuple[str, tuple[int, ...], int, int]:
    name = _text(source, "the name of a tensor")
    rank = _number(source, "<I", "the number of dimensions")
    if rank > 8:
        source.fail(f'at most 8 dimensions of tensor "{name[:80]}"', f"{rank:,}")
    shape = struct.unpack(f"<{rank}Q", source.take(8 * rank, "dimensions"))
    return name, shape, _number(source, "<I", "the type of a tensor"), _number(source, "<Q", "an offset")


def _checked(source: Source, rows: list[tuple[str, tuple[int, ...], int, int]], start: int) -> Iterator[GgufTensor]:
    for name, shape, number, offset in rows:
        kind = GGML_TYPES.get(number)
        if kind is None:
            source.fail(f'a known data type of tensor "{name[:80]}"', f"type {number}")
        size = -(-prod(shape) // kind.block) * kind.bytes
        if start + offset + size > source.size:
            end = f'{start + offset + size:,} bytes, the end of tensor "{name[:80]}"'
            source.fail(end, f"a file of {source.size:,}; it is truncated")
        yield GgufTensor(name, shape, kind.name, size)


def _value(source: Source, kind: int, depth: int = 0) -> Any:
    if kind in _SCALARS:
        return _number(source, _SCALARS[kind], "a value")
    if kind == _TEXT:
        return _text(source, "a text", MAX_TEXT_BYTES)
    if kind != _LIST or depth > 4:
        source.fail("a known type of value", f"type {kind}" if kind != _LIST else "lists in lists in lists")
    inner, length = _number(source, "<I", "the type of a list"), _number(source, "<Q", "the length of a list")
    if inner in _SCALARS:
        form = _SCALARS[inner]
        size = length * struct.calcsize(form)
        if length > MAX_LIST_LENGTH:
            source.skip(size, f"a list of {length:,}")
            return Skipped(length)
        return list(struct.unpack(f"<{length}{form[1]}", source.take(size, f"a list of {length:,}")))
    source.demand(length * 8, f"a list of {length:,}")
    values: list[Any] | None = [] if length <= MAX_LIST_LENGTH and inner != _TEXT else None
    for _ in range(length):
        if inner == _TEXT:
            source.skip(_number(source, "<Q", "the length of a text"), "a text")
        else:
            value = _value(source, inner, depth + 1)
            if values is not None:
                values.append(value)
    return Skipped(length) if values is None else values


def _number(source: Source, form: str, what: str) -> Any:
    [found] = struct.unpack(form, source.take(struct.calcsize(form), what))
    return found


def _text(source: Source, what: str, longest: int | None = None) -> str:
    length = _number(source, "<Q", f"the length of {what}")
    if longest is not None and length > longest:
        source.skip(length, what)
        return ""
    source.demand(length, what)
    if longest is None and length > 65_535:
        source.fail(f"{what} of at most 65,535 bytes", f"{length:,}")
    return source.take(length, what).decode("utf-8", "replace")


# The model that a file describes


EMBEDDERS = frozenset(
    {"bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert"}
    | {"gemma-embedding", "t5encoder"}
)
"""Families that read the whole text in one step and keep no cache."""
WINDOW_EVERY = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "llama4": 4, "exaone4": 4, "olmo2": 4,
}  # fmt: skip
"""Sizes of groups of layers, by family. In each group, only the last layer attends beyond the window."""


def gguf_model(path: Path) -> Model:
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
    if layers > MAX_LAYERS:
        raise UnreadableModel(file.path, f"at most {MAX_LAYERS:,} layers", f"{layers:,}")
    hidden = fields.needed("embedding_length")
    heads_of_layers = fields.wholes("attention.head_count")
    heads = max(heads_of_layers, default=0) if heads_of_layers else fields.whole("attention.head_count") or 0
    kv_heads = fields.wholes("attention.head_count_kv")
    if kv_heads is None or len(kv_heads) != layers:
        given = None if kv_heads else fields.whole("attention.head_count_kv")
        kv_heads = [heads if given is None else given] * layers
    dim = hidden // heads if heads else 0
    lora_rank = fields.whole("attention.kv_lora_rank")
    # Older files have full keys and values for every head instead of the latent cache.
    latent = bool(lora_rank) and fields.whole("attention.key_length_mla") is not None
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
        embeds=name in EMBEDDERS or fields.get("attention.causal") is False,
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
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == layers:
        return tuple(window if slides else None for slides in pattern)
    every = pattern if isinstance(pattern, int) and pattern > 0 else WINDOW_EVERY.get(name)
    if every is None:
        notes.append(f"which layers use the window of {window:,} tokens is not known for {name}; counted as none")
        return (None,) * layers
    return tuple(window if layer % every < every - 1 else None for layer in range(layers))

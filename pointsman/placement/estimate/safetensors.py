"""Headers of safetensors files: names, types, shapes and sizes of tensors. The weights are never read."""

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pointsman.parameters import quoted
from pointsman.placement.estimate.architecture import MAX_LAYERS, tensor_layer
from pointsman.placement.estimate.gguf import read_gguf
from pointsman.placement.estimate.reading import MAX_JSON_BYTES, Fields, Source, UnreadableModel, json_object

INDEX = "model.safetensors.index.json"
DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64,
    "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64,
}  # fmt: skip


class Stored(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def numbers(self) -> int:
        return prod(self.shape)


def read_safetensors(path: Path) -> list[Stored]:
    """The tensors in one file. Raises UnreadableModel if the file is not safetensors, or is cut off at its end."""
    with Source(path) as source:
        length = int.from_bytes(source.take(8, "the length of the header"), "little")
        if length > MAX_JSON_BYTES:
            source.fail(f"a header of at most {MAX_JSON_BYTES:,} bytes", f"{length:,}")
        header = json_object(path, source.take(length, "the header"))
        data_bytes = source.left
    header.pop("__metadata__", None)
    return [_stored(path, name, entry, data_bytes) for name, entry in header.items()]


def _stored(path: Path, name: str, entry: Any, data_bytes: int) -> Stored:
    what = f'tensor "{name[:80]}"'
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _wholes(fields.get("shape")), _wholes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise UnreadableModel(path, f"dtype, shape and data_offsets of {what}", quoted(entry, 120))
    start, end = offsets
    stored = Stored(name, dtype, tuple(shape), end - start)
    bits = DTYPE_BITS.get(dtype)
    if start > end or (bits is not None and -(-stored.numbers * bits // 8) != stored.bytes):
        found = f"the bytes from {start:,} to {end:,}"
        raise UnreadableModel(path, f"{what} to be {dtype} of shape {shape[:8]}", found)
    if end > data_bytes:
        found = f"{data_bytes:,} bytes after the header; it is truncated"
        raise UnreadableModel(path, f"{end:,} bytes, the end of {what}", found)
    return stored


def _wholes(value: Any) -> list[int] | None:
    if not isinstance(value, list) or len(value) > 64:
        return None
    return value if all(type(one) is int and 0 <= one < 1 << 63 for one in value) else None


def read_weights(folder: Path) -> list[Stored]:
    """All tensors in the files that `weight_files` finds in a model's folder."""
    return [tensor for file in weight_files(folder) for tensor in read_safetensors(file)]


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights: those in the index, else model.safetensors, else all; empty if there are none."""
    index = folder / INDEX
    if index.exists():
        names = json_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise UnreadableModel(index, "weight_map, a file for each tensor", quoted(names, 80))
        files = [folder / name for name in sorted(set(names.values()))]
        for file in files:
            if file.parent != folder or not file.exists():
                raise UnreadableModel(index, f"{file.name} beside it, which holds weights", "no such file")
        return files
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    # Mistral ships the same weights again as consolidated.safetensors; adapters are named explicitly.
    others = ("consolidated", "adapter_model")
    return [file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith(others)]


# LoRA adapters, from the headers of their files.


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter that is loaded together with the model."""

    name: str
    rank: int
    layer_bytes: tuple[int, ...]
    other_bytes: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.layer_bytes) + self.other_bytes


def read_adapter(path: Path) -> Adapter:
    """Read an adapter from a folder with adapter_config.json and adapter_model.safetensors, or from a GGUF file."""
    if path.suffix == ".gguf":
        file = read_gguf(path)
        if file.metadata.get("general.type") != "adapter":
            raise UnreadableModel(path, "an adapter", f"general.type {quoted(file.metadata.get('general.type'))}")
        sizes = [(tensor.name, tensor.bytes) for tensor in file.tensors]
        rank = max((min(tensor.shape) for tensor in file.tensors if len(tensor.shape) == 2), default=0)
        return _adapter(path.stem, rank, sizes)
    if not path.exists():
        raise UnreadableModel(path, why="there is no such file or folder")
    if not path.is_dir():
        raise UnreadableModel(path, f"an adapter: a folder with {CONFIG} and {WEIGHTS}, or a GGUF file", "neither")
    rank = Fields(path / CONFIG, json_object(path / CONFIG)).needed("r")
    stored = read_safetensors(path / WEIGHTS)
    # Engines keep adapters in 16 bits, whatever data type the file has.
    return _adapter(path.name, rank, [(one.name, min(one.bytes, 2 * one.numbers)) for one in stored])


def _adapter(name: str, rank: int, sizes: list[tuple[str, int]]) -> Adapter:
    by_layer: Counter[int] = Counter()
    other = 0
    for tensor, size in sizes:
        layer = tensor_layer(tensor)
        if layer is None or layer >= MAX_LAYERS:
            other += size
        else:
            by_layer[layer] += size
    layers = range(max(by_layer, default=-1) + 1)
    return Adapter(name=name, rank=rank, layer_bytes=tuple(by_layer[one] for one in layers), other_bytes=other)

"""LoRA adapters, from the headers of their files."""

from pathlib import Path

import msgspec

from pointsman.placement.estimate.architecture import MAX_LAYERS, tensor_layer
from pointsman.placement.estimate.gguf import read_gguf
from pointsman.placement.estimate.reading import Fields, UnreadableModel, json_object
from pointsman.placement.estimate.safetensors import read_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter, loaded together with the model."""

    name: str
    rank: int
    layer_bytes: tuple[int, ...]
    other_bytes: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.layer_bytes) + self.other_bytes


def read_adapter(path: Path) -> Adapter:
    """From a folder of adapter_config.json and adapter_model.safetensors, or a GGUF file."""
    if path.suffix == ".gguf":
        file = read_gguf(path)
        if file.metadata.get("general.type") != "adapter":
            raise UnreadableModel(path, "an adapter", f"general.type {file.metadata.get('general.type')!r}"[:120])
        sizes = [(tensor.name, tensor.bytes) for tensor in file.tensors]
        rank = max((min(tensor.shape) for tensor in file.tensors if len(tensor.shape) == 2), default=0)
        return _adapter(path.stem, rank, sizes)
    if not path.is_dir():
        raise UnreadableModel(path, f"an adapter: a folder with {CONFIG} and {WEIGHTS}, or a GGUF file", "neither")
    rank = Fields(path / CONFIG, json_object(path / CONFIG)).needed("r")
    stored = read_safetensors(path / WEIGHTS)
    # Engines keep adapters in 16 bits, whatever the file has.
    return _adapter(path.name, rank, [(one.name, min(one.bytes, 2 * one.numbers)) for one in stored])


def _adapter(name: str, rank: int, sizes: list[tuple[str, int]]) -> Adapter:
    by_layer: dict[int, int] = {}
    other = 0
    for tensor, size in sizes:
        layer = tensor_layer(tensor)
        if layer is None or layer >= MAX_LAYERS:
            other += size
        else:
            by_layer[layer] = by_layer.get(layer, 0) + size
    layers = range(max(by_layer, default=-1) + 1)
    return Adapter(name=name, rank=rank, layer_bytes=tuple(by_layer.get(one, 0) for one in layers), other_bytes=other)

"""Known GPU models: their vendor, and the memory that their driver reports.

Drivers report less than the name says: an L4 "24GB" has 22.5 GiB. A model is known only if every word of its name is
accounted for, so that an RTX 3080 Ti is never mistaken for an RTX 3080.
"""

import re
from functools import lru_cache

import msgspec

MIB = 2**20


class GpuModel(msgspec.Struct, frozen=True):
    name: str
    vendor: str
    nominal_gb: int
    """Gigabytes, as in the name of the model."""
    memory_bytes: int

    @property
    def full_name(self) -> str:
        return f"{self.name} {self.nominal_gb}GB"


_GENERATIONS = {
    "blackwell": ("B200", "RTX PRO", "RTX 50"),
    "hopper": ("H200", "H100", "H20", "GH200"),
    "ada": ("L40", "L4", "RTX 6000 Ada", "RTX 40"),
    "ampere": ("A100", "A40", "A30", "A10", "RTX A", "RTX 30"),
    "turing": ("T4",),
    "volta": ("V100",),
    "cdna4": ("MI355",),
    "cdna3": ("MI325", "MI300"),
    "cdna2": ("MI250", "MI210"),
    "cdna1": ("MI100",),
    "rdna3": ("RX 79",),
}
"""Generations by the beginnings of model names. For each vendor, the newest come first."""


def _generation(name: str) -> str:
    starts = [(start, generation) for generation, names in _GENERATIONS.items() for start in names]
    found = [(len(start), generation) for start, generation in starts if name.startswith(start)]
    return max(found, default=(0, ""))[1]


def _models(vendor: str, *rows: tuple[str, int, int]) -> tuple[GpuModel, ...]:
    return tuple(GpuModel(name, vendor, gb, mib * MIB) for name, gb, mib in rows)


KNOWN_GPUS: tuple[GpuModel, ...] = (
    *_models(
        "nvidia",
        ("B200", 180, 183359),
        ("H200", 141, 143771),
        ("H100", 80, 81559),
        ("H100 NVL", 94, 95830),
        ("H20", 96, 97871),
        ("GH200", 96, 97871),
        ("A100", 40, 40960),
        ("A100", 80, 81920),
        ("A40", 48, 46068),
        ("A30", 24, 24576),
        ("A10G", 24, 23028),
        ("A10", 24, 23028),
        ("L40S", 48, 46068),
        ("L40", 48, 46068),
        ("L4", 24, 23034),
        ("T4", 16, 15360),
        ("V100", 16, 16384),
        ("V100", 32, 32768),
        ("RTX PRO 6000", 96, 97887),
        ("RTX 6000 Ada", 48, 49140),
        ("RTX A6000", 48, 49140),
        ("RTX A5000", 24, 24564),
        ("RTX A4000", 16, 16376),
        ("RTX 5090", 32, 32607),
        ("RTX 5080", 16, 16303),
        ("RTX 5070 Ti", 16, 16303),
        ("RTX 4090", 24, 24564),
        ("RTX 4080", 16, 16376),
        ("RTX 4070", 12, 12282),
        ("RTX 4060", 8, 8188),
        ("RTX 3090", 24, 24576),
        ("RTX 3090 Ti", 24, 24564),
        ("RTX 3080", 10, 10240),
        ("RTX 3060", 12, 12288),
    ),
    *_models(
        "amd",
        ("MI355X", 288, 294896),
        ("MI325X", 256, 262128),
        ("MI300X", 192, 196592),
        ("MI250X", 64, 65520),  # each of its two halves counts as a GPU
        ("MI250", 64, 65520),
        ("MI210", 64, 65520),
        ("MI100", 32, 32752),
        ("RX 7900 XTX", 24, 24560),
    ),
)

_IGNORED_WORDS = frozenset({
    "nvidia", "geforce", "tesla", "amd", "instinct", "radeon", "gpu", "tensor", "core", "generation", "blackwell",
    "server", "workstation", "edition", "pcie", "oam", "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6",
    "hbm", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x", "gddr7",
})  # fmt: skip
"""Words in names that say nothing about the size of the memory."""

_SIZE = re.compile(r"(\d+)g(?:i?b)?")
_MAKERS = (
    ("nvidia", re.compile(r"\b(nvidia|geforce|tesla|quadro|rtx|gtx)\b")),
    ("amd", re.compile(r"\b(amd|radeon|instinct|rx|mi\d+\w?)\b")),
    ("apple", re.compile(r"\b(apple|m\d (pro|max|ultra)|m\d)\b")),
    ("intel", re.compile(r"\b(intel|arc|gaudi\d?)\b")),
)


def known_gpu(model: str) -> GpuModel | None:
    """The model that a name means. Names may be as drivers or people write them. None if unknown or ambiguous."""
    found = _meant(model)
    return found[0] if len(found) == 1 else None


def _meant(model: str) -> list[GpuModel]:
    """The models that a name may mean."""
    words = set(_words(model))
    size = next((int(found[1]) for word in words if (found := _SIZE.fullmatch(word))), None)
    words = {word for word in words if word not in _IGNORED_WORDS and not _SIZE.fullmatch(word)}
    return [one for one in KNOWN_GPUS if set(_words(one.name)) == words and size in (None, one.nominal_gb)]


@lru_cache(maxsize=4096)
def is_model(model: str, names: frozenset[str]) -> bool:
    """Whether one of these names means this model. Names may be as drivers or people write them."""
    known = known_gpu(model)
    return model in names or (known is not None and any(known in _meant(name) for name in names))


@lru_cache(maxsize=4096)
def gpu_generation(model: str) -> str:
    """The architecture of a model, by the beginning of its name; empty if it is unknown."""
    return _generation(short_gpu_name(model))


def generation_rank(model: str) -> int:
    """A number that is larger for newer architectures; 0 if the architecture is unknown."""
    generations = list(_GENERATIONS)
    found = gpu_generation(model)
    return len(generations) - generations.index(found) if found else 0


def gpu_vendor(model: str) -> str:
    """The vendor, read from the name; empty if the name does not say."""
    known = known_gpu(model)
    if known is not None:
        return known.vendor
    words = " ".join(_words(model))
    return next((vendor for vendor, pattern in _MAKERS if pattern.search(words)), "")


def short_gpu_name(model: str) -> str:
    """The short name: NVIDIA H100 80GB HBM3 is an H100 80GB."""
    known = known_gpu(model)
    if known is not None:
        return known.full_name
    return " ".join(word for word in model.split() if word.lower() not in _IGNORED_WORDS) or model


def _words(name: str) -> list[str]:
    """The words in a name. 80 GB, 80GB and 80-GB count as the same word."""
    joined = re.sub(r"(\d)\s+(g(?:i?b)\b)", r"\1\2", name.lower())
    return re.findall(r"[a-z0-9]+", joined)

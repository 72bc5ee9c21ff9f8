"""How a model is to be served, and what an engine makes of that: the seam between files and memory."""

from typing import Protocol

import msgspec

from pointsman.errors import PointsmanError, UnknownName
from pointsman.placement.estimate.architecture import Model

MIB, GIB = 1 << 20, 1 << 30


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of an instance."""

    context: int
    """Tokens of one request, prompt and answer together."""
    concurrency: int = 1
    """Requests that all may have so many at once."""
    kv_dtype: str = "auto"
    batch_tokens: int | None = None
    """Tokens that are computed in one step; None: what the engine does by itself."""
    max_sequences: int | None = None
    """Requests that the engine prepares for; None: what it does by itself, at least `concurrency`."""
    flash_attention: bool = True

    def __post_init__(self) -> None:
        for name in ("context", "concurrency", "batch_tokens", "max_sequences"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 1 << 40:
                raise PointsmanError(f"{name} must be from 1 on, found {value}")


class EngineMemory(Protocol):
    """How one engine uses memory."""

    name: str
    usable_share: float
    """Of a GPU: what it takes at most for weights, KV cache and activations."""
    tensor_parallel: bool

    def kv_bits(self, model: Model, dtype: str) -> float:
        """Bits of one number in the KV cache."""

    def kv_tokens(self, serving: Serving, window: int | None) -> int:
        """Tokens that a layer with this window keeps, for all requests together."""

    def keeps_nothing(self, model: Model) -> bool:
        """Whether there is no KV cache at all."""

    def activation_bytes(self, model: Model, serving: Serving) -> int:
        """On each GPU, for one step."""

    def overhead_bytes(self, model: Model, serving: Serving) -> int:
        """On each GPU, for itself."""

    def host_bytes(self, model: Model, serving: Serving) -> int:
        """Of the machine's memory, wherever the model is."""

    def ends(self, model: Model) -> tuple[int, int]:
        """(bytes with the first layer, bytes with the last) of what is not in a layer."""

    def assumptions(self, model: Model, serving: Serving) -> list[str]:
        """What an estimate for it takes for granted."""


def bits_of(dtype: str, known: dict[str, float]) -> float:
    """Look a data type of the KV cache up."""
    try:
        return known[dtype.lower()]
    except KeyError:
        raise UnknownName("data type of a KV cache", dtype, known) from None

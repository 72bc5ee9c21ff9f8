"""What a model needs: bytes of weights, KV cache, activations and engine, from the model's files.

Enters: a path (a GGUF file, or a Hugging Face folder) and serving parameters. Leaves: an Estimate, whose `need` the
placer uses. The one rule: only headers are read, never weights; assumptions are listed in the notes.
"""

from pointsman.placement.estimate.architecture import Architecture, Model, Tensor
from pointsman.placement.estimate.estimating import (
    Estimate,
    Fit,
    Part,
    estimate,
    fit,
    kv_tokens,
    read_model,
    usable_bytes,
)
from pointsman.placement.estimate.memory import Serving
from pointsman.placement.estimate.reading import UnreadableModel

__all__ = [
    "estimate", "Estimate", "Part", "read_model",
    "Architecture", "Model", "Tensor", "Serving",
    "Fit", "fit", "kv_tokens", "usable_bytes",
    "UnreadableModel",
]  # fmt: skip

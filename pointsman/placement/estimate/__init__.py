"""What a model needs: bytes of weights, KV cache, activations and engine, from the model's own files.

Enters: a path (GGUF, or a folder in the form of Hugging Face) and how it is to be served. Leaves: an Estimate, whose
`need` the placer works with. The one rule: headers are read, weights never; what is assumed is said in the notes.
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

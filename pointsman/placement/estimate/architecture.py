"""What a model is made of: the dimensions that its memory depends on, and the sizes of its tensors."""

import re

import msgspec

MAX_LAYERS = 10_000
"""Maximum number of layers. No model has more, so a file with more is damaged."""


class Tensor(msgspec.Struct, frozen=True, gc=False):
    name: str
    bytes: int
    parameters: int
    """Number of parameters; 0 for scales and other tensors that a quantisation adds."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model. Tuples have one entry per layer."""

    name: str
    """The family of the model, as its files name it: llama, qwen3, deepseek_v2."""
    layers: int
    hidden: int
    intermediate: int
    """Width of the feed-forward part that one token uses. With experts, the sum over all that it is routed to."""
    attention_heads: int
    kv_heads: tuple[int, ...]
    """KV heads of each layer; 0 if the layer keeps nothing per token."""
    key_dim: int
    value_dim: int
    latent_dim: int = 0
    """Numbers that latent attention (MLA) keeps per token and layer, for all heads together; 0 without MLA."""
    windows: tuple[int | None, ...]
    """Tokens that each layer attends to. None means all; 0 means that nothing is kept per token (recurrent, shared)."""
    vocabulary: int
    experts: int = 0
    experts_used: int = 0
    trained_context: int | None = None
    """The longest context that the model was trained for; None if the files do not say."""
    embeds: bool = False
    kv_bits: int | None = None
    """Bits of a KV cache that was quantised with the model."""
    parts: tuple[str, ...] = ()
    """Modalities besides text: vision, audio."""

    def kv_numbers(self, layer: int) -> int:
        """Numbers that a layer keeps for each token."""
        if self.windows[layer] == 0:
            return 0
        return self.latent_dim or self.kv_heads[layer] * (self.key_dim + self.value_dim)


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model as its files describe it: its architecture, and its weights by position."""

    name: str
    architecture: Architecture
    format: str
    """GGUF, safetensors, or config.json only."""
    layer_bytes: tuple[int, ...]
    input_bytes: int
    """Weights before the first layer: embeddings, vision and audio parts."""
    output_bytes: int
    """Weights after the last layer."""
    parameters: int
    largest_dtype: str = ""
    """The data type of most weights."""
    tied: bool = False
    """Whether the embeddings are also the output."""
    notes: tuple[str, ...] = ()
    """Assumptions about what the files do not say."""

    @property
    def weight_bytes(self) -> int:
        return self.input_bytes + sum(self.layer_bytes) + self.output_bytes


_OTHER_MODALITY = re.compile(r"(^|\.)(vision|visual|audio|image|mm_|multi_modal|sound|speech)", re.IGNORECASE)
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block|blk)\.(\d+)\.")
_OUTPUT = re.compile(r"(^|\.)(lm_head|embed_out|output|output_norm|ln_f|final_layernorm|norm_f|norm)\.[a-z_]+$")


class ModelWeights:
    """Sums of tensors by position. Tensors of layers that the model does not use are only counted as unused."""

    def __init__(self, layers: int) -> None:
        self.layers = [0] * layers
        self.input = self.output = self.parameters = self.unused = 0
        self.has_output = False

    def add(self, tensor: Tensor) -> None:
        found = None if _OTHER_MODALITY.search(tensor.name) else _LAYER.search(tensor.name)
        if found is not None:
            layer = int(found[1][:9])
            if layer >= len(self.layers):
                self.unused += tensor.bytes
                return
            self.layers[layer] += tensor.bytes
        elif _OUTPUT.search(tensor.name) and not _OTHER_MODALITY.search(tensor.name):
            self.output += tensor.bytes
            self.has_output |= "norm" not in tensor.name and "ln_f" not in tensor.name
        else:
            self.input += tensor.bytes
        self.parameters += tensor.parameters


def tensor_layer(name: str) -> int | None:
    """The layer that a tensor belongs to, by its name."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1][:9])

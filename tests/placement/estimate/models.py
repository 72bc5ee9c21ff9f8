"""Models with headers and without weights: sparse files of the length that the headers say."""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4}
Shapes = dict[str, tuple[int, ...]]


def write_safetensors(path: Path, shapes: Mapping[str, Sequence[int]], dtype: str = "BF16", **dtypes: str) -> None:
    """A header and a hole. `dtypes`: by the last part of a name, where it is another one."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        kind = dtypes.get(name.rpartition(".")[2], dtype)
        size = SIZES[kind]
        for length in shape:
            size *= length
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + offset)


def write_model(folder: Path, config: Mapping[str, Any], shapes: Shapes, shards: int = 1, dtype: str = "BF16") -> Path:
    """config.json and the weights, in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", shapes, dtype)
        return folder
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        write_safetensors(folder / file, {name: shapes[name] for name in mine}, dtype)
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def decoder_shapes(config: Mapping[str, Any], query_norm: bool = False) -> Shapes:
    """The tensors of Llama and Qwen3, as their checkpoints name them."""
    hidden, feed, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * dim
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (heads * dim, hidden),
            f"{at}self_attn.k_proj.weight": (kv, hidden),
            f"{at}self_attn.v_proj.weight": (kv, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, heads * dim),
            f"{at}mlp.gate_proj.weight": (feed, hidden),
            f"{at}mlp.up_proj.weight": (feed, hidden),
            f"{at}mlp.down_proj.weight": (hidden, feed),
        }
        if query_norm:
            shapes |= {f"{at}self_attn.q_norm.weight": (dim,), f"{at}self_attn.k_norm.weight": (dim,)}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def deepseek_shapes(config: Mapping[str, Any]) -> Shapes:
    """The tensors of DeepSeek-V2-Lite: latent attention, experts from the second layer on."""
    hidden, heads, lora = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    expert = config["moe_intermediate_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (heads * (nope + rope), hidden),
            f"{at}self_attn.kv_a_proj_with_mqa.weight": (lora + rope, hidden),
            f"{at}self_attn.kv_a_layernorm.weight": (lora,),
            f"{at}self_attn.kv_b_proj.weight": (heads * (nope + value), lora),
            f"{at}self_attn.o_proj.weight": (hidden, heads * value),
        }
        feeds = {"mlp.": config["intermediate_size"]}
        if layer >= config["first_k_dense_replace"]:
            shapes[f"{at}mlp.gate.weight"] = (config["n_routed_experts"], hidden)
            feeds = {f"mlp.experts.{number}.": expert for number in range(config["n_routed_experts"])}
            feeds["mlp.shared_experts."] = config["n_shared_experts"] * expert
        for part, size in feeds.items():
            shapes[f"{at}{part}gate_proj.weight"] = shapes[f"{at}{part}up_proj.weight"] = (size, hidden)
            shapes[f"{at}{part}down_proj.weight"] = (hidden, size)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
QWEN_32B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
    "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
DEEPSEEK_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 102400, "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 160, "intermediate_size": 448,
    "num_hidden_layers": 4, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 32, "vocab_size": 1536,
    "max_position_embeddings": 1024, "torch_dtype": "float16", "tie_word_embeddings": True,
}  # fmt: skip
TINY_GGUF = Path(__file__).parents[2] / "models" / "tiny-pydoc-q8_0.gguf"
KNOWN = {"llama-8b": LLAMA_8B, "llama-70b": LLAMA_70B, "qwen3-32b": QWEN_32B, "deepseek-lite": DEEPSEEK_LITE}


def write_known(folder: Path, name: str, shards: int = 4) -> Path:
    """One of the well-known models, as headers."""
    config = KNOWN[name]
    latent = "kv_lora_rank" in config
    shapes = deepseek_shapes(config) if latent else decoder_shapes(config, query_norm=name.startswith("qwen3"))
    return write_model(folder / name, config, shapes, shards)


class GgufWriter:
    """Writes GGUF of version 3 (or another), with tensors that are holes."""

    def __init__(self, version: int = 3) -> None:
        self.version = version
        self._entries: list[bytes] = []
        self._tensors: list[tuple[str, Sequence[int], int, int]] = []

    def entry(self, key: str, value: object) -> "GgufWriter":
        self._entries.append(_text(key) + _typed(value))
        return self

    def tensor(self, name: str, shape: Sequence[int], kind: int, size: int) -> "GgufWriter":
        self._tensors.append((name, shape, kind, size))
        return self

    def write(self, path: Path, cut: int = 0) -> Path:
        """`cut`: so many bytes of the last tensor are missing."""
        head = struct.pack("<4sIQQ", b"GGUF", self.version, len(self._tensors), len(self._entries))
        head += b"".join(self._entries)
        offset = 0
        for name, shape, kind, size in self._tensors:
            head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
            offset += -(-size // 32) * 32
        start = -(-len(head) // 32) * 32
        path.write_bytes(head)
        os.truncate(path, start + offset - cut)
        return path


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _typed(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<IQ", 10, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    assert isinstance(value, list)
    inner = [_typed(one) for one in value] or [struct.pack("<IQ", 10, 0)]
    kind = inner[0][:4]
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + b"".join(one[4:] for one in inner if value)

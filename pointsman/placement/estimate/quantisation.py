"""Quantised Hugging Face models: how many numbers a packed tensor stands for, and how many bytes a number takes."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.placement.estimate.safetensors import DTYPE_BITS, Stored

DTYPES = {
    "float32": 32, "float": 32, "float16": 16, "half": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8,
}  # fmt: skip
_ADDITIONS = (
    "scales", "qzeros", "g_idx", "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale", "k_scale",
    "v_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "absmax", "quant_map", "nested_absmax",
    "nested_quant_map", "_scales", "SCB",
)  # fmt: skip
_PACKED = ("qweight", "weight_packed")


class Quantisation(msgspec.Struct, frozen=True):
    """How the weights of layers are stored; embeddings and output are not quantised by any of these."""

    method: str = ""
    """Empty: they are not quantised."""
    bits: int = 16
    group: int = 0
    """Numbers that share a scale; 0: too many to count."""
    kv_bits: int | None = None

    @property
    def bits_per_number(self) -> float:
        """With the scales (16 bits each, and a zero point of as many bits as a number) of AWQ, GPTQ and the like."""
        return self.bits + (16 + self.bits) / self.group if self.group else float(self.bits)


def quantisation_of(config: Mapping[str, Any], dtype_bits: int) -> Quantisation:
    """What the configuration says: fp8, awq, gptq, bitsandbytes, compressed-tensors, mxfp4, modelopt."""
    told = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(told, dict):
        return Quantisation(bits=dtype_bits)
    method = str(told.get("quant_method") or told.get("quant_algo") or "unknown").lower()
    group = _whole(told.get("group_size") or told.get("q_group_size"))
    bits = _whole(told.get("bits") or told.get("w_bit"))
    scheme = _first_scheme(told)
    if scheme:
        weights = scheme.get("weights")
        weights = weights if isinstance(weights, dict) else {}
        bits, group = bits or _whole(weights.get("num_bits")), group or _whole(weights.get("group_size"))
    if not bits:
        four = told.get("load_in_4bit") or "4" in method
        bits = 4 if four else 8
    if told.get("load_in_4bit") and not group:
        group = 64
    if method == "mxfp4":
        group = 32
    scheme_of_cache = told.get("kv_cache_scheme")
    kv_bits = _whole(scheme_of_cache.get("num_bits")) if isinstance(scheme_of_cache, dict) else 0
    if "fp8" in str(told.get("kv_cache_quant_algo") or "").lower():
        kv_bits = 8
    return Quantisation(method, min(bits, 32), group, kv_bits or None)


def parameters_of(tensor: Stored, quantisation: Quantisation) -> int:
    """Numbers that a stored tensor stands for."""
    if not quantisation.method:
        return tensor.numbers
    last = tensor.name.rpartition(".")[2]
    if last in _ADDITIONS or last.endswith(("_scales", "_scale_inv")) or ".quant_state." in tensor.name:
        return 0
    bits = DTYPE_BITS.get(tensor.dtype, 8)
    packed = last in _PACKED or last.endswith("_blocks") or (tensor.dtype == "U8" and quantisation.bits < 8)
    return tensor.numbers * bits // quantisation.bits if packed else tensor.numbers


def _first_scheme(told: Mapping[str, Any]) -> dict[str, Any]:
    groups = told.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    return first if isinstance(first, dict) else {}


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 < value < 1 << 20 else 0

"""The buffers that llama.cpp logs at its start (xllamacpp 2026.10), compared to the predicted ones."""

import json
from pathlib import Path

import pytest

from pointsman.placement.estimate import estimate
from tests.placement.estimate.models import TINY_CONFIG

SMOL = TINY_CONFIG | {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
}  # fmt: skip
MODELS = {"tiny": TINY_CONFIG, "SmolLM2": SMOL}
MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "context", "slots", "batch", "flash", "kv_mib", "compute_mib"),
    [
        ("tiny", 512, 1, 256, True, 1.25, 2.35),
        ("tiny", 1024, 4, 256, True, 10.00, 2.60),
        ("tiny", 1024, 4, 512, True, 10.00, 5.21),
        ("tiny", 1024, 4, 1024, True, 10.00, 10.41),
        ("SmolLM2", 512, 1, 256, True, 11.25, 7.57),
        ("SmolLM2", 2048, 4, 256, True, 180.00, 8.32),
        ("SmolLM2", 8192, 1, 64, True, 180.00, 2.83),
        ("SmolLM2", 8192, 1, 2048, True, 180.00, 90.57),
        ("SmolLM2", 512, 64, 256, True, 720.00, 15.07),  # here the logits are largest
        ("tiny", 512, 1, 256, False, 1.25, 4.26),
        ("tiny", 1024, 4, 256, False, 10.00, 7.26),
        ("SmolLM2", 512, 1, 256, False, 11.25, 8.76),
        ("SmolLM2", 8192, 1, 256, False, 180.00, 83.76),
        ("SmolLM2", 8192, 1, 512, False, 180.00, 167.51),
    ],
)
def test_buffers(
    name: str, context: int, slots: int, batch: int, flash: bool, kv_mib: float, compute_mib: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    found = estimate(
        tmp_path,
        context=context,
        concurrency=slots,
        batch_tokens=batch,
        flash_attention=flash,
        engine="llama.cpp",
    )
    output = 4 * found.architecture.vocabulary * slots
    compute = found.need.activation_bytes - output
    assert found.need.kv_bytes == kv_mib * MIB
    assert compute / MIB == pytest.approx(compute_mib, rel=0.005 if flash else 0.08)
    assert compute / MIB >= compute_mib - 0.1

"""Hardware constants and the time of a step."""

import pytest

from pointsman.simulator.performance import KV_TOKENS_IF_UNKNOWN, Hardware, constants, hardware


def test_step_time_follows_the_formula() -> None:
    made_up = Hardware(c0=1.0, cw=2.0, cc=0.5, ca=0.001, ck=0.01, cb=0.1)
    # Without tokens: the constant and reading the weights. With many: computing takes longer than reading.
    assert made_up.step_ms(0, 0.0, 0, 0) == 3.0
    assert made_up.step_ms(4, 0.0, 0, 0) == pytest.approx(1.0 + 2.0 * 2**0.25)
    assert made_up.step_ms(0, 1000.0, 0, 0) == 4.0
    assert made_up.step_ms(0, 0.0, 300, 2) == pytest.approx(6.2)


def test_known_hardware() -> None:
    h100 = hardware("8B|h100_sxm|vllm|tp1")
    assert (h100.c0, h100.cw, h100.kv_tokens) == (1.97829, 4.60645, 449683)
    assert hardware("Qwen3-8B|h100_sxm|vllm|tp1").kv_tokens == KV_TOKENS_IF_UNKNOWN
    assert all(min(one) > 0 for one in constants().values())


def test_unknown_hardware_lists_the_known_names() -> None:
    with pytest.raises(ValueError, match=r'there is no hardware "8B"; known: 8B\|h100_sxm\|vllm\|tp1, '):
        hardware("8B")

"""Constants of the engine model, fitted to timed steps and to a live engine whose constants are known."""

import argparse
import json
import random
from typing import Final

import pytest

from pointsman.cli import lab
from pointsman.engines.simulated import Simulated
from pointsman.errors import PointsmanError
from pointsman.lab.calibrate import PROMPTS, StepTiming, calibrate
from pointsman.simulator.performance import Hardware, hardware
from tests.simulator.servers import serving

L4: Final = "8B|l4|roofline|tp1"
STEPS = ((16, 128.0, 0, 0), (768, 768 * 384.0, 0, 0), (1, 0.0, 40, 1), (4, 0.0, 160, 4))
"""Arguments of `Hardware.step_ms`."""


def steps_of(measured: Hardware, noise: float = 0.0) -> list[StepTiming]:
    rng = random.Random(1)
    steps = [StepTiming.of_prompt(n, measured.step_ms(n, n * n / 2, 0, 0)) for n in PROMPTS]
    answers = ((1, 32), (1, 2048), (1, 6144), (4, 32), (16, 32))
    steps += [StepTiming.of_answers(b, k, measured.step_ms(b, 0.0, b * k, b)) for b, k in answers]
    return [step._replace(ms=step.ms * rng.uniform(1 - noise, 1 + noise)) for step in steps]


@pytest.mark.parametrize("name", ["8B|l40s|vllm|tp1", "70B|h100_sxm|vllm|tp4"])
def test_exact_times_give_the_constants(name: str) -> None:
    known = hardware(name)
    found = calibrate(steps_of(known), known.kv_tokens)
    assert found.worst < 1e-3
    assert found.hardware == pytest.approx(known, rel=0.02)


def test_noise_of_two_percent_leaves_an_error_of_two_percent() -> None:
    known = hardware("8B|a100_sxm|vllm|tp1")
    found = calibrate(steps_of(known, noise=0.02))
    assert found.error < 0.02
    for step in steps_of(known):
        predicted = found.hardware.step_ms(step.tokens, step.attended, step.context, step.decoding)
        assert predicted == pytest.approx(step.ms, rel=0.05)


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(PointsmanError, match="three lengths"):
        calibrate([StepTiming.of_prompt(16, 5.0), StepTiming.of_answers(1, 20, 5.0)])


def test_a_live_engine(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    lab.add(parser.add_subparsers())
    with serving(Simulated(hardware=L4)) as served:
        url = f"http://127.0.0.1:{served.port}"
        options = ["lab", "calibrate", url, "--max-prompt", "1024", "--max-batch", "4", "--repeat", "1"]
        wanted = parser.parse_args(options)
        assert wanted.run(wanted) == 0
    printed = capsys.readouterr()
    assert "error" in printed.err
    found, known = Hardware(**json.loads(printed.out)), hardware(L4)
    for step in STEPS:
        assert found.step_ms(*step) == pytest.approx(known.step_ms(*step), rel=0.25)

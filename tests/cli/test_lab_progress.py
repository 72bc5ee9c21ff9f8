"""The progress of replays: a bar on a terminal, nothing elsewhere."""

import io
import sys

import pytest

from pointsman.cli.lab import BAR, TrialProgress
from pointsman.lab.traffic import Trial, TrialCache, policy_of, run_trials
from tests.lab.traffic.workloads import setting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_grows_during_a_replay_and_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    progress = TrialProgress()
    trial = Trial(source="generate:poisson?rate=50&seconds=30&input=300", policy=policy_of("fifo"), setting=setting())
    run_trials([trial], TrialCache(None), 1, progress.show)
    progress.clear()
    lengths = [line.count("#") for line in shown.getvalue().split("\r\x1b[K")[1:]]
    assert lengths[-1] == 0
    assert lengths[-2] == BAR
    assert len({*lengths[:-1]}) > 3
    assert lengths[:-1] == sorted(lengths[:-1])
    assert "1 of 1 replays, fifo" in shown.getvalue()


def test_nothing_is_shown_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrialProgress()
    progress.show(0.5, 2, "fifo")
    progress.clear()
    assert capsys.readouterr() == ("", "")

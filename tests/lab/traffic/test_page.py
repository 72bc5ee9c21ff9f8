"""The page of a comparison: complete in itself, and right in a real browser."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from pointsman.lab.traffic import (
    TrafficComparison,
    Trial,
    TrialCache,
    bounds_of,
    grid,
    page,
    policy_of,
    recording_of,
    run_trials,
)
from tests.browser import watched
from tests.lab.traffic.workloads import FLEET, conversations, setting, written

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LOOK = """() => {
  const plots = [...document.querySelectorAll("svg")].map(plot => {
    const {width, height} = plot.getBoundingClientRect();
    const parts = [...plot.querySelectorAll("polyline, rect")];
    const strokes = [...plot.querySelectorAll(".line polyline")].map(line => getComputedStyle(line).stroke);
    return {
      width, height,
      drawn: parts.filter(part => part.getBoundingClientRect().width > 0).length,
      lines: strokes.length, colours: new Set(strokes).size,
    };
  });
  const {color, backgroundColor} = getComputedStyle(document.body);
  const page = document.documentElement;
  return [plots, color, backgroundColor, page.scrollWidth - page.clientWidth];
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = written(tmp_path_factory.mktemp("page") / "a<b.jsonl", conversations())
    base = Trial(source=str(file), policy=None, setting=setting())
    trials = grid(base, [policy_of("round-robin"), policy_of("pending-work")], [1.0, 3.0], seeds=2)
    compared = TrafficComparison(run_trials(trials, TrialCache(None), processes=1), bounds_of(base, [1.0, 3.0]))
    return page(compared, recording_of(str(file)).survey(), FLEET, base.objectives)


def test_the_page_needs_nothing_else(report: str) -> None:
    assert "<script" not in report
    assert re.findall(r'(?:src|href)="(?!data:)', report) == []
    assert set(re.findall(r"https?://[^\"' ]+", report)) == {"http://www.w3.org/2000/svg"}, "names no address to load"
    assert "a&lt;b.jsonl" in report
    assert "a<b.jsonl" not in report
    assert "prefers-color-scheme: dark" in report
    # One of attainment; per speed 3 of latencies, 2 over time, and one heat map per policy.
    assert report.count("<svg") == 1 + 2 * (5 + 2)
    for words in ("of bound", "fairness", "GPU-hours", "cost/M tokens", "hit rate %", "rejected %", "t0", "t1"):
        assert words in report


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 700)])
def test_a_browser_shows_its_plots_without_errors(
    report: str, tmp_path: Path, browser: "Browser", scheme: Literal["light", "dark"], width: int
) -> None:
    file = tmp_path / "page.html"
    file.write_text(report, encoding="utf-8")
    with watched(browser, color_scheme=scheme, viewport={"width": width, "height": 1000}) as page:
        page.goto(file.as_uri())
        plots, ink, paper, wide = page.evaluate(LOOK)
    assert len(plots) == 15
    for plot in plots:
        assert plot["width"] > 300
        assert plot["height"] > 80
        assert plot["drawn"] > 2
        assert plot["colours"] >= min(plot["lines"], 2), "each policy has its own"
    assert ink != paper
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    assert wide <= 0, "tables scroll, the page does not"


def test_the_report_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Nothing goes by the order of a set, which differs from process to process, or by an address or the clock."""
    made = []
    for seed in ("1", "2"):
        file = tmp_path / f"{seed}.html"
        command = [
            sys.executable,
            "-m",
            "pointsman",
            "lab",
            "compare",
            "generate:multi-turn?rate=1&seconds=20&tenants=2",
        ]
        command += ["--policy", "power-of-two", "--policy", "default", "--speed", "2", "--fleet", FLEET, "--json"]
        command += ["--no-cache", "--processes", "1", "--html", str(file)]
        told = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True)
        made.append((told.stdout, file.read_bytes()))
    assert made[0] == made[1]

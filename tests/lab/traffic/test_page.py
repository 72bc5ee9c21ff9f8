"""The page of a comparison: complete in itself, and right in a real browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

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
from tests.lab.traffic.workloads import FLEET, conversations, setting, written

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LOOK = """<script>
const plots = [...document.querySelectorAll("svg")].map(one => {
  const box = one.getBoundingClientRect();
  const drawn = [...one.querySelectorAll("polyline, rect")].filter(part => part.getBoundingClientRect().width > 0);
  return [box.width, box.height, drawn.length];
});
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const seen = document.createElement("pre");
seen.id = "seen";
seen.textContent = JSON.stringify({plots, wide});
document.body.append(seen);
</script>"""


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


def test_a_browser_shows_its_plots_without_errors(report: str, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    file = tmp_path / "page.html"
    file.write_text(report.replace("</body>", f"{LOOK}</body>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--enable-logging=stderr", "--window-size=1280,1000", "--dump-dom", file.as_uri()]
    done = subprocess.run([browser, *options], capture_output=True, text=True, timeout=300, check=True)
    assert ":CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout)
    assert found is not None, "the browser has run the script"
    seen = json.loads(found[1])
    assert len(seen["plots"]) == 15
    assert all(width > 300 and height > 80 and drawn > 2 for width, height, drawn in seen["plots"]), seen
    assert seen["wide"] <= 0, "tables scroll, the page does not"

"""The policies that docs/scaling.md shows run in a replay as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest

from pointsman.lab.scaling import Replay, Series, Setting
from pointsman.scaling.limits import ScalingLimits

PAGE = Path(__file__).parents[3] / "docs" / "scaling.md"
HOUR = 6
MONDAY = 4 * 86400.0
"""The first one of the epoch, 0:00."""


def from_the_page(file: str, name: str) -> Any:
    found = re.search(rf"^```python\n(# file: {file}\n.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert found is not None, f"{PAGE} has no {file}"
    namespace: dict[str, Any] = {}
    exec(found[1], namespace)
    return namespace[name]


def replay(rates: list[float], **setting: Any) -> Replay:
    given = {"capacity": 4.0, "start_up_s": 0.0, "interval_s": 600.0, "began": MONDAY} | setting
    limits = ScalingLimits(min_replicas=0, max_replicas=20, initial_replicas=1, down_delay_s=0.0)
    return Replay(Series("chat", 600.0, rates), Setting(**given), limits)


def test_business_hours() -> None:
    """A weekend with a visitor or two, and a Monday with a rush in the evening."""
    business_hours = from_the_page("business_hours.py", "business_hours")
    rates = [2.0] * 24 * HOUR
    rates[20 * HOUR] = 30.0
    found = replay(rates).run(business_hours)
    assert found.problems == 0
    changes = [(since / 3600, target) for since, target, _ in found.line]
    assert changes == [(0, 1), (9, 3), (17, 1), (20, 8), (pytest.approx(20 + 1 / 6), 1)]


def test_business_hours_are_closed_on_sunday() -> None:
    business_hours = from_the_page("business_hours.py", "business_hours")
    assert replay([2.0] * 24 * HOUR, began=MONDAY - 86400).run(business_hours).changes == 0


def test_pages_waiting() -> None:
    """A metric of its own: every request is a scan of 60 pages, and each replica serves four at a time."""
    pages_waiting = from_the_page("pages_waiting.py", "PagesWaiting")()
    metrics = {"pages_waiting": lambda moment: 60.0 * moment.rate}
    found = replay([1.0] * 4 + [4.0] * 4 + [1.0] * 8, metrics=metrics).run(pages_waiting)
    assert found.problems == 0
    assert [target for _, target, _ in found.line] == [1, 3, 12, 3]
    assert found.records[1].why == "240 pages wait, 20 per replica: 12"

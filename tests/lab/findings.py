"""What a check found, in a form that tests can look at."""

from typing import Any

import pytest

from pointsman.lab.check import Broken, check, checker
from pointsman.lab.check.request_promises import POLICY_PROMISES


def found(build: Any, promise: str, examples: int = 200) -> Broken:
    """What was found about this promise; of the others only the cheap ones are tried, to save time."""
    with pytest.MonkeyPatch.context() as patch:
        kept = {name: one for name, one in POLICY_PROMISES.items() if name == promise}
        patch.setattr(checker, "POLICY_PROMISES", kept)
        report = check(build, examples)
    broken = {one.promise: one for one in report.broken}
    assert promise in broken, str(report)
    assert promise not in report.kept
    assert not report.ok
    assert broken[promise].what in str(report)
    return broken[promise]


def lines(broken: Broken) -> list[str]:
    """The rows of the tables of its example: no heads, no rules."""
    rows = [line.split() for line in broken.example.splitlines()]
    return [row[0] for row in rows if row[0].startswith(("r", "i")) and not row[0].endswith("_id")]

"""Each promise of a scaling policy is broken once, and found; what keeps them all is let through."""

import random
import time
from typing import Any

import pytest

from pointsman.lab.check import check
from pointsman.lab.check.report import Broken
from pointsman.scaling import (
    ApplicationView,
    Budget,
    DeploymentView,
    MaxOf,
    Panic,
    QueueDepth,
    Scheduled,
    ScheduleEntry,
    SloAttainment,
    TargetOngoing,
    TokenThroughput,
    Wish,
)


@pytest.mark.parametrize(
    "build",
    [
        TargetOngoing,
        QueueDepth,
        SloAttainment,
        TokenThroughput,
        Panic,
        lambda: Scheduled([ScheduleEntry("0 9 * * mon-fri", 4, 3600.0)]),
        lambda: MaxOf([Panic(), Budget(QueueDepth(), per_month=500.0)]),
    ],
)
def test_what_is_built_in_keeps_every_promise(build: Any) -> None:
    report = check(build, 30)
    assert report.ok, str(report)
    assert report.roles == ["scaling policy"]
    assert len(report.kept) == 7


def half(view: DeploymentView) -> int:
    return round(view.load / 2)


def balance(view: ApplicationView) -> dict[str, int]:
    most = max(round(one.load) for one in view.deployments.values())
    return dict.fromkeys(view.deployments, most)


def unbalanced(view: ApplicationView) -> dict[str, int]:
    return {"third": 1}


def test_a_function_will_do_and_so_will_one_for_a_whole_application() -> None:
    assert check(lambda: half, 30).ok
    report = check(lambda: balance, 30)
    assert report.ok, str(report)
    broken = found(lambda: unbalanced, "answers in every situation")
    assert broken.what == 'it raised UnknownName: unknown node "third"; known: first, second'


def found(build: Any, promise: str) -> Broken:
    """The broken promise of this name."""
    report = check(build, 60)
    broken = [one for one in report.broken if one.promise == promise]
    assert broken, str(report)
    return broken[0]


def divides(view: DeploymentView) -> int:
    return int(view.load // view.replicas)


def below_zero(view: DeploymentView) -> int:
    return view.replicas - 3


def many(view: DeploymentView) -> str:
    return "many"


def falls_silent(view: DeploymentView) -> Any:
    return Wish(2.5) if view.queued else 1  # type: ignore[arg-type]


def writes(view: DeploymentView) -> int:
    view.metrics["mine"] = view.latency_ms  # type: ignore[index]
    return 1


def throws_dice(view: DeploymentView) -> int:
    return random.randint(0, 9)


def keeps_objects(view: DeploymentView) -> int:
    view.state["open"] = {1, 2}
    return 1


def forgets_keys(view: DeploymentView) -> int:
    seen = view.state.setdefault("seen", {})
    seen[7] = 1
    return int(1 / (len(seen) < 2))  # 7 and "7" are two


def flaps(view: DeploymentView) -> int:
    return view.target + 1 if view.load and view.target < 4 else 1


def sleeps(view: DeploymentView) -> int:
    time.sleep(0.6)
    return 1


@pytest.mark.parametrize(
    ("policy", "promise", "what", "example"),
    [
        (divides, "answers in every situation", "it raised ZeroDivisionError", "a view with replicas 0, target 1"),
        (below_zero, "wants a whole number of replicas", "it returned -2", "a view with replicas 1, target 1"),
        (many, "wants a whole number of replicas", "it returned 'many'", "a view with replicas 1, target 1"),
        (falls_silent, "wants a whole number of replicas", "it returned Wish(", "target 1, queued "),
        (writes, "leaves its view alone", "view.metrics was changed", "a view with replicas 1, target 1"),
        (throws_dice, "answers the same to the same view", "two fresh policies answered differently", ""),
        (keeps_objects, "keeps notes that survive a restart", "view.state['open'] is a set: only plain data", ""),
        (forgets_keys, "keeps notes that survive a restart", "after a restart with its own notes it raised", ""),
        (flaps, "comes to rest on a steady load", "with 1 requests here all the time it went to ", "every 10 s"),
    ],
)
def test_what_breaks_a_promise_is_found_with_the_plainest_view(
    policy: Any, promise: str, what: str, example: str
) -> None:
    broken = found(lambda: policy, promise)
    assert broken.what.startswith(what)
    assert example in broken.example


def test_what_is_too_slow_is_not_asked_often() -> None:
    report = check(lambda: sleeps, 200)
    assert [one.promise for one in report.broken] == ["answers within its time limit"]
    assert "an answer after 0.5 s does not count" in report.broken[0].what
    assert report.kept == []

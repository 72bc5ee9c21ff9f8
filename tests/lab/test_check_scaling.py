"""Each promise of a scaling policy is broken once, and found; what keeps them all is let through."""

import random
import time
from threading import Lock
from typing import Any

import pytest

from pointsman.lab.check import check, checker
from pointsman.lab.check.report import Broken
from pointsman.scaling import (
    ApplicationView,
    Budget,
    DeploymentView,
    MaxOf,
    MinOf,
    Panic,
    Predictive,
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
        lambda: TargetOngoing(0.1),
        SloAttainment,
        lambda: SloAttainment(ttft_ms=5.0),
        lambda: SloAttainment(latency_ms=0.01),
        TokenThroughput,
        Panic,
        lambda: Scheduled([ScheduleEntry("0 9 * * mon-fri", 4, 3600.0)]),
        Predictive,
        lambda: Predictive(replica_per_s=5.0),
        lambda: MaxOf([Panic(), Budget(QueueDepth(), per_month=500.0, cost_per_replica_hour=2.0)]),
        lambda: MinOf([TargetOngoing(), TokenThroughput(500.0)]),
    ],
)
def test_built_in_policies_keep_every_promise(build: Any) -> None:
    report = check(build, 30)
    assert report.ok, str(report)
    assert report.roles == ["scaling policy"]
    assert len(report.kept) == 9
    assert report.untried == []


def test_a_budget_needs_to_know_what_a_replica_costs() -> None:
    broken = found(lambda: Budget(TargetOngoing(), per_hour=5.0), "answers in every situation")
    assert broken.what.endswith("the cost of a replica per hour is unknown; set costPerReplicaHour")
    assert broken.example == "    a view with replicas 1, target 1, cost_per_replica_hour unknown"


def half(view: DeploymentView) -> int:
    return round(view.load / 2)


def balance(view: ApplicationView) -> dict[str, int]:
    most = max(round(one.load) for one in view.deployments.values())
    return dict.fromkeys(view.deployments, most)


def unbalanced(view: ApplicationView) -> dict[str, int]:
    return {"third": 1}


def test_functions_and_application_policies_are_checked() -> None:
    assert check(lambda: half, 30).ok
    report = check(lambda: balance, 30)
    assert report.ok, str(report)
    assert report.roles == ["application's scaling policy"]
    broken = found(lambda: unbalanced, "answers in every situation")
    assert broken.what == 'it raised UnknownName: unknown node "third"; known: first, second'


def unannotated(view):  # type: ignore[no-untyped-def]
    return {name: round(one.load) for name, one in view.deployments.items()}


def always_the_same(view):  # type: ignore[no-untyped-def]
    return {"first": 2}


class OfAnything:
    def desired_replicas(self, view: Any) -> Any:
        return dict.fromkeys(view.deployments, 1)


def misspelled(view):  # type: ignore[no-untyped-def]
    return view.deployment


def a_mapping_for_one(view: DeploymentView) -> Any:
    return {"first": 1}


@pytest.mark.parametrize("build", [lambda: unannotated, lambda: always_the_same, OfAnything])
def test_application_policies_without_annotations_are_recognised(build: Any) -> None:
    report = check(build, 30)
    assert report.ok, str(report)
    assert report.roles == ["application's scaling policy"]


def test_annotations_take_precedence() -> None:
    assert check(lambda: misspelled, 30).roles == ["scaling policy"]
    assert "has no attribute 'deployment'" in found(lambda: misspelled, "answers in every situation").what
    assert "{'first': 1}" in found(lambda: a_mapping_for_one, "wants a whole number of replicas").what


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


def keeps_strangers(view: DeploymentView) -> int:
    view.state["lock"] = Lock()
    return 1


def names_by_pair(view: DeploymentView) -> int:
    view.state[1, 2] = 3  # type: ignore[index]
    return 1


def expects_a_pair(view: DeploymentView) -> int:
    pair = view.state.setdefault("pair", (1, 2))
    return len({pair})  # a list is what comes back, and cannot be in a set


def forgets_keys(view: DeploymentView) -> int:
    seen = view.state.setdefault("seen", {})
    seen[7] = 1
    return 1


def flaps(view: DeploymentView) -> int:
    return view.target + 1 if view.load and view.target < 4 else 1


def by_the_second(view: DeploymentView) -> int:
    return 1 if int(view.now) % 2 else 3


def by_the_half_second(view: DeploymentView) -> int:
    return 1 if int(view.now * 2) % 2 else 3


def by_the_minute(view: DeploymentView) -> int:
    return 1 if int(view.now / 60) % 2 else 3


def more_than_there_may_be(view: DeploymentView) -> int:
    return view.max_replicas + 5


def one_more(view: DeploymentView) -> int:
    return view.target + 1


def one_more_now_and_then(view: DeploymentView) -> int:
    return view.target + (view.since_up_s is None or view.since_up_s > 60)


def notes_much(view: DeploymentView) -> int:
    view.state.setdefault("log", []).extend(range(20_000))
    return 1


def never_forgets(view: DeploymentView) -> int:
    view.state.setdefault("loads", []).append(view.load)
    return 1


def exits(view: DeploymentView) -> int:
    raise SystemExit(3)


def gives_up(view: DeploymentView) -> int:
    raise GeneratorExit


def yields(view: DeploymentView) -> Any:
    yield 2


SURVIVE = "keeps state that survives a restart"
STEADY, BOUNDED = "comes to rest on a steady load", "stays within its bounds on a steady load"
SMALL = "keeps its state small"


def sleeps(view: DeploymentView) -> int:
    time.sleep(0.6)
    return 1


@pytest.mark.parametrize(
    ("policy", "promise", "what", "example"),
    [
        (divides, "answers in every situation", "it raised ZeroDivisionError", "a view with replicas 0, target 1"),
        (below_zero, "wants a whole number of replicas", "it returned -2", "a view with replicas 1, target 1"),
        (many, "wants a whole number of replicas", "it returned 'many'", "a view with replicas 1, target 1"),
        (falls_silent, "wants a whole number of replicas", "it returned a Wish for 2.5", "target 1, queued "),
        (writes, "leaves its view alone", "view.metrics was changed", "a view with replicas 1, target 1"),
        (throws_dice, "answers the same to the same view", "two fresh policies answered differently", ""),
        (keeps_objects, SURVIVE, "view.state['open'] comes back as [1, 2] after a restart", ""),
        (keeps_strangers, SURVIVE, "view.state['lock'] is a lock: only plain data survives a restart", ""),
        (names_by_pair, SURVIVE, "view.state[(1, 2)] has a name that is not text: only plain data", ""),
        (forgets_keys, SURVIVE, "view.state['seen'] comes back as {'7': 1} after a restart: use text as keys", ""),
        (expects_a_pair, SURVIVE, "after a restart with its own state it raised TypeError", ""),
        (
            flaps,
            STEADY,
            "called every 1 s with a constant load of 7 requests, it went to ",
            "a replica takes 4 requests",
        ),
        (by_the_second, STEADY, "called every 1 s with a constant load of 7 requests, it went to 3, 1, 3, 1", ""),
        (by_the_half_second, STEADY, "called every 0.3 s ", ""),
        (by_the_minute, STEADY, "called every 10 s ", ""),
        (more_than_there_may_be, BOUNDED, "called every 1 s with a constant load of 7 requests, it wanted 1005 ", ""),
        (one_more, BOUNDED, "called every 1 s with a constant load of 7 requests, it wanted more each time (199, ", ""),
        (one_more_now_and_then, BOUNDED, "called every 10 s ", ""),
        (notes_much, SMALL, "called every 1 s, it had 108,899 bytes in view.state after 1 call: at most 65,536", ""),
        (never_forgets, SMALL, "called every 10 min, it had 4,011 bytes in view.state after 1,000 calls and 8", ""),
        (exits, "answers in every situation", "it raised SystemExit: 3", "a view with replicas 1, target 1"),
        (gives_up, "answers in every situation", "it raised GeneratorExit", "a view with replicas 1, target 1"),
        (yields, "wants a whole number of replicas", "it returned <generator", "a view with replicas 1, target 1"),
    ],
)
def test_broken_promises_are_found_with_the_smallest_view(policy: Any, promise: str, what: str, example: str) -> None:
    broken = found(lambda: policy, promise)
    assert broken.what.startswith(what)
    assert example in broken.example


@pytest.mark.parametrize("policy", [by_the_second, more_than_there_may_be, one_more, never_forgets, yields, flaps])
def test_each_mistake_breaks_one_promise_only(policy: Any) -> None:
    assert len(check(lambda: policy, 30).broken) == 1


def all_there_may_be(view: DeploymentView) -> int:
    return view.max_replicas


def last_ten_minutes(view: DeploymentView) -> int:
    seen = [*view.state.get("seen", []), [view.now, view.load]]
    view.state["seen"] = seen = [one for one in seen if one[0] > view.now - 600]
    return int(max(load for _, load in seen))


@pytest.mark.parametrize("policy", [all_there_may_be, last_ten_minutes])
def test_similar_valid_policies_keep_every_promise(policy: Any) -> None:
    report = check(lambda: policy, 30)
    assert report.ok, str(report)


def slow_when_many_wait(view: DeploymentView) -> int:
    time.sleep(0.6 if view.queued >= 50 and view.max_concurrency else 0)
    return 1


def test_a_slow_policy_is_judged_by_other_promises_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "PATIENCE_S", 0.1)
    monkeypatch.setattr(checker, "SEARCH_TIMEOUT_S", 1.0)
    report = check(lambda: sleeps, 200)
    assert report.broken[0].promise == "answers within its time limit"
    assert "an answer after 0.5 s does not count" in report.broken[0].what
    assert len(report.kept) + len(report.broken) == 2
    assert len(report.untried) == 7
    assert "untried stays within its bounds on a steady load" in str(report)


def raises_and_breaks_the_view(view: DeploymentView) -> int:
    view.ongoing_windows.clear()  # type: ignore[attr-defined]
    if view.queued >= 50:
        raise ValueError("too many")
    return 10_000 if view.ongoing else 1


def test_the_check_goes_on_after_a_broken_promise() -> None:
    report = check(lambda: raises_and_breaks_the_view, 100)
    assert [one.promise for one in report.broken] == [
        "answers in every situation",
        "leaves its view alone",
        "stays within its bounds on a steady load",
    ]
    assert report.untried == []


def only_raises(view: DeploymentView) -> int:
    raise ValueError("no")


def test_what_cannot_be_judged_is_not_called_kept() -> None:
    report = check(lambda: only_raises, 20)
    assert [one.promise for one in report.broken] == ["answers in every situation"]
    assert report.untried == [
        "wants a whole number of replicas",
        "answers the same to the same view",
        "comes to rest on a steady load",
        "stays within its bounds on a steady load",
    ]


def test_a_policy_that_is_slow_on_some_views_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "SEARCH_TIMEOUT_S", 3.0)
    broken = found(lambda: slow_when_many_wait, "answers within its time limit")
    assert "queued 50" in broken.example
    assert "max_concurrency" in broken.example

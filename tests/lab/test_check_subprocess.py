"""A policy that is tried in a process of its own may do what it likes: there is a report, and nothing stays behind."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.errors import ConfigError, PointsmanError
from pointsman.lab.check import Report, subprocess_runner
from pointsman.lab.check.subprocess_runner import check_in_subprocess

OWN = """
import itertools
import os
import signal
import threading
import time
from pointsman.strategies import FIFOPolicy


def sleeps(view):
    while True:
        time.sleep(1)


def spins(view):
    while True:
        pass


def holds_the_interpreter(view):
    return sum(itertools.repeat(1))


def catches_all(view):
    while True:
        try:
            time.sleep(1)
        except BaseException:
            pass


def hangs_when_many_wait(view):
    while view.queued >= 50:
        time.sleep(1)
    return 1


def hangs_after_a_while(view):
    view.state["asked"] = view.state.get("asked", 0) + 1
    while view.state["asked"] > 50:
        time.sleep(1)
    return 1


def leaves(view):
    os._exit(3)


def crashes(view):
    os.kill(os.getpid(), signal.SIGKILL)


def interrupts(view):
    raise KeyboardInterrupt("enough")


def keeps_a_thread(view):
    if not view.state:
        threading.Thread(target=time.sleep, args=(1000,)).start()
    view.state["begun"] = True
    return 1


class Loops(FIFOPolicy):
    def schedule(self, requests, instances):
        while requests:
            pass
        return []


class Herds(FIFOPolicy):
    def schedule(self, requests, instances):
        while requests and not instances:
            pass
        return [decision for decision in super().schedule(requests[:1], instances[:1]) for _ in range(2)]


class Exits(FIFOPolicy):
    def schedule(self, requests, instances):
        raise SystemExit(4)


class NotMade:
    def __init__(self):
        raise KeyboardInterrupt

    def desired_replicas(self, view):
        return 1


class MadeTwice:
    made = 0

    def __init__(self):
        MadeTwice.made += 1
        while MadeTwice.made > 2:
            time.sleep(1)

    def desired_replicas(self, view):
        return 1


class NoMethod:
    pass
"""
QUICK, ANSWERS = "answers within its time limit", "answers in every situation"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_wild_policies.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_wild_policies"
    assert "my_wild_policies" not in sys.modules, "it was imported here too"


@pytest.fixture
def few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For policies that hang or exit in case after case."""
    monkeypatch.setattr(subprocess_runner, "MAX_PROCESSES", 3)


def checked(name: str) -> Report:
    return check_in_subprocess(name, {}, 10, answer_timeout_s=1.0)


@pytest.mark.parametrize("name", ["sleeps", "spins", "holds_the_interpreter", "catches_all"])
def test_a_policy_that_never_returns_is_ended_and_reported(own: str, name: str) -> None:
    report = checked(f"{own}:{name}")
    [broken] = report.broken
    assert broken.promise == QUICK
    assert broken.what.startswith("it had not returned after 1 s, and was ended")
    view, where = broken.example.splitlines()
    assert view == "    a view with replicas 1, target 1"
    assert where.startswith(f"    in {name}: ")
    assert "my_wild_policies.py, line " in where
    assert len(report.untried) == 8


@pytest.mark.usefixtures("few_processes")
def test_a_policy_that_hangs_is_reported_with_the_view(own: str) -> None:
    report = checked(f"{own}:hangs_when_many_wait")
    [broken] = report.broken
    assert broken.promise == QUICK
    assert "queued 50" in broken.example
    assert ANSWERS in report.kept, "the check goes on without that case"


def test_earlier_findings_are_reported_as_well(own: str) -> None:
    report = checked(f"{own}:hangs_after_a_while")
    assert [one.promise for one in report.broken] == [QUICK]
    assert report.kept[0] == ANSWERS
    assert len(report.kept) == 5
    assert report.untried == [
        "keeps its state small", "comes to rest on a steady load", "stays within its bounds on a steady load"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("leaves", "it ended its process (status 3)"),
        ("crashes", "it ended its process (SIGKILL)"),
        ("interrupts", "it raised KeyboardInterrupt: enough"),
        ("Exits", "it raised SystemExit: 4"),
    ],
)
@pytest.mark.usefixtures("few_processes")
def test_a_policy_that_exits_ends_only_its_own_process(own: str, name: str, what: str) -> None:
    [broken] = checked(f"{own}:{name}").broken
    assert (broken.promise, broken.what) == (ANSWERS, what)


@pytest.mark.usefixtures("few_processes")
def test_a_scheduling_policy_that_never_returns_is_reported_with_the_case(own: str) -> None:
    [broken] = checked(f"{own}:Loops").broken
    assert broken.promise == ANSWERS
    assert "request_id" in broken.example
    assert "in schedule: " in broken.example


def test_the_check_goes_on_after_a_case_that_hangs(own: str) -> None:
    report = checked(f"{own}:Herds")
    assert {ANSWERS, "decides only what may be done"} <= {one.promise for one in report.broken}
    assert "prioritize() keeps every request" in report.kept


def test_threads_of_a_policy_do_not_block(own: str) -> None:
    assert checked(f"{own}:keeps_a_thread").ok


def test_a_policy_that_cannot_be_built_is_an_error(own: str) -> None:
    with pytest.raises(PointsmanError, match="cannot be made: it raised KeyboardInterrupt"):
        checked(f"{own}:NotMade")
    with pytest.raises(ConfigError, match=r"is not a policy or plugin: it has neither the method desired_replicas\(vi"):
        checked(f"{own}:NoMethod")
    with pytest.raises(PointsmanError, match='unknown policy or plugin "fifa"; did you mean "fifo"'):
        checked("fifa")
    [broken] = checked(f"{own}:MadeTwice").broken
    assert "in __init__: " in broken.example

"""Looks for broken promises, shrinks each to its smallest example, and says it in plain words."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import FlakyFailure

from pointsman.config.roles import roles_of
from pointsman.lab.check import plugins, policies
from pointsman.lab.check.shrinking import shrunk
from pointsman.lab.check.situations import Situation, crowd, situations
from pointsman.strategies import SchedulingPolicy

SLOW_S = 0.001
"""More than this per decision is too slow for a request path."""

Promise = Callable[[Callable[[], Any], Situation], str | None]


class Broken(msgspec.Struct, frozen=True):
    """A promise that is not kept."""

    promise: str
    what: str
    example: str
    """The smallest situation in which it happens."""

    def __str__(self) -> str:
        return f"BROKEN  {self.promise}\n  {self.what}\n{self.example}"


class Report(msgspec.Struct, frozen=True):
    """What was checked and what was found."""

    roles: list[str]
    kept: list[str]
    broken: list[Broken]

    @property
    def ok(self) -> bool:
        return not self.broken

    def __str__(self) -> str:
        verdict = "keeps all its promises" if self.ok else f"breaks {len(self.broken)} of its promises"
        if not self.kept and not self.broken:
            verdict = "was not checked: nothing is promised of it that could be tried out"
        kept = [f"kept    {promise}" for promise in self.kept]
        return "\n".join([*kept, *map(str, self.broken), f"this {' and '.join(self.roles)} {verdict}"])


def check(build: Callable[[], Any], examples: int = 200) -> Report:
    """Try a policy or plugin in so many situations per promise. `build` makes a fresh one each time."""
    subject = build()
    roles = ["scheduling policy"] if isinstance(subject, SchedulingPolicy) else roles_of(subject)
    kept: list[str] = []
    broken: list[Broken] = []
    for name, finding in _findings(build, roles, examples):
        if finding is None:
            kept.append(name)
        else:
            broken.append(finding)
            if finding.promise in _STOPS:
                break
    return Report(roles, kept, broken)


_STOPS = {"answers in every situation"}
"""What cannot even answer breaks every other promise by the same cause."""


def _findings(build: Callable[[], Any], roles: Iterable[str], examples: int) -> Iterator[tuple[str, Broken | None]]:
    if "scheduling policy" in roles:
        for name, promise in policies.PROMISES.items():
            yield name, _smallest(name, promise, build, examples)
        yield (
            "spreads a batch over equal instances",
            _in("spreads a batch over equal instances", policies.spreads, build, crowd(12, 3)),
        )
        quick = "takes at most 1 ms per decision"
        yield quick, _slow(quick, lambda: policies.decided(build, crowd(100, 50)), 100)
        return
    for role in roles:
        for name, promise in plugins.PROMISES.get(role, {}).items():
            yield f"{role}: {name}", _smallest(f"{role}: {name}", promise, build, examples)
        if role in ("filter", "scorer"):
            yield f"{role}: takes at most 1 ms", _slow(f"{role}: takes at most 1 ms", _asked_often(build(), role), 100)


class _Found(Exception):
    """A situation breaks the promise; ends the search."""


def _smallest(name: str, promise: Promise, build: Callable[[], Any], examples: int) -> Broken | None:
    def broken(situation: Situation) -> str | None:
        try:
            return promise(build, situation)
        except Exception:  # it raised, which another promise reports
            return None

    found: list[Situation] = []
    said: list[str] = []

    def shows(situation: Situation) -> bool:
        # Kept now: whoever decides by chance may not do it again.
        what = broken(situation)
        said.extend(() if what is None else (what,))
        return what is not None

    @settings(
        max_examples=examples,
        database=None,
        derandomize=True,
        deadline=None,
        verbosity=Verbosity.quiet,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(situations())
    def search(situation: Situation) -> None:
        if shows(situation):
            found.append(situation)
            raise _Found

    try:
        search()
    except (_Found, FlakyFailure):
        smallest = shrunk(found[0], shows)
        return Broken(name, said[-1], str(smallest))
    return None


def _in(name: str, promise: Promise, build: Callable[[], Any], situation: Situation) -> Broken | None:
    what = promise(build, situation)
    shown = f"    {len(situation.requests)} equal requests, {len(situation.instances)} equal idle instances"
    return None if what is None else Broken(name, what, shown)


def _asked_often(plugin: Any, role: str) -> Callable[[], object]:
    situation = crowd(1, 100)
    roster, cycle = situation.fleet().roster, plugins.cycle_of(situation)
    ask = plugin.rejections if role == "filter" else plugin.scores
    return lambda: [list(ask(cycle, roster)) for _ in range(100)]


def _slow(name: str, call: Callable[[], object], decisions: int) -> Broken | None:
    """CPU time, the best of three: somebody else may be busy on this machine."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        try:
            call()
        except Exception:  # another promise reports that
            return None
        best = min(best, time.process_time() - start)
    if best / decisions <= SLOW_S:
        return None
    what = f"{best / decisions * 1000:.1f} ms per decision; a request waits for every one of them"
    return Broken(name, what, f"    {decisions} decisions in one situation")

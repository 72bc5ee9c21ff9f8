"""Looks for broken promises, shrinks each to its smallest example, and says it in plain words."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import FlakyFailure
from hypothesis.strategies import SearchStrategy

from pointsman.config.roles import roles_of
from pointsman.lab.check import plugins, policies, scaling, sights
from pointsman.lab.check.shrinking import shrunk
from pointsman.lab.check.situations import Situation, crowd, situations
from pointsman.scaling import DeploymentView
from pointsman.strategies import SchedulingPolicy

SLOW_S = 0.001
"""More than this per decision is too slow for a request path."""

Promise = Callable[[Callable[[], Any], Situation], str | None]
Case = TypeVar("Case")


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
    if not roles and scaling.is_scaling_policy(subject):
        roles = ["scaling policy"]
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


_STOPS = {"answers in every situation", scaling.QUICK}
"""What cannot even answer breaks every other promise by the same cause; what takes seconds cannot be asked often."""


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
    if "scaling policy" in roles:
        yield scaling.QUICK, _once(scaling.QUICK, build)
        for name, kept in scaling.PROMISES.items():
            yield name, _plainest(name, kept, build, examples)
        yield scaling.STEADY, _once(scaling.STEADY, build)
        return
    for role in roles:
        for name, promise in plugins.PROMISES.get(role, {}).items():
            yield f"{role}: {name}", _smallest(f"{role}: {name}", promise, build, examples)
        if role in ("filter", "scorer"):
            yield f"{role}: takes at most 1 ms", _slow(f"{role}: takes at most 1 ms", _asked_often(build(), role), 100)


class _Found(Exception):
    """A situation breaks the promise; ends the search."""


def _smallest(name: str, promise: Promise, build: Callable[[], Any], examples: int) -> Broken | None:
    found = _searched(situations(), lambda situation: promise(build, situation), shrunk, examples)
    return None if found is None else Broken(name, found[1], str(found[0]))


def _plainest(name: str, promise: scaling.Promise, build: Callable[[], Any], examples: int) -> Broken | None:
    def broken(view: DeploymentView) -> str | None:
        return promise(build, msgspec.structs.replace(view, state={}))

    found = _searched(sights.SIGHTS, broken, sights.plainest, examples)
    return None if found is None else Broken(name, found[1], sights.shown(found[0]))


def _once(name: str, build: Callable[[], Any]) -> Broken | None:
    promise, example = scaling.EXAMPLES[name]
    what = promise(build)
    return None if what is None else Broken(name, what, example)


def _searched(
    cases: SearchStrategy[Case],
    promise: Callable[[Case], str | None],
    shrink: Callable[[Case, Callable[[Case], bool]], Case],
    examples: int,
) -> tuple[Case, str] | None:
    """The smallest case in which a promise is broken, and what is; None: none was found."""

    def broken(case: Case) -> str | None:
        try:
            return promise(case)
        except Exception:  # it raised, which another promise reports
            return None

    found: list[Case] = []
    said: list[str] = []

    def shows(case: Case) -> bool:
        # Kept now: whoever decides by chance may not do it again.
        what = broken(case)
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
    @given(cases)
    def search(case: Case) -> None:
        if shows(case):
            found.append(case)
            raise _Found

    try:
        search()
    except (_Found, FlakyFailure):
        smallest = shrink(found[0], shows)
        return smallest, said[-1]
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

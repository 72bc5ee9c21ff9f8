"""Tries every promise of a policy or plugin, one after the other."""

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from pointsman.config.registry import roles_of
from pointsman.lab.check import notes, plugins, policies, scaling, sights, steady, tried
from pointsman.lab.check.report import Begun, Broken, Found, Gathered, Report, Trying, Watch
from pointsman.lab.check.searching import Search, drawn
from pointsman.lab.check.shrinking import shrunk
from pointsman.lab.check.situations import Situation, crowd, situations
from pointsman.strategies import SchedulingPolicy

SLOW_S = 0.001
"""More than this per decision is too slow for a request path."""

Build: TypeAlias = Callable[[], Any]
Trial: TypeAlias = tuple[str, Callable[[str], Broken | None]]
"""The name of a promise, and what finds out about it."""

STOPS = (scaling.QUICK, "answers in every situation")
"""What cannot even answer breaks every other promise by the same cause; what takes seconds cannot be asked often."""


def check(build: Build, examples: int = 200) -> Report:
    """Try a policy or plugin in so many situations per promise. `build` makes a fresh one each time. It is tried here:
    whoever never returns is waited for."""
    gathered = Gathered()
    check_watched(build(), build, examples, gathered)
    return gathered.report()


def check_watched(subject: object, build: Build, examples: int, watch: Watch) -> None:
    """The same, and all is told as it comes; the subject is the first that was built."""
    roles = ["scheduling policy"] if isinstance(subject, SchedulingPolicy) else roles_of(subject)
    if roles == ["scheduling policy"]:
        trials = _of_scheduling(build, examples, watch)
    elif roles or not tried.is_scaling_policy(subject):
        trials = [trial for role in roles for trial in _of_plugin(build, role, examples, watch)]
    else:
        fresh = tried.Fresh(build, watch)
        roles, trials = ["scaling policy"], _of_scaling(fresh, examples, watch)
        watch.tell(Begun(roles, [name for name, _ in trials]))
        watch.tell(Trying(scaling.QUICK, sights.shown(sights.PLAIN)))
        fresh.recognise()
        roles = ["application's scaling policy"] if fresh.for_application else roles
    watch.tell(Begun(roles, [name for name, _ in trials]))
    for name, trial in trials:
        broken = trial(name)
        watch.tell(Found(name, broken))
        if broken is not None and name in STOPS:
            return


def _of_scheduling(build: Build, examples: int, watch: Watch) -> list[Trial]:
    search, batch = _situations(examples, watch), crowd(12, 3)
    return [
        *((name, _in_situations(promise, build, search)) for name, promise in policies.PROMISES.items()),
        ("spreads a batch over equal instances", lambda name: _in(name, policies.spreads, build, batch, watch)),
        (
            "takes at most 1 ms per decision",
            lambda name: _slow(name, lambda: policies.decided(build, crowd(100, 50)), 100, watch),
        ),
    ]


def _of_scaling(build: tried.Build, examples: int, watch: Watch) -> list[Trial]:
    views = [sights.PLAIN, *drawn(sights.SIGHTS, examples)]
    search = Search(views, sights.plainest, sights.shown, watch)

    def on_views(promise: scaling.Promise) -> Callable[[str], Broken | None]:
        return lambda name: search.broken(name, lambda view: promise(build, view))

    def over_time(promise: Callable[[tried.Build], str | None], example: str) -> Callable[[str], Broken | None]:
        def broken(name: str) -> Broken | None:
            watch.tell(Trying(name, example))
            what = promise(build)
            return None if what is None else Broken(name, what, example)

        return broken

    return [
        *((name, on_views(promise)) for name, promise in scaling.VIEW_PROMISES.items()),
        ("keeps its notes small", over_time(notes.keeps_small_notes, notes.STATE_EXAMPLE)),
        *((name, over_time(promise, steady.RUN_EXAMPLE)) for name, promise in steady.RUN_PROMISES.items()),
    ]


def _of_plugin(build: Build, role: str, examples: int, watch: Watch) -> Iterator[Trial]:
    search = _situations(examples, watch)
    for name, promise in plugins.PROMISES.get(role, {}).items():
        yield f"{role}: {name}", _in_situations(promise, build, search)
    if role in ("filter", "scorer"):
        yield f"{role}: takes at most 1 ms", lambda name: _slow(name, _asked_often(build(), role), 100, watch)


def _situations(examples: int, watch: Watch) -> Search[Situation]:
    """First one in which there is a choice, whatever the others are."""
    return Search([crowd(3, 2), *drawn(situations(), examples)], shrunk, str, watch)


def _in_situations(promise: plugins.Promise, build: Build, search: Search[Situation]) -> Callable[[str], Broken | None]:
    def kept(situation: Situation) -> str | None:
        with search.watch.answering():
            return promise(build, situation)

    return lambda name: search.broken(name, kept)


def _in(name: str, promise: plugins.Promise, build: Build, situation: Situation, watch: Watch) -> Broken | None:
    shown = f"    {len(situation.requests)} equal requests, {len(situation.instances)} equal idle instances"
    watch.tell(Trying(name, shown))
    with watch.answering():
        what = promise(build, situation)
    return None if what is None else Broken(name, what, shown)


def _asked_often(plugin: Any, role: str) -> Callable[[], object]:
    situation = crowd(1, 100)
    roster, cycle = situation.fleet().roster, plugins.cycle_of(situation)
    ask = plugin.rejections if role == "filter" else plugin.scores
    return lambda: [list(ask(cycle, roster)) for _ in range(100)]


def _slow(name: str, call: Callable[[], object], decisions: int, watch: Watch) -> Broken | None:
    """CPU time, the best of three: somebody else may be busy on this machine."""
    shown = f"    {decisions} decisions in one situation"
    watch.tell(Trying(name, shown))
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        try:
            with watch.answering():
                call()
        except Exception:  # another promise reports that
            return None
        best = min(best, time.process_time() - start)
    if best / decisions <= SLOW_S:
        return None
    what = f"{best / decisions * 1000:.1f} ms per decision; a request waits for every one of them"
    return Broken(name, what, shown)

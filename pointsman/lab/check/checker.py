"""Tries every promise of a policy or plugin, one after the other, and shrinks the cases in which one is broken."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from pointsman.config.registry import roles_of
from pointsman.lab.check.cases import (
    DEFAULT_VIEW,
    RequestCase,
    equal_case,
    request_cases,
    scaling_cases,
    shown,
    smaller_cases,
    smaller_views,
)
from pointsman.lab.check.report import (
    Broken,
    CaseStarted,
    CheckListener,
    CheckStarted,
    PromiseChecked,
    Report,
    ReportBuilder,
)
from pointsman.lab.check.request_promises import (
    PLUGIN_PROMISES,
    POLICY_PROMISES,
    Build,
    RequestPromise,
    cycle_of,
    decided,
    spreads,
)
from pointsman.lab.check.scaling_promises import (
    QUICK,
    TIME_PROMISES,
    VIEW_PROMISES,
    BuildScaling,
    PolicyFactory,
    TimePromise,
    ViewPromise,
    is_scaling_policy,
)
from pointsman.strategies import SchedulingPolicy

SEARCH_TIMEOUT_S = 5.0
"""Per promise, for the search, and again for shrinking: a slow policy is tried on fewer cases."""
MAX_DECISION_S = 0.001
"""A slower decision is too slow for the path of a request."""

STOPS = (QUICK, "answers in every situation")
"""If one of these is broken the check ends: the other promises would fail for the same cause, or take too long."""

Trial: TypeAlias = tuple[str, Callable[[str], Broken | None]]
"""The name of a promise, and the function that tries it."""
Case = TypeVar("Case")


def check(build: Build, examples: int = 200) -> Report:
    """Try a policy or plugin on this many cases per promise. `build` makes a fresh one each time.

    There is no time limit: a policy that never returns blocks this function.
    """
    report = ReportBuilder()
    check_with(build(), build, examples, report)
    return report.report()


def check_with(subject: object, build: Build, examples: int, listener: CheckListener) -> None:
    """The same, step by step for a listener. `subject` is a first one that was built."""
    roles = ["scheduling policy"] if isinstance(subject, SchedulingPolicy) else roles_of(subject)
    if roles == ["scheduling policy"]:
        trials = _scheduling_trials(build, examples, listener)
    elif roles or not is_scaling_policy(subject):
        trials = [trial for role in roles for trial in _plugin_trials(build, role, examples, listener)]
    else:
        factory = PolicyFactory(build, listener)
        roles, trials = ["scaling policy"], _scaling_trials(factory, examples, listener)
        listener.on_event(CheckStarted(roles, [name for name, _ in trials]))
        listener.on_event(CaseStarted(QUICK, shown(DEFAULT_VIEW)))
        factory.recognise()
        roles = ["application's scaling policy"] if factory.for_application else roles
    listener.on_event(CheckStarted(roles, [name for name, _ in trials]))
    for name, trial in trials:
        broken = trial(name)
        listener.on_event(PromiseChecked(name, broken))
        if broken is not None and name in STOPS:
            return


class Search(msgspec.Struct, Generic[Case], frozen=True):
    """Looks for a case in which a promise is broken, and for the smallest one."""

    cases: Sequence[Case]
    smaller: Callable[[Case], Iterable[Case]]
    show: Callable[[Case], str]
    listener: CheckListener

    def broken(self, name: str, promise: Callable[[Case], str | None]) -> Broken | None:
        """The smallest case in which the promise is broken, and how; None if there is none."""
        findings: list[str] = []
        spent_s = 0.0

        def breaks(case: Case) -> bool:
            nonlocal spent_s
            if spent_s > SEARCH_TIMEOUT_S:
                return False
            self.listener.on_event(CaseStarted(name, self.show(case)))
            given, began = copy.deepcopy(case), time.perf_counter()  # the policy may change it
            try:
                what = promise(given)
            except Exception:  # another promise reports that
                what = None
            spent_s += time.perf_counter() - began
            # A policy that draws random numbers may not fail again, so this is kept.
            findings.extend(() if what is None else (what,))
            return what is not None

        smallest = next(filter(breaks, self.cases), None)
        if smallest is None:
            return None
        spent_s = 0.0
        while (smaller := next(filter(breaks, self.smaller(smallest)), None)) is not None:
            smallest = smaller
        return Broken(name, findings[-1], self.show(smallest))


def _scheduling_trials(build: Build, examples: int, listener: CheckListener) -> list[Trial]:
    search, batch = _request_search(examples, listener), equal_case(12, 3)
    return [
        *((name, _on_requests(promise, build, search)) for name, promise in POLICY_PROMISES.items()),
        ("spreads a batch over equal instances", lambda name: _on_one(name, spreads, build, batch, listener)),
        (
            "takes at most 1 ms per decision",
            lambda name: _timed(name, lambda: decided(build, equal_case(100, 50)), 100, listener),
        ),
    ]


def _plugin_trials(build: Build, role: str, examples: int, listener: CheckListener) -> Iterator[Trial]:
    search = _request_search(examples, listener)
    for name, promise in PLUGIN_PROMISES.get(role, {}).items():
        yield f"{role}: {name}", _on_requests(promise, build, search)
    if role in ("filter", "scorer"):
        yield f"{role}: takes at most 1 ms", lambda name: _timed(name, _hundred_calls(build(), role), 100, listener)


def _scaling_trials(build: BuildScaling, examples: int, listener: CheckListener) -> list[Trial]:
    search = Search(scaling_cases(examples), smaller_views, shown, listener)

    def on_views(promise: ViewPromise) -> Callable[[str], Broken | None]:
        return lambda name: search.broken(name, lambda view: promise(build, view))

    def over_time(promise: TimePromise, example: str) -> Callable[[str], Broken | None]:
        def broken(name: str) -> Broken | None:
            listener.on_event(CaseStarted(name, example))
            what = promise(build)
            return None if what is None else Broken(name, what, example)

        return broken

    return [
        *((name, on_views(promise)) for name, promise in VIEW_PROMISES.items()),
        *((name, over_time(promise, example)) for name, (promise, example) in TIME_PROMISES.items()),
    ]


def _request_search(examples: int, listener: CheckListener) -> Search[RequestCase]:
    return Search(request_cases(examples), smaller_cases, str, listener)


def _on_requests(promise: RequestPromise, build: Build, search: Search[RequestCase]) -> Callable[[str], Broken | None]:
    def kept(case: RequestCase) -> str | None:
        with search.listener.time_limit():
            return promise(build, case)

    return lambda name: search.broken(name, kept)


def _on_one(
    name: str, promise: RequestPromise, build: Build, case: RequestCase, listener: CheckListener
) -> Broken | None:
    example = f"    {len(case.requests)} equal requests, {len(case.instances)} equal idle instances"
    listener.on_event(CaseStarted(name, example))
    with listener.time_limit():
        what = promise(build, case)
    return None if what is None else Broken(name, what, example)


def _hundred_calls(plugin: Any, role: str) -> Callable[[], object]:
    case = equal_case(1, 100)
    roster, cycle = case.fleet().roster, cycle_of(case)
    method = plugin.rejections if role == "filter" else plugin.scores
    return lambda: [list(method(cycle, roster)) for _ in range(100)]


def _timed(name: str, call: Callable[[], object], decisions: int, listener: CheckListener) -> Broken | None:
    """CPU time, the best of three: the machine may be busy."""
    example = f"    {decisions} decisions in one situation"
    listener.on_event(CaseStarted(name, example))
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        try:
            with listener.time_limit():
                call()
        except Exception:  # another promise reports that
            return None
        best = min(best, time.process_time() - start)
    if best / decisions <= MAX_DECISION_S:
        return None
    what = f"{best / decisions * 1000:.1f} ms per decision; a request waits for every one of them"
    return Broken(name, what, example)

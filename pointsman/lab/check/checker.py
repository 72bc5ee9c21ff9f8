"""Tries the promises of a policy or plugin, one after the other, and shrinks cases in which a promise is broken."""

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
    Unjudged,
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
"""Time limit of the search for each promise, and again of the shrinking. A slow policy is tried on fewer cases."""
MAX_DECISION_S = 0.001
"""Maximum time for a decision. A slower decision would delay requests too much."""

PATIENCE_S = 20.0
"""Time limit for the other promises if a policy is too slow. Promises that are left after it are not judged."""
ANSWERS = "answers in every situation"

Trial: TypeAlias = tuple[str, Callable[[str], Broken | None]]
"""The name of a promise, and the function that tries it."""
Case = TypeVar("Case")


def check(build: Build, examples: int = 200) -> Report:
    """Try a policy or plugin on `examples` cases per promise. `build` makes a fresh policy or plugin at each call.

    There is no time limit: a policy that never returns blocks this function.
    """
    report = ReportBuilder()
    check_with(build(), build, examples, report)
    return report.report()


class CheckRest(msgspec.Struct, frozen=True):
    """The part of a check that continues after the policy has ended its process."""

    done: tuple[str, ...] = ()
    """Promises that have been judged."""
    avoid: frozenset[str] = frozenset()
    """Cases in which the policy did not return."""
    hung: frozenset[str] = frozenset()
    """Promises that were under test when the policy did not return."""


WHOLE = CheckRest()


def check_with(subject: object, build: Build, examples: int, listener: CheckListener, left: CheckRest = WHOLE) -> None:
    """Check a policy or plugin, and tell the listener each step. `subject` is the first policy that was built."""
    roles = ["scheduling policy"] if isinstance(subject, SchedulingPolicy) else roles_of(subject)
    if roles == ["scheduling policy"]:
        trials = _scheduling_trials(build, examples, listener, left)
    elif roles or not is_scaling_policy(subject):
        trials = [trial for role in roles for trial in _plugin_trials(build, role, examples, listener, left)]
    else:
        factory = PolicyFactory(build, listener)
        roles, trials = ["scaling policy"], _scaling_trials(factory, examples, listener, left)
        listener.on_event(CheckStarted(roles, [name for name, _ in trials]))
        if shown(DEFAULT_VIEW) in left.avoid:
            return  # the policy did not return even for the default view
        listener.on_event(CaseStarted(QUICK, shown(DEFAULT_VIEW)))
        factory.recognise()
        roles = ["application's scaling policy"] if factory.for_application else roles
    listener.on_event(CheckStarted(roles, [name for name, _ in trials]))
    until = None
    for name, trial in trials:
        if name in left.done or (until is not None and time.perf_counter() > until):
            continue
        try:
            broken = trial(name)
        except Unjudged:
            continue
        listener.on_event(PromiseChecked(name, broken))
        if broken is not None and name == QUICK:
            until = time.perf_counter() + PATIENCE_S


class Search(msgspec.Struct, Generic[Case], frozen=True):
    """Looks for a case in which a promise is broken, and then for the smallest such case."""

    cases: Sequence[Case]
    smaller: Callable[[Case], Iterable[Case]]
    show: Callable[[Case], str]
    listener: CheckListener
    avoid: frozenset[str] = frozenset()

    def broken(self, name: str, promise: Callable[[Case], str | None]) -> Broken | None:
        """The smallest case in which the promise is broken, and what is broken. None if there is no such case.

        Raises `Unjudged` if there is no case in which the policy answers.
        """
        findings: list[str] = []
        spent_s, judged = 0.0, 0

        def breaks(case: Case) -> bool:
            nonlocal spent_s, judged
            if spent_s > SEARCH_TIMEOUT_S or (self.avoid and self.show(case) in self.avoid):
                return False
            self.listener.on_event(CaseStarted(name, self.show(case)))
            given, began = copy.deepcopy(case), time.perf_counter()  # the policy may change the case
            try:
                what = promise(given)
                judged += 1
            except Exception:  # another promise reports that
                what = None
            spent_s += time.perf_counter() - began
            # Keep what was found: a policy that draws random numbers may not fail again.
            findings.extend(() if what is None else (what,))
            return what is not None

        smallest = next(filter(breaks, self.cases), None)
        if smallest is None:
            if not judged:
                raise Unjudged
            return None
        spent_s = 0.0
        while (smaller := next(filter(breaks, self.smaller(smallest)), None)) is not None:
            smallest = smaller
        return Broken(name, findings[-1], self.show(smallest))


def _scheduling_trials(build: Build, examples: int, listener: CheckListener, left: CheckRest) -> list[Trial]:
    search, batch = _request_search(examples, listener, left), equal_case(12, 3)
    return [
        *((name, _on_requests(promise, build, search)) for name, promise in POLICY_PROMISES.items()),
        ("spreads a batch over equal instances", lambda name: _on_one(name, spreads, build, batch, listener, left)),
        (
            "takes at most 1 ms per decision",
            lambda name: _timed(name, lambda: decided(build, equal_case(100, 50)), 100, listener, left),
        ),
    ]


def _plugin_trials(build: Build, role: str, examples: int, listener: CheckListener, left: CheckRest) -> Iterator[Trial]:
    search = _request_search(examples, listener, left)
    for name, promise in PLUGIN_PROMISES.get(role, {}).items():
        yield f"{role}: {name}", _on_requests(promise, build, search)
    if role in ("filter", "scorer"):
        yield (
            f"{role}: takes at most 1 ms",
            lambda name: _timed(name, _hundred_calls(build(), role), 100, listener, left),
        )


def _scaling_trials(build: BuildScaling, examples: int, listener: CheckListener, left: CheckRest) -> list[Trial]:
    search = Search(scaling_cases(examples), smaller_views, shown, listener, left.avoid)

    def on_views(promise: ViewPromise) -> Callable[[str], Broken | None]:
        return lambda name: search.broken(name, lambda view: promise(build, view))

    def over_time(promise: TimePromise, example: str) -> Callable[[str], Broken | None]:
        def broken(name: str) -> Broken | None:
            if name in left.hung:
                raise Unjudged
            listener.on_event(CaseStarted(name, example))
            what = promise(build)
            return None if what is None else Broken(name, what, example)

        return broken

    return [
        *((name, on_views(promise)) for name, promise in VIEW_PROMISES.items()),
        *((name, over_time(promise, example)) for name, (promise, example) in TIME_PROMISES.items()),
    ]


def _request_search(examples: int, listener: CheckListener, left: CheckRest) -> Search[RequestCase]:
    return Search(request_cases(examples), smaller_cases, str, listener, left.avoid)


def _on_requests(promise: RequestPromise, build: Build, search: Search[RequestCase]) -> Callable[[str], Broken | None]:
    def kept(case: RequestCase) -> str | None:
        with search.listener.time_limit():
            return promise(build, case)

    return lambda name: search.broken(name, kept)


def _on_one(
    name: str, promise: RequestPromise, build: Build, case: RequestCase, listener: CheckListener, left: CheckRest
) -> Broken | None:
    example = f"    {len(case.requests)} equal requests, {len(case.instances)} equal idle instances"
    if name in left.hung:
        raise Unjudged
    listener.on_event(CaseStarted(name, example))
    try:
        with listener.time_limit():
            what = promise(build, case)
    except Exception:  # another promise reports that
        raise Unjudged from None
    return None if what is None else Broken(name, what, example)


def _hundred_calls(plugin: Any, role: str) -> Callable[[], object]:
    case = equal_case(1, 100)
    roster, cycle = case.fleet().roster, cycle_of(case)
    method = plugin.rejections if role == "filter" else plugin.scores
    return lambda: [list(method(cycle, roster)) for _ in range(100)]


def _timed(
    name: str, call: Callable[[], object], decisions: int, listener: CheckListener, left: CheckRest
) -> Broken | None:
    """Whether decisions take too much CPU time. The best of three tries counts, because the machine may be busy."""
    example = f"    {decisions} decisions in one situation"
    if name in left.hung:
        raise Unjudged
    listener.on_event(CaseStarted(name, example))
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        try:
            with listener.time_limit():
                call()
        except Exception:  # another promise reports that
            raise Unjudged from None
        best = min(best, time.process_time() - start)
    if best / decisions <= MAX_DECISION_S:
        return None
    what = f"{best / decisions * 1000:.1f} ms per decision; a request waits for every one of them"
    return Broken(name, what, example)

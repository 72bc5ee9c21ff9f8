"""The promises of scaling policies. Some are about each single view, others about answers over time."""

import copy
import reprlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeAlias, get_type_hints

import msgspec

from pointsman.lab.check.cases import DEFAULT_VIEW, NOW, SEEDS, WINDOW_LENGTHS_S, flat, global_seed
from pointsman.lab.check.report import CheckListener, Unjudged
from pointsman.reasons import Reason
from pointsman.scaling import ApplicationView, DeploymentView, ScalingLimits, Wish, by_node, invoke
from pointsman.scaling.policy import MAX_STATE_BYTES, parse_answer, savable_state, state_size

# The policy under test


NODES = ("first", "second")
"""Names of the nodes of an application under test."""


class PolicyUnderTest:
    """One fresh policy. An exception that it raises counts as its answer."""

    def __init__(self, policy: object, for_application: bool, listener: CheckListener) -> None:
        self._policy, self._for_application, self._listener = policy, for_application, listener

    def answers(self, view: DeploymentView) -> Mapping[str, object]:
        """Answers by node. A policy for a single deployment has one answer, under ""."""
        if not self._for_application:
            return {"": _answer(self._policy, view, self._listener)}
        nodes = {node: msgspec.structs.replace(view, name=node) for node in NODES}
        whole = ApplicationView(name="app", now=view.now, deployments=nodes, state=view.state)
        return by_node(_answer(self._policy, whole, self._listener), NODES)


class PolicyFactory:
    """Builds fresh policies, and finds out whether they are for a deployment or for an application."""

    def __init__(self, build: Callable[[], object], listener: CheckListener) -> None:
        self._build, self._listener = build, listener
        self.for_application = False

    def __call__(self) -> PolicyUnderTest:
        return PolicyUnderTest(self._policy(), self.for_application, self._listener)

    def recognise(self) -> None:
        """Find out whether the policy is for an application. If it has annotations, they tell.

        A policy without annotations is called with the view of one deployment. If it then reads `view.deployments` or
        returns a mapping, it is for an application.
        """
        policy = self._policy()
        hints = _hints(policy)
        if {ApplicationView, DeploymentView} & set(hints):
            self.for_application = ApplicationView in hints
            return
        answer = _answer(policy, msgspec.structs.replace(DEFAULT_VIEW, state={}), self._listener)
        self.for_application = isinstance(answer, Mapping) or _misses(answer, "deployments")

    def _policy(self) -> object:
        with self._listener.time_limit():
            return self._build()


BuildScaling: TypeAlias = Callable[[], PolicyUnderTest]


def is_scaling_policy(subject: object) -> bool:
    """Whether the plugin has desired_replicas, or is a function. No other kind of plugin is a function."""
    return hasattr(subject, "desired_replicas") or (callable(subject) and not isinstance(subject, type))


def _answer(policy: object, view: DeploymentView | ApplicationView, listener: CheckListener) -> object:
    with listener.time_limit():
        try:
            return invoke(policy, view)
        except KeyboardInterrupt as error:
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                raise  # Ctrl-C
            return error
        except BaseException as error:
            return error


def _misses(answer: object, name: str) -> bool:
    """Whether the policy failed because the view of a deployment has no attribute of this name."""
    return isinstance(answer, AttributeError) and answer.name == name and isinstance(answer.obj, DeploymentView)


def _hints(policy: object) -> list[Any]:
    """The types of the policy's annotated parameters."""
    method = getattr(policy, "desired_replicas", policy)
    try:
        hints = get_type_hints(getattr(method, "func", method))
    except (NameError, TypeError):
        return []
    return [hint for name, hint in hints.items() if name != "return"]


LIMITS = ScalingLimits()
CONCURRENCY = 4
"""Number of requests that a replica takes at once."""

STEADY_LOADS = (7.0, 0.0, 1.0, 30.0)
STEADY_STEPS_S = (LIMITS.interval_s, 10.0, 0.3)
"""Intervals between calls: the default interval, a longer one and a shorter one."""
STEADY_ROUNDS = 200
STEADY_TIMEOUT_S = 10.0
"""Time limit for the calls on constant loads. A slow policy is judged by its answers until then."""
MAX_REPLICAS = 1000
"""The maximum in the views. It is more than any of the loads needs, so that the bound does not hide wrong answers."""
FLAPPING_CHANGES = 4
"""On a constant load, this many changes in the second half of the rounds count as flapping."""

STATE_ROUNDS = 4000
"""Number of calls. At the default interval, they take a bit more than an hour."""
STATE_LONG_STEP_S = 600.0
"""A long interval between calls. With it, even state that is kept for days stops growing after half of the rounds."""
STATE_LONG_ROUNDS = 2000
STATE_TIMEOUT_S = 5.0
"""Time limit for each of the two series of calls that measure state."""
STATE_LOADS = 8
"""Number of different loads. The load changes with every call, so that the policy has something to remember."""
MIN_GROWTH_BYTES = 1024

QUICK = "answers within its time limit"
STEADY_EXAMPLE = f"    a replica takes {CONCURRENCY} requests at once, and starts in no time"
STATE_EXAMPLE = f"    a load that goes from 0 to {STATE_LOADS - 1} requests, again and again"

ViewPromise: TypeAlias = Callable[[BuildScaling, DeploymentView], str | None]
"""A function that returns in words what is broken on a view, or None if the promise is kept."""
TimePromise: TypeAlias = Callable[[BuildScaling], str | None]


def is_quick(build: BuildScaling, view: DeploymentView) -> str | None:
    """The policy answers within its time limit. The best of three tries counts. The time is wall time, because a policy
    that waits delays the next policy as well."""
    limit_s, best = LIMITS.time_limit_s, float("inf")
    for _ in range(3):
        policy = build()
        began = time.perf_counter()
        policy.answers(copy.copy(view))
        best = min(best, time.perf_counter() - began)
        if best <= limit_s:
            return None
    return f"it took {best:.2g} s; an answer after {limit_s:g} s does not count"


def answers(build: BuildScaling, view: DeploymentView) -> str | None:
    error = next((one for one in build().answers(view).values() if isinstance(one, BaseException)), None)
    return None if error is None else f"it {parse_answer(error)}"


def _answered(answers: Mapping[str, object]) -> list[object]:
    """The answers that are not exceptions. Raises `Unjudged` if all are; another promise reports exceptions."""
    given = [one for one in answers.values() if not isinstance(one, BaseException)]
    if not given:
        raise Unjudged
    return given


def wants_a_number(build: BuildScaling, view: DeploymentView) -> str | None:
    read = [parse_answer(answer) for answer in _answered(build().answers(view))]
    return next((f"it {problem}" for problem in read if isinstance(problem, Reason)), None)


def leaves_the_view_alone(build: BuildScaling, view: DeploymentView) -> str | None:
    """The policy changes nothing in the view except `view.state`."""
    given = copy.deepcopy(view)
    build().answers(given)
    for name in view.__struct_fields__:
        if name != "state" and getattr(given, name) != getattr(view, name):
            return f"view.{name} was changed: keep what you must remember in view.state"
    return None


def repeats(build: BuildScaling, view: DeploymentView) -> str | None:
    read = []
    for seed in SEEDS:
        with global_seed(seed):
            answer = build().answers(copy.deepcopy(view))
        _answered(answer)
        read.append({node: parse_answer(one) for node, one in answer.items()})
    invalid = any(isinstance(one, Reason) for answer in read for one in answer.values())
    if read[0] == read[1] or invalid:  # another promise reports an invalid answer
        return None
    return "two fresh policies answered differently to the same view: no randomness, no clock but view.now, no globals"


def keeps_plain_state(build: BuildScaling, view: DeploymentView) -> str | None:
    """The data that the policy keeps in `view.state` can be saved and read back."""
    given = msgspec.structs.replace(copy.deepcopy(view), state={})
    answer = build().answers(given)
    entries: Mapping[Any, Any] = given.state  # keys may be of any type
    kept = savable_state(entries)
    for name, entry in entries.items():
        if name not in kept:
            what = f"is a {type(entry).__name__}" if isinstance(name, str) else "has a name that is not text"
            return f"view.state[{name!r}] {what}: only plain data survives a restart"
        if _as_lists(entry) != kept[name]:
            back = reprlib.repr(kept[name])
            return f"view.state[{name!r}] comes back as {back} after a restart: use text as keys, and finite numbers"
    again = msgspec.structs.replace(copy.deepcopy(view), state=kept)
    error = next((one for one in build().answers(again).values() if isinstance(one, BaseException)), None)
    if error is None or any(isinstance(one, BaseException) for one in answer.values()):
        return None
    return f"after a restart with its own state it {parse_answer(error)}"


def _as_lists(note: Any) -> Any:
    """The data with lists in place of tuples, because JSON has no tuples."""
    if isinstance(note, Mapping):
        return {key: _as_lists(value) for key, value in note.items()}
    return [_as_lists(value) for value in note] if isinstance(note, list | tuple) else note


def keeps_small_state(build: BuildScaling) -> str | None:
    """The policy's data in `view.state` stops growing, and stays below the limit."""
    every_s, limit = LIMITS.interval_s, f"at most {MAX_STATE_BYTES:,} are kept; drop old entries"
    sizes = _state_sizes(build(), every_s, STATE_ROUNDS)
    if sizes[-1] > MAX_STATE_BYTES:
        calls = f"{len(sizes)} call{'s' if len(sizes) > 1 else ''}"
        return f"called every {every_s:g} s, it had {sizes[-1]:,} bytes in view.state after {calls}: {limit}"
    sizes = _state_sizes(build(), STATE_LONG_STEP_S, STATE_LONG_ROUNDS)
    half, end = sizes[len(sizes) // 2 - 1], sizes[-1]
    if end - half < MIN_GROWTH_BYTES or end < 1.5 * half:
        return None
    return (
        f"called every {STATE_LONG_STEP_S / 60:g} min, it had {half:,} bytes in view.state after {len(sizes) // 2:,} "
        f"calls and {end:,} after {len(sizes):,}: {limit}"
    )


def _state_sizes(policy: PolicyUnderTest, step_s: float, rounds: int) -> list[int]:
    """Size of the policy's state after every call, in bytes."""
    state, sizes, until = dict[str, Any](), list[int](), time.perf_counter() + STATE_TIMEOUT_S
    for number in range(rounds):
        policy.answers(_steady_view(float(number % STATE_LOADS), 1, NOW + number * step_s, state))
        sizes.append(state_size(state))
        if sizes[-1] > MAX_STATE_BYTES or time.perf_counter() > until:
            break
    return sizes


class SteadyRun(msgspec.Struct, frozen=True):
    """The answers of a policy to one constant load."""

    load: float
    step_s: float
    wanted: list[int]
    targets: list[int]
    wishes: list[bool]
    """Whether the policy answered each call with a number."""

    @property
    def late_changes(self) -> list[tuple[int, int]]:
        """The changes of the target in the second half of the rounds, as pairs: before, after."""
        second_half = self.targets[len(self.targets) // 2 :]
        return [(before, after) for before, after in pairwise(second_half) if before != after]

    def __str__(self) -> str:
        load = f"a constant load of {self.load:g} request{'s' if self.load > 1 else ''}" if self.load else "no load"
        return f"called every {self.step_s:g} s with {load}"


def does_not_flap(build: BuildScaling) -> str | None:
    for run in _steady_runs(build):
        late = run.late_changes
        if len(late) >= FLAPPING_CHANGES and any(after < before for before, after in late):
            seen = ", ".join(str(after) for _, after in late[-6:])
            return f"{run}, it went to {seen}: decide by the current load, not by changes or by the clock"
    return None


def stays_within_bounds(build: BuildScaling) -> str | None:
    """The answer to a small constant load neither grows without end nor exceeds the maximum."""
    for run in _steady_runs(build):
        late = run.late_changes
        if len(late) >= FLAPPING_CHANGES and not any(after < before for before, after in late):
            seen = ", ".join(str(after) for _, after in late[-3:])
            return (
                f"{run}, it wanted more each time ({seen}, ...): adding to view.target, its own last answer, never ends"
            )
        if max(run.wanted, default=0) > MAX_REPLICAS:
            wanted = f"it wanted {max(run.wanted)} where view.max_replicas is {MAX_REPLICAS}"
            return f"{run}, {wanted}: return what the load needs; the guard applies the bounds"
    return None


def _steady_runs(build: BuildScaling) -> Iterator[SteadyRun]:
    until, answered = time.perf_counter() + STEADY_TIMEOUT_S, False
    for step_s in STEADY_STEPS_S:
        for load in STEADY_LOADS:
            run = _steady_run(build(), load, step_s, until)
            answered = answered or any(run.wishes)
            yield run
    if not answered:
        raise Unjudged


def _steady_run(policy: PolicyUnderTest, load: float, step_s: float, until: float) -> SteadyRun:
    """Call the policy on a constant load. Each answer becomes the next target, limited only by the bounds."""
    target, state, run = 1, dict[str, Any](), SteadyRun(load, step_s, [], [], [])
    changed: dict[bool, float] = {}
    for number in range(STEADY_ROUNDS):
        if time.perf_counter() > until:
            break
        now = NOW + number * step_s
        view = _steady_view(load, target, now, state, changed.get(True), changed.get(False))
        wish = parse_answer(next(iter(policy.answers(view).values())))
        wanted = wish.replicas if isinstance(wish, Wish) else target
        after = max(min(wanted, MAX_REPLICAS), 1 if load else 0)
        if after != target:
            changed[after > target] = now
        target = after
        run.wishes.append(isinstance(wish, Wish))
        run.wanted.append(wanted)
        run.targets.append(target)
    return run


def _steady_view(
    load: float,
    target: int,
    now: float,
    state: dict[str, Any],
    up_at: float | None = None,
    down_at: float | None = None,
) -> DeploymentView:
    """A view in which all replicas run, and the load has been constant for a long time."""
    room = max(target, 1) * CONCURRENCY
    ongoing = min(load, target * CONCURRENCY)
    latency = flat(100.0 * load / room)
    return DeploymentView(
        name="chat",
        now=now,
        replicas=target,
        target=target,
        max_replicas=MAX_REPLICAS,
        max_concurrency=CONCURRENCY,
        ongoing=ongoing,
        queued=load - ongoing,
        ongoing_windows={length: flat(ongoing, length) for length in WINDOW_LENGTHS_S},
        queued_windows={length: flat(load - ongoing, length) for length in WINDOW_LENGTHS_S},
        arrivals_per_s=dict.fromkeys(WINDOW_LENGTHS_S, load * 10),
        ttft_ms=latency,
        latency_ms=latency,
        kv_usage=flat(min(load / room, 1.0)),
        tokens_per_s=ongoing * 100.0,
        cost_per_replica_hour=1.0,
        since_up_s=None if up_at is None else now - up_at,
        since_down_s=None if down_at is None else now - down_at,
        state=state,
    )


VIEW_PROMISES: dict[str, ViewPromise] = {
    QUICK: is_quick,
    "answers in every situation": answers,
    "wants a whole number of replicas": wants_a_number,
    "leaves its view alone": leaves_the_view_alone,
    "answers the same to the same view": repeats,
    "keeps state that survives a restart": keeps_plain_state,
}
TIME_PROMISES: dict[str, tuple[TimePromise, str]] = {
    "keeps its state small": (keeps_small_state, STATE_EXAMPLE),
    "comes to rest on a steady load": (does_not_flap, STEADY_EXAMPLE),
    "stays within its bounds on a steady load": (stays_within_bounds, STEADY_EXAMPLE),
}
"""Promises about answers over time, each with the example that a report shows."""

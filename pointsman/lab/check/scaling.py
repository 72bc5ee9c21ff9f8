"""The promises of a scaling policy."""

import copy
import json
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias, get_type_hints

import msgspec

from pointsman.lab.check.dice import loaded
from pointsman.lab.check.sights import NOW, flat
from pointsman.scaling import ApplicationView, DeploymentView, ScalingLimits, Wish, ask, by_node
from pointsman.scaling.answers import understood

Build: TypeAlias = Callable[[], Any]
Promise: TypeAlias = Callable[[Build, DeploymentView], str | None]

NODES = ("first", "second")
"""What an application's policy is tried on: the same view twice."""
STEADY_LOADS = (0.0, 1.0, 7.0, 30.0)
CONCURRENCY = 4
ROUNDS = 200
STEP_S = 10.0
OFTEN = 4
"""Changes in the second half of the rounds, on a load that stays the same, that are flapping."""


def is_scaling_policy(subject: object) -> bool:
    """An object with desired_replicas, or a function, which can be nothing else."""
    return hasattr(subject, "desired_replicas") or (callable(subject) and not isinstance(subject, type))


def answers(build: Build, view: DeploymentView) -> str | None:
    """It returns something, whatever comes."""
    error = next((one for one in _asked(build(), view).values() if isinstance(one, BaseException)), None)
    return None if error is None else f"it raised {type(error).__name__}: {error}"


def wants_a_number(build: Build, view: DeploymentView) -> str | None:
    """What it wants is a whole number of replicas, 0 or more."""
    said = [understood(answer) for answer in _asked(build(), view).values()]
    return next((f"it {words}" for words in said if isinstance(words, str)), None)


def leaves_the_view_alone(build: Build, view: DeploymentView) -> str | None:
    """Only `view.state` may change."""
    given = copy.deepcopy(view)
    _asked(build(), given)
    for name in view.__struct_fields__:
        if name != "state" and getattr(given, name) != getattr(view, name):
            return f"view.{name} was changed: keep what you must remember in view.state"
    return None


def repeats(build: Build, view: DeploymentView) -> str | None:
    """Two fresh policies with the same view answer the same."""
    said = []
    for dice in (1, 2):
        with loaded(dice):
            said.append({node: understood(answer) for node, answer in _asked(build(), copy.deepcopy(view)).items()})
    if said[0] == said[1]:
        return None
    return "two fresh policies answered differently to the same view: no dice, no clock but view.now, no globals"


def keeps_plain_notes(build: Build, view: DeploymentView) -> str | None:
    """What it keeps in `view.state` can be saved, and read again."""
    given = msgspec.structs.replace(copy.deepcopy(view), state={})
    policy = build()
    answer = _asked(policy, given)
    for name, note in given.state.items():
        try:
            json.dumps(note)
        except (TypeError, ValueError):
            return f"view.state[{name!r}] is a {type(note).__name__}: only plain data survives a restart"
    again = msgspec.structs.replace(copy.deepcopy(view), state=json.loads(json.dumps(dict(given.state))))
    error = next((one for one in _asked(build(), again).values() if isinstance(one, BaseException)), None)
    if error is None or any(isinstance(one, BaseException) for one in answer.values()):
        return None
    return f"after a restart with its own notes it raised {type(error).__name__}: {error}"


def does_not_flap(build: Build) -> str | None:
    """On a load that stays the same, what it wants comes to rest."""
    for load in STEADY_LOADS:
        targets = _targets(build(), load)
        late = [after for before, after in pairwise(targets[ROUNDS // 2 :]) if before != after]
        if len(late) >= OFTEN:
            seen = ", ".join(map(str, late[-6:]))
            return (
                f"with {load:g} requests here all the time it went to {seen}: look at what is here, not at what changed"
            )
    return None


def _targets(policy: object, load: float) -> list[int]:
    """What becomes the target, every ten seconds, where nothing but bounds is in the way."""
    target, state, targets = 1, dict[str, Any](), list[int]()
    changed: dict[bool, float] = {}
    for number in range(ROUNDS):
        now = NOW + number * STEP_S
        room = target * CONCURRENCY
        ongoing = min(load, room)
        latency = flat(100.0 * max(load / room, 0.25)) if ongoing else flat(0.0)
        lengths = (30.0, 300.0, 3600.0)
        view = DeploymentView(
            name="chat",
            now=now,
            replicas=target,
            target=target,
            max_replicas=16,
            max_concurrency=CONCURRENCY,
            ongoing=ongoing,
            queued=load - ongoing,
            ongoing_windows={length: flat(ongoing, length) for length in lengths},
            queued_windows={length: flat(load - ongoing, length) for length in lengths},
            arrivals_per_s=dict.fromkeys(lengths, load * 10),
            ttft_ms=latency,
            latency_ms=latency,
            kv_usage=flat(min(load / room, 1.0) if room else 0.0),
            tokens_per_s=ongoing * 100.0,
            cost_per_replica_hour=1.0,
            since_up_s=now - changed[True] if True in changed else None,
            since_down_s=now - changed[False] if False in changed else None,
            state=state,
        )
        wish = understood(next(iter(_asked(policy, view).values())))
        after = min(wish.replicas, 16) if isinstance(wish, Wish) else target
        if after != target:
            changed[after > target] = now
        target = max(after, 1 if load else 0)
        targets.append(target)
    return targets


def is_quick(build: Build) -> str | None:
    """The time on the clock, the best of three: whoever waits holds the next question up as well."""
    limit_s = ScalingLimits().time_limit_s
    best = min(_time_of(build) for _ in range(3))
    return None if best <= limit_s else f"it took {best:.2g} s; an answer after {limit_s:g} s does not count"


def _time_of(build: Build) -> float:
    policy = build()
    began = time.perf_counter()
    _asked(policy, DeploymentView(name="chat", now=NOW, replicas=1, target=1, cost_per_replica_hour=1.0))
    return time.perf_counter() - began


def _asked(policy: object, view: DeploymentView) -> Mapping[str, object]:
    """Its answer, or one for each node if it is asked for a whole application."""
    if not _for_application(policy):
        return {"": ask(policy, view)}
    nodes = {node: msgspec.structs.replace(view, name=node) for node in NODES}
    return by_node(ask(policy, ApplicationView(name="app", now=view.now, deployments=nodes, state=view.state)), NODES)


def _for_application(policy: object) -> bool:
    """Whether it says that it takes an ApplicationView."""
    method = getattr(policy, "desired_replicas", policy)
    try:
        hints = get_type_hints(getattr(method, "func", method))
    except (NameError, TypeError):  # nothing can be said about its types
        return False
    return ApplicationView in [hint for name, hint in hints.items() if name != "return"]


PROMISES: dict[str, Promise] = {
    "answers in every situation": answers,
    "wants a whole number of replicas": wants_a_number,
    "leaves its view alone": leaves_the_view_alone,
    "answers the same to the same view": repeats,
    "keeps notes that survive a restart": keeps_plain_notes,
}
QUICK = "answers within its time limit"
STEADY = "comes to rest on a steady load"
EXAMPLES: dict[str, tuple[Callable[[Build], str | None], str]] = {
    QUICK: (is_quick, "    a view in which nothing is going on"),
    STEADY: (does_not_flap, f"    asked every {STEP_S:g} s; a replica takes {CONCURRENCY} requests at once"),
}
"""Tried in one situation each."""

"""What a scaling policy promises of every single view."""

import copy
import reprlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from pointsman.lab.check.dice import SEEDS, loaded
from pointsman.lab.check.tried import Build
from pointsman.scaling import DeploymentView, ScalingLimits
from pointsman.scaling.policy import plain, understood

Promise: TypeAlias = Callable[[Build, DeploymentView], str | None]


def is_quick(build: Build, view: DeploymentView) -> str | None:
    """The time on the clock, the best of three: whoever waits holds the next question up as well."""
    limit_s, best = ScalingLimits().time_limit_s, float("inf")
    for _ in range(3):
        policy = build()
        began = time.perf_counter()
        policy.answers(copy.copy(view))
        best = min(best, time.perf_counter() - began)
        if best <= limit_s:
            return None
    return f"it took {best:.2g} s; an answer after {limit_s:g} s does not count"


def answers(build: Build, view: DeploymentView) -> str | None:
    """It returns something, whatever comes."""
    error = next((one for one in build().answers(view).values() if isinstance(one, BaseException)), None)
    return None if error is None else f"it {understood(error)}"


def wants_a_number(build: Build, view: DeploymentView) -> str | None:
    """What it wants is a whole number of replicas, 0 or more."""
    said = [understood(answer) for answer in build().answers(view).values()]
    return next((f"it {words}" for words in said if isinstance(words, str)), None)


def leaves_the_view_alone(build: Build, view: DeploymentView) -> str | None:
    """Only `view.state` may change."""
    given = copy.deepcopy(view)
    build().answers(given)
    for name in view.__struct_fields__:
        if name != "state" and getattr(given, name) != getattr(view, name):
            return f"view.{name} was changed: keep what you must remember in view.state"
    return None


def repeats(build: Build, view: DeploymentView) -> str | None:
    """Two fresh policies with the same view answer the same."""
    said = []
    for seed in SEEDS:
        with loaded(seed):
            answer = build().answers(copy.deepcopy(view))
        said.append({node: understood(one) for node, one in answer.items()})
    nonsense = any(isinstance(one, str) for answer in said for one in answer.values())
    if said[0] == said[1] or nonsense:  # what is wrong with it, another promise tells
        return None
    return "two fresh policies answered differently to the same view: no dice, no clock but view.now, no globals"


def keeps_plain_notes(build: Build, view: DeploymentView) -> str | None:
    """What it keeps in `view.state` can be saved, and read again."""
    given = msgspec.structs.replace(copy.deepcopy(view), state={})
    answer = build().answers(given)
    notes: Mapping[Any, Any] = given.state  # whatever it wrote
    kept = plain(notes)
    for name, note in notes.items():
        if name not in kept:
            what = f"is a {type(note).__name__}" if isinstance(name, str) else "has a name that is no text"
            return f"view.state[{name!r}] {what}: only plain data survives a restart"
        if _as_lists(note) != kept[name]:
            back = reprlib.repr(kept[name])
            return f"view.state[{name!r}] comes back as {back} after a restart: use text as keys, and finite numbers"
    again = msgspec.structs.replace(copy.deepcopy(view), state=kept)
    error = next((one for one in build().answers(again).values() if isinstance(one, BaseException)), None)
    if error is None or any(isinstance(one, BaseException) for one in answer.values()):
        return None
    return f"after a restart with its own notes it {understood(error)}"


def _as_lists(note: Any) -> Any:
    """The same with lists in place of tuples, which nobody would notice."""
    if isinstance(note, Mapping):
        return {key: _as_lists(value) for key, value in note.items()}
    return [_as_lists(value) for value in note] if isinstance(note, list | tuple) else note


QUICK = "answers within its time limit"
VIEW_PROMISES: dict[str, Promise] = {
    QUICK: is_quick,
    "answers in every situation": answers,
    "wants a whole number of replicas": wants_a_number,
    "leaves its view alone": leaves_the_view_alone,
    "answers the same to the same view": repeats,
    "keeps notes that survive a restart": keeps_plain_notes,
}

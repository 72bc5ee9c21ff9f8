"""What code that is running knows of its call, and what loading code must not do.

Enters: whoever runs a call sets `CURRENT`; whoever loads a module sets `LOADING`. Leaves: `current()` for the user's
code, `loading_stops_here()` for ours. The one rule: both go with the thread or task, and nothing is kept here.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from math import isfinite
from typing import Any

import msgspec

from pointsman.errors import PointsmanError


class CallContext(msgspec.Struct, frozen=True, kw_only=True):
    """The call under way."""

    app: str = ""
    node: str = ""
    rank: int | None = None
    """Of this shard; None: the node has none."""
    shards: int = 1
    request_id: str = ""
    step: str = ""
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    """When the answer is due, by `clock`; None: at no particular time."""
    clock: Callable[[], float] | None = None
    recorder: Callable[[str, float], None] | None = None
    """Takes numbers of the author's own; None: nobody wants to know them here."""

    @property
    def time_left_s(self) -> float | None:
        """Until the answer is due, never below 0; None: it has all the time."""
        if self.deadline is None or self.clock is None:
            return None
        return max(self.deadline - self.clock(), 0.0)

    def record_metric(self, name: str, value: float) -> None:
        """Tell a number of your own, for scaling policies: `view.metrics[name]`. From any thread."""
        if not name:
            raise PointsmanError("a metric has a name, such as frames_waiting, and this one is empty")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise PointsmanError(f'metric "{name}" is a number, found {value!r}') from None
        if not isfinite(number):
            raise PointsmanError(f'metric "{name}" is a finite number, found {number}')
        if self.recorder is not None:
            self.recorder(str(name), number)


NOBODY = CallContext()
CURRENT: ContextVar[CallContext] = ContextVar("pointsman_call", default=NOBODY)


def current() -> CallContext:
    """The call that this code runs for; outside of one, an empty one."""
    return CURRENT.get()


def record_metric(name: str, value: float) -> None:
    """Tell a number of your own, for scaling policies: `view.metrics[name]`. Outside of a replica it goes nowhere.

    A thread that you have started yourself knows of no call: there, use the `record_metric` of a `current()` that was
    kept, such as that of `__init__`.
    """
    current().record_metric(name, value)


class Loading(msgspec.Struct, frozen=True):
    """A module that a replica is loading for some of its names."""

    where: str
    """In words, for messages."""
    wanted: frozenset[str]
    namespace: Mapping[str, Any]
    """What the module has defined so far."""


LOADING: ContextVar[Loading | None] = ContextVar("pointsman_loading", default=None)


class LoadedEnough(BaseException):
    """Whatever a replica wants of a module is defined: the rest of it is not for replicas."""


def loading_stops_here(what: str) -> None:
    """To be called first by `execute` and `deploy`: a script that a replica loads must not start its pipeline again.

    Does nothing outside of a replica that is loading. In one, it raises `LoadedEnough` if what the replica wants is
    defined by now; else `execute` goes on, and `deploy` cannot.
    """
    loading = LOADING.get()
    if loading is None:
        return
    missing = sorted(loading.wanted - loading.namespace.keys())
    if not missing:
        raise LoadedEnough
    if what == "deploy":
        raise PointsmanError(
            f"{loading.where}: {' and '.join(missing)} is defined below deploy(); "
            "define it above, or put deploy() under if __name__ == '__main__'"
        )

"""The context of a call, for the code that the call runs; and the context of loading code in a replica.

Enters: the runtime of a call sets `CURRENT`; the loader of a module sets `LOADING`. Leaves: `current()` for the user's
code, and `loading_stops_here()` for Pointsman's. The one rule: both variables belong to a thread or task, and this
module keeps nothing else.
"""

from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from math import isfinite
from typing import Any

import msgspec

from pointsman.errors import PointsmanError


class CallContext(msgspec.Struct, frozen=True, kw_only=True):
    """The current call."""

    app: str = ""
    node: str = ""
    rank: int | None = None
    """The rank of this shard; None if the node has no shards."""
    shards: int = 1
    request_id: str = ""
    step: str = ""
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    """The time by `clock` when the response is due; None if the call has no deadline."""
    clock: Callable[[], float] | None = None
    env: MutableMapping[str, str | None] | None = None
    """Environment variables of the node if the node shares its process with others; None if it has its own process."""
    recorder: Callable[[str, float], None] | None = None
    """The function that receives custom metrics; None if this process does not collect them."""

    @property
    def time_left_s(self) -> float | None:
        """Time until the response is due, at least 0; None if the call has no deadline."""
        if self.deadline is None or self.clock is None:
            return None
        return max(self.deadline - self.clock(), 0.0)

    def record_metric(self, name: str, value: float) -> None:
        """Record a custom metric for scaling policies: `view.metrics[name]`. Thread-safe."""
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


NO_CALL = CallContext()
CURRENT: ContextVar[CallContext] = ContextVar("pointsman_call", default=NO_CALL)


def current() -> CallContext:
    """The context of the call that this code runs for; an empty context outside of a call."""
    return CURRENT.get()


def record_metric(name: str, value: float) -> None:
    """Record a custom metric for scaling policies: `view.metrics[name]`. Outside of a replica it has no effect.

    A thread that you start has no current call. Keep the result of `current()` before you start the thread, such as in
    `__init__`, and use its `record_metric` in the thread.
    """
    current().record_metric(name, value)


class Loading(msgspec.Struct, frozen=True):
    """A module that a replica is loading for some of its names."""

    where: str
    """The location of the module, for messages."""
    wanted: frozenset[str]
    namespace: Mapping[str, Any]
    """What the module has defined so far."""


LOADING: ContextVar[Loading | None] = ContextVar("pointsman_loading", default=None)


class LoadedEnough(BaseException):
    """All names that a replica needs from a module are defined; the rest of the module is not loaded."""


def loading_stops_here(what: str) -> None:
    """`execute` and `deploy` call this first: a script that a replica loads must not start its pipeline again.

    If no replica is loading code, this function does nothing. Otherwise it raises `LoadedEnough` if all names that the
    replica needs are defined. If some are missing, `execute` continues, and `deploy` is an error.
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

"""The methods of the user's object. A method is async or plain, returns one result or yields pieces, and takes one call
at a time or batches."""

import inspect
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

from pointsman.errors import PointsmanError, UnknownName
from pointsman.pipeline.graph import CALL
from pointsman.pipeline.options import Batching, batching_of

QUICK_S = 0.0002
"""A plain method is quick below this mean duration, which is about the cost of running a call in a thread."""
BLOCKING_S = 0.2
"""If a method has once blocked the loop for longer than this, it never runs on the loop again."""
MIN_CALLS = 8
"""Minimum number of calls before a method counts as quick."""
MEAN_OF = 16
"""The approximate number of calls that the running mean covers."""


class MethodKind(Enum):
    PLAIN = auto()
    ASYNC = auto()
    GENERATOR = auto()
    ASYNC_GENERATOR = auto()


class MethodPace:
    """Whether calls of a plain method are quick enough to run on the loop.

    One slow call raises the mean far above the limit. The slower the call, the longer the mean stays above it.
    """

    __slots__ = ("_blocks", "_mean_s", "_seen")

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._seen = 0
        self._blocks = False

    @property
    def is_quick(self) -> bool:
        return self._mean_s < QUICK_S and self._seen >= MIN_CALLS and not self._blocks

    def took(self, seconds: float, *, on_loop: bool = False) -> None:
        self._seen += 1
        self._mean_s += (seconds - self._mean_s) / min(self._seen, MEAN_OF)
        self._blocks = self._blocks or (on_loop and seconds > BLOCKING_S)


class Method:
    """A method of the object, or the function itself."""

    __slots__ = ("batching", "function", "kind", "name", "pace")

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self.kind = _kind_of(function)
        self.batching: Batching | None = batching_of(function)
        self.pace = MethodPace()


class Methods:
    """The methods of one object. Each method is looked up at its first call."""

    def __init__(self, target: Any, owner: str, *, is_function: bool = False) -> None:
        self._target = target
        self._owner = owner
        self._is_function = is_function
        self._known: dict[str, Method] = {}

    def find(self, name: str) -> Method:
        """The method of this name. Raises `UnknownName`."""
        return self._known.get(name) or self._found(name)

    def optional(self, name: str) -> Method | None:
        """A method that the object may have, such as check_health; None if the object lacks the method."""
        if self._is_function or not callable(getattr(self._target, name, None)):
            return None
        return self.find(name)

    def check(self) -> None:
        """Raises if a method could never be called."""
        for name in () if self._is_function else dir(type(self._target)):
            written = getattr(type(self._target), name, None)
            if batching_of(written) is not None and _kind_of(written) in (
                MethodKind.GENERATOR,
                MethodKind.ASYNC_GENERATOR,
            ):
                raise PointsmanError(f"{self._owner}.{name} is a generator; generators cannot take batches")

    def _found(self, name: str) -> Method:
        if self._is_function and name == CALL:
            function = self._target
        elif self._is_function or (name.startswith("_") and name != CALL):
            function = None
        else:
            function = getattr(self._target, name, None)
        if not callable(function):
            raise UnknownName(f"method of {self._owner}", name, self._public())
        method = self._known[name] = Method(name, function)
        return method

    def _public(self) -> list[str]:
        if self._is_function:
            return [CALL]
        names = [name for name in dir(type(self._target)) if not name.startswith("_") or name == CALL]
        return [name for name in names if callable(getattr(type(self._target), name, None))]


def _kind_of(function: Any) -> MethodKind:
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function) and not inspect.isclass(function):  # an object with `__call__`
        function = getattr(type(function), CALL, function)
    if inspect.isasyncgenfunction(function):
        return MethodKind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(function):
        return MethodKind.ASYNC
    return MethodKind.GENERATOR if inspect.isgeneratorfunction(function) else MethodKind.PLAIN

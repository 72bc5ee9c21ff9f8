"""Methods that take many calls at once: marked here, collected by the runtime."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, overload

import msgspec

from pointsman.errors import PointsmanError

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__pointsman_batch__"


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """How calls of a method are collected."""

    max_batch_size: Annotated[int, msgspec.Meta(ge=1)] = 8
    wait_ms: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    """Maximum time that the first call of a batch waits for others."""


@overload
def batch(function: F, /) -> F: ...
@overload
def batch(*, max_batch_size: int = 8, wait_ms: float = 5.0) -> Callable[[F], F]: ...
def batch(function: Any = None, /, *, max_batch_size: int = 8, wait_ms: float = 5.0) -> Any:
    """Let a method or function take concurrent calls together: a list for each argument in, a list of results out."""
    try:
        batching = msgspec.convert({"max_batch_size": max_batch_size, "wait_ms": wait_ms}, Batching)
    except msgspec.ValidationError as error:
        raise PointsmanError(
            f"batch(max_batch_size={max_batch_size!r}, wait_ms={wait_ms!r}): {str(error).replace('$.', '')}"
        ) from None

    def mark(function: Any) -> Any:
        setattr(function, _MARK, batching)
        return function

    return mark if function is None else mark(function)


def batching_of(function: Any) -> Batching | None:
    """How its calls are collected; None if they are not."""
    return getattr(function, _MARK, None)


def joined(calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> tuple[list[list[Any]], dict[str, list[Any]]]:
    """The arguments of many calls as those of one call: a list for each argument. All calls have the same arguments."""
    first_args, first_kwargs = calls[0]
    args = [[args[index] for args, _ in calls] for index in range(len(first_args))]
    return args, {name: [kwargs[name] for _, kwargs in calls] for name in first_kwargs}


def parted(results: Any, count: int, name: str) -> list[Any]:
    """The result of each call of a batch. Raises unless there is one for each."""
    if isinstance(results, str | bytes | Mapping) or not hasattr(results, "__len__"):
        raise PointsmanError(
            f"{name} takes batches, so it must return a list with a result for each call; it returned a "
            f"{type(results).__name__}"
        )
    if len(results) != count:
        raise PointsmanError(f"{name} was given a batch of {count} calls and returned {len(results)} results")
    return list(results)

"""Options of a node: replicas, resources, and how calls are handled."""

from collections.abc import Callable, Mapping, Sequence
from operator import ge, gt, le, lt
from typing import Annotated, Any, TypeVar, get_args, overload

import msgspec

from pointsman.errors import PointsmanError, UnknownName
from pointsman.parameters import Amount, Count, Number, Share, Size, Spelled, Time, unmarked

# Methods that take many calls at once: `batch` marks them, and the runtime collects their calls.


F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__pointsman_batch__"


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """How calls of a method are collected."""

    max_batch_size: Annotated[int, msgspec.Meta(ge=1)] = 8
    wait_ms: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    """Maximum time that the first call of a batch waits for other calls."""


@overload
def batch(function: F, /) -> F: ...
@overload
def batch(*, max_batch_size: int = 8, wait_ms: float = 5.0) -> Callable[[F], F]: ...
def batch(function: Any = None, /, *, max_batch_size: int = 8, wait_ms: float = 5.0) -> Any:
    """Let a method or function take concurrent calls together: it gets a list for each argument, and returns a list of
    results."""
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
    """How the calls of a function are collected; None if they are not collected."""
    return getattr(function, _MARK, None)


def joined(calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> tuple[list[list[Any]], dict[str, list[Any]]]:
    """The arguments of many calls, joined for one call: a list for each argument. All calls must have the same number
    of arguments and the same names."""
    first_args, first_kwargs = calls[0]
    args = [[args[index] for args, _ in calls] for index in range(len(first_args))]
    return args, {name: [kwargs[name] for _, kwargs in calls] for name in first_kwargs}


def parted(results: Any, count: int, name: str) -> list[Any]:
    """The result of each call of a batch. Raises unless there is exactly one result for each call."""
    if isinstance(results, str | bytes | Mapping) or not hasattr(results, "__len__"):
        raise PointsmanError(
            f"{name} takes batches, so it must return a list with a result for each call; it returned a "
            f"{type(results).__name__}"
        )
    if len(results) != count:
        raise PointsmanError(f"{name} was given a batch of {count} calls and returned {len(results)} results")
    return list(results)


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but code and arguments. YAML has the same fields."""

    num_replicas: Annotated[Number, Spelled("replicas")] = 1
    shards: Count = 1
    """Number of processes of one replica: a call goes to all of them."""
    max_concurrency: Count = 16
    """Concurrent calls per replica."""
    threads: Count = 1
    """Maximum number of calls that run at the same time if the code is not async."""
    cpus: Amount = 0.0
    memory_bytes: Annotated[Size, Spelled("memory")] = 0
    gpus: Number = 0
    gpu_memory_bytes: Annotated[Size, Spelled("gpuMemory")] = 0
    """Memory of each replica on each of its GPUs."""
    gpu_share: Share | None = None
    """The replica's share of each of its GPUs; other instances may use the rest."""
    labels: Mapping[str, str] = {}
    """Labels that a worker must have."""
    idempotent: bool = False
    """Whether a call may be repeated if its replica dies."""
    deadline_share: Share | None = None
    """The share of a request's total time that a call of this node may take; None if a call may take all the time that
    is left."""
    user_config: Any = None
    """JSON that is passed to `reconfigure` before the first call, and whenever it changes."""
    scheduling: Mapping[str, Any] | None = None
    """{policy, parameters} or {config}, as for deployments; None stands for fifo."""
    scaling: Mapping[str, Any] | None = None
    """{policy, parameters, min, max, ...}, as for deployments; None if there are always `num_replicas` replicas."""
    env: Mapping[str, str] = {}
    start_timeout_s: Time = 120.0
    health_check_period_s: Time = 2.0
    health_check_timeout_s: Time = 5.0
    graceful_shutdown_s: Time = 60.0
    """How long running calls may take to end before a replica is stopped."""

    def changed(self, changes: Mapping[str, Any]) -> "NodeOptions":
        """The same options with these changes. Raises for unknown names and invalid values."""
        for name in changes:
            if name not in self.__struct_fields__:
                raise UnknownName("option", name, self.__struct_fields__)
        made = msgspec.structs.replace(self, **changes)
        try:
            return msgspec.convert(msgspec.to_builtins(made), NodeOptions)
        except (msgspec.ValidationError, TypeError) as error:
            problems = made.problems() or [f"options {', '.join(changes)}: {error}"]
            raise PointsmanError("; ".join(problems)) from None

    def problems(self) -> list[str]:
        """Messages for numbers that are out of bounds."""
        found = []
        for field in msgspec.structs.fields(self):
            value, bounds = getattr(self, field.name), _bounds(field.type)
            if isinstance(value, int | float) and any(not compare(value, limit) for _, compare, limit in bounds):
                must_be = " and ".join(f"{words} {limit:g}" for words, _, limit in bounds)
                found.append(f"{field.name} must be {must_be}, found {value:g}")
        return found


_BOUNDS = {"ge": ("at least", ge), "gt": ("above", gt), "le": ("at most", le), "lt": ("below", lt)}


def _bounds(annotation: Any) -> list[tuple[str, Callable[[float, float], bool], float]]:
    """(text, comparison, limit) for each bound of a type. For an optional type, the bounds of the type itself."""
    kind, marks = unmarked(annotation)
    of_members = [bound for member in get_args(kind) for bound in _bounds(member)] if kind is not Any else []
    own = [
        (*_BOUNDS[name], getattr(mark, name))
        for mark in marks
        if isinstance(mark, msgspec.Meta)
        for name in _BOUNDS
        if getattr(mark, name) is not None
    ]
    return own + of_members

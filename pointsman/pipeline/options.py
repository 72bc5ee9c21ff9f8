"""What can be said of a node: how many replicas, what each needs, what may be done with a call."""

from collections.abc import Callable, Mapping
from operator import ge, gt, le, lt
from typing import Annotated, Any, get_args

import msgspec

from pointsman.errors import PointsmanError, UnknownName
from pointsman.parameters import Amount, Count, Number, Share, Size, Spelled, Time, unmarked


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but code and arguments. Documents have the same fields."""

    num_replicas: Annotated[Number, Spelled("replicas")] = 1
    shards: Count = 1
    """Processes that make up one replica: a call goes to all of them."""
    max_concurrency: Count = 16
    """Calls that a replica is given at once."""
    threads: Count = 1
    """How many of them run side by side, where the code is not async."""
    cpus: Amount = 0.0
    memory_bytes: Annotated[Size, Spelled("memory")] = 0
    gpus: Number = 0
    gpu_memory_bytes: Annotated[Size, Spelled("gpuMemory")] = 0
    """On each of its GPUs."""
    gpu_share: Share | None = None
    """Of each of its GPUs; others may have the rest."""
    labels: Mapping[str, str] = {}
    """That a worker must have to be chosen."""
    idempotent: bool = False
    """A call may be made again if its replica dies."""
    deadline_share: Share | None = None
    """Of the time that a request has in all, what a call of this node may take; None: all that is left."""
    user_config: Any = None
    """Handed to `reconfigure` before the first call and whenever it changes; JSON."""
    scheduling: Mapping[str, Any] | None = None
    """{policy, parameters} or {config}, as for deployments; None: fifo."""
    scaling: Mapping[str, Any] | None = None
    """{policy, parameters, min, max, ...}, as for deployments; None: always `num_replicas`."""
    env: Mapping[str, str] = {}
    start_timeout_s: Time = 120.0
    health_check_period_s: Time = 2.0
    health_check_timeout_s: Time = 5.0
    graceful_shutdown_s: Time = 60.0
    """What calls under way get to end before a replica is stopped."""

    def changed(self, changes: Mapping[str, Any]) -> "NodeOptions":
        """The same with other values; raises for names that are none and values that cannot be."""
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
        """Which numbers are out of bounds, in words."""
        found = []
        for field in msgspec.structs.fields(self):
            value, bounds = getattr(self, field.name), _bounds(field.type)
            if isinstance(value, int | float) and any(not compare(value, limit) for _, compare, limit in bounds):
                must_be = " and ".join(f"{words} {limit:g}" for words, _, limit in bounds)
                found.append(f"{field.name} must be {must_be}, found {value:g}")
        return found


_BOUNDS = {"ge": ("at least", ge), "gt": ("above", gt), "le": ("at most", le), "lt": ("below", lt)}


def _bounds(annotation: Any) -> list[tuple[str, Callable[[float, float], bool], float]]:
    """In words, as a comparison, and its limit; of a type that may be None, those of the other one."""
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

"""What can be said of a node: how many replicas, what each needs, what may be done with a call."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.errors import PointsmanError, UnknownName


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but code and arguments. Changing any of these leaves the other nodes alone."""

    num_replicas: int = 1
    shards: int = 1
    """Processes that make up one replica: a call goes to all of them."""
    max_concurrency: int = 16
    """Calls that a replica is given at once."""
    threads: int = 1
    """How many of them run side by side, where the code is not async."""
    cpus: float = 0.0
    memory_bytes: int = 0
    gpus: int = 0
    gpu_memory_bytes: int = 0
    """On each of its GPUs."""
    gpu_share: float | None = None
    """Of each of its GPUs; others may have the rest."""
    labels: Mapping[str, str] = {}
    """That a worker must have to be chosen."""
    idempotent: bool = False
    """A call may be made again if its replica dies."""
    deadline_share: float | None = None
    """Of the time that a request has in all, what a call of this node may take; None: all that is left."""
    user_config: Any = None
    """Handed to `reconfigure` before the first call and whenever it changes; JSON."""
    scheduling: Mapping[str, Any] | None = None
    """{policy, parameters} or {config}, as for deployments; None: fifo."""
    scaling: Mapping[str, Any] | None = None
    """{policy, parameters, min, max, ...}, as for deployments; None: always `num_replicas`."""
    env: Mapping[str, str] = {}
    start_timeout_s: float = 120.0
    health_check_period_s: float = 2.0
    health_check_timeout_s: float = 5.0
    graceful_shutdown_s: float = 60.0
    """What calls under way get to end before a replica is stopped."""

    def changed(self, changes: Mapping[str, Any]) -> "NodeOptions":
        """The same with other values; raises for names that are none and values that cannot be."""
        for name in changes:
            if name not in self.__struct_fields__:
                raise UnknownName("option", name, self.__struct_fields__)
        made = msgspec.structs.replace(self, **changes)
        try:
            made = msgspec.convert(msgspec.to_builtins(made), NodeOptions)
        except (msgspec.ValidationError, TypeError) as error:
            raise PointsmanError(f"options {', '.join(changes)}: {error}") from None
        problems = made.problems()
        if problems:
            raise PointsmanError("; ".join(problems))
        return made

    def problems(self) -> list[str]:
        """What cannot be, in words."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None}
        return [
            f"{name} must be {_WORDS[bound]}, found {values[name]:g}"
            for bound, names in _BOUNDS.items()
            for name in names
            if name in values and not bound(values[name])
        ]


def _at_least_1(value: float) -> bool:
    return value >= 1


def _not_negative(value: float) -> bool:
    return value >= 0


def _above_0(value: float) -> bool:
    return value > 0


def _a_share(value: float) -> bool:
    return 0 < value <= 1


_BOUNDS = {
    _at_least_1: ("shards", "max_concurrency", "threads"),
    _not_negative: ("num_replicas", "cpus", "memory_bytes", "gpus", "gpu_memory_bytes"),
    _above_0: ("start_timeout_s", "health_check_period_s", "health_check_timeout_s", "graceful_shutdown_s"),
    _a_share: ("gpu_share", "deadline_share"),
}
_WORDS = {
    _at_least_1: "at least 1",
    _not_negative: "at least 0",
    _above_0: "above 0",
    _a_share: "above 0 and at most 1",
}

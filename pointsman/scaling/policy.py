"""What a scaling policy is: an object with one method, or a plain function."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from pointsman.scaling.view import ApplicationView, DeploymentView


class Wish(msgspec.Struct, frozen=True):
    """What a policy wants, and why in its own words. A bare number will do as well."""

    replicas: int
    why: str = ""
    refused: str = ""
    """What it would have wanted and does not allow itself, such as what is beyond a budget."""


@runtime_checkable
class ScalingPolicy(Protocol):
    """Says how many replicas it wants. It is called every few seconds, on a thread of its own; it must not block, and
    keeps what it must remember in `view.state`. The guard bounds, delays and records what it says."""

    def desired_replicas(self, view: DeploymentView) -> "int | Wish": ...


@runtime_checkable
class ApplicationScalingPolicy(Protocol):
    """The same for all nodes of an application at once; nodes that it leaves out stay as they are."""

    def desired_replicas(self, view: ApplicationView) -> "Mapping[str, int | Wish]": ...


PolicyFunction: TypeAlias = Callable[[Any], Any]

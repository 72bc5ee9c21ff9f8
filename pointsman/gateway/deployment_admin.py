"""The part of the admin API that is about single deployments: how many instances there are, and why."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec

from pointsman.errors import PointsmanError
from pointsman.gateway.operations import AdminCall, Operations
from pointsman.selection.text import one_line

LONGEST_S = 366 * 86400.0
"""An order that ends does so within a year; else it holds until it is taken back."""
LONGEST_NAME = 100
"""Characters of who gave an order."""
SOMEBODY = "the admin API"


class ScaleAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many instances, whatever the policy says."""

    replicas: Annotated[int, msgspec.Meta(ge=0)] | None
    """None: the policy decides again."""
    for_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """None: until somebody says otherwise."""
    by: str = SOMEBODY


class DeploymentAdmin:
    """What is asked under `/admin/v1/deployments`."""

    def __init__(self, plane: Operations) -> None:
        self._plane = plane

    def handler(self, method: str, parts: list[str]) -> "Callable[[AdminCall], Coroutine[Any, Any, Any]] | None":
        """Who answers; None: there is no such thing."""
        match method, parts:
            case "GET", [_, "scaling"]:
                return self._scaling
            case "GET", [_, "load"]:
                return self._load
            case "POST", [_, "scale"]:
                return self._scale
        return None

    async def _scaling(self, call: AdminCall) -> dict[str, Any]:
        return self._plane.scaling(call.parts[1])

    async def _load(self, call: AdminCall) -> dict[str, Any]:
        return self._plane.load_seen(call.parts[1])

    async def _scale(self, call: AdminCall) -> dict[str, Any]:
        asked = msgspec.json.decode(call.body, type=ScaleAsked)
        if asked.for_s is not None and asked.for_s > LONGEST_S:
            raise PointsmanError(
                f"for_s may be a year at most, which is {LONGEST_S:.0f}, found {asked.for_s:.10g}; "
                "leave it out to have it until it is taken back"
            )
        by = one_line(asked.by, LONGEST_NAME) or SOMEBODY
        await self._plane.scale(call.parts[1], asked.replicas, asked.for_s, by)
        return self._plane.scaling(call.parts[1])

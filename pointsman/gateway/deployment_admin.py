"""The part of the admin API that is about single deployments: how many instances there are, and why."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec

from pointsman.gateway.operations import Call, Operations


class ScaleAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many instances, whatever the policy says."""

    replicas: Annotated[int, msgspec.Meta(ge=0)] | None
    """None: the policy decides again."""
    for_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """None: until somebody says otherwise."""
    by: str = "the admin API"


class DeploymentAdmin:
    """What is asked under `/admin/v1/deployments`."""

    def __init__(self, plane: Operations) -> None:
        self._plane = plane

    def handler(self, method: str, parts: list[str]) -> "Callable[[Call], Coroutine[Any, Any, Any]] | None":
        """Who answers; None: there is no such thing."""
        match method, parts:
            case "GET", [_, "scaling"]:
                return self._scaling
            case "POST", [_, "scale"]:
                return self._scale
        return None

    async def _scaling(self, call: Call) -> dict[str, Any]:
        return self._plane.scaling(call.parts[1])

    async def _scale(self, call: Call) -> dict[str, Any]:
        asked = msgspec.json.decode(call.body, type=ScaleAsked)
        await self._plane.scale(call.parts[1], asked.replicas, asked.for_s, asked.by)
        return self._plane.scaling(call.parts[1])

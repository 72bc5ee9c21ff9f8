"""The part of the admin API that is about applications: deployed, looked at, rolled back, deleted."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from pointsman.gateway.operations import AdminCall, Operations, changes_told
from pointsman.runtimes.local.changes import ManifestText


class ApplicationAdmin:
    """What is asked under `/admin/v1/applications`."""

    def __init__(self, plane: Operations) -> None:
        self._plane = plane

    def handler(self, method: str, parts: list[str]) -> "Callable[[AdminCall], Coroutine[Any, Any, Any]] | None":
        """Who answers; None: there is no such thing."""
        match method, parts:
            case "GET", []:
                return self._all
            case "POST", []:
                return self._deploy
            case "POST", ["plan"]:
                return self._plan
            case "GET", [_]:
                return self._one
            case "POST", [_, "rollback"]:
                return self._rollback
            case "DELETE", [_]:
                return self._delete
        return None

    async def _all(self, call: AdminCall) -> dict[str, Any]:
        return {"applications": self._plane.status()["applications"]}

    async def _one(self, call: AdminCall) -> dict[str, Any]:
        name = call.parts[1]
        text, status = self._plane.application(name), self._plane.status()
        [told] = [one for one in status["applications"] if one["name"] == name]
        mine = {deployment for node in told["nodes"] for deployment in node["deployments"]}
        return {**told, "yaml": text, "deployments": [one for one in status["deployments"] if one["name"] in mine]}

    async def _plan(self, call: AdminCall) -> dict[str, Any]:
        return changes_told(self._plane.plan(msgspec.json.decode(call.body, type=ManifestText)))

    async def _deploy(self, call: AdminCall) -> dict[str, Any]:
        return changes_told(await self._plane.deploy(msgspec.json.decode(call.body, type=ManifestText)))

    async def _rollback(self, call: AdminCall) -> dict[str, Any]:
        return changes_told(await self._plane.rollback(call.parts[1]))

    async def _delete(self, call: AdminCall) -> dict[str, Any]:
        return changes_told(await self._plane.delete(call.parts[1]))

"""What can be asked of a plane, and what it is asked with."""

from typing import Any, Protocol

import msgspec

from pointsman.placement.fleet import Snapshot
from pointsman.runtimes.local.changes import Changes, ManifestText


class Operations(Protocol):
    """What can be asked of a plane."""

    def status(self) -> dict[str, Any]: ...

    def fleet(self) -> Snapshot: ...

    def plan(self, manifest: ManifestText) -> Changes: ...

    async def apply(self, manifest: ManifestText) -> Changes: ...

    async def deploy(self, document: ManifestText) -> Changes: ...

    async def rollback(self, name: str) -> Changes: ...

    async def delete(self, name: str) -> Changes: ...

    def application(self, name: str) -> str: ...

    def logs(self, instance_id: str, lines: int) -> str: ...

    async def drain(self, instance_id: str) -> None: ...

    def scaling(self, deployment: str) -> dict[str, Any]: ...

    def load_seen(self, deployment: str) -> dict[str, Any]: ...

    async def scale(self, deployment: str, replicas: int | None, for_s: float | None, by: str) -> None: ...


class AdminCall(msgspec.Struct):
    """One request, taken apart."""

    parts: list[str]
    query: dict[str, str]
    body: bytes


def changes_told(changes: Changes) -> dict[str, Any]:
    """Changes as the admin API tells them."""
    return {"changes": msgspec.to_builtins(changes.steps), "text": str(changes)}

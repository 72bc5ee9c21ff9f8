"""What a plane on a cluster leaves behind when it is killed: its state, and an actor that keeps its nodes alive.

Enters: beats and images of the state of one plane at a time. Leaves: epoch, state and secret for the next plane, and
leases for the nodes while there is none. The one rule: while a plane lives, it alone grants leases; the keeper grants
them once the plane has been silent, for a bounded time.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pointsman.errors import PointsmanError
from pointsman.runtimes.ray.leases import NodeLease
from pointsman.runtimes.ray.node import POLL_S

BEAT_S = 0.5
"""How often a plane says that it lives."""
SILENT_S = 1.5
"""After this, the keeper renews the leases in its place."""
TAKEN_S = 3.0
"""A plane that has been silent for this long may be replaced by another."""
ANSWER_S = 1.0


class PlaneRuns(PointsmanError):
    """Another plane runs on this cluster."""


class KeptState(msgspec.Struct):
    """What the keeper has, in memory and at the storage that the user has named."""

    epoch: int = 0
    """Of the newest plane; grows with each."""
    secret: str = ""
    """Of replicas and gateway."""
    image: bytes = b""
    """Of the store; empty if there is none."""
    number: int = 0
    """Of the image, within its epoch."""
    gateway: str = ""
    """Where replicas reach the gateway."""


class Keeper:
    """An actor, found by its name. Its state survives it if there is a storage."""

    def __init__(self, storage: str, orphan_grace_s: float, lease_s: float, stop_grace_s: float) -> None:
        """`orphan_grace_s`: how long nodes are kept without a plane."""
        self._file = Path(storage) / "pointsman.state" if storage else None
        self._orphan_grace_s, self._terms = orphan_grace_s, (lease_s, stop_grace_s)
        self._kept = self._loaded()
        self._plane = ""
        self._heard_at = -TAKEN_S
        self._agents: dict[str, Any] = {}
        self._leases: dict[str, NodeLease] = {}
        self._keeping: asyncio.Task[None] | None = None

    async def take(self, plane: str) -> KeptState:
        """Begin as the plane of this cluster. Raises `PlaneRuns`, `PointsmanError` if the storage cannot be used."""
        if self._plane not in ("", plane) and time.monotonic() - self._heard_at < TAKEN_S:
            raise PlaneRuns(f"a plane runs on this cluster already ({self._plane}); stop it first")
        self._lives(plane)
        # Unix time: greater than any epoch that a keeper without a storage has forgotten.
        self._kept.epoch = max(self._kept.epoch + 1, int(time.time()))
        self._kept.secret = self._kept.secret or secrets.token_urlsafe(32)
        self._kept.number = 0
        self._store()
        return self._kept

    async def beat(self, epoch: int, plane: str, agents: Mapping[str, Any]) -> None:
        """The plane lives. `agents`: of the nodes to keep if it dies."""
        self._check(epoch)
        self._lives(plane)
        self._agents = dict(agents)

    async def release(self, epoch: int, node: str) -> float:
        """A node is not kept any more. Seconds until what it ran under leases of the keeper has ended."""
        self._check(epoch)
        self._agents.pop(node, None)
        lease = self._leases.get(node)
        return 0.0 if lease is None else lease.until_over(time.monotonic())

    async def save(self, epoch: int, number: int, image: bytes, gateway: str = "") -> None:
        """Keep an image of the store. Raises `PointsmanError` if the storage cannot be written."""
        self._check(epoch)
        if number > self._kept.number:
            before = self._kept
            self._kept = msgspec.structs.replace(before, image=image, number=number, gateway=gateway or before.gateway)
            try:
                self._store()
            except PointsmanError:
                self._kept = before
                raise

    async def leave(self, epoch: int) -> None:
        """The plane has ended everything, and leaves."""
        self._check(epoch)
        self._plane, self._agents = "", {}

    def _lives(self, plane: str) -> None:
        self._plane, self._heard_at = plane, time.monotonic()
        if self._keeping is None:
            self._keeping = asyncio.get_running_loop().create_task(self._keep())

    def _check(self, epoch: int) -> None:
        if epoch != self._kept.epoch:
            raise PlaneRuns(f"this plane is not that of the cluster any more: epoch {epoch}, now {self._kept.epoch}")

    async def _keep(self) -> None:
        """Renew leases while the plane is silent."""
        while True:
            await asyncio.sleep(POLL_S)
            silent_s = time.monotonic() - self._heard_at
            if self._plane and SILENT_S < silent_s < self._orphan_grace_s:
                await asyncio.gather(*(self._renew(name, agent) for name, agent in self._agents.items()))

    async def _renew(self, name: str, agent: Any) -> None:
        lease = self._leases.setdefault(name, NodeLease(*self._terms))
        with suppress(Exception):  # of a node that is gone, or of Ray: its lease ends
            async with asyncio.timeout(ANSWER_S):
                answer = await agent.poll.remote(self._kept.epoch, lease.echo(), lease.lease_s, None)
            lease.heard(answer.stamp, time.monotonic())

    def _loaded(self) -> KeptState:
        if self._file is None or not self._file.exists():
            return KeptState()
        try:
            return msgspec.msgpack.decode(self._file.read_bytes(), type=KeptState)
        except (OSError, msgspec.MsgspecError) as error:
            raise PointsmanError(f"{self._file} cannot be used ({error}); move it away") from error

    def _store(self) -> None:
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished = self._file.with_suffix(".new")
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                out.write(msgspec.msgpack.encode(self._kept))
                out.flush()
                os.fsync(out.fileno())
            unfinished.replace(self._file)
        except OSError as error:
            raise PointsmanError(f"{self._file} cannot be written ({error.strerror}); see runtime.storage") from error

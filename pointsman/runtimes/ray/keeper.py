"""What remains of a plane on a cluster when it is killed: its state, and an actor that keeps its nodes alive.

Enters: beats and images of the state of one plane at a time. Leaves: epoch, state and secret for the next plane, and
leases for the nodes while there is no plane. The one rule: while a plane is alive, only the plane grants leases. When
it has become silent, the keeper grants them for a bounded time.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pointsman.errors import PointsmanError
from pointsman.runtimes.ray.leases import NodeLease
from pointsman.runtimes.ray.node import POLL_S

BEAT_S = 0.5
"""Interval between a plane's heartbeats."""
SILENT_S = 1.0
"""Silence of a plane after which the keeper renews the leases in its place."""
TAKEN_S = 3.0
"""A plane that has been silent for this long may be replaced by another."""
ANSWER_S = 1.0
NOTED_S = 1.0
"""Interval at which the storage notes that the plane is alive."""


def node_agent(namespace: str, name: str) -> Any:
    """The actor of a node. Raises `ValueError` if there is no actor."""
    import ray

    return ray.get_actor(f"node-{name}", namespace=namespace)


class PlaneRuns(PointsmanError):
    """Another plane runs on this cluster."""


class KeptState(msgspec.Struct):
    """The state of the keeper, in memory and at the storage that the user has named."""

    epoch: int = 0
    """The epoch of the newest plane; it grows with each plane."""
    secret: str = ""
    """The secret of replicas and gateway."""
    image: bytes = b""
    """The image of the store; empty if there is no image."""
    number: int = 0
    """The number of the image within its epoch."""
    gateway: str = ""
    """The address at which replicas reach the gateway."""
    plane: str = ""
    """The plane that rules the cluster; empty if there is none and no plane has left anything."""
    nodes: tuple[str, ...] = ()
    """The nodes that the keeper keeps if the plane dies."""


class Checkpoint:
    """The state of a keeper at the storage that the user has named, if any: two files."""

    def __init__(self, file: Path | None) -> None:
        """If `file` is None, nothing is stored."""
        self._file = file

    def load(self) -> KeptState:
        if self._file is None or not self._file.exists():
            return KeptState()
        try:
            return msgspec.msgpack.decode(self._file.read_bytes(), type=KeptState)
        except (OSError, msgspec.MsgspecError) as error:
            raise PointsmanError(f"{self._file} cannot be used ({error}); move it away") from error

    def store(self, kept: KeptState) -> None:
        """Store the state. Raises `PointsmanError` if the storage cannot be written."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished = self._file.with_suffix(".new")
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                out.write(msgspec.msgpack.encode(kept))
                out.flush()
                os.fsync(out.fileno())
            unfinished.replace(self._file)
        except OSError as error:
            raise PointsmanError(f"{self._file} cannot be written ({error.strerror}); see runtime.storage") from error

    def note_beat(self) -> None:
        """Note that the plane is alive, by the clock of this machine."""
        if self._file is not None:
            with suppress(OSError):  # a storage that cannot be written is reported at the next save
                self._file.with_suffix(".beat").write_text(repr(time.time()), encoding="ascii")

    def silent_s(self) -> float | None:
        """How long ago the plane was last alive; None if that is unknown."""
        if self._file is None:
            return None
        try:
            noted = float(self._file.with_suffix(".beat").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return max(time.time() - noted, 0.0)


class Keeper:
    """An actor that is found by its name. With a storage, the state survives the actor."""

    def __init__(
        self,
        storage: str,
        orphan_grace_s: float,
        lease_s: float,
        stop_grace_s: float,
        namespace: str = "",
        find: Callable[[str, str], Any] = node_agent,
    ) -> None:
        """`orphan_grace_s`: how long nodes are kept without a plane. `find`: the agent of a node, by namespace and
        name."""
        self._checkpoint = Checkpoint(Path(storage) / f"{namespace or 'pointsman'}.state" if storage else None)
        self._orphan_grace_s, self._terms = orphan_grace_s, (lease_s, stop_grace_s)
        self._namespace, self._find = namespace, find
        self._kept = self._checkpoint.load()
        silent_s = self._checkpoint.silent_s() if self._kept.plane else None
        self._heard_at = time.monotonic() - (orphan_grace_s if silent_s is None else silent_s)
        self._noted_at = 0.0
        self._agents: dict[str, Any] = {}
        self._leases: dict[str, NodeLease] = {}
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def take(self, plane: str) -> KeptState:
        """Make `plane` the plane of this cluster. Raises `PlaneRuns`; `PointsmanError` if the storage is unusable."""
        ruling = self._kept.plane
        if ruling not in ("", plane) and time.monotonic() - self._heard_at < TAKEN_S:
            raise PlaneRuns(f"a plane runs on this cluster already ({ruling}); stop it first")
        self._kept.plane = plane
        # Unix time: greater than any epoch that a keeper without a storage has forgotten.
        self._kept.epoch = max(self._kept.epoch + 1, int(time.time()))
        self._kept.secret = self._kept.secret or secrets.token_urlsafe(32)
        self._kept.number = 0
        self._checkpoint.store(self._kept)
        self._lives()
        return self._kept

    async def beat(self, epoch: int, plane: str, agents: Mapping[str, Any]) -> None:
        """Note that the plane is alive. `agents`: the agents of the nodes to keep if it dies."""
        self._check(epoch)
        self._lives()
        self._agents = dict(agents)
        nodes = tuple(sorted(agents))
        if (plane, nodes) != (self._kept.plane, self._kept.nodes):
            self._kept.plane, self._kept.nodes = plane, nodes
            self._checkpoint.store(self._kept)

    async def release(self, epoch: int, node: str) -> float:
        """Stop keeping a node. Returns the seconds until everything on it under the keeper's leases has ended."""
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
                self._checkpoint.store(self._kept)
            except PointsmanError:
                self._kept = before
                raise

    async def leave(self, epoch: int) -> None:
        """Note that the plane has ended everything, and leaves."""
        self._check(epoch)
        self._agents = {}
        self._kept.plane, self._kept.nodes = "", ()
        self._checkpoint.store(self._kept)

    def _lives(self) -> None:
        self._heard_at = time.monotonic()
        if self._heard_at - self._noted_at >= NOTED_S:
            self._noted_at = self._heard_at
            self._checkpoint.note_beat()

    def _check(self, epoch: int) -> None:
        if epoch != self._kept.epoch:
            raise PlaneRuns(f"this plane is no longer that of the cluster: epoch {epoch}, now {self._kept.epoch}")

    async def _keep(self) -> None:
        """Renew leases while the plane is silent."""
        while True:
            silent_s = time.monotonic() - self._heard_at
            if self._kept.plane and SILENT_S < silent_s < self._orphan_grace_s:
                for name in [one for one in self._kept.nodes if one not in self._agents]:  # the actor was restarted
                    with suppress(ValueError):  # Ray has no such actor: its node is gone
                        self._agents[name] = await asyncio.to_thread(self._find, self._namespace, name)
                await asyncio.gather(*(self._renew(name, agent) for name, agent in self._agents.items()))
            await asyncio.sleep(POLL_S)

    async def _renew(self, name: str, agent: Any) -> None:
        lease, stamp = self._leases.setdefault(name, NodeLease(*self._terms)), None
        with suppress(Exception):  # the node is gone, or Ray fails: its lease ends
            async with asyncio.timeout(ANSWER_S):
                while stamp is None:  # the first answer only brings a stamp
                    stamp = lease.echo()
                    answer = await agent.poll.remote(self._kept.epoch, stamp, lease.lease_s, None)
                    lease.heard(answer.stamp, time.monotonic())

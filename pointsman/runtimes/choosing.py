"""The composition root: the only place that names concrete runtimes."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pointsman.errors import UnknownName
from pointsman.runtimes.interface import PlaneOperations
from pointsman.runtimes.serving import PlaneTraffic
from pointsman.runtimes.tasks import Tasks
from pointsman.types import Worker

RUNTIMES = ("local", "ray")
"""Runtimes that run real processes."""


class RuntimeChoice(msgspec.Struct, frozen=True):
    """Where a plane runs its instances."""

    name: str = "local"
    address: str = ""
    """Address of a Ray cluster; if empty, a cluster is started on this machine."""
    storage: str = ""
    """A folder for the state, on all nodes of a cluster; if empty, the cluster keeps the state in memory."""
    host: str = ""
    """The address of this machine in the cluster; if empty, the address that Ray finds."""
    namespace: str = "pointsman"
    lease_s: float = 3.0
    orphan_grace_s: float = 60.0


LOCAL = RuntimeChoice()


def plane_on(runtime: RuntimeChoice, state: Path | None, traffic: PlaneTraffic, tasks: Tasks) -> PlaneOperations:
    """A plane that is not started yet. It keeps its state at `state`, or only in memory if that is None. `tasks` runs
    its background tasks."""
    _check(runtime.name)
    from pointsman.runtimes.plane import Plane

    if runtime.name == "ray":
        from pointsman.runtimes.ray.cluster import RayCluster, RaySettings
        from pointsman.runtimes.ray.runtime import RayRuntime

        settings = RaySettings(
            address=runtime.address,
            host=runtime.host,
            namespace=runtime.namespace,
            storage=runtime.storage,
            lease_s=runtime.lease_s,
            orphan_grace_s=runtime.orphan_grace_s,
        )
        return Plane(RayRuntime(state, RayCluster(settings), tasks=tasks), traffic)
    from pointsman.runtimes.local.runtime import LocalRuntime

    return Plane(LocalRuntime(state, tasks=tasks), traffic)


def workers_of(runtime: str, labels: Mapping[str, str] | None = None) -> list[Worker]:
    """The workers that a plane would find. No plane is needed. Drivers are called, and they may raise anything."""
    _check(runtime)
    from pointsman.runtimes.machine.detection import detect

    return [detect(labels=labels)]


def _check(runtime: str) -> None:
    if runtime not in RUNTIMES:
        raise UnknownName("runtime", runtime, RUNTIMES)

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
"""Those that run real processes."""


class RuntimeChoice(msgspec.Struct, frozen=True):
    """Where a plane runs its instances."""

    name: str = "local"
    address: str = ""
    """Of a Ray cluster; empty: one is started on this machine."""
    storage: str = ""
    """A folder for the state that all nodes of a cluster reach; empty: the memory of the cluster."""


LOCAL = RuntimeChoice()


def plane_on(runtime: RuntimeChoice, state: Path | None, traffic: PlaneTraffic, tasks: Tasks) -> PlaneOperations:
    """A plane that is not started yet. `state`: where its state is kept; None: nowhere, it ends with this process.
    `tasks`: where its background tasks run."""
    _check(runtime.name)
    from pointsman.runtimes.plane import Plane

    if runtime.name == "ray":
        from pointsman.runtimes.ray.cluster import RaySettings
        from pointsman.runtimes.ray.runtime import RayRuntime

        settings = RaySettings(address=runtime.address, storage=runtime.storage)
        return Plane(RayRuntime(state, settings, tasks=tasks), traffic)
    from pointsman.runtimes.local.runtime import LocalRuntime

    return Plane(LocalRuntime(state, tasks=tasks), traffic)


def workers_of(runtime: str, labels: Mapping[str, str] | None = None) -> list[Worker]:
    """The workers that a plane would find, without a plane. Drivers are asked, which may raise anything."""
    _check(runtime)
    from pointsman.runtimes.machine.detection import detect

    return [detect(labels=labels)]


def _check(runtime: str) -> None:
    if runtime not in RUNTIMES:
        raise UnknownName("runtime", runtime, RUNTIMES)

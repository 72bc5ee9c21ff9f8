"""The composition root: the only place that names concrete runtimes."""

from collections.abc import Mapping
from pathlib import Path

from pointsman.errors import UnknownName
from pointsman.runtimes.interface import PlaneOperations
from pointsman.runtimes.serving import PlaneTraffic
from pointsman.runtimes.tasks import Tasks
from pointsman.types import Worker

RUNTIMES = ("local",)
"""Those that run real processes."""


def plane_on(runtime: str, state: Path | None, traffic: PlaneTraffic, tasks: Tasks) -> PlaneOperations:
    """A plane that is not started yet. `state`: where its state is kept; None: nowhere, it ends with this process.
    `tasks`: where its background tasks run."""
    _check(runtime)
    from pointsman.runtimes.local.runtime import LocalRuntime
    from pointsman.runtimes.plane import Plane

    return Plane(LocalRuntime(state, tasks=tasks), traffic)


def workers_of(runtime: str, labels: Mapping[str, str] | None = None) -> list[Worker]:
    """The workers that a plane would find, without a plane. Drivers are asked, which may raise anything."""
    _check(runtime)
    from pointsman.runtimes.local.detection import detect

    return [detect(labels=labels)]


def _check(runtime: str) -> None:
    if runtime not in RUNTIMES:
        raise UnknownName("runtime", runtime, RUNTIMES)

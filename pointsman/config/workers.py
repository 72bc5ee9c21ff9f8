"""The `workers` of a document: today, this machine."""

import platform
from collections.abc import Sequence

from pointsman.config.manifest import WorkerSpec
from pointsman.config.names import Names
from pointsman.config.problems import Problems
from pointsman.config.validation import usable

THIS_MACHINE = "localhost"


def workers(specs: Sequence[WorkerSpec], problems: Problems) -> tuple[WorkerSpec, ...]:
    """The machines that may run instances. What is wrong has been noted."""
    names = Names("worker", problems)
    here = platform.node()
    given = list(usable(specs))
    for place, worker in given:
        names.take(worker.name, ("workers", place))
        if worker.name and worker.name.lower() not in (THIS_MACHINE, here.lower()):
            message = f'"{worker.name}" is not this machine ({THIS_MACHINE} or {here})'
            problems.add(("workers", place, "name"), f"{message}; other machines come with the Ray runtime")
    if len(given) > 1:
        message = f"found {len(given)} workers; the local runtime has one, this machine"
        problems.add(("workers", given[1][0]), f"{message}; other machines come with the Ray runtime")
    return tuple(worker for _, worker in given)

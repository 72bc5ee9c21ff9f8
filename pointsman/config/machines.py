"""Where instances run: the sections `runtime` and `workers` of a manifest."""

import platform
from collections.abc import Sequence
from typing import Literal

from pointsman.config.problems import Names, Problems
from pointsman.config.validation import INVALID, Section, usable
from pointsman.parameters import Amount

THIS_MACHINE = "localhost"

# ruff: noqa: RUF012 (each struct gets an empty mapping of its own)


class RuntimeSpec(Section, frozen=True):
    """What carries out the decisions of the plane."""

    type: Literal["local", "ray"] = "local"
    """This machine, or a Ray cluster."""
    address: str = ""
    """Of the head of the cluster, host:port; empty: one is started on this machine."""
    storage: str = ""
    """A folder for the state that all nodes reach; empty: it is in the memory of the cluster."""


class WorkerSpec(Section, frozen=True):
    """A machine that may run instances."""

    name: str
    labels: dict[str, str] = {}
    price_per_gpu_hour: Amount | None = None
    """For deployments without a price of their own."""


def workers(specs: Sequence[WorkerSpec], runtime: RuntimeSpec, problems: Problems) -> tuple[WorkerSpec, ...]:
    """The `workers` section: only this machine, unless there is a cluster."""
    names = Names("worker", problems)
    here = platform.node()
    given, is_cluster = list(usable(specs)), runtime is not INVALID and runtime.type == "ray"
    for index, worker in given:
        names.take(worker.name, ("workers", index))
        if not is_cluster and worker.name and worker.name.lower() not in (THIS_MACHINE, here.lower()):
            message = f'"{worker.name}" is not this machine ({THIS_MACHINE} or {here})'
            problems.add(("workers", index, "name"), f"{message}; other machines come with the Ray runtime")
    if len(given) > 1 and not is_cluster:
        message = f"found {len(given)} workers; the local runtime has one, this machine"
        problems.add(("workers", given[1][0]), f"{message}; other machines come with the Ray runtime")
    return tuple(worker for _, worker in given)

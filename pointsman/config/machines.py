"""Where instances run: the sections `runtime` and `workers` of a manifest, and what an instance needs from a worker."""

import platform
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pointsman.config.problems import Names, Problems
from pointsman.config.validation import INVALID, Section, usable
from pointsman.parameters import Amount, Bytes, Duration, Number, Share, yaml_name
from pointsman.selection import LabelExpression

THIS_MACHINE = "localhost"
RuntimeType = Literal["local", "ray"]
Namespace = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Lease = Annotated[Duration, Meta(ge=2.5, le=600)]
OrphanGrace = Annotated[Duration, Meta(ge=5, le=86400)]

# ruff: noqa: RUF012 (each struct gets its own empty mapping)


class SelectorSpec(Section, frozen=True):
    """Demands on the labels of workers, as Kubernetes writes them."""

    match_labels: dict[str, str] = {}
    match_expressions: list[LabelExpression] = []


class ResourcesSpec(Section, frozen=True):
    """The need of an instance, in place of an estimate from the files of its model."""

    gpus: Number = 1
    gpu_memory: Bytes | None = None
    """Memory on each GPU of the instance."""
    gpu_share: Share | None = None
    """Share of each GPU of the instance. Other instances may use the rest."""
    memory: Bytes | None = None
    """Memory of the machine."""


class RuntimeSpec(Section, frozen=True):
    """The runtime that carries out the decisions of the plane."""

    type: RuntimeType = "local"
    """Where instances run: on this machine, or in a Ray cluster."""
    address: str = ""
    """host:port of the head of the cluster. If empty, a cluster is started on this machine."""
    storage: str = ""
    """A folder for the state, which all nodes can reach. If empty, the state is in the memory of the cluster."""
    namespace: Namespace = "pointsman"
    """The namespace of the plane in the cluster. Each namespace has one plane."""
    lease: Lease = 3.0
    """If a node receives nothing from the plane or the keeper for this long, it ends its engines."""
    orphan_grace: OrphanGrace = 60.0
    """How long instances and gateways keep running without a plane."""


class WorkerSpec(Section, frozen=True):
    """A machine that may run instances."""

    name: str
    labels: dict[str, str] = {}
    price_per_gpu_hour: Amount | None = None
    """The price for deployments that set no price."""


def runtime(spec: RuntimeSpec | RuntimeType, problems: Problems) -> RuntimeSpec:
    """The `runtime` section. A document may also write the type alone."""
    if spec is INVALID:
        return RuntimeSpec()
    if isinstance(spec, str):
        return RuntimeSpec(type=spec)
    if spec.type == "local":
        for field in msgspec.structs.fields(RuntimeSpec):
            if field.name != "type" and getattr(spec, field.name) not in (field.default, INVALID):
                problems.add(("runtime", yaml_name(field)), "is for a cluster; add: type: ray")
    return spec


def workers(specs: Sequence[WorkerSpec], runtime: RuntimeSpec, problems: Problems) -> tuple[WorkerSpec, ...]:
    """The `workers` section. Without a cluster, it may have only this machine."""
    names = Names("worker", problems)
    here = platform.node()
    given, is_cluster = list(usable(specs)), runtime.type == "ray"
    for index, worker in given:
        names.take(worker.name, ("workers", index))
        if not is_cluster and worker.name and worker.name.lower() not in (THIS_MACHINE, here.lower()):
            message = f'"{worker.name}" is not this machine ({THIS_MACHINE} or {here})'
            problems.add(("workers", index, "name"), f"{message}; other machines come with the Ray runtime")
    if len(given) > 1 and not is_cluster:
        message = f"found {len(given)} workers; the local runtime has one, this machine"
        problems.add(("workers", given[1][0]), f"{message}; other machines come with the Ray runtime")
    return tuple(worker for _, worker in given)

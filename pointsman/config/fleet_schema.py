"""A `Fleet` document as types: machines, their GPUs, and what runs there already."""
# ruff: noqa: RUF012 (each struct gets an empty list or mapping of its own)

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from pointsman.config.section import Section
from pointsman.types import WorkerStatus

Size: TypeAlias = Any
"""80Gi, 80GiB, 80GB or bytes; read by `Sizes`, which says what is wrong with it."""
Repeats = Annotated[int, Meta(ge=1, le=100_000)]
Share = Annotated[float, Meta(ge=0, le=1)]
Cpus = Annotated[float, Meta(ge=0)]
Index = Annotated[int, Meta(ge=0)]


class GpuSpec(Section, frozen=True):
    """One GPU, or several equal ones."""

    model: str = ""
    """As the driver names it, or shorter."""
    count: Annotated[int, Meta(ge=1, le=64)] = 1
    memory: Size = None
    """Of each; left out: what this model has."""
    used: Size = None
    """On each, by anybody but the instances below."""
    link: str = ""
    """They all reach each other over this (NVLink, xGMI); the same word in another entry is the same link."""
    links: list[str] = []
    """The link of each, where they are not all on one."""
    pcie: str = ""
    """The same for a PCIe switch."""
    numa: Index | None = None
    vendor: str = ""
    """Left out: read from the model."""
    shareable: bool = True
    """Several instances may share it, if they allow it too."""


class ReservedSpec(Section, frozen=True):
    """Kept for the system: never given to instances."""

    memory: Size = None
    gpu_memory: Size = None
    """Of each GPU."""


class UsedSpec(Section, frozen=True):
    """In use by anybody but the instances below."""

    memory: Size = None


class FleetWorkerSpec(Section, frozen=True, kw_only=True):
    """One machine, or several equal ones."""

    name: str
    """With a count: w is w-1, w-2...; {n} stands for the number elsewhere in the name."""
    count: Repeats | None = None
    cpus: Cpus
    memory: Size
    labels: dict[str, str] = {}
    status: WorkerStatus = WorkerStatus.READY
    unified_memory: bool = False
    """Its GPUs use the memory of the machine."""
    reserved: ReservedSpec = ReservedSpec()
    used: UsedSpec = UsedSpec()
    files: list[str] = []
    """Models whose files it has."""
    gpus: list[GpuSpec] = []


class FleetInstanceSpec(Section, frozen=True, kw_only=True):
    """An instance that runs already, and what it has of each worker."""

    name: str
    deployment: str = ""
    on: str | list[str]
    """A worker, or several; it has the same GPUs of each."""
    gpus: list[Index] = []
    """Their indices; none: it runs on the CPU."""
    gpu_memory: Size = None
    """On each GPU."""
    gpu_share: Share = 0.0
    """Of each GPU, beside the memory."""
    gpu_layers: Annotated[int, Meta(ge=1)] | None = None
    """Layers on the GPU, if the others are on the CPU."""
    exclusive: bool = False
    """Nobody else may be on its GPUs."""
    memory: Size = None
    """Of each worker."""
    cpus: Cpus = 0.0


class FleetDocument(Section, frozen=True, kw_only=True):
    """A fleet, described."""

    api_version: Literal["pointsman/v1alpha1"] = "pointsman/v1alpha1"
    kind: Literal["Fleet"] = "Fleet"
    workers: list[FleetWorkerSpec]
    instances: list[FleetInstanceSpec] = []

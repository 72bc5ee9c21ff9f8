"""A `Fleet` document -> workers with their GPUs, and the claims of the instances that run there.

Enters: a file (`Path`) or text (`str`). Leaves: a `Snapshot`, or `ConfigError` with all problems.
"""

# ruff: noqa: RUF012 (each struct gets its own empty list or mapping)

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pointsman.config.problems import FieldPath, Names, Problems, found
from pointsman.config.validation import INVALID, Section, Validator, usable
from pointsman.config.yaml import read_yaml, text_of
from pointsman.errors import did_you_mean
from pointsman.parameters import Amount, Number, camel_case, quantity
from pointsman.placement.asks import Claim, Place, Tier
from pointsman.placement.fleet import Occupant, Snapshot
from pointsman.placement.gpu_models import KNOWN_GPUS, gpu_vendor, known_gpu, short_gpu_name
from pointsman.types import Gpu, Worker, WorkerStatus

Size: TypeAlias = Any
"""A size such as 80Gi, 80GiB or 80GB, or a number of bytes. `Sizes` reads sizes and reports invalid ones."""
Repeats = Annotated[int, Meta(ge=1, le=100_000)]
ShareOrNone = Annotated[float, Meta(ge=0, le=1)]

WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NUMBER = "{n}"


class GpuSpec(Section, frozen=True):
    """One GPU, or several equal ones."""

    model: str = ""
    """The name that the driver reports, or a shorter name."""
    count: Annotated[int, Meta(ge=1, le=64)] = 1
    memory: Size = None
    """Memory of each GPU. The default is the memory of the GPU model."""
    used: Size = None
    """Memory of each GPU that other programs use, besides the instances below."""
    link: str = ""
    """The link (NVLink, xGMI) that connects these GPUs. The same name in another entry means the same link."""
    links: list[str] = []
    """The link of each GPU, if the GPUs do not share one link."""
    pcie: str = ""
    """The PCIe switch that connects these GPUs. The same name in another entry means the same switch."""
    numa: Number | None = None
    vendor: str = ""
    """The default is the vendor of the GPU model."""
    shareable: bool = True
    """Whether instances that allow sharing may share this GPU."""


class ReservedSpec(Section, frozen=True):
    """Reserved for the system."""

    memory: Size = None
    gpu_memory: Size = None
    """Memory reserved on each GPU."""


class UsedSpec(Section, frozen=True):
    """Resources that anything but the instances below uses."""

    memory: Size = None


class FleetWorkerSpec(Section, frozen=True, kw_only=True):
    """One machine, or several equal ones."""

    name: str
    """The name of the machine. If `count` is set, w becomes w-1, w-2...; {n} marks another position for the number."""
    count: Repeats | None = None
    cpus: Amount
    memory: Size
    labels: dict[str, str] = {}
    status: WorkerStatus = WorkerStatus.READY
    unified_memory: bool = False
    """Whether its GPUs use the memory of the machine."""
    reserved: ReservedSpec = ReservedSpec()
    used: UsedSpec = UsedSpec()
    files: list[str] = []
    """Models whose files are on this machine."""
    price_per_gpu_hour: Amount | None = None
    gpus: list[GpuSpec] = []


class FleetInstanceSpec(Section, frozen=True, kw_only=True):
    """An instance that runs already, and what it uses on each worker."""

    name: str
    deployment: str = ""
    on: str | list[str]
    """One worker or several. The instance uses the same GPU indices on each worker."""
    gpus: list[Number] = []
    """The indices of the GPUs; empty if the instance runs on the CPU."""
    gpu_memory: Size = None
    """Memory that the instance uses on each GPU."""
    gpu_share: ShareOrNone = 0.0
    """Share of each GPU that the instance uses, in addition to the memory."""
    gpu_layers: Annotated[int, Meta(ge=1)] | None = None
    """Number of layers on the GPU, if the other layers are on the CPU."""
    exclusive: bool = False
    """Whether no other instance may use these GPUs."""
    memory: Size = None
    """Machine memory that the instance uses on each worker."""
    cpus: Amount = 0.0


class FleetDocument(Section, frozen=True, kw_only=True):
    api_version: Literal["pointsman/v1alpha1"] = "pointsman/v1alpha1"
    kind: Literal["Fleet"] = "Fleet"
    workers: list[FleetWorkerSpec]
    instances: list[FleetInstanceSpec] = []


def load_fleet(source: Path | str, file: str = "") -> Snapshot:
    """Load a `Fleet` document from a file (`Path`) or from text (`str`); `file` is the name of text in problems."""
    text, name = (source, "<text>") if isinstance(source, str) else (text_of(source), str(source))
    data, problems = read_yaml(text, file or name)
    kind = data.get("kind") if isinstance(data, dict) else None
    if data is None or (isinstance(kind, str) and kind != "Fleet"):
        if data is not None:
            problems.add(("kind",), f'expected "Fleet", found {found(kind)}')
        problems.raise_if_any()  # not YAML, or a document of another kind: there are no fields to check
    document = Validator(problems).value({} if data is None else data, FleetDocument, ())
    if document is INVALID:
        problems.raise_if_any()
    reader = Workers(problems)
    workers = reader.named(document.workers)
    occupants = _Instances(problems, workers, all_named=not reader.unnamed).running(document.instances)
    problems.raise_if_any()
    return Snapshot(tuple(workers.values()), occupants)


class Workers:
    """Builds the workers of a document, and reports their problems."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._sizes = Sizes(problems)
        self.unnamed = False
        """Whether the name of a worker could not be read. If so, unknown names are not reported."""

    def named(self, specs: Sequence[FleetWorkerSpec]) -> dict[str, Worker]:
        """Workers by name, in the order of the document."""
        if specs is not INVALID and not specs:
            self._problems.add(("workers",), "must not be empty")
        names = Names("worker", self._problems)
        made: dict[str, Worker] = {}
        for index, spec in usable(specs):
            path: FieldPath = ("workers", index)
            worker = self._worker(spec, path)
            for name in self._names(spec, path):
                names.take(name, path)
                made.setdefault(name, msgspec.structs.replace(worker, name=name))
        return made

    def _worker(self, spec: FleetWorkerSpec, path: FieldPath) -> Worker:
        memory = self._sizes.read(spec.memory, (*path, "memory"), least=1)
        gpus = self._gpus(spec, memory, (*path, "gpus"))
        used = reserved = reserved_gpu = 0
        if spec.used is not INVALID:
            used = self._sizes.read(spec.used.memory, (*path, "used", "memory"), most=memory)
        if spec.reserved is not INVALID:
            smallest = min((gpu.memory_bytes for gpu in gpus), default=None)
            reserved = self._sizes.read(spec.reserved.memory, (*path, "reserved", "memory"), most=memory)
            reserved_gpu = self._sizes.read(spec.reserved.gpu_memory, (*path, "reserved", "gpuMemory"), most=smallest)
        return Worker(
            name="",
            cpus=spec.cpus or 0.0,
            memory_bytes=memory,
            gpus=gpus,
            labels=spec.labels or {},
            status=spec.status,
            used_memory_bytes=used,
            reserved_memory_bytes=reserved,
            reserved_gpu_bytes=reserved_gpu,
            unified_memory=bool(spec.unified_memory),
            files=frozenset(name for _, name in usable(spec.files)),
            price_per_gpu_hour=spec.price_per_gpu_hour,
        )

    def _names(self, spec: FleetWorkerSpec, path: FieldPath) -> list[str]:
        """The names of a worker entry: w, or with a count of 4, w-1 to w-4."""
        if not spec.name or spec.count is INVALID:
            self.unnamed = True
            return [""] if spec.name == "" else []
        pattern = spec.name if NUMBER in spec.name or spec.count is None else f"{spec.name}-{NUMBER}"
        if not WORKER_NAME.fullmatch(pattern.replace(NUMBER, "1")):
            wanted = f"expected letters, digits, dots, dashes and underscores, and {NUMBER} for the number"
            self._problems.add((*path, "name"), f"{wanted}, found {found(spec.name)}")
            self.unnamed = True
            return []
        return [pattern.replace(NUMBER, str(number)) for number in range(1, (spec.count or 1) + 1)]

    def _gpus(self, spec: FleetWorkerSpec, machine_bytes: int, path: FieldPath) -> tuple[Gpu, ...]:
        gpus: list[Gpu] = []
        for index, one in usable(spec.gpus):
            here = (*path, index)
            memory = self._gpu_memory(one, machine_bytes if spec.unified_memory else None, here)
            used = self._sizes.read(one.used, (*here, "used"), most=memory)
            gpus += (
                Gpu(
                    index=number,
                    memory_bytes=memory,
                    model=one.model or "",
                    vendor=one.vendor or gpu_vendor(one.model or "") or "nvidia",
                    used_bytes=used,
                    link=link,
                    pcie=one.pcie or "",
                    numa=one.numa,
                    shareable=bool(one.shareable),
                )
                for number, link in enumerate(self._links(one, here), start=len(gpus))
            )
        return tuple(gpus)

    def _gpu_memory(self, one: GpuSpec, machine_bytes: int | None, path: FieldPath) -> int:
        """Memory of a GPU: the written value, else the memory of the model, else (if unified) that of the machine."""
        if one.memory is not None:
            return self._sizes.read(one.memory, (*path, "memory"), least=1, most=machine_bytes)
        known = known_gpu(one.model) if one.model else None
        if known is not None or machine_bytes is not None:
            return known.memory_bytes if known is not None else machine_bytes or 0
        if one.model:
            near = did_you_mean(short_gpu_name(one.model), {gpu.full_name for gpu in KNOWN_GPUS}, list_known=False)
            unknown = f"how much memory {found(one.model)} has is not known; add memory, such as 24Gi"
            self._problems.add((*path, "model"), unknown + near)
        elif one.model is not INVALID:
            self._problems.add(path, "needs a model that is known, or memory, such as 24Gi")
        return 0

    def _links(self, one: GpuSpec, path: FieldPath) -> list[str]:
        """The link of each GPU of an entry."""
        count = one.count or 1
        if not one.links:
            return [one.link or ""] * count
        if one.link:
            self._problems.add((*path, "links"), "link is given too; write link if all are on one, else links")
        if one.count is not INVALID and len(one.links) != count:
            self._problems.add((*path, "links"), f"expected one for each of {count} GPUs, found {len(one.links)}")
        return [link or "" for link in (*one.links, *[""] * count)][:count]


class _Instances:
    """Builds the claims of running instances, and reports their problems."""

    def __init__(self, problems: Problems, workers: Mapping[str, Worker], *, all_named: bool) -> None:
        self._problems = problems
        self._workers = workers
        self._all_named = all_named
        self._sizes = Sizes(problems)

    def running(self, specs: Sequence[FleetInstanceSpec]) -> tuple[Occupant, ...]:
        """All running instances. The result is empty if the document has a problem."""
        names = Names("instance", self._problems)
        made = []
        for index, spec in usable(specs):
            path: FieldPath = ("instances", index)
            names.take(spec.name, path)
            claims = self._claims(spec, path)
            if not len(self._problems):
                made.append(Occupant(spec.name, _place(spec, claims), spec.deployment))
        return tuple(made)

    def _claims(self, spec: FleetInstanceSpec, path: FieldPath) -> list[Claim]:
        self._check_gpu_fields(spec, path)
        gpu_bytes = self._sizes.read(spec.gpu_memory, (*path, "gpuMemory"))
        memory = self._sizes.read(spec.memory, (*path, "memory"))
        claims: list[Claim] = []
        for name in self._on(spec, path):
            whole = Claim(worker=name, cpus=spec.cpus or 0.0, memory_bytes=memory)  # counted once per worker
            for order, gpu in enumerate(self._gpus(spec, self._workers[name], path)):
                claim = Claim(
                    worker=name,
                    gpu=gpu,
                    gpu_bytes=gpu_bytes,
                    gpu_share=spec.gpu_share or 0.0,
                    exclusive=bool(spec.exclusive),
                    cpus=0.0 if order else whole.cpus,
                    memory_bytes=0 if order else whole.memory_bytes,
                )
                claims.append(claim)
            if not spec.gpus:
                claims.append(whole)
        return claims

    def _on(self, spec: FleetInstanceSpec, path: FieldPath) -> list[str]:
        """The known workers that an instance is on."""
        listed = [spec.on] if isinstance(spec.on, str) else [name for _, name in usable(spec.on)]
        if spec.on is not INVALID and not listed:
            self._problems.add((*path, "on"), "must not be empty")
        for index, name in enumerate(listed):
            field: FieldPath = (*path, "on") if isinstance(spec.on, str) else (*path, "on", index)
            if name not in self._workers and self._all_named:
                self._problems.add(field, f'there is no worker "{name}"{did_you_mean(name, self._workers)}')
            elif name in listed[:index]:
                self._problems.add(field, f'worker "{name}" is listed twice')
        return [name for name in dict.fromkeys(listed) if name in self._workers]

    def _gpus(self, spec: FleetInstanceSpec, worker: Worker, path: FieldPath) -> list[int]:
        """The known GPUs that an instance uses on a worker."""
        there = [gpu.index for gpu in worker.gpus]
        taken: list[int] = []
        for position, index in usable(spec.gpus):
            if index not in there:
                has = f"has {len(there)} GPUs, counted from 0" if there else "has no GPUs"
                self._problems.add((*path, "gpus", position), f'worker "{worker.name}" {has}; found {index}')
            elif index in taken:
                self._problems.add((*path, "gpus", position), f"GPU {index} is listed twice")
            else:
                taken.append(index)
        return taken

    def _check_gpu_fields(self, spec: FleetInstanceSpec, path: FieldPath) -> None:
        """Check that GPUs and the amounts used on them are given together or not at all."""
        if spec.gpus is INVALID:
            return
        if spec.gpus and spec.gpu_memory is None and spec.gpu_share == 0 and spec.exclusive is False:
            self._problems.add(path, 'field "gpuMemory" is missing: how much it takes on each of its GPUs')
        for field in ("gpu_memory", "gpu_share", "gpu_layers", "exclusive"):
            if getattr(spec, field) and not spec.gpus:
                self._problems.add((*path, camel_case(field)), "is given without gpus; list their indices")


def _place(spec: FleetInstanceSpec, claims: Sequence[Claim]) -> Place:
    workers = len({claim.worker for claim in claims})
    if not spec.gpus:
        tier = Tier.CPU
    elif spec.gpu_layers is not None:
        tier = Tier.PARTIAL_OFFLOAD
    elif workers > 1:
        tier = Tier.SEVERAL_WORKERS
    else:
        tier = Tier.SEVERAL_GPUS if len(spec.gpus) > 1 else Tier.ONE_GPU
    return Place(
        tier=tier,
        claims=tuple(claims),
        tensor_parallel_size=max(len(spec.gpus), 1),
        pipeline_parallel_size=workers,
        gpu_layers=spec.gpu_layers,
    )


def size(data: Any) -> int:
    """The bytes of a size such as 80Gi, 80GiB, 80GB or 85899345920. Raises ValueError, with an example, otherwise."""
    if isinstance(data, str):
        number = data.replace(" ", "")
        for form in (number, number.removesuffix("B")):
            try:
                return quantity(form)
            except ValueError:
                continue
    elif isinstance(data, int | float) and not isinstance(data, bool) and isfinite(data):
        return quantity(str(data))
    raise ValueError(f"expected a size such as 80Gi, 80GB or a number of bytes, found {found(data)}")


class Sizes:
    """Reads the sizes in one document. An invalid size is reported and counts as 0."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems

    def read(self, data: Any, path: FieldPath, *, least: int = 0, most: int | None = None) -> int:
        """The bytes of a size within bounds. `most` is the available amount; None or 0 means that it is unknown."""
        if data is None or data is INVALID:
            return 0
        try:
            value = size(data)
        except ValueError as error:
            self._problems.add(path, str(error))
            return 0
        if value < least:
            self._problems.add(path, f"must be at least {least}, found {found(data)}")
        elif most and value > most:
            self._problems.add(path, f"is more than there is ({most / 2**30:.1f} GiB), found {found(data)}")
        return value

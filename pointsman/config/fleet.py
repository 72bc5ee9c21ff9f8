"""A file that describes a fleet -> workers, and the claims of what runs there.

Enters: a `Fleet` document. Leaves: a `Snapshot`, or `ConfigError` with all problems. The one rule is that of all
documents: every mistake at once, each with its line, and nothing of a bad file is used.
"""

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
from pointsman.parameters import quantity
from pointsman.placement.asks import Claim, Place, Tier
from pointsman.placement.fleet import Occupant, Snapshot
from pointsman.placement.gpu_models import KNOWN_GPUS, gpu_vendor, known_gpu, short_gpu_name
from pointsman.types import Gpu, Worker, WorkerStatus

# A `Fleet` document as types: machines, their GPUs, and what runs there already.


# ruff: noqa: RUF012 (each struct gets an empty list or mapping of its own)


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


# Sizes of memory as people write them, and what is wrong with those that are none.


def size(data: Any) -> int:
    """Bytes: 80Gi, 80GiB, 80GB, 85899345920. Raises ValueError, with an example, for anything else."""
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
    """Reads the sizes of one document; what is wrong with them is noted, and counts as nothing."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems

    def read(self, data: Any, path: FieldPath, *, least: int = 0, most: int | None = None) -> int:
        """Bytes within bounds; `most`: what there is, None or 0 if that is not known."""
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
            self._problems.add(path, f"is more than there is ({_gib(most)}), found {found(data)}")
        return value


def _gib(value: int) -> str:
    """For messages: 79.6 GiB."""
    return f"{value / 2**30:.1f} GiB"


# The `workers` of a fleet's file: machines and their GPUs, each as often as it is there.


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NUMBER = "{n}"


class Workers:
    """Makes the workers of a document; what is wrong with them is noted."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._sizes = Sizes(problems)
        self.unnamed = False
        """Whether some of them could not be named: then nobody can tell who is missing."""

    def named(self, specs: Sequence[FleetWorkerSpec]) -> dict[str, Worker]:
        """By name, in the order of the document."""
        if specs is not INVALID and not specs:
            self._problems.add(("workers",), "must not be empty")
        names = Names("worker", self._problems)
        made: dict[str, Worker] = {}
        for place, spec in usable(specs):
            path: FieldPath = ("workers", place)
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
        )

    def _names(self, spec: FleetWorkerSpec, path: FieldPath) -> list[str]:
        """w is w; four of w are w-1 to w-4."""
        if not spec.name or spec.count is INVALID:
            self.unnamed = True
            return [""] if spec.name == "" else []
        pattern = spec.name if NUMBER in spec.name or spec.count is None else f"{spec.name}-{NUMBER}"
        if not NAME.fullmatch(pattern.replace(NUMBER, "1")):
            wanted = f"expected letters, digits, dots, dashes and underscores, and {NUMBER} for the number"
            self._problems.add((*path, "name"), f"{wanted}, found {found(spec.name)}")
            self.unnamed = True
            return []
        return [pattern.replace(NUMBER, str(number)) for number in range(1, (spec.count or 1) + 1)]

    def _gpus(self, spec: FleetWorkerSpec, machine_bytes: int, path: FieldPath) -> tuple[Gpu, ...]:
        gpus: list[Gpu] = []
        for place, one in usable(spec.gpus):
            here = (*path, place)
            memory = self._gpu_memory(one, machine_bytes if spec.unified_memory else None, here)
            used = self._sizes.read(one.used, (*here, "used"), most=memory)
            gpus += (
                Gpu(
                    index=index,
                    memory_bytes=memory,
                    model=one.model or "",
                    vendor=one.vendor or gpu_vendor(one.model or "") or "nvidia",
                    used_bytes=used,
                    link=link,
                    pcie=one.pcie or "",
                    numa=one.numa,
                    shareable=bool(one.shareable),
                )
                for index, link in enumerate(self._links(one, here), start=len(gpus))
            )
        return tuple(gpus)

    def _gpu_memory(self, one: GpuSpec, machine_bytes: int | None, path: FieldPath) -> int:
        """As written; else what the model has; else, of unified memory, all that the machine has."""
        if one.memory is not None:
            return self._sizes.read(one.memory, (*path, "memory"), least=1, most=machine_bytes)
        known = known_gpu(one.model) if one.model else None
        if known is not None or machine_bytes is not None:
            return known.memory_bytes if known is not None else machine_bytes or 0
        if one.model:
            near = did_you_mean(short_gpu_name(one.model), {model.full_name for model in KNOWN_GPUS})
            unknown = f"how much memory {found(one.model)} has is not known; add memory, such as 24Gi"
            self._problems.add((*path, "model"), unknown + (near if near.startswith("; did") else ""))
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


def load_fleet(source: Path | str, file: str = "") -> Snapshot:
    """Load a `Fleet` document from a file (`Path`) or from text (`str`); `file` is what text is called in problems."""
    text, name = (source, "<text>") if isinstance(source, str) else (text_of(source), str(source))
    data, problems = read_yaml(text, file or name)
    kind = data.get("kind") if isinstance(data, dict) else None
    if data is None or (isinstance(kind, str) and kind != "Fleet"):
        if data is not None:
            problems.add(("kind",), f'expected "Fleet", found {found(kind)}')
        problems.raise_if_any()  # not YAML, or another document altogether: what its fields are is beside the point
    document = Validator(problems).value({} if data is None else data, FleetDocument, ())
    if document is INVALID:
        problems.raise_if_any()
    reader = Workers(problems)
    workers = reader.named(document.workers)
    occupants = _Instances(problems, workers, all_named=not reader.unnamed).running(document.instances)
    problems.raise_if_any()
    return Snapshot(tuple(workers.values()), occupants)


class _Instances:
    """Makes the claims of what runs already; what is wrong with them is noted."""

    def __init__(self, problems: Problems, workers: Mapping[str, Worker], *, all_named: bool) -> None:
        self._problems = problems
        self._workers = workers
        self._all_named = all_named
        self._sizes = Sizes(problems)

    def running(self, specs: Sequence[FleetInstanceSpec]) -> tuple[Occupant, ...]:
        """All of them, as long as the document has no problem."""
        names = Names("instance", self._problems)
        made = []
        for place, spec in usable(specs):
            path: FieldPath = ("instances", place)
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
            whole = Claim(worker=name, cpus=spec.cpus or 0.0, memory_bytes=memory)  # of the worker: counted once
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
        """The workers that are there of those that an instance is on."""
        one = isinstance(spec.on, str)
        listed = [spec.on] if isinstance(spec.on, str) else [name for _, name in usable(spec.on)]
        if spec.on is not INVALID and not listed:
            self._problems.add((*path, "on"), "must not be empty")
        for place, name in enumerate(listed):
            field: FieldPath = (*path, "on") if one else (*path, "on", place)
            if name not in self._workers and self._all_named:
                self._problems.add(field, f'there is no worker "{name}"{did_you_mean(name, self._workers)}')
            elif name in listed[:place]:
                self._problems.add(field, f'worker "{name}" is listed twice')
        return [name for name in dict.fromkeys(listed) if name in self._workers]

    def _gpus(self, spec: FleetInstanceSpec, worker: Worker, path: FieldPath) -> list[int]:
        """The GPUs that are there of those that an instance has of a worker."""
        there = [gpu.index for gpu in worker.gpus]
        taken: list[int] = []
        for place, index in usable(spec.gpus):
            if index not in there:
                has = f"has {len(there)} GPUs, counted from 0" if there else "has no GPUs"
                self._problems.add((*path, "gpus", place), f'worker "{worker.name}" {has}; found {index}')
            elif index in taken:
                self._problems.add((*path, "gpus", place), f"GPU {index} is listed twice")
            else:
                taken.append(index)
        return taken

    def _check_gpu_fields(self, spec: FleetInstanceSpec, path: FieldPath) -> None:
        """What it takes of GPUs, and which, are given both or not at all."""
        if spec.gpus is INVALID:
            return
        takes = {
            "gpuMemory": spec.gpu_memory,
            "gpuShare": spec.gpu_share,
            "gpuLayers": spec.gpu_layers,
            "exclusive": spec.exclusive,
        }
        if spec.gpus and spec.gpu_memory is None and spec.gpu_share == 0 and spec.exclusive is False:
            self._problems.add(path, 'field "gpuMemory" is missing: how much it takes on each of its GPUs')
        for field, given in takes.items():
            if given and not spec.gpus:
                self._problems.add((*path, field), "is given without gpus; list their indices")


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

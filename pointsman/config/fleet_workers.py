"""The `workers` of a fleet's file: machines and their GPUs, each as often as it is there."""

import re
from collections.abc import Sequence

import msgspec

from pointsman.config.fleet_schema import FleetWorkerSpec, GpuSpec
from pointsman.config.fleet_sizes import Sizes
from pointsman.config.names import Names
from pointsman.config.problems import FieldPath, Problems
from pointsman.config.validation import INVALID, usable
from pointsman.config.wording import found
from pointsman.errors import did_you_mean
from pointsman.placement.gpu_models import KNOWN_GPUS, gpu_vendor, known_gpu, short_gpu_name
from pointsman.types import Gpu, Worker

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

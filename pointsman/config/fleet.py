"""A file that describes a fleet -> workers, and the claims of what runs there.

Enters: a `Fleet` document. Leaves: a `Snapshot`, or `ConfigError` with all problems. The one rule is that of all
documents: every mistake at once, each with its line, and nothing of a bad file is used.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pointsman.config.fleet_schema import FleetDocument, FleetInstanceSpec
from pointsman.config.fleet_sizes import Sizes
from pointsman.config.fleet_workers import Workers
from pointsman.config.names import Names
from pointsman.config.problems import FieldPath, Problems
from pointsman.config.source import text_of
from pointsman.config.validation import INVALID, Validator, usable
from pointsman.config.wording import found
from pointsman.config.yaml import read_yaml
from pointsman.errors import did_you_mean
from pointsman.placement.asks import Claim, Place, Tier
from pointsman.placement.fleet import Occupant, Snapshot
from pointsman.types import Worker


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

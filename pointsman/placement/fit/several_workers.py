"""The third tier: pipeline stages, on several workers if need be, tensor parallel within each.

A stage is so many GPUs of one worker, of one model unless they may be mixed. Workers may offer different numbers of
stages with different room. Those with the most room are taken, as few as will do; the first of them is chosen.
"""

from collections.abc import Iterator, Sequence

import msgspec

from pointsman.placement.asks import Ask, Claim, Place, Tier
from pointsman.placement.fit.base import Fit, FitFilter, Floats, Mask, claims_of, nowhere
from pointsman.placement.fleet import Device, Host
from pointsman.placement.words import gib
from pointsman.selection.arrays import np

FEW_STAGES = 8
"""Up to so many, every choice of the first and the last stage is tried: these hold more than layers."""


class Stage(msgspec.Struct, frozen=True, eq=False):
    """GPUs of one worker that could hold some layers together."""

    devices: tuple[Device, ...]
    free_bytes: int
    """On the fullest of them."""

    @property
    def host(self) -> Host:
        return self.devices[0].host


class Split(msgspec.Struct, frozen=True):
    """Stages in their order, and the layers of each."""

    tensor_parallel_size: int
    stages: tuple[Stage, ...]
    layers: tuple[int, ...]


class FitsOnSeveralWorkers(FitFilter):
    """Demands workers that together have stages for all layers."""

    tier = Tier.SEVERAL_WORKERS

    def forbidden(self, ask: Ask) -> str | None:
        if not ask.several_workers:
            return "it must be on one worker (several workers are off)"
        if not ask.engine.distributed:
            return "its engine runs on one worker only"
        return None if ask.need.layers > 1 else "it cannot be divided by layers"

    def fit(self, ask: Ask, among: Mask) -> Fit:
        devices = self.devices()
        free = devices.free(ask)
        ready = self.has_host_room(ask, ask.need.host_bytes) & among
        able = devices.able(ask) & ready[devices.workers]
        kinds = (
            [able] if ask.mixed_gpus else [able & (devices.model_codes == code) for code in range(len(devices.models))]
        )
        for size in reversed(ask.need.tensor_parallel_sizes):
            splits = [split for kind in kinds if (split := self._split(ask, size, kind, free)) is not None]
            if splits:
                return self._found(ask, min(splits, key=_gpus_in))
        return self._nobody(ask, able, free)

    def _split(self, ask: Ask, size: int, usable: Mask, free: Floats) -> Split | None:
        """The stages of the fewest workers that will do."""
        offered = self._offered(ask, size, usable, free)
        taken: list[Stage] = []
        for stages in offered:
            taken += stages
            if len(taken) > ask.need.layers:  # each stage has at least one
                largest = sorted(taken, key=lambda stage: -stage.free_bytes)[: ask.need.layers]
                taken = [stage for stage in taken if stage in largest]
            found = _arranged(ask, size, taken)
            if found is not None:
                return _trimmed(ask, found)
        return None

    def _offered(self, ask: Ask, size: int, usable: Mask, free: Floats) -> list[list[Stage]]:
        """The stages of each worker that has one, the worker with the most room first."""
        middle = ask.need.layers // 2
        rows = np.flatnonzero(usable & (free >= ask.need.stage_bytes(middle, middle + 1, size)))
        by_worker: dict[int, list[Device]] = {}
        for device in map(self.fleet.gpus.__getitem__, rows.tolist()):
            by_worker.setdefault(device.host.row, []).append(device)
        offered = []
        for devices in by_worker.values():
            devices.sort(key=lambda device: (-free[device.row], device.row))
            groups = [devices[at : at + size] for at in range(0, len(devices) - size + 1, size)]
            if groups:
                offered.append([Stage(tuple(group), int(free[group[-1].row])) for group in groups])
        return sorted(offered, key=lambda stages: (-sum(stage.free_bytes for stage in stages), stages[0].host.row))

    def _found(self, ask: Ask, split: Split) -> Fit:
        fits = np.zeros(len(self.fleet), dtype=bool)
        fits[split.stages[0].host.row] = True
        tightest = float(min(stage.free_bytes for stage in split.stages))
        why = "not needed: the stages are elsewhere, or it is not the first of them"
        return Fit(fits, np.full(len(fits), tightest), 0.0, lambda _: self._place(ask, split), lambda _: why)

    def _place(self, ask: Ask, split: Split) -> Place:
        size, claims, start = split.tensor_parallel_size, list[Claim](), 0
        seen: set[str] = set()
        for stage, layers in zip(split.stages, split.layers, strict=True):
            each = ask.need.stage_bytes(start, start + layers, size)
            first, *others = claims_of(ask, list(stage.devices), each)
            if first.worker in seen:  # CPUs and memory are wanted once on each worker
                first = msgspec.structs.replace(first, cpus=0.0, memory_bytes=0)
            seen.add(first.worker)
            claims += [first, *others]
            start += layers
        return Place(
            tier=self.tier,
            claims=tuple(claims),
            tensor_parallel_size=size,
            pipeline_parallel_size=len(split.stages),
            stage_layers=split.layers,
        )

    def _nobody(self, ask: Ask, able: Mask, free: Floats) -> Fit:
        total = float(free[able].clip(0.0).sum())
        needed = gib(ask.need.weight_bytes + ask.need.kv_bytes)
        why = f"too little room in all: needs {needed} and room for the engine on each GPU, {gib(total)} are free"
        return nowhere(len(self.fleet), lambda _: why)


def _arranged(ask: Ask, size: int, stages: Sequence[Stage]) -> Split | None:
    """Layers for all of these stages, in an order in which they fit."""
    for order in _orders(stages):
        layers = ask.need.staged(size, [stage.free_bytes for stage in order])
        if layers is not None:
            return Split(size, tuple(order), layers)
    return None


def _orders(stages: Sequence[Stage]) -> Iterator[list[Stage]]:
    yield list(stages)
    if len(stages) <= FEW_STAGES:
        for first in stages:
            for last in stages:
                if first is not last:
                    yield [first, *(stage for stage in stages if stage is not first and stage is not last), last]


def _trimmed(ask: Ask, split: Split) -> Split:
    """Without the stages that it can do without, the smallest first."""
    while True:
        smallest = min(split.stages, key=lambda stage: stage.free_bytes)
        fewer = [stage for stage in split.stages if stage is not smallest]
        found = _arranged(ask, split.tensor_parallel_size, fewer) if fewer else None
        if found is None:
            return split
        split = found


def _gpus_in(split: Split) -> int:
    return len(split.stages) * split.tensor_parallel_size

"""The third tier: pipeline stages on several workers if necessary, with tensor parallelism within each stage.

A stage is a group of GPUs of one worker. All GPUs are of one model unless mixed. Workers may offer different numbers of
stages with different room. The stages with the most room are taken, as few as suffice.

No split is overlooked, with two exceptions. One is pipelines of many stages with different room: see `in_any_order`.
The other is several GPUs that share the memory of the machine: they get it one after the other, never evenly.
"""

from collections.abc import Iterator
from functools import partial

from pointsman.placement.asks import Ask, Cuts, Place, Tier
from pointsman.placement.devices import ABLE, Codes, Floats, Mask
from pointsman.placement.fit.base import HostRoom, ResourceFit, TierFit, lacks_gpus, layers_elsewhere, nowhere
from pointsman.placement.fit.stages import (
    Chooser,
    Split,
    arranged,
    exactly,
    in_any_order,
    largest_first,
    staged_claims,
    stages_of,
)
from pointsman.placement.fleet import Device, Host
from pointsman.reasons import Reason
from pointsman.selection.arrays import np


class FitsOnSeveralWorkers(ResourceFit):
    """Demands workers that together have stages for all layers."""

    tier = Tier.SEVERAL_WORKERS

    def forbidden(self, ask: Ask) -> Reason | None:
        if not ask.open_to(self.tier):
            return Reason("several-workers-off")
        if not ask.engine.distributed:
            return Reason("engine-runs-on-one-worker")
        if not ask.tensor_parallel_sizes:
            return Reason("needs-several-gpus-which-are-off")
        if ask.data_parallel_size > 1:
            return Reason("copies-on-one-worker", {"copies": ask.data_parallel_size})
        if ask.gpu_count == 1 or ask.pipeline_parallel_size == 1:
            return Reason("demands-gpus", {"gpus": ask.demanded_gpus})
        return layers_elsewhere(ask) if ask.need.layers > 1 else Reason("one-layer-only")

    def fit(self, ask: Ask, among: Mask) -> TierFit:
        devices = self.devices()
        obstacles, free, machine = devices.obstacles(ask), devices.free(ask), devices.machine_free(ask)
        hosts = HostRoom(self.fleet, ask.cpus, ask.need.host_bytes)
        able = (obstacles == ABLE) & (hosts.enough & among)[devices.workers]
        kinds = devices.kinds(able, mixed=ask.mixed_gpus)
        for size in reversed(ask.tensor_parallel_sizes):
            cuts, stages = Cuts(ask.need, size), ask.stages_of(size)
            choosers = (largest_first, in_any_order) if stages is None else (exactly(stages),) * 2
            split_of = partial(
                self._split, cuts, size, free=free, machine=machine, choosers=choosers, demanded=ask.stage_layers
            )
            splits = [split for kind in kinds if (split := split_of(kind)) is not None] if stages != 0 else []
            if splits:
                best = min(splits, key=lambda split: split.cost)
                return self._found(ask, best if ask.stage_layers else best.evened(cuts), hosts)
        most = max((float(free[kind].clip(0.0).sum()) for kind in kinds), default=0.0)
        return self._nowhere(ask, most, obstacles, hosts)

    def _split(
        self,
        cuts: Cuts,
        size: int,
        usable: Mask,
        *,
        free: Floats,
        machine: Floats,
        choosers: tuple[Chooser, Chooser],
        demanded: tuple[int, ...],
    ) -> Split | None:
        """Stages on few workers. Tries the worker with the most room, then the first two workers, four, and so on until
        they suffice. Then bisects to find the smallest number of workers."""
        layers = np.searchsorted(cuts.least_bytes, free, side="right")  # the most that each GPU can hold a part of
        rows = np.flatnonzero(usable & (layers > 0))
        if layers[rows].sum() < cuts.layers * size:
            return None
        by_worker = np.bincount(self.devices().workers[rows], free[rows], minlength=len(self.fleet))
        workers = np.argsort(-by_worker, kind="stable")[: np.count_nonzero(by_worker)].tolist()
        mine: dict[int, list[Device]] = {worker: [] for worker in workers}
        for device in map(self.fleet.gpus.__getitem__, rows.tolist()):
            mine[device.host.row].append(device)

        quick, thorough = choosers

        def among(number: int, choose: Chooser = quick) -> Split | None:
            offered = (stages_of(mine[worker], size, free, float(machine[worker])) for worker in workers[:number])
            return arranged(cuts, size, [stage for stages in offered for stage in stages], choose, demanded)

        for number in _doubled(len(workers)):
            found = among(number)
            if found is not None:
                break
        else:
            return among(len(workers), thorough)
        low = number // 2
        while low + 1 < number:
            middle = (low + number) // 2
            fewer = among(middle)
            low, number = (middle, number) if fewer is None else (low, middle)
            found = fewer or found
        return found

    def _found(self, ask: Ask, split: Split, hosts: HostRoom) -> TierFit:
        fits = np.zeros(len(self.fleet), dtype=bool)
        fits[split.stages[0].host.row] = True
        tightest = np.full(len(fits), min(stage.free_bytes for stage in split.stages))
        taken = {str(stage.host) for stage in split.stages}

        def why(host: Host) -> Reason:
            if str(host) in taken:
                return Reason("later-stage")
            return hosts.lacking(host) or Reason("stages-elsewhere")

        return TierFit(ask, fits, tightest, 0.0, lambda _: self._place(ask, split), why)

    def _place(self, ask: Ask, split: Split) -> Place:
        return Place(
            tier=self.tier,
            claims=staged_claims(ask, split),
            tensor_parallel_size=split.tensor_parallel_size,
            pipeline_parallel_size=len(split.stages),
            stage_layers=split.layers,
        )

    def _nowhere(self, ask: Ask, most: float, obstacles: Codes, hosts: HostRoom) -> TierFit:
        needed = ask.need.weight_bytes + ask.need.kv_bytes
        facts = {"needed_bytes": needed, "free_bytes": most, "one_model": not ask.mixed_gpus}
        why = Reason("too-little-room-in-all", facts)
        return nowhere(ask, len(self.fleet), lambda host: lacks_gpus(obstacles, host) or hosts.lacking(host) or why)


def _doubled(most: int) -> Iterator[int]:
    """1, 2, 4, and so on up to `most`."""
    number = 1
    while number < most:
        yield number
        number *= 2
    if most:
        yield most

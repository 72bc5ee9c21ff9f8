"""The third tier: pipeline stages on several workers if need be, tensor parallel within each.

A stage is a group of GPUs of one worker; all GPUs are of one model unless mixed. Workers may offer different numbers of
stages with different room. The stages with the most room are taken, as few as suffice.

No split is overlooked, with two exceptions: see `in_any_order` for pipelines of many stages with different room; and
where several GPUs share the memory of the machine, it is given to them one after the other, never evenly.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TypeAlias

import msgspec

from pointsman.placement.asks import Ask, Claim, Cuts, Place, Tier
from pointsman.placement.devices import ABLE, Codes, Floats, Mask
from pointsman.placement.fit.base import HostRoom, ResourceFit, TierFit, claims_of, lacks_gpus, nowhere
from pointsman.placement.fleet import Device, Host
from pointsman.reasons import Reason
from pointsman.selection.arrays import np

# Which stages, in which order, hold all layers of a model
#
# The order matters: the first stage and the last hold more than layers, and layers may differ. Enters: the room on each
# GPU of every possible stage. Leaves: indexes into that list, in order.

MAX_SETS = 512
"""Sets of stages that are searched. Stages with the same room count as one kind, so most fleets have few sets."""


def largest_first(cuts: Cuts, rooms: Sequence[float]) -> list[int] | None:
    """The largest stages first, perhaps with one of the two largest at the end: quick, and right for most fleets."""
    order = _largest(cuts, rooms)
    ways: list[tuple[Sequence[int], int | None]] = [(order, None)]
    if len(order) > 1:
        first, second, *others = order
        ways += [([first, *others], second), ([second, *others], first)]
    found = [filled for order, last in ways if (filled := _filled(cuts, rooms, order, last)) is not None]
    return min(found, key=len, default=None)


def in_any_order(cuts: Cuts, rooms: Sequence[float], max_sets: int = MAX_SETS) -> list[int] | None:
    """The fewest stages, in any order that fits; None if no order does.

    Beyond `max_sets` only the largest stages are searched. Of two orders of the same stages, the one that holds more
    layers is never worse, so that only the best order of each set is kept.
    """
    largest = _largest(cuts, rooms)
    counts = Counter(rooms[index] for index in largest)
    while prod(count + 1 for count in counts.values()) > max_sets:
        counts[rooms[largest.pop()]] -= 1
    kinds = [room for room, count in counts.items() if count]
    reached: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {(0,) * len(kinds): (0, ())}
    """Stages used of each kind -> the most layers that they hold, and the kinds in that order."""
    while reached:
        further: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        for used, (start, order) in reached.items():
            for kind, room in enumerate(kinds):
                if used[kind] == counts[room]:
                    continue
                stop = cuts.reach(start, room)
                if stop == cuts.layers:
                    return _indexes(rooms, largest, [kinds[one] for one in (*order, kind)])
                now = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                if stop > start and stop > further.get(now, (0, ()))[0]:
                    further[now] = stop, (*order, kind)
        reached = further
    return None


def _largest(cuts: Cuts, rooms: Sequence[float]) -> list[int]:
    """At most one stage per layer; a larger stage can replace a smaller one."""
    return sorted(range(len(rooms)), key=lambda index: -rooms[index])[: cuts.layers]


def _filled(cuts: Cuts, rooms: Sequence[float], order: Sequence[int], last: int | None) -> list[int] | None:
    """The stages that are used if each takes as many layers as it can."""
    start, used = 0, list[int]()
    for index in order:
        stop = cuts.reach(start, rooms[index])
        if stop > start:
            used.append(index)
            start = stop
        if start == cuts.layers:
            return used
        if last is not None and cuts.reach(start, rooms[last]) == cuts.layers:
            return [*used, last]
    return None


def _indexes(rooms: Sequence[float], largest: Sequence[int], order: Sequence[float]) -> list[int]:
    """Stages with these rooms; of equals the first."""
    unused: dict[float, list[int]] = {}
    for index in sorted(largest, reverse=True):
        unused.setdefault(rooms[index], []).append(index)
    return [unused[room].pop() for room in order]


Chooser: TypeAlias = Callable[[Cuts, Sequence[float]], list[int] | None]


class Stage(msgspec.Struct, frozen=True, eq=False):
    """GPUs of one worker that hold some layers together."""

    devices: tuple[Device, ...]
    free_bytes: float
    """On the fullest GPU."""

    @property
    def host(self) -> Host:
        return self.devices[0].host


class Split(msgspec.Struct, frozen=True):
    """Stages in order, and the layers of each."""

    tensor_parallel_size: int
    stages: tuple[Stage, ...]
    layers: tuple[int, ...]

    @property
    def cost(self) -> tuple[int, int]:
        """(workers, GPUs)"""
        return len({stage.host.row for stage in self.stages}), len(self.stages) * self.tensor_parallel_size

    def evened(self, cuts: Cuts) -> "Split":
        """The same stages with layers divided as evenly as their room allows."""
        layers = cuts.evened([stage.free_bytes for stage in self.stages])
        return self if layers is None else msgspec.structs.replace(self, layers=layers)


class FitsOnSeveralWorkers(ResourceFit):
    """Demands workers that together have stages for all layers."""

    tier = Tier.SEVERAL_WORKERS

    def forbidden(self, ask: Ask) -> Reason | None:
        if not ask.several_workers:
            return Reason("several-workers-off")
        if not ask.engine.distributed:
            return Reason("engine-runs-on-one-worker")
        if not ask.tensor_parallel_sizes:
            return Reason("needs-several-gpus-which-are-off")
        return None if ask.need.layers > 1 else Reason("one-layer-only")

    def fit(self, ask: Ask, among: Mask) -> TierFit:
        devices = self.devices()
        obstacles, free, machine = devices.obstacles(ask), devices.free(ask), devices.machine_free(ask)
        hosts = HostRoom(self.fleet, ask.cpus, ask.need.host_bytes)
        able = (obstacles == ABLE) & (hosts.enough & among)[devices.workers]
        kinds = devices.kinds(able, mixed=ask.mixed_gpus)
        for size in reversed(ask.tensor_parallel_sizes):
            cuts = Cuts(ask.need, size)
            splits = [split for kind in kinds if (split := self._split(cuts, size, kind, free, machine)) is not None]
            if splits:
                return self._found(ask, min(splits, key=lambda split: split.cost).evened(cuts), hosts)
        most = max((float(free[kind].clip(0.0).sum()) for kind in kinds), default=0.0)
        return self._nowhere(ask, most, obstacles, hosts)

    def _split(self, cuts: Cuts, size: int, usable: Mask, free: Floats, machine: Floats) -> Split | None:
        """Stages of few workers: of the one with the most room, of the first two, four, and so on until they suffice;
        then bisected down to the fewest."""
        layers = np.searchsorted(cuts.least_bytes, free, side="right")  # at most, that each GPU could hold a part of
        rows = np.flatnonzero(usable & (layers > 0))
        if layers[rows].sum() < cuts.layers * size:
            return None
        by_worker = np.bincount(self.devices().workers[rows], free[rows], minlength=len(self.fleet))
        workers = np.argsort(-by_worker, kind="stable")[: np.count_nonzero(by_worker)].tolist()
        mine: dict[int, list[Device]] = {worker: [] for worker in workers}
        for device in map(self.fleet.gpus.__getitem__, rows.tolist()):
            mine[device.host.row].append(device)

        def among(number: int, choose: Chooser = largest_first) -> Split | None:
            offered = (_stages(mine[worker], size, free, float(machine[worker])) for worker in workers[:number])
            return _arranged(cuts, size, [stage for stages in offered for stage in stages], choose)

        for number in _doubled(len(workers)):
            found = among(number)
            if found is not None:
                break
        else:
            return among(len(workers), in_any_order)
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
        size, claims, start = split.tensor_parallel_size, list[Claim](), 0
        seen: set[str] = set()
        for stage, layers in zip(split.stages, split.layers, strict=True):
            each = ask.need.stage_bytes(start, start + layers, size)
            first, *others = claims_of(ask, list(stage.devices), each)
            if first.worker in seen:  # CPUs and memory are claimed once per worker
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


def _stages(devices: list[Device], size: int, free: Floats, machine: float) -> list[Stage]:
    """The stages of a worker: its GPUs in groups, the emptiest together, so that no other grouping has more room."""
    devices = sorted(devices, key=lambda device: (-free[device.row], device.row))
    stages = []
    for at in range(0, len(devices) - size + 1, size):
        group = devices[at : at + size]
        room = min(float(free[group[-1].row]), machine / size)
        machine -= room * size
        stages.append(Stage(tuple(group), room))
    return stages


def _arranged(cuts: Cuts, size: int, stages: Sequence[Stage], choose: Chooser) -> Split | None:
    """A few of these stages with layers for each: worker by worker if they fit in that order."""
    indexes = choose(cuts, [stage.free_bytes for stage in stages])
    if indexes is None:
        return None
    for order in (sorted(indexes), indexes):
        layers = cuts.filled([stages[index].free_bytes for index in order])
        if layers is not None:
            return Split(size, tuple(stages[index] for index in order), layers)
    return None

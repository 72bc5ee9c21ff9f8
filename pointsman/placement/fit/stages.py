"""Stages: GPUs of one worker that hold some layers together, and the choice of stages that hold a whole model.

Used by every tier that divides a model by layers: over GPUs of one worker, over workers, and partly on the CPU.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import TypeAlias

import msgspec

from pointsman.placement.asks import Ask, Claim, Cuts, Need
from pointsman.placement.devices import Devices, Floats, Mask
from pointsman.placement.fit.base import claims_of
from pointsman.placement.fleet import Device, Fleet, Host
from pointsman.selection.arrays import np

# The choice and the order of stages that hold all layers of a model
#
# The order matters: the first and the last stage hold more than layers, and layers may differ. Enters: for every
# possible stage, the room on each of its GPUs. Leaves: indexes into that list, in order.

MAX_SETS = 512
"""Maximum number of sets of stages to search. Stages with equal room are one kind, so most fleets have few sets."""


def largest_first(cuts: Cuts, rooms: Sequence[float]) -> list[int] | None:
    """The largest stages first, or one of the two largest at the end. This is quick, and right for most fleets."""
    order = _largest(cuts, rooms)
    ways: list[tuple[Sequence[int], int | None]] = [(order, None)]
    if len(order) > 1:
        first, second, *others = order
        ways += [([first, *others], second), ([second, *others], first)]
    found = [filled for order, last in ways if (filled := _filled(cuts, rooms, order, last)) is not None]
    return min(found, key=len, default=None)


def in_any_order(cuts: Cuts, rooms: Sequence[float], max_sets: int = MAX_SETS) -> list[int] | None:
    """The fewest stages, in any order that fits; None if no order fits.

    If there are more than `max_sets` sets, only the largest stages are searched. Of two orders of
    the same stages, the order that holds more layers is never worse. So only the best order of each set is kept.
    """
    largest = _largest(cuts, rooms)
    counts = Counter(rooms[index] for index in largest)
    while prod(count + 1 for count in counts.values()) > max_sets:
        counts[rooms[largest.pop()]] -= 1
    kinds = [room for room, count in counts.items() if count]
    reached: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {(0,) * len(kinds): (0, ())}
    """Number of used stages of each kind -> the most layers that they hold, and the order of kinds for that."""
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
    """The largest stages, at most one per layer. Others are not needed: a larger stage can replace a smaller one."""
    return sorted(range(len(rooms)), key=lambda index: -rooms[index])[: cuts.layers]


def _filled(cuts: Cuts, rooms: Sequence[float], order: Sequence[int], last: int | None) -> list[int] | None:
    """The stages that are used if each takes as many layers as it can; None if they do not hold all layers."""
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
    """Indexes of stages with these rooms. On a tie, the first stage is taken."""
    unused: dict[float, list[int]] = {}
    for index in sorted(largest, reverse=True):
        unused.setdefault(rooms[index], []).append(index)
    return [unused[room].pop() for room in order]


def exactly(count: int) -> "Chooser":
    """A chooser of `count` stages: those with the most room, perhaps with one of the two largest at the end."""

    def choose(cuts: Cuts, rooms: Sequence[float]) -> list[int] | None:
        order = _largest(cuts, rooms)[:count]
        if len(order) < count:
            return None
        orders = (order, [*order[1:], order[0]], [*order[:1], *order[2:], *order[1:2]])
        return next((one for one in orders if cuts.filled([rooms[at] for at in one]) is not None), None)

    return choose


Chooser: TypeAlias = Callable[[Cuts, Sequence[float]], list[int] | None]


class Stage(msgspec.Struct, frozen=True, eq=False):
    """GPUs of one worker that hold some layers together."""

    devices: tuple[Device, ...]
    free_bytes: float
    """Free bytes on the fullest GPU of the stage."""

    @property
    def host(self) -> Host:
        return self.devices[0].host


class Split(msgspec.Struct, frozen=True):
    """Stages in order, and the number of layers in each."""

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


def stages_of(devices: list[Device], size: int, free: Floats, machine: float) -> list[Stage]:
    """The stages of a worker. The emptiest GPUs are grouped together, so that no other grouping has more room."""
    devices = sorted(devices, key=lambda device: (-free[device.row], device.row))
    stages = []
    for at in range(0, len(devices) - size + 1, size):
        group = devices[at : at + size]
        room = min(float(free[group[-1].row]), machine / size)
        machine -= room * size
        stages.append(Stage(tuple(group), room))
    return stages


def arranged(
    cuts: Cuts, size: int, stages: Sequence[Stage], choose: Chooser, demanded: tuple[int, ...] = ()
) -> Split | None:
    """A few of these stages and their layers, as in `demanded` if given. Worker by worker, if that order fits."""
    if demanded:
        return _as_demanded(cuts, size, stages, demanded)
    indexes = choose(cuts, [stage.free_bytes for stage in stages])
    if indexes is None:
        return None
    for order in (sorted(indexes), indexes):
        layers = cuts.filled([stages[index].free_bytes for index in order])
        if layers is not None:
            return Split(size, tuple(stages[index] for index in order), layers)
    return None


def _as_demanded(cuts: Cuts, size: int, stages: Sequence[Stage], layers: tuple[int, ...]) -> Split | None:
    """A split in which the stages with the most room get the largest demands."""
    ends = list(accumulate(layers))
    if ends[-1] != cuts.layers or len(stages) < len(layers):
        return None
    sizes = [cuts.stage_bytes(end - count, end) for end, count in zip(ends, layers, strict=True)]
    roomy = sorted(stages, key=lambda stage: -stage.free_bytes)
    order = sorted(range(len(layers)), key=lambda at: -sizes[at])
    taken = dict(zip(order, roomy, strict=False))
    if any(taken[at].free_bytes < sizes[at] for at in order):
        return None
    return Split(size, tuple(taken[at] for at in range(len(layers))), layers)


def staged_claims(ask: Ask, split: Split) -> tuple[Claim, ...]:
    """What the instance takes from each GPU of its stages and, once per worker, from the CPUs and the memory."""
    claims, start, seen = list[Claim](), 0, set[str]()
    for stage, layers in zip(split.stages, split.layers, strict=True):
        each = ask.need.stage_bytes(start, start + layers, split.tensor_parallel_size)
        first, *others = claims_of(ask, list(stage.devices), each)
        if first.worker in seen:
            first = msgspec.structs.replace(first, cpus=0.0, memory_bytes=0)
        seen.add(first.worker)
        claims += [first, *others]
        start += layers
    return tuple(claims)


def offloaded_stages(need: Need, devices: Sequence[Device], free: Floats, layers: int | None) -> Split | None:
    """The last layers of a model on GPUs of one worker: as many as they hold, or exactly `layers`. The other layers
    and the output are on its CPU. The GPUs with the most room come first. None if not even one layer fits."""
    cuts = Cuts(msgspec.structs.replace(need, first_bytes=0, last_bytes=0), 1)
    order = sorted(devices, key=lambda device: (-float(free[device.row]), device.row))
    rooms = [float(free[device.row]) for device in order]

    def stops(start: int) -> list[int]:
        found = [start]
        for room in rooms:
            if found[-1] < cuts.layers:
                found.append(cuts.reach(found[-1], room))
        return found

    if layers is None:
        start = bisect_left(range(1, cuts.layers), True, key=lambda at: stops(at)[-1] == cuts.layers) + 1
    else:
        start = cuts.layers - layers
    ends = stops(start)
    if not 0 < start < cuts.layers or ends[-1] < cuts.layers:
        return None
    held = tuple(stop - begin for begin, stop in pairwise(ends) if stop > begin)
    return Split(1, tuple(Stage((device,), room) for device, room in zip(order, rooms, strict=True))[: len(held)], held)


class StagesOnOneWorker:
    """Divides a model by layers among GPUs of one worker, according to the free memory on each GPU."""

    def __init__(self, ask: Ask, devices: Devices, size: int) -> None:
        self._ask = ask
        self._devices = devices
        self._size = size
        self._cuts = Cuts(ask.need, size)

    def splits(self, fleet: Fleet, able: Mask, among: Mask) -> dict[int, Split]:
        """The split on each worker, by row of the worker. Workers without enough room are left out."""
        ask, devices = self._ask, self._devices
        free, machine, stages = devices.free(ask), devices.machine_free(ask), ask.stages_of(self._size)
        found: dict[int, Split] = {}
        if stages == 0:
            return found
        chooser = fewest if stages is None else exactly(stages)
        room = np.bincount(devices.workers, np.where(able, free.clip(0.0), 0.0), minlength=len(among))
        roomy = among & (room >= ask.need.weight_bytes + ask.need.kv_bytes)
        for kind in devices.kinds(able & roomy[devices.workers], mixed=ask.mixed_gpus):
            for row in np.unique(devices.workers[kind]).tolist():
                mine = [device for device in fleet.workers[row].devices if kind[device.row]]
                offered = stages_of(mine, self._size, free, float(machine[row]))
                split = arranged(self._cuts, self._size, offered, chooser, ask.stage_layers)
                if split is not None and (row not in found or split.cost < found[row].cost):
                    found[row] = split if ask.stage_layers else split.evened(self._cuts)
        return found


def fewest(cuts: Cuts, rooms: Sequence[float]) -> list[int] | None:
    """The fewest stages that suffice."""
    return largest_first(cuts, rooms) or in_any_order(cuts, rooms)

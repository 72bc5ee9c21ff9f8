"""What is free, what fits and whether a place is valid, computed independently from workers and claims alone."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TypeAlias

from pointsman.placement.asks import Ask, Claim, Need, Place, Tier
from pointsman.placement.fleet import Fleet
from pointsman.types import Gpu, Worker, WorkerStatus

Slot: TypeAlias = tuple[str, int]
"""A GPU: its worker and its index."""


class Room:
    """What is free of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.workers: dict[str, Worker] = {str(host): host.worker for host in fleet.workers}
        self.gpus: dict[Slot, Gpu] = {(name, gpu.index): gpu for name, w in self.workers.items() for gpu in w.gpus}
        self.cpus = {name: w.cpus for name, w in self.workers.items()}
        self.memory = {
            name: w.memory_bytes - w.reserved_memory_bytes - w.used_memory_bytes for name, w in self.workers.items()
        }
        self.bytes = {
            (name, index): gpu.memory_bytes - gpu.used_bytes - self.workers[name].reserved_gpu_bytes
            for (name, index), gpu in self.gpus.items()
        }
        self.share = dict.fromkeys(self.gpus, 1.0)
        self.tenants = dict.fromkeys(self.gpus, 0)
        self.alone = dict.fromkeys(self.gpus, False)
        for one in fleet.occupants.values():
            for claim in one.place.claims:
                self.take(claim)

    def take(self, claim: Claim) -> None:
        name = claim.worker
        self.cpus[name] -= claim.cpus
        self.memory[name] -= claim.memory_bytes + claim.gpu_bytes * self.workers[name].unified_memory
        if claim.gpu is not None:
            slot = (name, claim.gpu)
            self.bytes[slot] -= claim.gpu_bytes
            self.share[slot] -= claim.gpu_share
            self.tenants[slot] += 1
            self.alone[slot] |= claim.exclusive or not self.gpus[slot].shareable

    def takes(self, claims: Sequence[Claim]) -> str | None:
        """What a claim would exceed; None: nothing."""
        for claim in claims:
            slot = None if claim.gpu is None else (claim.worker, claim.gpu)
            if slot is not None and (self.alone[slot] or (claim.exclusive and self.tenants[slot])):
                return f"{slot} is not to be shared"
            self.take(claim)
            if slot is not None and (self.bytes[slot] < 0 or self.share[slot] < -1e-6):
                return f"{slot} has {self.bytes[slot]} bytes and a share of {self.share[slot]} left"
        for claim in claims:
            if self.cpus[claim.worker] < -1e-6:
                return f"{claim.worker} has {self.cpus[claim.worker]} CPUs left"
            uses_memory = claim.memory_bytes or (claim.gpu_bytes and self.workers[claim.worker].unified_memory)
            if uses_memory and self.memory[claim.worker] < 0:
                return f"{claim.worker} has {self.memory[claim.worker]} bytes of memory left"
        return None


# Whether a place is what the need says


def wrong_with(ask: Ask, place: Place, fleet: Fleet) -> str | None:
    """What is wrong with a place that an ask was given; None: nothing."""
    expected = expected_claims(ask, place)
    if place.claims != expected:
        return f"claims {place.claims}, expected {expected}"
    room = Room(fleet)
    admitted = {name for name, one in room.workers.items() if may_be_on(ask, one)}
    if not set(place.workers) <= admitted:
        return f"on {place.workers}, may be on {admitted}"
    if not all(may_have(ask, slot, room) for slot in place.gpus):
        return f"may not have all of {place.gpus}"
    if len(set(place.gpus)) < len(place.gpus):
        return "has a GPU twice"
    if len({_kind(ask, room.gpus[slot]) for slot in place.gpus}) > 1:
        return f"mixes {[room.gpus[slot] for slot in place.gpus]}"
    return room.takes(place.claims)


def expected_claims(ask: Ask, place: Place) -> tuple[Claim, ...]:
    """What its claims must be, given its GPUs and its split."""
    need, size = ask.need, place.tensor_parallel_size
    if place.tier is Tier.CPU:
        [claim] = place.claims
        return (Claim(worker=claim.worker, cpus=ask.cpus, memory_bytes=need.offloaded(0)[1]),)
    if place.tier is Tier.PARTIAL_OFFLOAD:
        assert place.gpu_layers is not None
        gpu_bytes, memory = need.offloaded(place.gpu_layers)
        each = [gpu_bytes]
    else:
        memory, each, start = need.host_bytes, [], 0
        stages = place.stage_layers or (need.layers,)
        assert len(stages) == place.pipeline_parallel_size
        assert sum(stages) == need.layers
        assert min(stages) > 0
        for layers in stages:
            each += [need.stage_bytes(start, start + layers, size)] * size
            start += layers
    assert len(each) == len(place.gpus)
    seen: set[str] = set()
    claims = []
    sizes = [claim.gpu_total_bytes for claim in place.claims if claim.gpu is not None]
    for (worker, index), gpu_bytes, size_of_gpu in zip(place.gpus, each, sizes, strict=True):
        first = worker not in seen
        seen.add(worker)
        claims.append(
            Claim(
                worker=worker,
                gpu=index,
                gpu_bytes=gpu_bytes,
                gpu_total_bytes=size_of_gpu,
                gpu_share=ask.gpu_share or 0.0,
                exclusive=ask.exclusive,
                cpus=ask.cpus if first else 0.0,
                memory_bytes=memory if first else 0,
            )
        )
    return tuple(claims)


# Whether there is a place at all: every way is tried


def feasible_tiers(ask: Ask, fleet: Fleet) -> set[Tier]:
    """The tiers in which there is a place, of those that are allowed."""
    room, need = Room(fleet), ask.need
    workers = [one for one in room.workers.values() if may_be_on(ask, one)]
    slots = {one.name: [s for s in room.gpus if s[0] == one.name and may_have(ask, s, room)] for one in workers}
    found = set()
    if any(_holds(ask, room, group, [need.gpu_bytes(1)]) for group in _groups(ask, room, slots, 1)):
        found.add(Tier.ONE_GPU)
    listed = set(ask.tiers) or {tier for tier in Tier if _allowed(ask, tier)}
    several = ask.engine.tensor_parallel and bool(listed & {Tier.SEVERAL_GPUS, Tier.SEVERAL_WORKERS})
    several = several and (ask.several_gpus or bool(ask.tiers))
    sizes = [size for size in need.tensor_parallel_sizes if size == 1 or several]
    if any(
        _holds(ask, room, group, [need.gpu_bytes(size)] * size)
        for size in sizes
        if size > 1
        for group in _groups(ask, room, slots, size)
    ):
        found.add(Tier.SEVERAL_GPUS)
    distributed = ask.engine.distributed and need.layers > 1
    if distributed and any(_pipeline(ask, room, list(_groups(ask, room, slots, size)), size, [], 0) for size in sizes):
        found.add(Tier.SEVERAL_WORKERS)
    if ask.engine.partial_offload and need.layers > 1 and most_layers(ask, fleet):
        found.add(Tier.PARTIAL_OFFLOAD)
    on_cpu = [Claim(worker=one.name, cpus=ask.cpus, memory_bytes=need.offloaded(0)[1]) for one in workers]
    if ask.open_to(Tier.CPU) and any(Room(fleet).takes([claim]) is None for claim in on_cpu):
        found.add(Tier.CPU)
    return (found if 1 in need.tensor_parallel_sizes else found - {Tier.ONE_GPU}) & listed


def _allowed(ask: Ask, tier: Tier) -> bool:
    """What the rules of an ask allow that lists no tiers."""
    means_gpus = ask.gpu_only or ask.gpus or ask.gpu_models or ask.gpu_share
    on_cpu = ask.cpu or (not ask.engine.needs_gpu and not means_gpus)
    allowances = {Tier.SEVERAL_GPUS: ask.several_gpus, Tier.SEVERAL_WORKERS: ask.several_workers}
    return ({Tier.ONE_GPU: True, Tier.PARTIAL_OFFLOAD: ask.partial_offload, Tier.CPU: on_cpu} | allowances)[tier]


def most_layers(ask: Ask, fleet: Fleet) -> int:
    """The most layers that any one GPU can have while the rest is on its machine; 0: not even one."""
    room = Room(fleet)
    best = 0
    for slot in room.gpus:
        worker = room.workers[slot[0]]
        for layers in range(1, ask.need.layers + 1):
            gpu_bytes, memory = ask.need.offloaded(layers)
            claim = Claim(worker=slot[0], gpu=slot[1], gpu_bytes=gpu_bytes, cpus=ask.cpus, memory_bytes=memory)
            if may_be_on(ask, worker) and may_have(ask, slot, room) and Room(fleet).takes([claim]) is None:
                best = max(best, layers)
    return best


def may_be_on(ask: Ask, worker: Worker) -> bool:
    """Labels, status, choice by hand, engine."""
    chosen = ask.workers or {name for name, _ in ask.gpus}
    suits = any(_suits(ask, gpu) for gpu in worker.gpus) or ask.open_to(Tier.CPU)
    ready = worker.status is WorkerStatus.READY
    return ask.selector.matches(worker.labels) and ready and (not chosen or worker.name in chosen) and suits


def may_have(ask: Ask, slot: Slot, room: Room) -> bool:
    """Kind, choice by hand, exclusive use, and its share."""
    if not _suits(ask, room.gpus[slot]) or (ask.gpus and slot not in ask.gpus) or room.alone[slot]:
        return False
    return not (ask.exclusive and room.tenants[slot]) and room.share[slot] >= (ask.gpu_share or -1.0) - 1e-6


def _suits(ask: Ask, gpu: Gpu) -> bool:
    return gpu.vendor in ask.engine.vendors and (not ask.gpu_models or gpu.model in ask.gpu_models)


def _kind(ask: Ask, gpu: Gpu) -> tuple[str, str]:
    """What GPUs of one instance have in common. The models of the tests are of no known generation."""
    return gpu.vendor, "" if ask.mixed_gpus else gpu.model


def _groups(ask: Ask, room: Room, slots: dict[str, list[Slot]], size: int) -> Iterator[tuple[Slot, ...]]:
    """So many GPUs of one worker, of one model unless they may be mixed."""
    for mine in slots.values():
        for group in combinations(mine, size):
            if len({_kind(ask, room.gpus[slot]) for slot in group}) == 1:
                yield group


def _holds(ask: Ask, room: Room, slots: Sequence[Slot], sizes: Sequence[int]) -> bool:
    """Whether these GPUs, and their workers, have room for so much each."""
    for name in {name for name, _ in slots}:
        mine = sum(size for (owner, _), size in zip(slots, sizes, strict=True) if owner == name)
        memory = ask.need.host_bytes + mine * room.workers[name].unified_memory
        if room.cpus[name] < ask.cpus - 1e-6 or (memory and room.memory[name] < memory):
            return False
    return all(room.bytes[slot] >= size for slot, size in zip(slots, sizes, strict=True))


def _pipeline(
    ask: Ask,
    room: Room,
    groups: list[tuple[Slot, ...]],
    size: int,
    taken: list[tuple[Slot, int]],
    start: int,
) -> bool:
    """Whether the layers from here on can be held by stages of these GPUs, beside what is taken."""
    need: Need = ask.need
    if start == need.layers:
        return True
    used = {slot for slot, _ in taken}
    models = {_kind(ask, room.gpus[slot]) for slot in used}
    for group in groups:
        if used & set(group) or (models and _kind(ask, room.gpus[group[0]]) not in models):
            continue
        for stop in range(start + 1, need.layers + 1):
            each = need.stage_bytes(start, stop, size)
            now = [*taken, *((slot, each) for slot in group)]
            if not _holds(ask, room, [slot for slot, _ in now], [bytes_ for _, bytes_ in now]):
                break
            if _pipeline(ask, room, groups, size, now, stop):
                return True
    return False

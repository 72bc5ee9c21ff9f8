"""What would have to change so that an ask gets a place. Every change is tried out on the present fleet."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pointsman.placement.asks import GENERATIONS, Ask, Place, Tier
from pointsman.placement.fleet import Fleet
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused
from pointsman.reasons import Reason
from pointsman.selection import LabelSelector
from pointsman.selection.arrays import np
from pointsman.types import Worker, WorkerStatus

CONTEXT_STEP = 256
"""Proposed contexts are multiples of this."""
OPENED = {
    "several_gpus": Tier.SEVERAL_GPUS,
    "several_workers": Tier.SEVERAL_WORKERS,
    "partial_offload": Tier.PARTIAL_OFFLOAD,
}
"""For each allowance that opens a tier, that tier."""
ALLOWANCES = (*OPENED, "mixed_gpus", "mixed_generations")
"""What an ask may allow. The CPU is not included, because it has its own hint: only the user knows whether an engine
that needs a GPU can do without."""


class Hint(msgspec.Struct, frozen=True, eq=False):
    """One thing to know, or to change."""

    reason: Reason
    ask: Ask | None = None
    """The changed ask that would have a place; None if this is only information."""

    def __str__(self) -> str:
        return str(self.reason)


def hints(ask: Ask, placer: Placer) -> list[Hint]:
    """What would have to change. Hints with several changes are given only if no single change suffices."""
    found = [*_largest_free(ask, placer), *_shorter_context(ask, placer), *_without_gpu(ask, placer)]
    helping = [hint for change, changed in _changes(ask) if (hint := _tried(change, changed, placer)) is not None]
    if any(hint.ask is not None and hint.ask.mixed_gpus is True for hint in helping):  # the smaller change is enough
        helping = [hint for hint in helping if hint.ask is None or hint.ask.mixed_gpus != GENERATIONS]
    return found + (helping or _allowances_together(ask, placer))


def why_never(ask: Ask, fleet: Fleet) -> Reason | None:
    """Why no worker could take the instance even if all workers were empty. None if one could, or if none is known."""
    workers = [_emptied(worker) for worker in fleet.snapshot().workers]
    found = Placer(Fleet(workers)).place(ask, traced=False)
    return found.reason if workers and isinstance(found, Refused) else None


def _emptied(worker: Worker) -> Worker:
    gpus = tuple(msgspec.structs.replace(gpu, used_bytes=0) for gpu in worker.gpus)
    return msgspec.structs.replace(worker, status=WorkerStatus.READY, used_memory_bytes=0, gpus=gpus)


def _largest_free(ask: Ask, placer: Placer) -> list[Hint]:
    """How much the emptiest GPU lacks."""
    devices = placer.devices()
    able = devices.able(ask) & placer.admitted(ask)[devices.workers]
    if not able.any() or not ask.tensor_parallel_sizes:
        return []
    size = ask.tensor_parallel_sizes[0]
    free, needed = devices.free(ask), ask.need.gpu_bytes(size)
    row = int(np.argmax(np.where(able, free, -np.inf)))
    if free[row] >= needed:
        return []
    largest = {"gpu": str(placer.fleet.gpus[row]), "free_bytes": float(free[row])}
    return [Hint(Reason("largest-free-gpu", {"gpus": size, "needed_bytes": needed, **largest}))]


def _without_gpu(ask: Ask, placer: Placer) -> list[Hint]:
    """A place on the CPU, if no worker has a GPU that the engine runs on."""
    workers, vendors = placer.fleet.snapshot().workers, ask.engine.vendors
    decided = not ask.engine.needs_gpu or ask.cpu or ask.gpu_only or bool(ask.tiers)
    if decided or any(gpu.vendor in vendors for one in workers for gpu in one.gpus):
        return []
    hint = _tried(Reason("fits-without-gpu"), msgspec.structs.replace(ask, cpu=True), placer)
    return [] if hint is None else [hint]


def _shorter_context(ask: Ask, placer: Placer) -> list[Hint]:
    """The largest context that has a place, found by bisection. The KV cache is assumed to be in proportion."""
    low, high = 0, -(-ask.need.context // CONTEXT_STEP)
    best: Hint | None = None
    while low + 1 < high:
        middle = (low + high) // 2
        context = middle * CONTEXT_STEP
        changed = msgspec.structs.replace(ask, need=ask.need.with_context(context))
        hint = _tried(Reason("fits-with-context", {"context": context}), changed, placer)
        if hint is None:
            high = middle
        else:
            best, low = hint, middle
    return [] if best is None else [best]


def _allowances_together(ask: Ask, placer: Placer) -> list[Hint]:
    """All allowances at once, except for those that do not help."""
    wanted = [name for name in ALLOWANCES if name != "mixed_gpus" and not _allows(ask, name)]
    hint = _tried(*_allowing(ask, wanted), placer)
    for name in list(wanted) if hint is not None else ():
        fewer = [other for other in wanted if other != name]
        found = _tried(*_allowing(ask, fewer), placer)
        if found is not None:
            wanted, hint = fewer, found
    return [] if hint is None else [hint]


def _allows(ask: Ask, name: str) -> bool:
    return ask.mixed_gpus == GENERATIONS if name == "mixed_generations" else bool(getattr(ask, name))


def _allowing(ask: Ask, names: Sequence[str]) -> tuple[Reason, Ask]:
    allowed: dict[str, Any] = dict.fromkeys(names, True)
    if allowed.pop("mixed_generations", False):
        allowed["mixed_gpus"] = GENERATIONS
    if ask.tiers:
        opened = tuple(OPENED[name] for name in names if name in OPENED and OPENED[name] not in ask.tiers)
        allowed["tiers"] = (*ask.tiers, *opened)
    return Reason("fits-with-allowance", {"allow": list(names)}), msgspec.structs.replace(ask, **allowed)


def _changes(ask: Ask) -> Iterator[tuple[Reason, Ask]]:
    change = msgspec.structs.replace
    yield from (_allowing(ask, [name]) for name in ALLOWANCES if not _allows(ask, name))
    if ask.selector.expressions:
        yield Reason("fits-without-selector"), change(ask, selector=LabelSelector())
    if ask.workers or ask.gpus:
        yield Reason("fits-elsewhere"), change(ask, workers=frozenset(), gpus=frozenset())
    if ask.gpu_models:
        yield Reason("fits-on-other-model"), change(ask, gpu_models=frozenset())
    if ask.exclusive:
        yield Reason("fits-beside-others"), change(ask, exclusive=False)
    if ask.cpus:
        yield Reason("fits-with-fewer-cpus", {"cpus": ask.cpus}), change(ask, cpus=0.0)


def _tried(change: Reason, ask: Ask, placer: Placer) -> Hint | None:
    """A hint with the change, and with the place that the changed ask would get; None if it would get no place."""
    placed = placer.place(msgspec.structs.replace(ask, overcommit=False), traced=False)
    return Hint(change.having(on=_where(placed.place)), placed.ask) if isinstance(placed, Placed) else None


def _where(place: Place) -> list[str]:
    gpus = [f"{worker}/gpu{index}" for worker, index in place.gpus]
    return gpus if len(gpus) in (1, 2) else list(place.workers)

"""What would have to change for there to be a place. Every change is tried out on the fleet as it stands."""

from collections.abc import Sequence

import msgspec

from pointsman.placement.asks import Ask, Place
from pointsman.placement.fleet import Fleet
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused
from pointsman.render.text import gib
from pointsman.selection import LabelSelector
from pointsman.selection.arrays import np
from pointsman.types import Worker, WorkerStatus

CONTEXT_STEP = 256
"""Contexts that are proposed are multiples of this."""
ALLOWANCES = {
    "several_gpus": "several GPUs of one worker",
    "several_workers": "several workers",
    "partial_offload": "partial offload",
    "mixed_gpus": "GPUs of different models",
}
"""What an ask may allow. Not the CPU: whether an engine that needs a GPU can do without is not for us to say."""


class Hint(msgspec.Struct, frozen=True, eq=False):
    """One thing to know, or to change."""

    words: str
    ask: Ask | None = None
    """What would have a place; None: this only says how things are."""

    def __str__(self) -> str:
        return self.words


def hints(ask: Ask, placer: Placer) -> list[Hint]:
    """What would have to change, one thing at a time if one will do."""
    told = [*_largest_free(ask, placer), *_shorter_context(ask, placer)]
    helping = [hint for words, change in _changes(ask) if (hint := _tried(words, change, placer)) is not None]
    return told + (helping or _allowances_together(ask, placer))


def why_never(ask: Ask, fleet: Fleet) -> str:
    """Why no worker could take it even with nothing else on it; empty: one could, or none is known."""
    workers = [_emptied(worker) for worker in fleet.snapshot().workers]
    found = Placer(Fleet(workers)).place(ask, traced=False)
    return found.in_short() if workers and isinstance(found, Refused) else ""


def _emptied(worker: Worker) -> Worker:
    gpus = tuple(msgspec.structs.replace(gpu, used_bytes=0) for gpu in worker.gpus)
    return msgspec.structs.replace(worker, status=WorkerStatus.READY, used_memory_bytes=0, gpus=gpus)


def _largest_free(ask: Ask, placer: Placer) -> list[Hint]:
    """How far the emptiest GPU is from enough."""
    devices = placer.devices()
    able = devices.able(ask) & placer.admitted(ask)[devices.workers]
    if not able.any() or not ask.tensor_parallel_sizes:
        return []
    size = ask.tensor_parallel_sizes[0]
    free, needed = devices.free(ask), ask.need.gpu_bytes(size)
    row = int(np.argmax(np.where(able, free, -np.inf)))
    if free[row] >= needed:
        return []
    where = "one GPU" if size == 1 else f"each of {size} GPUs"
    return [Hint(f"needs {gib(needed)} on {where}; largest free is {gib(free[row])} on {placer.fleet.gpus[row]}")]


def _shorter_context(ask: Ask, placer: Placer) -> list[Hint]:
    """The largest context that has a place, found by bisection; its KV cache is taken to be in proportion."""
    low, high = 0, -(-ask.need.context // CONTEXT_STEP)
    best: Hint | None = None
    while low + 1 < high:
        middle = (low + high) // 2
        context = middle * CONTEXT_STEP
        hint = _tried(f"context {context:,}", msgspec.structs.replace(ask, need=ask.need.with_context(context)), placer)
        if hint is None:
            high = middle
        else:
            best, low = hint, middle
    return [] if best is None else [best]


def _allowances_together(ask: Ask, placer: Placer) -> list[Hint]:
    """Everything allowed at once; without what is of no use."""
    wanted = [name for name in ALLOWANCES if not getattr(ask, name)]
    found = _tried("", _allowing(ask, wanted), placer)
    for name in list(wanted) if found is not None else ():
        fewer = [other for other in wanted if other != name]
        if _tried("", _allowing(ask, fewer), placer) is not None:
            wanted = fewer
    hint = _tried(
        f"with {' and '.join(ALLOWANCES[name] for name in wanted)} allowed it", _allowing(ask, wanted), placer
    )
    return [] if found is None or hint is None else [hint]


def _allowing(ask: Ask, names: Sequence[str]) -> Ask:
    return msgspec.structs.replace(ask, **dict.fromkeys(names, True))


def _changes(ask: Ask) -> list[tuple[str, Ask]]:
    """What could be asked for instead."""
    change = msgspec.structs.replace
    told = [
        (f"with {words} allowed it", _allowing(ask, [name]))
        for name, words in ALLOWANCES.items()
        if not getattr(ask, name)
    ]
    if ask.selector.expressions:
        told.append(("without its label selector it", change(ask, selector=LabelSelector())))
    if ask.workers or ask.gpus:
        told.append(("where it was not put by hand it", change(ask, workers=frozenset(), gpus=frozenset())))
    if ask.gpu_models:
        told.append(("on any model of GPU it", change(ask, gpu_models=frozenset())))
    if ask.exclusive:
        told.append(("beside others on a GPU it", change(ask, exclusive=False)))
    if ask.cpus:
        told.append((f"with fewer than {ask.cpus:g} CPUs it", change(ask, cpus=0.0)))
    return told


def _tried(words: str, ask: Ask, placer: Placer) -> Hint | None:
    """Whether this would have a place."""
    placed = placer.place(msgspec.structs.replace(ask, overcommit=False), traced=False)
    return Hint(f"{words} would fit on {_where(placed.place)}", placed.ask) if isinstance(placed, Placed) else None


def _where(place: Place) -> str:
    gpus = [f"{worker}/gpu{index}" for worker, index in place.gpus]
    return ", ".join(gpus) if len(gpus) in (1, 2) else ", ".join(place.workers)

"""Whether an estimate fits on GPUs of a size, on how many, and how far context and concurrency can grow there."""

from collections.abc import Callable, Sequence

import msgspec

from pointsman.placement.estimate.estimating import Estimate, fullest
from pointsman.placement.estimate.vllm import SEQUENCES
from pointsman.placement.needs import Need

MOST_CONTEXT = 1 << 24
MOST_REQUESTS = 1 << 16
MOST_TOKENS = 1 << 34
DRIVER = 1 << 29
"""Of the memory that a driver reports, it keeps about this much: no process gets it."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """How an estimate fares on one kind of GPU."""

    gpu: str
    memory_bytes: int
    usable_bytes: int
    """What the engine takes of it at most."""
    gpu_bytes: int
    """What it would take of the fullest one, with the split that was asked for."""
    fits: bool
    gpus: int | None
    """The fewest that it fits on, by a tensor-parallel size; None: on no number."""
    context: int
    """The largest with the concurrency that was asked for, at most what the model was made for; 0: none."""
    concurrency: int
    """The largest with the context that was asked for; 0: none."""
    gpu_layers: int
    """Layers that one of them can take while the others stay on the CPU."""
    kv_tokens: int
    """Tokens that the KV cache can hold at most, over all requests; 0 without one."""


def fit(
    estimate: Estimate, memory_bytes: int, tp: int = 1, pp: int = 1, gpu: str = "", share: float | None = None
) -> Fit:
    """Try one size of GPU; `share` of it is used, or what the engine takes by itself."""
    usable = usable_bytes(estimate, memory_bytes, share)
    stages = estimate.stages(tp, pp)

    def holds(changed: Estimate) -> bool:
        return _gpu_bytes(changed, tp, stages) <= usable

    longest = estimate.architecture.trained_context or MOST_CONTEXT
    needed = _gpu_bytes(estimate, tp, stages)
    return Fit(
        gpu=gpu,
        memory_bytes=memory_bytes,
        usable_bytes=usable,
        gpu_bytes=needed,
        fits=needed <= usable,
        gpus=_fewest(estimate, usable),
        context=largest(lambda tokens: holds(estimate.served(context=tokens)), longest),
        concurrency=largest(lambda requests: holds(estimate.served(concurrency=requests)), MOST_REQUESTS),
        gpu_layers=_most_layers(estimate.need, usable),
        kv_tokens=kv_tokens(estimate, usable, tp, pp),
    )


def usable_bytes(estimate: Estimate, memory_bytes: int, share: float | None = None) -> int:
    """What the engine takes at most of a GPU whose driver reports so much memory."""
    return int(max(memory_bytes - DRIVER, 0) * (estimate.engine.usable_share if share is None else share))


def _gpu_bytes(estimate: Estimate, tp: int, stages: Sequence[int]) -> int:
    start, stop = fullest(estimate.need, tp, stages)
    return estimate.need.stage_bytes(start, stop, tp)


def kv_tokens(estimate: Estimate, usable: int, tp: int = 1, pp: int = 1) -> int:
    """Tokens of one long request that fit beside everything else: what vLLM reports as the size of its KV cache."""
    if not estimate.kv_bytes_per_token:
        return 0
    # Another number of requests would change the activations: those stay as they were asked for.
    alone = estimate.served(concurrency=1, max_sequences=_sequences(estimate))
    stages = estimate.stages(tp, pp)
    return largest(lambda tokens: _gpu_bytes(alone.served(context=tokens), tp, stages) <= usable, MOST_TOKENS)


def _sequences(estimate: Estimate) -> int:
    return estimate.serving.max_sequences or max(SEQUENCES, estimate.serving.concurrency)


def _fewest(estimate: Estimate, usable_bytes: int) -> int | None:
    sizes = estimate.need.tensor_parallel_sizes
    return next((size for size in sizes if estimate.need.gpu_bytes(size) <= usable_bytes), None)


def _most_layers(need: Need, usable: int) -> int:
    """The last layers go first, so more of them never take less."""
    return largest(lambda layers: need.offloaded(layers)[0] <= usable, need.layers)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 0 to `most` for which it holds, if it holds for all smaller ones; 0 is never tried."""
    if holds(most):
        return most
    low, high = 0, 1
    while high < most and holds(high):
        low, high = high, high * 2
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

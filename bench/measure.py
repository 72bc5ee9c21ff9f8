"""CPU time of small things, the best of several tries: these machines are shared and noisy."""

import gc
import time
from collections.abc import Callable


def cpu_us(call: Callable[[], object], times: int, tries: int = 7) -> float:
    """Microseconds of CPU per unit of work, if one call does `times` of them."""
    best = float("inf")
    for _ in range(tries):
        gc.collect()
        gc.disable()
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
        gc.enable()
    return best / times * 1e6

"""CPU time of short calls: the minimum of several tries, because other load on the machine only adds to it."""

import gc
import time
from collections.abc import Callable


def cpu_us(call: Callable[[], object], times: int, tries: int = 7) -> float:
    """Microseconds of CPU per operation, for a call that performs `times` operations."""
    best = float("inf")
    for _ in range(tries):
        gc.collect()
        gc.disable()
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
        gc.enable()
    return best / times * 1e6

"""Finds the constants of the engine model from timed steps of a live engine.

Enters: how long steps took, and what they computed. Leaves: `Hardware`. The one rule: nothing here measures; the caller
asks the engine (`pointsman lab calibrate`).

The duration of a step is linear in all constants but `cw` and `cc`. For given values of these two, least squares give
the other constants. The two values are searched for on a grid that narrows. Errors are relative: a step of 5 ms counts
as much as a step of 500 ms.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from pointsman.errors import PointsmanError
from pointsman.simulator.performance import KV_TOKENS_IF_UNKNOWN, Hardware

PROMPTS = (16, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 6144)
"""Lengths in tokens of prompts that are timed one at a time. The engine must read each prompt in one step."""
CONTEXTS = (32, 2048, 6144)
"""Lengths of prompts whose answers are timed."""
BATCHES = (1, 4, 16)
"""Numbers of answers that the engine writes at once."""
ROUNDS = 14
SIDE = 9
"""Number of points on each side of the grid."""


class StepTiming(NamedTuple):
    """The timing of one step, or the mean of several equal steps."""

    tokens: float
    """Number of tokens that the step computed."""
    attended: float
    """The sum over all prompts of n * (p + n / 2), as in `Hardware.step_ms`."""
    context: float
    """Total number of tokens in the contexts of the answers that the step extended."""
    decoding: int
    """Number of answers that the step extended."""
    ms: float

    @classmethod
    def of_prompt(cls, tokens: int, ms: float) -> "StepTiming":
        """A step that reads one whole prompt and does nothing else."""
        return cls(tokens, tokens * tokens / 2, 0, 0, ms)

    @classmethod
    def of_answers(cls, answers: int, context: float, ms: float) -> "StepTiming":
        """A step that extends answers which have `context` tokens each."""
        return cls(answers, 0.0, answers * context, answers, ms)


class Calibration(NamedTuple):
    hardware: Hardware
    error: float
    """The root mean square of the relative errors."""
    worst: float
    """The largest relative error."""


def calibrate(timings: Sequence[StepTiming], kv_tokens: int | None = None) -> Calibration:
    """The constants that explain the timings best. Raises a PointsmanError if there are too few timings."""
    if len({one.tokens for one in timings if not one.decoding}) < 3 or not any(one.decoding for one in timings):
        raise PointsmanError("at least three lengths of prompts and one answer must be timed")
    columns = np.array([one[:4] for one in timings], dtype=float)
    ms = np.array([one.ms for one in timings], dtype=float)
    longest = max(timings, key=lambda one: one.tokens)
    low = np.array([ms.min() * 0.01, longest.ms / longest.tokens * 0.05])
    high = np.array([ms.min() * 1.2, longest.ms / longest.tokens * 1.5])
    best = (np.inf, low, np.zeros(4))
    for _ in range(ROUNDS):
        for pair in product(np.geomspace(low[0], high[0], SIDE), np.geomspace(low[1], high[1], SIDE)):
            error, rest = _others(pair, columns, ms)
            if error < best[0]:
                best = (error, np.array(pair), rest)
        narrow = np.sqrt(np.sqrt(high / low))
        low, high = best[1] / narrow, best[1] * narrow
    (cw, cc), (c0, ca, ck, cb) = best[1], best[2]
    found = Hardware(
        c0=float(c0),
        cw=float(cw),
        cc=float(cc),
        ca=float(ca),
        ck=float(ck),
        cb=float(cb),
        kv_tokens=kv_tokens or KV_TOKENS_IF_UNKNOWN,
    )
    off = [found.step_ms(one.tokens, one.attended, one.context, one.decoding) / one.ms - 1.0 for one in timings]
    return Calibration(found, float(np.sqrt(np.mean(np.square(off)))), max(map(abs, off)))


def _others(pair: tuple[float, float], columns: np.ndarray, ms: np.ndarray) -> tuple[float, np.ndarray]:
    """The relative error for this `cw` and `cc`, and the best values of c0, ca, ck and cb that are not negative."""
    cw, cc = pair
    matrices = (cw**4 + (cc * columns[:, 0]) ** 4) ** 0.25
    factors = np.stack([np.ones(len(ms)), columns[:, 1], columns[:, 2], columns[:, 3]], axis=1) / ms[:, None]
    wanted = (ms - matrices) / ms
    used = [0, 1, 2, 3]
    while True:  # leave out constants that would be negative
        found = np.zeros(4)
        scale = np.abs(factors[:, used]).max(axis=0)
        scale[scale == 0.0] = 1.0
        found[used] = np.linalg.lstsq(factors[:, used] / scale, wanted, rcond=None)[0] / scale
        if (found >= 0.0).all() or len(used) == 1:
            break
        used.remove(int(min(used, key=lambda one: found[one] * np.abs(factors[:, one]).max())))
    found = np.maximum(found, 0.0)
    return float(np.sum(np.square(factors @ found - wanted))), found

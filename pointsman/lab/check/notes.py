"""What a scaling policy keeps in `view.state` stays small, however long it is asked."""

import time
from typing import Any

from pointsman.lab.check.sights import NOW
from pointsman.lab.check.steady import view_of
from pointsman.lab.check.tried import Build, PolicyUnderTest
from pointsman.scaling import ScalingLimits
from pointsman.scaling.policy import MOST_BYTES, size_of

ASKED = 4000
"""On a plane that is a bit more than an hour."""
LONG_STEP_S = 600.0
"""Between questions that are to show what is never forgotten: notes of the last days are no longer growing by then."""
LONG_ASKED = 2000
LEAST_GROWTH_BYTES = 1024
STATE_ENOUGH_S = 5.0
"""A slow policy is asked for so long, twice."""
STATE_LOADS = 8
"""There is another one each time, so that there is something to note."""
STATE_EXAMPLE = f"    a load that goes from 0 to {STATE_LOADS - 1} requests, again and again"


def keeps_small_notes(build: Build) -> str | None:
    """They have an end, and it is below the limit."""
    every_s, limit = ScalingLimits().interval_s, f"at most {MOST_BYTES:,} are kept; forget what is old"
    sizes = _sizes(build(), every_s, ASKED)
    if sizes[-1] > MOST_BYTES:
        questions = f"{len(sizes)} question{'s' if len(sizes) > 1 else ''}"
        return f"asked every {every_s:g} s, it had {sizes[-1]:,} bytes in view.state after {questions}: {limit}"
    sizes = _sizes(build(), LONG_STEP_S, LONG_ASKED)
    half, end = sizes[len(sizes) // 2 - 1], sizes[-1]
    if end - half < LEAST_GROWTH_BYTES or end < 1.5 * half:
        return None
    return (
        f"asked every {LONG_STEP_S / 60:g} min, it had {half:,} bytes in view.state after {len(sizes) // 2:,} "
        f"questions and {end:,} after {len(sizes):,}: {limit}"
    )


def _sizes(policy: PolicyUnderTest, step_s: float, most: int) -> list[int]:
    """Bytes of its notes after every question."""
    state, sizes, until = dict[str, Any](), list[int](), time.perf_counter() + STATE_ENOUGH_S
    for number in range(most):
        policy.answers(view_of(float(number % STATE_LOADS), 1, NOW + number * step_s, state))
        sizes.append(size_of(state))
        if sizes[-1] > MOST_BYTES or time.perf_counter() > until:
            break
    return sizes

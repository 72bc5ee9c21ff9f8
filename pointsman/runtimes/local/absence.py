"""Why no instance of a deployment takes requests, for clients who waited for one: in words, and for how long still.

What went wrong inside is not for clients: `pointsman status` tells it to operators.
"""

from collections.abc import Iterable

from pointsman.control import InstanceStatus, Phase
from pointsman.runtimes.traffic import Unavailable

NOBODY = Unavailable("none is wanted now; the operator may start some")


def absence_of(instances: Iterable[InstanceStatus], start_up_s: float | None, now: float) -> Unavailable:
    """Of all instances of a deployment, none of which takes requests, whoever comes first. `start_up_s`: how long a
    start takes, as far as that is known."""
    found = [_absence(one, start_up_s, now) for one in instances if one.endpoint is None]
    return min(found, key=lambda one: float("inf") if one.retry_s is None else one.retry_s, default=NOBODY)


def _absence(one: InstanceStatus, start_up_s: float | None, now: float) -> Unavailable:
    if one.homeless:
        return Unavailable(f"there is no place for {one.id} yet")
    if one.phase is Phase.STARTING:
        left_s = None if start_up_s is None else max(start_up_s - (now - one.since), 0.0)
        return Unavailable(f"{one.id} is being started, for {now - one.since:.0f} s so far", left_s)
    if one.phase is Phase.BACKING_OFF and one.until is not None:
        times = "once" if one.restarts == 0 else f"{one.restarts + 1} times"
        left_s = max(one.until - now, 0.0)
        why = f"{one.id} has failed {times}, and is started again in {left_s:.0f} s"
        return Unavailable(why, left_s + (start_up_s or 0.0))
    return Unavailable(f"{one.id} is {one.phase.value}")

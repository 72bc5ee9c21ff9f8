"""What a scaling policy promises over time: it is asked again and again, and what it wants becomes the target."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec

from pointsman.lab.check.sights import NOW, flat
from pointsman.lab.check.tried import Build, PolicyUnderTest
from pointsman.scaling import DeploymentView, ScalingLimits, Wish
from pointsman.scaling.policy import understood

RUN_LOADS = (7.0, 0.0, 1.0, 30.0)
STEPS_S = (ScalingLimits().interval_s, 10.0, 0.3)
"""Between two questions: as on a plane where nobody says otherwise, and as if somebody did."""
ROUNDS = 200
CONCURRENCY = 4
MOST = 1000
"""Replicas that it may have: more than any of these loads needs, so that no bound hides what it would do."""
OFTEN = 4
"""Changes in the second half of the rounds, on a load that stays the same, after which nobody expects an end."""
RUN_ENOUGH_S = 10.0
"""A slow policy is asked for so long, and judged by what it said until then."""
LENGTHS_S = (30.0, 300.0, 3600.0)


class PolicyRun(msgspec.Struct, frozen=True):
    """What became of one load that stayed the same."""

    load: float
    step_s: float
    wanted: list[int]
    targets: list[int]

    @property
    def late(self) -> list[tuple[int, int]]:
        """The changes after half of the time, from what to what."""
        return [
            (before, after) for before, after in pairwise(self.targets[len(self.targets) // 2 :]) if before != after
        ]

    def __str__(self) -> str:
        here = f"{self.load:g} request{'s' if self.load > 1 else ''} here" if self.load else "nothing to do"
        return f"asked every {self.step_s:g} s with {here} all the time"


def does_not_flap(build: Build) -> str | None:
    """On a load that stays the same, what it wants comes to rest."""
    for run in _runs(build):
        if len(run.late) >= OFTEN and any(after < before for before, after in run.late):
            seen = ", ".join(str(after) for _, after in run.late[-6:])
            return f"{run}, it went to {seen}: look at what is here, not at what changed or which second it is"
    return None


def stays_within_bounds(build: Build) -> str | None:
    """A load that is small and stays the same does not make it want ever more, or more than it may have."""
    for run in _runs(build):
        if len(run.late) >= OFTEN and not any(after < before for before, after in run.late):
            seen = ", ".join(str(after) for _, after in run.late[-3:])
            return (
                f"{run}, it wanted more each time ({seen}, ...): adding to view.target, its own last word, has no end"
            )
        if max(run.wanted, default=0) > MOST:
            wanted = f"it wanted {max(run.wanted)} where view.max_replicas is {MOST}"
            return f"{run}, {wanted}: want what the load needs, and leave bounds to the guard"
    return None


def _runs(build: Build) -> Iterator[PolicyRun]:
    until = time.perf_counter() + RUN_ENOUGH_S
    for step_s in STEPS_S:
        for load in RUN_LOADS:
            yield _run(build(), load, step_s, until)


def _run(policy: PolicyUnderTest, load: float, step_s: float, until: float) -> PolicyRun:
    """What becomes the target where nothing but bounds is in the way."""
    target, state, run = 1, dict[str, Any](), PolicyRun(load, step_s, [], [])
    changed: dict[bool, float] = {}
    for number in range(ROUNDS):
        if time.perf_counter() > until:
            break
        now = NOW + number * step_s
        view = view_of(load, target, now, state, changed.get(True), changed.get(False))
        wish = understood(next(iter(policy.answers(view).values())))
        wanted = wish.replicas if isinstance(wish, Wish) else target
        after = max(min(wanted, MOST), 1 if load else 0)
        if after != target:
            changed[after > target] = now
        target = after
        run.wanted.append(wanted)
        run.targets.append(target)
    return run


def view_of(
    load: float,
    target: int,
    now: float,
    state: dict[str, Any],
    up_at: float | None = None,
    down_at: float | None = None,
) -> DeploymentView:
    """All replicas run, and the load has been this for long."""
    room = max(target, 1) * CONCURRENCY
    ongoing = min(load, target * CONCURRENCY)
    latency = flat(100.0 * load / room)
    return DeploymentView(
        name="chat",
        now=now,
        replicas=target,
        target=target,
        max_replicas=MOST,
        max_concurrency=CONCURRENCY,
        ongoing=ongoing,
        queued=load - ongoing,
        ongoing_windows={length: flat(ongoing, length) for length in LENGTHS_S},
        queued_windows={length: flat(load - ongoing, length) for length in LENGTHS_S},
        arrivals_per_s=dict.fromkeys(LENGTHS_S, load * 10),
        ttft_ms=latency,
        latency_ms=latency,
        kv_usage=flat(min(load / room, 1.0)),
        tokens_per_s=ongoing * 100.0,
        cost_per_replica_hour=1.0,
        since_up_s=None if up_at is None else now - up_at,
        since_down_s=None if down_at is None else now - down_at,
        state=state,
    )


RUN_PROMISES: dict[str, Callable[[Build], str | None]] = {
    "comes to rest on a steady load": does_not_flap,
    "stays within its bounds on a steady load": stays_within_bounds,
}
RUN_EXAMPLE = f"    a replica takes {CONCURRENCY} requests at once, and starts in no time"

"""The capacity of a fleet under a policy: the largest speed-up at which enough requests meet their objectives.

Enters: policies, and a trial. Leaves: a speed for each policy, found by bisection, as a mean over seeds. The longest
waits are reported too, because a policy can gain capacity by delaying hopeless requests. The one rule: a request that
was not served is a miss.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

from pointsman.lab.traffic.bound import SHARE
from pointsman.lab.traffic.policies import TriedPolicy
from pointsman.lab.traffic.trials import Progress, Trial, TrialCache, grid, run_trials
from pointsman.render.text import text_table

LOWEST, HIGHEST = 0.05, 64.0
STEP = 1.5
"""Factor between speeds that are tried, until one speed is low enough and one is too high."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity under one policy."""

    policy: str
    speed: float
    """The highest tried speed with enough requests in time. 0 if even the lowest tried speed had too few."""
    beyond: float | None
    """The lowest tried speed that was too high. None if no tried speed was too high."""
    attainment: float
    """The share of requests in time at `speed`, as a mean over seeds."""
    ttft_p99_s: float
    """The 99th percentile of the time to the first token at `speed`, as a mean over seeds."""
    rejected: float
    tried: dict[float, float]
    """The attainment at each tried speed."""
    replays: int
    cached: int


def capacities(
    base: Trial,
    policies: Sequence[TriedPolicy],
    cache: TrialCache,
    *,
    seeds: int = 1,
    share: float = SHARE,
    start: float = 1.0,
    tolerance: float = 0.02,
    processes: int | None = None,
    progress: Progress | None = None,
) -> list[Capacity]:
    """The capacity under each policy. `tolerance` is relative. The next speeds of policies are tried in parallel."""
    searches = [_Search(policy, start, share, tolerance) for policy in policies]
    while open_ := [one for one in searches if one.next is not None]:
        trials = [trial for one in open_ for trial in grid(base, [one.policy], [one.next or start], seeds)]
        finished = run_trials(trials, cache, processes, progress)
        for number, one in enumerate(open_):
            one.learn(finished[number * seeds : (number + 1) * seeds])
    return [one.found() for one in searches]


class _Search:
    """Finds the next speed to try: outwards until one is low enough and one is too high, then by bisection."""

    def __init__(self, policy: TriedPolicy, start: float, share: float, tolerance: float) -> None:
        self.policy, self._share, self._tolerance = policy, share, tolerance
        self.next: float | None = start
        self._low, self._high = 0.0, 0.0
        self._at: dict[float, Sequence[Any]] = {}
        self._tried: dict[float, float] = {}
        self._replays = self._cached = 0

    def learn(self, finished: Sequence[Any]) -> None:
        speed = self.next
        assert speed is not None, "it was tried"
        attainment = fmean(one.figures.attainment for one in finished)
        self._tried[speed], self._at[speed] = attainment, [one.figures for one in finished]
        self._replays += len(finished)
        self._cached += sum(one.cached for one in finished)
        if attainment >= self._share:
            self._low = max(self._low, speed)
        else:
            self._high = speed if not self._high else min(self._high, speed)
        self.next = self._next_speed()

    def _next_speed(self) -> float | None:
        low, high = self._low, self._high
        if not high:
            return low * STEP if low * STEP <= HIGHEST else None
        if not low:
            return high / STEP if high / STEP >= LOWEST else None
        return (low + high) / 2 if high - low > self._tolerance * low else None

    def found(self) -> Capacity:
        runs = self._at.get(self._low) or self._at[min(self._at)]
        return Capacity(
            policy=self.policy.name,
            speed=self._low,
            beyond=self._high or None,
            attainment=fmean(one.attainment for one in runs),
            ttft_p99_s=fmean(one.ttft.p99 for one in runs),
            rejected=fmean(one.rejected for one in runs),
            tried=dict(sorted(self._tried.items())),
            replays=self._replays,
            cached=self._cached,
        )


def capacity_table(found: Sequence[Capacity], highest: float | None) -> str:
    """A table of capacities. `highest` is a speed that no policy can exceed, or None if it is unknown."""
    heads = ["policy", "capacity", "too much", "SLO met", "TTFT p99", "rejected", *(["of bound"] if highest else [])]
    rows = [
        [
            one.policy,
            f"{one.speed:.2f}x" if one.speed else f"below {min(one.tried):.2f}x",
            "" if one.beyond is None else f"{one.beyond:.2f}x",
            f"{one.attainment:.3f}",
            f"{one.ttft_p99_s:.1f}",
            f"{one.rejected:.1%}",
            *([f"{one.speed / highest:.0%}"] if highest else []),
        ]
        for one in found
    ]
    lines = [text_table(heads, rows)]
    cached, replays = sum(one.cached for one in found), sum(one.replays for one in found)
    return "\n".join([*lines, *([f"{cached} of {replays} replays cached"] if cached else [])])

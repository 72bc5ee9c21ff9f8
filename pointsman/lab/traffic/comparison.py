"""Several policies side by side: means over seeds, and differences with confidence intervals.

Enters: figures of trials. Leaves: a table, or plain data. The one rule: policies are compared seed by seed, because
each seed gives all policies the same arrivals.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec

from pointsman.errors import PointsmanError
from pointsman.lab.traffic.bound import TrafficBound, bound, engines_of
from pointsman.lab.traffic.measures import RunFigures
from pointsman.lab.traffic.sources import recording_of
from pointsman.lab.traffic.trials import Finished, Trial
from pointsman.render.text import text_table

T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131,
    2.12, 2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Values of Student's t, two-sided at 95 %. The first is for one degree of freedom."""
T_BEYOND = 1.96


class SeedMean(NamedTuple):
    """A mean, and half the width of its 95 % confidence interval. With only one seed, the half width is nan."""

    mean: float
    half: float


def estimate(values: Sequence[float]) -> SeedMean:
    if len(values) < 2:
        return SeedMean(values[0], math.nan)
    freedom = len(values) - 1
    t = T_95[freedom - 1] if freedom <= len(T_95) else T_BEYOND
    return SeedMean(fmean(values), t * stdev(values) / math.sqrt(len(values)))


Measure = Callable[[RunFigures], float]

MEASURES: dict[str, Measure] = {
    "attainment": lambda run: run.attainment,
    "ttft_mean_s": lambda run: run.ttft.mean,
    "ttft_p50_s": lambda run: run.ttft.p50,
    "ttft_p90_s": lambda run: run.ttft.p90,
    "ttft_p99_s": lambda run: run.ttft.p99,
    "tpot_mean_s": lambda run: run.tpot.mean,
    "tpot_p90_s": lambda run: run.tpot.p90,
    "tpot_p99_s": lambda run: run.tpot.p99,
    "latency_mean_s": lambda run: run.latency.mean,
    "latency_p90_s": lambda run: run.latency.p90,
    "latency_p99_s": lambda run: run.latency.p99,
    "goodput_per_s": lambda run: run.goodput_per_s,
    "tokens_per_s": lambda run: run.tokens_per_s,
    "hit_rate": lambda run: run.hit_rate,
    "rejected": lambda run: run.rejected,
    "late": lambda run: run.late,
    "slow": lambda run: run.slow,
    "gpu_hours": lambda run: run.gpu_hours,
    "cost_per_million_tokens": lambda run: (
        math.nan if run.cost_per_million_tokens is None else run.cost_per_million_tokens
    ),
    "fairness": lambda run: run.fairness,
}


class Cell(NamedTuple):
    """The results for one policy at one speed, with all seeds."""

    policy: str
    speed: float
    runs: list[RunFigures]
    cached: int

    def of(self, measure: str) -> SeedMean:
        return estimate([MEASURES[measure](run) for run in self.runs])


class TrafficComparison:
    """The cells of all policies and speeds. Differences are from the first policy."""

    def __init__(self, finished: Sequence[Finished], bounds: Mapping[float, TrafficBound] | None = None) -> None:
        """`bounds` has the bound at each speed that has one."""
        self.bounds = dict(bounds or {})
        self.cells: dict[tuple[str, float], Cell] = {}
        for one in finished:
            run = one.figures
            cell = self.cells.setdefault((run.policy, run.speed), Cell(run.policy, run.speed, [], 0))
            cell.runs.append(run)
            self.cells[run.policy, run.speed] = cell._replace(cached=cell.cached + one.cached)
        self.policies = list(dict.fromkeys(policy for policy, _ in self.cells))
        self.speeds = list(dict.fromkeys(speed for _, speed in self.cells))
        self.trials, self.cached = len(finished), sum(one.cached for one in finished)

    def difference(self, policy: str, speed: float, measure: str) -> SeedMean:
        """The difference from the first policy, paired by seed."""
        first = {run.seed: MEASURES[measure](run) for run in self.cells[self.policies[0], speed].runs}
        own = self.cells[policy, speed].runs
        return estimate([MEASURES[measure](run) - first[run.seed] for run in own])

    def errors(self) -> list[str]:
        found = {
            f"{cell.policy}: {error}": None for cell in self.cells.values() for run in cell.runs for error in run.errors
        }
        return list(found)

    def as_text(self) -> str:
        heads = ["speed", "policy", "SLO met", "of bound", "vs first", "TTFT mean", "p90", "p99", "TPOT p90", "e2e p90",
                 "goodput/s", "hits", "rejected", "$/M tokens"]  # fmt: skip
        rows = [self._row(self.cells[policy, speed]) for speed in self.speeds for policy in self.policies]
        lines = [text_table(heads, rows)]
        lines += [self._bound_text(speed) for speed in self.bounds]
        if self.cached:
            lines.append(f"{self.cached} of {self.trials} replays cached")
        return "\n".join([*lines, *(f"warning: {error}" for error in self.errors())])

    def _row(self, cell: Cell) -> list[str]:
        def mean(measure: str) -> float:
            return cell.of(measure).mean

        difference = (
            "" if cell.policy == self.policies[0] else signed(self.difference(cell.policy, cell.speed, "attainment"))
        )
        return [
            f"{cell.speed:g}x",
            cell.policy,
            with_interval(cell.of("attainment")),
            self._of_bound(cell),
            difference,
            f"{mean('ttft_mean_s'):.2f}",
            f"{mean('ttft_p90_s'):.2f}",
            f"{mean('ttft_p99_s'):.1f}",
            f"{mean('tpot_p90_s') * 1000:.0f} ms",
            f"{mean('latency_p90_s'):.1f}",
            f"{mean('goodput_per_s'):.2f}",
            f"{mean('hit_rate'):.1%}",
            f"{mean('rejected'):.1%}",
            _or_nothing(mean("cost_per_million_tokens")),
        ]

    def of_bound(self, cell: Cell) -> float | None:
        """The attainment as a share of the highest possible attainment. None if the latter is unknown."""
        best = self.bounds.get(cell.speed)
        return None if best is None or not best.attainment else cell.of("attainment").mean / best.attainment

    def _of_bound(self, cell: Cell) -> str:
        share = self.of_bound(cell)
        return "" if share is None else f"{share:.1%}"

    def _bound_text(self, speed: float) -> str:
        best = self.bounds[speed]
        return (
            f"bound at {speed:g}x: {best.attainment:.3f} in time, {best.intrinsic_misses:.1%} cannot be; "
            f"{best.hit_rate:.1%} hits; if all are served, one waits {best.least_wait_s:.1f} s or longer"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "policies": self.policies,
            "speeds": self.speeds,
            "trials": self.trials,
            "cached": self.cached,
            "errors": self.errors(),
            "bounds": [{"speed": speed} | msgspec.to_builtins(best) for speed, best in self.bounds.items()],
            "cells": [self._as_dict(cell) for cell in self.cells.values()],
        }

    def _as_dict(self, cell: Cell) -> dict[str, Any]:
        return {
            "policy": cell.policy,
            "speed": cell.speed,
            "seeds": len(cell.runs),
            "share_of_bound": self.of_bound(cell),
            "measures": {name: _plain(cell.of(name)) for name in MEASURES},
            "difference": {
                name: _plain(self.difference(cell.policy, cell.speed, name))
                for name in MEASURES
                if cell.policy != self.policies[0]
            },
            "tenants": msgspec.to_builtins(cell.runs[0].tenants),
            "outcomes": cell.runs[0].outcomes,
        }


def _plain(found: SeedMean) -> dict[str, float | None]:
    return {"mean": _finite(found.mean), "half_width": _finite(found.half)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _or_nothing(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else ""


def with_interval(found: SeedMean) -> str:
    return f"{found.mean:.3f}" if math.isnan(found.half) else f"{found.mean:.3f} ±{found.half:.3f}"


def signed(found: SeedMean) -> str:
    """A difference as text, with a star if its confidence interval excludes 0."""
    if math.isnan(found.half):
        return f"{found.mean:+.3f}"
    return f"{found.mean:+.3f} ±{found.half:.3f}{'*' if abs(found.mean) > found.half else ''}"


def bounds_of(base: Trial, speeds: Sequence[float]) -> dict[float, TrafficBound]:
    """The bound at each speed, for the first seed. Empty for closed loops, and for fleets without equal engines."""
    load, fleet = base.setting.load, base.setting.fleet
    try:
        engines_of(fleet)
    except PointsmanError:
        return {}
    if load.closed:
        return {}
    recording = recording_of(base.source, base.first)
    return {
        speed: bound(recording, msgspec.structs.replace(load, speed=speed), fleet, base.objectives, base.seed)
        for speed in speeds
    }

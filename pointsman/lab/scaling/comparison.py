"""Compares policies on the same load with each other, and with two references that know the future."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import msgspec

from pointsman.lab.scaling.recording import Series
from pointsman.lab.scaling.replay import Replay, ReplayOutcome, Setting
from pointsman.render.text import text_table
from pointsman.scaling.limits import ScalingLimits
from pointsman.scaling.policies.sizing import ongoing_target
from pointsman.scaling.policy import DeploymentView, Wish

HEADS = ("policy", "replica-hours", "times the least", "unserved", "changes", "most replicas")
UNLIMITED = 1_000_000
"""A limit of this many replicas or more counts as no limit."""
DAY_S, HOUR_S, MINUTE_S = 86400.0, 3600.0, 60.0


def compare(
    series: Series,
    setting: Setting,
    policies: Mapping[str, object],
    limits: ScalingLimits | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> "Comparison":
    """Replay the load for each policy. `progress` is called with a policy and the finished share of its replay."""
    replay = Replay(series, setting, limits)
    outcomes = {
        name: replay.run(policy, name, None if progress is None else partial(progress, name))
        for name, policy in policies.items()
    }
    targets = {name: target for name, policy in policies.items() if (target := ongoing_target(policy)) is not None}
    return Comparison(replay, outcomes, targets)


class Comparison:
    def __init__(
        self, replay: Replay, policies: Mapping[str, ReplayOutcome], targets: Mapping[str, float] | None = None
    ) -> None:
        """`targets` has the requests per replica at which each policy aims, if this is known."""
        self.series, self.setting, self.limits, self.times = replay.series, replay.setting, replay.limits, replay.times
        self.policies, self.targets = dict(policies), dict(targets or {})
        self.references = {
            "static peak": static_peak(replay.series, replay.setting),
            "clairvoyant with start-up": clairvoyant(replay.series, replay.setting),
        }

    def as_text(self) -> str:
        """The load, the table, the policies with invalid answers, and warnings."""
        return "\n".join([*self._headline(), "", self._table(), *self.problems(), *self.warnings()])

    def problems(self) -> list[str]:
        """One line for each policy with invalid answers: the number of these answers, and the first problem."""
        return [
            f"{name}: {one.problems:,} of {self.times:,} answers did not count; it {_first_problem(one)}"
            for name, one in self.policies.items()
            if one.problems
        ]

    def warnings(self) -> list[str]:
        """One line for each policy that aims at more requests per replica than a replica takes at once.

        Such a policy cannot keep up with the load.
        """
        holds = self.setting.holds
        return [
            f"warning: {name}: {target:g} requests per replica are more than the {holds} that a replica takes at once "
            f"(capacity times duration of a request), so it wants too few replicas; lower its target"
            for name, target in self.targets.items()
            if target > holds
        ]

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain data, without the records."""
        rates, capacity = self.series.rates, self.setting.capacity
        return {
            "load": {
                "name": self.series.name,
                "began": self.setting.began,
                "bin_s": self.series.bin_s,
                "bins": len(rates),
                "mean_per_s": fmean(rates),
                "peak_per_s": max(rates),
                "needed_at_mean": fmean(rates) / capacity,
                "needed_at_peak": max(self.series.needed(capacity)),
            },
            "setting": {
                "capacity": capacity,
                "start_up_s": self.setting.start_up_s,
                "interval_s": self.setting.interval_s,
                "request_s": self.setting.request_s,
                "queue_s": self.setting.queue_s,
                "cost_per_replica_hour": self.setting.cost_per_replica_hour,
                "limits": msgspec.to_builtins(self.limits),
            },
            "calls": self.times,
            "least_replica_hours": least_hours(self.series, capacity),
            "policies": [self._as_row(name, one) for name, one in self.policies.items()],
            "references": [self._as_row(name, one) for name, one in self.references.items()],
            "warnings": self.warnings(),
        }

    def _as_row(self, name: str, one: ReplayOutcome) -> dict[str, Any]:
        cost = self.setting.cost_per_replica_hour
        return {
            "policy": name,
            "replica_hours": one.hours,
            "ratio": one.ratio,
            "unserved": one.unserved,
            "changes": one.changes,
            "most": one.most,
            "cost": None if cost is None else one.hours * cost,
            "problems": one.problems,
            "problem": _first_problem(one) if one.problems else "",
        }

    def _headline(self) -> list[str]:
        series, setting = self.series, self.setting
        rates, mean = series.rates, fmean(series.rates)
        needed = max(series.needed(setting.capacity))
        return [
            f"{series.name}: {len(rates):,} bin{'s' if len(rates) > 1 else ''} of {span(series.bin_s)}, "
            f"{span(series.seconds)} in all; {mean:.4g}/s on average, {max(rates):.4g}/s at the peak",
            f"a replica serves {setting.capacity:.4g}/s and starts in {span(setting.start_up_s)}: "
            f"{mean / setting.capacity:.3g} needed on average, {needed:,} at the peak, "
            f"{_hours(least_hours(series, setting.capacity))} replica-hours at least",
            f"called every {span(setting.interval_s)}; {_limits_text(self.limits)}",
        ]

    def _table(self) -> str:
        cost = self.setting.cost_per_replica_hour
        rows = [
            [
                name,
                _hours(one.hours),
                f"{one.ratio:.3f}",
                f"{one.unserved:.2%}",
                f"{one.changes:,}",
                f"{one.most:,}",
                *([] if cost is None else [f"{one.hours * cost:,.2f}"]),
            ]
            for name, one in (self.policies | self.references).items()
        ]
        return text_table(HEADS if cost is None else (*HEADS, "cost"), rows)


def span(seconds: float) -> str:
    """A time such as 14 days, 90 min or 600 ms. Its unit is the largest one that gives 2 or more, or exactly 1."""
    for size, unit in ((DAY_S, "days"), (HOUR_S, "h"), (MINUTE_S, "min"), (1.0, "s")):
        if seconds >= 2 * size or seconds == size:
            return f"{seconds / size:.3g} {unit.removesuffix('s') if seconds == DAY_S else unit}"
    return f"{seconds:.3g} s" if seconds == 0 or seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours < 100 else f"{hours:,.0f}"


def _first_problem(one: ReplayOutcome) -> str:
    return next((record.problem for record in one.records if record.problem), "")


def _limits_text(limits: ScalingLimits) -> str:
    least, most = limits.min_replicas, limits.max_replicas
    words = [
        f"at least {least} replica{'' if least == 1 else 's'}" if most >= UNLIMITED else f"{least} to {most:,} replicas"
    ]
    words += [
        f"{name} {span(seconds)}"
        for name, seconds in (
            ("upDelay", limits.up_delay_s),
            ("downDelay", limits.down_delay_s),
            ("cooldown", limits.cooldown_s),
            ("idleTimeout", limits.idle_timeout_s if least == 0 else 0.0),
        )
        if seconds
    ]
    words += [
        f"{name} {share:g}"
        for name, share in (("upFactor", limits.up_factor), ("downFactor", limits.down_factor))
        if share != 1
    ]
    return ", ".join([*words, *([] if limits.max_step is None else [f"maxStep {limits.max_step}"])])


def least_hours(series: Series, capacity: float) -> float:
    """Replica-hours of the clairvoyant minimum. It has exactly the replicas that every bin needs, and no start-up."""
    return sum(series.needed(capacity)) * series.bin_s / 3600


def static_peak(series: Series, setting: Setting) -> ReplayOutcome:
    """A reference that has the replicas for the peak all the time."""
    need = series.needed(setting.capacity)
    return _served(series, setting, [max(need)] * len(need), max(need) * series.seconds / 3600)


def clairvoyant(series: Series, setting: Setting) -> ReplayOutcome:
    """A reference that knows the future and orders replicas early. Each replica costs from the time of its order."""
    need = series.needed(setting.capacity)
    whole, part = divmod(setting.start_up_s, series.bin_s)
    # An order in the last part of a bin is ready one bin later than an order in its first part.
    early = [max(need[index : index + int(whole) + 1]) for index in range(len(need))]
    late = [max(need[index : index + int(whole) + 2]) for index in range(len(need))]
    seconds = sum((series.bin_s - part) * first + part * then for first, then in zip(early, late, strict=True))
    return _served(series, setting, late if part else early, seconds / 3600)


def _served(series: Series, setting: Setting, replicas: list[int], hours: float) -> ReplayOutcome:
    changes = sum(before != after for before, after in pairwise(replicas))
    line = [(index * series.bin_s, count, count) for index, count in enumerate(replicas)]
    least = least_hours(series, setting.capacity)
    ratio = hours / least if least else 1.0
    return ReplayOutcome(
        hours=hours, ratio=ratio, unserved=0.0, changes=changes, most=max(replicas), problems=0, line=line, records=[]
    )


class Reactive:
    """A simple policy to compare with: the current rate, times a headroom."""

    def __init__(self, replica_per_s: float, headroom: float = 1.2) -> None:
        self._replica_per_s, self._headroom = replica_per_s, headroom

    def desired_replicas(self, view: DeploymentView) -> Wish:
        now = view.arrivals_per_s[min(view.arrivals_per_s)]
        return Wish(
            math.ceil(self._headroom * now / self._replica_per_s - 1e-9), f"{self._headroom:g} times {now:.4g}/s"
        )

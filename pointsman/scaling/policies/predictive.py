"""Replicas for the load that is expected when a replica that is launched now will be ready."""

import math
from typing import Annotated

from pointsman.parameters import Above0, Spelled, Wait
from pointsman.scaling.policies.forecast import DEFAULT, UNSETTLED, Habits, learn, levels, spread
from pointsman.scaling.policies.sizing import AtLeast1, Between0And1, checked
from pointsman.scaling.policy import Wish
from pointsman.scaling.view import DeploymentView
from pointsman.selection.arrays import np

MIN_ARRIVALS = 100.0
"""Arrivals in a window from which its rate is accurate to about a tenth."""
STEADY_S = 300.0
"""Preferred window for the duration of requests: after a jump in arrivals, requests in flight follow later."""
MAX_BINS = 2016
"""Bins of the history that are used, so that a call stays short: 14 days of 10 minutes."""
MAX_OVER_PEAK = 1.2
"""A forecast is at most this many times the highest load seen."""


class Predictive:
    """As many replicas as the expected load and a margin need, at least as many as the present load needs.

    The margin is learned so that about the share `unserved` of requests goes unserved. While there is little history, a
    fixed headroom is used.
    """

    habits: Habits = DEFAULT
    """Settings of the learning, for experiments."""

    def __init__(
        self,
        replica_per_s: Annotated[Above0 | None, Spelled("replicaPerSecond")] = None,
        ongoing_per_replica: Above0 | None = None,
        unserved: Between0And1 = 0.002,
        start_up_s: Annotated[Wait, Spelled("startUp")] = 60.0,
        react_s: Annotated[Wait, Spelled("react")] = 30.0,
        headroom: AtLeast1 = 1.5,
        learn_bins: int = 36,
        caution: Above0 = 0.75,
    ) -> None:
        """`replica_per_s`: what a replica serves per second; None: as many as keep `ongoing_per_replica` requests on it
        (None: its concurrency) at the present duration of requests. `start_up_s`: used until a start was measured.
        `react_s`: time for measuring and deciding. `headroom`: for the first `learn_bins` bins. `caution`: the margin
        is learned for this share of `unserved`, as the past is easier to fit than the future.
        """
        checked("replicaPerSecond", replica_per_s)
        checked("ongoingPerReplica", ongoing_per_replica)
        checked("caution", caution)
        for name, wait_s in (("startUp", start_up_s), ("react", react_s)):
            if wait_s < 0:
                raise ValueError(f"{name} must be 0 or more, found {wait_s:g}")
        if not 0 < unserved < 1:
            raise ValueError(f"unserved must be a share between 0 and 1, such as 0.002, found {unserved}")
        if headroom < 1:
            raise ValueError(f"headroom must be 1 or more, found {headroom}")
        self._replica_per_s, self._ongoing_per_replica = replica_per_s, ongoing_per_replica
        self._unserved, self._start_up_s, self._react_s = unserved, start_up_s, react_s
        self._headroom, self._learn_bins = headroom, max(learn_bins, 12)
        self._caution = caution

    def desired_replicas(self, view: DeploymentView) -> Wish:
        now = rate_now(view)
        each = self._each(view)
        if each is None:
            per_replica = self._ongoing_per_replica or view.max_concurrency or 1
            return Wish(_count(view.load, per_replica), "as many as the present requests need: no rate is known yet")
        lead_s = (self._start_up_s if view.start_up_s is None else view.start_up_s) + self._react_s
        ahead = max(1, round(lead_s / view.bin_s))
        if len(view.history) < max(self._learn_bins, UNSETTLED + 4 * ahead):
            load, how = self._headroom * now, f"{self._headroom:g} times the present rate, as there is little history"
        else:
            load, how = self._expected(view, now, lead_s, ahead)
        least, wanted = _count(now, each), _count(load, each)
        return Wish(
            max(least, wanted),
            f"{now:.4g}/s arrive now, {max(load, now):.4g}/s expected within {lead_s:.0f} s ({how}); "
            f"a replica serves {each:.3g}/s",
        )

    def _each(self, view: DeploymentView) -> float | None:
        """Requests per second that a replica serves; None if unknown."""
        if self._replica_per_s is not None:
            return self._replica_per_s
        per_replica = self._ongoing_per_replica or view.max_concurrency
        for seconds in sorted(view.ongoing_windows, key=lambda length: abs(length - STEADY_S)):
            windows = (view.ongoing_windows, view.queued_windows)
            here = sum(one[seconds].mean or 0.0 for one in windows if seconds in one)
            rate = view.arrivals_per_s.get(seconds, 0.0)
            if per_replica and here and rate * seconds >= MIN_ARRIVALS:
                # Little's law. Waiting requests count, or an overload would look like a small load.
                return per_replica * rate / here
        return None

    def _expected(self, view: DeploymentView, now: float, lead_s: float, ahead: int) -> tuple[float, str]:
        bins = view.history[-MAX_BINS:]
        rates = np.fromiter((one.per_second for one in bins), np.float64, len(bins))
        state = view.state
        if state.get("learned_at") != bins[-1].began or state.get("ahead") != ahead:
            # Load goes unserved only during a start: after that, there are as many replicas as it needs.
            exposed = max(lead_s, 1.0) / (ahead * view.bin_s)
            lesson = learn(rates, ahead, self._caution * self._unserved / exposed, view.bin_s, self.habits)
            state.update(learned_at=bins[-1].began, ahead=ahead, shape=lesson.shape, margin=lesson.margin)
        shape, margin = self.habits.shapes[state["shape"]], state["margin"]
        so_far = np.append(rates, now)
        level = float(levels(so_far, shape, ahead, view.bin_s)[-1])
        margin *= float(spread(so_far, self.habits)[-1])
        return min(level + margin, MAX_OVER_PEAK * float(so_far.max())), f"{level:.4g}: {shape}; margin {margin:.4g}"


def rate_now(view: DeploymentView) -> float:
    """The present rate: over the shortest window that has enough arrivals at the highest rate."""
    rates = sorted(view.arrivals_per_s.items())
    most = max((rate for _, rate in rates), default=0.0)
    for seconds, rate in rates:
        if most * seconds >= MIN_ARRIVALS:
            return rate
    return rates[-1][1] if rates else 0.0


def _count(load: float, each: float) -> int:
    return math.ceil(load / each - 1e-9)

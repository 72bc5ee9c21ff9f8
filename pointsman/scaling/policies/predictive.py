"""Predictive: ready for the load that will be there when a replica that is ordered now has started."""

import math
from typing import Annotated

from pointsman.parameters import Above0, Spelled, Wait
from pointsman.scaling.policies.forecast import DEFAULT, UNSETTLED, Habits, learn, levels, spread
from pointsman.scaling.policies.sizing import AtLeast1, Between0And1, checked
from pointsman.scaling.policy import Wish
from pointsman.scaling.view import DeploymentView
from pointsman.selection.arrays import np

ENOUGH_ARRIVALS = 100.0
"""In a window, for its rate to be told from chance (a tenth)."""
STEADY_S = 300.0
"""How long requests take is seen over about so long: when the load jumps, what is here follows what comes later."""
MOST_BINS = 2016
"""Of the history, so that a call stays short: 14 days of 10 minutes."""
BEYOND = 1.2
"""Of the highest load that was ever seen: more than that is not prepared for, however wild it is."""


class Predictive:
    """As many replicas as serve the expected load and a margin; the margin is learned so that about the asked share of
    requests goes unserved. Never fewer than the load of now takes. While there is little history, a headroom."""

    habits: Habits = DEFAULT
    """How it learns: to be tried out, not to be configured."""

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
        """What a replica serves per second; None: as many as keep `ongoing_per_replica` requests on it (None: the
        most that it takes at once), at the time that requests take now. `start_up_s` counts until one was seen;
        `react_s` is what measuring and asking take besides. The headroom holds for the first bins of the history.
        The past is known and what comes is not, so the margin is that with which `caution` times the asked share of
        the past would have gone unserved."""
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
            return Wish(_count(view.load, per_replica), "as many as the requests that are here take: no rate known yet")
        lead_s = (self._start_up_s if view.start_up_s is None else view.start_up_s) + self._react_s
        ahead = max(1, round(lead_s / view.bin_s))
        if len(view.history) < max(self._learn_bins, UNSETTLED + 4 * ahead):
            load, words = self._headroom * now, f"{self._headroom:g} times it, as there is little history"
        else:
            load, words = self._expected(view, now, lead_s, ahead)
        least, wanted = _count(now, each), _count(load, each)
        return Wish(
            max(least, wanted),
            f"{now:.4g}/s come now; be ready for {max(load, now):.4g}/s within {lead_s:.0f} s ({words}); "
            f"a replica serves {each:.3g}/s",
        )

    def _each(self, view: DeploymentView) -> float | None:
        """Requests per second that a replica serves; None: nobody can know."""
        if self._replica_per_s is not None:
            return self._replica_per_s
        per_replica = self._ongoing_per_replica or view.max_concurrency
        for seconds in sorted(view.ongoing_windows, key=lambda length: abs(length - STEADY_S)):
            windows = (view.ongoing_windows, view.queued_windows)
            here = sum(one[seconds].mean or 0.0 for one in windows if seconds in one)
            rate = view.arrivals_per_s.get(seconds, 0.0)
            if per_replica and here and rate * seconds >= ENOUGH_ARRIVALS:
                # What is here is what comes, times how long each stays: who waits, too, else many would look like few.
                return per_replica * rate / here
        return None

    def _expected(self, view: DeploymentView, now: float, lead_s: float, ahead: int) -> tuple[float, str]:
        bins = view.history[-MOST_BINS:]
        rates = np.fromiter((one.per_second for one in bins), np.float64, len(bins))
        state = view.state
        if state.get("learned_at") != bins[-1].began or state.get("ahead") != ahead:
            # Only the part of a bin that a start takes is exposed: afterwards there are as many as it needs.
            exposed = max(lead_s, 1.0) / (ahead * view.bin_s)
            lesson = learn(rates, ahead, self._caution * self._unserved / exposed, view.bin_s, self.habits)
            state.update(learned_at=bins[-1].began, ahead=ahead, shape=lesson.shape, margin=lesson.margin)
        shape, margin = self.habits.shapes[state["shape"]], state["margin"]
        so_far = np.append(rates, now)
        level = float(levels(so_far, shape, ahead, view.bin_s)[-1])
        margin *= float(spread(so_far, self.habits)[-1])
        return min(level + margin, BEYOND * float(so_far.max())), f"{level:.4g}: {shape}; margin {margin:.4g}"


def rate_now(view: DeploymentView) -> float:
    """Requests per second now: over the shortest window in which enough would come at the highest of its rates."""
    rates = sorted(view.arrivals_per_s.items())
    most = max((rate for _, rate in rates), default=0.0)
    for seconds, rate in rates:
        if most * seconds >= ENOUGH_ARRIVALS:
            return rate
    return rates[-1][1] if rates else 0.0


def _count(load: float, each: float) -> int:
    return math.ceil(load / each - 1e-9)

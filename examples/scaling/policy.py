"""A scaling policy of a dozen lines: prepares for the load of a week ago.

It needs only the view that a plane gives it, so the same function runs on recorded load
(pointsman rehearse scaling examples/scaling/policy.py:as_before ...) and live (models.yaml).
"""

from math import ceil

from pointsman.scaling import DeploymentView, Wish

DAY_S, WEEK_S = 86_400.0, 7 * 86_400.0


def as_before(view: DeploymentView, replica_per_s: float = 5.0, headroom: float = 1.3) -> Wish:
    """For the larger of two rates: the present one, and that of a week (at first: a day) before a new replica would be
    ready."""
    ready_at = view.now + (view.start_up_s or 60.0)
    now, known = view.arrivals_per_s.get(30.0, 0.0), bool(view.history) and view.history[0].began <= ready_at - WEEK_S
    before = rate_at(view, ready_at - (WEEK_S if known else DAY_S))
    why = f"{now:.3g}/s now, {before:.3g}/s a {'week' if known else 'day'} before a new one would be ready"
    replicas = ceil(headroom * max(now, before) / replica_per_s)
    return Wish(replicas, f"{why}; {headroom:g} times the larger, {replica_per_s:g}/s each: {replicas}")


def rate_at(view: DeploymentView, moment: float) -> float:
    """The rate at a past moment; 0 if unknown."""
    index = int((moment - view.history[0].began) // view.bin_s) if view.history else -1
    return view.history[index].per_second if 0 <= index < len(view.history) else 0.0

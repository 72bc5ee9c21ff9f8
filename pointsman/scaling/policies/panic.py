"""Calm on most days, quick in a burst: a short window beside a long one."""

from typing import Annotated

from pointsman.parameters import Above0, Spelled, Time
from pointsman.scaling.policies.sizing import Above1, checked, mean_load, per_replica, replicas_for
from pointsman.scaling.policy import Wish
from pointsman.scaling.view import DeploymentView


class Panic:
    """Requests per replica over a long window; if a short one needs twice as many as there are, that one counts, and
    for a whole long window nothing goes down."""

    def __init__(
        self,
        target: Above0 = 2.0,
        stable_s: Annotated[Time, Spelled("stableWindow")] = 60.0,
        panic_s: Annotated[Time, Spelled("panicWindow")] = 6.0,
        threshold: Above1 = 2.0,
    ) -> None:
        checked("target", target)
        checked("panicWindow", panic_s)
        checked("threshold", threshold, 1.0)
        if stable_s < panic_s:
            raise ValueError(
                f"stableWindow must not be shorter than panicWindow, found {stable_s:g} s and {panic_s:g} s"
            )
        self.target, self.stable_s, self.panic_s, self.threshold = target, stable_s, panic_s, threshold
        self.windows = (panic_s, stable_s)

    def desired_replicas(self, view: DeploymentView) -> Wish:
        (stable, stable_when), (burst, burst_when) = mean_load(view, self.stable_s), mean_load(view, self.panic_s)
        calm, quick = replicas_for(stable / self.target, view), replicas_for(burst / self.target, view)
        notes = view.state
        if burst / self.target >= self.threshold * max(view.replicas, 1):
            notes["until"] = view.now + self.stable_s
        until = min(notes.get("until", view.now), view.now + self.stable_s)  # a clock may be put back
        if view.now >= until:
            notes.clear()
            return Wish(calm, per_replica(stable, f"requests here ({stable_when})", self.target, calm))
        notes["most"] = most = max(calm, quick, notes.get("most", view.target))
        said = per_replica(burst, f"requests here ({burst_when})", self.target, quick)
        return Wish(most, f"a burst: {said}; nothing goes down before it is over: {most}")

"""A stable window for normal load, and a short one for bursts."""

from typing import Annotated

from pointsman.parameters import Above0, Spelled, Time
from pointsman.scaling.policies.sizing import Above1, checked, mean_load, per_replica, replicas_for
from pointsman.scaling.policy import DeploymentView, Wish


class Panic:
    """Requests per replica over a stable window.

    If the load of the panic window needs `threshold` times the present replicas, that load counts, and the target does
    not go down for the length of a stable window.
    """

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
        self.ongoing_per_replica, self.stable_s, self.panic_s, self.threshold = target, stable_s, panic_s, threshold
        self.windows = (panic_s, stable_s)

    def desired_replicas(self, view: DeploymentView) -> Wish:
        (stable, stable_when), (burst, burst_when) = mean_load(view, self.stable_s), mean_load(view, self.panic_s)
        each = self.ongoing_per_replica
        stable_replicas, burst_replicas = (replicas_for(load / each, view) for load in (stable, burst))
        state = view.state
        if burst / each >= self.threshold * max(view.replicas, 1):
            state["until"] = view.now + self.stable_s
        until = min(state.get("until", view.now), view.now + self.stable_s)  # the clock may be set back
        if view.now >= until:
            state.clear()
            return Wish(stable_replicas, per_replica(stable, f"requests ({stable_when})", each, stable_replicas))
        state["most"] = most = max(stable_replicas, burst_replicas, state.get("most", view.target))
        why = per_replica(burst, f"requests ({burst_when})", each, burst_replicas)
        return Wish(most, f"burst: {why}; no decrease before it is over: {most}")

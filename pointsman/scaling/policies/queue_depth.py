"""A number of waiting requests per replica."""

from math import ceil
from typing import Annotated

from pointsman.parameters import Above0, Spelled, Time
from pointsman.scaling.policies.sizing import checked, mean_of, per_replica, replicas_for
from pointsman.scaling.policy import DeploymentView, Wish


class QueueDepth:
    """One replica per `target_queued_per_replica` waiting requests, and at least as many as running requests need."""

    def __init__(
        self, target_queued_per_replica: Above0 = 2.0, look_back_s: Annotated[Time, Spelled("lookBack")] = 30.0
    ) -> None:
        checked("targetQueuedPerReplica", target_queued_per_replica)
        checked("lookBack", look_back_s)
        self.target, self.look_back_s = target_queued_per_replica, look_back_s
        self.windows = (look_back_s,)

    def desired_replicas(self, view: DeploymentView) -> Wish:
        queued, when = mean_of(view.queued_windows, self.look_back_s, view.queued)
        ongoing, _ = mean_of(view.ongoing_windows, self.look_back_s, view.ongoing)
        for_queue = ceil(queued / self.target - 1e-9)
        running = max(ongoing, view.ongoing)
        replicas = max(for_queue, self._busy(view, running))
        if replicas == for_queue:
            return Wish(replicas, per_replica(queued, f"requests wait ({when})", self.target, replicas))
        return Wish(replicas, f"{queued:.1f} requests wait ({when}), and {running:.1f} run: {replicas}")

    def _busy(self, view: DeploymentView, ongoing: float) -> int:
        """Replicas that running requests need; at most one per request if the concurrency is unknown."""
        if view.max_concurrency:
            return replicas_for(ongoing / view.max_concurrency, view)
        return min(view.target, ceil(ongoing))

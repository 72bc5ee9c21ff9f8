"""So many waiting requests per replica."""

from math import ceil
from typing import Annotated

from pointsman.parameters import Duration, Spelled
from pointsman.scaling.policy import Wish
from pointsman.scaling.sizing import checked, mean_of, replicas_for
from pointsman.scaling.view import DeploymentView


class QueueDepth:
    """A replica for every so many requests that wait, and at least as many as those that run keep busy."""

    def __init__(
        self,
        target_queued_per_replica: float = 2.0,
        look_back_s: Annotated[Duration, Spelled("lookBack")] = 30.0,
    ) -> None:
        checked("targetQueuedPerReplica", target_queued_per_replica)
        checked("lookBack", look_back_s)
        self.target, self.look_back_s = target_queued_per_replica, look_back_s
        self.windows = (look_back_s,)

    def desired_replicas(self, view: DeploymentView) -> Wish:
        queued, when = mean_of(view.queued_windows, self.look_back_s, view.queued)
        ongoing, _ = mean_of(view.ongoing_windows, self.look_back_s, view.ongoing)
        for_queue = ceil(queued / self.target - 1e-9)
        busy = self._busy(view, max(ongoing, view.ongoing))
        replicas = max(for_queue, busy)
        waiting = f"{queued:.1f} requests wait ({when})"
        if replicas == for_queue:
            return Wish(replicas, f"{waiting}, {self.target:g} wanted per replica: {replicas}")
        return Wish(replicas, f"{waiting}, and {view.ongoing:g} run: {replicas}")

    def _busy(self, view: DeploymentView, ongoing: float) -> int:
        """Replicas that running requests fill; if nobody knows how many one takes, none is left without one."""
        if view.max_concurrency:
            return replicas_for(ongoing / view.max_concurrency, view)
        return min(view.target, ceil(ongoing))

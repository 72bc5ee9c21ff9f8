"""A number of requests per replica: the default policy."""

from typing import Annotated

from pointsman.parameters import Above0, Spelled, Time
from pointsman.scaling.policies.sizing import checked, mean_load, per_replica, replicas_for
from pointsman.scaling.policy import DeploymentView, Wish


class TargetOngoing:
    """One replica per `target` requests, running or waiting."""

    def __init__(self, target: Above0 = 2.0, look_back_s: Annotated[Time, Spelled("lookBack")] = 30.0) -> None:
        checked("target", target)
        checked("lookBack", look_back_s)
        self.ongoing_per_replica, self.look_back_s = target, look_back_s
        self.windows = (look_back_s,)

    def desired_replicas(self, view: DeploymentView) -> Wish:
        load, when = mean_load(view, self.look_back_s)
        replicas = replicas_for(load / self.ongoing_per_replica, view)
        return Wish(replicas, per_replica(load, f"requests ({when})", self.ongoing_per_replica, replicas))

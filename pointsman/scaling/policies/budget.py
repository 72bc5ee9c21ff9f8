"""A budget for another policy."""

from pointsman.parameters import Above0
from pointsman.scaling.calendar import month_ends, shown
from pointsman.scaling.policies.sizing import checked
from pointsman.scaling.policy import DeploymentView, ScalingPolicy, Wish, invoke_inner

HOUR_S = 3600.0


class Budget:
    """What another policy wants, up to a budget per hour or per month.

    Of a monthly budget, the cost of `min` replicas until the end of the month is reserved. The rest may be spent at
    any time.
    """

    def __init__(
        self,
        policy: ScalingPolicy,
        per_hour: Above0 | None = None,
        per_month: Above0 | None = None,
        cost_per_replica_hour: Above0 | None = None,
    ) -> None:
        if per_hour is None and per_month is None:
            raise ValueError("perHour or perMonth must be given")
        checked("perHour", per_hour)
        checked("perMonth", per_month)
        checked("costPerReplicaHour", cost_per_replica_hour)
        self.policy, self.per_hour, self.per_month, self.cost = policy, per_hour, per_month, cost_per_replica_hour
        self.windows = tuple(getattr(policy, "windows", ()))

    def desired_replicas(self, view: DeploymentView) -> Wish:
        wish = invoke_inner(self.policy, view, "policy")
        cost = self.cost if view.cost_per_replica_hour is None else view.cost_per_replica_hour
        if not cost:
            raise ValueError("the cost of a replica per hour is unknown; set costPerReplicaHour")
        limits: dict[str, int] = {}
        if self.per_hour is not None:
            limits[f"{self.per_hour:g} per hour"] = int(self.per_hour / cost + 1e-9)
        if self.per_month is not None:
            limits[f"{self.per_month:g} per month"] = self._payable(view, cost, self.per_month)
        budget, most = min(limits.items(), key=lambda item: item[1])
        wanted = max(wish.replicas, 1 if view.load else 0)  # requests that wait get a first replica in any case
        if wanted <= most:
            return wish
        refused = f"{wanted - most} of {wanted}: {budget} pays for {most} at {cost:g} per replica-hour"
        return Wish(most, f"{wish.why}; {budget} pays for {most}", "; ".join(filter(None, [wish.refused, refused])))

    def _payable(self, view: DeploymentView, cost: float, per_month: float) -> int:
        """How many replicas the budget pays for during the next hour."""
        month, state = f"{shown(view.now):%Y-%m}", view.state
        if state.get("month") != month:
            state.update(month=month, spent=0.0, at=view.now)
        running = view.replicas + view.starting - view.unplaced
        state["spent"] += running * cost * max(view.now - state["at"], 0.0) / HOUR_S
        state["at"] = view.now
        hours_left = (month_ends(view.now) - view.now) / HOUR_S
        reserved = view.min_replicas * cost * max(hours_left - 1, 0.0)
        left = per_month - state["spent"] - reserved
        return max(view.min_replicas, int(left / (cost * min(hours_left, 1.0)) + 1e-9))

"""Never above so much money."""

from pointsman.parameters import Above0
from pointsman.scaling.calendar import month_ends, shown
from pointsman.scaling.policies.sizing import checked
from pointsman.scaling.policy import ScalingPolicy, Wish, invoke_inner
from pointsman.scaling.view import DeploymentView

HOUR_S = 3600.0


class Budget:
    """What another policy wants, as far as the money goes. Of a month's money, what `min` will cost until its end is
    put aside; the rest may be spent when it is needed."""

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
            raise ValueError("nobody says what a replica costs per hour; set costPerReplicaHour")
        limits: dict[str, int] = {}
        if self.per_hour is not None:
            limits[f"{self.per_hour:g} per hour"] = int(self.per_hour / cost + 1e-9)
        if self.per_month is not None:
            limits[f"{self.per_month:g} per month"] = self._payable(view, cost, self.per_month)
        said, most = min(limits.items(), key=lambda item: item[1])
        wanted = max(wish.replicas, 1 if view.load else 0)  # whoever waits would be given the first one
        if wanted <= most:
            return wish
        refused = f"{wanted - most} of {wanted}: {said} pay for {most} at {cost:g} per replica-hour"
        return Wish(most, f"{wish.why}; {said} pay for {most}", "; ".join(filter(None, [wish.refused, refused])))

    def _payable(self, view: DeploymentView, cost: float, per_month: float) -> int:
        """How many can be had for the next hour, so that the money lasts for `min` until the month ends."""
        month, notes = f"{shown(view.now):%Y-%m}", view.state
        if notes.get("month") != month:
            notes.update(month=month, spent=0.0, at=view.now)
        running = view.replicas + view.starting - view.unplaced
        notes["spent"] += running * cost * max(view.now - notes["at"], 0.0) / HOUR_S
        notes["at"] = view.now
        hours_left = (month_ends(view.now) - view.now) / HOUR_S
        aside = view.min_replicas * cost * max(hours_left - 1, 0.0)
        left = per_month - notes["spent"] - aside
        return max(view.min_replicas, int(left / (cost * min(hours_left, 1.0)) + 1e-9))

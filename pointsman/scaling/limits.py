"""What holds for every policy, also for the user's own: bounds, delays, smoothing, steps, cool-downs."""

from typing import Annotated, Any

import msgspec

from pointsman.parameters import Count, Number, Share, Spelled, Time, Wait


class ScalingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Within these, a policy is free. The `scaling` section of a document has the same fields."""

    min_replicas: Annotated[Number, Spelled("min")] = 1
    max_replicas: Annotated[Count, Spelled("max")] = 1
    initial_replicas: Annotated[Number | None, Spelled("initial")] = None
    """To begin with; None: `min_replicas`. See `first`."""
    up_delay_s: Wait = 0.0
    """More are wanted for so long before there are more. From none to the first one there is no delay."""
    down_delay_s: Wait = 300.0
    """Fewer are wanted for so long before there are fewer: the most that was wanted in that time is kept."""
    up_factor: Share = 1.0
    """Of the difference to what is wanted, what is added at once; rounded so that at least one is."""
    down_factor: Share = 1.0
    max_step: Count | None = None
    """At most so many more or fewer at a time."""
    cooldown_s: Wait = 0.0
    """Between two changes of the target."""
    idle_timeout_s: Wait = 300.0
    """With `min_replicas` 0: the last replica goes when nobody has asked for so long."""
    wait_s: Wait | None = None
    """While there is no replica, requests wait so long for the first one; None: as their queue says."""
    turn_s: Wait = 30.0
    """With `min_replicas` 0: while it is busy, it keeps its last place for so long when somebody else is waited for."""
    interval_s: Time = 1.0
    """How often the policy is asked."""
    time_limit_s: Time = 0.5
    """What a call of the policy may take. A slower answer does not count, and is reported."""

    @property
    def first(self) -> int:
        """How many there are before anybody was asked."""
        wanted = self.min_replicas if self.initial_replicas is None else self.initial_replicas
        return min(max(wanted, self.min_replicas), self.max_replicas)


class MetricQuery(msgspec.Struct, frozen=True):
    """A number that a Prometheus knows."""

    name: str
    url: str
    query: str


class ScalingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Who says how many instances there are, and within what."""

    policy: Any
    """A `ScalingPolicy`, or a function; None: that of the application decides."""
    policy_name: str
    limits: ScalingLimits
    recipe: str
    """What the policy was made from. Where it is equal, so is the policy."""
    metrics: tuple[MetricQuery, ...] = ()
    cost_per_replica_hour: float | None = None
    notes: tuple[str, ...] = ()

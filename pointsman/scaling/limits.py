"""The settings of a scaled deployment: its policy, and the limits that apply to every policy."""

from typing import Annotated, Any

import msgspec

from pointsman.parameters import Count, Number, Share, Spelled, Time, Wait


class ScalingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds, delays, steps and cool-downs. The `scaling` section of a document has the same fields."""

    min_replicas: Annotated[Number, Spelled("min")] = 1
    max_replicas: Annotated[Count, Spelled("max")] = 1
    initial_replicas: Annotated[Number | None, Spelled("initial")] = None
    """The first target; if None, `min_replicas`."""
    up_delay_s: Wait = 0.0
    """How long more replicas must be wanted before the target goes up. The first replica is not delayed."""
    down_delay_s: Wait = 300.0
    """How long fewer replicas must be wanted before the target goes down, to the largest number wanted in that time."""
    up_factor: Share = 1.0
    """Share of the difference to what is wanted that is added at once, rounded up."""
    down_factor: Share = 1.0
    max_step: Count | None = None
    """Maximum change of the target at a time."""
    cooldown_s: Wait = 0.0
    """Minimum time between two changes of the target."""
    idle_timeout_s: Wait = 300.0
    """Time without a request after which the last replica is stopped, if `min_replicas` is 0."""
    wait_s: Wait | None = None
    """How long requests wait for the first replica; if None, as long as their queue is configured to let them wait."""
    turn_s: Wait = 30.0
    """If `min_replicas` is 0: how long a busy deployment keeps its last place when another deployment needs it."""
    interval_s: Time = 1.0
    """Time between two calls of the policy."""
    time_limit_s: Time = 0.5
    """Maximum time of a call. A slower answer is ignored and reported."""

    @property
    def first(self) -> int:
        """The target before the policy is first called."""
        wanted = self.min_replicas if self.initial_replicas is None else self.initial_replicas
        return min(max(wanted, self.min_replicas), self.max_replicas)


class MetricQuery(msgspec.Struct, frozen=True):
    """A query to a Prometheus server, read as a custom metric."""

    name: str
    url: str
    query: str


class ScalingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a deployment is scaled: its policy and its limits."""

    policy: Any
    """A `ScalingPolicy` or a function; None if the application's policy decides."""
    policy_name: str
    limits: ScalingLimits
    recipe: str
    """What the policy was built from. Equal recipes mean equal policies."""
    metrics: tuple[MetricQuery, ...] = ()
    cost_per_replica_hour: float | None = None

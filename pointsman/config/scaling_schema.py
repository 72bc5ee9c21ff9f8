"""The `scaling` of a deployment, a node or an application, as types."""
# ruff: noqa: RUF012 (each struct gets an empty list or mapping of its own)

from typing import Annotated, Any

from msgspec import Meta

from pointsman.config.manifest import Amount, Count, Time
from pointsman.config.section import Section
from pointsman.parameters import Duration

DEFAULT_POLICY = "target-ongoing"
Number = Annotated[int, Meta(ge=0)]
Wait = Annotated[Duration, Meta(ge=0)]
Factor = Annotated[float, Meta(gt=0, le=1)]


class MetricSpec(Section, frozen=True):
    """A number that a Prometheus knows, for the policy."""

    name: str
    """Where the policy finds it: view.metrics[NAME]."""
    url: str
    """Of the Prometheus: http://host:port"""
    query: str
    """In its own language; the values that come back are added up."""


class ScalingSpec(Section, frozen=True, kw_only=True):
    """How many instances there are, and who decides that."""

    policy: str = DEFAULT_POLICY
    """A built-in policy, or a class or function of your own as package.module:Name."""
    parameters: dict[str, Any] = {}
    min: Number = 1
    max: Count
    initial: Number | None = None
    up_delay: Wait = 0.0
    """More are wanted for so long before there are more."""
    down_delay: Wait = 300.0
    up_factor: Factor = 1.0
    """Of the difference to what is wanted, what is added at once."""
    down_factor: Factor = 1.0
    max_step: Count | None = None
    cooldown: Wait = 0.0
    """Between two changes."""
    idle_timeout: Wait = 300.0
    """With `min` 0: the last one goes when nobody has asked for so long."""
    wait: Wait | None = None
    """While there is no instance: how long requests wait for the first one."""
    turn: Wait = 30.0
    """With `min` 0: how long it keeps its last place while it is busy and another is waited for."""
    interval: Time = 1.0
    """How often the policy is asked."""
    time_limit: Time = 0.5
    """What it may take to answer."""
    cost_per_replica_hour: Amount | None = None
    """Of one instance, for policies that look at it."""
    metrics: list[MetricSpec] = []

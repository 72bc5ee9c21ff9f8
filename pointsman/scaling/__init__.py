"""Scaling: how many replicas a deployment should have, decided by a policy that users can replace.

Enters: a view of a deployment (or of all deployments of an application), made from measurements. Leaves: a target, and
a record of the reason. The one rule: a policy only returns a number. The guard around it keeps every target within
bounds, delays and steps, even if the policy raises or returns something invalid.
"""

from pointsman.scaling.guard import Guard
from pointsman.scaling.limits import ScalingLimits
from pointsman.scaling.measurements import Measurements, windows_of
from pointsman.scaling.policies.budget import Budget
from pointsman.scaling.policies.combined import MaxOf, MinOf
from pointsman.scaling.policies.panic import Panic
from pointsman.scaling.policies.predictive import Predictive
from pointsman.scaling.policies.queue_depth import QueueDepth
from pointsman.scaling.policies.scheduled import Scheduled, ScheduleEntry
from pointsman.scaling.policies.slo_attainment import SloAttainment
from pointsman.scaling.policies.target_ongoing import TargetOngoing
from pointsman.scaling.policies.token_throughput import TokenThroughput
from pointsman.scaling.policy import (
    ApplicationScalingPolicy,
    ApplicationView,
    DeploymentView,
    PolicyFunction,
    Rate,
    ScalingPolicy,
    Stay,
    TooSlow,
    Window,
    Wish,
    by_node,
    invoke,
    invoke_application,
    policy_name,
)
from pointsman.scaling.records import ScalingRecord

SCALING_POLICIES: dict[str, type] = {
    "target-ongoing": TargetOngoing,
    "queue-depth": QueueDepth,
    "slo-attainment": SloAttainment,
    "token-throughput": TokenThroughput,
    "panic": Panic,
    "scheduled": Scheduled,
    "predictive": Predictive,
    "budget": Budget,
    "max-of": MaxOf,
    "min-of": MinOf,
}
"""Built-in policies by their names in configuration."""

__all__ = [
    "DeploymentView", "ApplicationView", "Window", "Rate",
    "ScalingPolicy", "ApplicationScalingPolicy", "PolicyFunction", "Wish",
    "Guard", "ScalingLimits", "ScalingRecord", "Stay", "TooSlow",
    "invoke", "invoke_application", "by_node", "policy_name",
    "Measurements", "windows_of",
    "TargetOngoing", "QueueDepth", "SloAttainment", "TokenThroughput", "Panic", "Scheduled", "ScheduleEntry",
    "Predictive", "Budget", "MaxOf", "MinOf", "SCALING_POLICIES",
]  # fmt: skip

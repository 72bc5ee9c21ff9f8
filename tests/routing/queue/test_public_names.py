from pointsman.routing import queue
from pointsman.routing.queue import (
    EvictionFilter,
    EvictionOrder,
    FairnessPolicy,
    FlowNamer,
    OrderingPolicy,
    SaturationDetector,
    UsageLimitPolicy,
)
from pointsman.selection.plugins import kebab_case

PLUGINS = {
    OrderingPolicy: {"fcfs-ordering-policy", "edf-ordering-policy", "slo-deadline-ordering-policy"},
    FairnessPolicy: {
        "global-strict-fairness-policy",
        "round-robin-fairness-policy",
        "virtual-token-counter-fairness-policy",
        "program-aware-fairness",
    },
    FlowNamer: {"agent-identity"},
    EvictionFilter: {"sheddable-eviction-filter"},
    EvictionOrder: {"priority-then-time-eviction-order-policy"},
    UsageLimitPolicy: {"static-usage-limit-policy", "priority-holdback-policy", "soft-reflective-ceiling-policy"},
    SaturationDetector: {"utilization-detector", "concurrency-detector"},
}


def test_each_role_is_implemented_by_the_intended_classes_only() -> None:
    """Configuration finds plugins by the methods of exported classes, so no other class may look like one."""
    exported = {name: getattr(queue, name) for name in queue.__all__}
    for role, names in PLUGINS.items():
        filling = {
            kebab_case(name)
            for name, made in exported.items()
            if isinstance(made, role) and not getattr(made, "_is_protocol", False)
        }
        assert filling == names

"""Flow control: requests wait here in priority bands until an instance has room for them.

Enters: requests. Leaves: each of them exactly once, to be served or with a refusal. The one rule: order is kept and not
recomputed, so that a dispatch costs the same whether ten requests wait or ten thousand.
"""

from pointsman.routing.queue.bands import BandSettings
from pointsman.routing.queue.eviction import (
    EvictionFilter,
    EvictionOrder,
    InFlightEviction,
    PriorityThenTimeEvictionOrderPolicy,
    SheddableEvictionFilter,
)
from pointsman.routing.queue.fairness import FairnessPolicy, GlobalStrictFairnessPolicy, RoundRobinFairnessPolicy, Turns
from pointsman.routing.queue.flow_control import REQUEST_TTL_S, FlowControl
from pointsman.routing.queue.items import Blocked, Offered, Queued, QueueStage
from pointsman.routing.queue.limits import (
    PriorityHoldbackPolicy,
    SoftReflectiveCeilingPolicy,
    StaticUsageLimitPolicy,
    UsageLimitPolicy,
)
from pointsman.routing.queue.ordering import (
    EdfOrderingPolicy,
    FcfsOrderingPolicy,
    OrderingPolicy,
    SloDeadlineOrderingPolicy,
)
from pointsman.routing.queue.program_fairness import AgentIdentity, FlowNamer, ProgramAwareFairness
from pointsman.routing.queue.saturation import (
    ConcurrencyDetector,
    PoolSaturation,
    SaturationDetector,
    UtilizationDetector,
)
from pointsman.routing.queue.token_fairness import VirtualTokenCounterFairnessPolicy

__all__ = [
    "FlowControl", "REQUEST_TTL_S", "Queued", "QueueStage", "Offered", "Blocked", "BandSettings",
    "OrderingPolicy", "FcfsOrderingPolicy", "EdfOrderingPolicy", "SloDeadlineOrderingPolicy",
    "FairnessPolicy", "Turns",
    "GlobalStrictFairnessPolicy", "RoundRobinFairnessPolicy", "VirtualTokenCounterFairnessPolicy",
    "UsageLimitPolicy", "StaticUsageLimitPolicy", "PriorityHoldbackPolicy", "SoftReflectiveCeilingPolicy",
    "SaturationDetector", "UtilizationDetector", "ConcurrencyDetector", "PoolSaturation",
    "InFlightEviction", "EvictionFilter", "EvictionOrder",
    "SheddableEvictionFilter", "PriorityThenTimeEvictionOrderPolicy",
    "ProgramAwareFairness", "FlowNamer", "AgentIdentity",
]  # fmt: skip

"""Filters. Enters: a cycle and its candidates. Leaves: the candidates that must not be chosen, each with a reason.

The one rule: a filter demands; a preference is a scorer.
"""

from pointsman.routing.filters.attribute import EndpointAttributeFilter
from pointsman.routing.filters.budget import WithinBudget
from pointsman.routing.filters.deadline import MeetsDeadline
from pointsman.routing.filters.label_selector import LabelSelectorFilter
from pointsman.routing.filters.prefix_affinity import PrefixCacheAffinityFilter
from pointsman.routing.filters.roles import DecodeFilter, EncodeFilter, PrefillFilter
from pointsman.routing.filters.serving import HasRoom, IsHealthy, ServesModel
from pointsman.routing.filters.session import SessionAffinityFilter
from pointsman.routing.filters.slo_headroom import SloHeadroomTierFilter
from pointsman.routing.filters.topology import TopologyAffinityFilter
from pointsman.routing.filters.utilization import UtilizationFilter

__all__ = [
    "ServesModel", "IsHealthy", "HasRoom", "WithinBudget", "MeetsDeadline",
    "LabelSelectorFilter", "DecodeFilter", "PrefillFilter", "EncodeFilter",
    "EndpointAttributeFilter", "TopologyAffinityFilter",
    "UtilizationFilter", "SloHeadroomTierFilter", "PrefixCacheAffinityFilter", "SessionAffinityFilter",
]  # fmt: skip

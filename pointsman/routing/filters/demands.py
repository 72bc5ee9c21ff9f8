"""The filters that run before the plugins of every profile."""

from collections.abc import Sequence

from pointsman.routing.endpoints import ACCEPTS, IS_FULL, Endpoint
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.filters.budget import WithinBudget
from pointsman.routing.filters.serving import HasRoom, IsHealthy, ServesModel
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Filter, PerMembers
from pointsman.selection.columns import where_zero


class Demands:
    """The four filters that run first in every profile: model, health, room and budget.

    As a gate it recognises at once when all endpoints pass, as in a fleet with one model and room everywhere.
    """

    def __init__(self, price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR) -> None:
        self.filters: Sequence[Filter[Endpoint]] = (
            ServesModel(),
            IsHealthy(),
            HasRoom(),
            WithinBudget(price_per_gpu_hour),
        )
        self._served_by_all = PerMembers(_models_served_by_all)

    def lets_all_pass(self, cycle: RequestCycle, candidates: Endpoints) -> bool:
        request = cycle.request
        return (
            request.cost_budget is None
            and candidates.rows is None
            and request.model_name in self._served_by_all.of(candidates)
            and 1.0 not in candidates.column(IS_FULL)
        )


def _models_served_by_all(endpoints: Endpoints) -> frozenset[str]:
    """The models that every endpoint serves; an empty set if an endpoint does not accept requests."""
    if not len(endpoints) or len(where_zero(endpoints.column(ACCEPTS))):
        return frozenset()
    first, *rest = ({"", each.instance.model_name, *each.instance.adapters} for each in endpoints)
    return frozenset(first.intersection(*rest))

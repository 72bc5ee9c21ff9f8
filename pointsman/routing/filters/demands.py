"""What is demanded of every endpoint before any profile is asked: whoever fails one of these is never picked."""

from collections.abc import Sequence

from pointsman.routing.endpoints import ACCEPTS, IS_FULL, Endpoint
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.filters.budget import WithinBudget
from pointsman.routing.filters.serving import HasRoom, IsHealthy, ServesModel
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Filter, PerMembers
from pointsman.selection.columns import where_zero


class Demands:
    """The four filters that stand before every profile: model, health, room and budget.

    As a gate it knows when all of them would let everybody pass, which in a fleet of one model with room is always.
    """

    def __init__(self, price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR) -> None:
        self.filters: Sequence[Filter[Endpoint]] = (
            ServesModel(),
            IsHealthy(),
            HasRoom(),
            WithinBudget(price_per_gpu_hour),
        )
        self._served_by_all = PerMembers(_models_of_everybody)

    def lets_all_pass(self, cycle: RequestCycle, candidates: Endpoints) -> bool:
        """Whether nobody would be rejected by any of the four."""
        request = cycle.request
        return (
            request.cost_budget is None
            and candidates.rows is None
            and request.model_name in self._served_by_all.of(candidates)
            and 1.0 not in candidates.column(IS_FULL)
        )


def _models_of_everybody(endpoints: Endpoints) -> frozenset[str]:
    """The names that every endpoint answers to; none if one of them does not accept requests."""
    if not len(endpoints) or len(where_zero(endpoints.column(ACCEPTS))):
        return frozenset()
    first, *others = ({"", each.instance.model_name, *each.instance.adapters} for each in endpoints)
    return frozenset(first.intersection(*others))

"""The filter for the budget of a request."""

from math import inf

from pointsman.reasons import Reason
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR, CostRates, billed_tokens
from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.selection import Column, Rejected
from pointsman.selection.columns import linear, or_else, smallest, where_above
from pointsman.types import RequestMetadata


class WithinBudget:
    """Demands that the request's expected cost does not exceed its `cost_budget`. Without a budget all endpoints pass.

    It rejects endpoints with unknown costs, because these might exceed the budget.
    """

    def __init__(self, price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR) -> None:
        self._rates = CostRates(price_per_gpu_hour)

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        budget = cycle.request.cost_budget
        if budget is None:
            return ()
        costs = self._costs(cycle.request, candidates)
        over = where_above(costs, budget)
        if not len(over):
            return ()
        return Rejected[Endpoint](candidates, over, "over-budget", cost=costs, budget=budget)

    def unaffordable(self, request: RequestMetadata, candidates: Endpoints) -> Reason | None:
        """Why no candidate can ever serve a request within its budget; None if one can."""
        budget = request.cost_budget
        if budget is None or not len(candidates):
            return None
        least, facts = smallest(self._costs(request, candidates)), {"budget": budget, "instances": len(candidates)}
        if least == inf:
            return Reason("budget-not-judged", facts)
        return Reason("beyond-budget", {**facts, "cost": least}) if least > budget else None

    def _costs(self, request: RequestMetadata, candidates: Endpoints) -> Column:
        """Costs; inf where they are unknown."""
        return or_else(linear(self._rates.of(candidates), billed_tokens(request), 0.0), inf)

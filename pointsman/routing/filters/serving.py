"""Filters that no profile should be without: an endpoint that cannot serve the request is never picked."""

from collections.abc import Sequence

from pointsman.routing.endpoints import ACCEPTS, LIMIT, LOAD, Endpoint
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Positions, Rejected
from pointsman.selection.columns import where_at_least, where_zero


class ServesModel:
    """Demands that the endpoint serves the requested model, by its name or as one of its adapters."""

    def __init__(self) -> None:
        self._members: Sequence[Endpoint] = ()
        self._others: dict[str, Positions] = {}

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejected[Endpoint]:
        model = cycle.request.model_name
        return Rejected(candidates, self._not_serving(model, candidates), "serving another model")

    def _not_serving(self, model: str, candidates: Endpoints) -> Positions:
        if not model:
            return ()
        if candidates.rows is not None:
            return _positions_of_others(model, candidates)
        if candidates.whole is not self._members:  # members have changed: forget what was known of the old ones
            self._members, self._others = candidates.whole, {}
        others = self._others.get(model)
        if others is None:
            others = _positions_of_others(model, candidates)
            if len(others) < len(candidates):  # names that nobody serves come from clients, without end
                self._others[model] = others
        return others


def _positions_of_others(model: str, candidates: Endpoints) -> Positions:
    return [position for position, endpoint in enumerate(candidates) if not endpoint.serves(model)]


class IsHealthy:
    """Demands that the endpoint accepts requests, as its health check or operator says."""

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejected[Endpoint]:
        return Rejected(candidates, where_zero(candidates.column(ACCEPTS)), "not accepting requests")


class HasRoom:
    """Demands that the endpoint runs fewer requests than its `max_concurrency`. No known limit: always room."""

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejected[Endpoint]:
        load, limit = candidates.column(LOAD), candidates.column(LIMIT)
        return Rejected(candidates, where_at_least(load, limit), "full: {:g} of {:g} requests", load, limit)

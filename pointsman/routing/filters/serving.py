"""Filters for model, health and room: an endpoint that cannot serve the request is never picked."""

from collections.abc import Mapping
from typing import TypeAlias

from pointsman.reasons import Reason
from pointsman.routing.endpoints import ACCEPTS, IS_FULL, LIMIT, LOAD, Endpoint
from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.selection import PerMembers, Positions, Rejected, RejectedEach
from pointsman.selection.columns import where_set, where_zero


class ServesModel:
    """Demands that the endpoint serves the requested model, by its name or as one of its adapters."""

    def __init__(self) -> None:
        self._known: PerMembers[Endpoint, dict[str, Positions]] = PerMembers(lambda _: {})
        """The rows of the endpoints that do not serve a model, by model."""

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        others = self._not_serving(cycle.request.model_name, candidates)
        return Rejected(candidates, others, "other-model") if len(others) else ()

    def _not_serving(self, model: str, candidates: Endpoints) -> Positions:
        if not model:
            return ()
        if candidates.rows is not None:
            return _positions_not_serving(model, candidates)
        known = self._known.of(candidates)
        positions = known.get(model)
        if positions is None:
            positions = _positions_not_serving(model, candidates)
            if len(positions) < len(candidates):  # clients may send any number of unknown model names
                known[model] = positions
        return positions


def _positions_not_serving(model: str, candidates: Endpoints) -> Positions:
    return [position for position, endpoint in enumerate(candidates) if not endpoint.serves(model)]


class IsHealthy:
    """Demands that the endpoint accepts requests, as its health check or operator says, and is not paused or silent."""

    def __init__(self) -> None:
        self._closed: PerMembers[Endpoint, Closed] = PerMembers(_closed)

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        closed, why = self._closed.of(candidates)
        if len(closed) and candidates.rows is not None:
            closed = where_zero(candidates.column(ACCEPTS))
        if not len(closed):
            return ()
        if not why:
            return Rejected(candidates, closed, "not-accepting")
        now = cycle.now
        return RejectedEach(candidates, closed, lambda endpoint: _why_closed(why.get(endpoint), now))


Closed: TypeAlias = tuple[Positions, Mapping[Endpoint, Reason]]
"""Endpoints that do not accept requests, and the reasons that are known."""


def _closed(whole: Endpoints) -> Closed:
    closed = where_zero(whole.column(ACCEPTS))
    return closed, {whole[at]: why for at in closed if (why := whole[at].closed) is not None}


def _why_closed(why: Reason | None, now: float) -> Reason:
    if why is None:
        return Reason("not-accepting")
    return why.having(left_s=max(why.facts["until"] - now, 0.0)) if "until" in why.facts else why


class HasRoom:
    """Demands that the endpoint runs fewer requests than its `max_concurrency`. Without a known limit it has room."""

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        is_full = candidates.column(IS_FULL)
        if isinstance(is_full, list) and 1.0 not in is_full:
            return ()
        full = where_set(is_full)
        if not len(full):
            return ()
        return Rejected(candidates, full, "full", load=candidates.column(LOAD), limit=candidates.column(LIMIT))

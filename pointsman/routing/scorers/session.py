"""The scorer that prefers the endpoint of a session."""

from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.sessions import SessionAffinity
from pointsman.selection import Column
from pointsman.selection.columns import column_of


class SessionAffinityScorer(SessionAffinity):
    """Prefers the endpoint that the request's session is on: 1 for it, 0 for the others.

    All score 0 if the request has no session, if its token cannot be read, or if the endpoint of its session is not a
    candidate.
    """

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        bound = self.bound_to(cycle)
        if bound is None:
            return column_of([0.0] * len(candidates), candidates.arrays)
        return column_of([1.0 if endpoint.id == bound else 0.0 for endpoint in candidates], candidates.arrays)

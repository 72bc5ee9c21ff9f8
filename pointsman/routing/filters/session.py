"""The filter that keeps a session on its endpoint."""

from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.routing.sessions import SessionAffinity
from pointsman.selection import Rejected


class SessionAffinityFilter(SessionAffinity):
    """Demands the endpoint that the request's session is on.

    All endpoints pass if the request has no session, if its token cannot be read, or if the endpoint of its session is
    not a candidate.
    """

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        bound = self.bound_to(cycle)
        if bound is None:
            return ()
        rest = [position for position, endpoint in enumerate(candidates) if endpoint.id != bound]
        if not rest or len(rest) == len(candidates):
            return ()
        return Rejected(candidates, rest, "session-elsewhere", instance=bound)

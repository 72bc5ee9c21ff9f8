"""The filter that keeps a session where it is."""

from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.routing.sessions import SessionAffinity
from pointsman.selection import Rejected


class SessionAffinityFilter(SessionAffinity):
    """Demands the endpoint that the request's session is on.

    Anybody will do when the request has no session, its token cannot be read, or its endpoint is not a candidate.
    """

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        bound = self.bound_to(cycle)
        if bound is None:
            return ()
        others = [place for place, endpoint in enumerate(candidates) if endpoint.id != bound]
        if not others or len(others) == len(candidates):
            return ()
        return Rejected(candidates, others, "session-elsewhere", instance=bound)

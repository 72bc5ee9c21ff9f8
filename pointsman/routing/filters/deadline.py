"""The filter for the deadline of a request."""

from pointsman.routing.endpoints import Endpoint
from pointsman.routing.estimates import latency_ms
from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.selection import Rejected
from pointsman.selection.columns import where_above


class MeetsDeadline:
    """Demands that the expected latency fits into the time that the request has left. Without a deadline all pass.

    An endpoint without measurements passes; otherwise it would never be measured.
    """

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        deadline = cycle.request.deadline
        if deadline is None:
            return ()
        left_ms = max(0.0, (deadline - cycle.now) * 1000)
        expected = latency_ms(cycle.request, candidates)
        late = where_above(expected, left_ms)
        if not len(late):
            return ()
        return Rejected[Endpoint](candidates, late, "too-slow", expected_ms=expected, left_ms=left_ms)

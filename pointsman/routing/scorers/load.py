"""Scorers that prefer endpoints with less to do, by what the engines report and by what was sent to them."""

from pointsman.routing.endpoints import WAITING
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Column
from pointsman.selection.columns import falling


class QueueScorer:
    """Prefers short waiting queues: 1 for the shortest, 0 for the longest, 1 for all when equal.

    An endpoint never measured counts as an empty queue.
    """

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        return falling(candidates.column(WAITING))

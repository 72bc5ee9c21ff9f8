"""Scorers for nearness to the instance that holds what the request needs."""

from pointsman.routing.filters.topology import Peer
from pointsman.routing.plugins import NEAR, Endpoints, RequestCycle
from pointsman.routing.topology import Nearness, nearness
from pointsman.selection import Column
from pointsman.selection.columns import column_of
from pointsman.types import ExecutionInstance


class TopologyAffinity:
    """Prefers endpoints near a given instance: the cycle's NEAR, else the one named by a header.

    Without such an instance all score 0. An endpoint of unknown location counts as far.
    """

    def __init__(
        self,
        header_name: str = "x-pointsman-near",
        same_nvlink: float = 1.0,
        same_numa: float = 0.9,
        same_host: float = 0.75,
        same_rack: float = 0.5,
    ) -> None:
        self._header = header_name.lower()
        self._worth = {
            Nearness.SAME_INSTANCE: 1.0,
            Nearness.SAME_NVLINK: same_nvlink,
            Nearness.SAME_NUMA: same_numa,
            Nearness.SAME_HOST: same_host,
            Nearness.SAME_RACK: same_rack,
            Nearness.FAR: 0.0,
        }

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        anchor = self._anchor(cycle, candidates)
        if anchor is None:
            return column_of([0.0] * len(candidates), candidates.arrays)
        worth = self._worth
        return [worth[nearness(anchor, endpoint.instance)] for endpoint in candidates]

    def _anchor(self, cycle: RequestCycle, candidates: Endpoints) -> ExecutionInstance | None:
        near = cycle.get(NEAR)
        if near is not None:
            return near.instance
        name = cycle.request.headers.get(self._header)
        if not name:
            return None
        return next((each.instance for each in candidates.whole if each.instance.instance_id == name), None)


WORTH = (1.0, 0.2, 0.05, 0.02)
"""Scores for a common host, rack, zone and region. They reflect the bandwidth between two instances."""


class TopologyAffinityScorer(Peer):
    """Prefers endpoints near the one that another stage of the request was given to, by the nearest common level:
    host 1, rack 0.2, zone 0.05, region 0.02. All score 0 if there is no such endpoint, or if its location is unknown.
    """

    bounded = True

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        peer = self.location_of_peer(cycle)
        if peer is None:
            return column_of([0.0] * len(candidates), candidates.arrays)
        return self.judged(candidates, peer, lambda level: 0.0 if level is None else WORTH[level])

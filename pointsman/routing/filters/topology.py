"""The filter for nearness to the endpoint of another stage."""

from collections.abc import Callable
from typing import Annotated, Any

from pointsman.parameters import PluginRef
from pointsman.routing.plugins import NEAR, Endpoints, Locator, Rejections, RequestCycle
from pointsman.routing.topology import LEVELS, Level, Location
from pointsman.selection import Column, PerMembers, Positions, Rejected
from pointsman.selection.arrays import np
from pointsman.selection.columns import column_of, take, where_zero

TopologyProducer = Annotated[Locator | None, PluginRef("locator", default="topology-extractor")]


class Peer:
    """The common part of the filter and the scorer: where the endpoint of another stage is, and how near candidates
    are.

    That endpoint is the cycle's NEAR. If its location is unknown, the header `peer_topology_header` gives a location,
    in the form host=a,rack=b,zone=c,region=d. Set this parameter only if clients cannot choose the header.
    """

    def __init__(self, topology_producer_name: TopologyProducer = None, peer_topology_header: str = "") -> None:
        self._locator = topology_producer_name
        self._header = peer_topology_header.lower()
        self._members = PerMembers(self._located)

    def location_of_peer(self, cycle: RequestCycle) -> Location | None:
        """The location of the peer; None if there is no peer, or if the location is unknown."""
        near = cycle.get(NEAR)
        where = self._locator.location(near.instance) if near is not None and self._locator is not None else None
        if (where is None or not any(where)) and self._header:
            where = Location.read(cycle.request.headers.get(self._header, ""))
        return where if where is not None and any(where) else None

    def judged(self, candidates: Endpoints, peer: Location, judge: Callable[[int | None], float]) -> Column:
        """For each candidate, what `judge` returns for the nearest level that it shares with the peer. Called once per
        distinct location."""
        locations, which = self._members.of(candidates)
        verdicts = column_of([judge(peer.common(location)) for location in locations], candidates.arrays)
        return candidates.cut(take(verdicts, which))

    def _located(self, members: Endpoints) -> tuple[list[Location], Positions]:
        """The distinct locations, and the index of each member's location."""
        locator = self._locator
        found = [Location() if locator is None else locator.location(endpoint.instance) for endpoint in members]
        distinct = list(dict.fromkeys(found))
        index = {location: number for number, location in enumerate(distinct)}
        which = [index[location] for location in found]
        return distinct, np.array(which, dtype=np.intp) if members.arrays else which


class TopologyAffinityFilter(Peer):
    """Demands an endpoint that shares the level `min_affinity`, or a nearer one, with the endpoint of another stage.

    All endpoints pass if there is no such endpoint, if its location is unknown, or if no candidate is near enough.
    """

    def __init__(
        self,
        min_affinity: Level = "host",
        topology_producer_name: TopologyProducer = None,
        peer_topology_header: str = "",
    ) -> None:
        super().__init__(topology_producer_name, peer_topology_header)
        if min_affinity not in LEVELS:
            raise ValueError(f'minAffinity is "{min_affinity}"; it must be one of {", ".join(LEVELS)}')
        self._level = min_affinity
        self._farthest = LEVELS.index(min_affinity)

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        peer = self.location_of_peer(cycle)
        if peer is None:
            return ()
        near = self.judged(candidates, peer, lambda level: float(level is not None and level <= self._farthest))
        far = where_zero(near)
        if not len(far) or len(far) == len(candidates):
            return ()
        return Rejected(candidates, far, "far-from-peer", level=self._level, peer=dict(_known(peer)))


def _known(location: Location) -> list[tuple[str, Any]]:
    return [(level, value) for level, value in location._asdict().items() if value]

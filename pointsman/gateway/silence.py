"""Silent instances: notes which instances send bytes, probes quiet instances, and moves requests away from silent ones.

Enters: the bytes and requests on all connections to instances. Leaves: events for the dispatchers. The one rule:
`Silences` decides; this module only provides the clock and the probes.
"""

import time
from functools import partial

from pointsman.gateway.upstream import Upstream
from pointsman.http.client import Exchange, HttpClient, NoResponse, Reply
from pointsman.reasons import Reason
from pointsman.routing.closing import ANSWER_S, IDLE_LOOK_S, LOOK_S, Silences
from pointsman.routing.endpoints import ACCEPTS, IN_FLIGHT_REQUESTS, Endpoint
from pointsman.routing.events import HeardAgain, Silenced
from pointsman.runtimes.probes import authorization
from pointsman.runtimes.traffic import Lane, Traffic

PATH = "/v1/models"
"""The path of probes: engines answer it without running their model. Any answer counts, even a 404."""
GIVEN_UP_S = 2 * ANSWER_S
"""After this time, the watch gives a probe up and sends another one, because the connection may be dead."""


class SilenceWatch:
    """Finds the silent instances of all lanes of a gateway."""

    def __init__(self, traffic: Traffic, upstream: Upstream) -> None:
        self._traffic = traffic
        self._upstream = upstream
        self._of: dict[str, Silences] = {}
        """Silences by deployment."""
        self._asked: dict[str, tuple[HttpClient, Exchange]] = {}
        """Probes in progress, by instance."""
        self._is_idle = True
        """Whether the last look found no instance with requests, no bytes and no silent instance."""

    def interval_s(self) -> float:
        """The time to the next look."""
        return IDLE_LOOK_S if self._is_idle else LOOK_S

    def look(self) -> None:
        pools = self._upstream.pools
        heard = {name for name, pool in pools.items() if pool.is_heard}
        for name in heard:
            pools[name].is_heard = False
        self._is_idle = not heard
        lanes = {lane.name: lane for lane in self._traffic.all_lanes()}
        for gone in self._of.keys() - lanes.keys():
            del self._of[gone]
        for name, lane in lanes.items():
            silences = self._of.get(name)
            if silences is None:
                silences = self._of[name] = Silences()
            if silences.is_active or lane.dispatcher.running or heard:
                self._is_idle = False
                self._look(lane, silences, heard)

    def _look(self, lane: Lane, silences: Silences, heard: set[str]) -> None:
        fleet, now = lane.dispatcher.fleet, time.monotonic()
        in_flight, accepts = fleet.load.columns[IN_FLIGHT_REQUESTS], fleet.load.columns[ACCEPTS]
        members = {str(endpoint): endpoint for endpoint in fleet.roster}
        busy = {name for name, one in members.items() if in_flight[one.row] > one.theirs[0]}
        takes = [name for name, one in members.items() if accepts[one.row]]
        found = silences.look(now, members, busy, heard, takes)
        for name in found.heard:
            lane.tell(HeardAgain(name))
        for name, why in found.silent:
            self._move(lane, name, why)
        for name in found.asked:
            self._ask(silences, name, members[name])

    def _move(self, lane: Lane, instance_id: str, why: Reason) -> None:
        """Close an instance. Give up the tries of those requests that the dispatcher has taken from it."""
        in_flight = self._upstream.in_flight.values()
        movable = [one for one in in_flight if one.instance_id == instance_id and one.is_movable]
        lane.tell(Silenced(instance_id, why, tuple(one.request.request_id for one in movable)))
        for one in movable:
            if one.instance_id == instance_id and one.request.request_id not in lane.dispatcher.ledger:
                one.let_go()

    def _ask(self, silences: Silences, instance_id: str, endpoint: Endpoint) -> None:
        """Probe an instance, over a connection of its own."""
        client = HttpClient(endpoint.instance)
        done = partial(self._replied, silences, instance_id)
        try:
            lines = authorization(endpoint.instance)
            exchange = client.exchange("GET", PATH, b"", GIVEN_UP_S, done, lines)
        except NoResponse:  # the engine's key cannot be read; the plane's probes report that
            silences.unanswered(instance_id, time.monotonic(), unmade=True)
        else:
            self._asked[instance_id] = client, exchange

    def _replied(self, silences: Silences, instance_id: str, reply: Reply) -> None:
        client, _ = self._asked.pop(instance_id)
        client.close()
        now = time.monotonic()
        if isinstance(reply, NoResponse) and not reply.began:
            silences.unanswered(instance_id, now, unmade=bool(reply.local))
        else:
            silences.answered(instance_id, now)

    def close(self) -> None:
        for client, exchange in self._asked.values():
            exchange.cancel()
            client.close()
        self._asked.clear()

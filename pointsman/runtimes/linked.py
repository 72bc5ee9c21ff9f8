"""The gateway's side of its link to a plane in another process, and the messages between dispatchers on both sides.

Enters: messages of the plane. Leaves: lanes that follow the plane, and reports. The one rule: a gateway serves with the
last known state. It keeps everything when its plane is gone, and the next plane continues from there.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from typing import Any

from pointsman.control.status import Unavailable
from pointsman.engines import Samples
from pointsman.errors import UnknownName
from pointsman.reasons import Reason
from pointsman.routing.endpoints import IN_FLIGHT_REQUESTS, LATENCY_MS, THROUGHPUT
from pointsman.routing.peers import News, Peers
from pointsman.routing.records import Record
from pointsman.runtimes.interface import Clock
from pointsman.runtimes.link import (
    AwaitIdle,
    BecameIdle,
    EngineMetrics,
    GatewayMessage,
    InstanceGone,
    InstanceLoad,
    InstanceReady,
    InstanceWanted,
    KnownInstances,
    LaneLoad,
    PeerEnded,
    PeerNews,
    PlaneMessage,
    RequestsFailing,
    RestInstance,
    Stirred,
    StoodOut,
    UnavailabilityNotice,
    portable,
)
from pointsman.runtimes.serving import Ending, TrafficLoad
from pointsman.runtimes.traffic import Lane, Traffic, refuse_stranded


class LaneNews:
    """The load and the learned facts that the lanes of one process exchange with lanes of other processes."""

    def __init__(self, traffic: Traffic, clock: Clock) -> None:
        self._traffic = traffic
        self._clock = clock
        self._peers: dict[str, tuple[Lane, Peers]] = {}
        """Lanes and their peers, by deployment."""

    def news(self) -> dict[str, News]:
        """What has changed since the last call, by deployment."""
        now = self._clock.now()
        told = {name: peers.news(now) for name, peers in self._each()}
        return {name: news for name, news in told.items() if news}

    def heard(self, peer: str, news: Mapping[str, News]) -> None:
        for name, peers in self._each():
            peers.heard(peer, news.get(name), self._clock.now())

    def gone(self, peer: str) -> None:
        for _, peers in self._each():
            peers.gone(peer)

    def expire(self) -> None:
        for _, peers in self._each():
            peers.expire(self._clock.now())

    def begin_again(self) -> None:
        """Start over with peers that have no earlier messages."""
        for _, peers in self._each():
            peers.begin_again()

    def _each(self) -> list[tuple[str, Peers]]:
        lanes = {lane.name: lane for lane in self._traffic.all_lanes()}
        for name, lane in lanes.items():
            if name not in self._peers or self._peers[name][0] is not lane:
                self._peers[name] = lane, Peers(lane.dispatcher, lane.tell)
        self._peers = {name: known for name, known in self._peers.items() if name in lanes}
        return [(name, peers) for name, (_, peers) in self._peers.items()]


NOT_HEARD = Unavailable(Reason("not-heard"))


class LinkedTraffic:
    """The gateway's side: lanes that follow a plane in another process."""

    def __init__(self, traffic: Traffic, clock: Clock, tell: Callable[[GatewayMessage], None]) -> None:
        """`tell` sends a message to the plane at once. Without a plane, it does nothing."""
        self.traffic = traffic
        self.peers = LaneNews(traffic, clock)
        self._load = TrafficLoad(traffic)
        self._clock = clock
        self._tell = tell
        self._notices: dict[str, Unavailable] = {}
        self._unconfirmed: dict[str, str] = {}
        """Instances of an earlier plane that this one has not mentioned yet, and their deployments."""
        self._told: dict[str, LaneLoad] = {}
        self._endings: dict[str, list[Ending]] = {}
        hooks = traffic.hooks
        hooks.failing = lambda name, why: tell(RequestsFailing(name, portable(why)))
        hooks.standing_out = lambda found: tell(StoodOut(found))
        hooks.stirred = lambda name: tell(Stirred(name))
        hooks.wanted = lambda name: tell(InstanceWanted(name))
        hooks.unavailability = lambda name, _: self._notices.get(name, NOT_HEARD)

    def connected(self) -> None:
        """Handle the connection of a plane, which may be a new plane."""
        for lane in self.traffic.all_lanes():
            self._unconfirmed |= {str(endpoint): lane.name for endpoint in lane.dispatcher.fleet.roster}
        self._told.clear()
        self.peers.begin_again()

    def observe(self) -> None:
        """For reports, keep the requests that end in open, scaled lanes."""
        for lane in self.traffic.lanes.values():
            lane.dispatcher.listen(None if lane.plan.scaling is None else partial(self._ended, lane.name))

    def _ended(self, deployment: str, record: Record) -> None:
        self._endings.setdefault(deployment, []).append(Ending.of(record))

    def report(self) -> tuple[dict[str, LaneLoad], dict[str, list[Ending]], dict[str, News]]:
        """Changes since the last call: load, requests that ended, and messages for peers."""
        self.peers.expire()
        current = {lane.name: _lane_load(lane) for lane in self.traffic.all_lanes()}
        changed = {name: load for name, load in current.items() if self._told.get(name) != load}
        changed |= {name: LaneLoad() for name in self._told if name not in current}
        self._told = current
        endings, self._endings = self._endings, {}
        return changed, endings, self.peers.news()

    def handle(self, message: PlaneMessage) -> None:
        """Carry out a message about instances, or about other gateways."""
        match message:
            case InstanceReady():
                self._in_service(message)
            case InstanceGone():
                self._unconfirmed.pop(message.instance_id, None)
                self._withdraw(message.deployment, message.instance_id, message.why)
            case KnownInstances():
                for name in [one for one in self._unconfirmed if one not in message.instance_ids]:
                    self._withdraw(self._unconfirmed.pop(name), name, Reason("instance-gone"))
            case AwaitIdle():
                self._await_idle(message)
            case EngineMetrics():
                source = None if message.text is None else Samples(message.text)
                if self._knows(message.deployment):
                    self.traffic.measured(message.deployment, message.instance_id, message.metrics, source)
            case RestInstance():
                self._rest(message)
            case UnavailabilityNotice():
                self._absent(message)
            case PeerNews():
                self.peers.heard(message.peer, message.news)
            case PeerEnded():
                self.peers.gone(message.peer)

    def _in_service(self, message: InstanceReady) -> None:
        instance, deployment = message.instance, message.deployment
        self._unconfirmed.pop(instance.instance_id, None)
        if not self._knows(deployment):
            return  # the documents could not be loaded here, which was reported
        lane = next(one for one in self.traffic.all_lanes() if one.name == deployment)
        if instance.instance_id in lane.dispatcher.fleet:
            self.traffic.update(deployment, instance)
        else:
            self.traffic.admit(deployment, instance)

    def _knows(self, deployment: str) -> bool:
        return any(lane.name == deployment for lane in self.traffic.all_lanes())

    def _withdraw(self, deployment: str, instance_id: str, why: Reason) -> None:
        if self._knows(deployment):
            self.traffic.withdraw(deployment, instance_id, why)

    def _await_idle(self, message: AwaitIdle) -> None:
        idle = BecameIdle(message.instance_id)
        try:
            self.traffic.when_idle(message.deployment, message.instance_id, lambda: self._tell(idle))
        except UnknownName:
            self._tell(idle)

    def _rest(self, message: RestInstance) -> None:
        until = None if message.for_s is None else self._clock.now() + message.for_s
        self._load.rest(message.deployment, message.instance_id, until)
        active = self._load.activity(message.deployment, message.instance_id)
        if active is not None and active.in_flight:
            self._tell(Stirred(message.instance_id))  # the instance was sent a request in the meantime

    def _absent(self, message: UnavailabilityNotice) -> None:
        lane = self.traffic.lanes.get(message.deployment)
        if message.why is None:
            self._notices.pop(message.deployment, None)
        else:
            self._notices[message.deployment] = message.why
        if lane is not None:
            lane.start_up_s = message.start_up_s
            refuse_stranded(lane)


def _lane_load(lane: Lane) -> LaneLoad:
    dispatcher, fleet = lane.dispatcher, lane.dispatcher.fleet
    columns, instances = fleet.load.columns, {}
    for endpoint in fleet.roster:
        name = str(endpoint)
        instances[name] = InstanceLoad(
            endpoint.requests,
            int(columns[IN_FLIGHT_REQUESTS][endpoint.row] - endpoint.theirs[0]),
            _known(endpoint.worked_at),
            _known(columns[LATENCY_MS][endpoint.row]),
            _known(columns[THROUGHPUT][endpoint.row]),
            fleet.pauses.get(name),
            endpoint.closed if name in fleet.silent else None,
        )
    waiting = len(dispatcher) - dispatcher.running
    return LaneLoad(dispatcher.running, waiting, dispatcher.counters.arrived, instances)


def _known(value: Any) -> float | None:
    return float(value) if isfinite(value) else None

"""The plane's side of its links to gateways, whose traffic the plane handles as one.

Enters: what the plane does to instances, and reports of gateways. Leaves: messages to gateways, and the sum of
their reports. The one rule: an instance is idle only after every live gateway has confirmed that. A gateway that has
not answered may still have requests on the instance.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pointsman.config.plan import DeploymentPlan
from pointsman.control.events import ControllerEvent
from pointsman.engines import Samples
from pointsman.reasons import Reason
from pointsman.routing.endpoints import Metrics
from pointsman.runtimes.interface import Activity, Clock
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
    LinkReport,
    PeerEnded,
    PeerNews,
    PlaneMessage,
    RequestsFailing,
    RestInstance,
    Stirred,
    StoodOut,
    UnavailabilityNotice,
    portable,
    portable_instance,
    portable_unavailability,
)
from pointsman.runtimes.linked import LaneNews
from pointsman.runtimes.serving import Ending, LocalTraffic, RequestCounts
from pointsman.runtimes.traffic import takes_requests
from pointsman.types import ExecutionInstance

PREFIX = "@gateway-"
"""Prefix of the names of gateway processes, which no instance has."""
NO_LOAD = InstanceLoad(0, 0, None)


class IdleCall(NamedTuple):
    """A call that is due when an instance is idle at all gateways."""

    deployment: str
    awaited: set[str]
    """Gateways that have not confirmed yet that the instance is idle; the empty name is this process."""
    call: Callable[[], None]


class LinkedGateway:
    """The plane's state of a gateway in another process."""

    def __init__(self, name: str, worker: str = "") -> None:
        """`worker` is where the gateway runs; if empty, it runs on the machine of the plane."""
        self.name = name
        self.worker = worker
        self.process = ""
        """The runtime's name for the process of the gateway; empty while that does not run."""
        self.send: Callable[[PlaneMessage], None] | None = None
        """None while the gateway is not connected."""
        self.url = ""
        """Where the gateway listens; empty unless it listens at the address of the last documents."""
        self.calls = ""
        """The address at which the gateway takes calls from replicas; empty if it takes none."""
        self.restarts = 0
        self.lanes: dict[str, LaneLoad] = {}
        self.ahead_s = 0.0
        """How far the plane's clock is ahead of the gateway's clock."""
        self.last = LinkReport(0.0, {}, {}, {}, {})
        self.problems: list[Reason] = []
        self.problem = ""
        """Why the gateway does not serve as the documents demand."""
        self.unstarted = ""
        """Why the last attempt to start the gateway failed; empty if that attempt succeeded."""
        self.summaries: dict[str, tuple[int, int, float, int]] = {}

    def on(self, deployment: str, instance_id: str) -> InstanceLoad:
        load = self.lanes.get(deployment)
        return NO_LOAD if load is None else load.instances.get(instance_id, NO_LOAD)

    def unavailability(self) -> Reason:
        """Why the gateway is not connected."""
        name = self.name.removeprefix("@")
        if self.unstarted:
            return Reason("gateway-not-started", {"gateway": name, "why": self.unstarted})
        return Reason("gateway-lost", {"gateway": name, "restarts": self.restarts})

    def status(self) -> dict[str, Any]:
        return {
            "name": self.name.removeprefix("@"),
            "worker": self.worker,
            "pid": int(self.process) if self.process.isdecimal() else None,
            "connected": self.send is not None,
            "url": self.url,
            "connections": self.last.connections,
            "in_flight": self.last.in_flight,
            "requests": self.last.requests,
            "restarts": self.restarts,
        }


class GatewayGroup:
    """The gateways of a plane in other processes, and the counts of those that have ended."""

    def __init__(self, clock: Clock) -> None:
        self.members: dict[str, LinkedGateway] = {}
        self.arrived: dict[str, int] = {}
        """Requests that arrived at gateways that have ended, by deployment."""
        self._clock = clock

    def send(self, message: PlaneMessage, but: str = "") -> None:
        """Send a message to all connected gateways except `but`."""
        for one in self.members.values():
            if one.send is not None and one.name != but:
                one.send(message)

    def take_in(self, one: LinkedGateway, report: LinkReport) -> None:
        one.ahead_s = self._clock.now() - report.now
        one.lanes.update(report.lanes)
        one.last = report
        one.problems = one.problems if report.problems is None else report.problems
        one.summaries = one.summaries if report.summaries is None else report.summaries

    def ended(self, one: LinkedGateway) -> None:
        for name, load in one.lanes.items():
            self.arrived[name] = self.arrived.get(name, 0) + load.arrived
        one.lanes.clear()
        one.send, one.url, one.calls, one.process = None, "", "", ""

    def counts(self, deployment: str) -> RequestCounts:
        loads = [one.lanes[deployment] for one in self.members.values() if deployment in one.lanes]
        return RequestCounts(
            sum(load.running for load in loads),
            sum(load.waiting for load in loads),
            sum(load.arrived for load in loads) + self.arrived.get(deployment, 0),
        )

    def on(self, deployment: str, instance_id: str) -> Activity:
        """The requests that gateways have sent to an instance."""
        found = [(one, one.on(deployment, instance_id)) for one in self.members.values()]
        worked = [load.worked_at + one.ahead_s for one, load in found if load.worked_at is not None]
        return Activity(
            sum(load.requests for _, load in found),
            sum(load.in_flight for _, load in found),
            max(worked, default=float("-inf")),
        )

    def problems(self) -> list[Reason]:
        told = [why for one in self.members.values() for why in one.problems]
        lost = [one.unavailability() for one in self.members.values() if one.send is None]
        wrong = [
            Reason("gateway-not-as-configured", {"gateway": one.name.removeprefix("@"), "error": one.problem})
            for one in self.members.values()
            if one.problem
        ]
        return [*(why for index, why in enumerate(told) if why not in told[:index]), *lost, *wrong]


class SharedTraffic:
    """`PlaneTraffic`: the lanes of this process, and those of gateways in other processes."""

    def __init__(self, local: LocalTraffic, clock: Clock) -> None:
        self.hooks = local.hooks
        self.group = GatewayGroup(clock)
        self.peers = LaneNews(local.lanes, clock)
        self.instances = SharedInstances(local, self.group, clock)
        self.load = SharedLoad(local, self.group, clock)
        self.demand = SharedDemand(local, self.group)
        self.configured: Callable[[], None] | None = None
        """Called when a plan has taken effect, before any of its instances is in service."""
        self.process_told: Callable[[ControllerEvent], None] | None = None
        """Called with events of gateway processes."""
        self._local = local
        self._clock = clock
        self._known: list[str] | None = None
        """None before the first comparison: an earlier plane may have had more instances in service than this one."""

    def configure(self, plans: Sequence[DeploymentPlan]) -> None:
        self._local.configure(plans)
        if self.configured is not None:
            self.configured()

    def told(self, event: ControllerEvent) -> bool:
        name = getattr(event, "instance_id", "")
        if not is_gateway(name):
            return False
        if self.process_told is not None:
            self.process_told(event)
        return True

    def look(self, instance_ids: Iterable[str]) -> None:
        self._local.look(())
        known = sorted(instance_ids)
        if known != self._known:
            self._known = known
            self.group.send(KnownInstances(known))
        self.instances.tell_unavailability()

    def status(self, deployment: str) -> dict[str, Any] | None:
        own, counts = self._local.status(deployment), self.group.counts(deployment)
        if own is None or not self.group.members:
            return own
        now, instances = self._clock.now(), dict(own["instances"])
        for name, load in instances.items():
            each = [(one, one.on(deployment, name)) for one in self.group.members.values()]
            pauses = [at + one.ahead_s - now for one, seen in each if (at := seen.paused_until) is not None]
            silent = [seen.silence for _, seen in each if seen.silence is not None]
            learned = {
                "latency_ms": _mean([seen.latency_ms for _, seen in each]),
                "tokens_per_second": _mean([seen.throughput for _, seen in each]),
                "paused_s": round(max(pauses), 3) if pauses and max(pauses) > 0 else None,
                "silence": silent[0].as_dict() if silent else None,
            }
            instances[name] = {
                **load,
                **{key: value for key, value in learned.items() if value is not None},
                "in_flight": load["in_flight"] + sum(seen.in_flight for _, seen in each),
            }
        more = {"waiting": own["waiting"] + counts.waiting, "running": own["running"] + counts.running}
        return {**own, **more, "instances": instances}

    def warmth(self) -> dict[str, float]:
        return self._local.warmth()

    def problems(self) -> list[Reason]:
        return [*self._local.problems(), *self.group.problems()]

    # Gateways

    def connected(self, one: LinkedGateway, send: Callable[[PlaneMessage], None]) -> None:
        """Send the whole state to a gateway that has connected and loaded the documents in force."""
        one.send = send
        one.lanes.clear()
        for deployment, instance in self.instances.in_service.values():
            send(InstanceReady(deployment, instance))
        if self._known is not None:
            send(KnownInstances(self._known))
        self.instances.repeat_to(one)
        self.peers.begin_again()

    def ended(self, one: LinkedGateway) -> None:
        """Remove a gateway whose process has ended, and its load."""
        self.group.ended(one)
        self.peers.gone(one.name)
        self.group.send(PeerEnded(one.name))
        self.instances.idle_at(one.name)

    def beat(self) -> None:
        """Called every `SHARE_S`: send this process's own load to gateways."""
        self.peers.expire()
        if self.group.members:
            self.group.send(PeerNews("", self.peers.news()))

    def handle(self, one: LinkedGateway, message: GatewayMessage) -> None:
        """Take in a gateway's report about requests and instances."""
        hooks = self.hooks
        match message:
            case LinkReport():
                self.group.take_in(one, message)
                self.demand.ended(message.endings)
                self.peers.heard(one.name, message.news)
                self.group.send(PeerNews(one.name, message.news), but=one.name)
            case RequestsFailing() if hooks.failing is not None:
                hooks.failing(message.instance_id, message.why)
            case StoodOut() if hooks.standing_out is not None:
                hooks.standing_out(message.outlier)
            case Stirred() if hooks.stirred is not None:
                hooks.stirred(message.instance_id)
            case InstanceWanted():
                if hooks.wanted is not None:
                    hooks.wanted(message.deployment)
                self.instances.tell_unavailability()
            case BecameIdle():
                self.instances.idle_at(one.name, message.instance_id)


class SharedInstances:
    """`ServiceTable`: in service at every gateway, idle once all confirm it."""

    def __init__(self, local: LocalTraffic, group: GatewayGroup, clock: Clock) -> None:
        self.in_service: dict[str, tuple[str, ExecutionInstance]] = {}
        self._local = local
        self._group = group
        self._clock = clock
        self._idle_calls: dict[str, IdleCall] = {}
        self._notices: dict[str, UnavailabilityNotice] = {}
        """Notices as last sent."""

    def admit(self, deployment: str, instance: ExecutionInstance) -> None:
        self._local.instances.admit(deployment, instance)
        self._tell(deployment, instance)

    def update(self, deployment: str, instance: ExecutionInstance) -> None:
        self._local.instances.update(deployment, instance)
        if instance.instance_id in self.in_service:
            self._tell(deployment, instance)

    def _tell(self, deployment: str, instance: ExecutionInstance) -> None:
        told = portable_instance(instance)
        self.in_service[instance.instance_id] = deployment, told
        self._group.send(InstanceReady(deployment, told))
        self._clock.call_soon(self.tell_unavailability)

    def withdraw(self, deployment: str, instance_id: str, why: Reason) -> None:
        self.in_service.pop(instance_id, None)
        self._local.instances.withdraw(deployment, instance_id, why)
        self._group.send(InstanceGone(deployment, instance_id, portable(why)))
        self._clock.call_soon(self.tell_unavailability)

    def when_idle(self, deployment: str, instance_id: str, call: Callable[[], None]) -> None:
        # Gateways that are not connected count too: they may have requests on the instance, and they receive the
        # inquiry when they connect.
        members = [one for one in self._group.members.values() if one.process]
        self._idle_calls[instance_id] = IdleCall(deployment, {"", *(one.name for one in members)}, call)
        for one in members:
            if one.send is not None:
                one.send(AwaitIdle(deployment, instance_id))
        self._local.instances.when_idle(deployment, instance_id, partial(self.idle_at, "", instance_id))

    def idle_at(self, gateway: str, instance_id: str | None = None) -> None:
        """Note that a gateway has no request on an instance, or on any instance (None) because it has ended."""
        for name in [*self._idle_calls] if instance_id is None else [instance_id]:
            waiting = self._idle_calls.get(name)
            if waiting is not None:
                waiting.awaited.discard(gateway)
                if not waiting.awaited:
                    self._idle_calls.pop(name).call()

    def repeat_to(self, one: LinkedGateway) -> None:
        """Tell a gateway that has connected again what it must confirm, and why instances are missing."""
        for name, waiting in self._idle_calls.items():
            if one.send is not None and one.name in waiting.awaited:
                one.send(AwaitIdle(waiting.deployment, name))
        for notice in self._notices.values():
            if one.send is not None:
                one.send(notice)

    def tell_unavailability(self) -> None:
        """Send gateways why no instance takes requests, if that has changed."""
        why = self._local.hooks.unavailability
        if not self._group.members or why is None:
            return
        for name, lane in self._local.lanes.lanes.items():
            absent = None if takes_requests(lane.dispatcher) else why(name, lane.start_up_s)
            told = UnavailabilityNotice(
                name, lane.start_up_s, None if absent is None else portable_unavailability(absent)
            )
            if self._notices.get(name, UnavailabilityNotice(name, lane.start_up_s, None)) != told:
                self._notices[name] = told
                self._group.send(told)


class SharedLoad:
    """`LoadTable`: metrics go to every gateway, and the requests of all gateways count."""

    def __init__(self, local: LocalTraffic, group: GatewayGroup, clock: Clock) -> None:
        self._local = local
        self._group = group
        self._clock = clock

    def measured(self, deployment: str, instance_id: str, metrics: Metrics, source: Samples | None) -> None:
        self._local.load.measured(deployment, instance_id, metrics, source)
        lane = self._local.lanes.lanes.get(deployment)
        if self._group.members and lane is not None:
            text = source.text if source is not None and lane.dispatcher.extractors else None
            self._group.send(EngineMetrics(deployment, instance_id, metrics, text))

    def surveyed(self, deployment: str, readings: Sequence[tuple[str, Metrics]]) -> None:
        for instance_id, metrics in readings:
            self.measured(deployment, instance_id, metrics, None)

    def activity(self, deployment: str, instance_id: str) -> Activity | None:
        own = self._local.load.activity(deployment, instance_id)
        if own is None or not self._group.members:
            return own
        others = self._group.on(deployment, instance_id)
        in_flight, worked_at = own.in_flight + others.in_flight, max(own.worked_at, others.worked_at)
        return Activity(own.requests + others.requests, in_flight, worked_at)

    def rest(self, deployment: str, instance_id: str, until: float | None = None) -> None:
        self._local.load.rest(deployment, instance_id, until)
        for_s = None if until is None else until - self._clock.now()
        self._group.send(RestInstance(deployment, instance_id, for_s))


class SharedDemand:
    """`Demand`: the requests of all gateways."""

    def __init__(self, local: LocalTraffic, group: GatewayGroup) -> None:
        self._local = local
        self._group = group
        self._observers: dict[str, Callable[[Ending], None]] = {}
        self.expect = local.expect

    def counts(self, deployment: str) -> RequestCounts:
        own, others = self._local.counts(deployment), self._group.counts(deployment)
        return RequestCounts(
            own.running + others.running, own.waiting + others.waiting, own.arrived + others.arrived, own.kv_usage
        )

    def observe(self, deployment: str, ended: Callable[[Ending], None]) -> None:
        self._local.observe(deployment, ended)
        self._observers[deployment] = ended

    def ended(self, endings: Mapping[str, Iterable[Ending]]) -> None:
        for deployment, each in endings.items():
            observer = self._observers.get(deployment)
            for ending in each if observer is not None else ():
                observer(ending)  # type: ignore[misc]

    def used(self) -> set[str]:
        loads = [load for one in self._group.members.values() for load in one.lanes.items()]
        return self._local.used() | {name for name, load in loads if load.running + load.waiting}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def is_gateway(instance_id: str) -> bool:
    """Whether a process is a gateway. A gateway owns nothing, and may outlive the lease of its worker."""
    return instance_id.startswith(PREFIX)

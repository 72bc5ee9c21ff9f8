"""What a plane needs from its traffic. Dispatchers may be in this process only, or in other gateways too.

Enters: plans, instances and metrics. Leaves: what requests show about instances, and numbers of requests. The one rule:
an instance is idle only if no request from any gateway is in flight on it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from pointsman.config.plan import DeploymentPlan
from pointsman.control.events import ControllerEvent
from pointsman.errors import UnknownName
from pointsman.reasons import Reason
from pointsman.routing.endpoints import IN_FLIGHT_REQUESTS
from pointsman.routing.events import Rested
from pointsman.routing.records import Record
from pointsman.runtimes.interface import Activity, LoadTable
from pointsman.runtimes.traffic import Lane, Traffic, TrafficHooks, refuse_stranded, scheduling_problems, warmth
from pointsman.types import ExecutionInstance


class ServiceTable(Protocol):
    """Where requests are sent: lanes of traffic, or only a list of instances in service."""

    def admit(self, deployment: str, instance: ExecutionInstance) -> None: ...

    def update(self, deployment: str, instance: ExecutionInstance) -> None: ...

    def withdraw(self, deployment: str, instance_id: str, why: Reason) -> None: ...

    def when_idle(self, deployment: str, instance_id: str, call: Callable[[], None]) -> None:
        """Make a call once, as soon as no request is in flight on an instance. It is never made before this returns."""
        ...


class RequestCounts(NamedTuple):
    """Numbers of requests of a deployment."""

    running: int = 0
    waiting: int = 0
    arrived: int = 0
    """Total number of requests that have arrived."""
    kv_usage: float | None = None
    """Mean share of the instances' KV caches that is in use; None if unknown."""


class Ending(NamedTuple):
    """A request that has ended, as scaling measures it. A value is None if unknown, or if the request was refused."""

    latency_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    met_slo: bool | None = None
    tokens: int = 0

    @classmethod
    def of(cls, record: Record) -> "Ending":
        """The measurements of an ended request. A refused request counts for deadlines only."""
        if record.ended_at is None or record.refusal is not None:
            return cls(met_slo=record.met_deadline)
        latency_s = record.ended_at - record.arrived_at
        first_s = None if record.first_token_at is None else record.first_token_at - record.arrived_at
        tokens = record.output_tokens or 0
        return cls(
            latency_s * 1000,
            None if first_s is None else first_s * 1000,
            (latency_s - first_s) * 1000 / (tokens - 1) if first_s is not None and tokens > 1 else None,
            record.met_deadline,
            record.input_tokens + tokens,
        )


class Demand(Protocol):
    """The requests of deployments, as scaling measures them."""

    def counts(self, deployment: str) -> RequestCounts: ...

    def observe(self, deployment: str, ended: Callable[[Ending], None]) -> None:
        """Call `ended` with each request of a deployment that ends from now on."""
        ...

    def expect(self, deployment: str, start_up_s: float | None) -> None:
        """Set how long an instance takes to start; None if unknown."""
        ...

    def used(self) -> set[str]:
        """The deployments that have requests, waiting or running."""
        ...


class PlaneTraffic(Protocol):
    """The traffic of a plane."""

    @property
    def hooks(self) -> TrafficHooks: ...

    @property
    def instances(self) -> ServiceTable: ...

    @property
    def load(self) -> LoadTable: ...

    @property
    def demand(self) -> Demand: ...

    def configure(self, plans: Sequence[DeploymentPlan]) -> None:
        """Open lanes of new deployments, reconfigure lanes whose plans differ, and close lanes of removed ones."""
        ...

    def told(self, event: ControllerEvent) -> bool:
        """Handle an event of a process. Returns True if the process is a gateway, and not an instance."""
        ...

    def look(self, instance_ids: Iterable[str]) -> None:
        """Refuse requests for which no instance is expected; called every second. `instance_ids` are all instances of
        the plane, ready or not."""
        ...

    def status(self, deployment: str) -> dict[str, Any] | None:
        """The requests of a deployment, as plain data; None if no instance of it is in service."""
        ...

    def warmth(self) -> dict[str, float]:
        """Blocks in the prefix cache of each instance, if a plugin tracks them."""
        ...

    def problems(self) -> list[Reason]:
        """Problems of policies and plugins."""
        ...


class TrafficLoad:
    """`LoadTable` of the interface: what dispatchers know about the load of instances."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.measured, self.surveyed = traffic.measured, traffic.surveyed

    def activity(self, deployment: str, instance_id: str) -> Activity | None:
        lane = self._lane_of(deployment, instance_id)
        if lane is None:
            return None
        fleet = lane.dispatcher.fleet
        endpoint = fleet[instance_id]
        on_it = int(fleet.load.columns[IN_FLIGHT_REQUESTS][endpoint.row] - endpoint.theirs[0])
        return Activity(endpoint.requests, on_it, endpoint.worked_at)

    def rest(self, deployment: str, instance_id: str, until: float | None = None) -> None:
        lane = self._lane_of(deployment, instance_id)
        if lane is not None:
            lane.tell(Rested(instance_id, until))

    def _lane_of(self, deployment: str, instance_id: str) -> Lane | None:
        """The lane of an instance; None if it is not in service."""
        try:
            lane = self._traffic._lane(deployment)
        except UnknownName:
            return None
        return lane if instance_id in lane.dispatcher.fleet else None


class LocalTraffic:
    """`PlaneTraffic` and `Demand` if all lanes are in this process."""

    def __init__(self, traffic: Traffic) -> None:
        self.lanes = traffic
        self.hooks = traffic.hooks
        self.instances = traffic
        self.load = TrafficLoad(traffic)
        self.demand = self
        self.configure, self.status = traffic.configure, traffic.status

    def told(self, event: ControllerEvent) -> bool:
        return False

    def look(self, instance_ids: Iterable[str]) -> None:
        for lane in list(self.lanes.lanes.values()):
            refuse_stranded(lane)

    def warmth(self) -> dict[str, float]:
        return warmth(self.lanes.lanes.values())

    def problems(self) -> list[Reason]:
        return scheduling_problems(self.lanes.lanes.values())

    def counts(self, deployment: str) -> RequestCounts:
        dispatcher = self.lanes.lanes[deployment].dispatcher
        usages = [each.metrics.kv_cache_usage for each in dispatcher.fleet.roster if each.metrics is not None]
        kv_usage = sum(usages) / len(usages) if usages else None
        waiting = len(dispatcher) - dispatcher.running
        return RequestCounts(dispatcher.running, waiting, dispatcher.counters.arrived, kv_usage)

    def observe(self, deployment: str, ended: Callable[[Ending], None]) -> None:
        self.lanes.lanes[deployment].dispatcher.listen(lambda record: ended(Ending.of(record)))

    def expect(self, deployment: str, start_up_s: float | None) -> None:
        self.lanes.lanes[deployment].start_up_s = start_up_s

    def used(self) -> set[str]:
        return {name for name, lane in self.lanes.lanes.items() if len(lane.dispatcher)}

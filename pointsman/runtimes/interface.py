"""What a runtime must do, and what a plane offers to a gateway and the command line.

    gateway, cli -> PlaneOperations: Plane -> ControlLoop (Controller) -> Instances -> Runtime: local, simulation, ...
                                                                      -> Traffic (Dispatchers) -> gateway

A runtime starts, signals and watches processes on workers, chooses ports there, hands over files and shared memory,
reads logs, and reports workers and their loss. No code above it assumes that a worker is this machine. Every method is
called on the thread of the plane's event loop. Methods that are not `async` return at once: their results are reported
later, as events of `pointsman.control.events`. That module also states the order of events that a runtime promises.
"""

from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from pointsman.config.changes import Changes
from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import ManifestText, Revision
from pointsman.control import Controller, InstanceStatus
from pointsman.control.desired import Address
from pointsman.control.events import Adopted, ControllerEvent
from pointsman.engines import Engine, LaunchSpec, ProbeRequest, ProcessEnd, Samples
from pointsman.errors import PointsmanError
from pointsman.placement.asks import Place
from pointsman.placement.fleet import Snapshot
from pointsman.reasons import Reason
from pointsman.replica.handles import Transport
from pointsman.routing.endpoints import Metrics
from pointsman.runtimes.event_log import THE_PLANE, Asker, EventLog
from pointsman.runtimes.stores import DocumentStore, StoredManifest, TargetStore, UsageStore
from pointsman.scaling.deployment import ScaledDeployment

# Time


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """The time of a runtime: the machine's, or virtual. A method that schedules a call returns before it is made."""

    def now(self) -> float:
        """Seconds since an arbitrary moment; never less than before."""
        ...

    def call_at(self, at: float, call: Callable[..., None], *args: Any) -> Timer:
        """Make a call once at a given time, or at once if that time has passed."""
        ...

    def call_soon(self, call: Callable[..., None], *args: Any) -> Timer:
        """Make a call once, as soon as the current event is over."""
        ...


class BackgroundTasks(Protocol):
    """Work that must live as long as the plane. Failed work is counted, shown in `status`, and started again.

    Names are few and stay the same: they label a metric.
    """

    def keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> Timer:
        """Run a coroutine until it is cancelled here. If it ends before that, start it again after a pause."""
        ...

    def complete(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> Timer:
        """Run a coroutine until it returns. If it raises or is cancelled elsewhere, start it again after a pause."""
        ...

    def every(self, name: str, interval_s: float, call: Callable[[], None]) -> Timer:
        """Make a call at intervals, even after it has raised."""
        ...

    def attempt(self, name: str, call: Callable[..., None], *args: Any, retry_s: float | None = None) -> None:
        """Make a call now. An exception is reported, and not raised."""
        ...

    def failed(self, name: str, error: BaseException, retry_s: float | None = None) -> None:
        """Report a failure. `retry_s`: seconds until the work is tried again; None if it continues by itself."""
        ...

    def problems(self) -> list[Reason]:
        """The work that failed lately, how often it failed, and when it is tried again."""
        ...

    def failures(self) -> Mapping[str, int]:
        """Number of failures of each task, by name."""
        ...


# Processes on workers


class CannotStart(PointsmanError):
    """An instance cannot be started, in this try or a later one."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class ProcessOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start for an instance."""

    instance_id: str
    deployment: str
    recipe: str
    """Kept with the process, so that a later plane knows what the process runs."""
    place: Place | None
    """None if the process may run anywhere."""
    worker: str = ""
    """The worker for a process that needs no place; if empty, the process may run on any worker."""
    folder: str
    """Working directory, if it exists on the worker."""
    launch: Callable[[str, int], LaunchSpec]
    """Command and environment for a host and port that the runtime chose. Raises `CannotStart` if no further try can
    succeed. A user's adapter may raise anything."""
    remedy: str = ""
    """What to do if the program is missing."""
    why_final: Callable[[ProcessEnd], Reason | None] = lambda _: None
    """Why no further start can succeed after this end of a process; None if a further start may succeed."""


Tell: TypeAlias = Callable[[ControllerEvent], None]


class Activity(NamedTuple):
    """Requests on an instance in service."""

    requests: int
    """Total number of requests sent to it."""
    in_flight: int
    worked_at: float
    """When the instance last answered a request; -inf if it never did."""


class LoadTable(Protocol):
    """What is known about the load of instances in service. Other instances are ignored."""

    def measured(self, deployment: str, instance_id: str, metrics: Metrics, source: Samples | None) -> None:
        """An engine reported its metrics, which were read from `source`."""
        ...

    def surveyed(self, deployment: str, readings: Sequence[tuple[str, Metrics]]) -> None:
        """Several engines of a deployment reported their metrics at the same moment."""
        ...

    def activity(self, deployment: str, instance_id: str) -> Activity | None:
        """None if the instance is not in service."""
        ...

    def rest(self, deployment: str, instance_id: str, until: float | None = None) -> None:
        """An instance is idle, and is observed less often until it is sent a request. `until` is when it is measured
        again; None if it is not measured."""
        ...


class Unsaved(NamedTuple):
    """Changes that a runtime could not store yet. They are stored as soon as possible."""

    changes: int
    failures: int
    """Number of failed attempts to store something since the start."""


class RuntimeParts(Protocol):
    """The parts of a runtime."""

    @property
    def clock(self) -> Clock: ...

    @property
    def tasks(self) -> BackgroundTasks: ...

    @property
    def admin(self) -> "AdminListener": ...

    @property
    def gpus(self) -> "GpuMeter": ...

    @property
    def documents(self) -> DocumentStore:
        """Available after `open`, like the next two properties."""
        ...

    @property
    def targets(self) -> TargetStore: ...

    @property
    def usage(self) -> UsageStore: ...

    @property
    def replicas(self) -> "ReplicaAccess":
        """Available after `adopt`, like the next property."""
        ...

    @property
    def probes(self) -> "Probes": ...


class Runtime(RuntimeParts, Protocol):
    """Processes on workers, and the state of one plane. A plane calls `open`, `adopt` and, even after failures,
    `close`."""

    async def open(self) -> None:
        """Take the state over. Raises `PointsmanError` if another plane uses it."""
        ...

    async def adopt(self, tell: Tell, load: LoadTable) -> Sequence[Adopted]:
        """Take over the processes that an earlier plane left running, and return them.

        From then on `tell` receives events of processes, workers and probes, and `load` receives metrics. Raises
        `PointsmanError` if processes cannot be started at all.
        """
        ...

    def launch(self, order: ProcessOrder) -> None:
        """Start a process at a free port of its worker. Reports `Launched`, or `LaunchFailed` with the reason."""
        ...

    def stop(self, instance_id: str, *, kill: bool = False) -> None:
        """Ask a process and its children to end, or kill them. `Exited` follows even if there is no such process."""
        ...

    def address(self, instance_id: str) -> Address | None:
        """The address at which gateways reach the process of an instance; None if the instance has no process."""
        ...

    async def logs(self, instance_id: str, lines: int) -> str | None:
        """The last lines that an instance wrote; None if no instance of that name was ever started."""
        ...

    def look_at_workers(self, plan: PointsmanPlan) -> None:
        """Measure again what workers have and what other programs use. May report `WorkerSeen` and `WorkerLost`.

        Called after each change of the plan, and every second while an instance has no place.
        """
        ...

    def problems(self) -> list[Reason]:
        """Present problems, and what to do about them, for `status`."""
        ...

    def unsaved(self) -> Unsaved: ...

    def facts(self) -> dict[str, Any]:
        """What `status` shows about the runtime itself, such as the worker of the plane."""
        ...

    async def close(self) -> None:
        """End every process that was started or adopted, and release the state. Nothing is reported after that."""
        ...


class AdminListener(Protocol):
    """Where replicas and the operator's commands reach the gateway. A client that can connect may do everything."""

    async def listen(self, connect: Callable[[], Any], connect_replica: Callable[[], Any]) -> None:
        """Accept connections. `connect` makes the protocol of each connection, and `connect_replica` makes the protocol
        of connections from replicas on other machines, which may do only what their secret allows."""
        ...

    def dial(self) -> Transport:
        """The protocol for a client of the listener."""
        ...

    def close(self) -> None: ...


class ReplicaAccess(Protocol):
    """The means by which replicas of pipelines and their plane reach each other."""

    @property
    def secret(self) -> str:
        """A secret that only the gateway and replicas have."""

    @property
    def memory(self) -> "SharedMemory": ...

    def introduce(self, launch: LaunchSpec, user_config: bytes) -> LaunchSpec:
        """A launch to which the user config (JSON) and everything that a replica must know about its plane is added."""

    def reach_at(self, gateways: Sequence[str]) -> None:
        """Give replicas the addresses (host:port) at which gateways in other processes take calls from replicas."""


class SharedMemory(Protocol):
    """Large values that replicas on one worker pass to each other by name."""

    def remove(self, names: Iterable[str]) -> None:
        """Free these values. Unknown names are ignored."""
        ...

    def remove_older_than(self, age_s: float) -> None:
        """Free values that are older. Their requests have ended, and the gateway was never told the names."""
        ...


class Probes(Protocol):
    """Probes of instances, over HTTP where instances are servers."""

    def probe(
        self, instance_id: str, address: Address, question: ProbeRequest, readiness: bool, limit_s: float
    ) -> None:
        """Probe now. The result is `Answered`, `Silent` or `ProbeNotMade`, unless a later probe replaces this one."""
        ...

    def follow(self, deployment: str, instance_id: str, address: Address, engine: Engine) -> None:
        """Read the metrics of an instance from now on. While it is idle, they are read less often."""
        ...

    def unfollow(self, instance_id: str) -> None: ...

    def stir(self, instance_id: str) -> None:
        """Read the metrics of an instance soon, because it rested and was sent a request."""
        ...

    def problems(self) -> list[Reason]:
        """Which metrics cannot be read, and why."""
        ...

    def close(self) -> None: ...


class GpuMeter(Protocol):
    """How busy the GPUs of instances are, for scaling policies."""

    async def read(self, deployments: Collection[str], instances: Sequence[InstanceStatus]) -> None:
        """Measure again if these deployments have GPUs and the last measurement is old. Takes at most 0.2 s."""
        ...

    def of(self, deployments: Collection[str], instances: Iterable[InstanceStatus]) -> float | None:
        """The mean share in use, 0 to 1; None if unknown."""
        ...

    def close(self) -> None: ...


# Operations of a plane for gateways and commands


class DocumentOperations(Protocol):
    """Documents in force. If a method raises `ConfigError`, that names all problems, and nothing has changed.

    `confirmation` comes from `plan` or `NotConfirmed`, and confirms a destructive change. A wrong confirmation raises
    `NotConfirmed`. With None, no confirmation is needed.
    """

    revision: Revision
    """The documents in force."""

    @property
    def plan_in_force(self) -> PointsmanPlan:
        """The plan of the manifest and of all applications."""
        ...

    def plan(self, document: ManifestText) -> Changes:
        """What applying a manifest, or deploying an application, would change."""
        ...

    async def apply(
        self, document: ManifestText, confirmation: str | None = None, asker: Asker = THE_PLANE, note: str = ""
    ) -> Changes:
        """Put a manifest or an application in force. `note` is the summary in the history."""
        ...

    async def deploy(
        self, document: ManifestText, confirmation: str | None = None, asker: Asker = THE_PLANE
    ) -> Changes:
        """Put an application in force in addition to the manifest. It replaces its previous version."""
        ...

    async def rollback(self, name: str, confirmation: str | None = None, asker: Asker = THE_PLANE) -> Changes:
        """Put the previous version of an application in force."""
        ...

    def history(self) -> list[StoredManifest]:
        """The stored manifests, newest first; the first one is in force."""
        ...

    async def restore(
        self, generation: int | None, confirmation: str | None = None, asker: Asker = THE_PLANE
    ) -> Changes:
        """Put an earlier manifest in force; None stands for the previous manifest."""
        ...

    async def delete(self, name: str, asker: Asker = THE_PLANE) -> Changes:
        """Remove an application with all its versions."""
        ...

    def application(self, name: str) -> str:
        """The document of an application in force. Raises `UnknownName`."""
        ...


class ScalingOperations(Protocol):
    """Replica counts by name: a deployment, or APP/NODE. The name of something not scaled raises `PointsmanError`."""

    def scale(self, name: str, replicas: int | None, for_s: float | None, by: str) -> None:
        """Hold a number of replicas, for a time or until further notice; with None, the policy decides again."""
        ...

    def status(self, name: str) -> dict[str, Any]:
        """How many replicas there are, and why: plain data."""
        ...

    def load_history(self, name: str) -> dict[str, Any]:
        """Past arrivals, to rehearse policies on: plain data."""
        ...

    def each(self) -> list[ScaledDeployment]: ...


class InstanceLogs(Protocol):
    async def logs(self, instance_id: str, lines: int) -> str:
        """The last lines that an instance wrote. Raises `UnknownName`."""
        ...


class InstanceControl(Protocol):
    def fleet(self) -> Snapshot:
        """The workers, and the claims of instances on them."""
        ...

    def drain(self, instance_id: str) -> None:
        """Take an instance out of service after another has taken its place. Raises `UnknownName`."""
        ...


class PlaneControl(InstanceControl, Protocol):
    @property
    def controller(self) -> Controller: ...


class Operations(Protocol):
    """Operations of a plane for operators."""

    @property
    def documents(self) -> DocumentOperations: ...

    @property
    def scaling(self) -> ScalingOperations: ...

    @property
    def instances(self) -> InstanceLogs: ...

    @property
    def control(self) -> InstanceControl: ...

    @property
    def events(self) -> EventLog: ...


class Beginning(Protocol):
    """The documents that a plane was started with."""

    def futile(self) -> list[Reason]:
        """Why no instance can ever start; empty if one can or did, or if other documents were applied since."""
        ...


class PlaneOperations(Operations, Protocol):
    """The operations that the gateway in front of a plane uses."""

    @property
    def runtime(self) -> Runtime: ...

    @property
    def control(self) -> PlaneControl: ...

    listeners: list[Callable[[], None]]
    """Called when the status may have changed."""
    reconfigured: list[Callable[[PointsmanPlan], None]]
    """Called with each plan that takes effect, before lanes are opened or changed for it."""

    @property
    def ready(self) -> bool:
        """Whether every deployment has an instance that takes requests, or is scaled to zero."""
        ...

    @property
    def beginning(self) -> Beginning: ...

    async def start(
        self, document: ManifestText | None = None, prepare: Callable[[PointsmanPlan], Awaitable[None]] | None = None
    ) -> None:
        """Run a document; None stands for the document last in force. If this raises `PointsmanError`, nothing runs.
        `prepare` is called before anything is started or changed, and may raise."""
        ...

    async def stop(self) -> None:
        """Drain and stop every instance, and close the runtime."""
        ...

    def status(self) -> dict[str, Any]:
        """What runs and how it is doing: plain data."""
        ...

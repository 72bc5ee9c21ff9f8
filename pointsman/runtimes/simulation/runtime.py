"""The runtime itself: processes with engines, and probes that read them, on virtual time."""

from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import ManifestText
from pointsman.control import InstanceStatus
from pointsman.control.desired import Address
from pointsman.control.events import Adopted, Launch, Probe
from pointsman.engines import Engine, LaunchSpec, ProbeRequest
from pointsman.errors import PointsmanError
from pointsman.reasons import Reason
from pointsman.replica.handles import Transport
from pointsman.routing.endpoints import Metrics
from pointsman.runtimes.interface import LoadTable, ProcessOrder, Tell, Timer, Unsaved
from pointsman.runtimes.simulation.engines import SimulatedEngines
from pointsman.runtimes.simulation.processes import (
    PORT,
    SimulatedProcesses,
    SimulatedWorkers,
    VirtualClock,
    VirtualTimer,
)
from pointsman.runtimes.stores import StoredManifest
from pointsman.simulator.performance import Pace
from pointsman.types import Worker

# The state of a simulated plane, in memory, and stand-ins for GPU drivers, replicas and listeners.


class NoSources:
    """`SourceStore` of the interface: a simulation loads no code of replicas."""

    def save(self, document: ManifestText, packed: str) -> None: ...

    def of(self, document: ManifestText) -> None:
        return None


class MemoryDocuments:
    """`DocumentStore` of the interface."""

    def __init__(self) -> None:
        self._manifests: list[StoredManifest] = []
        self._versions: dict[str, list[ManifestText]] = {}
        self.kept = NoSources()

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def manifest(self) -> tuple[int, ManifestText] | None:
        return (len(self._manifests), self._manifests[-1].document) if self._manifests else None

    def save_manifest(self, manifest: ManifestText, at: float, summary: str = "", restores: int | None = None) -> int:
        self._manifests.append(StoredManifest(len(self._manifests) + 1, at, summary, restores, manifest))
        return len(self._manifests)

    def manifests(self) -> list[StoredManifest]:
        return self._manifests[::-1]

    def applications(self) -> dict[str, ManifestText]:
        return {name: versions[-1] for name, versions in self._versions.items()}

    def application_before(self, name: str) -> ManifestText | None:
        versions = self._versions.get(name, ())
        return versions[-2] if len(versions) > 1 else None

    def save_application(self, name: str, document: ManifestText, at: float) -> None:
        self._versions.setdefault(name, []).append(document)

    def roll_back_application(self, name: str) -> None:
        self._versions[name].pop()

    def delete_application(self, name: str) -> None:
        del self._versions[name]


class MemoryTargets:
    """`TargetStore` of the interface."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._records: defaultdict[str, list[str]] = defaultdict(list)

    def scaling(self) -> dict[str, str]:
        return dict(self._states)

    def save_scaling(self, states: Mapping[str, str]) -> None:
        self._states |= states

    def forget_scaling(self, name: str) -> None:
        self._states.pop(name, None)
        self._records.pop(name, None)

    def scaling_records(self, name: str) -> list[str]:
        return list(self._records[name])

    def note_scaling(self, name: str, record: str) -> None:
        self._records[name].append(record)


SCRAPE_INTERVAL_S = 0.5
"""Scrape interval, as on runtimes with real instances."""


class VirtualTasks:
    """`BackgroundTasks` of the interface: calls are repeated on virtual time, and failures are raised."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> Timer:
        raise PointsmanError(f"{name}: a simulation reads nothing outside it")

    complete = keep

    def every(self, name: str, interval_s: float, call: Callable[[], None]) -> Timer:
        return VirtualRepetition(self._clock, interval_s, call)

    def attempt(self, name: str, call: Callable[..., None], *args: Any, retry_s: float | None = None) -> None:
        call(*args)

    def failed(self, name: str, error: BaseException, retry_s: float | None = None) -> None:
        raise error

    def problems(self) -> list[Reason]:
        return []

    def failures(self) -> Mapping[str, int]:
        return {}


class VirtualRepetition:
    """A call that is repeated on virtual time."""

    def __init__(self, clock: VirtualClock, interval_s: float, call: Callable[[], None]) -> None:
        self._clock, self._interval_s, self._call = clock, interval_s, call
        self._timer = clock.call_at(clock.now() + interval_s, self._due)

    def cancel(self) -> None:
        self._timer.cancel()

    def _due(self) -> None:
        self._timer = self._clock.call_at(self._clock.now() + self._interval_s, self._due)
        self._call()


class MemoryUsage:
    """`UsageStore` of the interface."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}

    def usage(self) -> dict[str, str]:
        return dict(self._states)

    def save_usage(self, states: Mapping[str, str]) -> None:
        self._states |= states

    def forget_usage(self, names: Iterable[str]) -> None:
        for name in names:
            self._states.pop(name, None)


class NoGpuMeter:
    """`GpuMeter` of the interface."""

    async def read(self, deployments: Collection[str], instances: Sequence[InstanceStatus]) -> None: ...

    def of(self, deployments: Collection[str], instances: Iterable[InstanceStatus]) -> float | None:
        return None

    def close(self) -> None: ...


class NoReplicas:
    """`ReplicaAccess` and `SharedMemory` of the interface: the code of a pipeline's nodes is not simulated."""

    secret = ""

    @property
    def memory(self) -> "NoReplicas":
        return self

    def introduce(self, launch: LaunchSpec, user_config: bytes) -> LaunchSpec:
        return launch

    def reach_at(self, gateways: Sequence[str]) -> None: ...

    def remove(self, names: Iterable[str]) -> None: ...

    def remove_older_than(self, age_s: float) -> None: ...


class NoListener:
    """`AdminListener` of the interface."""

    async def listen(self, connect: Callable[[], Any], connect_replica: Callable[[], Any]) -> None: ...

    def dial(self) -> Transport:
        raise PointsmanError("a simulated plane has no listener; call its methods")

    def close(self) -> None: ...


class SimulatedRuntime:
    """`Runtime` of the interface."""

    def __init__(
        self,
        clock: VirtualClock,
        engines: SimulatedEngines,
        workers: Iterable[Worker] = (),
        *,
        pace: Callable[[ProcessOrder], Pace],
        scrape_interval_s: float | None = SCRAPE_INTERVAL_S,
        scrape_delay_s: float = 0.01,
        **processes: Any,
    ) -> None:
        """`pace` returns the pace of a process's engine. `scrape_interval_s` is by default the interval of a plane; if
        it is None, metrics are never read. `scrape_delay_s` is the time from the reading of metrics until they are
        known. For `processes`, see `SimulatedProcesses`."""
        self.clock = clock
        self.tasks = VirtualTasks(clock)
        self.engines = engines
        self.processes = SimulatedProcesses(
            clock, lambda event: self._tell(event), ended=engines.end, holds_probes=True, **processes
        )
        self.probes = SimulatedProbes(
            clock, self.processes, engines, scrape_interval_s, scrape_delay_s, lambda *told: self._load.surveyed(*told)
        )
        self.documents = MemoryDocuments()
        self.targets = MemoryTargets()
        self.usage = MemoryUsage()
        self.admin, self.gpus, self.replicas = NoListener(), NoGpuMeter(), NoReplicas()
        self.workers = SimulatedWorkers(self.processes, lambda event: self._tell(event))
        self._first_workers = list(workers)
        self._pace = pace
        self._tell: Tell
        self._load: LoadTable

    async def open(self) -> None: ...

    async def adopt(self, tell: Tell, load: LoadTable) -> Sequence[Adopted]:
        self._tell, self._load = tell, load
        self.probes.close()  # these are the probes of an earlier plane
        for worker in self._first_workers:
            self.workers.see(worker)
        running = [(one.launch, one) for one in self.processes.all() if one.pid]
        return [
            Adopted(launch.instance_id, launch.deployment, launch.recipe, one.host, PORT, str(one.pid), launch.place)
            for launch, one in running
        ]

    def launch(self, order: ProcessOrder) -> None:
        self.engines.start(order.instance_id, self._pace(order))
        self.processes.launch(Launch(order.instance_id, order.deployment, order.place, order.recipe))

    def stop(self, instance_id: str, *, kill: bool = False) -> None:
        self.processes.stop(instance_id, kill=kill)

    def address(self, instance_id: str) -> Address | None:
        process = self.processes.get(instance_id)
        return None if process is None else Address(process.host, PORT, False)

    async def logs(self, instance_id: str, lines: int) -> str | None:
        return None

    def look_at_workers(self, plan: PointsmanPlan) -> None: ...

    def problems(self) -> list[Reason]:
        return []

    def unsaved(self) -> Unsaved:
        return Unsaved(0, 0)

    def facts(self) -> dict[str, Any]:
        return {"state_dir": "memory"}

    async def close(self) -> None:
        for one in self.processes.all():
            self.processes.crash(one.launch.instance_id)


class SimulatedProbes:
    """`Probes` of the interface: processes answer by themselves, and engines are read at intervals, with a delay."""

    def __init__(
        self,
        clock: VirtualClock,
        processes: SimulatedProcesses,
        engines: SimulatedEngines,
        interval_s: float | None,
        delay_s: float,
        surveyed: Callable[[str, Sequence[tuple[str, Metrics]]], None],
    ) -> None:
        self._clock, self._processes, self._engines = clock, processes, engines
        self._interval_s, self._delay_s = interval_s, delay_s
        self._surveyed = surveyed
        self._followed: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """Deployment -> instances, in the order in which they were added."""
        self.unreadable: set[str] = set()
        """Instances whose metrics cannot be read."""
        self._timer: VirtualTimer | None = None

    def probe(
        self, instance_id: str, address: Address, question: ProbeRequest, readiness: bool, timeout_s: float
    ) -> None:
        self._processes.probe(Probe(instance_id, readiness, timeout_s))

    def follow(self, deployment: str, instance_id: str, address: Address, engine: Engine) -> None:
        self._followed[deployment][instance_id] = None
        if self._timer is None and self._interval_s is not None:
            self._timer = self._clock.call_soon(self._scrape)

    def unfollow(self, instance_id: str) -> None:
        for deployment, followed in list(self._followed.items()):
            followed.pop(instance_id, None)
            if not followed:
                del self._followed[deployment]

    def stir(self, instance_id: str) -> None:
        """Does nothing, because all instances are read at the same interval."""

    def problems(self) -> list[Reason]:
        return []

    def close(self) -> None:
        self._followed.clear()

    def _scrape(self) -> None:
        """Read all engines. An engine that hangs is not read, so its known metrics age."""
        self._timer = None
        if not self._followed or self._interval_s is None:
            return
        now = self._clock.now()
        self._timer = self._clock.call_at(now + self._interval_s, self._scrape)
        engine_of, unreadable = self._engines.of, self.unreadable
        for deployment, followed in self._followed.items():
            names = [name for name in followed if name not in unreadable] if unreadable else followed
            read = [(name, engine_of(name).metrics(now)) for name in names]
            self._clock.schedule(now + self._delay_s, self._deliver, deployment, read)

    def _deliver(self, deployment: str, read: Sequence[tuple[str, Metrics]]) -> None:
        if deployment in self._followed:
            self._surveyed(deployment, read)

"""A whole plane on virtual time: `submit` requests, `run_until` a time, and read the log."""

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from pointsman.config.changes import Changes
from pointsman.config.revision import ManifestText, load_document, load_revision
from pointsman.reasons import Reason
from pointsman.routing.routes import DEFAULT_SETTINGS, DispatcherSettings
from pointsman.runtimes.autoscaling import Decided, MetricSources
from pointsman.runtimes.interface import Activity, BackgroundTasks, ProcessOrder
from pointsman.runtimes.plane import Plane
from pointsman.runtimes.serving import LocalTraffic, PlaneTraffic, TrafficLoad
from pointsman.runtimes.simulation.engines import KvTransfer, LogEntry, RequestListener, RequestLog, SimulatedEngines
from pointsman.runtimes.simulation.gateways import SimulatedGateways
from pointsman.runtimes.simulation.processes import PORT, VirtualClock
from pointsman.runtimes.simulation.runtime import SimulatedRuntime
from pointsman.runtimes.traffic import Traffic
from pointsman.scaling.autoscaler import ActivePolicy, Autoscaler
from pointsman.simulator.__main__ import pace_of, parser
from pointsman.simulator.continuous_batching import ContinuousBatching
from pointsman.simulator.performance import Pace, hardware
from pointsman.types import RequestMetadata, Worker

HARDWARE = "8B|h100_sxm|vllm|tp1"
SIMULATOR = "pointsman.simulator"


class SimulatedArrival(NamedTuple):
    """A request that will arrive."""

    at: float
    request: RequestMetadata
    output_tokens: int
    hashes: Sequence[int] = ()
    """Hashes of the blocks of its prompt."""
    gateway: int = 0
    """The gateway at which it arrives, if there are several."""


class UnsparedTraffic(LocalTraffic):
    """Traffic in which requests replace no probes. Held probes cost less, see `SimulatedProcesses.probe`."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(traffic)
        self.load = UnsparedLoad(traffic)


class UnsparedLoad(TrafficLoad):
    def activity(self, deployment: str, instance_id: str) -> Activity | None:
        return None


class Simulation:
    """The product's plane, dispatchers and scaling on simulated engines."""

    def __init__(
        self,
        document: ManifestText,
        workers: Iterable[Worker] = (),
        *,
        pace: Callable[[ProcessOrder], Pace] | None = None,
        settings: DispatcherSettings = DEFAULT_SETTINGS,
        gateways: int = 1,
        listener: RequestListener | None = None,
        transfer: KvTransfer = KvTransfer(),  # noqa: B008
        **runtime: Any,
    ) -> None:
        """`pace` returns the pace of a process's engine (default `pace_of_engine`). `settings` include the seed.
        `gateways`: if several, each has its own dispatchers. `listener` is called with what would be in the log,
        which then stays empty. `transfer`: the transfer of KV between engines that prefill and those that decode.
        `runtime`: see `SimulatedRuntime`."""
        self.clock = VirtualClock()
        self._log = RequestLog()
        note = self._log.note if listener is None else listener
        self.engines = SimulatedEngines(self.clock, _default_pace, note, transfer)
        self.engines.emptied = self._halt_if_over
        self.traffic = Traffic(self.clock, self.engines, settings)
        self.traffic.hooks.gone = partial(self.engines.forget, self.traffic.hooks)
        self.runtime = SimulatedRuntime(self.clock, self.engines, workers, pace=pace or pace_of_engine, **runtime)
        self.gateways: SimulatedGateways | None = None
        self._coming: Iterator[SimulatedArrival] | None = None
        traffic: PlaneTraffic = UnsparedTraffic(self.traffic)
        if gateways > 1:
            self.gateways = SimulatedGateways(gateways, self.clock, self.engines, settings, self.traffic)
            self.gateways.shared.configured = self._configure_gateways
            traffic = self.gateways.shared
        self.plane = Plane(self.runtime, traffic, clock=self.clock.now, policies=partial(VirtualPolicies, self.clock))
        _completed(self.plane.start(document))
        for one in () if self.gateways is None else self.gateways.each:
            one.connect()

    @property
    def log(self) -> list[LogEntry]:
        """The events of requests, in order."""
        return self._log.entries

    def submit(
        self, request: RequestMetadata, output_tokens: int, hashes: Sequence[int] = (), gateway: int = 0
    ) -> None:
        """Let a request arrive now, to be answered with this many tokens. `hashes` are those of the blocks of its
        prompt. `gateway` is where it arrives, if there are several gateways."""
        traffic = self.traffic if self.gateways is None else self.gateways.each[gateway].traffic
        self.engines.submit(traffic.by_model[request.model_name], request, output_tokens, hashes)

    def play(self, arrivals: Iterable[SimulatedArrival]) -> None:
        """Submit requests, each at its time. They must be in the order of their times. Each request is taken from the
        iterator when the previous one has arrived."""
        self._coming = iter(arrivals)
        self._next(None)

    def _next(self, arrival: SimulatedArrival | None) -> None:
        if arrival is not None:
            self.submit(arrival.request, arrival.output_tokens, arrival.hashes, arrival.gateway)
        following = None if self._coming is None else next(self._coming, None)
        if following is None:
            self._coming = None
            self._halt_if_over()
        else:
            self.clock.schedule(following.at, self._next, following)

    def _halt_if_over(self) -> None:
        if self.is_over:
            self.clock.halt()

    @property
    def is_over(self) -> bool:
        """Whether every request has arrived and ended."""
        return self._coming is None and not self.engines.requests

    def run(self, until: float) -> bool:
        """Run until every request has ended, or until the given time. Returns whether every request has ended."""
        if not self.is_over:
            self.clock.run_on(until)
        return self.is_over

    def _configure_gateways(self) -> None:
        assert self.gateways is not None
        manifest, applications = self.plane.documents.revision.sources()
        self.gateways.configure(lambda: load_revision(manifest, applications, was_in_force=True).plan().deployments)

    def apply(self, document: ManifestText) -> Changes:
        """Put a manifest in force now."""
        documents = self.plane.documents
        return documents.put_in_force(*documents.revision.changed(document, load_document(document)))

    def run_until(self, time: float) -> None:
        """Run everything that is due until the given time."""
        self.clock.run_until(time)


class VirtualPolicies:
    """Calls scaling policies when they are due on a virtual clock, where a call takes no time."""

    def __init__(
        self,
        timers: VirtualClock,
        autoscaler: Autoscaler,
        sources: MetricSources,
        clock: Callable[[], float],
        decided: Decided,
        tasks: BackgroundTasks,
    ) -> None:
        self._timers, self._autoscaler, self._sources = timers, autoscaler, sources
        self._decided = decided
        self._timer = timers.call_soon(self._run)

    def start(self) -> None: ...

    def close(self) -> None:
        self._timer.cancel()

    def wake(self) -> None:
        self._timer.cancel()
        self._timer = self._timers.call_soon(self._run)

    def problems(self) -> list[Reason]:
        return []

    def _run(self) -> None:
        now = self._timers.now()
        for policy in self._autoscaler.due(now):
            policy.begin()
            self._call(policy, now)
            policy.end(now)
        due_s = self._autoscaler.next_due_s(now)
        if due_s is not None:
            self._timer = self._timers.call_at(now + due_s, self._run)

    def _call(self, policy: ActivePolicy, now: float) -> None:
        members = self._autoscaler.members(policy)
        loads = {one.name: self._sources.load(one) for one in members}
        invocation = self._autoscaler.invoke(policy, loads, self._sources.replicas(members), now)
        if invocation is not None:
            try:
                answer = invocation.call()
            except Exception as error:  # an error of the policy: the guard handles it
                answer = error
            self._decided(self._autoscaler.answered(invocation, answer, now), members, now)


def pace_of_engine(order: ProcessOrder) -> Pace:
    """The pace that the parameters of a `simulated` engine describe; for other engines, the pace of `HARDWARE`."""
    argv = list(order.launch("", PORT).argv)
    if SIMULATOR not in argv:
        return _default_pace()
    wanted = parser().parse_args(argv[argv.index(SIMULATOR) + 1 :])
    return pace_of(wanted, hardware(wanted.hardware), every_token=False)


def _default_pace() -> Pace:
    return ContinuousBatching(hardware(HARDWARE), every_token=False)


def _completed(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits, like those of the simulation runtime."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for something outside the simulation")

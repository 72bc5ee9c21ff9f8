"""A fleet of any size without requests: the controller and simulated processes, for placement and recovery."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from pointsman.control import Desired, InstanceStatus
from pointsman.control.events import Admit, Applied, ControllerEvent, Launch
from pointsman.reasons import Reason
from pointsman.runtimes.control_loop import ControlLoop
from pointsman.runtimes.simulation.processes import Failure, Seconds, SimulatedProcesses, SimulatedWorkers, VirtualClock
from pointsman.types import ExecutionInstance, Worker


class InService:
    """`ServiceTable` without requests: every instance is idle."""

    def __init__(self, clock: VirtualClock) -> None:
        self.instances: dict[str, ExecutionInstance] = {}
        self._clock = clock

    def admit(self, deployment: str, instance: ExecutionInstance) -> None:
        self.instances[instance.instance_id] = instance

    update = admit

    def withdraw(self, deployment: str, instance_id: str, why: Reason) -> None:
        del self.instances[instance_id]

    def when_idle(self, deployment: str, instance_id: str, call: Callable[[], None]) -> None:
        self._clock.call_soon(call)


class ProcessInstances(SimulatedProcesses):
    """`Instances` without engines."""

    def admitted(self, command: Admit) -> None: ...

    def withdrawn(self, instance_id: str) -> None: ...


class SimulatedFleet:
    """A controller on virtual time: `apply` a desired state, `run_until` a time, and look at the instances."""

    def __init__(
        self,
        workers: Iterable[Worker] = (),
        *,
        start_up_s: Seconds = 1.0,
        stop_s: float = 0.0,
        fails: Callable[[Launch], Failure | None] | None = None,
        watch: Callable[[float, ControllerEvent], None] | None = None,
    ) -> None:
        """See `SimulatedProcesses`. `watch` is called with each event once its commands are carried out."""
        self._clock = VirtualClock()
        self._serving = InService(self._clock)
        self._processes = ProcessInstances(
            self._clock, lambda event: self.tell(event), start_up_s=start_up_s, stop_s=stop_s, fails=fails
        )
        handled = None if watch is None else lambda event: watch(self.now, event)
        self._control = ControlLoop(self._clock, self._processes, self._serving, handled=handled)
        self.tell = self._control.tell
        self.run_until = self._clock.run_until
        joined = SimulatedWorkers(self._processes, self.tell)
        self.see, self.lose, self.crash = joined.see, joined.lose, self._processes.crash
        for worker in workers:
            self.see(worker)

    @property
    def now(self) -> float:
        return self._clock.now()

    @property
    def in_service(self) -> Mapping[str, ExecutionInstance]:
        """The instances that requests may be sent to."""
        return MappingProxyType(self._serving.instances)

    def instances(self) -> list[InstanceStatus]:
        """All instances that are not gone, by deployment and id."""
        return self._control.controller.instances()

    def apply(self, desired: Desired) -> None:
        self.tell(Applied(desired))

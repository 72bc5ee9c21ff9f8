"""A fleet of any size on virtual time: the controller's commands come true there, and nobody waits for anything.

    commands -> processes that start, answer and end -> an agenda of what happens when -> events -> the controller

It keeps what `control.events` says of runtimes. Time jumps from event to event; what happens at the same time happens
in the order in which it was put on the agenda, so that the same run gives the same events.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from pointsman.control import Controller, Desired, InstanceStatus
from pointsman.control import events as control
from pointsman.errors import PointsmanError, UnknownName
from pointsman.types import ExecutionInstance, Worker

Seconds: TypeAlias = float | Callable[[str], float]
"""The same for every instance, or as its id says."""
PORT = 8000
"""Of everybody: nobody connects to it."""


class Failure(msgspec.Struct, frozen=True):
    """What goes wrong with a process."""

    why: str
    after_s: float | None = None
    """It ends so long after its launch; None: it cannot even be started."""


class SimulatedProcess(msgspec.Struct, eq=False):
    """One that was launched and has not ended."""

    launch: control.Launch
    ready_at: float = math.inf
    """From then on it answers."""
    runs: bool = False
    """It was launched; before that, no signal reaches it."""


class SimulatedFleet:
    """A runtime for a controller: `apply` what is wanted, `run_until` a time, and look what has become of it."""

    def __init__(
        self,
        workers: Iterable[Worker] = (),
        *,
        start_up_s: Seconds = 1.0,
        stop_s: float = 0.0,
        fails: Callable[[control.Launch], Failure | None] | None = None,
        watch: Callable[[float, control.ControllerEvent], None] | None = None,
    ) -> None:
        """`start_up_s`: from launch to the first completion. `stop_s`: from SIGTERM to the end; SIGKILL takes no time.
        `fails` is asked at each launch; `watch` is told of each event once the controller has handled it."""
        self.controller = Controller()
        self.now = 0.0
        self._start_up_s, self._stop_s = start_up_s, stop_s
        self._fails, self._watch = fails, watch
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._pids = count(1)
        self._workers: set[str] = set()
        self._processes: dict[str, SimulatedProcess] = {}
        self._in_service: dict[str, ExecutionInstance] = {}
        self._asked: dict[str, control.Probe] = {}
        """Probes that are under way."""
        self._alarm: control.WakeController | None = None
        for worker in workers:
            self.see(worker)

    # For people

    @property
    def in_service(self) -> Mapping[str, ExecutionInstance]:
        """What those who send requests know, by instance."""
        return MappingProxyType(self._in_service)

    def instances(self) -> list[InstanceStatus]:
        """All that are not gone, by deployment and id."""
        return self.controller.instances()

    def apply(self, desired: Desired) -> None:
        """This is wanted from now on."""
        self.tell(control.Applied(desired))

    def run_until(self, time: float) -> None:
        """Let everything happen that happens until then."""
        if not self.now <= time < math.inf:  # instances are probed for ever
            raise PointsmanError(f"it is {self.now:g} s now: time runs forward, to an end, and not to {time:g} s")
        while self._agenda and self._agenda[0][0] <= time:
            self.now, _, happen = heapq.heappop(self._agenda)
            happen()
        self.now = time

    def see(self, worker: Worker) -> None:
        """A worker is there, or something about it has changed."""
        self._workers.add(worker.name)
        self.tell(control.WorkerSeen(worker))

    def lose(self, worker: str, why: str) -> None:
        """A worker is gone, and every process that had a part of it."""
        if worker not in self._workers:
            raise UnknownName("worker", worker, self._workers)
        self._workers.discard(worker)
        there = [one for one in self._processes.values() if one.launch.place and worker in one.launch.place.workers]
        for process in there:
            self._forget(process)
        self.tell(control.WorkerLost(worker, why))
        for process in there:  # whoever was launched anew by that has taken its end for granted
            if process.launch.instance_id not in self._processes:
                self._tell_end(process, why)

    def crash(self, instance_id: str, why: str = "killed by SIGKILL") -> None:
        """The process of an instance ends now."""
        if instance_id not in self._processes:
            raise UnknownName("process of instance", instance_id, self._processes)
        self._end(self._processes[instance_id], why)

    def tell(self, event: control.ControllerEvent) -> None:
        """Something has happened now: the controller decides, and its commands are carried out."""
        for command in self.controller.handle(event, self.now):
            self._carry_out(command)
        if self._watch is not None:
            self._watch(self.now, event)

    # Commands

    def _carry_out(self, command: control.ControllerCommand) -> None:
        match command:
            case control.Launch():
                process = self._processes[command.instance_id] = SimulatedProcess(command)
                self._at(self.now, partial(self._launch, process))
            case control.Probe():
                self._asked[command.instance_id] = command
                self._at(self.now, partial(self._answer, command))
            case control.Admit() | control.Update():
                self._in_service[command.instance.instance_id] = command.instance
            case control.Withdraw():
                del self._in_service[command.instance_id]
            case control.AwaitDrained():
                self._at(self.now, partial(self.tell, control.Drained(command.instance_id)))
            case control.Terminate():
                self._signal(command.instance_id, self._stop_s, "killed by SIGTERM")
            case control.Kill():
                self._signal(command.instance_id, 0.0, "killed by SIGKILL")
            case control.WakeController():
                self._alarm = command
                self._at(command.at, partial(self._wake, command))

    def _signal(self, instance_id: str, after_s: float, why: str) -> None:
        process = self._processes.get(instance_id)
        if process is not None and process.runs:  # else the signal is sent again once it does
            self._at(self.now + after_s, partial(self._end, process, why))

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (max(time, self.now), next(self._order), happen))

    # What happens then

    def _launch(self, process: SimulatedProcess) -> None:
        name = process.launch.instance_id
        if self._processes.get(name) is not process:
            return  # it is gone, with its worker
        failure = self._fails(process.launch) if self._fails is not None else None
        if failure is not None and failure.after_s is None:
            self._end(process, failure.why)
            return
        start_up_s = self._start_up_s(name) if callable(self._start_up_s) else self._start_up_s
        process.runs, process.ready_at = True, self.now + start_up_s
        if failure is not None and failure.after_s is not None:
            self._at(self.now + failure.after_s, partial(self._end, process, failure.why))
        host = process.launch.place.workers[0] if process.launch.place else "localhost"
        self.tell(control.Launched(name, next(self._pids), host, PORT))

    def _answer(self, probe: control.Probe) -> None:
        """Servers that somebody else started always answer."""
        name = probe.instance_id
        if self._asked.get(name) is not probe:
            return  # another took its place, or there is nobody any more to answer it
        del self._asked[name]
        ready = probe.endpoint is not None or self._processes[name].ready_at <= self.now
        self.tell(control.Answered(name, probe.readiness) if ready else control.Silent(name, "it does not listen yet"))

    def _wake(self, alarm: control.WakeController) -> None:
        if self._alarm is alarm:
            self.tell(control.ControllerTimer())

    def _end(self, process: SimulatedProcess, why: str) -> None:
        if self._processes.get(process.launch.instance_id) is process:  # a process ends once
            self._forget(process)
            self._tell_end(process, why)

    def _forget(self, process: SimulatedProcess) -> None:
        del self._processes[process.launch.instance_id]
        self._asked.pop(process.launch.instance_id, None)

    def _tell_end(self, process: SimulatedProcess, why: str) -> None:
        name = process.launch.instance_id
        self.tell(control.Exited(name, why) if process.runs else control.LaunchFailed(name, why))

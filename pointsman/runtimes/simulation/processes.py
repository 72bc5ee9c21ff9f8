"""Processes on virtual time: they start, answer probes, stop, crash, and are lost with their workers."""

import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import Any, TypeAlias

import msgspec

from pointsman.control.events import (
    Answered,
    Exited,
    Launch,
    Launched,
    LaunchFailed,
    Probe,
    Silent,
    WorkerLost,
    WorkerSeen,
)
from pointsman.errors import PointsmanError, UnknownName
from pointsman.runtimes.interface import Clock, Tell
from pointsman.types import Worker

# Virtual time: it stands still while something happens, and jumps to the next thing that is due.


class VirtualTimer:
    __slots__ = ("args", "call")

    def __init__(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.call: Callable[..., None] | None = call
        self.args = args

    def cancel(self) -> None:
        self.call = None


class VirtualClock:
    """A `Clock` of the interface."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, VirtualTimer]] = []
        """A heap; the number keeps calls of one time in order."""
        self._order = count()

    def now(self) -> float:
        return self._now

    def call_at(self, at: float, call: Callable[..., None], *args: Any) -> VirtualTimer:
        timer = VirtualTimer(call, args)
        heapq.heappush(self._due, (max(at, self._now), next(self._order), timer))
        return timer

    def call_soon(self, call: Callable[..., None], *args: Any) -> VirtualTimer:
        return self.call_at(self._now, call, *args)

    def run_until(self, time: float) -> None:
        """Let everything happen that is due until then."""
        if not self._now <= time < math.inf:  # probes never end
            raise PointsmanError(f"it is {self._now:g} s now: time runs forward, to an end, and not to {time:g} s")
        while self._due and self._due[0][0] <= time:
            self._now, _, timer = heapq.heappop(self._due)
            if timer.call is not None:
                timer.call(*timer.args)
        self._now = time


Seconds: TypeAlias = float | Callable[[str], float]
"""The same for every instance, or by its id."""
PORT = 8000
"""Of every process: no connection is ever made to it."""


class Failure(msgspec.Struct, frozen=True):
    """What goes wrong with a process."""

    why: str
    after_s: float | None = None
    """It ends this long after its launch; None if it cannot even be started."""


class SimulatedProcess(msgspec.Struct, eq=False):
    """A process that was launched and has not ended."""

    launch: Launch
    pid: int = 0
    """0 until it runs. Before that, no signal reaches it."""
    ready_at: float = math.inf
    """From then on it answers."""

    @property
    def host(self) -> str:
        return self.launch.place.workers[0] if self.launch.place else "localhost"


class SimulatedProcesses:
    """What `Instances` of a control loop stand on, without engines."""

    def __init__(
        self,
        clock: Clock,
        tell: Tell,
        *,
        start_up_s: Seconds = 1.0,
        stop_s: float = 0.0,
        fails: Callable[[Launch], Failure | None] | None = None,
        ended: Callable[[str], None] | None = None,
    ) -> None:
        """`start_up_s`: from launch to the first completion. `stop_s`: from SIGTERM to the end; SIGKILL takes no time.
        `fails` is asked at each launch. `ended` is called with the instance of a process before its end is told."""
        self._clock, self._tell = clock, tell
        self._start_up_s, self._stop_s = start_up_s, stop_s
        self._fails, self._ended = fails, ended
        self._processes: dict[str, SimulatedProcess] = {}
        self._pids = count(1)
        self._probes: dict[str, Probe] = {}
        """Those that are not answered yet."""

    def all(self) -> list[SimulatedProcess]:
        return list(self._processes.values())

    def get(self, instance_id: str) -> SimulatedProcess | None:
        return self._processes.get(instance_id)

    # Commands

    def launch(self, command: Launch) -> None:
        process = self._processes[command.instance_id] = SimulatedProcess(command)
        self._clock.call_soon(self._launch, process)

    def stop(self, instance_id: str, *, kill: bool = False) -> None:
        process = self._processes.get(instance_id)
        if process is None:
            self._tell(Exited(instance_id, "it has no process"))
        elif process.pid:  # else the controller says it again once it runs
            after_s, why = (0.0, "killed by SIGKILL") if kill else (self._stop_s, "killed by SIGTERM")
            self._clock.call_at(self._clock.now() + after_s, self._end, process, why)

    def probe(self, command: Probe) -> None:
        self._probes[command.instance_id] = command
        self._clock.call_soon(self._answer, command)

    def crash(self, instance_id: str, why: str = "killed by SIGKILL") -> None:
        if instance_id not in self._processes:
            raise UnknownName("process of instance", instance_id, self._processes)
        self._end(self._processes[instance_id], why)

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
        process.pid, process.ready_at = next(self._pids), self._clock.now() + start_up_s
        if failure is not None and failure.after_s is not None:
            self._clock.call_at(self._clock.now() + failure.after_s, self._end, process, failure.why)
        self._tell(Launched(name, str(process.pid), process.host, PORT))

    def _answer(self, probe: Probe) -> None:
        """A server that the plane did not start always answers."""
        name = probe.instance_id
        if self._probes.get(name) is not probe:
            return  # another took its place, or its process is gone
        del self._probes[name]
        process = self._processes.get(name)
        is_ready = process is None or process.ready_at <= self._clock.now()
        self._tell(Answered(name, probe.readiness) if is_ready else Silent(name, "it does not listen yet"))

    def _end(self, process: SimulatedProcess, why: str) -> None:
        if self._processes.get(process.launch.instance_id) is process:  # a process ends once
            self.remove(process)
            self.tell_end(process, why)

    def remove(self, process: SimulatedProcess) -> None:
        """It is gone; `tell_end` says so."""
        name = process.launch.instance_id
        del self._processes[name]
        self._probes.pop(name, None)
        if self._ended is not None:
            self._ended(name)

    def tell_end(self, process: SimulatedProcess, why: str) -> None:
        name = process.launch.instance_id
        self._tell(Exited(name, why) if process.pid else LaunchFailed(name, why))


class SimulatedWorkers:
    def __init__(self, processes: SimulatedProcesses, tell: Tell) -> None:
        self._processes, self._tell = processes, tell
        self._names: set[str] = set()

    def see(self, worker: Worker) -> None:
        """A worker joins, or something about it changes."""
        self._names.add(worker.name)
        self._tell(WorkerSeen(worker))

    def lose(self, worker: str, why: str) -> None:
        """A worker is gone, with every process that had a part of it."""
        if worker not in self._names:
            raise UnknownName("worker", worker, self._names)
        self._names.discard(worker)
        lost = [one for one in self._processes.all() if one.launch.place and worker in one.launch.place.workers]
        for process in lost:
            self._processes.remove(process)
        self._tell(WorkerLost(worker, why))
        for process in lost:  # a controller that launched one anew has taken its end for granted
            if self._processes.get(process.launch.instance_id) is None:
                self._processes.tell_end(process, why)

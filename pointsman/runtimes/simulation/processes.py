"""Processes on virtual time: they start, answer probes, stop, crash, and are lost with their workers."""

import math
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
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

# Virtual time stands still during an event, and jumps to the next event.


class VirtualTimer:
    """A call that is due at some time, unless it is cancelled."""

    __slots__ = ("args", "call")

    def __init__(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.call: Callable[..., None] | None = call
        self.args = args

    def __call__(self) -> None:
        if self.call is not None:
            self.call(*self.args)

    def cancel(self) -> None:
        self.call = None


class VirtualClock:
    """A `Clock` of the interface."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        """A heap; the number keeps calls of one time in order."""
        self._order = count()
        self._halted = False

    def now(self) -> float:
        return self._now

    def schedule(self, at: float, call: Callable[..., None], *args: Any) -> None:
        """The same as `call_at`, for calls that are never cancelled. Most calls are never cancelled."""
        heappush(self._due, (at if at > self._now else self._now, next(self._order), call, args))

    def call_at(self, at: float, call: Callable[..., None], *args: Any) -> VirtualTimer:
        timer = VirtualTimer(call, args)
        self.schedule(at, timer)
        return timer

    def call_soon(self, call: Callable[..., None], *args: Any) -> VirtualTimer:
        return self.call_at(self._now, call, *args)

    def run_until(self, time: float) -> None:
        """Run everything that is due until the given time."""
        if not self._now <= time < math.inf:  # probes never end
            raise PointsmanError(f"it is {self._now:g} s now: time runs forward, to an end, and not to {time:g} s")
        while self._due and self._due[0][0] <= time:
            self.run_on(time)
        self._now = time

    def run_on(self, time: float) -> None:
        """Run everything that is due until the given time, or until `halt` is called."""
        self._halted = False
        due = self._due
        while due and due[0][0] <= time:
            self._now, _, call, args = heappop(due)
            call(*args)
            if self._halted:
                return

    def halt(self) -> None:
        """Stop `run_on` after the current event."""
        self._halted = True


Seconds: TypeAlias = float | Callable[[str], float]
"""A time in seconds: the same for every instance, or a function of the instance's id."""
PORT = 8000
"""The port of every process, to which no connection is ever made."""


class Failure(msgspec.Struct, frozen=True):
    """What goes wrong with a process."""

    why: str
    after_s: float | None = None
    """The process ends this long after its launch; None if it cannot even be started."""


class SimulatedProcess(msgspec.Struct, eq=False):
    """A process that was launched and has not ended."""

    launch: Launch
    pid: int = 0
    """0 until the process runs; before that, no signal reaches it."""
    ready_at: float = math.inf
    """When it begins to answer."""
    hangs: bool = False
    """Whether it runs without answering."""

    @property
    def host(self) -> str:
        return self.launch.place.home if self.launch.place else "localhost"


class SimulatedHealth:
    """How processes answer probes."""

    def __init__(self, clock: Clock, tell: Tell, processes: Mapping[str, SimulatedProcess], holds: bool) -> None:
        """`holds`: answer a health probe only when something about the process changes. Until then the answer is known,
        and delivering it repeatedly would take most of the time of a simulation."""
        self._clock, self._tell, self._processes = clock, tell, processes
        self._holds = holds
        self._probes: dict[str, Probe] = {}
        """Probes that are not answered yet."""

    def probe(self, command: Probe) -> None:
        self._probes[command.instance_id] = command
        process = self._processes.get(command.instance_id)
        if command.readiness or not self._holds or (process is not None and process.hangs):
            self._clock.call_soon(self._answer, command)

    def hang(self, instance_id: str) -> None:
        """Stop a process from answering until `go_on`."""
        self._processes[instance_id].hangs = True
        held = self._probes.get(instance_id)
        if held is not None and not held.readiness:
            self.forget(instance_id)
            self._tell(Answered(instance_id, readiness=False))

    def go_on(self, instance_id: str) -> None:
        process = self._processes.get(instance_id)
        if process is not None:
            process.hangs = False

    def forget(self, instance_id: str) -> None:
        """Forget an instance whose process is gone."""
        self._probes.pop(instance_id, None)

    def _answer(self, probe: Probe) -> None:
        """Answer a probe. A server that the plane did not start always answers."""
        name = probe.instance_id
        if self._probes.get(name) is not probe:
            return  # another process has replaced this one, or it is gone
        process = self._processes.get(name)
        if process is not None and process.hangs:
            self._clock.call_at(self._clock.now() + probe.timeout_s, self._time_out, probe)
            return
        self.forget(name)
        is_ready = process is None or process.ready_at <= self._clock.now()
        self._tell(Answered(name, probe.readiness) if is_ready else Silent(name, "it does not listen yet"))

    def _time_out(self, probe: Probe) -> None:
        if self._probes.get(probe.instance_id) is probe:
            self.forget(probe.instance_id)
            self._tell(Silent(probe.instance_id, f"no answer in {probe.timeout_s:g} s"))


class SimulatedProcesses:
    """The processes below the `Instances` of a control loop, without engines."""

    def __init__(
        self,
        clock: Clock,
        tell: Tell,
        *,
        start_up_s: Seconds = 1.0,
        stop_s: float = 0.0,
        fails: Callable[[Launch], Failure | None] | None = None,
        ended: Callable[[str], None] | None = None,
        holds_probes: bool = False,
    ) -> None:
        """`start_up_s`: from launch to the first completion. `stop_s`: from SIGTERM to the end; SIGKILL takes no time.
        `fails` is called at each launch. `ended` is called with the instance of a process before its end is reported.
        `holds_probes`: see `SimulatedHealth`."""
        self._clock, self._tell = clock, tell
        self._start_up_s, self._stop_s = start_up_s, stop_s
        self._fails, self._ended = fails, ended
        self._processes: dict[str, SimulatedProcess] = {}
        self._pids = count(1)
        self.health = SimulatedHealth(clock, tell, self._processes, holds_probes)
        self.probe = self.health.probe

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
        elif process.pid:  # otherwise the controller repeats it once the process runs
            after_s, why = (0.0, "killed by SIGKILL") if kill else (self._stop_s, "killed by SIGTERM")
            self._clock.call_at(self._clock.now() + after_s, self._end, process, why)

    def crash(self, instance_id: str, why: str = "killed by SIGKILL") -> None:
        if instance_id not in self._processes:
            raise UnknownName("process of instance", instance_id, self._processes)
        self._end(self._processes[instance_id], why)

    # What happens then

    def _launch(self, process: SimulatedProcess) -> None:
        name = process.launch.instance_id
        if self._processes.get(name) is not process:
            return  # the process is gone with its worker
        failure = self._fails(process.launch) if self._fails is not None else None
        if failure is not None and failure.after_s is None:
            self._end(process, failure.why)
            return
        start_up_s = self._start_up_s(name) if callable(self._start_up_s) else self._start_up_s
        process.pid, process.ready_at = next(self._pids), self._clock.now() + start_up_s
        if failure is not None and failure.after_s is not None:
            self._clock.call_at(self._clock.now() + failure.after_s, self._end, process, failure.why)
        self._tell(Launched(name, str(process.pid), process.host, PORT))

    def _end(self, process: SimulatedProcess, why: str) -> None:
        if self._processes.get(process.launch.instance_id) is process:  # a process ends once
            self.remove(process)
            self.tell_end(process, why)

    def remove(self, process: SimulatedProcess) -> None:
        """Remove a process; `tell_end` reports its end."""
        name = process.launch.instance_id
        del self._processes[name]
        self.health.forget(name)
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
        """Remove a worker, with every process that runs there."""
        if worker not in self._names:
            raise UnknownName("worker", worker, self._names)
        self._names.discard(worker)
        lost = [one for one in self._processes.all() if one.host == worker]
        for process in lost:
            self._processes.remove(process)
        self._tell(WorkerLost(worker, why))
        for process in lost:  # a controller that launches an instance again assumes that its process has ended
            if self._processes.get(process.launch.instance_id) is None:
                self._processes.tell_end(process, why)

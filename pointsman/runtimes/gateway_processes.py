"""The processes of gateways: which workers they run on, and keeping them running.

Enters: the documents, and events of processes. Leaves: orders to the runtime. The one rule: a gateway
that has ended is started again, and one that was left by an earlier plane is adopted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from pointsman.control.events import Adopted, ControllerEvent, Exited, Launched, LaunchFailed, OutOfReach
from pointsman.engines import LaunchSpec
from pointsman.runtimes.gateways import PREFIX, LinkedGateway
from pointsman.runtimes.interface import BackgroundTasks, Clock, ProcessOrder, Runtime, Timer

FIRST_RESTART_S, MAX_RESTART_S = 0.1, 5.0
"""First and longest pause before a gateway that has ended is started again. The pause doubles with each end."""
CALM_S = 30.0
"""A gateway that has run for this long starts again after the first pause."""


def gateway_places(processes: int, nodes: Sequence[str] = ()) -> dict[str, str]:
    """The names of gateways, and the worker of each; an empty worker is the machine of the plane."""
    numbers = range(1, processes + 1)
    if not nodes:
        return {f"{PREFIX}{number}": "" for number in numbers}
    return {f"{PREFIX}{node}" + (f"-{number}" if processes > 1 else ""): node for node in nodes for number in numbers}


class GatewayChange(Enum):
    """Events of the process of a gateway."""

    STARTED = "started"
    SILENT = "silent"
    """The worker of the gateway does not answer. The gateway may still serve."""
    ENDED = "ended"


class GatewayProcesses:
    """Starts, adopts, watches and restarts the processes of gateways."""

    def __init__(
        self,
        runtime: Runtime,
        clock: Clock,
        tasks: BackgroundTasks,
        command: Sequence[str],
        changed: Callable[[LinkedGateway, GatewayChange], None],
    ) -> None:
        """`command` lacks the name of the gateway. `changed` is called after each change of a gateway."""
        self._runtime = runtime
        self._clock = clock
        self._tasks = tasks
        self._command = tuple(command)
        self._changed = changed
        self._started_at: dict[str, float] = {}
        self._pause_s: dict[str, float] = {}
        self._timers: dict[str, Timer] = {}
        self._is_stopping = False

    def adopt(self, members: Mapping[str, LinkedGateway], events: Iterable[ControllerEvent]) -> None:
        """Take over processes of an earlier plane, start missing processes, and end surplus ones."""
        for event in events:
            if isinstance(event, Adopted):
                if event.instance_id in members:
                    members[event.instance_id].process = event.process
                    self._started_at[event.instance_id] = self._clock.now()
                else:
                    self._runtime.stop(event.instance_id)
        for one in members.values():
            if not one.process:
                self._start(one)

    def told(self, members: Mapping[str, LinkedGateway], event: ControllerEvent) -> None:
        one = members.get(getattr(event, "instance_id", ""))
        if one is None:
            return
        match event:
            case Launched():
                one.process, one.unstarted = event.process, ""
                self._changed(one, GatewayChange.STARTED)
            case OutOfReach():
                self._changed(one, GatewayChange.SILENT)
            case LaunchFailed() | Exited():
                one.process = ""
                one.unstarted = event.why if isinstance(event, LaunchFailed) else ""
                self._changed(one, GatewayChange.ENDED)
                if not self._is_stopping:
                    self._start_later(one)

    def stop(self) -> None:
        """Stop restarting gateways."""
        self._is_stopping = True
        for timer in self._timers.values():
            timer.cancel()

    def kill(self, one: LinkedGateway) -> None:
        self._runtime.stop(one.name, kill=True)

    def _start_later(self, one: LinkedGateway) -> None:
        now = self._clock.now()
        calm = now - self._started_at.get(one.name, now) >= CALM_S
        pause_s = FIRST_RESTART_S if calm else self._pause_s.get(one.name, FIRST_RESTART_S)
        self._pause_s[one.name] = min(2 * pause_s, MAX_RESTART_S)
        one.restarts += 1
        self._timers[one.name] = self._clock.call_at(now + pause_s, self._tasks.attempt, "gateways", self._start, one)

    def _start(self, one: LinkedGateway) -> None:
        self._started_at[one.name] = self._clock.now()
        command = LaunchSpec((*self._command, one.name))
        self._runtime.launch(
            ProcessOrder(
                instance_id=one.name,
                deployment="",
                recipe="",
                place=None,
                worker=one.worker,
                folder="",
                launch=lambda *_: self._runtime.replicas.introduce(command, b""),
            )
        )

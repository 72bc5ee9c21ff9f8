"""The controller at work: events go in one at a time, and its commands are carried out in their order.

Nothing here depends on processes, sockets or machines, so every runtime runs the controller in the same way.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from pointsman.control import Controller
from pointsman.control import events as control
from pointsman.control.status import Prospects, Unavailable, unavailability
from pointsman.errors import UnknownName
from pointsman.http.pool import SHORTAGES, local_cause
from pointsman.placement.fleet import Snapshot
from pointsman.runtimes.interface import Clock, Timer
from pointsman.runtimes.serving import ServiceTable

TASK = "controller"
RETRY_S = 1.0
"""Pause after an event or a command that raised."""


class Instances(Protocol):
    """Actions on instances, on any runtime. Their results are reported to the loop."""

    def launch(self, command: control.Launch) -> None: ...

    def stop(self, instance_id: str, *, kill: bool = False) -> None: ...

    def probe(self, command: control.Probe) -> None: ...

    def admitted(self, command: control.Admit) -> None: ...

    def withdrawn(self, instance_id: str) -> None: ...


class ControlLoop:
    """A controller, and the objects that carry out its commands."""

    def __init__(
        self,
        clock: Clock,
        instances: Instances,
        serving: ServiceTable,
        *,
        handled: Callable[[control.ControllerEvent], None] | None = None,
        failed: Callable[[str, Exception, float], None] | None = None,
    ) -> None:
        """`handled` is called after the commands of each event. `failed` is called with an error of an event or a
        command, and all other commands are still carried out. If `failed` is None, errors are raised."""
        self.controller = Controller()
        self._clock = clock
        self._instances = instances
        self._serving = serving
        self._handled = handled
        self._failed = failed
        self._events: deque[control.ControllerEvent] = deque()
        self._is_busy = False
        self._timer: Timer | None = None

    def tell(self, event: control.ControllerEvent) -> None:
        """Handle an event, and then the events that its commands cause."""
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._is_busy = False

    def _handle(self, event: control.ControllerEvent) -> None:
        try:
            for command in self.controller.handle(event, self._clock.now()):
                self._try(command)
            if self._handled is not None:
                self._handled(event)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(TASK, error, RETRY_S)
            self._wake_at(self._clock.now() + RETRY_S)  # the command that sets the timer may be lost

    def tell_soon(self, event: control.ControllerEvent) -> None:
        """Handle an event after the current one, because a sender of requests is still running."""
        self._clock.call_soon(self.tell, event)

    def unavailability(self, deployment: str, start_up_s: float | None, prospects: Prospects) -> Unavailable:
        return unavailability(deployment, self.controller.instances(), start_up_s, self._clock.now(), prospects)

    def deployment_of(self, instance_id: str) -> str:
        """The deployment of an existing instance."""
        return next(one.deployment for one in self.controller.instances() if one.id == instance_id)

    def drain(self, instance_id: str) -> None:
        known = [one.id for one in self.controller.instances()]
        if instance_id not in known:
            raise UnknownName("instance", instance_id, known)
        self.tell(control.DrainAsked(instance_id))

    def fleet(self) -> Snapshot:
        return self.controller.places.snapshot()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _try(self, command: control.ControllerCommand) -> None:
        try:
            self._carry_out(command)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(TASK, error, RETRY_S)
            why = f"{type(error).__name__}: {error}"
            match command:  # the controller waits for the results of these actions
                case control.Launch():
                    self.tell(control.LaunchFailed(command.instance_id, why, local_cause(error, SHORTAGES)))
                case control.Probe():
                    self.tell(control.ProbeNotMade(command.instance_id, why))  # this is not a failure of the instance
                case control.Terminate() | control.Kill():
                    self._clock.call_at(self._clock.now() + RETRY_S, self._try, command)

    def _carry_out(self, command: control.ControllerCommand) -> None:
        match command:
            case control.Launch():
                self._instances.launch(command)
            case control.Probe():
                self._instances.probe(command)
            case control.Admit():
                self._serving.admit(command.deployment, command.instance)
                self._instances.admitted(command)
            case control.Update():
                self._serving.update(command.deployment, command.instance)
            case control.Withdraw():
                self._instances.withdrawn(command.instance_id)
                self._serving.withdraw(command.deployment, command.instance_id, command.why)
            case control.AwaitDrained():
                drained = control.Drained(command.instance_id)
                self._serving.when_idle(command.deployment, command.instance_id, lambda: self.tell(drained))
            case control.Terminate():
                self._instances.stop(command.instance_id)
            case control.Kill():
                self._instances.stop(command.instance_id, kill=True)
            case control.WakeController():
                self._wake_at(command.at)

    def _wake_at(self, at: float) -> None:
        self.stop_timer()
        self._timer = self._clock.call_at(at, self.tell, control.ControllerTimer())

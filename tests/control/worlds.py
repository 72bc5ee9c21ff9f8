"""Desired states, and a runtime on virtual time that checks the commands of a controller."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from pointsman.control.controller import Controller
from pointsman.control.desired import Desired, DesiredDeployment, DesiredEndpoint, DesiredEngine, Lifecycle
from pointsman.control.events import (
    Admit,
    Adopted,
    Answered,
    Applied,
    AwaitDrained,
    ControllerCommand,
    ControllerEvent,
    ControllerTimer,
    Drained,
    Exited,
    Kill,
    Launch,
    Launched,
    LaunchFailed,
    Probe,
    ProbeNotMade,
    Silent,
    Terminate,
    Update,
    WakeController,
    Withdraw,
)
from pointsman.control.instances import InstanceStatus, Phase
from pointsman.types import ExecutionInstance

HOST, PORT, PROCESS = "10.0.0.1", 9000, "4000"

QUICK = Lifecycle(
    start_timeout_s=100.0,
    probe_interval_s=2.0,
    probe_timeout_s=5.0,
    failures_until_unhealthy=2,
    drain_timeout_s=60.0,
    stop_grace_s=10.0,
    backoff_s=1.0,
    backoff_max_s=50.0,
    ejection_s=5.0,
    ejection_max_s=40.0,
)


def deployment(name: str = "m", replicas: int = 1, version: int = 0, **facts: Any) -> DesiredDeployment:
    """Another `version` is another recipe."""
    usual: dict[str, Any] = {"model": "llama", "engine": DesiredEngine("simulated", {"version": version})}
    return DesiredDeployment(name=name, replicas=replicas, **(usual | {"lifecycle": QUICK} | facts))


def server(name: str = "gpu", port: int = 1, **facts: Any) -> DesiredEndpoint:
    return DesiredEndpoint(name=name, url=f"http://{name}:{port}", **facts)


def servers(*endpoints: DesiredEndpoint, **facts: Any) -> DesiredDeployment:
    """A deployment of external servers."""
    return deployment(replicas=0, engine=None, endpoints=endpoints, **facts)


def wish(*deployments: DesiredDeployment) -> Desired:
    return Desired({one.name: one for one in deployments})


def launched(instance_id: str) -> Launched:
    return Launched(instance_id, PROCESS, HOST, PORT)


def adopted(instance_id: str, of: DesiredDeployment) -> Adopted:
    return Adopted(instance_id, of.name, of.recipe, HOST, PORT, PROCESS)


def about(command: ControllerCommand) -> str:
    """The instance of a command."""
    if isinstance(command, WakeController):
        return ""
    return command.instance.instance_id if isinstance(command, Admit | Update) else command.instance_id


def said(commands: Iterable[ControllerCommand]) -> list[str]:
    """Commands as text, without timers."""
    return [_said(command) for command in commands if not isinstance(command, WakeController)]


def _said(command: ControllerCommand) -> str:
    words = f"{type(command).__name__} {about(command)}"
    if isinstance(command, Probe):
        return f"{words}, {'readiness' if command.readiness else 'health'}"
    closed = isinstance(command, Admit | Update) and not command.instance.can_accept_request
    return f"{words}, closed" if closed else words


class World:
    """A runtime that checks every command. `behave` carries them out."""

    def __init__(self) -> None:
        self.now = 0.0
        self.controller = Controller()
        self.processes: dict[str, str] = {}
        """Launched or being launched, and not ended: instance -> its deployment."""
        self.running: set[str] = set()
        """Those of them that have been launched."""
        self.in_service: dict[str, ExecutionInstance] = {}
        self.probes: dict[str, Probe] = {}
        """Under way."""
        self.of_others: set[str] = set()
        """External servers."""
        self.told: list[ControllerEvent] = []
        self.pending: deque[ControllerEvent] = deque()
        """The events that `behave` sends next."""
        self.wake_at: float | None = None

    def tell(self, event: ControllerEvent, at: float | None = None) -> list[ControllerCommand]:
        """Send an event, and check the commands that follow."""
        self.now = self.now if at is None else at
        self.told.append(event)
        self._let_it_be(event)
        commands = self.controller.handle(event, self.now)
        for command in commands:
            self._carry_out(command, event)
        return commands

    def apply(self, *deployments: DesiredDeployment, at: float | None = None) -> list[str]:
        return said(self.tell(Applied(wish(*deployments)), at))

    def status(self, instance_id: str) -> InstanceStatus:
        [found] = [one for one in self.controller.instances() if one.id == instance_id]
        return found

    def phases(self) -> dict[str, str]:
        return {one.id: one.phase.value for one in self.controller.instances()}

    def ready(self, deployment: str | None = None) -> list[str]:
        found = [one for one in self.controller.instances() if one.phase is Phase.READY]
        return [one.id for one in found if deployment in (None, one.deployment)]

    def behave(self, seconds: float = 0.0) -> None:
        """Carry out commands, and let time pass from event to event."""
        end = self.now + seconds
        for _ in range(100_000):
            while self.pending:
                event = self.pending.popleft()
                if self._still_makes_sense(event):
                    self.tell(event)
            if self.wake_at is None or self.wake_at > end:
                self.now = end
                return
            self.now, self.wake_at = max(self.now, self.wake_at), None
            self.tell(ControllerTimer())
        raise AssertionError("it does not come to rest")

    def settle(self) -> None:
        """Answer what is pending, and behave until everything is settled."""
        for instance_id in self.processes.keys() - self.running:
            self.pending.append(launched(instance_id))
        self.pending.extend(Answered(probe.instance_id, probe.readiness) for probe in self.probes.values())
        for status in self.controller.instances():
            if status.phase is Phase.DRAINING:
                self.pending.append(Drained(status.id))
            if status.phase is Phase.STOPPING:
                self.pending.append(Exited(status.id, "ended"))
        self.behave(130.0)

    def _still_makes_sense(self, event: ControllerEvent) -> bool:
        if isinstance(event, Launched):
            return event.instance_id in self.processes and event.instance_id not in self.running
        if isinstance(event, Exited):
            return event.instance_id in self.running
        if isinstance(event, Answered):
            return event.instance_id in self.probes and self.probes[event.instance_id].readiness is event.readiness
        return True

    def _let_it_be(self, event: ControllerEvent) -> None:
        if isinstance(event, Adopted) and event.instance_id not in self.processes:
            self.processes[event.instance_id] = event.deployment
            self.running.add(event.instance_id)
        elif isinstance(event, Launched) and event.instance_id in self.processes:
            self.running.add(event.instance_id)
        elif isinstance(event, Exited):
            self.processes.pop(event.instance_id, None)
            self.running.discard(event.instance_id)
            if event.instance_id not in self.of_others:
                self.probes.pop(event.instance_id, None)
        elif isinstance(event, LaunchFailed) and event.instance_id not in self.running:
            self.processes.pop(event.instance_id, None)
        elif isinstance(event, Silent | ProbeNotMade) or (
            isinstance(event, Answered) and self._still_makes_sense(event)
        ):
            self.probes.pop(event.instance_id, None)

    def _carry_out(self, command: ControllerCommand, event: ControllerEvent) -> None:
        if isinstance(command, WakeController):
            self.wake_at = command.at
        elif isinstance(command, Admit):
            name = command.instance.instance_id
            assert name not in self.in_service, "admitted twice"
            assert event == Answered(name, readiness=True), "admitted before it did real work"
            assert name in self.running | self.of_others
            assert command.instance.can_accept_request
            self.in_service[name] = command.instance
        elif isinstance(command, Update):
            assert command.instance.instance_id in self.in_service, "updated, and not in service"
            self.in_service[command.instance.instance_id] = command.instance
        elif isinstance(command, Withdraw):
            assert str(command.why)
            del self.in_service[command.instance_id]  # withdrawn once for each time that it was admitted
        elif isinstance(command, AwaitDrained):
            assert not self.in_service[command.instance_id].can_accept_request, "drained while requests come in"
            self.pending.append(Drained(command.instance_id))
        elif isinstance(command, Probe):
            self._probe(command)
        else:
            self._signal(command)

    def _probe(self, command: Probe) -> None:
        name = command.instance_id
        assert (name in self.running) is (command.endpoint is None), "there is nothing to probe"
        assert command.timeout_s > 0
        self.probes[name] = command
        if command.endpoint is not None:
            self.of_others.add(name)
        self.pending.append(Answered(name, command.readiness))

    def _signal(self, command: Launch | Terminate | Kill) -> None:
        name = command.instance_id
        if isinstance(command, Launch):
            assert name not in self.processes, "launched twice"
            self.processes[name] = command.deployment
            self.pending.append(launched(name))
        else:
            assert name in self.processes, "there is no such process"
            assert name not in self.in_service, "stopped while it serves"
            if name in self.running:
                self.pending.append(Exited(name, "ended by a signal"))


def with_lifecycle(spec: DesiredDeployment, **limits: Any) -> DesiredDeployment:
    return msgspec.structs.replace(spec, lifecycle=msgspec.structs.replace(spec.lifecycle, **limits))

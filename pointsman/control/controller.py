"""The controller: what should run does run, without touching a process, a socket or a clock.

    (wanted) -> starting -> ready -> draining -> stopping -> (gone)
                    ^         |                     |
                    |      unhealthy -> stopping    |
                    |                       |       |
                    +---- backing off <-----+-------+  crashed, hung, or never ready: the reason and a count are kept

Enters: events, each with the time. Leaves: commands. The one rule: an instance is in service only after it has done
real work, and is stopped only after it was taken out of service. An event changes what is known; then `reconcile` says
what follows from that, and what is due is done. News of instances that are not there (any more) is ignored.
"""

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from pointsman.control.desired import Desired, DesiredDeployment
from pointsman.control.events import (
    Adopted,
    Answered,
    Applied,
    ControllerCommand,
    ControllerEvent,
    ControllerTimer,
    DrainAsked,
    Drained,
    Exited,
    Launched,
    LaunchFailed,
    PlaceNeeded,
    PlaneStopping,
    RequestsFail,
    Silent,
    WakeController,
    WorkerLost,
    WorkerSeen,
)
from pointsman.control.instances import Instance, InstanceStatus, Phase
from pointsman.control.places import Places
from pointsman.control.reconcile import DRAIN_ASKED, ReconcileStep, What, endpoint_recipe, lifecycle_steps, reconcile
from pointsman.control.transition import Transition


class Controller:
    """Starts, watches, replaces and stops instances: `handle(event, now) -> commands`."""

    def __init__(self) -> None:
        self.desired: Desired | None = None
        """What was last applied; None: nothing yet, and nothing is decided."""
        self.places = Places()
        """The workers that are known, and what has been claimed of them."""
        self._instances: dict[str, Instance] = {}
        self._dues: dict[str, float] = {}
        """When something must be done about each. Kept, as most events concern one of many."""
        self._wake_at: float | None = None
        """For when the timer is set."""
        self._open = True
        self._statuses: list[InstanceStatus] | None = None
        """Made when somebody asks, which many do between two events."""

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        """Take one event in; carry the commands out in their order."""
        self._statuses = None
        turn = Transition(self._instances, self.places, now)
        _HANDLERS[type(event)](self, event, turn)
        if self.desired is not None or not self._open:
            self._settle(turn)  # first: whoever stands in line comes before those whose time is over just now
            for instance_id in [one for one, due in self._dues.items() if due <= now]:
                turn.tick(instance_id)
            self._settle(turn)
            self._set_timer(turn)
        return turn.commands

    def __len__(self) -> int:
        """Instances that are not gone."""
        return len(self._instances)

    def instances(self) -> list[InstanceStatus]:
        """All that are not gone, by deployment and id."""
        if self._statuses is None:
            found = sorted(self._instances.values(), key=lambda one: (one.deployment, len(one.id), one.id))
            self._statuses = [instance.status() for instance in found]
        return list(self._statuses)

    def preview(self, desired: Desired, retry: Collection[str] = ()) -> list[ReconcileStep]:
        """What `Applied` would lead to that is not under way already, why, and where. Nothing is changed."""
        if not self._open:
            return []
        before = self.desired or Desired()
        known, fleet = list(self._instances.values()), self.places.taken
        in_flight = [] if self.desired is None else reconcile(before, known, fleet=fleet)
        steps = [*reconcile(desired, known, fleet=fleet), *lifecycle_steps(before, desired)]
        again = [
            ReconcileStep(What.RESTART, one.id, "its rollout was stopped, and is tried again", one.deployment)
            for one in self._stopped(desired, retry)
        ]
        return self._located([step for step in [*steps, *again] if step not in in_flight], desired)

    def _stopped(self, desired: Desired, retry: Collection[str]) -> list[Instance]:
        """Instances whose rollout was stopped and is to be tried again, with the recipe that they have."""
        return [
            one
            for one in self._instances.values()
            if one.halted
            and one.deployment in retry
            and one.deployment in desired.deployments
            and one.recipe == desired.deployments[one.deployment].recipe
        ]

    def _located(self, steps: list[ReconcileStep], desired: Desired) -> list[ReconcileStep]:
        """The same, and of those that are started where they would go."""
        starting = {step.subject: desired.deployments[step.deployment] for step in steps if step.what is What.START}
        leaving = [step.subject for step in steps if step.what is What.STOP]
        found = self.places.preview(starting, leaving)
        where = {name: outcome.reason for name, outcome in found.items()}
        return [msgspec.structs.replace(step, where=where.get(step.subject)) for step in steps]

    # What is wanted

    def _applied(self, event: Applied, turn: Transition) -> None:
        self.desired = event.desired
        turn.changed = True
        turn.touched.update(self._instances)
        for instance in self._instances.values():
            instance.warmth = event.warmth.get(instance.id, 0.0)
            spec = event.desired.deployments.get(instance.deployment)
            if spec is not None:
                instance.spec = _known(instance, spec)
        for instance in self._stopped(event.desired, event.retry):
            turn.retry(instance)

    def _drain_asked(self, event: DrainAsked, turn: Transition) -> None:
        instance = turn.find(event.instance_id)
        if instance is None or instance.leaving or instance.drain_asked:
            return
        instance.drain_asked, instance.reason = True, DRAIN_ASKED
        turn.changed = True
        if instance.endpoint is not None:  # nobody can take its place: it is only kept out
            turn.drain(instance)

    def _place_needed(self, event: PlaceNeeded, turn: Transition) -> None:
        turn.evict(event.instance_id, event.why)

    def _shutting_down(self, event: PlaneStopping, turn: Transition) -> None:
        self._open = False
        for instance in self._instances.values():
            turn.hurry(instance)
        turn.changed = True

    # News of workers

    def _worker_seen(self, event: WorkerSeen, turn: Transition) -> None:
        for instance_id in self.places.seen(event.worker):
            instance = self._process(instance_id, turn)
            if instance is not None:
                turn.give_up(instance, f'what it had of worker "{event.worker.name}" is not there any more')
        turn.has_room = True

    def _worker_lost(self, event: WorkerLost, turn: Transition) -> None:
        for instance_id in self.places.lost(event.name):
            instance = self._process(instance_id, turn)
            if instance is not None:
                turn.ended(instance, f'worker "{event.name}" is lost: {event.why}')

    # News of processes

    def _adopted(self, event: Adopted, turn: Transition) -> None:
        known = turn.find(event.instance_id)
        if known is not None and known.phase is not Phase.BACKING_OFF:
            return  # its process is known
        nothing = DesiredDeployment(name=event.deployment, model="")
        instance = Instance(id=event.instance_id, spec=nothing, recipe=event.recipe, since=turn.now)
        instance.spec = _known(instance, (self.desired or Desired()).deployments.get(event.deployment, nothing))
        self._instances[instance.id] = instance
        if event.place is not None:
            instance.place = event.place
            self.places.keep(instance.id, event.place, event.deployment)
        turn.launched(instance, event.host, event.port, event.pid)
        turn.changed = True

    def _launched(self, event: Launched, turn: Transition) -> None:
        instance = self._process(event.instance_id, turn)
        if instance is not None and instance.pid is None:
            turn.launched(instance, event.host, event.port, event.pid)

    def _launch_failed(self, event: LaunchFailed, turn: Transition) -> None:
        instance = self._process(event.instance_id, turn)
        if instance is not None and instance.pid is None:
            turn.ended(instance, f"could not be started: {event.why}")

    def _exited(self, event: Exited, turn: Transition) -> None:
        instance = self._process(event.instance_id, turn)
        if instance is not None:
            turn.ended(instance, event.why)

    def _process(self, instance_id: str, turn: Transition) -> Instance | None:
        """The instance, if it has a process of ours, or is about to."""
        instance = turn.find(instance_id)
        if instance is None or instance.endpoint is not None or instance.phase is Phase.BACKING_OFF:
            return None
        return instance

    # News of their health

    def _answered(self, event: Answered, turn: Transition) -> None:
        instance = turn.find(event.instance_id)
        if instance is None or not instance.asked:
            return
        if instance.phase is Phase.READY:
            instance.asked, instance.heard_at, instance.silent = False, turn.now, 0
        elif event.readiness:
            turn.admit(instance)

    def _silent(self, event: Silent, turn: Transition) -> None:
        instance = turn.find(event.instance_id)
        if instance is None or not instance.asked:
            return
        instance.asked, instance.heard_at, instance.silence = False, turn.now, event.why
        instance.silent += 1
        if instance.phase is Phase.READY:
            if instance.silent >= instance.spec.lifecycle.failures_until_unhealthy:
                probes = f"{instance.silent} probes in a row" if instance.silent > 1 else "a probe"
                turn.give_up(instance, f"did not answer {probes}: {event.why}")
        elif instance.serving is not None:
            turn.give_up(instance, f"{instance.reason}; and a probe failed: {event.why}")
        elif instance.endpoint is not None:
            instance.failures += 1
            instance.reason = f"does not answer: {event.why}"

    def _requests_fail(self, event: RequestsFail, turn: Transition) -> None:
        instance = turn.find(event.instance_id)
        if instance is None or instance.phase is not Phase.READY:
            return
        if instance.doubted and turn.now - instance.since < instance.spec.lifecycle.probe_interval_s:
            turn.give_up(instance, f"requests fail on it, although probes do not: {event.why}")
        else:
            turn.doubt(instance, f"requests fail on it: {event.why}")

    def _drained(self, event: Drained, turn: Transition) -> None:
        instance = turn.find(event.instance_id)
        if instance is not None and instance.phase is Phase.DRAINING and instance.serving is not None:
            turn.drained(instance, instance.reason)

    # What follows

    def _timer_fired(self, event: ControllerTimer, turn: Transition) -> None:
        self._wake_at = None  # that timer is spent, even if its clock was a little fast and nothing is due yet

    def _set_timer(self, turn: Transition) -> None:
        due = min(self._dues.values(), default=None)
        if due is not None and due != self._wake_at:
            turn.commands.append(WakeController(due))
        self._wake_at = due

    def _settle(self, turn: Transition) -> None:
        self._reconcile(turn)
        if turn.has_room and self._open:
            turn.try_again()
            self._reconcile(turn)

    def _reconcile(self, turn: Transition) -> None:
        if turn.changed:
            turn.changed = False
            turn.resume()
            desired = self.desired or Desired()
            for instance in self._instances.values():
                instance.outdated = ""
            known, fleet = self._instances.values(), self.places.taken
            for step in reconcile(desired, known, shutting_down=not self._open, fleet=fleet):
                self._take(step, desired, turn)
        self._note_dues(turn)

    def _note_dues(self, turn: Transition) -> None:
        for instance_id in sorted(turn.touched):  # sets have another order in every process
            instance = self._instances.get(instance_id)
            due = None if instance is None else instance.due
            if due is None:
                self._dues.pop(instance_id, None)
            else:
                self._dues[instance_id] = due
        turn.touched.clear()

    def _take(self, step: ReconcileStep, desired: Desired, turn: Transition) -> None:
        turn.touched.add(step.subject)
        if step.what is What.STOP or step.what is What.REMOVE:
            turn.leave(self._instances[step.subject], step.why, in_no_hurry=step.in_no_hurry)
            return
        if step.what is What.KEEP:
            turn.keep(self._instances[step.subject])
            return
        spec = desired.deployments[step.deployment]
        endpoint = next((one for one in spec.endpoints if one.name == step.endpoint), None)
        if step.what is What.START:
            turn.start(Instance(id=step.subject, spec=spec, recipe=spec.recipe))
        elif step.what is What.ADD and endpoint is not None:
            recipe = endpoint_recipe(spec, endpoint.url, endpoint.engine)
            turn.start(Instance(id=step.subject, spec=spec, recipe=recipe, endpoint=endpoint))
        elif step.what is What.UPDATE:
            turn.update(self._instances[step.subject], spec, endpoint)
        elif step.what is What.RESTART:
            turn.renew(self._instances[step.subject], spec, step.why)
        elif step.what is What.REPLACE:
            self._instances[step.subject].outdated = step.why


def _known(instance: Instance, spec: DesiredDeployment) -> DesiredDeployment:
    """What holds for an instance at once, before anybody is told: all, if it is nothing to tell, else its lifecycle."""
    same = instance.endpoint is not None or instance.recipe == spec.recipe
    if same and (instance.foreign or instance.served(True) == instance.served(True, spec)):
        return spec
    return msgspec.structs.replace(instance.spec, lifecycle=spec.lifecycle)


_HANDLERS: dict[type[ControllerEvent], Callable[[Controller, Any, Transition], None]] = {
    Applied: Controller._applied,
    WorkerSeen: Controller._worker_seen,
    WorkerLost: Controller._worker_lost,
    DrainAsked: Controller._drain_asked,
    PlaceNeeded: Controller._place_needed,
    PlaneStopping: Controller._shutting_down,
    Adopted: Controller._adopted,
    Launched: Controller._launched,
    LaunchFailed: Controller._launch_failed,
    Exited: Controller._exited,
    Answered: Controller._answered,
    Silent: Controller._silent,
    RequestsFail: Controller._requests_fail,
    Drained: Controller._drained,
    ControllerTimer: Controller._timer_fired,
}

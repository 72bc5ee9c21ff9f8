"""The controller: keeps running what should run, without touching a process, a socket or a clock.

    (wanted) -> starting -> ready -> draining -> stopping -> (gone)
                    ^         |                     |
                    |      unhealthy -> stopping    |
                    |                       |       |
                    +---- backing off <-----+-------+  crashed, hung, or never ready: the reason and a count are kept

Enters: events, each with the time. Leaves: commands. The one rule: an instance is in service only after it has done
real work, and is stopped only after it was taken out of service. An event changes what is known (see handlers); then
`reconcile` says what follows from that, and what is due is done.
"""

from collections.abc import Collection

import msgspec

from pointsman.control import transition
from pointsman.control.desired import Desired
from pointsman.control.events import ControllerCommand, ControllerEvent, WakeController
from pointsman.control.handlers import HANDLERS
from pointsman.control.instances import Instance, InstanceStatus, instance_status
from pointsman.control.places import Places, preview
from pointsman.control.reconcile import ReconcileStep, What, endpoint_recipe, lifecycle_steps, reconcile
from pointsman.control.transition import ControlState, Transition
from pointsman.reasons import Reason


class Controller:
    """Starts, watches, replaces and stops instances: `handle(event, now) -> commands`."""

    def __init__(self) -> None:
        self._state = ControlState()
        self._due: dict[str, float] = {}
        """When something must be done about each instance. Kept, as most events concern one of many."""
        self._statuses: list[InstanceStatus] | None = None
        """Cached until the next event."""

    @property
    def desired(self) -> Desired | None:
        """What was last applied; None before that."""
        return self._state.desired

    @property
    def places(self) -> Places:
        """The workers that are known, and what has been claimed of them."""
        return self._state.places

    def __len__(self) -> int:
        """Instances that are not gone."""
        return len(self._state.instances)

    def instances(self) -> list[InstanceStatus]:
        """All instances that are not gone, by deployment and id."""
        if self._statuses is None:
            found = sorted(self._state.instances.values(), key=lambda one: (one.deployment, len(one.id), one.id))
            self._statuses = [instance_status(instance) for instance in found]
        return list(self._statuses)

    def preview(self, desired: Desired, retry: Collection[str] = ()) -> list[ReconcileStep]:
        """What applying `desired` would lead to that is not in progress already, why, and where. Changes nothing."""
        state = self._state
        if not state.open:
            return []
        before = state.desired or Desired()
        known, fleet = list(state.instances.values()), state.places.taken
        in_progress = [] if state.desired is None else reconcile(before, known, fleet=fleet)
        steps = [*reconcile(desired, known, fleet=fleet), *lifecycle_steps(before, desired)]
        steps += [
            ReconcileStep(What.RESTART, one.id, Reason("rollout-retried"), one.deployment)
            for one in state.halted(desired, retry)
        ]
        steps = [step for step in steps if step not in in_progress]
        starting = {step.subject: desired.deployments[step.deployment] for step in steps if step.what is What.START}
        leaving = [step.subject for step in steps if step.what is What.STOP]
        places = {name: outcome.reason for name, outcome in preview(state.places, starting, leaving).items()}
        return [msgspec.structs.replace(step, where=places.get(step.subject)) for step in steps]

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        """Take in one event. Carry the commands out in their order."""
        self._statuses = None
        state, turn = self._state, Transition(self._state, now)
        HANDLERS[type(event)](event, turn)
        if state.desired is not None or not state.open:
            self._settle(turn)  # first: unplaced instances come before those whose time is over just now
            for instance_id in [one for one, due in self._due.items() if due <= now]:
                transition.tick(turn, instance_id)
            self._settle(turn)
            self._set_timer(turn)
        return turn.commands

    def _settle(self, turn: Transition) -> None:
        self._reconcile(turn)
        if turn.has_room and self._state.open:
            transition.retry_unplaced(turn)
            self._reconcile(turn)

    def _reconcile(self, turn: Transition) -> None:
        state = self._state
        if turn.changed:
            turn.changed = False
            transition.resume_rollouts(turn)
            desired = state.desired or Desired()
            for instance in state.instances.values():
                instance.outdated = None
            known, fleet = state.instances.values(), state.places.taken
            for step in reconcile(desired, known, shutting_down=not state.open, fleet=fleet):
                _take(step, desired, turn)
        self._note_due(turn)

    def _note_due(self, turn: Transition) -> None:
        for instance_id in sorted(turn.touched):  # a set has another order in every process
            instance = self._state.instances.get(instance_id)
            due = None if instance is None else instance.due
            if due is None:
                self._due.pop(instance_id, None)
            else:
                self._due[instance_id] = due
        turn.touched.clear()

    def _set_timer(self, turn: Transition) -> None:
        due = min(self._due.values(), default=None)
        if due is not None and due != self._state.wake_at:
            turn.commands.append(WakeController(due))
        self._state.wake_at = due


def _take(step: ReconcileStep, desired: Desired, turn: Transition) -> None:
    """Carry out one step."""
    instances = turn.state.instances
    turn.touched.add(step.subject)
    if step.what is What.STOP or step.what is What.REMOVE:
        transition.leave(turn, instances[step.subject], step.why, in_no_hurry=step.in_no_hurry)
        return
    if step.what is What.KEEP:
        transition.keep(turn, instances[step.subject])
        return
    spec = desired.deployments[step.deployment]
    endpoint = next((one for one in spec.endpoints if one.name == step.endpoint), None)
    if step.what is What.START:
        transition.start(turn, Instance(id=step.subject, spec=spec, recipe=spec.recipe))
    elif step.what is What.ADD and endpoint is not None:
        recipe = endpoint_recipe(spec, endpoint.url, endpoint.engine)
        transition.start(turn, Instance(id=step.subject, spec=spec, recipe=recipe, endpoint=endpoint))
    elif step.what is What.UPDATE:
        transition.update(turn, instances[step.subject], spec, endpoint)
    elif step.what is What.RESTART:
        transition.renew(turn, instances[step.subject], spec, step.why)
    elif step.what is What.REPLACE:
        instances[step.subject].outdated = step.why

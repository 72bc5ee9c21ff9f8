"""The controller: keeps the desired instances running, without touching a process, a socket or a clock.

    (wanted) -> starting -> ready -> draining -> stopping -> (gone)
                    ^         |                     |
                    |      unhealthy, ejected -> stopping
                    |                       |       |
                    +---- backing off <-----+-------+  crashed, hung, or never ready: the reason and a count are kept

If the start of an instance has failed for a reason that no further try can change (`final`), the instance stays in
backing off until its deployment is applied again.

Enters: events, each with the time. Leaves: commands. The one rule: an instance is in service only after it has done
real work, and is stopped only after it was taken out of service. An event changes what is known (`HANDLERS`). Then
`reconcile` returns the next steps, and due actions are taken.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from pointsman.control import events, transition
from pointsman.control.desired import Desired, DesiredDeployment
from pointsman.control.instances import Instance, InstanceStatus, Phase, instance_status
from pointsman.control.places import Places, labels_change, preview
from pointsman.control.reconcile import DRAIN_ASKED, ReconcileStep, What, endpoint_recipe, lifecycle_steps, reconcile
from pointsman.control.transition import ControlState, Transition
from pointsman.reasons import Reason
from pointsman.routing.queue.lazy_heap import LazyHeap

# The desired state


def _applied(event: events.Applied, turn: Transition) -> None:
    state = turn.state
    state.desired = event.desired
    turn.changed = True
    turn.touched.update(state.instances)
    for instance in state.instances.values():
        instance.warmth = event.warmth.get(instance.id, 0.0)
        spec = event.desired.deployments.get(instance.deployment)
        if spec is not None:
            instance.spec = _applicable(instance, spec)
    for instance in state.given_up(event.desired, event.retry):
        transition.retry(turn, instance)


def _applicable(instance: Instance, spec: DesiredDeployment) -> DesiredDeployment:
    """The spec to use before an update: the new spec if dispatchers need no update, else the old with its lifecycle."""
    same = instance.endpoint is not None or instance.recipe == spec.recipe
    if same and (instance.foreign or instance.served(True) == instance.served(True, spec)):
        return spec
    return msgspec.structs.replace(instance.spec, lifecycle=spec.lifecycle)


def _drain_asked(event: events.DrainAsked, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is None or instance.leaving or instance.drain_asked:
        return
    instance.drain_asked, instance.reason = True, DRAIN_ASKED
    turn.changed = True
    if instance.endpoint is not None:  # an external server is not replaced, only kept out of service
        transition.drain(turn, instance)


def _stopping(_: events.PlaneStopping, turn: Transition) -> None:
    turn.state.open = False
    for instance in turn.state.instances.values():
        transition.hurry(turn, instance)
    turn.changed = True


# Workers


def _worker_seen(event: events.WorkerSeen, turn: Transition) -> None:
    relabelled = labels_change(turn.state.places, event.worker)
    for instance_id in turn.state.places.seen(event.worker):
        instance = turn.find_process(instance_id)
        if instance is not None:
            transition.give_up(turn, instance, Reason("resources-lost", {"worker": event.worker.name}))
    for one in turn.state.instances.values() if relabelled else ():
        if one.serving is not None:
            turn.publish(one)
    turn.has_room = True


def _worker_lost(event: events.WorkerLost, turn: Transition) -> None:
    why = Reason("worker-lost", {"worker": event.name, "why": event.why})
    for instance_id in turn.state.places.lost(event.name):
        instance = turn.find_process(instance_id)
        if instance is not None and instance.place is not None and instance.place.home != event.name:
            transition.give_up(turn, instance, why, kill=True)  # its process runs on, with the rest of its place
        elif instance is not None:
            transition.ended(turn, instance, why)


# Processes


def _adopted(event: events.Adopted, turn: Transition) -> None:
    state, known = turn.state, turn.find(event.instance_id)
    if known is not None and known.phase is not Phase.BACKING_OFF:
        return
    nothing = DesiredDeployment(name=event.deployment, model="")
    instance = Instance(id=event.instance_id, spec=nothing, recipe=event.recipe, since=turn.now)
    instance.spec = _applicable(instance, (state.desired or Desired()).deployments.get(event.deployment, nothing))
    state.instances[instance.id] = instance
    missing: list[str] = []
    if event.place is not None:
        instance.place = event.place
        missing = state.places.keep(instance.id, event.place, event.deployment)
    transition.launched(turn, instance, event.host, event.port, event.process)
    if missing:
        why = "it was missing when the plane started"
        transition.give_up(turn, instance, Reason("worker-lost", {"worker": missing[0], "why": why}), kill=True)
    turn.changed = True


def _launched(event: events.Launched, turn: Transition) -> None:
    instance = turn.find_process(event.instance_id)
    if instance is not None and instance.process is None:
        transition.launched(turn, instance, event.host, event.port, event.process)


def _launch_failed(event: events.LaunchFailed, turn: Transition) -> None:
    instance = turn.find_process(event.instance_id)
    if instance is not None and instance.process is None:
        if event.local and instance.phase is Phase.STARTING:
            transition.hinder(turn, instance, Reason("not-launched", {"why": event.why, "cause": event.local}))
        else:
            transition.ended(turn, instance, Reason("launch-failed", {"why": event.why}), event.final)


def _exited(event: events.Exited, turn: Transition) -> None:
    instance = turn.find_process(event.instance_id)
    if instance is not None:
        transition.ended(turn, instance, Reason("exited", {"why": event.why}), event.final)


# Health


def _answered(event: events.Answered, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is None or not instance.probing:
        return
    if instance.phase is Phase.READY:
        instance.probing, instance.probed_at, instance.failed_probes = False, turn.now - event.ago_s, 0
    elif event.readiness:
        transition.admit(turn, instance)


def _silent(event: events.Silent, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is None or not instance.probing:
        return
    instance.probing, instance.probed_at, instance.probe_error = False, turn.now, event.why
    instance.failed_probes += 1
    if instance.phase is Phase.READY:
        if instance.failed_probes >= instance.spec.lifecycle.failures_until_unhealthy:
            why = Reason("probes-failed", {"probes": instance.failed_probes, "why": event.why})
            transition.give_up(turn, instance, why)
    elif instance.serving is not None:
        if instance.phase is Phase.EJECTED:
            transition.stay_ejected(turn, instance, event.why)
        else:
            why = Reason("requests-and-probe-failed", {"before": instance.reason, "why": event.why})
            transition.give_up(turn, instance, why)
    elif instance.endpoint is not None:
        instance.failures += 1
        instance.reason = Reason("endpoint-silent", {"why": event.why})


def _probe_not_made(event: events.ProbeNotMade, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None and instance.probing:
        seen_at = instance.since if instance.probed_at is None else instance.probed_at
        instance.unseen_s += turn.now - seen_at
        instance.probing, instance.probed_at, instance.probe_error = False, turn.now, event.why


def _went_idle(event: events.WentIdle, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None and instance.phase is Phase.READY:
        transition.rest(turn, instance)


def _got_request(event: events.GotRequest, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None:
        instance.idle_gap_s = 0.0


def _requests_fail(event: events.RequestsFail, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is None or instance.phase is not Phase.READY:
        return
    if instance.doubted and turn.now - instance.since < instance.spec.lifecycle.probe_interval_s:
        transition.give_up(turn, instance, Reason("requests-fail-again", {"why": event.why}))
    else:
        transition.doubt(turn, instance, Reason("requests-fail", {"why": event.why}))
        instance.doubted = True


def _out_of_reach(event: events.OutOfReach, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None and instance.phase is Phase.READY:
        transition.doubt(turn, instance, Reason("out-of-reach", {"why": event.why}))


def _stands_out(event: events.StandsOut, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None and instance.phase is Phase.READY:
        transition.stands_out(turn, instance, event.why, contradicted=event.contradicted)


def _drained(event: events.Drained, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None and instance.phase is Phase.DRAINING and instance.serving is not None:
        transition.drained(turn, instance, instance.reason or Reason("drained"))


def _timer_fired(_: events.ControllerTimer, turn: Transition) -> None:
    turn.state.wake_at = None  # the timer has fired, even if its clock was a little fast and nothing is due yet


HANDLERS: Mapping[type[events.ControllerEvent], Callable[[Any, Transition], None]] = {
    events.Applied: _applied,
    events.WorkerSeen: _worker_seen,
    events.WorkerLost: _worker_lost,
    events.DrainAsked: _drain_asked,
    events.PlaceNeeded: lambda event, turn: transition.evict(turn, event.instance_id, event.why),
    events.PlaneStopping: _stopping,
    events.Adopted: _adopted,
    events.Launched: _launched,
    events.LaunchFailed: _launch_failed,
    events.Exited: _exited,
    events.Answered: _answered,
    events.Silent: _silent,
    events.ProbeNotMade: _probe_not_made,
    events.WentIdle: _went_idle,
    events.GotRequest: _got_request,
    events.RequestsFail: _requests_fail,
    events.OutOfReach: _out_of_reach,
    events.StandsOut: _stands_out,
    events.Drained: _drained,
    events.ControllerTimer: _timer_fired,
}


class Controller:
    """Starts, watches, replaces and stops instances: `handle(event, now) -> commands`."""

    def __init__(self) -> None:
        self._state = ControlState()
        self.changes = 0
        """Grows whenever a result of `instances` may have changed."""
        self._due: LazyHeap[str] = LazyHeap()
        """Instances by the time of their next action, kept because most events concern one instance of many."""
        self._statuses: list[InstanceStatus] | None = None
        """The statuses of all instances, cached until one of them changes."""
        self._shown: dict[str, InstanceStatus] = {}
        """The same statuses by id."""
        self.phase_changes: list[events.PhaseChange] = []
        """Phases that instances entered with the last event."""

    @property
    def desired(self) -> Desired | None:
        """The desired state that was last applied; None before that."""
        return self._state.desired

    @property
    def places(self) -> Places:
        return self._state.places

    def __len__(self) -> int:
        return len(self._state.instances)

    def instances(self) -> list[InstanceStatus]:
        """All instances that are not gone, by deployment and id."""
        if self._statuses is None:
            found = sorted(self._state.instances.values(), key=lambda one: (one.deployment, len(one.id), one.id))
            self._statuses = [instance_status(instance) for instance in found]
            self._shown = {one.id: one for one in self._statuses}
        return list(self._statuses)

    def preview(self, desired: Desired, retry: Collection[str] = ()) -> list[ReconcileStep]:
        """The steps that applying `desired` would add to those in progress, with reason and place. Changes nothing."""
        state = self._state
        if not state.open:
            return []
        before = state.desired or Desired()
        known, fleet = list(state.instances.values()), state.places.taken
        in_progress = [] if state.desired is None else reconcile(before, known, fleet=fleet)
        steps = [*reconcile(desired, known, fleet=fleet), *lifecycle_steps(before, desired)]
        steps += [
            ReconcileStep(
                What.RESTART, one.id, Reason("rollout-retried" if one.halted else "tried-again"), one.deployment
            )
            for one in state.given_up(desired, retry)
        ]
        steps = [step for step in steps if step not in in_progress]
        starting = {step.subject: desired.deployments[step.deployment] for step in steps if step.what is What.START}
        leaving = [step.subject for step in steps if step.what is What.STOP]
        places = {name: outcome.reason for name, outcome in preview(state.places, starting, leaving).items()}
        return [msgspec.structs.replace(step, where=places.get(step.subject)) for step in steps]

    def handle(self, event: events.ControllerEvent, now: float) -> list[events.ControllerCommand]:
        """Handle one event. The caller must carry the commands out in their order."""
        state, turn = self._state, Transition(self._state, now)
        HANDLERS[type(event)](event, turn)
        if state.desired is not None or not state.open:
            self._settle(turn)  # first, because unplaced instances come before those that are due now
            due = []
            while len(self._due) and self._due.first_key() <= now:
                due.append(self._due.pop())
            for instance_id in due:
                transition.tick(turn, instance_id)
            self._settle(turn)
            self._set_timer(turn)
        else:
            self._changed()
        self.phase_changes = turn.phase_changes() if turn.phases else []
        return turn.commands

    def _changed(self) -> None:
        self._statuses = None
        self.changes += 1

    def _settle(self, turn: Transition) -> None:
        self._reconcile(turn)
        if turn.has_room and self._state.open:
            transition.retry_unplaced(turn)
            self._reconcile(turn)

    def _reconcile(self, turn: Transition) -> None:
        state = self._state
        if turn.changed:
            turn.changed = False
            self._changed()
            transition.resume_rollouts(turn)
            transition.recall_ejected(turn)
            desired = state.desired or Desired()
            for instance in state.instances.values():
                instance.outdated = None
            known, fleet = state.instances.values(), state.places.taken
            for step in reconcile(desired, known, shutting_down=not state.open, fleet=fleet):
                _take(step, desired, turn)
        self._note_due(turn)

    def _note_due(self, turn: Transition) -> None:
        for instance_id in sorted(turn.touched):  # the order of a set differs between processes
            instance = self._state.instances.get(instance_id)
            due = None if instance is None else instance.due
            if due is None:
                self._due.discard(instance_id)
            else:
                self._due.put(instance_id, due, instance_id)
            if instance is not None and (
                self._statuses is None or self._shown.get(instance_id) != instance_status(instance)
            ):
                self._changed()
        turn.touched.clear()

    def _set_timer(self, turn: Transition) -> None:
        due = self._due.first_key()
        if due is not None and due != self._state.wake_at:
            turn.commands.append(events.WakeController(due))
        self._state.wake_at = due


def _take(step: ReconcileStep, desired: Desired, turn: Transition) -> None:
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
        recipe = endpoint_recipe(spec, endpoint)
        transition.start(turn, Instance(id=step.subject, spec=spec, recipe=recipe, endpoint=endpoint))
    elif step.what is What.UPDATE:
        transition.update(turn, instances[step.subject], spec, endpoint)
    elif step.what is What.RESTART:
        transition.renew(turn, instances[step.subject], spec, step.why)
    elif step.what is What.REPLACE:
        instances[step.subject].outdated = step.why

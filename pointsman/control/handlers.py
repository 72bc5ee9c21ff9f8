"""What each event of the controller does. News of instances that are gone is ignored."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pointsman.control import transition
from pointsman.control.desired import Desired, DesiredDeployment
from pointsman.control.events import (
    Adopted,
    Answered,
    Applied,
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
    WorkerLost,
    WorkerSeen,
)
from pointsman.control.instances import Instance, Phase
from pointsman.control.reconcile import DRAIN_ASKED
from pointsman.control.transition import Transition
from pointsman.reasons import Reason

# What is wanted


def _applied(event: Applied, turn: Transition) -> None:
    state = turn.state
    state.desired = event.desired
    turn.changed = True
    turn.touched.update(state.instances)
    for instance in state.instances.values():
        instance.warmth = event.warmth.get(instance.id, 0.0)
        spec = event.desired.deployments.get(instance.deployment)
        if spec is not None:
            instance.spec = _applicable(instance, spec)
    for instance in state.halted(event.desired, event.retry):
        transition.retry(turn, instance)


def _applicable(instance: Instance, spec: DesiredDeployment) -> DesiredDeployment:
    """What holds for an instance before it is updated: everything, if dispatchers need not know; else its lifecycle."""
    same = instance.endpoint is not None or instance.recipe == spec.recipe
    if same and (instance.foreign or instance.served(True) == instance.served(True, spec)):
        return spec
    return msgspec.structs.replace(instance.spec, lifecycle=spec.lifecycle)


def _drain_asked(event: DrainAsked, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is None or instance.leaving or instance.drain_asked:
        return
    instance.drain_asked, instance.reason = True, DRAIN_ASKED
    turn.changed = True
    if instance.endpoint is not None:  # an external server is not replaced, only kept out of service
        transition.drain(turn, instance)


def _place_needed(event: PlaceNeeded, turn: Transition) -> None:
    transition.evict(turn, event.instance_id, event.why)


def _stopping(_: PlaneStopping, turn: Transition) -> None:
    turn.state.open = False
    for instance in turn.state.instances.values():
        transition.hurry(turn, instance)
    turn.changed = True


# Workers


def _worker_seen(event: WorkerSeen, turn: Transition) -> None:
    for instance_id in turn.state.places.seen(event.worker):
        instance = turn.find_process(instance_id)
        if instance is not None:
            transition.give_up(turn, instance, Reason("resources-lost", {"worker": event.worker.name}))
    turn.has_room = True


def _worker_lost(event: WorkerLost, turn: Transition) -> None:
    for instance_id in turn.state.places.lost(event.name):
        instance = turn.find_process(instance_id)
        if instance is not None:
            transition.ended(turn, instance, Reason("worker-lost", {"worker": event.name, "why": event.why}))


# Processes


def _adopted(event: Adopted, turn: Transition) -> None:
    state, known = turn.state, turn.find(event.instance_id)
    if known is not None and known.phase is not Phase.BACKING_OFF:
        return
    nothing = DesiredDeployment(name=event.deployment, model="")
    instance = Instance(id=event.instance_id, spec=nothing, recipe=event.recipe, since=turn.now)
    instance.spec = _applicable(instance, (state.desired or Desired()).deployments.get(event.deployment, nothing))
    state.instances[instance.id] = instance
    if event.place is not None:
        instance.place = event.place
        state.places.keep(instance.id, event.place, event.deployment)
    transition.launched(turn, instance, event.host, event.port, event.process)
    turn.changed = True


def _launched(event: Launched, turn: Transition) -> None:
    instance = turn.find_process(event.instance_id)
    if instance is not None and instance.process is None:
        transition.launched(turn, instance, event.host, event.port, event.process)


def _launch_failed(event: LaunchFailed, turn: Transition) -> None:
    instance = turn.find_process(event.instance_id)
    if instance is not None and instance.process is None:
        transition.ended(turn, instance, Reason("launch-failed", {"why": event.why}))


def _exited(event: Exited, turn: Transition) -> None:
    instance = turn.find_process(event.instance_id)
    if instance is not None:
        transition.ended(turn, instance, Reason("exited", {"why": event.why}))


# Health


def _answered(event: Answered, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is None or not instance.probing:
        return
    if instance.phase is Phase.READY:
        instance.probing, instance.probed_at, instance.failed_probes = False, turn.now, 0
    elif event.readiness:
        transition.admit(turn, instance)


def _silent(event: Silent, turn: Transition) -> None:
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
        why = Reason("requests-and-probe-failed", {"before": instance.reason, "why": event.why})
        transition.give_up(turn, instance, why)
    elif instance.endpoint is not None:
        instance.failures += 1
        instance.reason = Reason("endpoint-silent", {"why": event.why})


def _requests_fail(event: RequestsFail, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is None or instance.phase is not Phase.READY:
        return
    if instance.doubted and turn.now - instance.since < instance.spec.lifecycle.probe_interval_s:
        transition.give_up(turn, instance, Reason("requests-fail-again", {"why": event.why}))
    else:
        transition.doubt(turn, instance, Reason("requests-fail", {"why": event.why}))


def _drained(event: Drained, turn: Transition) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None and instance.phase is Phase.DRAINING and instance.serving is not None:
        transition.drained(turn, instance, instance.reason or Reason("drained"))


def _timer_fired(_: ControllerTimer, turn: Transition) -> None:
    turn.state.wake_at = None  # that timer is spent, even if its clock was a little fast and nothing is due yet


HANDLERS: Mapping[type[ControllerEvent], Callable[[Any, Transition], None]] = {
    Applied: _applied,
    WorkerSeen: _worker_seen,
    WorkerLost: _worker_lost,
    DrainAsked: _drain_asked,
    PlaceNeeded: _place_needed,
    PlaneStopping: _stopping,
    Adopted: _adopted,
    Launched: _launched,
    LaunchFailed: _launch_failed,
    Exited: _exited,
    Answered: _answered,
    Silent: _silent,
    RequestsFail: _requests_fail,
    Drained: _drained,
    ControllerTimer: _timer_fired,
}

"""The transitions of instances. Every change of phase is made here, together with its commands.

One event is one `Transition`: it collects commands, and notes what else may be due. The functions below are the
transitions of one instance, in the order of its life: coming, serving, failing, leaving, and timeouts.
"""

from collections import Counter
from collections.abc import Collection

from pointsman.control import events
from pointsman.control.desired import GPU_TOKENS_PER_S, Desired, DesiredDeployment, DesiredEndpoint
from pointsman.control.instances import IDLE_PROBES_PER_S, Instance, Phase, spread
from pointsman.control.places import Places, labels_at, price_at
from pointsman.placement.refusals import Refused
from pointsman.reasons import Reason


class ControlState:
    def __init__(self) -> None:
        self.desired: Desired | None = None
        """The desired state that was last applied. While it is None, no step is decided."""
        self.places = Places()
        self.instances: dict[str, Instance] = {}
        self.open = True
        """False once the plane is stopping."""
        self.wake_at: float | None = None
        """When the timer will fire; None if it is not set."""

    def given_up(self, desired: Desired, retry: Collection[str]) -> list[Instance]:
        """Instances that cannot start, or whose rollout was stopped, in deployments that are to be tried again with the
        same recipe."""
        return [
            one
            for one in self.instances.values()
            if (one.halted or one.final)
            and one.deployment in retry
            and one.deployment in desired.deployments
            and one.recipe == desired.deployments[one.deployment].recipe
        ]


class Transition:
    """One event being handled: the time, the commands so far, and what else must be looked at."""

    def __init__(self, state: ControlState, now: float) -> None:
        self.state = state
        self.now = now
        self.commands: list[events.ControllerCommand] = []
        self.changed = False
        """Whether an instance has entered another phase, or has come or gone, so that reconciling is needed."""
        self.touched: set[str] = set()
        """Instances whose due time may have changed."""
        self.has_room = False
        """Whether there may be more room than before, so that unplaced instances are tried again."""
        self.phases: list[tuple[Instance, str]] = []
        """Instances and the phases that they have entered, in order; empty if an instance is gone."""

    def find(self, instance_id: str) -> Instance | None:
        """The instance, for changes; None if it is gone."""
        self.touched.add(instance_id)
        return self.state.instances.get(instance_id)

    def find_process(self, instance_id: str) -> Instance | None:
        """The instance if it has a Pointsman process, or is about to have one; else None."""
        instance = self.find(instance_id)
        if instance is None or instance.endpoint is not None or instance.phase is Phase.BACKING_OFF:
            return None
        return instance

    def enter(self, instance: Instance, phase: Phase) -> None:
        instance.phase, instance.since = phase, self.now
        instance.probing, instance.probed_at, instance.failed_probes, instance.probe_error = False, None, 0, ""
        instance.killed, instance.unseen_s, instance.idle_gap_s = False, 0.0, 0.0
        self.phases.append((instance, phase.value))
        self.changed = True

    def publish(self, instance: Instance) -> None:
        """Send dispatchers the present state of an instance, if that has changed."""
        current = instance.served(instance.phase is Phase.READY)
        if instance.endpoint is None:
            current.labels = labels_at(self.state.places, instance.place) | current.labels
            if current.price_per_hour is None:
                current.price_per_hour = price_at(self.state.places, instance.place)
                if current.price_per_hour is not None and current.throughput_tokens_per_sec is None:
                    current.throughput_tokens_per_sec = GPU_TOKENS_PER_S * current.gpu_count
        if instance.serving is None:
            self.commands.append(events.Admit(instance.deployment, current))
        elif instance.serving != current:
            self.commands.append(events.Update(instance.deployment, current))
        instance.serving = current

    def withdraw(self, instance: Instance, why: Reason) -> None:
        if instance.serving is not None:
            instance.serving = None
            self.commands.append(events.Withdraw(instance.deployment, instance.id, why))

    def fail(self, instance: Instance, why: Reason) -> None:
        if instance.phase is Phase.READY and self.now - instance.since >= instance.spec.lifecycle.backoff_max_s:
            instance.failures = 0
        instance.failures += 1
        instance.failed_starts += instance.phase is Phase.STARTING
        instance.reason = why
        self.withdraw(instance, why)

    def terminate(self, instance: Instance) -> None:
        self.enter(instance, Phase.STOPPING)
        self.commands.append(events.Terminate(instance.id))

    def kill(self, instance: Instance) -> None:
        instance.killed = True
        self.commands.append(events.Kill(instance.id))

    def release(self, instance: Instance) -> None:
        """Give the place of an instance back, because its process is gone."""
        instance.place = None
        self.has_room |= self.state.places.give_back(instance.id)

    def remove(self, instance: Instance) -> None:
        self.release(instance)
        del self.state.instances[instance.id]
        self.phases.append((instance, ""))
        self.changed = True

    def phase_changes(self) -> list[events.PhaseChange]:
        """The phases that instances have entered, to be reported once the event has been handled."""
        found = []
        for instance, phase in self.phases:
            if instance.shown_phase != phase:
                why = None if phase == Phase.READY.value else instance.reason
                found.append(events.PhaseChange(instance.deployment, instance.id, instance.shown_phase, phase, why))
                instance.shown_phase = phase
        return found


# Coming


def start(turn: Transition, instance: Instance) -> None:
    turn.state.instances[instance.id] = instance
    if instance.endpoint is None:
        launch(turn, instance)
    else:
        instance.host, instance.port = instance.endpoint.address[:2]
        turn.enter(instance, Phase.STARTING)


def launch(turn: Transition, instance: Instance) -> None:
    """Start the process of an instance, if there is a place for it."""
    instance.halted = instance.final = False
    place = turn.state.places.take(instance.id, instance.spec)
    if isinstance(place, Refused):
        _wait_for_room(turn, instance, place)
        return
    if instance.unplaced or instance.hindered:
        instance.reason = None  # the old reason was a missing place, or a failed launch
    instance.place, instance.unplaced_since, instance.hindered = place, None, False
    turn.enter(instance, Phase.STARTING)
    instance.host, instance.port, instance.process, instance.doubted, instance.ejections = "", 0, None, False, 0
    instance.launched_at, instance.start_up_s = turn.now, None
    if instance.renewing:
        instance.renewing, instance.reason = False, None
    turn.commands.append(events.Launch(instance.id, instance.deployment, place, instance.recipe))


def _wait_for_room(turn: Transition, instance: Instance, refused: Refused) -> None:
    """Wait for a place: try again when there may be room, and with backoff."""
    instance.place, instance.renewing = None, False
    if instance.unplaced_since is None:
        instance.unplaced_since = turn.now
    instance.failures += 1
    instance.reason = refused.reason
    turn.enter(instance, Phase.BACKING_OFF)
    for victim in turn.state.places.in_the_way(instance.id, instance.spec):
        evict(turn, victim, Reason("preempted", {"instance": instance.id}))


def evict(turn: Transition, instance_id: str, why: Reason) -> None:
    """Stop an instance that is still wanted. It comes back when there is another place for it."""
    instance = turn.find(instance_id)
    if instance is None or instance.endpoint is not None:
        return
    if instance.leaving or instance.phase in (Phase.DRAINING, Phase.STOPPING):
        hurry(turn, instance)
        return
    instance.reason = why
    if instance.serving is not None:
        drain(turn, instance)
    elif instance.phase is Phase.STARTING:
        turn.terminate(instance)


def retry_unplaced(turn: Transition) -> None:
    """Try instances without a place again."""
    turn.has_room = False
    for instance in _unplaced_in_order(turn):
        turn.touched.add(instance.id)
        instance.failures = 0
        launch(turn, instance)


def _unplaced_in_order(turn: Transition) -> list[Instance]:
    """Unplaced instances by priority, then by the fewest placed instances of their deployment, then by waiting time."""
    instances = turn.state.instances.values()
    unplaced = [one for one in instances if one.unplaced and one.phase is Phase.BACKING_OFF]
    unplaced.sort(key=lambda one: one.unplaced_since or 0.0)
    placed = Counter(one.deployment for one in instances if one.place is not None)
    ranks = []
    for instance in unplaced:
        priority = instance.spec.ask.priority if instance.spec.ask is not None else 0
        ranks.append((-priority, placed[instance.deployment]))
        placed[instance.deployment] += 1
    return [instance for _, instance in sorted(zip(ranks, unplaced, strict=True), key=lambda one: one[0])]


def launched(turn: Transition, instance: Instance, host: str, port: int, process: str) -> None:
    """Note that the process of an instance runs. If the instance is no longer wanted, the signal is sent now."""
    instance.host, instance.port, instance.process = host, port, process
    if instance.phase is Phase.STOPPING:
        turn.commands.append(events.Kill(instance.id) if instance.killed else events.Terminate(instance.id))


def probe(turn: Transition, instance: Instance) -> None:
    """Probe the health of a ready instance, or the readiness of any other instance."""
    instance.probing = True
    if instance.idle_gap_s:
        instance.idle_gap_s = len(turn.state.instances) / IDLE_PROBES_PER_S
    timeout_s = instance.spec.lifecycle.probe_timeout_s
    if instance.phase is Phase.STARTING and instance.endpoint is None:
        # The first completion of a slow starter may be slow, too. It may take as long as the start took so far.
        timeout_s = max(timeout_s, turn.now - instance.since)
    turn.commands.append(events.Probe(instance.id, instance.phase is not Phase.READY, timeout_s, instance.endpoint))


def admit(turn: Transition, instance: Instance) -> None:
    """Take an instance into service, because it has done real work."""
    turn.enter(instance, Phase.READY)
    if instance.launched_at is not None and instance.start_up_s is None:
        instance.start_up_s = turn.now - instance.launched_at
    instance.probed_at, instance.failed_starts, instance.has_served = turn.now, 0, True
    if instance.endpoint is not None and not instance.doubted:
        instance.failures = 0  # during the start, the backoff only delayed probes
    turn.publish(instance)


# Serving


def rest(turn: Transition, instance: Instance) -> None:
    """Probe an instance less often, because it has no requests. The first interval differs between instances, so that
    instances that became idle together are not probed together."""
    shortest_s = instance.spec.lifecycle.probe_interval_s
    longer_s = max(len(turn.state.instances) / IDLE_PROBES_PER_S - shortest_s, 0.0)
    instance.idle_gap_s = shortest_s + longer_s * spread(instance.id)


def update(turn: Transition, instance: Instance, spec: DesiredDeployment, endpoint: DesiredEndpoint | None) -> None:
    """Apply a change that needs no restart."""
    instance.spec, instance.endpoint = spec, endpoint
    if instance.serving is not None:
        turn.publish(instance)


def renew(turn: Transition, instance: Instance, spec: DesiredDeployment, why: Reason) -> None:
    """The recipe of an instance that is not in service has changed: restart it, whatever failed before."""
    instance.spec, instance.recipe, instance.reason, instance.failures = spec, spec.recipe, why, 0
    instance.renewing, instance.failed_starts, instance.has_served = True, 0, False
    if instance.phase is Phase.BACKING_OFF:
        launch(turn, instance)
    elif instance.phase is Phase.STARTING:
        turn.terminate(instance)


# Failing


def doubt(turn: Transition, instance: Instance, why: Reason) -> None:
    """Send an instance no new requests until a readiness probe succeeds."""
    turn.enter(instance, Phase.UNHEALTHY)
    instance.reason = why
    turn.publish(instance)
    probe(turn, instance)


def stands_out(turn: Transition, instance: Instance, why: Reason, *, contradicted: bool) -> None:
    """Eject an instance for a time, because it has more errors than its peers. Enough others must take requests.

    If no peer has served the same requests (`contradicted` is False), the requests may be at fault. In that case the
    instance comes back as soon as a readiness probe succeeds.
    """
    limits = instance.spec.lifecycle
    peers = [one for one in turn.state.instances.values() if one.deployment == instance.deployment]
    ready = sum(one.phase is Phase.READY for one in peers)
    ejected = sum(one.phase is Phase.EJECTED for one in peers)
    if ready < 2 or not limits.max_ejected or ejected >= max(int((ready + ejected) * limits.max_ejected), 1):
        facts = {"why": why, "ready": ready, "ejected": ejected, "max_ejected": limits.max_ejected}
        instance.reason = Reason("not-ejected", facts)
        return
    if turn.now - instance.since >= limits.ejection_max_s:
        instance.ejections = 0
    instance.recalled = False
    if contradicted:
        _eject(turn, instance, why)
    else:
        _enter_ejected(turn, instance, why, 0.0)
        probe(turn, instance)


def _eject(turn: Transition, instance: Instance, why: Reason) -> None:
    limits, doublings = instance.spec.lifecycle, min(instance.ejections, 60)
    instance.ejections += 1
    _enter_ejected(turn, instance, why, min(limits.ejection_s * 2.0**doublings, limits.ejection_max_s))


def _enter_ejected(turn: Transition, instance: Instance, why: Reason, for_s: float) -> None:
    turn.enter(instance, Phase.EJECTED)
    instance.ejected_for_s = for_s
    facts = {"why": why, "for_s": for_s, "until": turn.now + for_s, "times": instance.ejections}
    instance.reason = Reason("ejected", facts)
    turn.publish(instance)


def stay_ejected(turn: Transition, instance: Instance, probe_error: str) -> None:
    """Keep an instance ejected, because the probe at the end of its ejection failed. Give up after several of these."""
    before = instance.reason
    while before is not None and before.code in ("ejected", "requests-and-probe-failed"):
        before = before.facts["why" if before.code == "ejected" else "before"]
    why = Reason("requests-and-probe-failed", {"before": before, "why": probe_error})
    failed_probes = instance.failed_probes
    if failed_probes >= instance.spec.lifecycle.failures_until_unhealthy:
        give_up(turn, instance, why)
    else:
        _eject(turn, instance, why)
        instance.failed_probes = failed_probes


def recall_ejected(turn: Transition) -> None:
    """Probe ejected instances now, once, if no other is ready: a doubtful instance is better than none."""
    instances = turn.state.instances.values()
    ready = {one.deployment for one in instances if one.phase is Phase.READY}
    for instance in instances:
        if instance.phase is Phase.EJECTED and instance.deployment not in ready and not instance.recalled:
            instance.recalled = True
            turn.touched.add(instance.id)
            if not instance.probing:
                probe(turn, instance)


def give_up(turn: Transition, instance: Instance, why: Reason, *, kill: bool = False) -> None:
    """Restart an instance that does not work. An external server is only taken out of service, then probed."""
    turn.fail(instance, why)
    if instance.endpoint is not None:
        turn.enter(instance, Phase.UNHEALTHY)
        instance.probed_at = turn.now
    elif kill:
        turn.enter(instance, Phase.STOPPING)
        turn.kill(instance)
    else:
        turn.terminate(instance)


def ended(turn: Transition, instance: Instance, why: Reason, final: Reason | None = None) -> None:
    """Note that the process of an instance has ended, or could not be started. `final`: why no further start helps, if
    the instance was starting."""
    instance.process = None
    turn.release(instance)
    if instance.leaving:
        turn.withdraw(instance, why)
        turn.remove(instance)
    elif instance.renewing:
        launch(turn, instance)
    else:
        if instance.phase is not Phase.STOPPING:  # otherwise the reason for stopping it is more precise
            instance.final = final is not None and instance.phase is Phase.STARTING
            turn.fail(instance, final if final is not None and instance.final else why)
        turn.enter(instance, Phase.BACKING_OFF)
        instance.halted = instance.has_failed_to_start and _older_remain(turn, instance)


def hinder(turn: Transition, instance: Instance, why: Reason) -> None:
    """Try an instance again soon. The runtime lacked the means to start it, so the instance has not failed."""
    turn.release(instance)
    instance.hindered, instance.reason = True, why
    turn.enter(instance, Phase.BACKING_OFF)


def retry(turn: Transition, instance: Instance) -> None:
    """Continue a stopped rollout, or start again an instance that could not start."""
    instance.failures = instance.failed_starts = 0
    launch(turn, instance)


def resume_rollouts(turn: Transition) -> None:
    """Continue stopped rollouts where no instance of an earlier recipe is left to serve."""
    for instance in turn.state.instances.values():
        if instance.halted and not _older_remain(turn, instance):
            instance.halted = False
            turn.touched.add(instance.id)


def _older_remain(turn: Transition, instance: Instance) -> bool:
    """Whether instances of an earlier recipe serve, or may come back after a crash."""
    older = [
        one
        for one in turn.state.instances.values()
        if one.deployment == instance.deployment and one.recipe != instance.recipe and not one.leaving
    ]
    return any(one.serving is not None or (one.has_served and not one.has_failed_to_start) for one in older)


# Leaving


def leave(turn: Transition, instance: Instance, why: Reason, *, in_no_hurry: bool = False) -> None:
    """Drain, stop or remove an instance that is no longer wanted."""
    instance.leaving, instance.reason, instance.in_no_hurry = True, why, in_no_hurry
    if instance.phase in (Phase.READY, Phase.UNHEALTHY, Phase.EJECTED) and instance.serving is not None:
        drain(turn, instance)
    elif instance.phase is Phase.BACKING_OFF or (instance.endpoint is not None and instance.serving is None):
        turn.remove(instance)
    elif instance.phase is Phase.STARTING:
        turn.terminate(instance)


def keep(turn: Transition, instance: Instance) -> None:
    """Take back into service an instance that was draining as surplus. It is wanted after all."""
    instance.leaving, instance.in_no_hurry, instance.reason = False, False, None
    turn.enter(instance, Phase.READY)
    instance.probed_at = turn.now
    turn.publish(instance)


def drain(turn: Transition, instance: Instance) -> None:
    """Send an instance no new requests, and let those in flight end."""
    turn.enter(instance, Phase.DRAINING)
    if instance.serving is not None:
        turn.publish(instance)
        turn.commands.append(events.AwaitDrained(instance.deployment, instance.id))


def hurry(turn: Transition, instance: Instance) -> None:
    """Note that the place of an instance is needed. The drain timeout applies from now on."""
    if instance.in_no_hurry:
        instance.in_no_hurry = False
        turn.touched.add(instance.id)
        if instance.phase is Phase.DRAINING:
            instance.since = turn.now


def drained(turn: Transition, instance: Instance, why: Reason) -> None:
    """Stop an instance: no request is in flight any more, or the drain timeout is over."""
    turn.withdraw(instance, why)
    if instance.endpoint is None:
        turn.terminate(instance)
    elif instance.leaving:
        turn.remove(instance)


# Time


def tick(turn: Transition, instance_id: str) -> None:
    instance = turn.find(instance_id)
    if instance is None:
        return
    deadline, next_probe = instance.deadline, instance.next_probe
    if deadline is not None and deadline <= turn.now:
        _phase_is_over(turn, instance)
    elif next_probe is not None and next_probe <= turn.now:
        probe(turn, instance)


def _phase_is_over(turn: Transition, instance: Instance) -> None:
    limits = instance.spec.lifecycle
    if instance.phase is Phase.STARTING:
        facts = {"start_timeout_s": limits.start_timeout_s, "probe": instance.probe_error}
        give_up(turn, instance, Reason("start-timeout", facts), kill=True)
    elif instance.phase is Phase.DRAINING:
        facts = {"drain_timeout_s": limits.drain_timeout_s, "why": instance.reason}
        drained(turn, instance, Reason("drain-timeout", facts))
    elif instance.phase is Phase.STOPPING:
        turn.kill(instance)
    elif instance.phase is Phase.EJECTED:
        probe(turn, instance)
    else:
        instance.restarts += not (instance.unplaced or instance.hindered)
        launch(turn, instance)

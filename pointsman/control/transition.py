"""What is done to instances in one turn of the controller. Every change of phase is made here, with its commands."""

from collections import Counter

from pointsman.control.desired import DesiredDeployment, DesiredEndpoint
from pointsman.control.events import (
    Admit,
    AwaitDrained,
    ControllerCommand,
    Kill,
    Launch,
    Probe,
    Terminate,
    Update,
    Withdraw,
)
from pointsman.control.instances import Instance, Phase
from pointsman.control.places import Places
from pointsman.placement.refusals import Refused


class Transition:
    """One event being handled: the time, the commands so far, and whether anything has changed for others."""

    def __init__(self, instances: dict[str, Instance], places: Places, now: float) -> None:
        self.now = now
        self.commands: list[ControllerCommand] = []
        self.changed = False
        """An instance has entered another phase, or has come or gone."""
        self.touched: set[str] = set()
        """Instances about which something else may be due now."""
        self.has_room = False
        """Somewhere there may be more room than before."""
        self._instances = instances
        self._places = places

    def find(self, instance_id: str) -> Instance | None:
        """The instance, to change it; None: it is not there."""
        self.touched.add(instance_id)
        return self._instances.get(instance_id)

    # Coming

    def start(self, instance: Instance) -> None:
        """A new one."""
        self._instances[instance.id] = instance
        if instance.endpoint is None:
            self.launch(instance)
        else:
            instance.host, instance.port, _ = instance.endpoint.address
            self._enter(instance, Phase.STARTING)

    def launch(self, instance: Instance) -> None:
        """Its process is not there, and is wanted now, if there is a place for it."""
        instance.halted = False
        place = self._places.take(instance.id, instance.spec)
        if isinstance(place, Refused):
            self._wait_for_room(instance, place)
            return
        if instance.unplaced:
            instance.reason, instance.refusal = "", None
        instance.place, instance.unplaced_since = place, None
        self._enter(instance, Phase.STARTING)
        instance.host, instance.port, instance.pid, instance.doubted = "", 0, None, False
        instance.launched_at, instance.start_up_s = self.now, None
        if instance.renewing:
            instance.renewing, instance.reason = False, ""
        self.commands.append(Launch(instance.id, instance.deployment, place, instance.recipe))

    def _wait_for_room(self, instance: Instance, refused: Refused) -> None:
        """There is no place for it: it is tried again when there may be, and now and then."""
        instance.place, instance.renewing = None, False
        if instance.unplaced_since is None:
            instance.unplaced_since = self.now
        instance.failures += 1
        instance.refusal = refused.reason
        instance.reason = str(instance.refusal)
        self._enter(instance, Phase.BACKING_OFF)
        for victim in self._places.in_the_way(instance.id, instance.spec):
            self.evict(victim, f"it makes room for {instance.id}, which is more important")

    def evict(self, instance_id: str, why: str) -> None:
        """It has to go, although it is wanted: it comes back when there is another place for it."""
        instance = self.find(instance_id)
        if instance is None or instance.endpoint is not None:
            return  # it has no place of ours
        if instance.leaving or instance.phase in (Phase.DRAINING, Phase.STOPPING):
            self.hurry(instance)
            return
        instance.reason = why
        if instance.serving is not None:
            self.drain(instance)
        elif instance.phase is Phase.STARTING:
            self._terminate(instance)

    def try_again(self) -> None:
        """There may be room for those who have no place."""
        self.has_room = False
        for instance in self._in_line():
            self.touched.add(instance.id)
            instance.failures = 0
            self.launch(instance)

    def _in_line(self) -> list[Instance]:
        """Those who have no place: the important first, then of whom there are fewest, then who waits longest."""
        unplaced = [one for one in self._instances.values() if one.unplaced and one.phase is Phase.BACKING_OFF]
        unplaced.sort(key=lambda one: one.unplaced_since or 0.0)
        placed = Counter(one.deployment for one in self._instances.values() if one.place is not None)
        ranks = []
        for instance in unplaced:
            priority = instance.spec.ask.priority if instance.spec.ask is not None else 0
            ranks.append((-priority, placed[instance.deployment]))
            placed[instance.deployment] += 1
        in_line = sorted(zip(ranks, unplaced, strict=True), key=lambda one: one[0])
        return [instance for _, instance in in_line]

    def launched(self, instance: Instance, host: str, port: int, pid: int) -> None:
        """Its process runs; somebody may have lost interest in the meantime."""
        instance.host, instance.port, instance.pid = host, port, pid
        if instance.phase is Phase.STOPPING:
            self.commands.append(Kill(instance.id) if instance.killed else Terminate(instance.id))

    def ask(self, instance: Instance) -> None:
        """Probe it: for real work, unless it is known to do that."""
        instance.asked = True
        timeout_s = instance.spec.lifecycle.probe_timeout_s
        if instance.phase is Phase.STARTING and instance.endpoint is None:
            # Slow starters may have a slow first completion. They get as long as they have had so far.
            timeout_s = max(timeout_s, self.now - instance.since)
        readiness = instance.phase is not Phase.READY
        self.commands.append(Probe(instance.id, readiness, timeout_s, instance.endpoint))

    def admit(self, instance: Instance) -> None:
        """It has done real work."""
        self._enter(instance, Phase.READY)
        if instance.launched_at is not None and instance.start_up_s is None:
            instance.start_up_s = self.now - instance.launched_at
        instance.heard_at, instance.failed_starts, instance.has_served = self.now, 0, True
        if instance.endpoint is not None and not instance.doubted:
            instance.failures = 0  # backoff only spares it probes; there is nothing to be held against it
        self._tell(instance)

    # Changing

    def update(self, instance: Instance, spec: DesiredDeployment, endpoint: DesiredEndpoint | None) -> None:
        """Something about it is wished otherwise that needs no restart."""
        instance.spec, instance.endpoint = spec, endpoint
        if instance.serving is not None:
            self._tell(instance)

    def renew(self, instance: Instance, spec: DesiredDeployment, why: str) -> None:
        """It is not in service, and the recipe has changed: another process takes its place, whatever came before."""
        instance.spec, instance.recipe, instance.reason, instance.failures = spec, spec.recipe, why, 0
        instance.renewing, instance.failed_starts, instance.has_served = True, 0, False
        if instance.phase is Phase.BACKING_OFF:
            self.launch(instance)
        elif instance.phase is Phase.STARTING:
            self._terminate(instance)

    # Failing

    def doubt(self, instance: Instance, why: str) -> None:
        """It gets no new requests until it has shown that it works."""
        self._enter(instance, Phase.UNHEALTHY)
        instance.reason, instance.doubted = why, True
        self._tell(instance)
        self.ask(instance)

    def give_up(self, instance: Instance, why: str, *, kill: bool = False) -> None:
        """It is there and does not work: restart it; one that others started is left alone for a while."""
        self._failed(instance, why)
        if instance.endpoint is not None:
            self._enter(instance, Phase.UNHEALTHY)
            instance.heard_at = self.now
        elif kill:
            self._enter(instance, Phase.STOPPING)
            self._kill(instance)
        else:
            self._terminate(instance)

    def ended(self, instance: Instance, why: str) -> None:
        """Its process is gone, or never was."""
        instance.pid = None
        self._give_back(instance)
        if instance.leaving:
            self._withdraw(instance, why)
            self._forget(instance)
        elif instance.renewing:
            self.launch(instance)
        else:
            if instance.phase is not Phase.STOPPING:  # else for a reason that we know better
                self._failed(instance, why)
            self._enter(instance, Phase.BACKING_OFF)
            instance.halted = instance.has_failed_to_start and self._older_remain(instance)

    def retry(self, instance: Instance) -> None:
        """Its rollout was stopped, and somebody wants it to go on."""
        instance.failures = instance.failed_starts = 0
        self.launch(instance)

    def resume(self) -> None:
        """Those whose rollout was stopped are tried again if nobody is left to serve in their place."""
        for instance in self._instances.values():
            if instance.halted and not self._older_remain(instance):
                instance.halted = False
                self.touched.add(instance.id)

    def _older_remain(self, instance: Instance) -> bool:
        """Whether others of an earlier recipe serve, or may come back after a crash."""
        older = [
            one
            for one in self._instances.values()
            if one.deployment == instance.deployment and one.recipe != instance.recipe and not one.leaving
        ]
        return any(one.serving is not None or (one.has_served and not one.has_failed_to_start) for one in older)

    # Leaving

    def leave(self, instance: Instance, why: str, *, in_no_hurry: bool = False) -> None:
        """It is not wanted any more."""
        instance.leaving, instance.reason, instance.in_no_hurry = True, why, in_no_hurry
        if instance.phase in (Phase.READY, Phase.UNHEALTHY) and instance.serving is not None:
            self.drain(instance)
        elif instance.phase is Phase.BACKING_OFF or (instance.endpoint is not None and instance.serving is None):
            self._forget(instance)
        elif instance.phase is Phase.STARTING:
            self._terminate(instance)

    def keep(self, instance: Instance) -> None:
        """It was on its way out, and is wanted after all."""
        instance.leaving = instance.in_no_hurry = False
        instance.reason = ""
        self._enter(instance, Phase.READY)
        instance.heard_at = self.now
        self._tell(instance)

    def drain(self, instance: Instance) -> None:
        """Let it finish what it is doing."""
        self._enter(instance, Phase.DRAINING)
        if instance.serving is not None:
            self._tell(instance)
            self.commands.append(AwaitDrained(instance.deployment, instance.id))

    def hurry(self, instance: Instance) -> None:
        """It was let to take its time, and somebody waits for it now."""
        if instance.in_no_hurry:
            instance.in_no_hurry = False
            self.touched.add(instance.id)
            if instance.phase is Phase.DRAINING:
                instance.since = self.now

    def drained(self, instance: Instance, why: str) -> None:
        """It has finished, or has had long enough."""
        self._withdraw(instance, why)
        if instance.endpoint is None:
            self._terminate(instance)
        elif instance.leaving:
            self._forget(instance)

    # Time

    def tick(self, instance_id: str) -> None:
        """Do what is due about it."""
        instance = self.find(instance_id)
        if instance is None:
            return
        deadline, probe = instance.deadline, instance.next_probe
        if deadline is not None and deadline <= self.now:
            self._phase_is_over(instance)
        elif probe is not None and probe <= self.now:
            self.ask(instance)

    def _phase_is_over(self, instance: Instance) -> None:
        limits = instance.spec.lifecycle
        if instance.phase is Phase.STARTING:
            why = f"not ready {limits.start_timeout_s:g} s after its launch"
            self.give_up(instance, f"{why}: {instance.silence}" if instance.silence else why, kill=True)
        elif instance.phase is Phase.DRAINING:
            self.drained(instance, f"not drained in {limits.drain_timeout_s:g} s: {instance.reason}")
        elif instance.phase is Phase.STOPPING:
            self._kill(instance)
        else:
            instance.restarts += not instance.unplaced
            self.launch(instance)

    # Parts of the above

    def _enter(self, instance: Instance, phase: Phase) -> None:
        instance.phase, instance.since = phase, self.now
        instance.asked, instance.heard_at, instance.silent, instance.silence = False, None, 0, ""
        instance.killed = False
        self.changed = True

    def _tell(self, instance: Instance) -> None:
        """Say what is new to those who send requests."""
        told = instance.served(instance.phase is Phase.READY)
        if instance.serving is None:
            self.commands.append(Admit(instance.deployment, told))
        elif instance.serving != told:
            self.commands.append(Update(instance.deployment, told))
        instance.serving = told

    def _withdraw(self, instance: Instance, why: str) -> None:
        if instance.serving is not None:
            instance.serving = None
            self.commands.append(Withdraw(instance.deployment, instance.id, why))

    def _failed(self, instance: Instance, why: str) -> None:
        long_ready = self.now - instance.since >= instance.spec.lifecycle.backoff_max_s
        if instance.phase is Phase.READY and long_ready:
            instance.failures = 0
        instance.failures += 1
        instance.failed_starts += instance.phase is Phase.STARTING
        instance.reason = why
        self._withdraw(instance, why)

    def _terminate(self, instance: Instance) -> None:
        self._enter(instance, Phase.STOPPING)
        self.commands.append(Terminate(instance.id))

    def _kill(self, instance: Instance) -> None:
        instance.killed = True
        self.commands.append(Kill(instance.id))

    def _give_back(self, instance: Instance) -> None:
        instance.place = None
        if self._places.give_back(instance.id):
            self.has_room = True

    def _forget(self, instance: Instance) -> None:
        self._give_back(instance)
        del self._instances[instance.id]
        self.changed = True

"""One instance: where it is in its life, what is known of it, and when something is due.

    from            on                                              to
    --------------  ----------------------------------------------  ------------------------------------------------
    (not there)     it is wanted                                    starting: Launch
    starting        Launched                                        starting: Probe (readiness), until it is answered
    starting        Answered, with real work done                   ready: Admit
    starting        LaunchFailed, Exited                            backing off
    starting        start_timeout                                   stopping: Kill
    ready           probe_interval                                  ready: Probe (health)
    ready           failures_until_unhealthy times Silent           stopping: Withdraw, Terminate
    ready           RequestsFail                                    unhealthy: Update (nothing new), Probe (readiness)
    ready           RequestsFail again, within probe_interval       stopping: Withdraw, Terminate
    unhealthy       Answered, with real work done                   ready: Update (as before)
    unhealthy       Silent                                          stopping: Withdraw, Terminate
    ready, unh.     Exited                                          backing off: Withdraw
    ready, unh.     it is not wanted any more, or PlaceNeeded       draining: Update (nothing new), AwaitDrained
    draining        Drained; drain_timeout, unless in no hurry      stopping: Withdraw, Terminate
    draining        it was one too many, and is wanted after all    ready: Update (as before)
    draining        Exited                                          (gone): Withdraw
    stopping        stop_grace                                      stopping: Kill
    stopping        Exited                                          backing off; (gone) if it is not wanted any more;
                                                                    starting: Launch, if only its recipe has changed
    backing off     backoff                                         starting: Launch
    backing off     its recipe has changed                          starting: Launch
    backing off     start_attempts failed, older ones serve         backing off, for good: the rollout is stopped
    starting        its recipe has changed                          stopping: Terminate
    starting        it is not wanted any more, or PlaceNeeded       stopping: Terminate
    backing off     it is not wanted any more                       (gone)

A server that somebody else started is never launched, terminated or killed. While it starts it is probed with backoff,
however long that takes. When it falls silent it is withdrawn and unhealthy, and probed with backoff until it is ready
again. Once drained it is gone; if an operator asked for that, it stays, out of service.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from pointsman.control.desired import DesiredDeployment, DesiredEndpoint
from pointsman.placement.asks import Place
from pointsman.reasons import Reason
from pointsman.scaling.deployment import ReplicaCounts
from pointsman.types import ExecutionInstance

FIRST_PROBES_S = 0.05
"""Between two probes of an instance that has just been launched; they become rarer."""
PATIENCE = 0.1
"""One that has been starting for a second is asked again after this share of it, so that little time is lost."""


class Phase(Enum):
    """Where an instance is in its life."""

    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKING_OFF = "backing off"


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An instance, for people to look at."""

    id: str
    deployment: str
    phase: Phase
    host: str
    """Empty: not known yet."""
    port: int
    tls: bool
    process: str | None
    """The runtime's name for its process; None if it has none of ours."""
    in_service: bool
    """Requests are on it, or may be sent to it."""
    restarts: int
    reason: Reason | None
    """What went wrong last, or why it leaves; None if nothing did."""
    since: float
    """It is in its phase since then, or without a place."""
    until: float | None
    """Its phase ends then, if nothing else happens before: it is started again, stopped, or killed."""
    drain_asked: bool
    """An operator wants it out of service."""
    endpoint: DesiredEndpoint | None
    """Who it is, if somebody else started it."""
    place: Place | None = None
    """Where it is, if it was placed."""
    unplaced: bool = False
    """There is no place for it."""
    halted: bool = False
    """It could not be started so often that it is not tried again: those from before its recipe serve on."""
    recipe: str = ""
    """What its process was started from, or will be started from next."""
    start_up_s: float | None = None
    """From the launch of its process until it was ready; None: it was not yet, or we did not see its launch."""
    has_failed: bool = False
    """It ended, hung or did not start, and has not been ready since."""


def replica_counts(instances: Iterable[InstanceStatus], deployments: Sequence[str]) -> ReplicaCounts:
    """Replicas of a deployment, or of the shards of a node: a replica is one instance of each."""
    mine = [one for one in instances if one.deployment in deployments and one.endpoint is None]
    failed = (one for one in mine if one.has_failed and one.reason)
    return ReplicaCounts(
        ready=min(_counts(mine, deployments, Phase.READY)),
        starting=max(_counts(mine, deployments, Phase.STARTING, Phase.BACKING_OFF)),
        unplaced=max(_counts([one for one in mine if one.unplaced], deployments, *Phase)),
        trouble=next((_not_running(one) for one in failed), None),
        start_ups={
            (one.id, one.process): one.start_up_s
            for one in mine
            if one.start_up_s is not None and one.process is not None
        },
    )


def _not_running(one: InstanceStatus) -> Reason:
    return Reason("instance-not-running", {"instance": one.id, "why": str(one.reason)})


def _counts(instances: Iterable[InstanceStatus], deployments: Sequence[str], *phases: Phase) -> list[int]:
    """By deployment, how many instances are in one of these phases."""
    counted = Counter(one.deployment for one in instances if one.phase in phases)
    return [counted[name] for name in deployments]


class Instance(msgspec.Struct, kw_only=True):
    """What the controller knows of an instance. Only a `Turn` changes it."""

    id: str
    spec: DesiredDeployment
    """Its deployment as it was when it was started or last updated; its lifecycle is always the newest."""
    recipe: str
    """What its process was started from, or will be started from next."""
    endpoint: DesiredEndpoint | None = None
    phase: Phase = Phase.STARTING
    since: float = 0.0
    host: str = ""
    port: int = 0
    process: str | None = None
    serving: ExecutionInstance | None = None
    """What was last said of it to those who send requests; None: it is not in service."""
    restarts: int = 0
    failures: int = 0
    """In a row; the backoff doubles with each."""
    failed_starts: int = 0
    """In a row, of this recipe: it has never been ready since."""
    halted: bool = False
    """It is not tried again, as long as older ones serve."""
    warmth: float = 0.0
    """How much it has in its cache, as far as anybody has said."""
    launched_at: float | None = None
    """Its process; None: before our time."""
    start_up_s: float | None = None
    """From then until it was ready."""
    has_served: bool = False
    """Of this recipe: it was ready once, and would be again after a crash."""
    reason: Reason | None = None
    asked: bool = False
    """A probe is under way."""
    heard_at: float | None = None
    """When the last probe ended; None: there was none in this phase."""
    silent: int = 0
    """Probes in a row that failed."""
    silence: str = ""
    """What the last probe that failed said."""
    doubted: bool = False
    """Requests have failed on this process before, and a probe then spoke for it."""
    killed: bool = False
    renewing: bool = False
    """When its process has ended, it is launched again at once."""
    drain_asked: bool = False
    outdated: Reason | None = None
    """Why another is to take its place; None if it may stay."""
    leaving: bool = False
    """It is not wanted any more; there is no way back."""
    in_no_hurry: bool = False
    """Nobody waits for it to go: requests on it may take as long as they take."""
    place: Place | None = None
    """Where it is; None: nowhere, or wherever its runtime started it."""
    unplaced_since: float | None = None
    """When there was no place for it for the first time; None: it has one, or has not been tried."""

    @property
    def deployment(self) -> str:
        """The name of its deployment."""
        return self.spec.name

    @property
    def unplaced(self) -> bool:
        """There was no place for it when it was last tried."""
        return self.unplaced_since is not None

    @property
    def may_stay(self) -> bool:
        """It is on its way out only because there were too many, and serves still."""
        return self.in_no_hurry and self.phase is Phase.DRAINING and self.serving is not None and not self.doubted

    @property
    def foreign(self) -> bool:
        """It was adopted, and of its deployment only the name is known as yet."""
        return not self.spec.model

    @property
    def tls(self) -> bool:
        """Whether it is spoken to over HTTPS."""
        return self.endpoint is not None and self.endpoint.address.tls

    @property
    def has_failed_to_start(self) -> bool:
        """As often as one should try."""
        return self.failed_starts >= self.spec.lifecycle.start_attempts

    @property
    def backoff_s(self) -> float:
        """How long to wait after so many failures."""
        limits = self.spec.lifecycle
        doublings = min(max(self.failures - 1, 0), 60)
        return min(limits.backoff_s * 2.0**doublings, limits.backoff_max_s)

    @property
    def deadline(self) -> float | None:
        """When its phase ends by itself."""
        limits = self.spec.lifecycle
        if self.phase is Phase.STARTING and self.endpoint is None:
            return self.since + limits.start_timeout_s
        if self.phase is Phase.DRAINING and self.serving is not None and not self.in_no_hurry:
            return self.since + limits.drain_timeout_s
        if self.phase is Phase.STOPPING and not self.killed:
            return self.since + limits.stop_grace_s
        if self.phase is Phase.BACKING_OFF and not self.halted:
            return self.since + self.backoff_s
        return None

    @property
    def next_probe(self) -> float | None:
        """When it is to be asked again; None: not now, or an answer is awaited."""
        if self.asked or (self.endpoint is None and self.process is None):
            return None
        interval = self._probe_interval_s
        if interval is None:
            return None
        return self.since if self.heard_at is None else self.heard_at + interval

    @property
    def _probe_interval_s(self) -> float | None:
        limits = self.spec.lifecycle
        if self.phase is Phase.READY:
            return limits.probe_interval_s
        if self.endpoint is not None and self.phase in (Phase.STARTING, Phase.UNHEALTHY):
            return self.backoff_s
        if self.phase is Phase.STARTING:
            taken = 0.0 if self.heard_at is None else self.heard_at - self.since
            return min(max(taken * PATIENCE, FIRST_PROBES_S), limits.probe_interval_s)
        return None

    @property
    def due(self) -> float | None:
        """When something must be done about it, if nothing happens before."""
        deadline, probe = self.deadline, self.next_probe
        if deadline is None or probe is None:
            return probe if deadline is None else deadline
        return min(deadline, probe)

    def served(
        self, accepting: bool, spec: DesiredDeployment | None = None, endpoint: DesiredEndpoint | None = None
    ) -> ExecutionInstance:
        """What those who send requests must know of it; as it would be with another `spec` and `endpoint`, if given."""
        spec, endpoint = spec or self.spec, endpoint or self.endpoint
        limit, labels = spec.max_concurrency, dict(spec.labels)
        if endpoint is not None:
            limit = limit if endpoint.max_concurrency is None else endpoint.max_concurrency
            labels |= endpoint.labels
        elif limit is None:
            limit = spec.engine_slots
        return ExecutionInstance(
            instance_id=self.id,
            host=self.host,
            port=self.port,
            tls=self.tls,
            model_name=spec.model,
            adapters=frozenset(spec.aliases),
            max_concurrency=limit,
            labels=labels,
            can_accept_request=accepting,
        )


def instance_status(one: Instance) -> InstanceStatus:
    return InstanceStatus(
        id=one.id,
        deployment=one.deployment,
        phase=one.phase,
        host=one.host,
        port=one.port,
        tls=one.tls,
        process=one.process,
        in_service=one.serving is not None,
        restarts=one.restarts,
        reason=_reason(one),
        since=one.since if one.unplaced_since is None else one.unplaced_since,
        until=one.deadline,
        drain_asked=one.drain_asked,
        endpoint=one.endpoint,
        place=one.place,
        unplaced=one.unplaced,
        halted=one.halted,
        recipe=one.recipe,
        start_up_s=one.start_up_s,
        has_failed=one.failures > 0 and not one.unplaced and one.phase in (Phase.STARTING, Phase.BACKING_OFF),
    )


def _reason(one: Instance) -> Reason | None:
    if one.halted:
        return Reason("rollout-stopped", {"why": one.reason})
    if one.outdated is not None:
        return Reason("to-be-replaced", {"why": one.outdated})
    if one.reason is None and one.silence and one.phase is Phase.STARTING:
        return Reason("not-ready-yet", {"probe": one.silence})
    return one.reason

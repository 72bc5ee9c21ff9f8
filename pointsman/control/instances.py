"""Instances: their phases, what is known about each, and when its next action is due.

    from            on                                              to
    --------------  ----------------------------------------------  ------------------------------------------------
    (not there)     it is wanted                                    starting: Launch
    starting        Launched                                        starting: Probe (readiness), until it is answered
    starting        Answered, with real work done                   ready: Admit
    starting        LaunchFailed, Exited                            backing off
    starting        LaunchFailed for a reason of the runtime        backing off for probe_interval; counts as no failure
    starting        LaunchFailed, Exited, finally                   backing off, for good: it cannot start
    starting        start_timeout                                   stopping: Kill
    ready           probe_interval                                  ready: Probe (health)
    ready           WentIdle, GotRequest                            ready: Probe less often, as often as before
    any             ProbeNotMade                                    the same: Probe later; counts as no failure
    ready           failures_until_unhealthy times Silent           stopping: Withdraw, Terminate
    ready           RequestsFail                                    unhealthy: Update (nothing new), Probe (readiness)
    ready           RequestsFail again, within probe_interval       stopping: Withdraw, Terminate
    ready           OutOfReach                                      unhealthy: Update (nothing new), Probe (readiness)
    unhealthy       Answered, with real work done                   ready: Update (as before)
    unhealthy       Silent                                          stopping: Withdraw, Terminate
    ready           StandsOut, and enough others are ready          ejected: Update (nothing new)
    ready           StandsOut, and no peer contradicts it           ejected: Update (nothing new), Probe (readiness)
    ejected         ejection, or no other is ready                  ejected: Probe (readiness)
    ejected         Answered, with real work done                   ready: Update (as before)
    ejected         Silent                                          ejected, for longer
    ejected         failures_until_unhealthy times Silent           stopping: Withdraw, Terminate
    in service      Exited                                          backing off: Withdraw
    in service      it is no longer wanted, or PlaceNeeded          draining: Update (nothing new), AwaitDrained
    draining        Drained; drain_timeout, unless in no hurry      stopping: Withdraw, Terminate
    draining        it was one too many, and is wanted after all    ready: Update (as before)
    draining        Exited                                          (gone): Withdraw
    stopping        stop_grace                                      stopping: Kill
    stopping        Exited                                          backing off; (gone) if it is no longer wanted;
                                                                    starting: Launch, if only its recipe has changed
    backing off     backoff                                         starting: Launch
    backing off     its recipe has changed                          starting: Launch
    backing off     start_attempts failed, older ones serve         backing off, for good: the rollout is stopped
    backing off     Applied, with its deployment in `retry`         starting: Launch, if it was there for good
    starting        its recipe has changed                          stopping: Terminate
    starting        it is no longer wanted, or PlaceNeeded          stopping: Terminate
    backing off     it is no longer wanted                          (gone)

A server that was started elsewhere is never launched, terminated or killed. It is probed with backoff until it is
ready. When it stops answering, it is withdrawn and unhealthy, and probed with backoff until it is ready again. After
it has drained, it is gone. If an operator drained it, it stays out of service instead.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from math import ceil
from zlib import crc32

import msgspec

from pointsman.control.desired import DesiredDeployment, DesiredEndpoint, EngineAccess, HourlyPrice
from pointsman.placement.asks import Place
from pointsman.reasons import Reason
from pointsman.scaling.deployment import ReplicaCounts
from pointsman.types import ExecutionInstance

FIRST_PROBES_S = 0.05
"""Interval of the first probes after a launch."""
PROBE_BACKOFF = 0.1
"""While an instance starts, the interval of probes grows to this share of the time since its launch."""


IDLE_PROBES_PER_S = 50.0
"""Maximum probes of all idle instances together: the more there are, the less often each is probed."""

IDLE_TICK_S = 0.25
"""Idle instances are probed at multiples of this, several at once: a wake-up costs more than a probe."""


def spread(instance_id: str) -> float:
    """A number from 0 to 1 that differs between instances, so that they do not all act at the same time."""
    return crc32(instance_id.encode()) / 2**32


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    EJECTED = "ejected"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKING_OFF = "backing off"


RUNNING = frozenset({Phase.STARTING, Phase.READY, Phase.UNHEALTHY, Phase.EJECTED})
"""Phases of instances that run and should keep running."""


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an instance, for readers outside the controller."""

    id: str
    deployment: str
    phase: Phase
    host: str
    """Empty if the address is not known yet."""
    port: int
    tls: bool
    process: str | None
    """The runtime's name for the process of the instance; None if Pointsman does not run that."""
    in_service: bool
    """Whether the instance may have requests in flight, or may be sent new ones."""
    restarts: int
    reason: Reason | None
    """The last failure of the instance, or why it leaves; None if neither applies."""
    since: float
    """When the instance entered its phase, or lost its place."""
    until: float | None
    """When the phase times out and the instance is restarted, stopped or killed; None if there is no timeout."""
    drain_asked: bool
    """Whether an operator drains it."""
    endpoint: DesiredEndpoint | None
    """None if the instance is a Pointsman process."""
    place: Place | None = None
    """None if the instance has no place, or needs none."""
    unplaced: bool = False
    hindered: bool = False
    """Whether the runtime lacked the means to launch it."""
    halted: bool = False
    """Whether the rollout is stopped: the instance failed to start too often, and instances of the old recipe serve."""
    final: bool = False
    """Whether the instance cannot start, and is not tried again until its deployment is applied again."""
    recipe: str = ""
    """The present or future recipe of its process."""
    start_up_s: float | None = None
    """Seconds from launch to ready; None if the instance was not ready yet, or if its launch was not observed."""
    has_failed: bool = False
    """Whether the instance crashed, hung or did not start, and has not been ready since."""
    given_up: bool = False
    """Whether the start has failed so often that no request waits for the instance. It is still tried again."""
    leaving: bool = False
    """Whether it is no longer desired."""
    probe_at: float | None = None
    """When the next probe is due; None if the instance is ready or not probed, or if a probe is in flight."""


def running_counts(instances: Iterable[InstanceStatus]) -> Counter[str]:
    """Running instances, by deployment."""
    return Counter(one.deployment for one in instances if one.phase in RUNNING)


def replica_counts(instances: Iterable[InstanceStatus], deployments: Sequence[str]) -> ReplicaCounts:
    """Replicas of a deployment or of a sharded node. A replica of a sharded node is one instance of each shard."""
    mine = [one for one in instances if one.deployment in deployments and one.endpoint is None]
    failed = next((one for one in mine if one.has_failed and one.reason), None)
    return ReplicaCounts(
        ready=min(_counts(mine, deployments, Phase.READY)),
        starting=max(_counts(mine, deployments, Phase.STARTING, Phase.BACKING_OFF)),
        unplaced=max(_counts([one for one in mine if one.unplaced], deployments, *Phase)),
        trouble=None if failed is None else _not_running(failed),
        is_final=failed is not None and failed.final,
        start_ups={
            (one.id, one.process): one.start_up_s
            for one in mine
            if one.start_up_s is not None and one.process is not None
        },
    )


def _not_running(one: InstanceStatus) -> Reason:
    return Reason(
        "instance-not-running", {"instance": one.id, "why": None if one.reason is None else one.reason.plain()}
    )


def _counts(instances: Iterable[InstanceStatus], deployments: Sequence[str], *phases: Phase) -> list[int]:
    """The number of instances in these phases, by deployment."""
    counted = Counter(one.deployment for one in instances if one.phase in phases)
    return [counted[name] for name in deployments]


class Instance(msgspec.Struct, kw_only=True):
    """The controller's state of an instance. Only event handlers and transitions change it."""

    id: str
    spec: DesiredDeployment
    """The deployment as it was at the start or last update of the instance, with the current lifecycle."""
    recipe: str
    endpoint: DesiredEndpoint | None = None
    phase: Phase = Phase.STARTING
    shown_phase: str = ""
    """The last phase that was reported; empty if no phase was reported."""
    since: float = 0.0
    host: str = ""
    port: int = 0
    process: str | None = None
    serving: ExecutionInstance | None = None
    """The state that was sent to dispatchers; None if the instance is not in service."""
    restarts: int = 0
    failures: int = 0
    """Consecutive failures; the backoff doubles with each."""
    failed_starts: int = 0
    """Consecutive failed starts with this recipe."""
    halted: bool = False
    """Whether the restart of the instance waits while instances of an earlier recipe serve."""
    final: bool = False
    """Whether its start has failed for a reason that no further try can change."""
    hindered: bool = False
    """Whether the runtime lacked the means to launch it."""
    warmth: float = 0.0
    """The amount of data that the instance has cached; 0 if unknown."""
    launched_at: float | None = None
    """None if the launch was not observed."""
    start_up_s: float | None = None
    has_served: bool = False
    """Whether the instance was ready once with this recipe. A restart after a crash may then help."""
    reason: Reason | None = None
    probing: bool = False
    probed_at: float | None = None
    """When the last probe in this phase ended; None if there was no such probe."""
    idle_gap_s: float = 0.0
    """Minimum interval between probes while the instance is idle; 0 if it is not idle."""
    failed_probes: int = 0
    """Consecutive failed probes."""
    probe_error: str = ""
    unseen_s: float = 0.0
    """Time in this phase that does not count, because the runtime could not probe the instance."""
    doubted: bool = False
    """Whether requests failed on this process before a probe that succeeded."""
    ejections: int = 0
    """Consecutive ejections of this process; the ejection time doubles with each."""
    ejected_for_s: float = 0.0
    """How long the ejected instance gets no requests; 0 while a probe that was sent at once is in flight."""
    recalled: bool = False
    """Whether the instance was probed early because no other instance was ready."""
    killed: bool = False
    renewing: bool = False
    """Whether the instance is launched again as soon as its process has ended."""
    drain_asked: bool = False
    outdated: Reason | None = None
    """Why another instance replaces this one; None if this one may stay."""
    leaving: bool = False
    """Whether it is no longer desired."""
    in_no_hurry: bool = False
    """Whether there is no drain timeout, because the place of the instance is not needed."""
    place: Place | None = None
    unplaced_since: float | None = None
    """When the instance was first refused a place; None if it has a place, or no place was looked for."""

    @property
    def deployment(self) -> str:
        return self.spec.name

    @property
    def unplaced(self) -> bool:
        return self.unplaced_since is not None

    @property
    def may_stay(self) -> bool:
        """Whether the instance still serves, and drains only because there were too many instances."""
        is_sound = not self.doubted and not self.ejections
        return self.in_no_hurry and self.phase is Phase.DRAINING and self.serving is not None and is_sound

    @property
    def foreign(self) -> bool:
        """Whether the instance was adopted, and only the name of its deployment is known yet."""
        return not self.spec.model

    @property
    def tls(self) -> bool:
        return self.endpoint is not None and self.endpoint.address.tls

    @property
    def has_failed_to_start(self) -> bool:
        return self.final or self.failed_starts >= self.spec.lifecycle.start_attempts

    @property
    def backoff_s(self) -> float:
        limits = self.spec.lifecycle
        doublings = min(max(self.failures - 1, 0), 60)
        return min(limits.backoff_s * 2.0**doublings, limits.backoff_max_s)

    @property
    def deadline(self) -> float | None:
        """When the phase times out; None if it has no timeout."""
        limits = self.spec.lifecycle
        if self.phase is Phase.STARTING and self.endpoint is None:
            return self.since + limits.start_timeout_s + self.unseen_s
        if self.phase is Phase.EJECTED and not self.probing:
            again = 0.0 if self.probed_at is None else self.probed_at + limits.probe_interval_s
            return max(self.since + self.ejected_for_s, again)
        if self.phase is Phase.DRAINING and self.serving is not None and not self.in_no_hurry:
            return self.since + limits.drain_timeout_s
        if self.phase is Phase.STOPPING and not self.killed:
            return self.since + limits.stop_grace_s
        if self.phase is Phase.BACKING_OFF and not (self.halted or self.final):
            return self.since + (limits.probe_interval_s if self.hindered else self.backoff_s)
        return None

    @property
    def next_probe(self) -> float | None:
        """When the next probe is due; None if no probe is due, or if a probe is in flight."""
        if self.probing or (self.endpoint is None and self.process is None):
            return None
        interval = self._probe_interval_s
        if interval is None:
            return None
        if self.probed_at is not None and self.idle_gap_s > interval and not self.failed_probes:
            return ceil((self.probed_at + self.idle_gap_s) / IDLE_TICK_S) * IDLE_TICK_S
        if self.unseen_s:  # probes that cannot be made must not use up the remaining resources
            interval = max(interval, self.spec.lifecycle.probe_interval_s)
        return self.since if self.probed_at is None else self.probed_at + interval

    @property
    def _probe_interval_s(self) -> float | None:
        limits = self.spec.lifecycle
        if self.phase is Phase.READY or (self.phase is Phase.UNHEALTHY and self.endpoint is None):
            return limits.probe_interval_s
        if self.endpoint is not None and self.phase in (Phase.STARTING, Phase.UNHEALTHY):
            return self.backoff_s
        if self.phase is Phase.STARTING:
            taken = 0.0 if self.probed_at is None else self.probed_at - self.since
            return min(max(taken * PROBE_BACKOFF, FIRST_PROBES_S), limits.probe_interval_s)
        return None

    @property
    def due(self) -> float | None:
        deadline, probe = self.deadline, self.next_probe
        if deadline is None or probe is None:
            return probe if deadline is None else deadline
        return min(deadline, probe)

    def served(
        self, accepting: bool, spec: DesiredDeployment | None = None, endpoint: DesiredEndpoint | None = None
    ) -> ExecutionInstance:
        """The state that dispatchers must have for this instance, with its own or another `spec` and `endpoint`."""
        spec, endpoint = spec or self.spec, endpoint or self.endpoint
        limit, labels = spec.max_concurrency, dict(spec.labels)
        access = endpoint or spec.engine or EngineAccess()
        if endpoint is not None:
            limit = limit if endpoint.max_concurrency is None else endpoint.max_concurrency
            labels |= endpoint.labels
        elif limit is None:
            limit = spec.engine_slots
        price, gpus = spec.price, 0 if self.place is None else len(self.place.gpus)  # no known GPU without a place
        if endpoint is not None:
            gpus, price = endpoint.gpus, _own_price(endpoint, price)
        return ExecutionInstance(
            instance_id=self.id,
            host=self.host,
            port=self.port,
            tls=self.tls,
            model_name=spec.model,
            adapters=frozenset((*spec.aliases, *spec.adapters)),
            engine_names=access.names(spec.model, spec.aliases),
            serves_messages=access.messages_api == "native",
            key=access.key,
            max_concurrency=limit,
            tensor_parallel_size=1 if self.place is None else self.place.tensor_parallel_size,
            pipeline_parallel_size=1 if self.place is None else self.place.pipeline_parallel_size,
            gpu_count=gpus,
            price_per_gpu_hour=price.per_gpu_hour,
            price_per_hour=price.of_instance(gpus),
            throughput_tokens_per_sec=price.throughput(gpus),
            labels=labels,
            can_accept_request=accepting,
            closed=self.reason if self.phase is Phase.EJECTED else None,
        )


def _own_price(endpoint: DesiredEndpoint, price: HourlyPrice) -> HourlyPrice:
    per_hour = price.per_instance_hour if endpoint.price_per_hour is None else endpoint.price_per_hour
    rate = price.tokens_per_second if endpoint.tokens_per_second is None else endpoint.tokens_per_second
    return HourlyPrice(per_gpu_hour=price.per_gpu_hour, per_instance_hour=per_hour, tokens_per_second=rate)


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
        hindered=one.hindered,
        halted=one.halted,
        final=one.final,
        recipe=one.recipe,
        start_up_s=one.start_up_s,
        has_failed=one.failures > 0 and not one.unplaced and one.phase in (Phase.STARTING, Phase.BACKING_OFF),
        given_up=one.has_failed_to_start,
        leaving=one.leaving,
        probe_at=None if one.phase is Phase.READY else one.next_probe,
    )


def _reason(one: Instance) -> Reason | None:
    if one.halted:
        return Reason("rollout-stopped", {"why": one.reason})
    if one.final:
        return Reason("cannot-start", {"why": one.reason})
    if one.outdated is not None:
        return Reason("to-be-replaced", {"why": one.outdated})
    if one.reason is None and one.probe_error and one.phase is Phase.STARTING:
        return Reason("not-ready-yet", {"probe": one.probe_error})
    return one.reason

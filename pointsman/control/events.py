"""The events and commands of the controller. A runtime carries out commands and reports events.

A runtime carries out commands in their order. Each `Launch` leads to `LaunchFailed`, or to `Launched` and later
`Exited`, the last event of that process. Each `Probe` leads to one `Answered`, `Silent` or `ProbeNotMade`, unless
another `Probe` of the same instance has replaced it or the process has ended.
"""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from pointsman.control.desired import Desired, DesiredEndpoint
from pointsman.placement.asks import Place
from pointsman.reasons import Reason
from pointsman.types import ExecutionInstance, Worker


class ControllerEvent(msgspec.Struct, frozen=True):
    """Something that happened."""


class Applied(ControllerEvent, frozen=True):
    """The desired state has changed."""

    desired: Desired
    retry: frozenset[str] = frozenset()
    """Deployments whose stopped rollout is to be tried again."""
    warmth: Mapping[str, float] = {}
    """Amount of cached data per instance. Among otherwise equal instances, the one with the least is stopped first."""


class Adopted(ControllerEvent, frozen=True):
    """A process of an earlier plane was taken over. Reported after the first `Applied`, it would be started again."""

    instance_id: str
    deployment: str
    recipe: str
    host: str
    port: int
    process: str
    """The runtime's name for the process; the controller only compares these names."""
    place: Place | None = None


class WorkerSeen(ControllerEvent, frozen=True):
    """A worker is known, or has changed."""

    worker: Worker


class WorkerLost(ControllerEvent, frozen=True):
    """A worker and all its processes are gone."""

    name: str
    why: str


class Launched(ControllerEvent, frozen=True):
    instance_id: str
    process: str
    host: str
    port: int


class LaunchFailed(ControllerEvent, frozen=True):
    instance_id: str
    why: str
    local: str = ""
    """What the runtime lacks, such as file descriptors; empty if the process to start is at fault."""
    final: Reason | None = None
    """Why no further try can succeed before a change, and what to do; None if a further try may succeed."""


class Exited(ControllerEvent, frozen=True):
    """The process of an instance and its children have ended."""

    instance_id: str
    why: str
    """The cause, for operators, such as: exit code 1: the last line of its log."""
    final: Reason | None = None
    """For a starting instance: why no further try can succeed before a change, and what to do; None if a try may."""


class Answered(ControllerEvent, frozen=True):
    """A probe of an instance succeeded."""

    instance_id: str
    readiness: bool
    """Whether the instance completed a request. False if it only answered a health check."""
    ago_s: float = 0.0
    """How long ago the instance answered a request that made this probe unnecessary."""


class Silent(ControllerEvent, frozen=True):
    """A probe of an instance failed or timed out."""

    instance_id: str
    why: str


class ProbeNotMade(ControllerEvent, frozen=True):
    """The runtime itself could not probe an instance: nothing is known about the instance."""

    instance_id: str
    why: str


class WentIdle(ControllerEvent, frozen=True):
    """No request was in flight on an instance between its last two probes: it may be probed less often."""

    instance_id: str


class GotRequest(ControllerEvent, frozen=True):
    """An instance that was idle was sent a request."""

    instance_id: str


class RequestsFail(ControllerEvent, frozen=True):
    """Several requests in a row have failed on an instance."""

    instance_id: str
    why: Reason


class OutOfReach(ControllerEvent, frozen=True):
    """The worker of an instance does not answer. The instance may keep running: its state is unknown."""

    instance_id: str
    why: str


class StandsOut(ControllerEvent, frozen=True):
    """An instance has more errors than its peers for the same traffic."""

    instance_id: str
    why: Reason
    contradicted: bool
    """Whether peers have served requests that this instance answered with errors. If not, the requests may be at
    fault."""


class Drained(ControllerEvent, frozen=True):
    """No request is in flight on an instance any more."""

    instance_id: str


class DrainAsked(ControllerEvent, frozen=True):
    """An operator drains an instance. It is replaced."""

    instance_id: str


class PlaceNeeded(ControllerEvent, frozen=True):
    """The place of an instance is needed. The instance is drained, and comes back when there is another place."""

    instance_id: str
    why: Reason


class PlaneStopping(ControllerEvent, frozen=True):
    """Drain and stop everything, and start nothing."""


class ControllerTimer(ControllerEvent, frozen=True):
    """The time of the last `WakeController` has come."""


class Launch(msgspec.Struct, frozen=True):
    """Start a process for an instance, on a free port."""

    instance_id: str
    deployment: str
    place: Place | None = None
    """None if the process may run anywhere."""
    recipe: str = ""
    """The recipe of its process. After a stopped rollout, an instance may come back with the earlier recipe."""


class Probe(msgspec.Struct, frozen=True):
    """Probe an instance now, instead of any earlier probe; report the result within the timeout."""

    instance_id: str
    readiness: bool
    timeout_s: float
    endpoint: DesiredEndpoint | None = None
    """The server, if it was started elsewhere. Only the limit and labels of an endpoint ever change."""


class Admit(msgspec.Struct, frozen=True):
    """Take an instance into service."""

    deployment: str
    instance: ExecutionInstance


class Update(msgspec.Struct, frozen=True):
    """An instance in service has changed: its limit, its labels, or whether it takes new requests."""

    deployment: str
    instance: ExecutionInstance


class Withdraw(msgspec.Struct, frozen=True):
    """Take an instance out of service. Its requests are sent elsewhere where possible."""

    deployment: str
    instance_id: str
    why: Reason


class AwaitDrained(msgspec.Struct, frozen=True):
    """Report `Drained` as soon as no request is in flight on the instance."""

    deployment: str
    instance_id: str


class Terminate(msgspec.Struct, frozen=True):
    """Ask a process and its children to end. Sent again on `Launched` if it was sent before that."""

    instance_id: str


class Kill(msgspec.Struct, frozen=True):
    """End a process and its children at once. Sent again on `Launched` if it was sent before that."""

    instance_id: str


class WakeController(msgspec.Struct, frozen=True):
    """Report `ControllerTimer` at this time, unless a later command names another time."""

    at: float


ControllerCommand: TypeAlias = (
    Launch | Probe | Admit | Update | Withdraw | AwaitDrained | Terminate | Kill | WakeController
)


class PhaseChange(msgspec.Struct, frozen=True):
    """An instance has entered another phase. It is for operators: no component reacts to it."""

    deployment: str
    instance_id: str
    before: str
    """Empty if the instance is new."""
    phase: str
    """Empty if the instance is gone."""
    why: Reason | None

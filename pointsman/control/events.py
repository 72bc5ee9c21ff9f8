"""What the controller is told, and what it tells to do. A runtime turns one into the other.

A runtime promises to carry commands out in their order. Each `Launch` ends in `LaunchFailed`, or in `Launched` and some
day `Exited`, after which nothing more is heard of that process. Each `Probe` is answered once, with `Answered` or
`Silent`, unless another `Probe` of the same instance took its place or its process has ended; then it is not answered.
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
    """This is wanted from now on."""

    desired: Desired
    retry: frozenset[str] = frozenset()
    """Deployments whose rollout was stopped, and is to be tried again."""
    warmth: Mapping[str, float] = {}
    """How much instances have in their caches: of those that are equal otherwise, the coldest go."""


class Adopted(ControllerEvent, frozen=True):
    """A process of an earlier plane still runs; the runtime has taken it over.

    Told before the first `Applied`, which decides what becomes of it: else it would be started a second time.
    """

    instance_id: str
    deployment: str
    recipe: str
    host: str
    port: int
    process: str
    """The runtime's name for it; the controller only compares it."""
    place: Place | None = None


class WorkerSeen(ControllerEvent, frozen=True):
    """A worker is there, or something about it has changed."""

    worker: Worker


class WorkerLost(ControllerEvent, frozen=True):
    """A worker is gone, and with it every process on it."""

    name: str
    why: str


class Launched(ControllerEvent, frozen=True):
    """The process of an instance runs."""

    instance_id: str
    process: str
    """The runtime's name for it."""
    host: str
    port: int


class LaunchFailed(ControllerEvent, frozen=True):
    """It could not even be started."""

    instance_id: str
    why: str


class Exited(ControllerEvent, frozen=True):
    """The process of an instance has ended; so has its whole group."""

    instance_id: str
    why: str
    """As a person would say it: exit code 1: the last line of its log, or killed by SIGKILL."""


class Answered(ControllerEvent, frozen=True):
    """A probe of an instance succeeded."""

    instance_id: str
    readiness: bool
    """It did real work; False: it only said that it is healthy."""


class Silent(ControllerEvent, frozen=True):
    """A probe of an instance failed or was not answered in time."""

    instance_id: str
    why: str


class RequestsFail(ControllerEvent, frozen=True):
    """Clients' requests fail on an instance, several in a row, whatever its health check says."""

    instance_id: str
    why: str


class Drained(ControllerEvent, frozen=True):
    """No request is under way on an instance any more."""

    instance_id: str


class DrainAsked(ControllerEvent, frozen=True):
    """An operator wants an instance out of service. It is replaced."""

    instance_id: str


class PlaceNeeded(ControllerEvent, frozen=True):
    """The place of an instance is needed for another one. It is drained, and comes back when there is another place."""

    instance_id: str
    why: Reason


class PlaneStopping(ControllerEvent, frozen=True):
    """Everything is drained and stopped; nothing is started any more."""


class ControllerTimer(ControllerEvent, frozen=True):
    """The time of a `WakeController` has come."""


class Launch(msgspec.Struct, frozen=True):
    """Start a process for this instance, on a free port."""

    instance_id: str
    deployment: str
    place: Place | None = None
    """Where, and how it is divided there; None: anywhere."""
    recipe: str = ""
    """What it is started from: of a rollout that was stopped, those who serve on come back as they were."""


class Probe(msgspec.Struct, frozen=True):
    """Ask an instance once, now, instead of any probe under way; say `Answered` or `Silent` within the timeout."""

    instance_id: str
    readiness: bool
    timeout_s: float
    endpoint: DesiredEndpoint | None = None
    """Whom to ask, if somebody else started it: always the same for an instance, save for its limit and labels."""


class Admit(msgspec.Struct, frozen=True):
    """Send requests to this instance from now on. It was not in service before."""

    deployment: str
    instance: ExecutionInstance


class Update(msgspec.Struct, frozen=True):
    """What is known of an instance in service has changed: its limit, its labels, whether it takes new requests."""

    deployment: str
    instance: ExecutionInstance


class Withdraw(msgspec.Struct, frozen=True):
    """It serves no more. What it was doing is sent elsewhere, as far as that can be."""

    deployment: str
    instance_id: str
    why: Reason


class AwaitDrained(msgspec.Struct, frozen=True):
    """Say `Drained` as soon as no request is under way on it."""

    deployment: str
    instance_id: str


class Terminate(msgspec.Struct, frozen=True):
    """Ask the process of an instance, and its children, to end.

    Sent again once it is `Launched`, if it was not by then.
    """

    instance_id: str


class Kill(msgspec.Struct, frozen=True):
    """End the process of an instance, and its children, at once.

    Sent again once it is `Launched`, if it was not by then.
    """

    instance_id: str


class WakeController(msgspec.Struct, frozen=True):
    """Fire the timer at this time, unless a later command names another."""

    at: float


ControllerCommand: TypeAlias = (
    Launch | Probe | Admit | Update | Withdraw | AwaitDrained | Terminate | Kill | WakeController
)

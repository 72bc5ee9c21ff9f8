"""Events of the dispatcher, and the commands that it returns. A runtime delivers events and executes commands."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import msgspec

from pointsman.reasons import Reason
from pointsman.routing.decisions import Decided
from pointsman.routing.endpoints import Endpoint, Metrics
from pointsman.selection.plugins import kebab_case
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision


class Outcome(Enum):
    """Every request ends with exactly one of these."""

    DISPATCHED = "Dispatched"
    REJECTED_CAPACITY = "RejectedCapacity"
    REJECTED_NO_ENDPOINTS = "RejectedNoEndpoints"
    REJECTED_ADMISSION = "RejectedAdmission"
    REJECTED_UNSCHEDULABLE = "RejectedUnschedulable"
    REJECTED_OTHER = "RejectedOther"
    EVICTED_TTL = "EvictedTTL"
    EVICTED_NO_ENDPOINTS = "EvictedNoEndpoints"
    EVICTED_CANCELLED = "EvictedContextCancelled"
    EVICTED_SHUTTING_DOWN = "EvictedShuttingDown"
    EVICTED_IN_FLIGHT = "EvictedInFlight"
    EVICTED_NOT_SENT = "EvictedNotSent"
    EVICTED_OTHER = "EvictedOther"

    @property
    def code(self) -> str:
        """The outcome as the `code` of an error: rejected_capacity, evicted_ttl."""
        return kebab_case(self.value).replace("-", "_")


class Refusal(msgspec.Struct, frozen=True):
    """A request that will not be served: the outcome, and why."""

    outcome: Outcome
    reason: Reason

    def as_dict(self) -> dict[str, Any]:
        return {"outcome": self.outcome.value, "reason": self.reason.as_dict()}

    @property
    def status(self) -> int:
        """The HTTP status of the answer."""
        return _ANSWERS[self.outcome][0]

    @property
    def drop_reason(self) -> str | None:
        """The value of the `x-llm-d-request-dropped-reason` header."""
        return _ANSWERS[self.outcome][1]


_ANSWERS: dict[Outcome, tuple[int, str | None]] = {
    Outcome.DISPATCHED: (200, None),
    Outcome.REJECTED_CAPACITY: (429, "rejected-saturated"),
    Outcome.REJECTED_NO_ENDPOINTS: (503, "rejected-no-endpoints"),
    Outcome.REJECTED_ADMISSION: (429, "rejected-saturated"),
    Outcome.REJECTED_UNSCHEDULABLE: (429, None),
    Outcome.REJECTED_OTHER: (500, None),
    Outcome.EVICTED_TTL: (429, "rejected-ttl-expired"),
    Outcome.EVICTED_NO_ENDPOINTS: (503, "rejected-no-endpoints"),
    Outcome.EVICTED_CANCELLED: (503, "rejected-context-cancelled"),
    Outcome.EVICTED_SHUTTING_DOWN: (503, "rejected-shutting-down"),
    Outcome.EVICTED_IN_FLIGHT: (429, "evicted"),
    Outcome.EVICTED_NOT_SENT: (503, None),
    Outcome.EVICTED_OTHER: (500, None),
}


class DispatcherEvent(msgspec.Struct, frozen=True):
    """Something that happened."""


class Arrived(DispatcherEvent, frozen=True):
    """Requests to serve; several at once are decided together."""

    requests: tuple[RequestMetadata, ...]


class FirstToken(DispatcherEvent, frozen=True):
    """The answer to a request has begun."""

    request_id: str


class Ended(DispatcherEvent, frozen=True):
    """A request was answered."""

    request_id: str
    output_tokens: int | None = None
    input_tokens: int | None = None
    """Prompt tokens as counted by the engine."""
    cached_tokens: int | None = None
    """Input tokens that were in its prefix cache."""
    status: int = 200
    """Status of the answer; 400 and above is an error."""


class Failed(DispatcherEvent, frozen=True):
    """A request that was sent has failed, and the request itself is not the cause."""

    request_id: str
    why: Reason
    retry: bool = True
    """Whether the request may be sent again. It may not once part of the answer has been sent to the client."""
    instance_id: str = ""
    """The instance that failed; empty if that is the instance to which the request was sent."""
    local: str = ""
    """What kept the gateway from sending it, such as a lack of file descriptors; empty if the instance failed."""
    full: bool = False
    """Whether the instance had no room because others use it too. This does not count as a try, and the request may be
    sent there again."""
    answered: bool = False
    """Whether the client gets this instance's error answer if no other instance can be tried. Such a request does not
    wait for a pause to end."""


class Cancelled(DispatcherEvent, frozen=True):
    """The client has gone, or the request was refused."""

    request_id: str
    refusal: Refusal | None = None
    """How the request was answered; None if the client has gone."""


class Joined(DispatcherEvent, frozen=True):
    """An instance is ready."""

    instance: ExecutionInstance


class Changed(DispatcherEvent, frozen=True):
    """The owner of an instance has changed its health, limit or speed."""

    instance: ExecutionInstance


class Paused(DispatcherEvent, frozen=True):
    """An instance has asked for a pause: it takes no more requests for now."""

    instance_id: str
    until: float
    why: Reason


class Silenced(DispatcherEvent, frozen=True):
    """An instance has gone silent, and takes no more requests until it answers again."""

    instance_id: str
    why: Reason
    movable: tuple[str, ...] = ()
    """Its requests that may be sent to another instance. Requests that have begun, or have no tries left, stay."""


class HeardAgain(DispatcherEvent, frozen=True):
    """An instance that was silent answers again."""

    instance_id: str


class Left(DispatcherEvent, frozen=True):
    """An instance is gone. Its requests are sent elsewhere."""

    instance_id: str
    why: Reason = Reason("left")


class NoneExpected(DispatcherEvent, frozen=True):
    """No instance takes requests, and none is starting or expected: waiting is of no use."""


class Measured(DispatcherEvent, frozen=True):
    """An engine has reported metrics."""

    instance_id: str
    metrics: Metrics


class Surveyed(DispatcherEvent, frozen=True):
    """Several engines have reported metrics at the same moment. Readings from instances that have left are ignored."""

    readings: Sequence[tuple[str, Metrics]]
    """Measurements by instance."""


class Scraped(DispatcherEvent, frozen=True):
    """A data source has delivered something about an instance, for extractors to read."""

    instance_id: str
    source: Any


class Rested(DispatcherEvent, frozen=True):
    """An instance is idle, and is observed less often until a request is sent to it."""

    instance_id: str
    until: float | None = None
    """When the instance is measured again; None if it is not measured."""


class Shared(DispatcherEvent, frozen=True):
    """The requests that other dispatchers have in flight, and the facts that they have learned."""

    in_flight: Mapping[str, tuple[float, float]]
    """(requests, prompt tokens to compute) by instance, summed over all other dispatchers."""
    learned: tuple[tuple[int, str, Any], ...] = ()
    """(index of the plugin among the learners, id of the endpoint, what was learned)"""


class TimerFired(DispatcherEvent, frozen=True):
    """The time of a `WakeAt` has come."""


class ShuttingDown(DispatcherEvent, frozen=True):
    """Refuse new and waiting requests; running ones may end."""


class Send(msgspec.Struct, frozen=True):
    """Send this request to this instance."""

    request: RequestMetadata
    made: Decided | SchedulingDecision
    endpoint: Endpoint
    headers: Mapping[str, str | None] = {}
    """Headers to set on the request to the engine; a value of None removes the header."""
    response_headers: Mapping[str, str] = {}
    """Headers to set on the answer to the client."""

    @property
    def decision(self) -> SchedulingDecision:
        made = self.made
        return made if isinstance(made, SchedulingDecision) else made.decision


class Refuse(msgspec.Struct, frozen=True):
    """Answer this request with a refusal."""

    request: RequestMetadata
    refusal: Refusal


class Revoke(msgspec.Struct, frozen=True):
    """Stop a running request and answer it with a refusal; then report it as cancelled."""

    request: RequestMetadata
    refusal: Refusal


class Watch(msgspec.Struct, frozen=True):
    """Observe a resting instance at the normal rate again, because it was sent a request."""

    instance_id: str


class WakeAt(msgspec.Struct, frozen=True):
    """Fire the timer at this time. Replaces any earlier `WakeAt`."""

    at: float


DispatcherCommand: TypeAlias = Send | Refuse | Revoke | Watch | WakeAt

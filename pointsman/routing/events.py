"""What the dispatcher is told, and what it tells to do. A runtime turns one into the other."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from pointsman.routing.decisions import Decided
from pointsman.routing.endpoints import Endpoint, Metrics
from pointsman.routing.outcomes import Refusal
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision


class DispatcherEvent(msgspec.Struct, frozen=True):
    """Something that happened."""


class Arrived(DispatcherEvent, frozen=True):
    """Requests want to be served; several at once are decided together."""

    requests: tuple[RequestMetadata, ...]


class FirstToken(DispatcherEvent, frozen=True):
    """The answer to a request has begun."""

    request_id: str


class Ended(DispatcherEvent, frozen=True):
    """A request was answered."""

    request_id: str
    output_tokens: int | None = None
    input_tokens: int | None = None
    """As the engine counted."""
    cached_tokens: int | None = None
    """Of those, found in its prefix cache."""


class Failed(DispatcherEvent, frozen=True):
    """A request that was sent came to nothing, through no fault of its own."""

    request_id: str
    why: str
    retry: bool = True
    """False: it must not be sent again, as when part of the answer is out."""
    instance_id: str = ""
    """Who failed, if not the instance it was sent to."""


class Cancelled(DispatcherEvent, frozen=True):
    """The client has gone."""

    request_id: str


class Joined(DispatcherEvent, frozen=True):
    """An instance is ready."""

    instance: ExecutionInstance


class Changed(DispatcherEvent, frozen=True):
    """The owner of an instance says something new of it: health, limit, speed."""

    instance: ExecutionInstance


class Left(DispatcherEvent, frozen=True):
    """An instance is gone. What it was doing is sent elsewhere."""

    instance_id: str
    why: str = "it left"


class Measured(DispatcherEvent, frozen=True):
    """An engine said how it is doing."""

    instance_id: str
    metrics: Metrics


class Scraped(DispatcherEvent, frozen=True):
    """A data source delivered something about an instance, for the extractors to read."""

    instance_id: str
    source: Any


class TimerFired(DispatcherEvent, frozen=True):
    """The time of a `WakeAt` has come."""


class ShuttingDown(DispatcherEvent, frozen=True):
    """Nothing new is taken, and what waits is refused; what runs may end."""


class Send(msgspec.Struct, frozen=True):
    """Send this request to this instance."""

    request: RequestMetadata
    made: Decided | SchedulingDecision
    endpoint: Endpoint
    headers: Mapping[str, str | None] = {}
    """To set on the request to the engine; None: to remove."""
    response_headers: Mapping[str, str] = {}
    """To set on the answer to the client."""

    @property
    def decision(self) -> SchedulingDecision:
        """What was decided, in words."""
        made = self.made
        return made if isinstance(made, SchedulingDecision) else made.decision


class Refuse(msgspec.Struct, frozen=True):
    """Answer this request with a refusal."""

    request: RequestMetadata
    refusal: Refusal


class Revoke(msgspec.Struct, frozen=True):
    """Stop a request that is being served and answer it with a refusal; then report it as cancelled."""

    request: RequestMetadata
    refusal: Refusal


class WakeAt(msgspec.Struct, frozen=True):
    """Fire the timer at this time, unless a later command names another."""

    at: float


DispatcherCommand: TypeAlias = Send | Refuse | Revoke | WakeAt

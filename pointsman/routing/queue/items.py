"""The items of a queue: a request, its flow and its stage; and the results of flow control."""

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pointsman.routing.events import Refusal
from pointsman.types import RequestMetadata

if TYPE_CHECKING:
    from pointsman.routing.queue.bands import Band


FAIRNESS_HEADER = "x-llm-d-inference-fairness-id"
FAIRNESS_ALIAS = "x-gateway-inference-fairness-id"
DEFAULT_FLOW = "default-flow"


class QueueStage(Enum):
    """Where a request is between its offer and its end. Messages use the values after "the request should be"."""

    NEW = "not offered yet"
    WAITING = "waiting"
    HELD = "taken out, and neither served, put back nor dropped yet"
    SERVED = "dispatched"
    LEFT = "gone"


class Queued(msgspec.Struct, eq=False):
    """One request that was, is or will be in the queue. Only the queue writes to it, except for the fields that the
    dispatcher sets."""

    request: RequestMetadata
    ttl_s: float | None = None
    """How long it may wait while there are instances; None if there is no limit. Set by the queue."""
    band: "Band" = None  # type: ignore[assignment]  # set by the queue
    enqueued_at: float = 0.0
    taken_at: float = 0.0
    """When it was last popped from the queue; for a sent request, when it was sent."""
    order_key: Any = None
    """Its position under the ordering of its band, smaller first. Equal keys are ordered by `seq`."""
    seq: int = 0
    stage: QueueStage = QueueStage.NEW
    tries: int = 0
    """How often it was sent and failed; set by the dispatcher."""
    unsent: int = 0
    """How often it could not be sent, for a reason on this side; set by the dispatcher."""
    excluded: frozenset[str] = frozenset()
    """Instances on which it failed, or to which it could not be sent; set by the dispatcher."""
    answered: bool = False
    """Whether an instance has answered it with an error, which its client gets if no other instance serves it; set by
    the dispatcher."""
    ended_at: float | None = None
    """When it ended with an answer; None if it has not ended, or has failed. Set by the queue."""
    _flow: str | None = None

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def size_bytes(self) -> int:
        """The room that it takes up in the queue."""
        return self.request.prompt_bytes

    @property
    def flow(self) -> str:
        """The flow that it belongs to; computed when it first waits."""
        flow = self._flow
        if flow is None:
            name = getattr(self.band, "flow_of", None) or flow_of  # a request has no band before it is offered
            flow = self._flow = name(self.request)
        return flow

    def __repr__(self) -> str:
        return f"<{self.request.request_id}: {self.stage.value}, flow {self.flow}, priority {self.priority}>"


def flow_of(request: RequestMetadata) -> str:
    """The flow of a request: its fairness header, else its user, else one flow for all."""
    return header_of(request, FAIRNESS_HEADER, FAIRNESS_ALIAS) or request.user_id or DEFAULT_FLOW


def header_of(request: RequestMetadata, name: str, alias: str) -> str | None:
    """The value of a header that also has an older name. The current name takes precedence."""
    value = request.headers.get(name)
    return request.headers.get(alias) if value is None else value


class Offered(NamedTuple):
    """The result of an offer."""

    refusal: Refusal | None = None
    """Why the request was refused; None if it waits."""
    displaced: Sequence[tuple[Queued, Refusal]] = ()
    """Waiting requests that it displaced."""


class Blocked(NamedTuple):
    """A band that has waiting requests and is blocked, because the saturation of the pool has reached its ceiling."""

    priority: int
    ceiling: float

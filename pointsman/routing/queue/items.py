"""What waits: a request, the flow it belongs to, and where in its life it is."""

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
    """Where a request is between its offer and its end."""

    NEW = "not offered yet"
    WAITING = "waiting"
    HELD = "taken out, and neither served, put back nor dropped yet"
    SERVED = "dispatched"
    LEFT = "gone"


class Queued(msgspec.Struct, eq=False):
    """One request that was, is or will be in the queue. Only the queue writes, save for `tries` and `excluded`."""

    request: RequestMetadata
    ttl_s: float | None = None
    """How long it may wait while there are instances, as the queue says. None: for ever."""
    band: "Band" = None  # type: ignore[assignment]  # the queue gives it one
    enqueued_at: float = 0.0
    taken_at: float = 0.0
    """When it was last taken out of the queue, which is when it was sent if it was."""
    order_key: Any = None
    """Its place under the ordering of its band, smaller first; equals go by `seq`."""
    seq: int = 0
    stage: QueueStage = QueueStage.NEW
    tries: int = 0
    """How often it was sent and failed; the dispatcher's."""
    excluded: frozenset[str] = frozenset()
    """Instances that failed it; the dispatcher's."""
    _flow: str | None = None

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def size_bytes(self) -> int:
        """The room that it takes up while it waits."""
        return self.request.prompt_bytes

    @property
    def flow(self) -> str:
        """Whom it shares its turns with; worked out when it first waits."""
        flow = self._flow
        if flow is None:
            flow = self._flow = flow_of(self.request)
        return flow

    def __repr__(self) -> str:
        return f"<{self.request.request_id}: {self.stage.value}, flow {self.flow}, priority {self.priority}>"


def flow_of(request: RequestMetadata) -> str:
    """The flow a request shares its turns with: the fairness header, else the user, else one flow for all."""
    return header_of(request, FAIRNESS_HEADER, FAIRNESS_ALIAS) or request.user_id or DEFAULT_FLOW


def header_of(request: RequestMetadata, name: str, alias: str) -> str | None:
    """A header that has an older name; the proper one wins if both are there."""
    value = request.headers.get(name)
    return request.headers.get(alias) if value is None else value


# What flow control answers.


class Offered(NamedTuple):
    """What came of an offer."""

    refusal: Refusal | None = None
    """None: it waits now."""
    displaced: Sequence[tuple[Queued, Refusal]] = ()
    """Waiting requests that had to leave for it."""


class Blocked(NamedTuple):
    """A band that has work and must not send it now, as the pool is at or above the band's ceiling."""

    priority: int
    ceiling: float

"""What waits: a request, the flow it belongs to, and where in its life it is."""

from enum import Enum
from typing import TYPE_CHECKING, Any

from pointsman.types import RequestMetadata

if TYPE_CHECKING:
    from pointsman.routing.queue.bands import Band

FAIRNESS_HEADER = "x-llm-d-inference-fairness-id"
FAIRNESS_ALIAS = "x-gateway-inference-fairness-id"
DEFAULT_FLOW = "default-flow"


class Stage(Enum):
    """Where a request is between its offer and its end."""

    NEW = "not offered yet"
    WAITING = "waiting"
    HELD = "taken out, and neither served, put back nor dropped yet"
    SERVED = "dispatched"
    LEFT = "gone"


class Queued:
    """One request that was, is or will be in the queue. Only the queue writes, save for `tries` and `excluded`."""

    __slots__ = (
        "_flow",
        "_size_bytes",
        "band",
        "enqueued_at",
        "excluded",
        "order_key",
        "priority",
        "request",
        "seq",
        "stage",
        "taken_at",
        "tries",
        "ttl_s",
    )

    band: "Band"

    def __init__(self, request: RequestMetadata, *, size_bytes: int | None = None, ttl_s: float | None = None) -> None:
        self.request = request
        self._flow: str | None = None
        self.priority = request.priority
        self._size_bytes = size_bytes
        self.ttl_s = ttl_s
        """How long its client lets it wait; once offered, how long it may wait. None: no limit."""
        self.enqueued_at = 0.0
        self.taken_at = 0.0
        """When it was last taken out of the queue, which is when it was sent if it was."""
        self.order_key: Any = None
        """Its place under the ordering of its band, smaller first; equals go by `seq`."""
        self.seq = 0
        self.stage = Stage.NEW
        self.tries = 0
        """How often it was sent and failed; the dispatcher's."""
        self.excluded: frozenset[str] = frozenset()
        """Instances that failed it; the dispatcher's."""

    @property
    def size_bytes(self) -> int:
        """The room that it takes up while it waits."""
        if self._size_bytes is None:
            self._size_bytes = self.request.prompt_bytes
        return self._size_bytes

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

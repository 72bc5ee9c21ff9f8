"""How a request may leave the dispatcher, and what a client is told then."""

from enum import Enum

import msgspec

from pointsman.selection.plugins import kebab_case


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
    EVICTED_OTHER = "EvictedOther"

    @property
    def code(self) -> str:
        """The `code` of an error, as clients know them: rejected_capacity, evicted_ttl."""
        return kebab_case(self.value).replace("-", "_")


class Refusal(msgspec.Struct, frozen=True):
    """A request that will not be served: the outcome, and why in words that a person understands."""

    outcome: Outcome
    why: str

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
    Outcome.EVICTED_OTHER: (500, None),
}

"""What was decided about each request and what came of it: bounded, the newest kept."""

from collections import OrderedDict
from typing import Any

import msgspec

from pointsman.routing.decisions import Unplaced
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.outcomes import Refusal
from pointsman.selection import SchedulingFailure, Trace
from pointsman.types import RequestMetadata, SchedulingDecision


class Record:
    """The story of one request, from its arrival to its end."""

    __slots__ = (
        "arrived_at",
        "decision",
        "ended_at",
        "failure",
        "failures",
        "first_token_at",
        "output_tokens",
        "refusal",
        "request",
        "sent_at",
        "strategy",
        "trace",
    )

    def __init__(self, request: RequestMetadata, arrived_at: float) -> None:
        self.request = request
        """Without its prompt."""
        self.arrived_at = arrived_at
        self.strategy = ""
        self.trace: Trace | None = None
        """Of the last decision or attempt."""
        self.failure: SchedulingFailure[Endpoint] | None = None
        """Why nobody could take it, when it was last tried."""
        self.decision: SchedulingDecision | None = None
        self.failures: list[tuple[str, str]] = []
        """(instance, what went wrong) of each try that came to nothing."""
        self.sent_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.output_tokens: int | None = None
        self.refusal: Refusal | None = None

    @property
    def state(self) -> str:
        """waiting, running, served or refused."""
        if self.refusal is not None:
            return "refused"
        if self.decision is None:
            return "waiting"
        return "running" if self.ended_at is None else "served"

    @property
    def met_deadline(self) -> bool | None:
        """Whether the answer came in time; None if there is no deadline, or no end yet."""
        if self.request.slo_deadline_ms is None or self.ended_at is None:
            return None
        return self.refusal is None and (self.ended_at - self.arrived_at) * 1000 <= self.request.slo_deadline_ms

    def reasons(self) -> dict[str, str]:
        """Why each instance was turned away, when it was last tried."""
        if self.failure is None:
            return {}
        return {str(endpoint): f"{plugin}: {why}" for endpoint, plugin, why in self.failure.reasons()}

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "request_id": self.request.request_id,
            "model": self.request.model_name,
            "state": self.state,
            "strategy": self.strategy,
            "decision": None if self.decision is None else msgspec.to_builtins(self.decision),
            "waited_ms": _ms(self.arrived_at, self.sent_at if self.sent_at is not None else self.ended_at),
            "first_token_ms": _ms(self.arrived_at, self.first_token_at),
            "total_ms": _ms(self.arrived_at, self.ended_at),
            "output_tokens": self.output_tokens,
            "met_deadline": self.met_deadline,
            "failed_tries": [{"instance": instance, "why": why} for instance, why in self.failures],
            "refusal": None
            if self.refusal is None
            else {"outcome": self.refusal.outcome.value, "why": self.refusal.why},
            "rejected": self.reasons(),
            "trace": None if self.trace is None else self.trace.as_dict(),
        }

    def __str__(self) -> str:
        lines = [f'request "{self.request.request_id}" is {self.state}']
        if self.decision is not None:
            lines.append(f"sent to {self.decision.target_instance_id}: {self.decision.reason}")
        lines += [f"tried {instance}: {why}" for instance, why in self.failures]
        if self.refusal is not None:
            lines.append(f"refused ({self.refusal.outcome.value}): {self.refusal.why}")
        if self.decision is None and self.failure is not None:
            lines.append(Unplaced(self.request, self.failure).why)
        if self.trace is not None:
            lines += ["", str(self.trace)]
        return "\n".join(lines)


class Records:
    """The newest records, by request id."""

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._by_id: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, request: RequestMetadata, now: float) -> Record:
        """A record for a request that has just arrived. Its prompt is not kept: it may be large, and is its user's."""
        arrived = now if request.arrival_time is None else request.arrival_time
        kept = msgspec.structs.replace(request, prompt="", token_ids=None, prompt_tokens=request.input_tokens)
        record = self._by_id[request.request_id] = Record(kept, arrived)
        self._by_id.move_to_end(request.request_id)
        if len(self._by_id) > self._most:
            self._by_id.popitem(last=False)
        return record

    def get(self, request_id: str) -> Record | None:
        """The record of this request, if it is still kept."""
        return self._by_id.get(request_id)

    def newest(self) -> list[Record]:
        """All that are kept, the newest first."""
        return list(reversed(self._by_id.values()))


def _ms(start: float, end: float | None) -> float | None:
    return None if end is None else round((end - start) * 1000, 3)

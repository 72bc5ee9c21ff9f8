"""The order inside a flow. A policy gives each request a key once, when it is offered; the queue keeps the order.

A policy whose keys grow with time also has `key_at(item, now)`. The queue calls that when a request is about to leave.

All requests of a band have the same policy, so that the heads of its flows can be compared too.
"""

import re
from math import inf
from typing import Any, Protocol, runtime_checkable

from pointsman.routing.queue.items import Queued, header_of

SLO_HEADER = "x-llm-d-slo-ttft-ms"
SLO_ALIAS = "x-slo-ttft-ms"
MAX_SLO_MS = (2**63 - 1) // 10**6
"""A longer objective is ignored, because in nanoseconds it does not fit into 64 bits."""

_INTEGER = re.compile(r"[+-]?[0-9]+")


@runtime_checkable
class OrderingPolicy(Protocol):
    """Orders the requests of a flow."""

    def key(self, item: Queued) -> Any:
        """The request with the smallest key goes first; equal keys go in order of arrival. Called once per request."""
        ...


class FcfsOrderingPolicy:
    """First come, first served."""

    def key(self, item: Queued) -> float:
        return item.enqueued_at


class EdfOrderingPolicy:
    """Earliest deadline first, by time to live. Requests without one go last."""

    def key(self, item: Queued) -> float:
        return item.enqueued_at + item.ttl_s if item.ttl_s is not None and item.ttl_s > 0 else inf


class SloDeadlineOrderingPolicy:
    """Orders by when the first token is due: the header `x-llm-d-slo-ttft-ms`, else the request's `slo_deadline_ms`.

    A request without either goes last, and so does a request whose header is not a whole number of milliseconds in
    range.
    """

    def key(self, item: Queued) -> tuple[float, float]:
        arrival = item.request.arrival_time
        received = item.enqueued_at if arrival is None else arrival
        return received + _slo_ms(item) / 1000, received


def _slo_ms(item: Queued) -> float:
    slo_ms = item.request.slo_deadline_ms
    header = header_of(item.request, SLO_HEADER, SLO_ALIAS)
    if header is not None:
        slo_ms = int(header) if len(header) < 32 and _INTEGER.fullmatch(header) else None
    return slo_ms if slo_ms is not None and 0 <= slo_ms <= MAX_SLO_MS else inf

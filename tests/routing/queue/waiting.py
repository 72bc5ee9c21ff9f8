"""Short ways to make requests and queues, and to look into them."""

from collections.abc import Iterable, Sequence
from typing import Any

from pointsman.routing.events import Outcome, Refusal
from pointsman.routing.queue import FlowControl, Queued
from pointsman.routing.queue.bands import Band
from pointsman.types import RequestMetadata


def item(request_id: str = "r", *, flow: str = "", size: int = 1, ttl_s: float | None = None, **request: Any) -> Queued:
    """A request to offer."""
    facts = {"prompt": "x" * size, **request}
    return Queued(RequestMetadata(request_id, user_id=flow, timeout_s=ttl_s, **facts))


def offer(queue: FlowControl, *items: Queued, now: float = 0.0, pool_is_empty: bool = False) -> list[Refusal | None]:
    """Offer requests in this order; the refusal of each."""
    return [queue.offer(one, now, pool_is_empty).refusal for one in items]


def served(queue: FlowControl, most: int = 1000, *, now: float = 0.0, saturation: float = 0.0) -> list[str]:
    """Serve as many requests as may go; their ids in order."""
    gone: list[str] = []
    while len(gone) < most and (one := queue.pop(now, saturation)) is not None:
        queue.served(one)
        gone.append(one.request.request_id)
    return gone


def bands_of(queue: FlowControl) -> list[Band]:
    """Its bands, highest priority first."""
    return queue._bands.high_to_low


def size_bytes(queue: FlowControl) -> int:
    """Bytes waiting or held."""
    return queue._backlog.total.size_bytes


def ids(items: Iterable[Queued]) -> list[str]:
    return [one.request.request_id for one in items]


def left(pairs: Sequence[tuple[Queued, Refusal]]) -> list[tuple[str, Outcome]]:
    """The requests that left, and their outcomes."""
    return [(one.request.request_id, refusal.outcome) for one, refusal in pairs]

"""Refusals of the queue: why a request that waited, or was to wait, is not served."""

from typing import Any

from pointsman.reasons import Reason
from pointsman.routing.events import Outcome, Refusal
from pointsman.routing.queue.bands import Occupancy
from pointsman.routing.queue.items import Queued


def queue_is_full(item: Queued, room: Occupancy, pool_is_empty: bool) -> Refusal:
    """There was no room for a request on arrival."""
    shortage = room.shortage(item.size_bytes)
    if pool_is_empty:
        return Refusal(Outcome.REJECTED_NO_ENDPOINTS, Reason("no-instance-queue-full", shortage))
    return Refusal(Outcome.REJECTED_CAPACITY, Reason("queue-full", shortage))


def id_is_taken(item: Queued) -> Refusal:
    """Another request with the same id waits already."""
    return Refusal(Outcome.REJECTED_OTHER, Reason("id-waiting", {"request_id": item.request.request_id}))


def displaced(item: Queued, by: Queued, shortage: dict[str, Any]) -> Refusal:
    """A request made room for a more important one."""
    facts = {"priority": item.priority, "by_priority": by.priority}
    return Refusal(Outcome.REJECTED_CAPACITY, Reason("displaced", facts | shortage))


def waited_too_long(item: Queued, now: float, default_ttl_s: float) -> Refusal:
    """The time to live of a request is over."""
    setting = "flowControl.defaultRequestTTL"
    return Refusal(
        Outcome.EVICTED_TTL, _waited("waited-too-long", item, now, item.ttl_s or 0.0, default_ttl_s, setting)
    )


def no_instance_came(item: Queued, now: float, limit_s: float | None, default_ttl_s: float, setting: str) -> Refusal:
    """The time to live of a request is over, and no instance is running."""
    reason = _waited("no-instance-came", item, now, limit_s, default_ttl_s, setting)
    return Refusal(Outcome.EVICTED_NO_ENDPOINTS, reason)


def _waited(code: str, item: Queued, now: float, limit_s: float | None, default_s: float, setting: str) -> Reason:
    """`setting` is a fact if it set the limit; None: the request's own deadline did."""
    facts = {"waited_s": now - item.enqueued_at, "limit_s": limit_s}
    return Reason(code, facts | {"setting": setting if limit_s == default_s else None})


def shutting_down() -> Refusal:
    """The queue is drained."""
    return Refusal(Outcome.EVICTED_SHUTTING_DOWN, Reason("shutting-down"))


def evicted_in_flight(item: Queued, priority: int) -> Refusal:
    """A running request was stopped for a more important one."""
    facts = {"priority": item.priority, "by_priority": priority}
    return Refusal(Outcome.EVICTED_IN_FLIGHT, Reason("stopped-for-priority", facts))

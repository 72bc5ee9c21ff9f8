"""What a client is told when its request will not be served, by every way out of the queue but the front one."""

from pointsman.routing.events import Outcome, Refusal
from pointsman.routing.queue.bands import Occupancy
from pointsman.routing.queue.items import Queued

START_ONE = "start an instance"
"""What to do, said by who does not know whether somebody does that already."""


def queue_is_full(item: Queued, room: Occupancy, pool_is_empty: bool) -> Refusal:
    """It found no room on arrival."""
    full = f"the queue is full: {room.shortage(item.size_bytes)}"
    if pool_is_empty:
        why = f"no instance is running, and {full}; {START_ONE}"
        return Refusal(Outcome.REJECTED_NO_ENDPOINTS, why)
    return Refusal(Outcome.REJECTED_CAPACITY, full)


def id_is_taken(item: Queued) -> Refusal:
    """Somebody with its id waits already."""
    why = f'a request with the id "{item.request.request_id}" is waiting already; give each request an id of its own'
    return Refusal(Outcome.REJECTED_OTHER, why)


def displaced(item: Queued, by: Queued, shortage: str) -> Refusal:
    """It had to make room for more important work."""
    why = (
        f"displaced by higher-priority work: a request of priority {by.priority} needed the room of this one of "
        f"priority {item.priority} in a full queue: {shortage}; send it again later"
    )
    return Refusal(Outcome.REJECTED_CAPACITY, why)


def waited_too_long(item: Queued, now: float, default_ttl_s: float) -> Refusal:
    """Its time to live is over."""
    ttl_s = item.ttl_s or 0.0
    limit = (
        f"its own deadline allowed {ttl_s:g} s"
        if ttl_s != default_ttl_s
        else f"the limit is {ttl_s:g} s (flowControl.defaultRequestTTL)"
    )
    why = f"waited {now - item.enqueued_at:.3g} s without an instance having room; {limit}; send less or add instances"
    return Refusal(Outcome.EVICTED_TTL, why)


def no_instance_came(item: Queued, now: float, limit_s: float | None, default_ttl_s: float, setting: str) -> Refusal:
    """Its time to live with nobody to serve it is over."""
    limit = (
        f"its own deadline allowed {limit_s:g} s"
        if limit_s != default_ttl_s
        else f"the limit is {limit_s:g} s ({setting})"
    )
    why = f"waited {now - item.enqueued_at:.3g} s and no instance is running; {limit}; {START_ONE}"
    return Refusal(Outcome.EVICTED_NO_ENDPOINTS, why)


def shutting_down() -> Refusal:
    """The whole queue is given up."""
    return Refusal(Outcome.EVICTED_SHUTTING_DOWN, "the gateway is shutting down; send it again to another one")


def evicted_in_flight(item: Queued, priority: int) -> Refusal:
    """It was being served, and was stopped for more important work."""
    why = (
        f"stopped while it was served: work of priority {priority} could not start, and this request has priority "
        f"{item.priority}; send it again later, or with a priority of 0 or more"
    )
    return Refusal(Outcome.EVICTED_IN_FLIGHT, why)

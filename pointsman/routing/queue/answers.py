"""What flow control answers."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pointsman.routing.outcomes import Refusal
from pointsman.routing.queue.items import Queued


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


class BandDepth(msgspec.Struct, frozen=True):
    """How much waits in one band."""

    priority: int
    requests: int
    size_bytes: int
    flows: dict[str, int]
    """Requests per flow, of flows that have any in the order."""
    aside: int = 0
    """Requests beside the order: nobody can take them now, for reasons of their own."""

"""What this dispatcher has sent and not yet seen end. Every reservation is released exactly once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pointsman.routing.endpoints import Endpoint, EndpointTable
from pointsman.routing.events import Refusal
from pointsman.routing.plugins import UNCACHED_REQUEST_TOKENS, RequestCycle
from pointsman.routing.queue import Queued
from pointsman.selection import Column, SchedulingResult

if TYPE_CHECKING:
    from pointsman.routing.request_table import Pool


class Sent(msgspec.Struct, eq=False):
    """A request that an instance is serving."""

    item: Queued
    pool: "Pool"
    endpoint: Endpoint
    strategy: str
    lightness: float
    """Of the endpoint, just before the request was sent."""
    begun: bool = False
    """Whether part of the answer is out: then the request must not be sent again."""
    revoked: Refusal | None = None
    """Set while the request is being stopped for more important work."""


class Hold(msgspec.Struct, frozen=True):
    """One endpoint's share of a request in flight."""

    endpoint: Endpoint
    tokens: float
    """Prompt tokens that the endpoint has to compute; released with the first token of the answer."""
    prefill: bool = False
    """The endpoint only prefills: it is released with the first token."""


def holds_of(cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> list[Hold]:
    """The shares of a result: the first target of each profile, with the tokens that it has to compute.

    The endpoint that answers is held to the end, even if its profile is called "prefill".
    """
    uncached: Column | None = cycle.state.get(UNCACHED_REQUEST_TOKENS)
    prompt = float(cycle.request.input_tokens)
    if uncached is None and len(result.results) == 1:
        return [Hold(result.target, prompt)]
    return [
        Hold(
            run.targets[0],
            prompt if uncached is None else float(uncached[run.targets[0].row]),
            prefill=name == "prefill" != result.primary,
        )
        for name, run in result.results.items()
    ]


class Ledger:
    """Reservations by request, visible in the fleet's columns from the moment they are made."""

    def __init__(self, fleet: EndpointTable) -> None:
        self._load = fleet.load
        self._holds: dict[str, Sequence[Hold]] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._holds

    def reserve(self, request_id: str, holds: Sequence[Hold]) -> None:
        """Count a request on its endpoints. Raises if it is in flight already."""
        if request_id in self._holds:
            raise ValueError(f'request "{request_id}" is already in flight')
        self._holds[request_id] = holds
        for hold in holds:
            self._load.reserve(hold.endpoint, hold.tokens)

    def first_token(self, request_id: str) -> None:
        """The prompt is computed: release its tokens, and the endpoints that only prefilled."""
        left = []
        for hold in self._holds.get(request_id, ()):
            if hold.prefill:
                self._load.release(hold.endpoint, hold.tokens)
            else:
                self._load.release_tokens(hold.endpoint, hold.tokens)
                left.append(msgspec.structs.replace(hold, tokens=0.0))
        if request_id in self._holds:
            self._holds[request_id] = left

    def release(self, request_id: str) -> bool:
        """A request has ended. False: it was not in flight."""
        holds = self._holds.pop(request_id, None)
        for hold in holds or ():
            self._load.release(hold.endpoint, hold.tokens)
        return holds is not None

    def holds(self, request_id: str) -> list[Hold]:
        """The shares of a request."""
        return list(self._holds.get(request_id, ()))

    def on(self, endpoint: Endpoint) -> list[str]:
        """The requests that an endpoint has a share in, oldest first."""
        return [
            request_id for request_id, holds in self._holds.items() if any(hold.endpoint is endpoint for hold in holds)
        ]

"""Roles of routing plugins beyond those of the kernel, and the keys under which they share facts.

Candidates are `Endpoint`s and `cycle.request` is a `RequestMetadata`. A class has a role when it has its method.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, runtime_checkable

import msgspec

from pointsman.reasons import Reason
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.topology import Location
from pointsman.selection import Column, Cycle, Key, Roster, SchedulingResult
from pointsman.selection.arrays import np
from pointsman.selection.columns import array
from pointsman.types import ExecutionInstance, RequestMetadata

if TYPE_CHECKING:
    from pointsman.routing.engine_model import EngineModel
    from pointsman.routing.engine_work import EngineWork
    from pointsman.routing.events import Ended

RequestCycle: TypeAlias = Cycle[RequestMetadata]
Endpoints: TypeAlias = Roster[Endpoint]
Rejections: TypeAlias = Iterable[tuple[Endpoint, Reason | str]]


@runtime_checkable
class Decider(Protocol):
    """Decides for a profile handler whether a stage runs."""

    def decides(self, cycle: RequestCycle, endpoints: Endpoints, decode: Endpoint | None) -> bool:
        """Whether the stage runs, given the endpoint that was chosen to decode."""
        ...


@runtime_checkable
class Admitter(Protocol):
    """May turn a request away before anything is scheduled."""

    def denial(self, cycle: RequestCycle, endpoints: Endpoints) -> Reason | str | None:
        """Why the request is denied; None admits it. Text becomes a reason whose code is the admitter's name."""
        ...


@runtime_checkable
class DispatchListener(Protocol):
    """Is notified of each decision before the request is sent."""

    def dispatched(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> None: ...


@runtime_checkable
class ProgressListener(Protocol):
    """Is notified of the progress of requests that were sent: of each first token, and of each end, once.

    A request that is sent again after a failure has ended on the first instance. Answers to clients that don't stream
    (`RequestMetadata.streams`) have no first token.
    """

    def first_token(self, endpoint: Endpoint, request: RequestMetadata, now: float) -> None: ...

    def ended(self, endpoint: Endpoint, request: RequestMetadata, answer: "Ended | None", now: float) -> None:
        """`answer`: what the engine reported; None if the request failed, was cancelled or was taken back."""
        ...


@runtime_checkable
class HeaderWriter(Protocol):
    """Sets headers on the request to the engine."""

    def request_headers(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> dict[str, str | None]:
        """Header -> value; None removes the client's header of that name."""
        ...


@runtime_checkable
class ResponseHeaderWriter(Protocol):
    """Sets headers on the answer to the client."""

    def response_headers(
        self, request: RequestMetadata, served_by: Endpoint, targets: Mapping[str, Endpoint]
    ) -> dict[str, str]:
        """Returns header -> value. `targets`: the first target of each profile that ran."""
        ...


@runtime_checkable
class DepartureListener(Protocol):
    """Is notified when an instance has left, so that the plugin can drop what it keeps about the instance."""

    def departed(self, endpoint: Endpoint) -> None: ...


@runtime_checkable
class Learner(Protocol):
    """A plugin that remembers what was sent where, and can learn what other dispatchers have sent."""

    listener: Callable[[str, Any], None] | None
    """Called with the id of an endpoint, and with what was learned about the endpoint, as plain data."""

    def learn(self, endpoint: Endpoint, what: Any, now: float) -> None:
        """Learn what another dispatcher has learned."""
        ...


@runtime_checkable
class Locator(Protocol):
    """Finds the location of instances."""

    def location(self, instance: ExecutionInstance) -> Location:
        """The host, rack, zone and region of an instance. It may change only with the instance."""
        ...


@runtime_checkable
class EndpointDiscovery(Protocol):
    """Finds the list of the endpoints of a deployment."""

    def endpoints_file(self) -> str:
        """The path of a file in the form of `endpointsFile`."""
        ...


# Facts that producers put into the cycle. All columns have one entry per endpoint of the fleet.


class PrefixMatch(msgspec.Struct, frozen=True):
    """How much of the prompt each endpoint probably has in its cache. Columns have one entry per row of the roster."""

    match: Column
    """Number of consecutive cached blocks from the first on, weighted by cache tier where tiers are known."""
    total: Column
    """Number of blocks of the prompt, at the block size of the endpoint."""
    block_size: Column
    """Tokens per block."""
    cached: Column
    """The same as `match`, but never weighted."""

    def uncached_tokens(self, prompt: float) -> Column:
        """Tokens of a prompt that each endpoint would compute: in blocks that did not match, and those not hashed."""
        if isinstance(self.match, list):
            return self._uncached(prompt, self.match, cast("list[float]", self.total))
        size = array(self.block_size)
        hashed, cached = array(self.total) * size, array(self.match) * size
        return np.maximum(hashed - cached, 0.0) + np.maximum(prompt - hashed, 0.0)

    def _uncached(self, prompt: float, matches: list[float], totals: list[float]) -> list[float]:
        sizes = cast("list[float]", self.block_size)
        if not matches:
            return []
        count, total, size = len(matches), totals[0], sizes[0]
        # Most fleets have engines of one kind only.
        if sizes.count(size) == count == totals.count(total) and max(matches) <= total:
            whole = max(prompt, total * size)
            return [whole - match * size for match in matches]
        return [
            max(0.0, (total - match) * size) + max(0.0, prompt - total * size)
            for match, total, size in zip(matches, totals, sizes, strict=True)
        ]


class LatencyPrediction(msgspec.Struct, frozen=True):
    """Predicted latency of a request on one endpoint. Headroom is the SLO minus the prediction."""

    ttft: float
    tpot: float
    ttft_headroom: float
    tpot_headroom: float
    ttft_valid: bool = True
    tpot_valid: bool = True
    dispatched_requests: int = 0


class LatencyOutlook(msgspec.Struct, eq=False):
    """The predicted latencies of a request on each endpoint, in ms. Columns have one entry per row of the roster."""

    behind: Column
    """Time until the prompts that are already on the endpoint are read."""
    reading: Column
    """Time to read the prompt of this request once those prompts are read."""
    context: Column
    """Prompt tokens of the requests on the endpoint."""
    works: "list[EngineWork]"
    """The work of each row."""
    model: "EngineModel"
    ttft_slo_ms: float
    """Latency objectives of this request, from its arrival on."""
    tpot_slo_ms: float
    waited: float
    """Time since its arrival."""
    usual_ttft_slo_ms: float
    """Latency objectives of requests that state no objectives."""
    busy: float
    """Share of endpoints that had prompts to read, over the last minute."""


NEAR: Key[Endpoint] = Key("near")
"""The endpoint that the next target should be near, for example if one endpoint prefills for another."""
PREFIX_MATCH: Key[PrefixMatch] = Key("prefix-match")
UNCACHED_REQUEST_TOKENS: Key[Column] = Key("uncached-request-tokens")
"""Tokens of this request that each endpoint would have to compute."""
ESTIMATED_OUTPUT_TOKENS: Key[float] = Key("estimated-output-tokens")
"""The part of `UNCACHED_REQUEST_TOKENS` that is an estimate for the answer; 0 if absent."""
MEDIA_MATCH: Key[Column] = Key("media-match")
"""The share of the request's media that each endpoint has probably encoded before; absent if there are no media."""
OUTLOOK: Key[LatencyOutlook] = Key("outlook")
PREDICTED: Key[tuple[float, float]] = Key("predicted")
"""Predicted TTFT and TPOT of the request on the endpoint that was chosen, in milliseconds."""
LATENCY_PREDICTIONS: Key[Mapping[str, LatencyPrediction]] = Key("latency-predictions")
"""Predictions by endpoint id; an endpoint without one is absent."""

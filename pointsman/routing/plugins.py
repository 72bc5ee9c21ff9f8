"""Roles of routing plugins beyond those of the kernel: deciders, admitters, and what they may listen to.

Candidates are `Endpoint`s and `cycle.request` is a `RequestMetadata`. A class has a role when it has its method.
"""

from collections.abc import Iterable
from typing import Protocol, TypeAlias, runtime_checkable

from pointsman.routing.endpoints import Endpoint
from pointsman.selection import Cycle, Roster, SchedulingResult
from pointsman.types import RequestMetadata

RequestCycle: TypeAlias = Cycle[RequestMetadata]
Endpoints: TypeAlias = Roster[Endpoint]
Rejections: TypeAlias = Iterable[tuple[Endpoint, str]]


@runtime_checkable
class Decider(Protocol):
    """Answers one yes-or-no question of a profile handler."""

    def decides(self, cycle: RequestCycle, endpoints: Endpoints, decode: Endpoint | None) -> bool:
        """Whether the stage should run, given the endpoint that was chosen to decode."""
        ...


@runtime_checkable
class Admitter(Protocol):
    """May turn a request away before anything is scheduled."""

    def denial(self, cycle: RequestCycle, endpoints: Endpoints) -> str | None:
        """Why the request is denied; None admits it."""
        ...


@runtime_checkable
class DispatchListener(Protocol):
    """Is told of each decision before the request is sent."""

    def dispatched(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> None: ...


@runtime_checkable
class HeaderWriter(Protocol):
    """Sets headers on the request to the engine."""

    def request_headers(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> dict[str, str | None]:
        """Header -> value; None removes what the client sent under that name."""
        ...


@runtime_checkable
class ResponseHeaderWriter(Protocol):
    """Sets headers on the answer to the client."""

    def response_headers(self, request: RequestMetadata, served_by: Endpoint) -> dict[str, str]: ...


@runtime_checkable
class DepartureListener(Protocol):
    """Is told when an instance has left, so that it can forget it."""

    def departed(self, endpoint: Endpoint) -> None: ...

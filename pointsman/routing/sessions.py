"""Sessions: which endpoint a conversation is kept on, from a token in its requests or from memory.

Enters: a request, and later where it went. Leaves: the id of the endpoint to which its session is bound, or None. The
one rule: a session is a preference. It moves when its endpoint has left or may not be chosen.
"""

from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Literal, NamedTuple

from pointsman.parameters import Parameters
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import RequestCycle
from pointsman.selection import SchedulingResult
from pointsman.types import MAX_NAME, RequestMetadata

MAX_SESSIONS = 100_000
"""Maximum number of sessions, because clients choose their ids. Beyond it, the least recently used is forgotten."""

REQUEST_ATTRIBUTES = ("user_id", "model_name", "cache_salt")
"""Fields of a request that a session source may read."""


class EncodedEndpointHeaderConfig(Parameters, frozen=True):
    """The header that carries the endpoint, in requests and responses."""

    header: str = "x-session-token"


class SessionSource(Parameters, frozen=True):
    """Where a session id may be found: in a header or in a field of the request."""

    header: str = ""
    attribute: str = ""

    def check(self) -> None:
        """Raise ValueError unless exactly one of the two is given, and it is known."""
        if bool(self.header) == bool(self.attribute):
            raise ValueError(
                f'sessionIdConfig.sources has header "{self.header}" and attribute "{self.attribute}"; '
                "each source must be exactly one of them"
            )
        if self.attribute and self.attribute not in REQUEST_ATTRIBUTES:
            allowed = ", ".join(REQUEST_ATTRIBUTES)
            raise ValueError(f'sessionIdConfig.sources has attribute "{self.attribute}"; it must be one of {allowed}')

    def read(self, request: RequestMetadata) -> str:
        """The session id of a request; empty if it has none."""
        if self.header:
            return request.headers.get(self.header.lower(), "").strip()
        return str(getattr(request, self.attribute)).strip()


class SessionIdConfig(Parameters, frozen=True):
    """Where session ids are found, and how long an unused one is remembered. A time of 0 or less means the default."""

    sources: tuple[SessionSource, ...] = (SessionSource(header="x-session-id"),)
    eviction_ttl_seconds: float = 300.0
    eviction_sweep_seconds: float = 10.0


class Binding(NamedTuple):
    """The endpoint of a session, and until when the binding is remembered."""

    endpoint_id: str
    expires: float


class Bindings:
    """Session -> endpoint. Each use renews a binding, so the first binding is always the next to expire."""

    def __init__(self, ttl: float, sweep: float) -> None:
        self._ttl = ttl if ttl > 0 else 300.0
        self._sweep = sweep if sweep > 0 else 10.0
        self._next_sweep = 0.0
        self._bindings: OrderedDict[str, Binding] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bindings)

    def endpoint_of(self, session: str, now: float) -> str | None:
        """The endpoint of a session; None if the session is unknown or expired."""
        binding = self._bindings.get(session)
        return binding.endpoint_id if binding is not None and now < binding.expires else None

    def bind(self, session: str, endpoint_id: str, now: float) -> None:
        self._bindings[session] = Binding(endpoint_id, now + self._ttl)
        self._bindings.move_to_end(session)
        if len(self._bindings) > MAX_SESSIONS:
            self._bindings.popitem(last=False)
        if now >= self._next_sweep:
            self._next_sweep = now + self._sweep
            while next(iter(self._bindings.values())).expires <= now:
                self._bindings.popitem(last=False)

    def forget(self, endpoint_id: str) -> None:
        for session in [s for s, binding in self._bindings.items() if binding.endpoint_id == endpoint_id]:
            del self._bindings[session]


class SessionAffinity:
    """The common part of the session scorer and the session filter.

    `encoded_endpoint_header`: a header of each response names its endpoint, and later requests send that header back.
    `session_id`: a request names its session, which stays on its first endpoint and moves only if that endpoint could
    not be chosen. `profile_name`: the profile whose target counts; the primary profile if empty.
    """

    def __init__(
        self,
        strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header",
        encoded_endpoint_header_config: EncodedEndpointHeaderConfig | None = None,
        session_id_config: SessionIdConfig | None = None,
        profile_name: str = "",
    ) -> None:
        if strategy not in ("encoded_endpoint_header", "session_id"):
            raise ValueError(f'strategy is "{strategy}"; it must be encoded_endpoint_header or session_id')
        encoded = encoded_endpoint_header_config or EncodedEndpointHeaderConfig()
        by_id = session_id_config or SessionIdConfig()
        self.by_header = strategy == "encoded_endpoint_header"
        self.header = encoded.header.lower() or "x-session-token"
        self.sources = by_id.sources or SessionIdConfig().sources
        for source in self.sources:
            source.check()
        self.profile = profile_name
        self._bindings = Bindings(by_id.eviction_ttl_seconds, by_id.eviction_sweep_seconds)
        self.listener: Callable[[str, str], None] | None = None

    def bound_to(self, cycle: RequestCycle) -> str | None:
        """The id of the endpoint to which the request's session is bound; None if it is not bound."""
        if self.by_header:
            return decoded(cycle.request.headers.get(self.header, ""))
        session = self._session(cycle.request)
        return self._bindings.endpoint_of(session, cycle.now) if session else None

    def dispatched(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> None:
        chosen = result.results.get(self.profile or result.primary)
        session = "" if self.by_header else self._session(cycle.request)
        if not session or chosen is None or not chosen.targets:
            return
        bound = self._bindings.endpoint_of(session, cycle.now)
        if bound is None or not any(endpoint.id == bound for endpoint in chosen.ranked.candidates):
            bound = chosen.targets[0].id
        self._bindings.bind(session, bound, cycle.now)
        if self.listener is not None:
            self.listener(bound, session)

    def learn(self, endpoint: Endpoint, what: str, now: float) -> None:
        self._bindings.bind(what, endpoint.id, now)

    def response_headers(
        self, request: RequestMetadata, served_by: Endpoint, targets: Mapping[str, Endpoint]
    ) -> dict[str, str]:
        endpoint = targets.get(self.profile) if self.profile else served_by
        return {self.header: encoded_id(endpoint)} if self.by_header and endpoint is not None else {}

    def departed(self, endpoint: Endpoint) -> None:
        self._bindings.forget(endpoint.id)

    def _session(self, request: RequestMetadata) -> str:
        session = next(filter(None, (source.read(request) for source in self.sources)), "")
        if len(session) > MAX_NAME:  # the operator chooses the header, so the length is limited here
            return sha256(session.encode("utf-8", "replace")).hexdigest()
        return session


def encoded_id(endpoint: Endpoint) -> str:
    """An endpoint's id in the form that clients see."""
    return b64encode(endpoint.id.encode()).decode()


def decoded(token: str) -> str | None:
    """The endpoint id in a token; None if `encoded_id` cannot have written the token."""
    try:
        written = b64decode(token, validate=True)
        return written.decode() if written and b64encode(written).decode() == token else None
    except ValueError:
        return None

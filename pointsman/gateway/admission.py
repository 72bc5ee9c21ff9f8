"""Admission: whose key a request has, how much that tenant may send, and what its requests may cost.

Enters: requests of models and of pipelines alike. Leaves: the same requests, bounded and counted, or `NotAdmitted`.
"""

import secrets
from collections import Counter
from collections.abc import Container, Sequence
from hashlib import sha256
from hmac import compare_digest
from math import ceil
from typing import TYPE_CHECKING

import msgspec

from pointsman.config.schema import GatewaySpec, KeySpec, PriceSpec, TenantSpec
from pointsman.errors import PointsmanError, shown
from pointsman.gateway.openai import Usage
from pointsman.http.parser import HttpRequest
from pointsman.types import MAX_NAME, RequestMetadata

if TYPE_CHECKING:
    from pointsman.gateway.connection import GatewayConnection


class NotAdmitted(PointsmanError):
    """A request is refused before it reaches a dispatcher; says how to answer it."""

    def __init__(self, status: int, why: str, code: str, retry_after_s: int | None = None) -> None:
        self.status, self.code, self.retry_after_s = status, code, retry_after_s
        super().__init__(why)


class Denial(msgspec.Struct, frozen=True):
    """Why a request must wait, and how long."""

    why: str
    retry_after_s: int


class Bucket:
    """A token bucket that holds at most a minute's worth. It may go into debt: usage is known only afterwards."""

    __slots__ = ("_at", "_left", "per_minute")

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self._left = per_minute
        self._at: float | None = None

    def has(self, amount: float, now: float) -> bool:
        if self._at is not None:
            self._left = min(self.per_minute, self._left + (now - self._at) * self.per_minute / 60.0)
        self._at = now
        return self._left >= amount

    def take(self, amount: float) -> None:
        self._left -= amount

    def seconds_until(self, amount: float) -> int:
        """Seconds until this amount is available, at least 1."""
        missing = amount - self._left
        return max(1, ceil(missing / self.per_minute * 60.0)) if self.per_minute else 3600

    def continue_from(self, other: "Bucket") -> None:
        """Start with what is left in another bucket."""
        self._left, self._at = min(other._left, self.per_minute), other._at


class Tenant:
    """The limits of a tenant, and what it has used of them."""

    __slots__ = ("_cost", "_period_ends", "_requests", "_tokens", "name", "spec")

    def __init__(self, spec: TenantSpec) -> None:
        self.name = spec.name
        self.spec = spec
        self._requests = None if spec.requests_per_minute is None else Bucket(spec.requests_per_minute)
        self._tokens = None if spec.tokens_per_minute is None else Bucket(spec.tokens_per_minute)
        self._cost = 0.0
        """In the current period."""
        self._period_ends: float | None = None

    def continue_from(self, other: "Tenant") -> None:
        """Start with what the same tenant has used under its old limits."""
        self._cost, self._period_ends = other._cost, other._period_ends
        for new, old in ((self._requests, other._requests), (self._tokens, other._tokens)):
            if new is not None and old is not None:
                new.continue_from(old)

    def denial(self, request: RequestMetadata, now: float) -> Denial | None:
        """Why this request exceeds the limits; None if it does not, and then it is counted."""
        requests, tokens, spec = self._requests, self._tokens, self.spec
        if requests is not None and not requests.has(1, now):
            why = f'"{self.name}" may send {spec.requests_per_minute:g} requests per minute'
            return Denial(why, requests.seconds_until(1))
        if tokens is not None and not tokens.has(request.input_tokens, now):
            if request.input_tokens > tokens.per_minute:
                why = f"the prompt has about {request.input_tokens} tokens"
                return Denial(f'{why}; "{self.name}" may use {spec.tokens_per_minute:g} per minute', 60)
            why = f'"{self.name}" may use {spec.tokens_per_minute:g} tokens per minute'
            return Denial(why, tokens.seconds_until(request.input_tokens))
        if spec.cost_budget is not None and self._spent(now) >= spec.cost_budget:
            assert self._period_ends is not None
            why = f'"{self.name}" has spent its budget of {spec.cost_budget:g} per {spec.cost_period:g} s'
            return Denial(why, max(1, ceil(self._period_ends - now)))
        if requests is not None:
            requests.take(1)
        if tokens is not None:
            tokens.take(request.input_tokens)
        return None

    def used(
        self, request: RequestMetadata, usage: Usage | None, counted: int | None, price: PriceSpec | None, now: float
    ) -> None:
        """Charge a request that was answered: the usage that the engine reported, else the tokens counted here."""
        prompt = request.input_tokens if usage is None or usage.input is None else usage.input
        answer = counted if usage is None or usage.output is None else usage.output
        answer = answer or 0
        if self._tokens is not None:
            self._tokens.take(prompt - request.input_tokens + answer)
        if price is not None:
            self._spent(now)
            self._cost += (prompt * price.per_million_input_tokens + answer * price.per_million_output_tokens) / 1e6

    def _spent(self, now: float) -> float:
        if self._period_ends is None or now >= self._period_ends:
            self._cost, self._period_ends = 0.0, now + self.spec.cost_period
        return self._cost


class Keys:
    """API keys, each of a tenant: stored as hashes, compared in constant time."""

    def __init__(self, keys: Sequence[KeySpec], tenants: Sequence[TenantSpec], admin_sha256: str = "") -> None:
        self.tenants = {spec.name: Tenant(spec) for spec in tenants}
        self._by_start: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        """Hashes by their first bytes, so that few have to be compared."""
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            self._by_start.setdefault(digest[:2], []).append((digest, self.tenants[key.tenant]))
        self._admin = bytes.fromhex(admin_sha256)
        self.required = bool(keys)

    def changed_to(self, keys: Sequence[KeySpec], tenants: Sequence[TenantSpec], admin_sha256: str) -> "Keys":
        """New keys and tenants; tenants that remain keep what they have used."""
        changed = Keys(keys, tenants, admin_sha256)
        for name, tenant in changed.tenants.items():
            if name in self.tenants:
                tenant.continue_from(self.tenants[name])
        return changed

    def tenant_of(self, request: HttpRequest, client: "GatewayConnection | None") -> Tenant | None:
        """The tenant whose key a request has; None if it has no key or an unknown one. `client` caches the last one."""
        credentials = _credentials(request)
        memo = None if client is None else client.key_memo
        if memo is not None and memo[0] is self and memo[1] == credentials:
            return memo[2]
        tenant = self._lookup(credentials)
        if tenant is not None and client is not None:
            client.key_memo = (self, credentials, tenant)
        return tenant

    def opens_admin(self, request: HttpRequest) -> bool:
        """Whether it has the key of the admin API; False if none is configured."""
        digest = sha256(_credentials(request)).digest()
        return bool(self._admin) and compare_digest(digest, self._admin)

    def _lookup(self, credentials: bytes) -> Tenant | None:
        digest = sha256(credentials).digest()
        found = None
        for known, tenant in self._by_start.get(digest[:2], ()):
            if compare_digest(known, digest):
                found = tenant
        return found


def _credentials(request: HttpRequest) -> bytes:
    given = request.headers.get(b"authorization")
    if given is None:
        return request.headers.get(b"x-api-key", b"")
    scheme, _, key = given.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


class Admission:
    """Admits requests, and gives them their ids."""

    def __init__(self, settings: GatewaySpec, limited: Counter[str], in_flight: Container[str]) -> None:
        self.keys = Keys(settings.keys, settings.tenants, settings.admin_key_sha256)
        self.names_in_flight: Container[str] = ()
        """Ids of pipeline requests, which are not sent anywhere themselves: their steps are."""
        self._limited = limited
        """Requests beyond the limits of their tenant, by tenant."""
        self._in_flight = in_flight
        self._prefix = f"req-{secrets.token_hex(4)}-"
        self._count = 0

    def configure(self, settings: GatewaySpec) -> None:
        self.keys = self.keys.changed_to(settings.keys, settings.tenants, settings.admin_key_sha256)

    def tenant_of(self, http: HttpRequest, client: "GatewayConnection | None" = None) -> Tenant | None:
        """The tenant whose key a request has; None if no keys are required. Raises `NotAdmitted`."""
        if not self.keys.required:
            return None
        tenant = self.keys.tenant_of(http, client)
        if tenant is None:
            raise NotAdmitted(401, "send your API key as: authorization: Bearer KEY", "invalid_api_key")
        return tenant

    def admit(self, request: RequestMetadata, tenant: Tenant, now: float) -> RequestMetadata:
        """The request, with at most the priority that its tenant may use, and counted. Raises `NotAdmitted`."""
        limit = tenant.spec.max_priority
        if limit is not None and request.priority > limit:
            request = msgspec.structs.replace(request, priority=limit)
        denial = tenant.denial(request, now)
        if denial is not None:
            self._limited[tenant.name] += 1
            raise NotAdmitted(429, denial.why, "rate_limit_exceeded", denial.retry_after_s)
        return request

    def request_id(self, http: HttpRequest) -> str:
        """The id that the client sent, or a new one: if it sent none, or if a request in flight has it. Raises
        `NotAdmitted`."""
        given = http.headers.pop(b"x-request-id", None)
        if given is not None:
            name = given.decode("latin-1")
            if not 0 < len(name) <= MAX_NAME or not name.isascii() or not name.isprintable():
                wanted = f"expected 1 to {MAX_NAME} printable ASCII characters"
                raise NotAdmitted(400, f"x-request-id: {wanted}, found {shown(repr(name), 60)}", "invalid_header")
            if name not in self._in_flight and name not in self.names_in_flight:
                return name
        self._count += 1
        return f"{self._prefix}{self._count:x}"

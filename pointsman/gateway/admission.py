"""Admission: which tenant's key a request carries, how much the tenant may send, and what the tenant's requests may
cost.

Enters: requests to models and to pipelines. Leaves: the same requests, bounded and counted, or `NotAdmitted`.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

import msgspec

from pointsman.config.schema import GatewaySpec, KeySpec, PriceSpec, TenantSpec
from pointsman.errors import PointsmanError, shown
from pointsman.gateway.tenants import Charge, Denial, Tenant, UsageBook
from pointsman.http.heads import HttpRequest
from pointsman.parameters import host_and_port, is_loopback
from pointsman.types import MAX_NAME, RequestMetadata

if TYPE_CHECKING:
    from pointsman.gateway.connection import GatewayConnection


FINGERPRINT = 8
"""Number of hexadecimal digits of a key's hash. Events name a key by these digits, as the manifest does."""


class NotAdmitted(PointsmanError):
    """Raised if a request is refused before it reaches a dispatcher; contains the answer to the request."""

    def __init__(
        self,
        status: int,
        why: str,
        code: str,
        retry_after_s: int | None = None,
        *,
        lines: bytes = b"",
        tenant: str = "",
    ) -> None:
        """`lines` are further header lines of the answer, each with its line end. `tenant` is the sender, if known."""
        self.tenant = tenant
        self.status, self.code, self.retry_after_s = status, code, retry_after_s
        self.lines = lines if retry_after_s is None else b"%bretry-after: %d\r\n" % (lines, retry_after_s)
        super().__init__(why)


class Keys:
    """The API keys of tenants, stored as hashes and compared in constant time."""

    def __init__(self, keys: Sequence[KeySpec], tenants: Mapping[str, Tenant], admin_sha256: str = "") -> None:
        self.tenants = tenants
        self._by_start: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        """Hashes, grouped by their first bytes, so that each lookup compares only a few."""
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            self._by_start.setdefault(digest[:2], []).append((digest, tenants[key.tenant]))
        self._admin = bytes.fromhex(admin_sha256)
        self.required = bool(keys)

    def tenant_named(self, name: str) -> Tenant | None:
        """The tenant for which a request was admitted; None if no keys are configured, because clients then choose
        tenant names."""
        return self.tenants.get(name) if self.required else None

    def tenant_of(self, request: HttpRequest, client: "GatewayConnection | None") -> Tenant | None:
        """The tenant whose key a request has; None if the key is missing or unknown. `client` caches the last key."""
        credentials = _credentials(request)
        memo = None if client is None else client.key_memo
        if memo is not None and memo[0] is self and memo[1] == credentials:
            return memo[2]
        tenant = self._lookup(credentials)
        if tenant is not None and client is not None:
            client.key_memo = (self, credentials, tenant)
        return tenant

    def opens_admin(self, request: HttpRequest) -> bool:
        """Whether a request has the key of the admin API; False if none is configured."""
        digest = sha256(_credentials(request)).digest()
        return bool(self._admin) and compare_digest(digest, self._admin)

    def admin_fingerprint(self, request: HttpRequest) -> str:
        """The start of the hash of a request's admin key: these digits identify the key without granting access. Empty
        if the request has no admin key."""
        return sha256(_credentials(request)).hexdigest()[:FINGERPRINT] if self.opens_admin(request) else ""

    def _lookup(self, credentials: bytes) -> Tenant | None:
        digest = sha256(credentials).digest()
        found = None
        for known, tenant in self._by_start.get(digest[:2], ()):
            if compare_digest(known, digest):
                found = tenant
        return found


def _are_public(settings: GatewaySpec) -> bool:
    """Whether pages about the gateway are public."""
    if settings.public_pages is not None:
        return settings.public_pages
    return not settings.keys or is_loopback(host_and_port(settings.listen)[0])


def _credentials(request: HttpRequest) -> bytes:
    given = request.headers.get(b"authorization")
    if given is None:
        return request.headers.get(b"x-api-key", b"")
    scheme, _, key = given.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


class Admission:
    """Admits requests, and gives them their ids."""

    def __init__(self, settings: GatewaySpec, limited: Counter[str], in_flight: Container[str]) -> None:
        self.usage = UsageBook()
        self.tenants: Callable[[Sequence[TenantSpec]], dict[str, Tenant]] = self.usage.tenants
        """Returns a tenant for each of these limits, from the usage book or from this gateway's grants."""
        self.configure(settings)
        self.names_in_flight: Container[str] = ()
        """Ids of pipeline requests in flight; `_in_flight` contains only the steps of such requests."""
        self._limited = limited
        """Number of requests that exceeded the limits of their tenant, by tenant."""
        self._in_flight = in_flight
        self._prefix = f"req-{secrets.token_hex(4)}-"
        self._count = 0

    def configure(self, settings: GatewaySpec) -> None:
        self.keys = Keys(settings.keys, self.tenants(settings.tenants), settings.admin_key_sha256)
        self._pages_are_public = _are_public(settings)

    def page_reader(self, http: HttpRequest, client: "GatewayConnection | None" = None) -> Tenant | None:
        """The tenant that requests a page about the gateway. None if the page is public, if the request has the admin
        key, or if it came over the local listener. Raises `NotAdmitted`."""
        if self._pages_are_public or self.keys.opens_admin(http) or (client is not None and client.is_local):
            return None
        return self.tenant_of(http, client)

    def tenant_of(self, http: HttpRequest, client: "GatewayConnection | None" = None) -> Tenant | None:
        """The tenant whose key a request has; None if no keys are required. Raises `NotAdmitted`."""
        if not self.keys.required:
            return None
        tenant = self.keys.tenant_of(http, client)
        if tenant is None:
            raise NotAdmitted(401, "send your API key as: authorization: Bearer KEY", "invalid_api_key")
        return tenant

    def report(self) -> list[dict[str, Any]]:
        """How much of its limits each tenant has used; see `Tenant.report`."""
        now, wall = time.monotonic(), time.time()
        return [tenant.report(now, wall) for tenant in self.keys.tenants.values()]

    def admit(
        self,
        request: RequestMetadata,
        tenant: Tenant,
        now: float,
        answer: int | None = None,
        price: PriceSpec | None = None,
        *,
        part: bool = False,
    ) -> tuple[RequestMetadata, Charge | None]:
        """The request, with its priority capped at the priority of its tenant, and its charge against the limits; see
        `Tenant.admit`. Raises `NotAdmitted`."""
        limit = tenant.spec.max_priority
        if limit is not None and request.priority > limit:
            request = msgspec.structs.replace(request, priority=limit)
        charge = tenant.admit(request.input_tokens, answer, price, now, part=part)
        if isinstance(charge, Denial):
            raise self._beyond_limits(tenant, charge)
        return request, charge

    def check_limits(self, tenant: Tenant) -> None:
        """Raises `NotAdmitted` if no request of the tenant would be admitted now."""
        denial = tenant.exhausted(time.monotonic())
        if denial is not None:
            raise self._beyond_limits(tenant, denial)

    def _beyond_limits(self, tenant: Tenant, denial: Denial) -> NotAdmitted:
        self._limited[tenant.name] += 1
        return NotAdmitted(429, denial.why, "rate_limit_exceeded", denial.retry_after_s, tenant=tenant.name)

    def request_id(self, http: HttpRequest) -> str:
        """The id that the client sent. If the client sent no id, or a request in flight already uses it, a new id.
        Raises `NotAdmitted`."""
        given = http.headers.pop(b"x-request-id", None)
        if given is not None:
            name = given.decode("latin-1")
            if not 0 < len(name) <= MAX_NAME or not name.isascii() or not name.isprintable():
                wanted = f"expected 1 to {MAX_NAME} printable ASCII characters"
                raise NotAdmitted(400, f"x-request-id: {wanted}, found {shown(repr(name), 60)}", "invalid_header")
            if name not in self._in_flight and name not in self.names_in_flight:
                return name
        return self.new_id()

    def id_of_refused(self, http: HttpRequest) -> str:
        """The id of a request that is not served."""
        try:
            return self.request_id(http)
        except NotAdmitted:
            return self.new_id()

    def new_id(self) -> str:
        self._count += 1
        return f"{self._prefix}{self._count:x}"

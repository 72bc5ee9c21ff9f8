"""API keys: stored as hashes, compared in constant time, each somebody's."""

from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING

from pointsman.config.manifest import KeySpec, TenantSpec
from pointsman.gateway.requests import HttpRequest
from pointsman.gateway.tenants import Tenant

if TYPE_CHECKING:
    from pointsman.gateway.client import ClientConnection


class Keys:
    """Who may come in, and as whom."""

    def __init__(self, keys: Sequence[KeySpec], tenants: Sequence[TenantSpec], admin_sha256: str = "") -> None:
        self.tenants = {spec.name: Tenant(spec) for spec in tenants}
        self._by_start: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        """Hashes by their first bytes, so that many keys need not all be compared."""
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            self._by_start.setdefault(digest[:2], []).append((digest, self.tenants[key.tenant]))
        self._admin = bytes.fromhex(admin_sha256)
        self.required = bool(keys)
        """Whether requests need a key."""

    def changed_to(self, keys: Sequence[KeySpec], tenants: Sequence[TenantSpec], admin_sha256: str) -> "Keys":
        """Other keys and tenants; what those who stay have used is not forgotten."""
        changed = Keys(keys, tenants, admin_sha256)
        for name, tenant in changed.tenants.items():
            if name in self.tenants:
                tenant.go_on_from(self.tenants[name])
        return changed

    def tenant_of(self, client: "ClientConnection | None", request: HttpRequest) -> Tenant | None:
        """Whose key a request has; None if it has none, or one that nobody knows. `client` remembers the last one."""
        credentials = _credentials(request)
        memo = None if client is None else client.key_memo
        if memo is not None and memo[0] is self and memo[1] == credentials:
            return memo[2]
        tenant = self._lookup(credentials)
        if tenant is not None and client is not None:
            client.key_memo = (self, credentials, tenant)
        return tenant

    def opens_admin(self, request: HttpRequest) -> bool:
        """Whether it has the key of the admin API. If there is no such key, nobody has it."""
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

"""Admission: whose key a request has, how much that tenant may send, and what its requests may cost.

Enters: requests of models and of pipelines alike. Leaves: the same requests, bounded and counted, or `NotAdmitted`.
"""

import secrets
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from hashlib import sha256
from hmac import compare_digest
from math import ceil
from typing import TYPE_CHECKING, Any

import msgspec

from pointsman.config.schema import GatewaySpec, KeySpec, PriceSpec, TenantSpec
from pointsman.errors import PointsmanError, shown
from pointsman.gateway.openai import Usage
from pointsman.http.heads import HttpRequest
from pointsman.parameters import host_and_port, is_loopback
from pointsman.types import MAX_NAME, RequestMetadata

if TYPE_CHECKING:
    from pointsman.gateway.connection import GatewayConnection


class NotAdmitted(PointsmanError):
    """A request is refused before it reaches a dispatcher; says how to answer it."""

    def __init__(
        self, status: int, why: str, code: str, retry_after_s: int | None = None, *, lines: bytes = b""
    ) -> None:
        """`lines`: more header lines of the answer, each with its end."""
        self.status, self.code, self.retry_after_s = status, code, retry_after_s
        self.lines = lines if retry_after_s is None else b"%bretry-after: %d\r\n" % (lines, retry_after_s)
        super().__init__(why)


class Denial(msgspec.Struct, frozen=True):
    """Why a request must wait, and how long."""

    why: str
    retry_after_s: int


class Bucket:
    """A token bucket that holds at most a minute's worth. It may go into debt: usage is known only afterwards."""

    __slots__ = ("_at", "left", "per_minute")

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self.left = per_minute
        self._at: float | None = None

    def refill(self, now: float) -> float:
        """What is left now."""
        if self._at is not None:
            self.left = min(self.per_minute, self.left + (now - self._at) * self.per_minute / 60.0)
        self._at = now
        return self.left

    def take(self, amount: float) -> None:
        self.left -= amount

    def seconds_until(self, amount: float) -> int:
        """Seconds until this amount is available, at least 1."""
        missing = amount - self.left
        return max(1, ceil(missing / self.per_minute * 60.0)) if self.per_minute else 3600

    def limited_to(self, per_minute: float) -> "Bucket":
        """The same bucket with another limit."""
        self.per_minute, self.left = per_minute, min(self.left, per_minute)
        return self


class Reserve:
    """An amount that is set aside for requests in flight."""

    __slots__ = ("amount", "holders")

    def __init__(self) -> None:
        self.amount = 0.0
        self.holders = 0
        """Requests that it is set aside for; also those that have used up their part."""

    def add(self, amount: float) -> None:
        self.amount += amount
        self.holders += 1

    def leave(self, rest: float) -> None:
        """A request has ended, and returns what it has not used."""
        self.holders -= 1
        self.amount = self.amount - rest if self.holders else 0.0  # without the rounding errors of a long day


SETTLES_S = 1
"""Retry-After of a request that has to wait until others in flight end and return what they reserved."""


class Tenant:
    """The limits of a tenant, what it has used of them, and what requests in flight may still use."""

    def __init__(self, spec: TenantSpec) -> None:
        self.name = spec.name
        self.spec = spec
        self.spent = 0.0
        """In the current period."""
        self.cost = Reserve()
        self.tokens = Reserve()
        self._period_ends: float | None = None
        self._requests_left = _bucket(None, spec.requests_per_minute)
        self._tokens_left = _bucket(None, spec.tokens_per_minute)

    def configure(self, spec: TenantSpec) -> None:
        """New limits; what was used and reserved stays."""
        self.spec = spec
        self._requests_left = _bucket(self._requests_left, spec.requests_per_minute)
        self._tokens_left = _bucket(self._tokens_left, spec.tokens_per_minute)

    @property
    def is_limited(self) -> bool:
        """Whether the size of a request matters."""
        return self._tokens_left is not None or self.spec.cost_budget is not None

    def admit(
        self, prompt: int, answer: int | None, price: PriceSpec | None, now: float, *, part: bool = False
    ) -> "Charge | Denial | None":
        """Count a request with a prompt of this many tokens and an answer of at most that many, and reserve what it may
        use; a denial if it exceeds the limits, and then it is not counted.

        `answer`: None if there is nothing to reserve. `part`: of a request that was counted already. Its cost must fit
        into the budget like any other; tokens it may borrow from the next minute, for work that was begun.
        """
        requests, charge = self._requests_left, None if answer is None else Charge(self, prompt, answer, price)
        denial = self._beyond_budget(0.0 if charge is None else charge.cost, now)
        if not part:
            denial = self._beyond_requests(now) or self._beyond_tokens(prompt, answer or 0, now) or denial
        if denial is not None:
            return denial
        if requests is not None and not part:
            requests.take(1)
        if charge is not None:
            charge.reserve()
        return charge

    def exhausted(self, now: float) -> Denial | None:
        """Why no request fits the limits now, whatever its size; None if one may."""
        return self._beyond_requests(now) or (self._beyond_budget(0.0, now) if self.spec.cost_budget else None)

    def _beyond_requests(self, now: float) -> Denial | None:
        left = self._requests_left
        if left is None or left.refill(now) >= 1:
            return None
        limit = f'"{self.name}" may send {self.spec.requests_per_minute:g} requests per minute'
        return Denial(limit, left.seconds_until(1))

    def _beyond_tokens(self, prompt: int, answer: int, now: float) -> Denial | None:
        left, reserved = self._tokens_left, self.tokens
        if left is None:
            return None
        free, needed = left.refill(now) - reserved.amount, prompt + answer
        if free >= needed or (not reserved.holders and free >= prompt):
            return None
        limit = f'"{self.name}" may use {left.per_minute:g} tokens per minute'
        if prompt > left.per_minute:
            return Denial(f"{limit}, and the prompt has about {prompt}", 60)
        if left.left < prompt:
            return Denial(limit, left.seconds_until(prompt))
        held = f"{reserved.amount:.0f} are reserved for {_requests(reserved.holders)} in flight"
        return Denial(f"{limit}: {held}, and this one may use {needed}; a lower max_tokens reserves less", SETTLES_S)

    def _beyond_budget(self, cost: float, now: float) -> Denial | None:
        spec, reserved = self.spec, self.cost
        if spec.cost_budget is None:
            return None
        left = spec.cost_budget - self.spent_by(now)
        budget = f"budget of {spec.cost_budget:g} per {spec.cost_period:g} s"
        if left <= 0:
            assert self._period_ends is not None
            return Denial(f'"{self.name}" has spent its {budget}', max(1, ceil(self._period_ends - now)))
        free = left - reserved.amount
        if not reserved.holders or (free > 0 and cost <= free):
            return None
        held = f"{reserved.amount:g} is reserved for {_requests(reserved.holders)} in flight"
        why = f'"{self.name}" has {left:g} left of its {budget}: {held}, and this one may cost {cost:g}'
        return Denial(f"{why}; a lower max_tokens reserves less", SETTLES_S)

    def use(self, cost: float, tokens: float, now: float) -> None:
        """Charge what was used; below 0 if it was less than was charged before."""
        if cost:
            self.spent = max(0.0, self.spent_by(now) + cost)
        if self._tokens_left is not None:
            self._tokens_left.take(tokens)

    def spent_by(self, now: float) -> float:
        """What was spent in the period of this time, which begins now if the last one is over."""
        period, ends = self.spec.cost_period, self._period_ends
        if ends is None or now >= ends:
            self.spent, self._period_ends = 0.0, now + period
        elif ends > now + period:  # the period was made shorter
            self._period_ends = now + period
        return self.spent

    def is_idle(self, now: float) -> bool:
        """Whether it has nothing in flight, and no period that would go on."""
        return not self.tokens.holders and (self._period_ends is None or now >= self._period_ends)

    def report(self, now: float, wall: float) -> dict[str, Any]:
        """Usage against limits, as plain data. `wall`: Unix time."""
        spec, requests, tokens = self.spec, self._requests_left, self._tokens_left
        spent, ends = self.spent_by(now), self._period_ends
        return {
            "name": self.name,
            "in_flight": self.tokens.holders,
            "spent": spent,
            "reserved": self.cost.amount,
            "budget": spec.cost_budget,
            "period_ends": None if ends is None else wall + ends - now,
            "tokens_per_minute": spec.tokens_per_minute,
            "tokens_left": None if tokens is None else tokens.refill(now),
            "tokens_reserved": self.tokens.amount,
            "requests_per_minute": spec.requests_per_minute,
            "requests_left": None if requests is None else requests.refill(now),
        }


def _bucket(before: Bucket | None, per_minute: float | None) -> Bucket | None:
    if per_minute is None:
        return None
    return Bucket(per_minute) if before is None else before.limited_to(per_minute)


def _requests(number: int) -> str:
    return "a request" if number == 1 else f"{number} requests"


class Charge:
    """What one request takes from the limits of its tenant: reserved when it is admitted, used as its answer grows, and
    settled once, whatever becomes of it."""

    __slots__ = ("_answer", "_answer_price", "_left", "_prompt", "_prompt_price", "_tenant", "_tokens_left", "_used",
                 "_used_tokens", "cost")  # fmt: skip

    def __init__(self, tenant: Tenant, prompt: int, answer: int, price: PriceSpec | None) -> None:
        self._tenant: Tenant | None = tenant
        """None once it is settled."""
        self._prompt, self._answer = prompt, answer
        self._prompt_price = 0.0 if price is None else price.per_million_input_tokens / 1e6
        self._answer_price = 0.0 if price is None else price.per_million_output_tokens / 1e6
        self.cost = prompt * self._prompt_price + answer * self._answer_price
        """Expected at most."""
        self._left, self._tokens_left = self.cost, float(prompt + answer)
        """Reserved, and not used."""
        self._used = self._used_tokens = 0.0

    def reserve(self) -> None:
        assert self._tenant is not None
        self._tenant.tokens.add(self._tokens_left)
        if self.cost:
            self._tenant.cost.add(self.cost)

    def grown(self, answer: int, now: float) -> None:
        """The answer has this many tokens so far."""
        self._use(self._prompt, answer, now)

    def settle(self, usage: Usage | None, counted: int | None, size: int, now: float) -> None:
        """The answer is complete: charge the usage that the engine reported, else the tokens counted here, else a token
        per four bytes of its size, but then no more than was reserved."""
        prompt = self._prompt if usage is None or usage.input is None else usage.input
        answer = counted if usage is None or usage.output is None else usage.output
        self._use(prompt, min(self._answer, size // 4) if answer is None else answer, now)
        self.close()

    def close(self) -> None:
        """Return what is reserved and was not used. Calls after the first change nothing."""
        tenant, self._tenant = self._tenant, None
        if tenant is not None:
            tenant.tokens.leave(self._tokens_left)
            if self.cost:
                tenant.cost.leave(self._left)

    def _use(self, prompt: int, answer: int, now: float) -> None:
        tenant = self._tenant
        if tenant is None:
            return
        cost, tokens = prompt * self._prompt_price + answer * self._answer_price, float(prompt + answer)
        tenant.use(cost - self._used, tokens - self._used_tokens, now)
        self._used, self._used_tokens = cost, tokens
        left, tokens_left = max(0.0, self.cost - cost), max(0.0, self._prompt + self._answer - tokens)
        tenant.cost.amount += left - self._left
        tenant.tokens.amount += tokens_left - self._tokens_left
        self._left, self._tokens_left = left, tokens_left


class Keys:
    """API keys, each of a tenant: stored as hashes, compared in constant time."""

    def __init__(self, keys: Sequence[KeySpec], tenants: Mapping[str, Tenant], admin_sha256: str = "") -> None:
        self.tenants = tenants
        self._by_start: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        """Hashes by their first bytes, so that few have to be compared."""
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            self._by_start.setdefault(digest[:2], []).append((digest, tenants[key.tenant]))
        self._admin = bytes.fromhex(admin_sha256)
        self.required = bool(keys)

    def tenant_named(self, name: str) -> Tenant | None:
        """The tenant that a request was admitted for; None if no keys are required: then names are the clients' own."""
        return self.tenants.get(name) if self.required else None

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


def _are_public(settings: GatewaySpec) -> bool:
    """Whether pages about the gateway need no key."""
    if settings.public_pages is not None:
        return settings.public_pages
    return not settings.keys or is_loopback(host_and_port(settings.listen)[0])


def _credentials(request: HttpRequest) -> bytes:
    given = request.headers.get(b"authorization")
    if given is None:
        return request.headers.get(b"x-api-key", b"")
    scheme, _, key = given.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


class UsageBook:
    """What tenants have used, across changes of settings."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        """Also tenants that are gone, until their period is over: they may come back."""

    def tenants(self, specs: Sequence[TenantSpec]) -> dict[str, Tenant]:
        """The tenants with these limits; those that are known keep what they have used."""
        for spec in specs:
            known = self._tenants.get(spec.name)
            if known is None:
                self._tenants[spec.name] = Tenant(spec)
            else:
                known.configure(spec)
        listed, now = {spec.name: self._tenants[spec.name] for spec in specs}, time.monotonic()
        for name in [name for name, one in self._tenants.items() if name not in listed and one.is_idle(now)]:
            del self._tenants[name]
        return listed


class Admission:
    """Admits requests, and gives them their ids."""

    def __init__(self, settings: GatewaySpec, limited: Counter[str], in_flight: Container[str]) -> None:
        self.usage = UsageBook()
        self.configure(settings)
        self.names_in_flight: Container[str] = ()
        """Ids of pipeline requests, which are not sent anywhere themselves: their steps are."""
        self._limited = limited
        """Requests beyond the limits of their tenant, by tenant."""
        self._in_flight = in_flight
        self._prefix = f"req-{secrets.token_hex(4)}-"
        self._count = 0

    def configure(self, settings: GatewaySpec) -> None:
        self.keys = Keys(settings.keys, self.usage.tenants(settings.tenants), settings.admin_key_sha256)
        self._pages_are_public = _are_public(settings)

    def page_reader(self, http: HttpRequest, client: "GatewayConnection | None" = None) -> Tenant | None:
        """The tenant that reads a page about the gateway; None if it needs no key, or has that of the admin API. Raises
        `NotAdmitted`."""
        if self._pages_are_public or self.keys.opens_admin(http):
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
        """What tenants have used of their limits; see `Tenant.report`."""
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
    ) -> "tuple[RequestMetadata, Charge | None]":
        """The request, with at most the priority that its tenant may use, and what it may use of the limits; see
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
        return NotAdmitted(429, denial.why, "rate_limit_exceeded", denial.retry_after_s)

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
        return self.new_id()

    def new_id(self) -> str:
        self._count += 1
        return f"{self._prefix}{self._count:x}"

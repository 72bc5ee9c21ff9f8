"""Tenants: what each tenant may use, what it has used, and what its requests in flight may still use.

Enters: requests with the tokens that they may take, and later the tokens that they took. Leaves: charges and denials,
and usage that survives new settings and restarts. The one rule: a charge is settled once, however its request ends.
"""

import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, ClassVar

import msgspec

from pointsman.config.schema import PriceSpec, TenantSpec
from pointsman.errors import PointsmanError
from pointsman.gateway.openai import Usage
from pointsman.runtimes.stores import UsageStore


class Denial(msgspec.Struct, frozen=True):
    """Why a request is refused, and when it may be sent again."""

    why: str
    retry_after_s: int


class Bucket:
    """A token bucket that holds at most a minute's worth. It may go into debt, because usage is known only
    afterwards."""

    __slots__ = ("_at", "left", "per_minute")

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self.left = per_minute
        self._at: float | None = None

    def refill(self, now: float) -> float:
        """The amount that is left now."""
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
    """An amount that is reserved for requests in flight."""

    __slots__ = ("amount", "holders")

    def __init__(self) -> None:
        self.amount = 0.0
        self.holders = 0
        """Number of requests that share the amount, including those that have used up their part."""

    def add(self, amount: float) -> None:
        self.amount += amount
        self.holders += 1

    def leave(self, rest: float) -> None:
        """Release the amount that an ended request did not use."""
        self.holders -= 1
        self.amount = self.amount - rest if self.holders else 0.0  # drop accumulated rounding errors


SETTLES_S = 1
"""Retry-After for a request that has to wait until requests in flight end and return what they reserved."""


class Tenant:
    """The limits of a tenant, what it has used, and what its requests in flight may still use."""

    kind: ClassVar[type[Bucket]] = Bucket

    def __init__(self, spec: TenantSpec) -> None:
        self.name = spec.name
        self.spec = spec
        self.spent = 0.0
        """Cost spent in the current period."""
        self.cost = Reserve()
        self.tokens = Reserve()
        self.changed = False
        """Whether the usage has changed since it was last saved."""
        self.period_ends: float | None = None
        """The end of the current period; None before the first period begins."""
        self.requests_left = _bucket(self.kind, None, spec.requests_per_minute)
        self.tokens_left = _bucket(self.kind, None, spec.tokens_per_minute)

    def configure(self, spec: TenantSpec) -> None:
        """Set new limits; the used and reserved amounts stay."""
        self.spec = spec
        self.requests_left = _bucket(self.kind, self.requests_left, spec.requests_per_minute)
        self.tokens_left = _bucket(self.kind, self.tokens_left, spec.tokens_per_minute)

    @property
    def is_limited(self) -> bool:
        """Whether the limits depend on the size of a request."""
        return self.tokens_left is not None or self.spec.cost_budget is not None

    def admit(
        self, prompt: int, answer: int | None, price: PriceSpec | None, now: float, *, part: bool = False
    ) -> "Charge | Denial | None":
        """Count a request, and reserve what it may use. `prompt` and `answer` are the tokens of its prompt and the
        maximum tokens of its answer. If the request exceeds the limits, it is not counted, and the result is a denial.

        `answer` is None if there is nothing to reserve. `part` is true if the request is part of a request that was
        counted already. The cost of a part must fit into the budget like any other cost, but a part may borrow tokens
        from the next minute, because work has begun.
        """
        requests, charge = self.requests_left, None if answer is None else Charge(self, prompt, answer, price)
        denial = self._beyond_budget(0.0 if charge is None else charge.cost, now)
        if not part:
            denial = self._beyond_requests(now) or self._beyond_tokens(prompt, answer or 0, now) or denial
        if denial is not None:
            return denial
        if requests is not None and not part:
            requests.take(1)
        if charge is not None:
            charge.reserve()
        self.changed = True
        return charge

    def exhausted(self, now: float) -> Denial | None:
        """Why no request fits the limits now, whatever its size; None if some request may fit."""
        return self._beyond_requests(now) or (self._beyond_budget(0.0, now) if self.spec.cost_budget else None)

    def _beyond_requests(self, now: float) -> Denial | None:
        left = self.requests_left
        if left is None or left.refill(now) >= 1:
            return None
        limit = f'"{self.name}" may send {self.spec.requests_per_minute:g} requests per minute'
        return Denial(limit, left.seconds_until(1))

    def _beyond_tokens(self, prompt: int, answer: int, now: float) -> Denial | None:
        left, reserved = self.tokens_left, self.tokens
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
        left = self.budget_left(now)
        budget = f"budget of {spec.cost_budget:g} per {spec.cost_period:g} s"
        if left <= 0:
            retry_s = SETTLES_S if self.period_ends is None else max(1, ceil(self.period_ends - now))
            return Denial(f'"{self.name}" has spent its {budget}', retry_s)
        free = left - reserved.amount
        if not reserved.holders or (free > 0 and cost <= free):
            return None
        held = f"{reserved.amount:g} is reserved for {_requests(reserved.holders)} in flight"
        why = f'"{self.name}" has {left:g} left of its {budget}: {held}, and this one may cost {cost:g}'
        return Denial(f"{why}; a lower max_tokens reserves less", SETTLES_S)

    def budget_left(self, now: float) -> float:
        """What is left of the budget in the current period."""
        return (self.spec.cost_budget or 0.0) - self.spent_by(now)

    def use(self, cost: float, tokens: float, now: float) -> None:
        """Charge what was used. The amounts are negative if less was used than was charged before."""
        if cost:
            self.spent = max(0.0, self.spent_by(now) + cost)
        if self.tokens_left is not None:
            self.tokens_left.take(tokens)
        self.changed = True

    def spent_by(self, now: float) -> float:
        """The cost spent in the period at this time. If the last period is over, a new one begins now."""
        period, ends = self.spec.cost_period, self.period_ends
        if ends is None or now >= ends:
            self.spent, self.period_ends = 0.0, now + period
        elif ends > now + period:  # new settings have shortened the period
            self.period_ends = now + period
        return self.spent

    def report(self, now: float, wall: float) -> dict[str, Any]:
        """Usage and limits, as plain data. `wall` is the Unix time."""
        spec, requests, tokens = self.spec, self.requests_left, self.tokens_left
        spent, ends = self.spent_by(now), self.period_ends
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


def _bucket(kind: type[Bucket], before: Bucket | None, per_minute: float | None) -> Bucket | None:
    if per_minute is None:
        return None
    return kind(per_minute) if before is None else before.limited_to(per_minute)


def is_idle(tenant: Tenant, now: float) -> bool:
    """Whether a tenant has nothing in flight and no open period."""
    return not tenant.tokens.holders and (tenant.period_ends is None or now >= tenant.period_ends)


def _requests(number: int) -> str:
    return "a request" if number == 1 else f"{number} requests"


class Charge:
    """What one request takes from the limits of its tenant. The amount is reserved when the request is admitted, used
    as the answer grows, and settled once, however the request ends."""

    __slots__ = ("_answer", "_answer_price", "_left", "_prompt", "_prompt_price", "_tenant", "_tokens_left",
                 "_used_tokens", "cost", "used")  # fmt: skip

    def __init__(self, tenant: Tenant, prompt: int, answer: int, price: PriceSpec | None) -> None:
        self._tenant: Tenant | None = tenant
        """None once the charge is settled."""
        self._prompt, self._answer = prompt, answer
        self._prompt_price = 0.0 if price is None else price.per_million_input_tokens / 1e6
        self._answer_price = 0.0 if price is None else price.per_million_output_tokens / 1e6
        self.cost = prompt * self._prompt_price + answer * self._answer_price
        """Maximum expected cost."""
        self._left, self._tokens_left = self.cost, float(prompt + answer)
        """Cost and tokens that are reserved and not used yet."""
        self.used = self._used_tokens = 0.0
        """Cost and tokens that the tenant has been charged so far."""

    def reserve(self) -> None:
        assert self._tenant is not None
        self._tenant.tokens.add(self._tokens_left)
        if self.cost:
            self._tenant.cost.add(self.cost)

    def grown(self, answer: int, now: float) -> None:
        """Charge for an answer with this many tokens so far."""
        self._use(self._prompt, answer, now)

    def settle(self, usage: Usage | None, counted: int | None, size: int, now: float) -> None:
        """Settle a complete answer: charge the usage that the engine reported. If there is none, charge the tokens
        counted here. If there is no count either, charge a token per four bytes of the answer, but no more than was
        reserved."""
        prompt = self._prompt if usage is None or usage.input is None else usage.input
        answer = counted if usage is None or usage.output is None else usage.output
        self._use(prompt, min(self._answer, size // 4) if answer is None else answer, now)
        self.close()

    def close(self) -> None:
        """Return what is reserved and not used. Only the first call has an effect."""
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
        tenant.use(cost - self.used, tokens - self._used_tokens, now)
        self.used, self._used_tokens = cost, tokens
        left, tokens_left = max(0.0, self.cost - cost), max(0.0, self._prompt + self._answer - tokens)
        tenant.cost.amount += left - self._left
        tenant.tokens.amount += tokens_left - self._tokens_left
        self._left, self._tokens_left = left, tokens_left


class UsageState(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant has used, as a store keeps it. Times are Unix times, because periods continue while no plane
    runs."""

    at: float
    spent: float
    period_ends: float | None
    requests_left: float | None
    """The number of requests left in the bucket for one minute; None if there is no limit."""
    tokens_left: float | None

    @classmethod
    def of(cls, tenant: Tenant, now: float, wall: float) -> "UsageState":
        ends, requests, tokens = tenant.period_ends, tenant.requests_left, tenant.tokens_left
        return cls(
            at=wall,
            spent=tenant.spent,
            period_ends=None if ends is None else wall + ends - now,
            requests_left=None if requests is None else requests.refill(now),
            tokens_left=None if tokens is None else tokens.refill(now),
        )

    def restore(self, tenant: Tenant, now: float, wall: float) -> None:
        """Restore a tenant. Since its usage was saved, its buckets have refilled, and its period may be over."""
        if self.period_ends is not None and self.period_ends > wall:
            tenant.spent, tenant.period_ends = self.spent, now + self.period_ends - wall
        for bucket, left in ((tenant.requests_left, self.requests_left), (tenant.tokens_left, self.tokens_left)):
            if bucket is not None and left is not None:
                bucket.left = min(bucket.per_minute, left + max(0.0, wall - self.at) * bucket.per_minute / 60.0)


SAVE_S = 0.7
"""Minimum time between two saves of usage. The gateway checks every 0.25 s, so a plane that is killed loses less than a
second of usage."""


class UsageBook:
    """The usage of tenants, which survives new settings and restarts."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._store: UsageStore | None = None
        self._tenants: dict[str, Tenant] = {}
        """All tenants. Removed tenants stay until their period is over, because they may come back."""
        self._saved_at = -SAVE_S

    def tenants(self, specs: Sequence[TenantSpec]) -> dict[str, Tenant]:
        """A tenant for each of these limits; known tenants keep their usage."""
        for spec in specs:
            known = self._tenants.get(spec.name)
            if known is None:
                self._tenants[spec.name] = Tenant(spec)
            else:
                known.configure(spec)
        listed, now = {spec.name: self._tenants[spec.name] for spec in specs}, time.monotonic()
        self._forget([name for name, one in self._tenants.items() if name not in listed and is_idle(one, now)])
        return listed

    def open(self, store: UsageStore) -> None:
        """Load usage from this store, and save usage there from now on. Raises `PointsmanError` if the store cannot be
        read."""
        now, wall = time.monotonic(), self._wall()
        for name, text in store.usage().items():
            try:
                state = msgspec.json.decode(text, type=UsageState)
            except msgspec.DecodeError as error:
                raise PointsmanError(
                    f'what tenant "{name}" has used cannot be read ({error}); move the state directory away, and apply '
                    "the manifest again"
                ) from error
            state.restore(self._tenants.setdefault(name, Tenant(TenantSpec(name=name))), now, wall)
        self._store = store

    def save(self, now: float) -> None:
        """Save the usage that has changed, unless it was saved a moment ago."""
        if self._store is None or now - self._saved_at < SAVE_S:
            return
        changed = [tenant for tenant in self._tenants.values() if tenant.changed]
        if changed:
            self._saved_at, wall = now, self._wall()
            states = {one.name: msgspec.json.encode(UsageState.of(one, now, wall)).decode() for one in changed}
            self._store.save_usage(states)
            for tenant in changed:
                tenant.changed = False

    def close(self) -> None:
        """Save the usage that has changed, for the last time."""
        self._saved_at = -SAVE_S
        self.save(time.monotonic())
        self._store = None

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            del self._tenants[name]
        if names and self._store is not None:
            self._store.forget_usage(names)

"""Limits of tenants that several gateways share: one bank holds the limits, and every gateway uses what it was granted.

Enters: the gateways' use, the needs that they could not meet, and the time. Leaves: grants, and demands to return
units. The one rule: a unit is granted once. Between two reports, all gateways together use at most what a single
gateway would use, plus one request per tenant at each gateway, because a gateway may admit one request that does not
fit.

There are three kinds of units: requests, tokens and cost. The bank has the same tenants as a single gateway (`Tenant`,
stored in the same way), and charges them for the use that gateways report. The bank can grant units that are left there
and that no gateway holds. About ten times a second, it divides the remaining amount by recent use, with a small equal
part for all gateways. A gateway with an unmet need comes first.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor
from typing import Any, ClassVar

import msgspec

from pointsman.config.schema import GatewaySpec, PriceSpec, TenantSpec
from pointsman.gateway.tenants import SETTLES_S, Bucket, Charge, Denial, Tenant, UsageBook
from pointsman.runtimes.link import Grant, TenantUse

KINDS = range(3)
"""Amounts of requests, tokens and cost."""
ALIKE = 0.1
"""The part of the remaining amount that is divided equally; the rest is divided by recent use."""
MEMORY = 0.9
"""The factor by which earlier use decays at each division."""
SLACK = 0.2
"""How far a gateway may exceed its part, as a share of this part. A gateway that exceeds its part further returns the
surplus."""
ALL_S = 1.0
"""How often the limits of tenants that have sent nothing are divided."""
NEEDED_S = 5.0
"""How long an unmet need counts; after that, the client may have given up."""
Units = tuple[float, float, float]
NONE: Units = (0.0, 0.0, 0.0)


class GrantBucket(Bucket):
    """The unused part of a grant. It does not refill by itself."""

    __slots__ = ("used",)

    def __init__(self, per_minute: float) -> None:
        super().__init__(per_minute)
        self.left = 0.0
        self.used = 0.0
        """Amount used since the last report."""

    def refill(self, now: float) -> float:
        return self.left

    def take(self, amount: float) -> None:
        self.left -= amount
        self.used += amount

    def seconds_until(self, amount: float) -> int:
        return SETTLES_S  # a grant may arrive at any moment

    def limited_to(self, per_minute: float) -> "GrantBucket":
        self.per_minute = per_minute
        return self


class GrantedTenant(Tenant):
    """A tenant at one of several gateways. The tenant may use what the bank has granted to this gateway."""

    kind: ClassVar[type[Bucket]] = GrantBucket

    def __init__(self, spec: TenantSpec) -> None:
        super().__init__(spec)
        self.cost_left = GrantBucket(0.0)
        self._needed = NONE
        self._returned = NONE
        self._told: TenantUse | None = None

    def admit(
        self, prompt: int, answer: int | None, price: PriceSpec | None, now: float, *, part: bool = False
    ) -> "Charge | Denial | None":
        found = super().admit(prompt, answer, price, now, part=part)
        if isinstance(found, Denial):
            cost = 0.0 if answer is None else Charge(self, prompt, answer, price).cost
            self._needed = _largest(self._needed, (0.0 if part else 1.0, float(prompt + (answer or 0)), cost))
        return found

    def exhausted(self, now: float) -> Denial | None:
        found = super().exhausted(now)
        if found is not None:
            self._needed = _largest(self._needed, (1.0, 0.0, 1e-9))
        return found

    def budget_left(self, now: float) -> float:
        if self.period_ends is not None and now >= self.period_ends:
            self.period_ends = None  # a grant may arrive soon
        return self.cost_left.left

    def use(self, cost: float, tokens: float, now: float) -> None:
        self.cost_left.take(cost)
        if self.tokens_left is not None:
            self.tokens_left.take(tokens)

    def granted(self, grant: Grant, now: float) -> None:
        """Add the granted amounts, and return the amounts that the bank demands, as far as they are not reserved."""
        reserved, returned = (0.0, self.tokens.amount, self.cost.amount), list(self._returned)
        for kind, bucket in enumerate(self._buckets()):
            if bucket is not None:
                bucket.left += grant.give[kind]
                back = min(grant.take[kind], max(0.0, bucket.left - reserved[kind]))
                bucket.left -= back
                returned[kind] += back
        self._returned = (returned[0], returned[1], returned[2])
        self.period_ends = None if grant.period_left_s is None else now + grant.period_left_s

    def report(self, now: float, wall: float) -> dict[str, Any]:
        return {"name": self.name}

    def usage(self, *, whole: bool = False) -> TenantUse | None:
        """The usage; None if it has not changed since the last call. With `whole`, the usage is returned in any
        case."""
        buckets = self._buckets()
        used = [0.0 if one is None else one.used for one in buckets]
        held = [0.0 if one is None else one.left for one in buckets]
        told = TenantUse(
            (used[0], used[1], used[2]),
            self._returned,
            self._needed,
            (held[0], held[1], held[2]),
            self.tokens.holders,
            (self.tokens.amount, self.cost.amount),
        )
        for one in buckets:
            if one is not None:
                one.used, one.left = 0.0, max(0.0, one.left)  # from now on, the bank keeps the debt
        self._needed = self._returned = NONE
        before, self._told = self._told, told
        return told if whole or told != before or any(told.used) or any(told.returned) else None

    def _buckets(self) -> tuple[GrantBucket | None, GrantBucket | None, GrantBucket | None]:
        requests, tokens = self.requests_left, self.tokens_left
        assert requests is None or isinstance(requests, GrantBucket)
        assert tokens is None or isinstance(tokens, GrantBucket)
        return requests, tokens, self.cost_left


class GrantedTenants:
    """The tenants of one of several gateways."""

    def __init__(self) -> None:
        self._tenants: dict[str, GrantedTenant] = {}
        self._unsent: dict[str, TenantUse] = {}
        """Usage that could not be reported because there was no plane."""

    def tenants(self, specs: Sequence[TenantSpec]) -> dict[str, Tenant]:
        """A tenant for each of these limits; known tenants keep what they hold."""
        for spec in specs:
            if spec.name in self._tenants:
                self._tenants[spec.name].configure(spec)
            else:
                self._tenants[spec.name] = GrantedTenant(spec)
        return {spec.name: self._tenants[spec.name] for spec in specs}

    def usage(self, *, whole: bool = False) -> dict[str, TenantUse]:
        """The tenants' usage that has changed since the last call. With `whole`, the usage of all tenants, for a plane
        that does not know it yet."""
        told, self._unsent = self._unsent, {}
        for name, one in self._tenants.items():
            use = one.usage(whole=whole)
            if use is not None:
                told[name] = _together(told.get(name), use)
        return told

    def not_told(self, tenants: Mapping[str, TenantUse]) -> None:
        """Keep usage that did not reach the plane, to report it later."""
        for name, use in tenants.items():
            self._unsent[name] = _together(use, self._unsent.get(name, use))

    def granted(self, grants: Mapping[str, Grant], now: float) -> None:
        for name, grant in grants.items():
            if name in self._tenants:
                self._tenants[name].granted(grant, now)


class Allotment:
    """The part of a tenant's limits that one gateway holds, according to the bank."""

    __slots__ = ("held", "last", "needed", "needed_at", "recent", "sought")

    def __init__(self) -> None:
        self.held = [0.0, 0.0, 0.0]
        """Amounts that were granted and not yet reported as used. The gateway has at most these amounts."""
        self.recent = [0.0, 0.0, 0.0]
        """Recent use."""
        self.needed = NONE
        self.needed_at = 0.0
        self.sought = [0.0, 0.0, 0.0]
        """Amounts that the bank has demanded back and that are not returned yet."""
        self.last: TenantUse | None = None


class Bank:
    """The limits of tenants, and the part of them that each gateway holds."""

    def __init__(self, book: UsageBook, clock: Callable[[], float]) -> None:
        self._book = book
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}
        self._allotments: dict[str, dict[str, Allotment]] = {}
        """Allotments by gateway, then by tenant."""
        self._early: list[tuple[str, Units]] = []
        """Use that was reported before its tenant was configured, because gateways of an earlier plane join early."""
        self._active: set[str] = set()
        """Tenants with use or unmet needs since the last division."""
        self._divided_at = 0.0
        """When the limits of all tenants were last divided."""

    def configure(self, specs: Sequence[TenantSpec]) -> None:
        self._tenants = self._book.tenants(specs)
        early, self._early = self._early, []
        for name, used in early:
            if name in self._tenants:
                _charge(self._tenants[name], used, self._clock())

    def joined(self, gateway: str, tenants: Mapping[str, TenantUse]) -> None:
        """Add a gateway, with the amounts that an earlier plane granted it and its use since then."""
        self._allotments[gateway] = {}
        self._divided_at = -ALL_S
        for name, use in tenants.items():
            one = self._of(gateway, name)
            one.held = [max(0.0, held + used) for held, used in zip(use.held, use.used, strict=True)]
        self.used(gateway, tenants)

    def left(self, gateway: str) -> None:
        """Remove a gateway that has ended. The bank can grant again what this gateway held."""
        self._active.update(self._allotments.pop(gateway, {}))

    def used(self, gateway: str, tenants: Mapping[str, TenantUse]) -> None:
        now = self._clock()
        for name, use in tenants.items():
            one, master = self._of(gateway, name), self._tenants.get(name)
            one.last = use
            self._active.add(name)
            for kind in KINDS:
                one.held[kind] = max(0.0, one.held[kind] - use.used[kind] - use.returned[kind])
                one.sought[kind] = max(0.0, one.sought[kind] - use.returned[kind])
                one.recent[kind] += use.used[kind]
            if any(use.needed):
                one.needed, one.needed_at = use.needed, now
            elif any(use.used):
                one.needed = NONE  # the need is met, here or at another gateway
            if not any(use.used):
                continue
            if master is None:
                self._early.append((name, use.used))
            else:
                _charge(master, use.used, now)

    def grants(self) -> dict[str, dict[str, Grant]]:
        """The amounts that gateways get and return now, by gateway and tenant."""
        now = self._clock()
        given: dict[str, dict[str, Grant]] = {}
        is_due = now - self._divided_at >= ALL_S
        self._divided_at = now if is_due else self._divided_at
        named, self._active = self._tenants if is_due else self._active & self._tenants.keys(), set()
        for name in named:
            master = self._tenants[name]
            left = _left(master, now)
            shares = {gateway: self._of(gateway, name) for gateway in self._allotments}
            plans = {kind: _divide(kind, left[kind], shares, now) for kind in KINDS if left[kind] is not None}
            spent = left[2] is not None and left[2] <= 0 and master.period_ends is not None
            period_s = max(0.0, (master.period_ends or now) - now) if spent else None
            for gateway, one in shares.items():
                give = [plans[kind][gateway][0] if kind in plans else 0.0 for kind in KINDS]
                take = [plans[kind][gateway][1] if kind in plans else 0.0 for kind in KINDS]
                one.held = [held + more for held, more in zip(one.held, give, strict=True)]
                one.sought = [sought + more for sought, more in zip(one.sought, take, strict=True)]
                if any(give) or any(take) or spent:
                    grant = Grant((give[0], give[1], give[2]), (take[0], take[1], take[2]), period_s)
                    given.setdefault(gateway, {})[name] = grant
            for one in shares.values():
                one.recent = [used * MEMORY for used in one.recent]
        return given

    def report(self, wall: float) -> list[dict[str, Any]]:
        """Usage and limits for all gateways together; see `Tenant.report`."""
        now, told = self._clock(), []
        for name, master in self._tenants.items():
            last = [one[name].last for one in self._allotments.values() if name in one]
            uses = [use for use in last if use is not None]
            told.append(
                master.report(now, wall)
                | {
                    "in_flight": sum(use.in_flight for use in uses),
                    "reserved": sum(use.reserved[1] for use in uses),
                    "tokens_reserved": sum(use.reserved[0] for use in uses),
                }
            )
        return told

    def _of(self, gateway: str, tenant: str) -> Allotment:
        return self._allotments.setdefault(gateway, {}).setdefault(tenant, Allotment())


def _charge(master: Tenant, used: Units, now: float) -> None:
    if master.requests_left is not None:
        master.requests_left.refill(now)
        master.requests_left.take(used[0])
    if master.tokens_left is not None:
        master.tokens_left.refill(now)
    master.use(used[2], used[1], now)


def _left(master: Tenant, now: float) -> tuple[float | None, float | None, float | None]:
    """What is left of each of a tenant's limits, including what gateways hold; None where there is no limit."""
    requests, tokens, budget = master.requests_left, master.tokens_left, master.spec.cost_budget
    is_over = master.period_ends is None or now >= master.period_ends
    return (
        None if requests is None else requests.refill(now),
        None if tokens is None else tokens.refill(now),
        None if budget is None else budget - (0.0 if is_over else master.spent),
    )


def _divide(
    kind: int, left: float | None, shares: Mapping[str, Allotment], now: float
) -> dict[str, tuple[float, float]]:
    """(give, take) for each gateway, so that each gets its part of the remaining amount."""
    total, free = max(0.0, left or 0.0), max(0.0, (left or 0.0) - sum(one.held[kind] for one in shares.values()))
    used = sum(one.recent[kind] for one in shares.values())
    parts = {
        name: total * (ALIKE / len(shares) + (1 - ALIKE) * one.recent[kind] / used) if used else total / len(shares)
        for name, one in shares.items()
    }
    for name, one in _in_need(kind, shares, total, now):  # serve only one gateway, which has waited longest
        needed = min(total, one.needed[kind] * (1 + 1e-9))  # the sum of the parts may be slightly less than the whole
        rest = (total - needed) / max(total - parts[name], 1e-9)
        parts = {other: part * rest for other, part in parts.items()} | {name: needed}
        break
    if kind == 0:
        parts = _whole(parts)
    wants = {name: max(0.0, parts[name] - one.held[kind]) for name, one in shares.items()}
    short = sum(wants.values())
    share = min(1.0, free / short) if short else 0.0
    gives = {name: floor(want * share + 1e-9) if kind == 0 else want * share for name, want in wants.items()}
    missing = short > free + 1e-9
    return {
        name: (gives[name], _surplus(one, kind, parts[name]) if missing and not gives[name] else 0.0)
        for name, one in shares.items()
    }


def _in_need(kind: int, shares: Mapping[str, Allotment], total: float, now: float) -> list[tuple[str, Allotment]]:
    waiting = [
        (one.needed_at, name, one)
        for name, one in shares.items()
        if 0 < one.needed[kind] <= total and now - one.needed_at < NEEDED_S
    ]
    return [(name, one) for _, name, one in sorted(waiting, key=lambda each: each[:2])]


def _surplus(one: Allotment, kind: int, part: float) -> float:
    """The amount that a gateway holds beyond its part, without the amount that it was already asked to return."""
    surplus = one.held[kind] - one.sought[kind] - part
    return surplus if surplus > SLACK * part + 1e-9 else 0.0


def _whole(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts rounded to whole requests; the remainder goes to the parts with the largest fractions."""
    found = {name: float(floor(part + 1e-9)) for name, part in parts.items()}
    over = floor(sum(parts.values()) - sum(found.values()) + 1e-9)
    for name in sorted(parts, key=lambda one: (-(parts[one] - found[one]), one))[:over]:
        found[name] += 1
    return found


def _largest(one: Units, other: Units) -> Units:
    return max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2])


def _together(first: TenantUse | None, then: TenantUse) -> TenantUse:
    """Two reports merged into one."""
    if first is None or first is then:
        return then

    def sums(one: Units, other: Units) -> Units:
        return one[0] + other[0], one[1] + other[1], one[2] + other[2]

    return msgspec.structs.replace(
        then,
        used=sums(first.used, then.used),
        returned=sums(first.returned, then.returned),
        needed=_largest(first.needed, then.needed),
    )


def divided(settings: GatewaySpec, processes: int) -> GatewaySpec:
    """The settings for one of several gateways, with its part of the limits that apply to all gateways together."""
    most = settings.limits.max_connections
    limits = msgspec.structs.replace(settings.limits, max_connections=None if most is None else ceil(most / processes))
    return msgspec.structs.replace(
        settings,
        limits=limits,
        max_buffered_bytes=max(1, settings.max_buffered_bytes // processes),
        max_prefix_index_bytes=max(1, settings.max_prefix_index_bytes // processes),
    )

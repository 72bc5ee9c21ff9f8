"""Why there is no place for an ask, with a reason for every worker and every tier."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pointsman.placement.asks import Ask, Tier
from pointsman.placement.fit import NO_GPU
from pointsman.placement.fleet import Host
from pointsman.reasons import Reason, counted
from pointsman.selection import Rejected, Trace

NOT_CONSIDERED = "not considered"
"""The key for workers that no tier considers, in addition to the names of tiers."""


class RefusedTier(msgspec.Struct, frozen=True, eq=False):
    """A tier in which no worker has room."""

    tier: Tier
    rejected: Rejected[Host]
    forbidden: bool
    """Whether the ask rules the tier out."""


class Refused(msgspec.Struct, frozen=True, eq=False):
    """An ask for which there is no place. It is a value and not an error, because this is an ordinary outcome."""

    ask: Ask
    not_considered: Sequence[Rejected[Host]]
    """Workers that the ask may not be on, in any tier."""
    tiers: Sequence[RefusedTier] = ()
    """The tiers that were tried; empty if there is no worker that the ask may be on."""
    trace: Trace | None = None

    def reasons(self) -> dict[str, dict[str, Reason]]:
        """Reasons by tier and worker."""
        stages: dict[str, Iterable[tuple[Host, Reason]]] = {NOT_CONSIDERED: self._unconsidered()}
        stages |= {one.tier.value: one.rejected for one in self.tiers}
        found = {name: {str(host): reason for host, reason in rejected} for name, rejected in stages.items()}
        return {name: reasons for name, reasons in found.items() if reasons}

    @property
    def reason(self) -> Reason:
        """The main reason: the obstacle in the first tier that the ask allows and for which workers have GPUs."""
        unconsidered = self._unconsidered()
        allowed = [[*unconsidered, *one.rejected] for one in self.tiers if not one.forbidden]
        if not self.tiers and unconsidered:
            allowed = [unconsidered]
        if not allowed:
            return Reason("no-place", {"because": self.in_full})
        shown = next((one for one in allowed if any(reason.code != NO_GPU for _, reason in one)), allowed[0])
        return Reason("no-place", {"rejected": counted(shown)})

    @property
    def in_full(self) -> Reason:
        """The number of workers rejected for each reason, first before any tier and then by tier."""
        unconsidered = counted(self._unconsidered())
        if not unconsidered and not self.tiers:
            return Reason("no-workers")
        tiers = [{"tier": one.tier.value, "rejected": counted(one.rejected)} for one in self.tiers]
        return Reason("no-tier-fits", {"not_considered": unconsidered, "tiers": tiers})

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        reasons = {tier: {name: one.as_dict() for name, one in found.items()} for tier, found in self.reasons().items()}
        return {
            "instance": self.ask.instance_id,
            "why": str(self.in_full),
            "reason": self.reason.as_dict(),
            "reasons": reasons,
        }

    def _unconsidered(self) -> list[tuple[Host, Reason]]:
        return [pair for rejected in self.not_considered for pair in rejected]

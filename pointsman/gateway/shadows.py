"""`/admin/v1/shadow` and `/admin/v1/promotions`: candidates that run alongside the policy in force, at all gateways of
a plane."""

from typing import Any

import msgspec

from pointsman.errors import UnknownName
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.lookup import AdminCall, AskGateways
from pointsman.routing.canary import CanaryCounts
from pointsman.routing.shadow import ShadowCounts
from pointsman.runtimes.interface import Clock
from pointsman.runtimes.promotions import PromotionRequest, Promotions
from pointsman.runtimes.shadowing import CanaryLease, Shadows


class ShadowsEverywhere:
    """The shadows in this process, and in the processes of other gateways."""

    def __init__(self, gateway: Gateway, clock: Clock, ask: AskGateways | None) -> None:
        self._gateway = gateway
        self._own = Shadows(gateway.traffic, clock)
        self._ask = ask

    async def counts(self, deployment: str) -> ShadowCounts | None:
        """Counts for a deployment's candidates; None if the deployment has no candidates."""
        total = self._own.counts(deployment)
        if total is not None and self._ask is not None:
            for answer in await self._ask("shadow", {"deployment": deployment}):
                if answer is not None:
                    total.add(msgspec.convert(answer, ShadowCounts, str_keys=True))
        return total

    async def lease(self, lease: CanaryLease) -> CanaryCounts:
        """Renew a canary at all gateways. Returns the counts from all of them."""
        total = CanaryCounts(lease.run)
        total.add(self._own.lease(lease))
        if self._ask is not None:
            details = {name: str(value) for name, value in msgspec.structs.asdict(lease).items()}
            for answer in await self._ask("canary", details):
                if answer is not None:
                    total.add(msgspec.convert(answer, CanaryCounts, str_keys=True))
        return total


def shadow_answer(shadows: Shadows, about: str, details: dict[str, str]) -> Any:
    """The answer to the plane from a gateway in its own process; None if it has nothing to report."""
    try:
        if about == "shadow":
            return msgspec.to_builtins(shadows.counts(details["deployment"]), str_keys=True)
        lease = CanaryLease(**{**details, "share": float(details["share"])})  # type: ignore[arg-type]
        return msgspec.to_builtins(shadows.lease(lease), str_keys=True)
    except UnknownName:
        return None  # its documents still differ from the plane's, and the gateway reports that


class ShadowAdmin:
    def __init__(self, gateway: Gateway, shadows: ShadowsEverywhere, promotions: Promotions) -> None:
        self._gateway = gateway
        self._shadows = shadows
        self._promotions = promotions

    async def shadow(self, call: AdminCall) -> dict[str, Any]:
        """The candidates of one deployment, or of all deployments that have candidates."""
        lanes, name = self._gateway.traffic.lanes, call.query.get("deployment")
        if name is not None and name not in lanes:
            raise UnknownName("deployment", name, lanes)
        told = []
        for deployment, lane in lanes.items():
            counts = await self._shadows.counts(deployment) if name in (None, deployment) else None
            if counts is not None:
                told.append({"deployment": deployment, "in_force": lane.plan.decided_by, **counts.report()})
        return {"deployments": told, "promotions": self._promotions.report()}

    async def promote(self, call: AdminCall) -> dict[str, Any]:
        made = self._promotions.start(msgspec.json.decode(call.body, type=PromotionRequest))
        return self._of(made.run)

    async def promotions(self, call: AdminCall) -> dict[str, Any]:
        return {"promotions": self._promotions.report()}

    async def promotion(self, call: AdminCall) -> dict[str, Any]:
        return self._of(call.parts[1])

    async def stop(self, call: AdminCall) -> dict[str, Any]:
        return self._of(self._promotions.stop(call.parts[1], "the admin API").run)

    def _of(self, run: str) -> dict[str, Any]:
        found = {one["run"]: one for one in self._promotions.report()}
        if run not in found:
            raise UnknownName("promotion", run, found)
        return found[run]

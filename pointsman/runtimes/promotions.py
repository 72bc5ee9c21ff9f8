"""Promotions on a plane: canaries that are renewed while they run, and the manifest that results from a verdict.

Enters: operators' orders, and counts from gateways. Leaves: a new or unchanged manifest, and a record. The one rule: a
promotion belongs to the plane that started it. If that plane ends, the canary ends too, and the policy in force stays.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from pointsman.config.candidates import with_candidate, wrong_candidate
from pointsman.config.plan import CandidatePlan, DeploymentPlan
from pointsman.errors import PointsmanError, UnknownName, command
from pointsman.reasons import Reason
from pointsman.routing.canary import CanaryCounts
from pointsman.routing.promotion import Promotion, read_condition
from pointsman.runtimes.interface import BackgroundTasks, Clock, DocumentOperations
from pointsman.runtimes.shadowing import CanaryLease

POLL_S = 1.0
KEPT = 50
"""Maximum number of promotions that are remembered."""
CONDITION = "ttft_p90 < 0% and errors <= 0%"
MAX_S = 7 * 86400.0


class PromotionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A candidate that takes effect if it is better."""

    candidate: str
    deployment: str = ""
    """The deployment; if empty, the only one that has this candidate."""
    condition: str = CONDITION
    canary: float = 0.1
    """The share of requests on which the candidate decides during the promotion."""
    for_s: float = 600.0


class Promotions:
    """The promotions of one plane, newest first."""

    def __init__(
        self,
        documents: DocumentOperations,
        clock: Clock,
        tasks: BackgroundTasks,
        lease: Callable[[CanaryLease], Awaitable[CanaryCounts]],
        name: Callable[[], str],
    ) -> None:
        """`lease` renews a canary everywhere, and adds up its counts. `name` returns a new name for a promotion."""
        self.newest: deque[Promotion] = deque(maxlen=KEPT)
        self._documents = documents
        self._clock = clock
        self._tasks = tasks
        self._lease = lease
        self._name = name

    def start(self, asked: PromotionRequest) -> Promotion:
        """Start a promotion. Raises `PointsmanError` if it cannot be started."""
        terms = read_condition(asked.condition)
        if not 0.0 < asked.canary <= 0.9:
            raise PointsmanError(f"the canary must be a share between 0 and 90 %, found {asked.canary:.6g}")
        if not 0.0 < asked.for_s <= MAX_S:
            raise PointsmanError(f"the time must be above 0 and at most 7 days, found {asked.for_s:.6g} s")
        plan, candidate = self._find(asked.candidate, asked.deployment)
        running = [one for one in self.running() if one.deployment == plan.name]
        if running:
            raise PointsmanError(
                f'"{running[0].candidate}" is being promoted in "{plan.name}" already; wait for it, or end it with: '
                f"{command('promote', running[0].candidate, '--stop')}"
            )
        # The text of the manifest must allow the change; find out now rather than at the end.
        self._promoted_text(plan, candidate)
        run = self._name()
        began = self._clock.now()
        made = Promotion(run, plan.name, candidate.name, terms, asked.canary, asked.for_s, began, CanaryCounts(run))
        self.newest.appendleft(made)
        self._tasks.complete("promotions", lambda: self._carry_out(made, plan.scheduling_recipe, candidate.recipe))
        return made

    def stop(self, run: str, by: str) -> Promotion:
        found = [one for one in self.newest if one.run == run]
        if not found:
            raise UnknownName("promotion", run, [one.run for one in self.newest])
        found[0].give_up(Reason("promotion-stopped", {"by": by}))
        return found[0]

    def running(self) -> list[Promotion]:
        return [one for one in self.newest if one.verdict is None]

    def report(self) -> list[dict[str, Any]]:
        now = self._clock.now()
        return [one.as_dict(now) for one in self.newest]

    def _find(self, name: str, deployment: str) -> tuple[DeploymentPlan, CandidatePlan]:
        plans = self._documents.plan_in_force.deployments
        if deployment and deployment not in [one.name for one in plans]:
            raise UnknownName("deployment", deployment, [one.name for one in plans])
        mine = [one for one in plans if one.name == deployment or (not deployment and one.shadow)]
        found = [(plan, one) for plan in mine for one in plan.shadow if one.name == name]
        if not found:
            raise wrong_candidate(name, sorted({one.name for plan in mine for one in plan.shadow}), deployment)
        if len(found) > 1:
            names = ", ".join(plan.name for plan, _ in found)
            raise PointsmanError(f'"{name}" is a candidate of several deployments ({names}); say which: --deployment')
        return found[0]

    def _promoted_text(self, plan: DeploymentPlan, candidate: CandidatePlan) -> str:
        manifest = self._documents.revision.manifest
        if manifest is None:
            raise PointsmanError("no manifest is in force")
        others = [one.name for one in plan.shadow if one.name != candidate.name]
        return with_candidate(manifest.text, plan.name, candidate, others)

    async def _carry_out(self, one: Promotion, scheduling: str, recipe: str) -> None:
        """Renew the canary and compare, until there is a verdict."""
        lease = CanaryLease(one.run, one.deployment, one.candidate, one.share)
        while one.verdict is None:
            try:
                plan, candidate = self._find(one.candidate, one.deployment)
                if (plan.scheduling_recipe, candidate.recipe) != (scheduling, recipe):
                    one.give_up(Reason("manifest-changed"))
                    break
                counts = await self._lease(lease)
            except PointsmanError as error:
                one.give_up(Reason("promotion-failed", {"text": str(error)}))
                break
            verdict = one.observe(counts, self._clock.now())
            if verdict is not None and verdict.state == "promoted":
                await self._promote(one, plan, candidate, verdict.why)
                return
            if verdict is None:
                left_s = max(one.began + one.for_s - self._clock.now(), 0.0)
                await asyncio.sleep(min(POLL_S, left_s + 0.01))
        try:
            await self._lease(msgspec.structs.replace(lease, share=0.0))
        except PointsmanError:
            return  # its candidate is gone, and so is the canary

    async def _promote(self, one: Promotion, plan: DeploymentPlan, candidate: CandidatePlan, why: Reason) -> None:
        manifest = self._documents.revision.manifest
        try:
            assert manifest is not None, "it was there when the promotion began"
            document = msgspec.structs.replace(manifest, text=self._promoted_text(plan, candidate))
            await self._documents.apply(document, note=f"promoted {candidate.name} in {plan.name}: {why}")
        except PointsmanError as error:
            one.verdict = None
            one.give_up(Reason("promotion-failed", {"text": f"the manifest could not be changed: {error}"}))

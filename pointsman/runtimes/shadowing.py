"""Candidates on live lanes: shadows only watch, and canaries decide on a share of requests while they are renewed.

Enters: plans, and leases of canaries. Leaves: counts for shadows and canaries. The one rule: a canary ends by itself if
no plane renews it, so that without a plane the policy in force decides everything.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from pointsman.config.candidates import wrong_candidate
from pointsman.config.plan import DeploymentPlan
from pointsman.errors import UnknownName
from pointsman.reasons import Reason
from pointsman.routing.canary import Canary, CanaryCounts, Watcher
from pointsman.routing.candidates import STALL, CandidatePolicy
from pointsman.routing.shadow import Shadow, ShadowCounts, suspensions
from pointsman.routing.user_code import CodeWatch, Containment
from pointsman.runtimes.interface import Clock, Timer

if TYPE_CHECKING:
    from pointsman.runtimes.traffic import Lane, Traffic

LEASE_S = 5.0
"""A canary that is not renewed for this long ends."""
CANARY = "canary"


class CanaryLease(msgspec.Struct, frozen=True):
    """A candidate, and the share of a deployment's requests on which it decides."""

    run: str
    """The id of the promotion."""
    deployment: str
    candidate: str
    share: float
    """The share of requests; with 0, the canary ends now."""


def watcher_of(plan: DeploymentPlan, clock: Clock, watch: CodeWatch | None) -> Watcher | None:
    """The watcher with the candidates of a plan; None without candidates, or if they are not timed (virtual time)."""
    if not plan.shadow or watch is None:
        return None
    made = []
    for one in plan.shadow:
        guard = Containment(watch, plan.time_limit_s, STALL)
        guard.contain(one.scheduling_code)
        made.append(CandidatePolicy(one.name, one.dispatch_plan(), time.perf_counter, clock.now, guard))
    return Watcher(Shadow(made, plan.shadow_budget, time.perf_counter, clock))


class Shadows:
    """The shadows and canaries of the lanes of one process."""

    def __init__(self, traffic: "Traffic", clock: Clock) -> None:
        self._traffic = traffic
        self._clock = clock
        self._timers: dict[str, Timer] = {}
        """Timers of leases, by deployment."""

    def counts(self, deployment: str) -> ShadowCounts | None:
        """The counts of a lane's shadow; None if it has none."""
        watcher = self._watcher(deployment)
        return None if watcher is None else watcher.shadow.told()

    def lease(self, lease: CanaryLease) -> CanaryCounts:
        """Start a canary, renew it, or end it. Returns the counts of both shares so far."""
        lane, watcher = self._traffic.lanes.get(lease.deployment), self._watcher(lease.deployment)
        if lane is None:
            raise UnknownName("deployment", lease.deployment, self._traffic.lanes)
        candidates = {} if watcher is None else {one.name: one for one in watcher.shadow.candidates}
        if watcher is None or lease.candidate not in candidates:
            raise wrong_candidate(lease.candidate, sorted(candidates), lease.deployment)
        canary = watcher.canary
        if canary is None or canary.counts.run != lease.run:
            canary = Canary(lease.run, candidates[lease.candidate], lease.share)
            if lease.share:
                watcher.canary = canary
                lane.dispatcher.listen(canary.ended, CANARY)
        if timer := self._timers.pop(lease.deployment, None):
            timer.cancel()
        if not lease.share:
            self._end(lane, watcher)
        else:
            canary.share = lease.share
            due = self._clock.now() + LEASE_S
            self._timers[lease.deployment] = self._clock.call_at(due, self._end, lane, watcher)
        return canary.counts

    def _end(self, lane: "Lane", watcher: Watcher) -> None:
        watcher.canary = None
        lane.dispatcher.listen(None, CANARY)

    def _watcher(self, deployment: str) -> Watcher | None:
        lane = self._traffic.lanes.get(deployment)
        return None if lane is None else lane.watcher


def shadow_problems(lanes: Iterable["Lane"]) -> list[Reason]:
    """Which candidates are suspended, and why."""
    watched = [(lane.name, lane.watcher.shadow) for lane in lanes if lane.watcher is not None]
    return [reason for name, shadow in watched for reason in suspensions(shadow, name)]

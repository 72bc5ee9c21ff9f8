"""As many replicas as latency targets and deadlines need."""

from collections.abc import Iterator
from math import ceil
from typing import Annotated

from msgspec import Meta

from pointsman.parameters import Above0
from pointsman.scaling.policies.sizing import Between0And1, checked
from pointsman.scaling.policy import DeploymentView, Wish

MAX_GROWTH = 2.0
"""Maximum factor by which replicas grow at a time, because latency is not proportional to load."""
FORGET_S = 86400.0
"""How long a rate per replica that missed the targets is not tried again."""


class SloAttainment:
    """More replicas, in proportion, while deadlines or latency targets are missed; one fewer if the rest is predicted
    to meet them. After a change it waits until the measurements are of the present replicas."""

    def __init__(
        self,
        target: Between0And1 = 0.99,
        ttft_ms: Above0 | None = None,
        tpot_ms: Above0 | None = None,
        latency_ms: Above0 | None = None,
        dead_band: Annotated[float, Meta(ge=0, lt=1)] = 0.1,
    ) -> None:
        if not 0 < target < 1:
            raise ValueError(f"target is a share of requests, between 0 and 1, found {target:g}")
        if not 0 <= dead_band < 1:
            raise ValueError(f"deadBand must be from 0 to below 1, found {dead_band:g}")
        for name, wanted in (("ttftMs", ttft_ms), ("tpotMs", tpot_ms), ("latencyMs", latency_ms)):
            checked(name, wanted)
        self.target, self.dead_band = target, dead_band
        self.ttft_ms, self.tpot_ms, self.latency_ms = ttft_ms, tpot_ms, latency_ms

    def desired_replicas(self, view: DeploymentView) -> Wish:
        if not view.load and not view.latency_ms.count:
            return Wish(0, f"no request in the last {view.latency_ms.seconds:g} s: 0")
        ratio, why = max(self._ratios(view), default=(None, "no quantity with a target has been measured"))
        stay = max(view.target, 1)
        if ratio is None:
            return Wish(stay, why)
        if not view.replicas or self._changing(view):
            return Wish(stay, f"{why}; {stay} until the last change shows in the measurements")
        replicas = self._sized(view, ratio)
        return Wish(replicas, f"{why}: {replicas}")

    def _ratios(self, view: DeploymentView) -> Iterator[tuple[float, str]]:
        """Ratios of measured to wanted values, and what was measured. A ratio of at most 1 meets the target."""
        for what, window, wanted in (
            ("first token after", view.ttft_ms, self.ttft_ms),
            ("time per token", view.tpot_ms, self.tpot_ms),
            ("answer after", view.latency_ms, self.latency_ms),
        ):
            if wanted is not None and window.p90 is not None:
                why = f"{what} {window.p90:.0f} ms (p90 of {window.seconds:g} s), {wanted:g} wanted"
                yield window.p90 / wanted, why
        met = view.slo_attainment
        if met is not None:
            why = f"{met:.1%} met their deadline, {self.target:.1%} wanted"
            missed = (1 - met) / (1 - self.target)  # as a share of the misses that are allowed
            yield (missed if missed <= 1 else max(self.target / max(met, 0.01), 1 + 2 * self.dead_band)), why

    def _changing(self, view: DeploymentView) -> bool:
        """Whether measurements still include a time with another number of replicas."""
        changes = [since for since in (view.since_up_s, view.since_down_s) if since is not None]
        return bool(view.starting) or min(changes, default=1e9) < view.latency_ms.seconds + (view.start_up_s or 0.0)

    def _sized(self, view: DeploymentView, ratio: float) -> int:
        rates = [rate for seconds, rate in view.arrivals_per_s.items() if seconds <= view.latency_ms.seconds]
        rate = max(rates, default=0.0)
        if ratio > 1 + self.dead_band:
            view.state["missed"] = {"at": view.now, "per_replica": rate / view.replicas}
            return ceil(view.replicas * min(ratio, MAX_GROWTH) - 1e-9)
        fewer = view.replicas - 1
        if not fewer or ratio * view.replicas / fewer > 1 - self.dead_band:
            return view.replicas
        missed = view.state.get("missed")
        if missed is None or view.now - missed["at"] >= FORGET_S:
            return fewer
        return view.replicas if rate / fewer > missed["per_replica"] * (1 - self.dead_band) else fewer

"""What a document builds: everything ready to run, and nothing running yet."""

from typing import Any

import msgspec

from pointsman.config.flow import FlowControlPlan
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.queue import FlowControl, InFlightEviction, SaturationDetector
from pointsman.routing.queue.pool import LegacyAdmission
from pointsman.routing.routes import ConfiguredRoute
from pointsman.selection import Profile, Scheduler
from pointsman.strategies import SchedulingPolicy


class PickerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an `EndpointPickerConfig` builds."""

    plugins: dict[str, Any]
    """By name: those declared, then those injected."""
    scheduler: Scheduler[Endpoint]
    saturation_detector: SaturationDetector
    flow_control: FlowControlPlan | None = None
    """None: the gate is off."""
    gates: dict[str, bool]
    notes: tuple[str, ...] = ()
    """What the author should know: names that were accepted and do nothing."""

    def dispatcher(self, *, max_tries: int = 3, traced: bool = True, seed: int = 0) -> Dispatcher:
        """A dispatcher that works as the document says. One per plan: the plugins remember what they were sent.

        With flow control, requests wait in its queue while the pool is saturated; without, what cannot be sent at once
        is refused, and requests of negative priority are turned away while the pool is saturated.
        """
        flow = self.flow_control
        return Dispatcher(
            ConfiguredRoute(self.scheduler),
            FlowControl if flow is None else flow.build,
            plugins=self.plugins.values(),
            saturation_gates=flow is not None,
            shedding=LegacyAdmission(self.saturation_detector) if flow is None else None,
            make_eviction=InFlightEviction if flow is not None and flow.enable_eviction else None,
            waits=flow is not None,
            max_tries=max_tries,
            traced=traced,
            seed=seed,
        )

    def summary(self) -> str:
        """One line: what it would run."""
        profiles = ", ".join(f"{name} ({_parts(profile)})" for name, profile in self.scheduler.profiles.items())
        flow = "flow control on" if self.flow_control is not None else "flow control off"
        return f"{len(self.plugins)} plugins, profiles: {profiles}; {flow}"


def _parts(profile: Profile[Endpoint]) -> str:
    scorers = [f"{name} x{weight:g}" for name, _, weight, *_ in profile.scorers]
    return " > ".join(
        [*(name for name, _ in profile.filters), *filter(None, [" + ".join(scorers)]), profile.picker_name]
    )


class DeploymentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment and how its requests are scheduled: by a policy, or by the plugins of a picker."""

    name: str
    model: str
    policy: SchedulingPolicy | None = None
    picker: PickerPlan | None = None


class PointsmanPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a `Pointsman` document builds."""

    deployments: tuple[DeploymentPlan, ...] = ()
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """One line: what it would run."""
        how = [
            f"{one.name} ({one.policy.name if one.policy is not None else 'endpoint picker'})"
            for one in self.deployments
        ]
        return f"{len(how)} deployments: {', '.join(how)}" if how else "no deployments"

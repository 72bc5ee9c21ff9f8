"""What a document builds: everything is ready to run, and nothing runs yet."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from pointsman.config.code import CodeInForce
from pointsman.config.machines import RuntimeSpec, WorkerSpec
from pointsman.config.problems import ConfigWarning
from pointsman.config.schema import GatewaySpec, PriceSpec
from pointsman.control.desired import PYTHON, Desired, DesiredDeployment
from pointsman.engines import Engine
from pointsman.pipeline import Flow, Graph
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.estimates import UNKNOWN_PRICE
from pointsman.routing.filters.budget import WithinBudget
from pointsman.routing.queue import BandSettings, FlowControl, InFlightEviction, SaturationDetector, UsageLimitPolicy
from pointsman.routing.queue.saturation import LegacyAdmission
from pointsman.routing.routes import ConfiguredRoute, DispatchPlan
from pointsman.routing.shadow import BUDGET
from pointsman.routing.user_code import TIME_LIMIT_S
from pointsman.scaling.autoscaler import DeploymentScaling, PolicyPlan, ScalingSetup
from pointsman.scaling.limits import ScalingPlan
from pointsman.selection import Profile, Scheduler
from pointsman.strategies import FIFOPolicy, SchedulingPolicy
from pointsman.strategies.dispatching import plan_for


class FlowControlPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of flow control. A limit of None means no limit, and a time of 0 means forever."""

    bands: tuple[BandSettings, ...]
    default_band: BandSettings
    default_negative_band: BandSettings | None
    limits: UsageLimitPolicy
    detector: SaturationDetector
    max_requests: int | None
    max_bytes: int | None
    request_ttl_s: float
    no_endpoint_request_ttl_s: float
    make_eviction: Callable[[], InFlightEviction] | None = None
    """None if no running request is ever stopped for another request."""

    def build(self, first_wait_s: float | None = None) -> FlowControl:
        """An empty queue with these settings. `first_wait_s` replaces `noEndpointRequestTTL`."""
        return FlowControl(
            self.bands,
            default_band=self.default_band,
            default_negative_band=self.default_negative_band,
            limits=deepcopy(self.limits),  # a policy may have state, which belongs to one queue
            max_requests=self.max_requests,
            max_bytes=self.max_bytes,
            default_request_ttl_s=self.request_ttl_s,
            no_endpoint_request_ttl_s=self.no_endpoint_request_ttl_s,
            first_wait_s=first_wait_s,
        )


class PickerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an `EndpointPickerConfig` builds."""

    name: str = "endpoint picker"
    plugins: dict[str, Any]
    """Plugins by name: first the declared plugins, then the injected ones."""
    scheduler: Scheduler[Endpoint]
    saturation_detector: SaturationDetector
    flow_control: FlowControlPlan | None = None
    """None if the feature gate is off."""
    gates: dict[str, bool]
    endpoints_file: str = ""
    """A file that lists the endpoints of the deployment. The field `dataLayer.discovery` names the file."""
    queues: bool = False
    """Whether requests wait for room in a default queue even if the feature gate is off."""
    warnings: tuple[ConfigWarning, ...] = ()
    """Warnings for a standalone document. Warnings for a deployment's config are in the plan of the manifest."""

    def dispatch_plan(self, first_wait_s: float | None = None) -> DispatchPlan:
        """The plan of one dispatcher. Plugins have state, so each dispatcher needs its own.

        With flow control, requests wait in its queue while the pool is saturated. Without flow control, requests of
        negative priority are refused while the pool is saturated. Other requests that cannot be sent at once wait for
        an instance if `queues` is set, and are refused if not. `first_wait_s` replaces `noEndpointRequestTTL`.
        """
        flow = self.flow_control
        waits = flow is not None or self.queues
        return DispatchPlan(
            ConfiguredRoute(self.scheduler, self.name),
            lambda: FlowControl(first_wait_s=first_wait_s) if flow is None else flow.build(first_wait_s),
            plugins=tuple(self.plugins.values()),
            detector=None if flow is None else flow.detector,
            shedding=None if flow is not None else LegacyAdmission(self.saturation_detector, waits=self.queues),
            make_eviction=None if flow is None else flow.make_eviction,
            waits=waits,
            stand_in=FIFOPolicy(),
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


ASSUMED_OUTPUT_TOKENS = 4096
"""Assumed length of an answer if neither its request, nor the price section, nor the engine sets a limit."""


class CandidatePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate: a policy that decides beside the policy in force, without acting."""

    name: str
    policy: SchedulingPolicy | None = None
    picker: PickerPlan | None = None
    section: dict[str, Any] = {}
    """The fields of the candidate, in the form that `scheduling` has."""
    code: str = ""
    """The version of the user's code that the candidate runs; empty if it runs no user code."""

    @property
    def recipe(self) -> str:
        """Equal recipes schedule equally."""
        return msgspec.json.encode([self.name, self.section, self.code], order="sorted").decode()

    @property
    def scheduling_code(self) -> list[object]:
        """The policy or the plugins of the candidate."""
        return [self.policy] if self.picker is None else [*self.picker.plugins.values()]

    def dispatch_plan(self) -> DispatchPlan:
        """The plan of one dispatcher. Candidates use only its choice of an instance."""
        return _dispatch_plan(self.policy, self.picker, None)


def _dispatch_plan(
    policy: SchedulingPolicy | None, picker: PickerPlan | None, first_wait_s: float | None
) -> DispatchPlan:
    if policy is not None:
        made, price = plan_for(policy, first_wait_s=first_wait_s), policy.price_per_gpu_hour
    else:
        assert picker is not None, "a deployment has a policy or a picker"
        made, price = picker.dispatch_plan(first_wait_s), UNKNOWN_PRICE
    return msgspec.structs.replace(made, budget=WithinBudget(price))


class DeploymentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment: what runs, and the policy or the picker that schedules its requests."""

    desired: DesiredDeployment
    policy: SchedulingPolicy | None = None
    picker: PickerPlan | None = None
    scheduling_recipe: str = ""
    """The source of the scheduling. Equal recipes schedule equally."""
    shadow: tuple[CandidatePlan, ...] = ()
    """Candidates that decide without acting."""
    shadow_budget: float = BUDGET
    shadow_recipe: str = ""
    """The source of the candidates. Equal recipes decide equally."""
    time_limit_s: float = TIME_LIMIT_S
    """Time limit for one call to scheduling code that a user wrote."""
    first_wait_s: float | None = None
    """How long requests wait while there is no instance. None leaves the time to the scheduling."""
    engine: Engine | None = None
    """The engine; None if the plane starts no instances of this deployment."""
    endpoints_file: Path | None = None
    """A file with more endpoints, which `load_endpoints` reads. The file may not exist yet."""
    price: PriceSpec | None = None
    scaling: ScalingPlan | None = None
    """None if the number of instances is fixed."""
    follows: str = ""
    """The deployment whose number of instances this one copies. All shards of a node follow the first shard."""
    internal: bool = False
    """Whether only pipelines send requests to this deployment. Clients cannot use the model of such a deployment."""
    replica_code: CodeInForce | None = None
    """The user's code that replicas load when they start; None if there is no user code."""

    @property
    def name(self) -> str:
        return self.desired.name

    @property
    def model(self) -> str:
        return self.desired.model

    @property
    def names(self) -> tuple[str, ...]:
        return self.desired.names

    @property
    def assumed_output_tokens(self) -> int:
        """Tokens to assume for an answer if its request sets no limit."""
        given = None if self.price is None else self.price.assumed_output_tokens
        known = None if self.engine is None else self.engine.longest_answer
        return given or known or ASSUMED_OUTPUT_TOKENS

    @property
    def is_replica(self) -> bool:
        """Whether the instances are replicas, which are processes that run the user's code."""
        return self.desired.engine is not None and self.desired.engine.type == PYTHON

    @property
    def folder(self) -> str:
        """The folder in which replicas run."""
        return "" if self.desired.engine is None else str(self.desired.engine.parameters.get("folder", ""))

    @property
    def decided_by(self) -> str:
        """The name of the policy or profile that decides where requests go."""
        if self.policy is not None:
            return self.policy.name
        return "" if self.picker is None else self.picker.name

    @property
    def scheduling_code(self) -> list[object]:
        """The policy or the plugins of its scheduling."""
        plugins = () if self.picker is None else self.picker.plugins.values()
        return [*plugins] if self.policy is None else [self.policy]

    @property
    def code(self) -> str:
        """The version of the user's code that this deployment runs; empty if it runs no user code."""
        policies = msgspec.json.decode(self.scheduling_recipe or "{}").get("code", {})
        replica = "" if self.desired.engine is None else self.desired.engine.parameters.get("version", "")
        shadows = [one.code for one in self.shadow]
        return _joined(
            [*policies.values(), *shadows, code_of_scaling(self.scaling), replica if self.is_replica else ""]
        )

    def dispatch_plan(self) -> DispatchPlan:
        """The plan of one dispatcher. Requests that cannot be sent at once wait."""
        return _dispatch_plan(self.policy, self.picker, self.first_wait_s)

    def among(self, gateways: int) -> "DeploymentPlan":
        """The plan for the dispatcher in one of several gateways. Each dispatcher gets its part of the queue limits."""
        flow = None if self.picker is None else self.picker.flow_control
        if self.picker is None or flow is None or gateways == 1:
            return self
        negative = flow.default_negative_band
        own = msgspec.structs.replace(
            flow,
            bands=tuple(_part(band, gateways) for band in flow.bands),
            default_band=_part(flow.default_band, gateways),
            default_negative_band=None if negative is None else _part(negative, gateways),
            max_requests=_quotient(flow.max_requests, gateways),
            max_bytes=_quotient(flow.max_bytes, gateways),
        )
        return msgspec.structs.replace(self, picker=msgspec.structs.replace(self.picker, flow_control=own))

    def summary(self) -> str:
        wanted = self.desired
        number = str(wanted.replicas)
        if self.scaling is not None:
            number = f"{self.scaling.limits.min_replicas} to {self.scaling.limits.max_replicas}"
        runs = [f"{number} x {wanted.engine.type}"] if wanted.engine is not None else []
        if wanted.endpoints:
            runs.append(f"{len(wanted.endpoints)} endpoint{'s' if len(wanted.endpoints) > 1 else ''}")
        if self.endpoints_file is not None:
            runs.append(f"endpoints of {self.endpoints_file.name}")
        return f"{self.name} ({', '.join([*runs, self.decided_by])})"


def _part(band: BandSettings, gateways: int) -> BandSettings:
    most = _quotient(band.max_requests, gateways), _quotient(band.max_bytes, gateways)
    return msgspec.structs.replace(band, max_requests=most[0], max_bytes=most[1])


def _quotient(most: int | None, gateways: int) -> int | None:
    """A gateway's part of a limit, rounded up; None if there is no limit."""
    return None if most is None else ceil(most / gateways)


def code_of_scaling(plan: ScalingPlan | None) -> str:
    """The version of the user's code in a scaling policy; empty if the policy has no user code."""
    recipe = [] if plan is None else msgspec.json.decode(plan.recipe)
    return _joined(recipe[3].values()) if len(recipe) > 3 else ""


def _joined(versions: Iterable[str]) -> str:
    return " ".join(sorted({part for version in versions for part in version.split()}))


class ApplicationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an `Application` document builds."""

    name: str
    graph: Graph
    flow: Flow
    deployments: tuple[DeploymentPlan, ...]
    """One deployment for each node that runs code (or for each shard of the node), and one for the ingress."""
    user_configs: dict[str, Any]
    """The user configuration of each deployment that has one. A user configuration changes without a restart."""
    folder: str
    """The folder that paths in the document are relative to."""
    scaling: ScalingPlan | None = None
    """The scaling of nodes that set no scaling of their own."""
    text: str
    """The document in normalised form. Applications with equal texts are equal, except perhaps for their code."""
    warnings: tuple[ConfigWarning, ...] = ()

    @property
    def code(self) -> str:
        """The version of the code of all nodes and policies."""
        return _joined([*(one.code for one in self.deployments), code_of_scaling(self.scaling)])

    def scaled_together(self) -> dict[str, str]:
        """Deployments that the application's own policy scales, each with its node. Only the first shard of each."""
        leaders = {one.follows for one in self.deployments}
        return {
            one.name: one.name.removeprefix(f"{self.name}.").removesuffix(".0" if one.name in leaders else "")
            for one in self.deployments
            if one.scaling is not None and one.scaling.policy is None
        }

    def summary(self) -> str:
        nodes = [plan.summary() for plan in self.deployments]
        return f"application {self.name} of {', '.join(nodes) if nodes else 'models only'}"


class PointsmanPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a `Pointsman` document builds, or an `Application` document by itself."""

    deployments: tuple[DeploymentPlan, ...] = ()
    """All deployments. Deployments of applications are among them, and are `internal`."""
    applications: tuple[ApplicationPlan, ...] = ()
    application_alone: bool = False
    """Whether the plan was built from an `Application` document alone."""
    gateway: GatewaySpec = GatewaySpec()
    workers: tuple[WorkerSpec, ...] = ()
    """Empty if there is only this machine."""
    runtime: RuntimeSpec = RuntimeSpec()
    warnings: tuple[ConfigWarning, ...] = ()
    """Settings without effect, and other warnings for the author."""

    def sources(self) -> dict[Path, bytes]:
        """The code of all replicas when it took effect. Empty if the code of any deployment is too large to keep."""
        nodes = [one for application in self.applications for one in application.deployments]
        codes = [one.replica_code for one in (*self.deployments, *nodes) if one.replica_code is not None]
        if any(code.sources and not code.packed for code in codes):
            return {}
        return {path: content for code in codes for path, content in code.sources.items()}

    @property
    def code(self) -> str:
        """The version of the user's code in all applications and policies; empty if there is no user code."""
        return _joined([*(one.code for one in self.deployments), *(one.code for one in self.applications)])

    def desired(self) -> Desired:
        return Desired({plan.name: plan.desired for plan in self.deployments})

    def scaling_setup(self) -> ScalingSetup:
        alone = [
            PolicyPlan(name=one.name, plan=one.scaling, nodes={one.name: one.name})
            for one in self.deployments
            if one.scaling is not None and one.scaling.policy is not None
        ]
        together = [
            PolicyPlan(name=one.name, plan=one.scaling, nodes=one.scaled_together(), of_application=True)
            for one in self.applications
            if one.scaling is not None
        ]
        deployments = {
            one.name: DeploymentScaling(
                replicas=one.desired.replicas, plan=one.scaling, follows=one.follows, external=one.engine is None
            )
            for one in self.deployments
        }
        return ScalingSetup(deployments, (*alone, *together))

    def summary(self) -> str:
        """One line: what it would run."""
        parts = [application.summary() for application in self.applications]
        if self.application_alone:
            return parts[0]
        own = [plan.summary() for plan in self.deployments if not plan.internal]
        if own:
            parts.insert(0, f"{len(own)} deployment{'s' if len(own) > 1 else ''}: {', '.join(own)}")
        return "; ".join([*parts, f"gateway on {self.gateway.listen}"]) if parts else "no deployments"

    def models(self) -> list[str]:
        """The names that clients may use."""
        return [name for plan in self.deployments if not plan.internal for name in plan.names]

    def worker_labels(self) -> dict[str, str]:
        """The labels of the machine that runs the plane."""
        return {name: value for worker in self.workers for name, value in worker.labels.items()}

    def worker_price(self) -> float | None:
        """The price of a GPU hour on the machine that runs the plane; None if no price is given."""
        return next((one.price_per_gpu_hour for one in self.workers if one.price_per_gpu_hour is not None), None)

    def user_configs(self) -> dict[str, Any]:
        return {name: config for one in self.applications for name, config in one.user_configs.items()}

    def with_applications(self, more: Iterable[ApplicationPlan]) -> "PointsmanPlan":
        added = tuple(more)
        return msgspec.structs.replace(
            self,
            applications=(*self.applications, *added),
            deployments=(*self.deployments, *(plan for one in added for plan in one.deployments)),
            warnings=(*self.warnings, *(warning for one in added for warning in one.warnings)),
        )

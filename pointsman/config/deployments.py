"""The `deployments` of a document: what runs, how requests are scheduled, and where instances may be.

Enters: sections. Leaves: a plan for each deployment, or problems. The one rule: if the document has any problem, none
of its deployments has a plan.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pointsman.config.building import arguments_of, built
from pointsman.config.candidates import candidate_plans, shadow_recipe
from pointsman.config.code import code_in
from pointsman.config.picker import default_plan, discovery_reference, picker_plan
from pointsman.config.placement import ask_of
from pointsman.config.plan import CandidatePlan, DeploymentPlan, PickerPlan
from pointsman.config.problems import FieldPath, Names, Problem, Problems
from pointsman.config.registry import PluginType, can_be_started, engines, policies
from pointsman.config.scaling import first_wait_s, scaling
from pointsman.config.schema import (
    DeploymentSpec,
    EndpointSpec,
    PriceSpec,
    SchedulingSpec,
)
from pointsman.config.validation import INVALID, Section, Validator, usable
from pointsman.config.yaml import read_yaml, text_of
from pointsman.control.desired import (
    DesiredDeployment,
    DesiredEndpoint,
    DesiredEngine,
    EngineAccess,
    HourlyPrice,
    Lifecycle,
)
from pointsman.engines import Engine
from pointsman.errors import ConfigError
from pointsman.parameters import NoEffect, base_url, quoted, read_key
from pointsman.routing.shadow import BUDGET
from pointsman.routing.user_code import TIME_LIMIT_S
from pointsman.strategies import AdaptivePolicy, CostOptimizedPolicy, SchedulingPolicy
from pointsman.types import MAX_NAME

DEPLOYMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Instances and their log files are named after their deployment."""
ENDPOINT_NAME = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._:\[\]-]{0,127}")
"""The form of endpoint names. An address such as [::1]:8080 is a valid name."""


class Deployments:
    """Builds the plans of all deployments, and reports their problems."""

    def __init__(self, problems: Problems, folder: Path) -> None:
        self._problems = problems
        self._folder = folder
        self._names = Names("deployment", problems)
        self._models: dict[str, tuple[str, int]] = {}
        """Each model or alias, with its deployment and its line."""

    def plans(self, specs: Sequence[DeploymentSpec]) -> list[DeploymentPlan]:
        made = [self._plan(spec, ("deployments", index)) for index, spec in usable(specs)]
        return [plan for plan in made if plan is not None]

    def _plan(self, spec: DeploymentSpec, path: FieldPath) -> DeploymentPlan | None:
        self._check_names(spec, path)
        self._check_backends(spec, path)
        engine, parameters = self._engine(spec.engine, (*path, "engine")) if spec.engine else (None, {})
        endpoints = desired_endpoints(spec.endpoints or (), self._problems, (*path, "endpoints"))
        lifecycle = self._lifecycle(spec.lifecycle, (*path, "lifecycle"))
        how = scheduling(spec.scheduling, self._problems, (*path, "scheduling"), self._folder)
        file = self._endpoints_file(spec, how.picker, [endpoint.name for endpoint in endpoints], path)
        ask = None
        if engine is not None and spec.placement is not INVALID:
            ask = ask_of(spec.placement, spec.name, engine, self._problems, (*path, "placement"))
        self._check_price(spec, how, path)
        written = self._problems.written((*path, "replicas"))
        scaled = scaling(spec.scaling, self._problems, (*path, "scaling"), replicas=spec.replicas if written else None)
        if len(self._problems):
            return None
        wanted = DesiredDeployment(
            name=spec.name,
            model=spec.model,
            aliases=tuple(spec.aliases),
            adapters=tuple(spec.adapters),
            replicas=0 if spec.engine is None else spec.replicas if scaled is None else scaled.limits.first,
            engine=None if spec.engine is None else settled(spec.engine, engine, parameters),
            engine_slots=engine.slots if engine is not None else None,
            endpoints=endpoints,
            max_concurrency=spec.max_concurrency,
            labels=spec.labels,
            price=_hourly(spec.price),
            lifecycle=lifecycle,
            ask=ask,
        )
        return DeploymentPlan(
            desired=wanted,
            policy=how.policy,
            picker=how.picker,
            scheduling_recipe=how.recipe,
            shadow=how.shadow,
            shadow_budget=how.shadow_budget,
            shadow_recipe=shadow_recipe(how.shadow, how.shadow_budget, how.time_limit_s),
            time_limit_s=how.time_limit_s,
            first_wait_s=first_wait_s(scaled, how.picker),
            engine=engine,
            endpoints_file=file,
            price=spec.price,
            scaling=scaled,
        )

    def _check_price(self, spec: DeploymentSpec, how: "Scheduling", path: FieldPath) -> None:
        if not isinstance(how.policy, CostOptimizedPolicy | AdaptivePolicy):
            return
        priced = spec.price is not None and (spec.price.per_gpu_hour, spec.price.per_instance_hour) != (None, None)
        given = spec.scheduling is not None and "pricePerGpuHour" in (spec.scheduling.parameters or {})
        each = bool(spec.endpoints) and all(one.price_per_hour is not None for one in spec.endpoints)
        if not priced and not given and not each:
            assumed = f"costs assume {how.policy.price_per_gpu_hour:g} per GPU hour, and are unknown on CPUs"
            self._problems.warn((*path, "scheduling"), f"{assumed}; set price.perGpuHour or price.perInstanceHour")

    def _check_names(self, spec: DeploymentSpec, path: FieldPath) -> None:
        self._names.take(spec.name, path)
        if spec.name and not DEPLOYMENT_NAME.fullmatch(spec.name):
            wanted = "letters, digits, dots, dashes and underscores, at most 63, a letter or digit first"
            self._problems.add((*path, "name"), f"expected {wanted}, found {quoted(spec.name)}")
        self._take_model(spec.model, spec.name, (*path, "model"))
        for index, alias in usable(spec.aliases):
            self._take_model(alias, spec.name, (*path, "aliases", index))
        for index, adapter in usable(spec.adapters):
            self._take_model(adapter, spec.name, (*path, "adapters", index))

    def _take_model(self, model: str, deployment: str, path: FieldPath) -> None:
        if model == "":
            self._problems.add(path, "must not be empty")
        elif model and len(model) > MAX_NAME:
            self._problems.add(path, f"expected at most {MAX_NAME} characters, found {len(model)}")
        elif model and model in self._models:
            other, line = self._models[model]
            whose = "this deployment" if other == deployment else f'deployment "{other}"'
            self._problems.add(path, f'{whose} already has a model or alias "{model}" on line {line}')
        elif model:
            self._models[model] = (deployment, self._problems.line_of(path))

    def _check_backends(self, spec: DeploymentSpec, path: FieldPath) -> None:
        if spec.engine is None and not self._problems.written((*path, "engine")):
            if self._problems.written((*path, "replicas")):
                self._problems.add((*path, "replicas"), "need an engine, and there is none; add one, or remove this")
            elif spec.scaling is not None:
                why = "starts and stops instances of an engine, and there is none; add one, or remove this"
                self._problems.add((*path, "scaling"), why)
            elif spec.endpoints == [] and spec.endpoints_file == "" and not _discovers(spec):
                serves = "an engine to run, endpoints that run already, or an endpointsFile that lists them"
                self._problems.add(path, f"nothing serves this deployment; give it {serves}")

    def _engine(self, spec: DesiredEngine, path: FieldPath) -> tuple[Engine | None, dict[str, Any]]:
        """The adapter for an engine section, and the parameters of that section with absolute paths and defaults."""
        if not spec.type:
            if spec.type == "":
                self._problems.add((*path, "type"), "must not be empty")
            return None, {}
        kind = engines().find(spec.type, self._problems, (*path, "type"))
        if kind is None or spec.parameters is INVALID:
            return None, {}
        if not can_be_started(kind):
            instead = 'list its servers under endpoints, or start one with engine "command"'
            self._problems.add((*path, "type"), f'engine "{spec.type}" cannot be started; {instead}')
            return None, {}
        validator = Validator(self._problems, folder=self._folder)
        made = built(kind, spec.parameters, path, validator)
        if made is INVALID:
            return None, {}
        check_key(spec, self._problems, path)
        if spec.key and made.key_variable is None:
            why = f'engine "{spec.type}" cannot be started with a key; remove this, or start it with engine "command"'
            self._problems.add((*path, "apiKeyEnv" if spec.api_key_env else "apiKeyFile"), why)
        return made, parameters_in_force(kind, arguments_of(kind, spec.parameters, path, validator))

    def _endpoints_file(
        self, spec: DeploymentSpec, picker: PickerPlan | None, taken: Sequence[str], path: FieldPath
    ) -> Path | None:
        discovered = picker.endpoints_file if picker is not None else ""
        if spec.endpoints_file and discovered:
            message = "is given, and dataLayer.discovery of the scheduling names a file, too; keep one of them"
            self._problems.add((*path, "endpointsFile"), message)
        if not (spec.endpoints_file or discovered):
            return None
        file = self._folder / (spec.endpoints_file or discovered)
        if file.exists():
            try:
                load_endpoints(file, taken)
            except ConfigError as error:
                self._problems.take(problem for problem in error.problems if isinstance(problem, Problem))
        else:
            message = f"there is no {file} yet; its endpoints join as soon as the file exists"
            self._problems.warn((*path, "endpointsFile"), message)
        return file

    def _lifecycle(self, lifecycle: Lifecycle, path: FieldPath) -> Lifecycle:
        if lifecycle is INVALID or INVALID in msgspec.structs.astuple(lifecycle):
            return Lifecycle()
        if lifecycle.backoff_max_s < lifecycle.backoff_s:
            self._problems.add((*path, "backoffMax"), f"must be at least backoff, which is {lifecycle.backoff_s:g}s")
        if lifecycle.ejection_max_s < lifecycle.ejection_s:
            least = f"must be at least ejection, which is {lifecycle.ejection_s:g}s"
            self._problems.add((*path, "ejectionMax"), least)
        return lifecycle


def _discovers(spec: DeploymentSpec) -> bool:
    """Whether a plugin in the scheduling of this deployment lists endpoints."""
    config = spec.scheduling.config if spec.scheduling else None
    return config is not None and bool(discovery_reference(config)[0])


def _hourly(spec: PriceSpec | None) -> HourlyPrice:
    if spec is None:
        return HourlyPrice()
    return HourlyPrice(**{name: getattr(spec, name) for name in HourlyPrice.__struct_fields__})


def parameters_in_force(kind: PluginType, arguments: dict[str, Any]) -> dict[str, Any]:
    """Parameters by their names in YAML, with defaults, as plain data, so that equal meanings compare equal."""
    known = {field.name: name for name, field in kind.parameters.items()}
    defaults = {name: field.default for name, field in kind.parameters.items() if field.optional}
    given = {known.get(name, name): value for name, value in arguments.items()}
    held = {name: value for name, value in (defaults | given).items() if value not in (None, [], (), {})}
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(held, enc_hook=str))
    return plain


class Scheduling(msgspec.Struct, frozen=True):
    """How requests are scheduled: by a policy or by a picker. Both are None if the section has problems."""

    recipe: str = ""
    policy: SchedulingPolicy | None = None
    picker: PickerPlan | None = None
    time_limit_s: float = TIME_LIMIT_S
    shadow: tuple[CandidatePlan, ...] = ()
    shadow_budget: float = BUDGET


def scheduling(
    spec: SchedulingSpec | None, problems: Problems, path: FieldPath, folder: Path | None = None
) -> Scheduling:
    """The scheduling that a section describes; by default a picker. `folder` has the files of candidates."""
    how = SchedulingSpec() if spec is None else spec
    if how is INVALID or how.policy is INVALID or how.config is INVALID:
        return Scheduling()
    if how.policy and how.config is not None:
        problems.add(path, "has a policy and a config; keep one of them")
        return Scheduling()
    if how.policy:
        made = Scheduling(policy=policy(how.policy, how.parameters or {}, problems, path))
    else:
        if how.parameters:
            problems.add((*path, "parameters"), "belong to a policy; name one, such as policy: slo-aware")
        where = (*path, "config")
        if how.config is None:
            made = Scheduling(picker=default_plan(problems, where))
        else:
            made = Scheduling(picker=picker_plan(how.config, problems, where, queues=True))
    shadow = candidate_plans(how.shadow or (), problems, (*path, "shadow"), folder or Path(), policy)
    if len(problems):
        return made
    # The recipe leaves candidates out: if only candidates change, the policy in force stays the same object.
    recipe = msgspec.to_builtins(msgspec.structs.replace(how, shadow=[], shadow_budget=BUDGET))
    del recipe["shadow"], recipe["shadowBudget"]
    if code := code_in(recipe):
        recipe["code"] = code
    written = msgspec.json.encode(recipe, order="sorted").decode()
    candidates = {"shadow": shadow, "shadow_budget": how.shadow_budget}
    return msgspec.structs.replace(made, recipe=written, time_limit_s=how.time_limit, **candidates)


def policy(name: str, parameters: Mapping[str, Any], problems: Problems, path: FieldPath) -> SchedulingPolicy | None:
    """The policy with this name; None after reporting what is wrong."""
    kind = policies().find(name, problems, (*path, "policy"))
    made = built(kind, parameters, path, Validator(problems)) if kind is not None else INVALID
    return None if made is INVALID else made


class DiscoveredEndpoint(Section, frozen=True, kw_only=True):
    """A server in the form of the published file-discovery."""

    name: str
    namespace: Annotated[str, NoEffect("a deployment is one pool")] = ""
    address: str
    """An IP address, or a name."""
    port: str | int
    metrics_host: Annotated[str, NoEffect("metrics are read where requests go")] = ""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)

    def as_endpoint(self) -> EndpointSpec:
        """The endpoint. The label `llm-d.ai/engine-type` names the engine of the adapter. The default is vllm."""
        engine = self.labels.get("llm-d.ai/engine-type", "vllm")
        host = f"[{self.address}]" if ":" in self.address else self.address
        return EndpointSpec(name=self.name, url=f"http://{host}:{self.port}", engine=engine, labels=self.labels)


class DiscoveredFile(Section, frozen=True):
    """The file of the published file-discovery."""

    endpoints: list[DiscoveredEndpoint] = msgspec.field(default_factory=list)


def load_endpoints(file: Path, taken: Iterable[str] = ()) -> tuple[DesiredEndpoint, ...]:
    """The endpoints that a file lists. `taken` are names in use elsewhere. Raises `ConfigError` with all problems."""
    data, problems = read_yaml(text_of(file), str(file))
    where: FieldPath = ()
    if isinstance(data, dict):  # the form of the published file-discovery
        where = ("endpoints",)
        listed = Validator(problems).value(data, DiscoveredFile, ())
        specs = [] if listed is INVALID else [discovered.as_endpoint() for _, discovered in usable(listed.endpoints)]
    else:
        specs = Validator(problems, folder=file.parent).value([] if data is None else data, list[EndpointSpec], ())
    endpoints = () if where and len(problems) else desired_endpoints(specs or (), problems, where, taken)
    problems.raise_if_any()
    return endpoints


def endpoint_engine(name: str) -> Engine:
    """The adapter that reads running servers of the engine with this name."""
    problems = Problems("")
    engine = _adapter(name, problems, ())
    problems.raise_if_any()
    assert engine is not None, "an engine without problems has been built"
    return engine


def desired_endpoints(
    specs: Sequence[EndpointSpec], problems: Problems, path: FieldPath, taken: Iterable[str] = ()
) -> tuple[DesiredEndpoint, ...]:
    """The endpoints in one list. The result is empty if the document has a problem."""
    names = Names("endpoint", problems, taken)
    made = (_endpoint(spec, names, problems, (*path, index)) for index, spec in usable(specs))
    return tuple(endpoint for endpoint in made if endpoint is not None)


def _endpoint(spec: EndpointSpec, names: Names, problems: Problems, path: FieldPath) -> DesiredEndpoint | None:
    url, host_port, adapter = "", "", None
    try:
        if spec.url is not INVALID:
            url, host_port = base_url(spec.url)
    except ValueError as error:
        problems.add((*path, "url"), str(error))
    name = spec.name or host_port
    if name:
        names.take(name, path)
        if not ENDPOINT_NAME.fullmatch(name):
            problems.add((*path, "name"), f"expected letters, digits and any of . _ : -, found {quoted(name)}")
    if spec.engine is not INVALID:
        adapter = _adapter(spec.engine, problems, (*path, "engine"))
    check_key(spec, problems, path)
    if len(problems):
        return None
    found = {"name": name, "url": url, "messages_api": messages_api(spec, adapter)}
    return DesiredEndpoint(**{**msgspec.structs.asdict(spec), **found})


def settled(spec: DesiredEngine, engine: Engine | None, parameters: dict[str, Any]) -> DesiredEngine:
    """An engine section in which the defaults are filled in."""
    return msgspec.structs.replace(spec, parameters=parameters, messages_api=messages_api(spec, engine))


def messages_api(access: EngineAccess, engine: Engine | None) -> str:
    """Whether requests to Anthropic's API are passed on. The document decides; if it does not, the adapter does."""
    return access.messages_api or ("native" if engine is not None and engine.serves_messages else "translated")


def check_key(access: EngineAccess, problems: Problems, path: FieldPath) -> None:
    """Report a key that is missing or is given in two places."""
    if INVALID in (access.api_key_env, access.api_key_file):
        return
    if access.api_key_env and access.api_key_file:
        problems.add((*path, "apiKeyFile"), "there is an apiKeyEnv, too; keep one of them")
        return
    try:
        read_key(access.key)
    except ValueError as error:
        problems.add((*path, "apiKeyEnv" if access.api_key_env else "apiKeyFile"), str(error))


def reads_endpoints(kind: PluginType) -> bool:
    """Whether the adapter of an engine can read servers that are already running."""
    try:
        kind.build.of_endpoint()  # type: ignore[attr-defined]
    except TypeError:  # the adapter needs parameters
        return False
    return True


def _adapter(name: str, problems: Problems, path: FieldPath) -> Engine | None:
    kind = engines().find(name, problems, path)
    if kind is None:
        return None
    try:
        engine: Engine = kind.build.of_endpoint()  # type: ignore[attr-defined]
    except Exception as error:  # a failing class of the user's, or an engine that needs a command
        why = "it cannot be made without parameters; give it an of_endpoint()" if ":" in name else "use openai"
        problems.add(path, f'engine "{name}" cannot read a server that is already running ({error}): {why}')
        return None
    return engine

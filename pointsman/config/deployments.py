"""The `deployments` of a document: what runs and who decides, each as a plan."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pointsman.config.building import arguments_of, built
from pointsman.config.endpoints import desired_endpoints, load_endpoints
from pointsman.config.manifest import EngineSpec, LifecycleSpec
from pointsman.config.names import Names
from pointsman.config.placement import ask_of
from pointsman.config.plan import DeploymentPlan, ScalingPlan
from pointsman.config.problems import FieldPath, Problem, Problems
from pointsman.config.registry import PluginType, can_be_started, engines
from pointsman.config.scaling import first_wait_s, scaling
from pointsman.config.scheduling import scheduling
from pointsman.config.schema import DeploymentSpec
from pointsman.config.validation import INVALID, Validator, usable
from pointsman.control import desired
from pointsman.engines import Engine
from pointsman.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Instances and their log files are named after their deployment."""


class Deployments:
    """Makes the plans of all deployments; what is wrong with them is noted."""

    def __init__(self, problems: Problems, folder: Path) -> None:
        self.notes: list[str] = []
        self._problems = problems
        self._folder = folder
        self._names = Names("deployment", problems)
        self._models: dict[str, tuple[str, int]] = {}
        """Names of models and aliases -> the deployment that has it, and the line."""

    def plans(self, specs: Sequence[DeploymentSpec]) -> list[DeploymentPlan]:
        """A plan for each, as long as the document has no problem."""
        made = [self._plan(spec, ("deployments", place)) for place, spec in usable(specs)]
        return [plan for plan in made if plan is not None]

    def _plan(self, spec: DeploymentSpec, path: FieldPath) -> DeploymentPlan | None:
        self._check_names(spec, path)
        self._check_that_something_serves(spec, path)
        engine, parameters = self._engine(spec.engine, (*path, "engine")) if spec.engine else (None, {})
        endpoints = desired_endpoints(spec.endpoints or (), self._problems, (*path, "endpoints"))
        file = self._endpoints_file(spec, [endpoint.name for endpoint in endpoints], path)
        lifecycle = self._lifecycle(spec.lifecycle, (*path, "lifecycle"))
        how = scheduling(spec.scheduling, self._problems, (*path, "scheduling"))
        ask = None
        if engine is not None and spec.placement is not INVALID:
            ask = ask_of(spec.placement, spec.name, engine, self._problems, (*path, "placement"), self.notes)
        written = self._problems.written((*path, "replicas"))
        grows = scaling(spec.scaling, self._problems, (*path, "scaling"), replicas=spec.replicas if written else None)
        if len(self._problems):  # of the document: nothing of it will run
            return None
        if how.picker is not None:
            self.notes += [f"{spec.name}: {note}" for note in how.picker.notes]
        if grows is not None:
            self.notes += [f"{spec.name}: {note}" for note in grows.notes]
        wanted = desired.DesiredDeployment(
            name=spec.name,
            model=spec.model,
            aliases=tuple(spec.aliases),
            replicas=_first_replicas(spec, grows),
            engine=desired.DesiredEngine(spec.engine.type, parameters) if spec.engine is not None else None,
            engine_slots=engine.slots if engine is not None else None,
            endpoints=endpoints,
            max_concurrency=spec.max_concurrency,
            labels=spec.labels,
            lifecycle=lifecycle,
            ask=ask,
        )
        return DeploymentPlan(
            desired=wanted,
            policy=how.policy,
            picker=how.picker,
            scheduling_recipe=how.recipe,
            first_wait_s=first_wait_s(grows, how.picker),
            engine=engine,
            endpoints_file=file,
            price=spec.price,
            scaling=grows,
        )

    def _check_names(self, spec: DeploymentSpec, path: FieldPath) -> None:
        self._names.take(spec.name, path)
        if spec.name and not NAME.fullmatch(spec.name):
            wanted = "letters, digits, dots, dashes and underscores, at most 63, a letter or digit first"
            self._problems.add((*path, "name"), f"expected {wanted}, found {spec.name!r}")
        self._take_model(spec.model, spec.name, (*path, "model"))
        for place, alias in usable(spec.aliases):
            self._take_model(alias, spec.name, (*path, "aliases", place))

    def _take_model(self, model: str, deployment: str, path: FieldPath) -> None:
        if model == "":
            self._problems.add(path, "must not be empty")
        elif model and model in self._models:
            other, line = self._models[model]
            whose = "this deployment" if other == deployment else f'deployment "{other}"'
            self._problems.add(path, f'{whose} already has a model or alias "{model}" on line {line}')
        elif model:
            self._models[model] = (deployment, self._problems.line_of(path))

    def _check_that_something_serves(self, spec: DeploymentSpec, path: FieldPath) -> None:
        if spec.engine is None and not self._problems.written((*path, "engine")):
            if self._problems.written((*path, "replicas")):
                self._problems.add((*path, "replicas"), "are of an engine, and there is none; add one, or drop this")
            elif spec.scaling is not None:
                why = "starts and stops instances of an engine, and there is none; add one, or drop this"
                self._problems.add((*path, "scaling"), why)
            elif spec.endpoints == [] and spec.endpoints_file == "":
                serves = "an engine to run, endpoints that run already, or an endpointsFile that lists them"
                self._problems.add(path, f"nothing serves this deployment; give it {serves}")

    def _engine(self, spec: EngineSpec, path: FieldPath) -> tuple[Engine | None, dict[str, Any]]:
        """The adapter, and its parameters as they hold: with paths resolved and defaults filled in."""
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
        return made, parameters_in_force(kind, arguments_of(kind, spec.parameters, path, validator))

    def _endpoints_file(self, spec: DeploymentSpec, taken: Sequence[str], path: FieldPath) -> Path | None:
        if not spec.endpoints_file:
            return None
        file = Path(spec.endpoints_file)
        if file.exists():
            try:
                load_endpoints(file, taken)
            except ConfigError as error:
                self._problems.take(problem for problem in error.problems if isinstance(problem, Problem))
        else:
            self.notes.append(f"{spec.name}: there is no {file} yet; its endpoints join as soon as there is")
        return file

    def _lifecycle(self, spec: LifecycleSpec, path: FieldPath) -> desired.Lifecycle:
        if spec is INVALID or INVALID in msgspec.structs.astuple(spec):
            return desired.Lifecycle()
        if spec.backoff_max < spec.backoff:
            self._problems.add((*path, "backoffMax"), f"must be at least backoff, which is {spec.backoff:g}s")
        return desired.Lifecycle(
            start_timeout_s=spec.start_timeout,
            probe_interval_s=spec.probe_interval,
            probe_timeout_s=spec.probe_timeout,
            failures_until_unhealthy=spec.failures_until_unhealthy,
            drain_timeout_s=spec.drain_timeout,
            stop_grace_s=spec.stop_grace,
            backoff_s=spec.backoff,
            backoff_max_s=spec.backoff_max,
            start_attempts=spec.start_attempts,
        )


def _first_replicas(spec: DeploymentSpec, grows: ScalingPlan | None) -> int:
    """How many instances there are to begin with."""
    if spec.engine is None:
        return 0
    return spec.replicas if grows is None else grows.limits.first


def parameters_in_force(kind: PluginType, arguments: dict[str, Any]) -> dict[str, Any]:
    """Parameters by their names in YAML, as plain data, so that those that say the same are equal."""
    known = {field.name: name for name, field in kind.parameters.items()}
    defaults = {name: field.default for name, field in kind.parameters.items() if field.optional}
    given = {known.get(name, name): value for name, value in arguments.items()}
    held = {name: value for name, value in (defaults | given).items() if value not in (None, [], (), {})}
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(held, enc_hook=str))
    return plain

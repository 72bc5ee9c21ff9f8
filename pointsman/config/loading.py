"""Files -> plans.

Enters: a file (`Path`) or text (`str`). Leaves: a plan with everything built, or `ConfigError` with all problems. The
one rule: all or nothing. Loading has no effect but its result.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path as FilePath
from typing import Any

import msgspec

from pointsman.config.building import built
from pointsman.config.names import Names
from pointsman.config.picker import picker_plan
from pointsman.config.plan import DeploymentPlan, PickerPlan, PointsmanPlan
from pointsman.config.problems import Path, Problem, Problems
from pointsman.config.registry import plugins, policies
from pointsman.config.schema import (
    KINDS,
    DeploymentSpec,
    EndpointPickerConfig,
    InlinePicker,
    Pointsman,
    SchedulingSpec,
    Section,
)
from pointsman.config.validation import INVALID, Validator, usable
from pointsman.config.wording import found
from pointsman.config.yaml import read_yaml
from pointsman.errors import ConfigError, UnknownName, did_you_mean
from pointsman.strategies import SchedulingPolicy


def load(source: FilePath | str) -> PickerPlan | PointsmanPlan:
    """Load a document of any kind."""
    document, problems = _document(source, KINDS)
    plan: PickerPlan | PointsmanPlan | None = None
    if isinstance(document, EndpointPickerConfig):
        plan = picker_plan(document, problems, ())
    elif isinstance(document, Pointsman):
        plan = _pointsman_plan(document, problems)
    problems.raise_if_any()
    assert plan is not None, "a document without problems has a plan"
    return plan


def load_picker(source: FilePath | str = "") -> PickerPlan:
    """Load an `EndpointPickerConfig`. An empty one is the default configuration."""
    document, problems = _document(source, {"EndpointPickerConfig": EndpointPickerConfig})
    plan = picker_plan(document, problems, ()) if isinstance(document, EndpointPickerConfig) else None
    problems.raise_if_any()
    assert plan is not None, "a document without problems has a plan"
    return plan


def load_deployments(source: FilePath | str) -> tuple[DeploymentPlan, ...]:
    """Load the deployments of a `Pointsman` document."""
    document, problems = _document(source, {"Pointsman": Pointsman})
    plan = _pointsman_plan(document, problems) if isinstance(document, Pointsman) else PointsmanPlan()
    problems.raise_if_any()
    return plan.deployments


def build_policy(name: str, parameters: Mapping[str, Any] | None = None) -> SchedulingPolicy:
    """A scheduling policy by its name (fifo, slo-aware, mymodule:MyPolicy), with parameters as in YAML."""
    problems = Problems("")
    policy = _policy(name, parameters or {}, problems, ())
    problems.raise_if_any()
    assert policy is not None, "a policy without problems has been built"
    return policy


def build_named(name: str, parameters: Mapping[str, Any] | None = None) -> Any:
    """A scheduling policy or plugin by its name, with parameters as in YAML."""
    problems = Problems("")
    registry = policies()
    if name in plugins() or (":" in name and registry.find(name, problems.apart(), ()) is None):
        registry = plugins()
    elif ":" not in name and name not in registry:
        known = [kind.name for names in (policies(), plugins()) for kind in names]
        raise UnknownName("policy or plugin", name, known)
    kind = registry.find(name, problems, ())
    made = built(kind, parameters or {}, (), Validator(problems)) if kind is not None else INVALID
    problems.raise_if_any()
    return made


def _document(source: FilePath | str, kinds: Mapping[str, type[Section]]) -> tuple[Any, Problems]:
    text, file = (source, "<text>") if isinstance(source, str) else (_text_of(source), str(source))
    data, problems = read_yaml(text, file)
    if data is None:
        problems.raise_if_any()
        data = {}
    if not isinstance(data, dict):
        problems.add((), f"expected a mapping (field: value), found {found(data)}")
        return INVALID, problems
    kind = _kind(data, kinds, problems)
    return Validator(problems).value({**data, "kind": kind}, kinds[kind], ()), problems


def _kind(data: dict[str, Any], kinds: Mapping[str, type[Section]], problems: Problems) -> str:
    """The kind of a document. For one that is misspelled or missing, the likeliest, so that the rest is checked too."""
    kind = data.get("kind")
    if isinstance(kind, str) and kind in kinds:
        return kind
    likely = next((name for name in kinds if name == "Pointsman" and "deployments" in data), next(iter(kinds)))
    if kind is None:
        return likely
    if not isinstance(kind, str):
        problems.add(("kind",), f"expected text, found {found(kind)}")
        return likely
    problems.add(("kind",), f'unknown kind "{kind}"{did_you_mean(kind, kinds)}')
    return (get_close_matches(kind, kinds, n=1) or [likely])[0]


def _text_of(path: FilePath) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([Problem(str(path), 0, "", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem(str(path), line, "", "this is not UTF-8 text")]) from error


def _pointsman_plan(document: Pointsman, problems: Problems) -> PointsmanPlan:
    names = Names("deployment", problems)
    plans = []
    for place, spec in usable(document.deployments):
        path: Path = ("deployments", place)
        names.take(spec.name, path)
        if spec.model == "":
            problems.add((*path, "model"), "must not be empty")
        plans.append(_deployment_plan(spec, problems, path))
    notes = [f"{plan.name}: {note}" for plan in plans if plan.picker is not None for note in plan.picker.notes]
    return PointsmanPlan(deployments=tuple(plans), notes=tuple(notes))


def _deployment_plan(spec: DeploymentSpec, problems: Problems, path: Path) -> DeploymentPlan:
    bare = DeploymentPlan(name=spec.name, model=spec.model)
    path = (*path, "scheduling")
    how = spec.scheduling if spec.scheduling is not None else SchedulingSpec()
    if how is INVALID or how.policy is INVALID or how.config is INVALID:
        return bare
    if how.policy and how.config is not None:
        problems.add(path, "has a policy and a config; keep one of them")
        return bare
    if how.policy:
        parameters = how.parameters if how.parameters is not INVALID else {}
        return msgspec.structs.replace(bare, policy=_policy(how.policy, parameters, problems, path))
    if how.parameters:
        problems.add((*path, "parameters"), "belong to a policy; name one, such as policy: slo-aware")
    config = how.config if how.config is not None else InlinePicker()
    return msgspec.structs.replace(bare, picker=picker_plan(config, problems, (*path, "config")))


def _policy(name: str, parameters: Mapping[str, Any], problems: Problems, path: Path) -> SchedulingPolicy | None:
    kind = policies().find(name, problems, (*path, "policy"))
    policy = built(kind, parameters, path, Validator(problems)) if kind is not None else INVALID
    return None if policy is INVALID else policy

"""Files -> plans.

Enters: a file (`Path`) or text (`str`). Leaves: a plan with everything built, or `ConfigError` with all problems. The
one rule: all or nothing. Loading has no effect but its result.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path as FilePath
from typing import Any

from pointsman.config.building import built
from pointsman.config.deployments import Deployments
from pointsman.config.gateway import gateway
from pointsman.config.picker import picker_plan
from pointsman.config.plan import DeploymentPlan, PickerPlan, PointsmanPlan
from pointsman.config.problems import Problems
from pointsman.config.registry import plugins, policies
from pointsman.config.scheduling import policy
from pointsman.config.schema import KINDS, EndpointPickerConfig, Pointsman
from pointsman.config.section import Section
from pointsman.config.source import text_of
from pointsman.config.validation import INVALID, Validator
from pointsman.config.wording import found
from pointsman.config.workers import workers
from pointsman.config.yaml import read_yaml
from pointsman.errors import UnknownName, did_you_mean
from pointsman.strategies import SchedulingPolicy

OURS = frozenset({"deployments", "gateway", "workers"})
"""Fields that tell our own document from a picker's."""


def load(source: FilePath | str, folder: FilePath | str | None = None, file: str = "") -> PickerPlan | PointsmanPlan:
    """Load a document of any kind.

    `folder`: what its paths are relative to; the folder of the file, and for text the current one. `file`: what text is
    called in problems.
    """
    folder = _folder(source, folder)
    document, problems = _document(source, KINDS, folder, file)
    plan: PickerPlan | PointsmanPlan | None = None
    if isinstance(document, EndpointPickerConfig):
        plan = picker_plan(document, problems, ())
    elif isinstance(document, Pointsman):
        with _importable(folder):
            plan = _pointsman_plan(document, problems, folder)
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


def load_manifest(source: FilePath | str, folder: FilePath | str | None = None, file: str = "") -> PointsmanPlan:
    """Load a `Pointsman` document; `folder` and `file` as for `load`."""
    folder = _folder(source, folder)
    document, problems = _document(source, {"Pointsman": Pointsman}, folder, file)
    with _importable(folder):
        plan = _pointsman_plan(document, problems, folder) if isinstance(document, Pointsman) else PointsmanPlan()
    problems.raise_if_any()
    return plan


def load_deployments(source: FilePath | str) -> tuple[DeploymentPlan, ...]:
    """Load the deployments of a `Pointsman` document."""
    return load_manifest(source).deployments


def build_policy(name: str, parameters: Mapping[str, Any] | None = None) -> SchedulingPolicy:
    """A scheduling policy by its name (fifo, slo-aware, mymodule:MyPolicy), with parameters as in YAML."""
    problems = Problems("")
    made = policy(name, parameters or {}, problems, ())
    problems.raise_if_any()
    assert made is not None, "a policy without problems has been built"
    return made


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


@contextmanager
def _importable(folder: FilePath) -> Iterator[None]:
    """Classes of the author's own may be in modules beside the document."""
    place = str(folder)
    if place in sys.path:
        yield
        return
    sys.path.append(place)
    try:
        yield
    finally:
        sys.path.remove(place)


def _folder(source: FilePath | str, folder: FilePath | str | None) -> FilePath:
    if folder is None:
        folder = FilePath() if isinstance(source, str) else source.parent
    return FilePath(folder).absolute()


def _document(
    source: FilePath | str, kinds: Mapping[str, type[Section]], folder: FilePath | None = None, file: str = ""
) -> tuple[Any, Problems]:
    text, name = (source, "<text>") if isinstance(source, str) else (text_of(source), str(source))
    data, problems = read_yaml(text, file or name)
    if data is None:
        problems.raise_if_any()
        data = {}
    if not isinstance(data, dict):
        problems.add((), f"expected a mapping (field: value), found {found(data)}")
        return INVALID, problems
    kind = _kind(data, kinds, problems)
    return Validator(problems, folder=folder).value({**data, "kind": kind}, kinds[kind], ()), problems


def _kind(data: dict[str, Any], kinds: Mapping[str, type[Section]], problems: Problems) -> str:
    """The kind of a document. For one that is misspelled or missing, the likeliest, so that the rest is checked too."""
    kind = data.get("kind")
    if isinstance(kind, str) and kind in kinds:
        return kind
    likely = next((name for name in kinds if name == "Pointsman" and OURS & data.keys()), next(iter(kinds)))
    if kind is None:
        return likely
    if not isinstance(kind, str):
        problems.add(("kind",), f"expected text, found {found(kind)}")
        return likely
    problems.add(("kind",), f'unknown kind "{kind}"{did_you_mean(kind, kinds)}')
    return (get_close_matches(kind, kinds, n=1) or [likely])[0]


def _pointsman_plan(document: Pointsman, problems: Problems, folder: FilePath) -> PointsmanPlan:
    deployments = Deployments(problems, folder)
    plans = deployments.plans(document.deployments)
    front, notes = gateway(document.gateway, problems)
    machines = workers(document.workers, problems)
    return PointsmanPlan(deployments=tuple(plans), gateway=front, workers=machines, notes=(*deployments.notes, *notes))

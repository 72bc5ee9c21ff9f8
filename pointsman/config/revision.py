"""The documents in force: one manifest, the applications deployed beside it, and the files of endpoints they name.

A revision never changes: each operation returns the next one, which is checked as a whole before it takes effect.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pointsman.config import load_application, load_manifest
from pointsman.config.application import missing_models
from pointsman.config.deployments import load_endpoints
from pointsman.config.plan import ApplicationPlan, DeploymentPlan, PointsmanPlan
from pointsman.config.schema import GatewaySpec
from pointsman.control import ReconcileStep
from pointsman.control.desired import Desired, DesiredEndpoint
from pointsman.errors import ConfigError, PointsmanError, UnknownName
from pointsman.parameters import duration_text, yaml_name
from pointsman.render.text import text_table
from pointsman.scaling.limits import ScalingLimits, ScalingPlan

# Changes between two revisions

AFTER_A_RESTART = frozenset({"listen", "grpcListen", "tls", "keepRecords", "upstream.maxTries"})
"""Settings of the gateway that take effect after a restart."""
OF_APPLICATION = frozenset({"interval", "timeLimit"})
"""Scaling settings of an application itself; the others are reported for its nodes."""
SECRET = frozenset({"adminKeySha256", "keys", "tls"})
"""Settings whose values are not shown."""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    what: str
    """Of instances: start, stop, restart, replace, update, add, remove. Else: open, close, policy, scaling, price,
    endpoints, configure, calls, workers, gateway."""
    subject: str
    """The instance, the deployment, or the setting."""
    why: str
    where: str = ""
    """Of an instance that is started: the place that it would get, or why there is none."""
    place: dict[str, Any] | None = None
    """The same as code, facts and text."""


class Changes(msgspec.Struct, frozen=True):
    """Everything that changes; false: nothing."""

    steps: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __str__(self) -> str:
        if not self.steps:
            return "no changes"
        heads, rows = ["what", "subject", "why"], [[step.what, step.subject, step.why] for step in self.steps]
        if any(step.where for step in self.steps):
            heads, rows = [*heads, "where"], [[*row, step.where] for row, step in zip(rows, self.steps, strict=True)]
        return text_table(heads, rows)


def changes_between(before: PointsmanPlan | None, after: PointsmanPlan, steps: Iterable[ReconcileStep]) -> Changes:
    """What differs between two plans, and the steps that follow from it for instances."""
    old = PointsmanPlan() if before is None else before
    found = [*_of_applications(old, after), *_of_deployments(old, after)]
    for step in steps:
        where = ("", None) if step.where is None else (str(step.where), step.where.as_dict())
        found.append(Change(step.what.value, step.subject, str(step.why), *where))
    if before is not None:
        if before.workers != after.workers:
            found.append(Change("workers", "workers", _arrow(before.workers, after.workers)))
        found += _of_gateway(before.gateway, after.gateway)
    return Changes(tuple(found))


def _of_applications(before: PointsmanPlan, after: PointsmanPlan) -> Iterator[Change]:
    known = {plan.name: plan for plan in before.applications}
    wanted = {plan.name: plan for plan in after.applications}
    for name in known:
        if name not in wanted:
            yield Change("close", name, f"the application was removed, and /{name} with it")
    for name, plan in wanted.items():
        if name not in known:
            yield Change("open", name, f"new: the application takes requests at /{name}")
            continue
        if known[name].flow != plan.flow:
            yield Change("calls", name, "the calls of the application have changed")
        scaling = _of_scaling(known[name].scaling, plan.scaling, "a policy for each node", OF_APPLICATION)
        if scaling:
            yield Change("scaling", name, scaling)
        old, new = known[name].user_configs, plan.user_configs
        for deployment in [one.name for one in plan.deployments]:
            there = any(one.name == deployment for one in known[name].deployments)
            if there and old.get(deployment) != new.get(deployment):
                yield Change("configure", deployment, "its user config has changed; no restart is needed")


def _of_deployments(before: PointsmanPlan, after: PointsmanPlan) -> Iterator[Change]:
    known = {plan.name: plan for plan in before.deployments}
    wanted = {plan.name: plan for plan in after.deployments}
    for name, plan in known.items():
        if name not in wanted:
            gone = f'it was removed from the manifest, and "{plan.model}" with it'
            yield Change("close", name, "it is no longer a node of its application" if plan.internal else gone)
    for name, plan in wanted.items():
        if name in known:
            yield from _of_deployment(known[name], plan)
        else:
            new = "calls of its application" if plan.internal else f'requests for "{plan.model}"'
            yield Change("open", name, f"new: it takes {new}; {plan.decided_by} decides where they go")


def _of_deployment(before: DeploymentPlan, after: DeploymentPlan) -> Iterator[Change]:
    if before.scheduling_recipe != after.scheduling_recipe:
        old, new = before.decided_by, after.decided_by
        yield Change("policy", after.name, f"{old} -> {new}" if old != new else f"the settings of {new} have changed")
    scaling = _of_scaling(before.scaling, after.scaling)
    if scaling:
        yield Change("scaling", after.name, scaling)
    if before.price != after.price:
        yield Change("price", after.name, _arrow(before.price, after.price))
    if before.endpoints_file != after.endpoints_file:
        yield Change("endpoints", after.name, _arrow(before.endpoints_file, after.endpoints_file))


def _of_scaling(
    before: ScalingPlan | None,
    after: ScalingPlan | None,
    default: str = "a fixed number",
    settings: Container[str] | None = None,
) -> str:
    """The differences in words. `default`: stands for no plan. `settings`: report only these."""
    parts = [_of_policy(before, after, default)]
    if before is not None and after is not None:
        old, new = _settings_of(before), _settings_of(after)
        differ = [name for name in old if old[name] != new[name] and (settings is None or name in settings)]
        parts += [f"{name} {_arrow(old[name], new[name])}" for name in differ]
    return ", ".join(filter(None, parts))


def _of_policy(before: ScalingPlan | None, after: ScalingPlan | None, default: str) -> str:
    """The change of the policy or of its settings; empty if there is none."""
    old, new = (default if one is None else one.policy_name or "its application's policy" for one in (before, after))
    if old != new:
        return _arrow(old, new)
    same = before is None or after is None or (before.recipe, before.metrics) == (after.recipe, after.metrics)
    return "" if same else f"the settings of {new} have changed"


def _settings_of(plan: ScalingPlan) -> dict[str, object]:
    """Names and values as in a manifest."""
    limits = {yaml_name(field): getattr(plan.limits, field.name) for field in msgspec.structs.fields(ScalingLimits)}
    durations = {yaml_name(field) for field in msgspec.structs.fields(ScalingLimits) if field.name.endswith("_s")}
    return {
        name: duration_text(value)
        if name in durations and value is not None
        else f"{value:.15g}"
        if isinstance(value, float)
        else value
        for name, value in {**limits, "costPerReplicaHour": plan.cost_per_replica_hour}.items()
    }


def _of_gateway(before: GatewaySpec, after: GatewaySpec) -> Iterator[Change]:
    old, new = _settings(before), _settings(after)
    for name in old:
        if old[name] != new[name]:
            change = "changed" if name in SECRET else _arrow(old[name], new[name])
            late = "; takes effect after a restart" if name in AFTER_A_RESTART else ""
            yield Change("gateway", f"gateway.{name}", change + late)


def _settings(spec: GatewaySpec) -> dict[str, Any]:
    """By their names in YAML; those of subsections with a dot."""
    settings = msgspec.to_builtins(spec)
    for part in ("limits", "upstream"):
        settings |= {f"{part}.{name}": value for name, value in settings.pop(part).items()}
    return dict(settings)


def _arrow(before: object, after: object) -> str:
    return f"{_shown(before)} -> {_shown(after)}"


def _shown(value: object) -> str:
    if value is None or value in ((), []):
        return "none"
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode().strip('"')


class ManifestText(msgspec.Struct, frozen=True):
    """A document as it was written. Its paths are relative to its folder."""

    text: str
    folder: str
    file: str = ""
    """Its name in error messages."""


NOTHING = ManifestText("kind: Pointsman\n", "/", "an empty manifest")
"""In force where only applications were ever deployed."""


class Deployed(msgspec.Struct, frozen=True):
    """An application in force."""

    document: ManifestText
    plan: ApplicationPlan

    def is_same(self, before: "Deployed | None", stored: ManifestText) -> bool:
        """Whether it equals the version in force, as text or as what the text builds."""
        if (self.document.text, self.document.folder) == (stored.text, stored.folder):
            return True
        return before is not None and (before.plan.text, before.plan.folder) == (self.plan.text, self.plan.folder)


class Revision(msgspec.Struct, frozen=True):
    manifest: ManifestText | None = None
    """None: none was ever applied."""
    base: PointsmanPlan = PointsmanPlan()
    """What the manifest builds."""
    deployed: Mapping[str, Deployed] = {}
    """Applications beside the manifest, by name."""
    broken: Mapping[str, str] = {}
    """Stored applications that no longer load, and why."""

    def changed(self, document: ManifestText, plan: PointsmanPlan) -> "tuple[Revision, list[str]]":
        """With another manifest, or with an application beside it; and the deployments that the document names."""
        named = [one.name for one in plan.deployments]
        if plan.application_alone:
            return self.with_application(document, plan.applications[0]), named
        return msgspec.structs.replace(self, manifest=document, base=plan), named

    def with_application(self, document: ManifestText, plan: ApplicationPlan) -> "Revision":
        """With this application in place of any other of its name."""
        deployed = {**self.deployed, plan.name: Deployed(document, plan)}
        return msgspec.structs.replace(self, deployed=deployed, broken=_without(self.broken, plan.name))

    def without_application(self, name: str) -> "Revision":
        """Without an application that was deployed. Raises if there is none."""
        if name not in self.broken:
            self.find(name)
        return msgspec.structs.replace(self, deployed=_without(self.deployed, name), broken=_without(self.broken, name))

    def find(self, name: str) -> Deployed:
        """A deployed application. Raises if there is none, or if it belongs to the manifest."""
        if name in self.deployed:
            return self.deployed[name]
        own = [one.name for one in self.base.applications]
        if name in own:
            raise PointsmanError(_belongs_to(self.manifest, name))
        raise UnknownName("application", name, [*own, *self.deployed])

    def plan(self) -> PointsmanPlan:
        """Everything in one plan. Raises `ConfigError` where names clash or models are missing."""
        whole = self.base.with_applications(one.plan for one in self.deployed.values())
        own = {one.name for one in self.base.applications}
        problems = [_belongs_to(self.manifest, name) for name in self.deployed if name in own]
        names = [plan.name for plan in whole.deployments]
        twice = sorted({name for name in names if names.count(name) > 1}) if not problems else ()
        problems += [
            f'two deployments are called "{name}": one of the manifest, one of an application' for name in twice
        ]
        for name, one in self.deployed.items():
            problems += [f'application "{name}", {why}' for why in missing_models(one.plan.graph, self.base.models())]
        if problems:
            raise ConfigError(problems)
        return whole


def load_document(document: ManifestText, *, was_in_force: bool = False) -> PointsmanPlan:
    """What a document builds. Raises `ConfigError`."""
    return load_manifest(document.text, document.folder, document.file, was_in_force=was_in_force)


def load_revision(
    manifest: ManifestText | None, applications: Mapping[str, ManifestText], *, was_in_force: bool = False
) -> Revision:
    """Build stored documents again. Raises `ConfigError` if the manifest does not load; an application that does not
    is listed as broken. `was_in_force`: the manifest is not new."""
    revision = Revision(
        manifest, PointsmanPlan() if manifest is None else load_document(manifest, was_in_force=was_in_force)
    )
    broken = {}
    for name, document in applications.items():
        try:
            plan = load_application(document.text, document.folder, document.file, was_in_force=True)
            more = revision.with_application(document, plan)
            more.plan()
        except ConfigError as error:
            broken[name] = f'application "{name}" is not in force, because it no longer loads: {error}'
        else:
            revision = more
    return msgspec.structs.replace(revision, broken=broken)


def first_revision(
    stored: ManifestText | None, applications: Mapping[str, ManifestText], given: ManifestText | None
) -> Revision | None:
    """What a plane starts with: what is stored, with the document that it was given. None: there is neither."""
    if given is None:
        return None if stored is None else load_revision(stored, applications, was_in_force=True)
    plan = load_document(given)
    if not plan.application_alone:
        return load_revision(given, applications)
    [application] = plan.applications
    others = {name: document for name, document in applications.items() if name != application.name}
    return load_revision(NOTHING, others).with_application(given, application)


def _without(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {known: entry for known, entry in entries.items() if known != name}


def _belongs_to(manifest: ManifestText | None, application: str) -> str:
    where = manifest.file if manifest is not None and manifest.file else "that is in force"
    return f'application "{application}" is part of the manifest {where}; change it there, and apply the manifest'


class EndpointsFile(msgspec.Struct):
    """A file that lists endpoints, and what it listed when it was last readable."""

    path: Path
    seen: tuple[int, int, int] | None = None
    """(inode, time of change, size) when it was last read; None if it was missing."""
    endpoints: tuple[DesiredEndpoint, ...] = ()
    problem: str = ""

    def read(self, plan: DeploymentPlan) -> bool:
        """Read it if it has changed. Whether it lists other endpoints now."""
        try:
            stat = self.path.stat()
        except OSError as error:
            gone = f"{self.path}: {error.strerror}"
            self.problem = f"{gone}; the endpoints that it last listed are kept" if self.endpoints else gone
            self.seen = None
            return False
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if seen == self.seen:
            return False
        self.seen, self.problem = seen, ""
        before = self.endpoints
        try:
            self.endpoints = load_endpoints(self.path, [endpoint.name for endpoint in plan.desired.endpoints])
        except ConfigError as error:
            self.problem = f"{error}; the endpoints that it last listed are kept"
        return self.endpoints != before


class EndpointsFiles:
    def __init__(self) -> None:
        self._files: dict[str, EndpointsFile] = {}
        """By deployment."""
        self._plan = PointsmanPlan()

    def configure(self, plan: PointsmanPlan) -> None:
        """Take over another plan, and read its files."""
        self._plan = plan
        before, self._files = self._files, {}
        for one in plan.deployments:
            if one.endpoints_file is not None:
                known = before.get(one.name)
                kept = known.endpoints if known is not None and known.path == one.endpoints_file else ()
                self._files[one.name] = EndpointsFile(one.endpoints_file, endpoints=kept)
        self.look()

    def look(self) -> bool:
        """Read files that have changed. Whether other endpoints are listed now."""
        changed = [self._files[plan.name].read(plan) for plan in self._plan.deployments if plan.name in self._files]
        return any(changed)

    def desired(self) -> Desired:
        """What the plan wants, with the endpoints of the files."""
        wanted = {}
        for name, deployment in self._plan.desired().deployments.items():
            more = self._files[name].endpoints if name in self._files else ()
            wanted[name] = msgspec.structs.replace(deployment, endpoints=(*deployment.endpoints, *more))
        return Desired(wanted)

    def problems(self) -> list[str]:
        """Which files cannot be read, and why."""
        return [file.problem for file in self._files.values() if file.problem]

    def copy(self) -> "EndpointsFiles":
        """A copy to try another plan on."""
        twin = EndpointsFiles()
        twin._files = {name: msgspec.structs.replace(one) for name, one in self._files.items()}
        return twin

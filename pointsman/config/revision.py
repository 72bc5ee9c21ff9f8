"""The documents in force: one manifest, separately deployed applications, and the endpoint files that these name.

A revision never changes: each operation returns a new revision, which is checked as a whole before it takes effect.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from pointsman.config import load_application, load_manifest
from pointsman.config.application import missing_models
from pointsman.config.code import loaded_from
from pointsman.config.deployments import load_endpoints
from pointsman.config.plan import ApplicationPlan, DeploymentPlan, PointsmanPlan
from pointsman.control.desired import Desired, DesiredEndpoint
from pointsman.errors import ConfigError, PointsmanError, UnknownName, why_unusable
from pointsman.pipeline.sources import Sources
from pointsman.reasons import Reason


class ManifestText(msgspec.Struct, frozen=True):
    """A document as it was written. Paths in the text are relative to `folder`."""

    text: str
    folder: str
    file: str = ""
    """The name of the document in error messages."""
    code: str = ""
    """The version of the user's code when the document took effect; empty if the document names no user code."""


NOTHING = ManifestText("kind: Pointsman\n", "/", "an empty manifest")
"""The manifest in force if applications were deployed but no manifest was ever applied."""


class Deployed(msgspec.Struct, frozen=True):
    """An application in force."""

    document: ManifestText
    plan: ApplicationPlan

    def is_same(self, before: "Deployed | None", stored: ManifestText) -> bool:
        """Whether this application equals the version in force, either as text or as the plan that the text builds."""
        if self.document.code != stored.code:
            return False
        if (self.document.text, self.document.folder) == (stored.text, stored.folder):
            return True
        return before is not None and (before.plan.text, before.plan.folder) == (self.plan.text, self.plan.folder)


class Revision(msgspec.Struct, frozen=True):
    manifest: ManifestText | None = None
    """None if no manifest was ever applied."""
    base: PointsmanPlan = PointsmanPlan()
    """The plan that the manifest builds."""
    deployed: Mapping[str, Deployed] = {}
    """Applications that were deployed beside the manifest, by name."""
    broken: Mapping[str, Reason] = {}
    """Stored applications that no longer load, each with the reason."""

    @property
    def fingerprint(self) -> list[Any]:
        """Plain data that is equal if, and only if, the revisions are equal."""
        own = [[one.name, one.text, one.folder, one.code] for one in self.base.applications]
        documents = [self.manifest, *(one.document for one in self.deployed.values())]
        return [own, *([one.text, one.folder, one.code] for one in documents if one is not None)]

    def changed(self, document: ManifestText, plan: PointsmanPlan) -> "tuple[Revision, list[str]]":
        """A revision with a new manifest or a new application, and the names of the deployments of that document."""
        named = [one.name for one in plan.deployments]
        if plan.application_alone:
            return self.with_application(document, plan.applications[0]), named
        return msgspec.structs.replace(
            self, manifest=msgspec.structs.replace(document, code=plan.code), base=plan
        ), named

    def with_application(self, document: ManifestText, plan: ApplicationPlan) -> "Revision":
        """A revision with this application, which replaces an application of the same name."""
        versioned = msgspec.structs.replace(document, code=plan.code)
        deployed = {**self.deployed, plan.name: Deployed(versioned, plan)}
        return msgspec.structs.replace(self, deployed=deployed, broken=_without(self.broken, plan.name))

    def without_application(self, name: str) -> "Revision":
        """A revision without a deployed application. Raises if no application has this name."""
        if name not in self.broken:
            self.find(name)
        return msgspec.structs.replace(self, deployed=_without(self.deployed, name), broken=_without(self.broken, name))

    def find(self, name: str) -> Deployed:
        """The deployed application with this name. Raises if there is none, or if it belongs to the manifest."""
        if name in self.deployed:
            return self.deployed[name]
        own = [one.name for one in self.base.applications]
        if name in own:
            raise PointsmanError(_belongs_to(self.manifest, name))
        raise UnknownName("application", name, [*own, *self.deployed])

    def sources(self) -> tuple[ManifestText | None, dict[str, ManifestText]]:
        """The manifest, and the applications deployed beside it."""
        return self.manifest, {name: one.document for name, one in self.deployed.items()}

    def plan(self) -> PointsmanPlan:
        """Everything in one plan. Raises `ConfigError` if names clash or models are missing."""
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


SourcesOf: TypeAlias = Callable[[ManifestText], Sources | None]
"""Returns the code of a stored document when it took effect; None if the code was not kept."""


def not_kept(_: ManifestText) -> None:
    """A `SourcesOf` for cases that need no stored sources: code is loaded from its present files."""


def load_document(
    document: ManifestText, *, was_in_force: bool = False, sources: Sources | None = None
) -> PointsmanPlan:
    """What a document builds. Raises `ConfigError`. `sources` is its stored code; if None, present files are loaded."""
    with loaded_from(sources):
        return load_manifest(document.text, document.folder, document.file, was_in_force=was_in_force)


def load_revision(
    manifest: ManifestText | None,
    applications: Mapping[str, ManifestText],
    *,
    was_in_force: bool = False,
    sources_of: SourcesOf = not_kept,
) -> Revision:
    """Build stored documents again. Raises `ConfigError` if the manifest does not load. An application that does not
    load is listed as broken. `was_in_force` says that the manifest is not new."""
    revision = Revision()
    if manifest is not None:
        sources = sources_of(manifest) if was_in_force else None
        base = load_document(manifest, was_in_force=was_in_force, sources=sources)
        revision = Revision(msgspec.structs.replace(manifest, code=base.code), base)
    broken = {}
    for name, document in applications.items():
        try:
            with loaded_from(sources_of(document)):
                plan = load_application(document.text, document.folder, document.file, was_in_force=True)
            more = revision.with_application(document, plan)
            more.plan()
        except ConfigError as error:
            broken[name] = Reason("application-broken", {"application": name, "error": str(error)})
        else:
            revision = more
    return msgspec.structs.replace(revision, broken=broken)


def first_revision(
    stored: ManifestText | None,
    applications: Mapping[str, ManifestText],
    given: ManifestText | None,
    sources_of: SourcesOf = not_kept,
) -> Revision | None:
    """The revision that a plane starts with, from stored documents and that of `up`; None if both are missing."""
    if given is None:
        if stored is None:
            return None
        return load_revision(stored, applications, was_in_force=True, sources_of=sources_of)
    plan = load_document(given)
    if not plan.application_alone:
        return load_revision(given, applications, sources_of=sources_of)
    [application] = plan.applications
    others = {name: document for name, document in applications.items() if name != application.name}
    return load_revision(NOTHING, others, sources_of=sources_of).with_application(given, application)


def _without(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {known: entry for known, entry in entries.items() if known != name}


def _belongs_to(manifest: ManifestText | None, application: str) -> str:
    where = manifest.file if manifest is not None and manifest.file else "that is in force"
    return f'application "{application}" is part of the manifest {where}; change it there, and apply the manifest'


class EndpointsFile(msgspec.Struct):
    """A file that lists endpoints, and what it listed when it was last readable."""

    path: Path
    seen: tuple[int, int, int] | None = None
    """(inode, time of change, size) of the file when it was last read; None if the file was missing."""
    endpoints: tuple[DesiredEndpoint, ...] = ()
    problem: Reason | None = None

    def read(self, plan: DeploymentPlan) -> bool:
        """Read the file if it has changed. Returns whether it now lists other endpoints."""
        try:
            stat = self.path.stat()
        except OSError as error:
            facts = {"file": str(self.path), "error": why_unusable(self.path, error), "kept": len(self.endpoints)}
            self.problem = Reason("endpoints-file-unreadable", facts)
            self.seen = None
            return False
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if seen == self.seen:
            return False
        self.seen, self.problem = seen, None
        before = self.endpoints
        try:
            self.endpoints = load_endpoints(self.path, [endpoint.name for endpoint in plan.desired.endpoints])
        except ConfigError as error:
            self.problem = Reason("endpoints-file-invalid", {"file": str(self.path), "error": str(error)})
        return self.endpoints != before


class EndpointsFiles:
    def __init__(self) -> None:
        self._files: dict[str, EndpointsFile] = {}
        """Endpoint files by deployment."""
        self._plan = PointsmanPlan()

    def configure(self, plan: PointsmanPlan) -> None:
        """Apply a plan, and read the endpoint files that it names."""
        self._plan = plan
        before, self._files = self._files, {}
        for one in plan.deployments:
            if one.endpoints_file is not None:
                known = before.get(one.name)
                kept = known.endpoints if known is not None and known.path == one.endpoints_file else ()
                self._files[one.name] = EndpointsFile(one.endpoints_file, endpoints=kept)
        self.look()

    def look(self) -> bool:
        """Read the files that have changed. Returns whether any of them now lists other endpoints."""
        changed = [self._files[plan.name].read(plan) for plan in self._plan.deployments if plan.name in self._files]
        return any(changed)

    def desired(self) -> Desired:
        """The desired state according to the plan, with the endpoints that the files list."""
        wanted = {}
        for name, deployment in self._plan.desired().deployments.items():
            more = self._files[name].endpoints if name in self._files else ()
            wanted[name] = msgspec.structs.replace(deployment, endpoints=(*deployment.endpoints, *more))
        return Desired(wanted)

    def problems(self) -> list[Reason]:
        """A reason for each file that cannot be read."""
        return [file.problem for file in self._files.values() if file.problem]

    def copy(self) -> "EndpointsFiles":
        """A copy, for trying another plan."""
        twin = EndpointsFiles()
        twin._files = {name: msgspec.structs.replace(one) for name, one in self._files.items()}
        return twin

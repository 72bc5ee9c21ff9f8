"""What is wanted in all: the manifest, and applications that were deployed beside it. A change makes another one."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.config import ApplicationPlan, PointsmanPlan, load_application, load_manifest
from pointsman.config.application import missing_models
from pointsman.errors import ConfigError, PointsmanError, UnknownName
from pointsman.runtimes.local.changes import Changes, ManifestText
from pointsman.runtimes.local.store import Store

NOTHING = ManifestText("kind: Pointsman\n", "/", "an empty manifest")
"""In force where only applications were ever wanted."""


class Deployed(msgspec.Struct, frozen=True):
    """An application in force."""

    document: ManifestText
    plan: ApplicationPlan

    @property
    def identity(self) -> tuple[str, str]:
        """Where it is equal, nothing changes."""
        return self.plan.text, self.plan.folder


class Wanted(msgspec.Struct, frozen=True):
    """A manifest and applications."""

    manifest: ManifestText | None = None
    """None: none was ever applied."""
    base: PointsmanPlan = PointsmanPlan()
    """What the manifest builds."""
    deployed: Mapping[str, Deployed] = {}
    """Applications beside the manifest, by name."""
    broken: Mapping[str, str] = {}
    """Applications that were in force once and cannot be loaded any more, and why."""

    def applied(self, manifest: ManifestText, base: PointsmanPlan) -> "Wanted":
        """With another manifest."""
        return msgspec.structs.replace(self, manifest=manifest, base=base)

    def with_application(self, document: ManifestText, plan: ApplicationPlan) -> "Wanted":
        """With this application, instead of the one that has had its name."""
        return msgspec.structs.replace(
            self,
            deployed={**self.deployed, plan.name: Deployed(document, plan)},
            broken=_without(self.broken, plan.name),
        )

    def without_application(self, name: str) -> "Wanted":
        """Without one that was deployed."""
        if name not in self.broken:
            self.find(name)
        return msgspec.structs.replace(self, deployed=_without(self.deployed, name), broken=_without(self.broken, name))

    def changed(self, document: ManifestText, plan: PointsmanPlan) -> "tuple[Wanted, list[str]]":
        """With another manifest, or with an application beside it; and the deployments that it speaks of."""
        named = [one.name for one in plan.deployments]
        if plan.application_alone:
            return self.with_application(document, plan.applications[0]), named
        return self.applied(document, plan), named

    def find(self, name: str) -> Deployed:
        """One that was deployed. Raises if there is none, or if it is of the manifest."""
        if name in self.deployed:
            return self.deployed[name]
        own = [one.name for one in self.base.applications]
        if name in own:
            raise PointsmanError(_of_manifest(name, self.manifest))
        raise UnknownName("application", name, [*own, *self.deployed])

    def plan(self) -> PointsmanPlan:
        """Everything in one. Raises `ConfigError` where names clash or models are missing."""
        whole = self.base.with_applications(one.plan for one in self.deployed.values())
        own = {one.name for one in self.base.applications}
        problems = [_of_manifest(name, self.manifest) for name in self.deployed if name in own]
        names = [plan.name for plan in whole.deployments]
        twice = sorted({name for name in names if names.count(name) > 1}) if not problems else ()
        problems += [
            f'two deployments are called "{name}": one of the manifest, one of an application' for name in twice
        ]
        for name, one in self.deployed.items():
            missing = missing_models(one.plan.graph, self.base.models())
            problems += [f'application "{name}", {words}' for words in missing]
        if problems:
            raise ConfigError(problems)
        return whole


def _without(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {known: entry for known, entry in entries.items() if known != name}


def _of_manifest(name: str, manifest: ManifestText | None) -> str:
    where = manifest.file if manifest is not None and manifest.file else "that is in force"
    return f'application "{name}" is part of the manifest {where}; change it there, and apply that'


def load(document: ManifestText, *, was_in_force: bool = False) -> PointsmanPlan:
    """What a document builds. Raises `ConfigError`."""
    return load_manifest(document.text, document.folder, document.file, was_in_force=was_in_force)


def load_wanted(
    manifest: ManifestText | None, applications: Mapping[str, ManifestText], *, was_in_force: bool = False
) -> Wanted:
    """Of documents that are in force. An application that cannot be loaded any more is none; the manifest must be, and
    `was_in_force` if it is not new."""
    wanted = Wanted(manifest, PointsmanPlan() if manifest is None else load(manifest, was_in_force=was_in_force))
    broken = {}
    for name, document in applications.items():
        try:
            plan = load_application(document.text, document.folder, document.file, was_in_force=True)
            more = wanted.with_application(document, plan)
            more.plan()
        except ConfigError as error:
            broken[name] = f'application "{name}" is not in force, as it cannot be loaded any more: {error}'
        else:
            wanted = more
    return msgspec.structs.replace(wanted, broken=broken)


def wanted_at_start(store: Store, manifest: ManifestText | None) -> Wanted | None:
    """What is to run: what was in force, with this manifest or application, if there is one; None: nothing was."""
    stored, applications = store.manifest(), store.applications()
    if manifest is None:
        return None if stored is None else load_wanted(stored[1], applications, was_in_force=True)
    plan = load(manifest)
    if not plan.application_alone:
        return load_wanted(manifest, applications)
    [application] = plan.applications
    others = {name: document for name, document in applications.items() if name != application.name}
    return load_wanted(NOTHING, others).with_application(manifest, application)


def save(store: Store, before: Wanted, after: Wanted, changes: Changes, rolled_back: str = "") -> int | None:
    """Remember what is wanted now. The generation of the manifest, if it is another."""
    now, generation = time.time(), None
    known, manifest = before.manifest, after.manifest
    if manifest is not None and (known is None or (manifest.text, manifest.folder) != (known.text, known.folder)):
        generation = store.save_manifest(manifest, changes, now)
        changes = Changes()  # they are noted once
    stored = store.applications()
    for name, one in after.deployed.items():
        if name == rolled_back:
            store.roll_back_application(name, changes, now)
        elif name not in stored or not _is_same(one, before.deployed.get(name), stored[name]):
            store.save_application(name, one.document, changes, now)
    for name in stored:
        if name not in after.deployed and name not in after.broken:
            store.delete_application(name, changes, now)
    return generation


def _is_same(one: Deployed, before: Deployed | None, stored: ManifestText) -> bool:
    written = (one.document.text, one.document.folder) == (stored.text, stored.folder)
    return written or (before is not None and before.identity == one.identity)

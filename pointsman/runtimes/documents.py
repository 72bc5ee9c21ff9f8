"""Documents that come into force on a plane, one after the other: applied, deployed, rolled back, deleted."""

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import (
    Changes,
    EndpointsFiles,
    ManifestText,
    Revision,
    changes_between,
    first_revision,
    load_document,
    load_revision,
)
from pointsman.control import Desired, ReconcileStep
from pointsman.errors import ConfigError, PointsmanError, UnknownName
from pointsman.runtimes.interface import DocumentStore


class Documents:
    """The revision in force, and its changes. Each is stored before it takes effect."""

    def __init__(
        self,
        store: Callable[[], DocumentStore],
        preview: Callable[[PointsmanPlan, Desired, Collection[str]], list[ReconcileStep]],
        enforce: Callable[[PointsmanPlan, str, Collection[str]], None],
    ) -> None:
        """`store` raises if the plane does not run. `preview`: what follows for instances if a plan comes into force,
        with what it wants and the deployments whose rollout is tried again. `enforce`: put it in force, with the
        folder of its manifest."""
        self.revision = Revision()
        self.plan_in_force = PointsmanPlan()
        self.generation = 0
        """Of the manifest in force; grows with each that is applied."""
        self.files = EndpointsFiles()
        self._store = store
        self._preview = preview
        self._enforce = enforce
        self._changing = asyncio.Lock()

    def open(self, store: DocumentStore, document: ManifestText | None) -> Revision | None:
        """Read what was in force. What a plane starts with, which is not in force yet; None if there is nothing."""
        stored, applications = store.manifest(), store.applications()
        if stored is not None:
            self.generation, manifest = stored
            self.revision = Revision(manifest)
            with suppress(ConfigError):  # it may name what no longer exists; it only says what differs
                self.revision = load_revision(manifest, applications, was_in_force=True)
                self.plan_in_force = self.revision.plan()
        return first_revision(None if stored is None else stored[1], applications, document)

    def plan(self, document: ManifestText) -> Changes:
        """What applying a manifest, or deploying an application, would change."""
        return self._changes(*self.revision.changed(document, load_document(document)))

    async def apply(self, document: ManifestText) -> Changes:
        """Put a manifest in force, or an application beside it."""
        async with self._changing:
            plan = await _loaded(document)
            return self.put_in_force(*self.revision.changed(document, plan))

    async def deploy(self, document: ManifestText) -> Changes:
        """Put an application in force beside the manifest, in place of the version before."""
        async with self._changing:
            plan = await _loaded(document)
            if not plan.application_alone:
                raise PointsmanError(f"{document.file or 'this'} is a manifest; pointsman apply puts it in force")
            return self.put_in_force(*self.revision.changed(document, plan))

    async def rollback(self, name: str) -> Changes:
        """Put the previous version of an application in force; again: the one before that."""
        async with self._changing:
            self.revision.find(name)
            before = self._store().application_before(name)
            if before is None:
                raise PointsmanError(f'there is no version of "{name}" before the one in force')
            plan = await _loaded(before)
            return self.put_in_force(*self.revision.changed(before, plan), rolled_back=name)

    async def delete(self, name: str) -> Changes:
        """Take an application out of force, with all its versions."""
        async with self._changing:
            return self.put_in_force(self.revision.without_application(name))

    def application(self, name: str) -> str:
        """The document of an application in force, in canonical form."""
        found = {one.name: one.text for one in self.plan_in_force.applications}
        if name not in found:
            raise UnknownName("application", name, found)
        return found[name]

    def put_in_force(self, revision: Revision, retry: Collection[str] = (), rolled_back: str = "") -> Changes:
        """Store a revision and enforce it. What has changed."""
        store = self._store()
        plan, changes = revision.plan(), self._changes(revision, retry)
        self.generation = _save(store, self.revision, revision, rolled_back) or self.generation
        self.revision, self.plan_in_force = revision, plan
        self.files.configure(plan)
        self._enforce(plan, "" if revision.manifest is None else revision.manifest.folder, retry)
        return changes

    def _changes(self, revision: Revision, retry: Collection[str] = ()) -> Changes:
        plan, files = revision.plan(), self.files.copy()
        files.configure(plan)
        before = None if self.revision.manifest is None else self.plan_in_force
        return changes_between(before, plan, self._preview(plan, files.desired(), retry))


async def _loaded(document: ManifestText) -> PointsmanPlan:
    # On a thread: it may import modules of the user, and requests go on meanwhile.
    return await asyncio.to_thread(load_document, document)


def _save(store: DocumentStore, before: Revision, after: Revision, rolled_back: str) -> int | None:
    """Store a revision. The generation of its manifest; None if that has not changed."""
    now, generation = time.time(), None
    known, manifest = before.manifest, after.manifest
    if manifest is not None and (known is None or (manifest.text, manifest.folder) != (known.text, known.folder)):
        generation = store.save_manifest(manifest, now)
    stored = store.applications()
    for name, one in after.deployed.items():
        if name == rolled_back:
            store.roll_back_application(name)
        elif name not in stored or not one.is_same(before.deployed.get(name), stored[name]):
            store.save_application(name, one.document, now)
    for name in stored:
        if name not in after.deployed and name not in after.broken:
            store.delete_application(name)
    return generation

"""Documents that are applied, deployed, rolled back or deleted on a plane, one after the other.

Enters: documents of operators. Leaves: the revision in force, and what has changed. The one rule: a revision is stored
before it takes effect, and a destructive revision takes effect only as it was confirmed.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from hashlib import sha256

import msgspec

from pointsman.config.changes import Changes, NotConfirmed, Outlook, changes_between
from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import (
    EndpointsFiles,
    ManifestText,
    Revision,
    first_revision,
    load_document,
    load_revision,
)
from pointsman.control import Desired
from pointsman.errors import ConfigError, PointsmanError, UnknownName, command
from pointsman.pipeline.sources import Sources, pack_sources, unpack_sources
from pointsman.runtimes.event_log import THE_PLANE, Asker
from pointsman.runtimes.stores import DocumentStore, StoredManifest


class Documents:
    """The revision in force, and its changes. Each change is stored before it takes effect."""

    def __init__(
        self,
        store: Callable[[], DocumentStore],
        preview: Callable[[PointsmanPlan, Desired, Collection[str]], Outlook],
        enforce: Callable[[PointsmanPlan, str, Collection[str]], None],
    ) -> None:
        """`store` raises if the plane does not run. `preview` returns what a plan means for instances, given the
        desired state and the deployments whose rollout is tried again. `enforce` puts a plan in force, with the folder
        of its manifest."""
        self.revision = Revision()
        self.plan_in_force = PointsmanPlan()
        self.generation = 0
        """Generation of the manifest in force; it grows with each manifest that is applied."""
        self.files = EndpointsFiles()
        self.noted: Callable[[Changes, str, Asker], None] = lambda *_: None
        """Called with what has changed, how the history describes it, and who requested it."""
        self._store = store
        self._preview = preview
        self._enforce = enforce
        self._changing = asyncio.Lock()

    def open(self, store: DocumentStore, document: ManifestText | None) -> Revision | None:
        """Load the stored revision. Returns the revision to start with, which is not in force yet, or None if there is
        no revision."""
        stored, applications = store.manifest(), store.applications()
        if stored is not None:
            self.generation, manifest = stored
            self.revision = Revision(manifest)
            with suppress(ConfigError):  # a document may name things that are gone; it is only compared
                self.revision = load_revision(
                    manifest, applications, was_in_force=True, sources_of=lambda one: _sources(store, one)
                )
                self.plan_in_force = self.revision.plan()
        before = None if stored is None else stored[1]
        return first_revision(before, applications, document, lambda one: _sources(store, one))

    def plan(self, document: ManifestText) -> Changes:
        return self._changes(*self.revision.changed(document, load_document(document)))

    async def apply(
        self,
        document: ManifestText,
        confirmation: str | None = None,
        asker: Asker = THE_PLANE,
        note: str = "",
    ) -> Changes:
        async with self._changing:
            plan = await _loaded(document)
            changed = self.revision.changed(document, plan)
            return self.put_in_force(*changed, confirmation=confirmation, note=note, asker=asker)

    async def deploy(
        self, document: ManifestText, confirmation: str | None = None, asker: Asker = THE_PLANE
    ) -> Changes:
        async with self._changing:
            plan = await _loaded(document)
            if not plan.application_alone:
                use = command("apply", document.file or "FILE")
                raise PointsmanError(f"{document.file or 'this'} is a manifest, not an application; use: {use}")
            return self.put_in_force(*self.revision.changed(document, plan), confirmation=confirmation, asker=asker)

    async def rollback(self, name: str, confirmation: str | None = None, asker: Asker = THE_PLANE) -> Changes:
        """Put the previous version of an application in force; a second call returns to the version before that."""
        async with self._changing:
            self.revision.find(name)
            before = self._store().application_before(name)
            if before is None:
                raise PointsmanError(f'there is no version of "{name}" before the one in force')
            plan = await _loaded(before, _sources(self._store(), before))
            _check_code(before, plan, command("rollback", name))
            changed = self.revision.changed(before, plan)
            return self.put_in_force(*changed, rolled_back=name, confirmation=confirmation, asker=asker)

    def history(self) -> list[StoredManifest]:
        """The stored manifests, newest first."""
        return self._store().manifests()

    async def restore(
        self, generation: int | None, confirmation: str | None = None, asker: Asker = THE_PLANE
    ) -> Changes:
        """Put an earlier manifest in force (default: the previous one; a second call returns to the one before it)."""
        async with self._changing:
            found = _earlier(self.history(), generation)
            plan = await _loaded(found.document, _sources(self._store(), found.document))
            _check_code(found.document, plan, command("rollback", "--to", str(found.generation)))
            changed = self.revision.changed(found.document, plan)
            return self.put_in_force(*changed, confirmation=confirmation, restores=found.content, asker=asker)

    async def delete(self, name: str, asker: Asker = THE_PLANE) -> Changes:
        async with self._changing:
            return self.put_in_force(self.revision.without_application(name), asker=asker)

    def application(self, name: str) -> str:
        """The document of an application in force, in canonical form."""
        found = {one.name: one.text for one in self.plan_in_force.applications}
        if name not in found:
            raise UnknownName("application", name, found)
        return found[name]

    def put_in_force(
        self,
        revision: Revision,
        retry: Collection[str] = (),
        rolled_back: str = "",
        confirmation: str | None = None,
        restores: int | None = None,
        note: str = "",
        asker: Asker = THE_PLANE,
    ) -> Changes:
        """Store a revision and enforce it. Returns what has changed. `confirmation` confirms these changes if they are
        destructive; with None, they need no confirmation. `restores` is the generation of the manifest that comes
        back. `note` replaces the summary in the history."""
        store = self._store()
        plan, changes = revision.plan(), self._changes(revision, retry)
        if changes.dangers and confirmation not in (None, changes.confirmation):
            raise NotConfirmed(changes)
        summary = note or changes.summary()
        self.generation = _save(store, self.revision, revision, rolled_back, summary, restores) or self.generation
        self.revision, self.plan_in_force = revision, plan
        self.files.configure(plan)
        self._enforce(plan, "" if revision.manifest is None else revision.manifest.folder, retry)
        self.noted(changes, summary, asker)
        return changes

    def _changes(self, revision: Revision, retry: Collection[str] = ()) -> Changes:
        plan, files = revision.plan(), self.files.copy()
        files.configure(plan)
        before = None if self.revision.manifest is None else self.plan_in_force
        changes = changes_between(before, plan, self._preview(plan, files.desired(), retry))
        if not changes.dangers:
            return changes
        marked = [(step.what, step.subject) for step in changes.steps if step.destructive]
        # The confirmation covers these values, so a new confirmation is needed if one of them has changed in the
        # meantime.
        told = msgspec.json.encode([self.revision.fingerprint, revision.fingerprint, changes.dangers, marked])
        return msgspec.structs.replace(changes, confirmation=sha256(told).hexdigest()[:16])


async def _loaded(document: ManifestText, sources: Sources | None = None) -> PointsmanPlan:
    # On a thread: loading may import modules of the user, and requests must be served in the meantime.
    return await asyncio.to_thread(load_document, document, sources=sources)


def _sources(store: DocumentStore, document: ManifestText) -> Sources | None:
    """The code that a stored document had when it took effect; None if that code was not kept."""
    packed = store.kept.of(document)
    return None if packed is None else unpack_sources(packed)


def _earlier(kept: Sequence[StoredManifest], generation: int | None) -> StoredManifest:
    """The stored manifest of a generation. If `generation` is None, the manifest before the one in force."""
    there = [
        one for one in kept if one.generation == generation or (generation is None and one.generation < kept[0].content)
    ]
    if there:
        return there[0]
    if generation is None or not kept:
        raise PointsmanError(f"there is no manifest before the one in force; see: {command('history')}")
    first, last = kept[-1].generation, kept[0].generation
    numbers = f"{first} to {last} are kept" if first < last else f"only {last} is kept"
    raise PointsmanError(f"there is no manifest of generation {generation}; {numbers}; see: {command('history')}")


def _check_code(document: ManifestText, plan: PointsmanPlan, again: str) -> None:
    """Raise if the code that an earlier version ran is no longer available. Code of policies is not kept, nor is code
    of nodes that have too much of it. `again` is the command to repeat in that case."""
    if document.code != plan.code:
        raise PointsmanError(
            f"nothing was changed, because the code of that version is no longer available: files in {document.folder} "
            f"have changed since. Restore them, and use: {again}"
        )


def _save(
    store: DocumentStore, before: Revision, after: Revision, rolled_back: str, summary: str, restores: int | None
) -> int | None:
    """Store a revision, or raise. Returns the generation of its manifest, or None if the manifest has not changed."""
    now, generation = time.time(), None
    known, manifest = before.manifest, after.manifest
    stored = store.applications()
    changed = [
        (name, one.document)
        for name, one in after.deployed.items()
        if name != rolled_back and (name not in stored or not one.is_same(before.deployed.get(name), stored[name]))
    ]
    gone = [name for name in stored if name not in after.deployed and name not in after.broken]
    is_new = manifest is not None and (known is None or _content(manifest) != _content(known))
    if not (is_new or changed or gone or rolled_back):
        return None  # a plane starts with its stored documents, even if nothing can be written
    with store.together():
        if is_new and manifest is not None:
            generation = store.save_manifest(manifest, now, summary, restores)
            _keep_sources(store, manifest, after.base)
        for name, document in changed:
            store.save_application(name, document, now)
            _keep_sources(store, document, PointsmanPlan(applications=(after.deployed[name].plan,)))
        if rolled_back:
            store.roll_back_application(rolled_back)
        for name in gone:
            store.delete_application(name)
    return generation


def _keep_sources(store: DocumentStore, document: ManifestText, plan: PointsmanPlan) -> None:
    packed = pack_sources(plan.sources())
    if packed:
        store.kept.save(document, packed)


def _content(document: ManifestText) -> tuple[str, str, str]:
    return document.text, document.folder, document.code

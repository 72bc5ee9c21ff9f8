"""What a plane stores for a later one: documents, replica targets, and the usage of tenants."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from pointsman.config.revision import ManifestText


class StoredManifest(msgspec.Struct, frozen=True):
    """A manifest that is or was in force."""

    generation: int
    at: float
    """When the manifest took effect, as Unix time."""
    summary: str
    """A summary of its changes, on one line."""
    restores: int | None
    """The generation that a rollback brought back; None if this manifest is not from a rollback."""
    document: ManifestText

    @property
    def content(self) -> int:
        """The generation that first had the content of this manifest."""
        return self.generation if self.restores is None else self.restores


class SourceStore(Protocol):
    """The code that documents had when they took effect."""

    def save(self, document: ManifestText, packed: str) -> None:
        """Keep sources, as `pack_sources` writes them, for as long as the document is kept."""
        ...

    def of(self, document: ManifestText) -> str | None:
        """The sources as they were saved; None if they were not saved."""
        ...


class DocumentStore(Protocol):
    """The documents in force, stored for a later plane."""

    def together(self) -> AbstractContextManager[None]:
        """A block whose changes are stored together at its end. If that fails, none is stored; raises `NotStored`."""
        ...

    def manifest(self) -> tuple[int, ManifestText] | None:
        """The manifest in force and its generation; None if no manifest was ever applied."""
        ...

    def save_manifest(self, manifest: ManifestText, at: float, summary: str = "", restores: int | None = None) -> int:
        """Put a manifest in force. Returns its generation."""
        ...

    def manifests(self) -> list[StoredManifest]:
        """The stored manifests, newest first; the first one is in force."""
        ...

    def applications(self) -> dict[str, ManifestText]:
        """The applications in force, by name, in the order of their first deployment."""
        ...

    def application_before(self, name: str) -> ManifestText | None:
        """The version before the one in force; None if there is no earlier version."""
        ...

    def save_application(self, name: str, document: ManifestText, at: float) -> None:
        """Put a version in force, and keep the previous version."""
        ...

    def roll_back_application(self, name: str) -> None:
        """Drop the version in force; the previous one replaces it."""
        ...

    def delete_application(self, name: str) -> None:
        """Drop an application with all its versions."""
        ...

    @property
    def kept(self) -> SourceStore:
        """The code of documents."""
        ...


class TargetStore(Protocol):
    """The replica targets of scaled deployments, and the record of their changes, as JSON.

    Targets are already in force when they are stored, so no method raises. What cannot be stored now is stored later.
    """

    def scaling(self) -> dict[str, str]:
        """The last state saved, by deployment or application."""
        ...

    def save_scaling(self, states: Mapping[str, str]) -> None: ...

    def forget_scaling(self, name: str) -> None:
        """Drop state and records of a deployment that is no longer scaled."""
        ...

    def scaling_records(self, name: str) -> list[str]:
        """The records of changes of a deployment's target, newest last."""
        ...

    def note_scaling(self, name: str, record: str) -> None: ...


class UsageStore(Protocol):
    """What tenants have used of their limits, as JSON, saved about once a second. No method raises: what cannot be
    stored now is stored later."""

    def usage(self) -> dict[str, str]:
        """The last state saved, by tenant."""
        ...

    def save_usage(self, states: Mapping[str, str]) -> None: ...

    def forget_usage(self, names: Iterable[str]) -> None: ...

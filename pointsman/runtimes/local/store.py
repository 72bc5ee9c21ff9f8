"""What a plane must not forget: manifest, applications and targets in force, its processes, what was changed when.

One SQLite file.

Only the plane of the state directory writes. Every write is a transaction of its own: whenever the plane is killed,
the store says what was true a moment before.
"""

import fcntl
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pointsman.config.changes import Change, Changes
from pointsman.config.revision import ManifestText
from pointsman.errors import PointsmanError

# One plane per state directory: whoever runs there holds its lock, and loses it with its last breath.


LOCK_FILE = "lock"


class Lock:
    """Held from its making until `release`."""

    def __init__(self, state: Path) -> None:
        self._file = os.open(state / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 20).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            instead = "stop it with pointsman down, or choose another --state"
            raise PointsmanError(f"a plane runs in {state} already (pid {holder}); {instead}") from None
        os.truncate(self._file, 0)
        os.write(self._file, b"%d\n" % os.getpid())

    def release(self) -> None:
        """Let others in."""
        os.truncate(self._file, 0)
        os.close(self._file)


FILE = "pointsman.sqlite"
VERSION = 4
HISTORY = 10_000
"""Changes that are kept, the newest."""
SCALING_HISTORY = 200
"""Records of scaling that are kept of each deployment, the newest."""
APPLICATION_HISTORY = 100
"""Versions that are kept of each application, the newest."""

APPLICATIONS = (
    "create table applications (id integer primary key, name text, text text, folder text, file text, at real);"
)
SCALING = (
    "create table scaling (name text primary key, state text) without rowid;"
    "create table scaling_records (id integer primary key, name text, record text);"
)
SCHEMA = f"""
create table manifests (generation integer primary key, text text, folder text, file text, at real);
create table instances (
    id text primary key, deployment text, recipe text, host text, port integer, pid integer, born text, place text
) without rowid;
create table changes (id integer primary key, generation integer, at real, what text, subject text, why text);
{APPLICATIONS}
{SCALING}
"""
MIGRATIONS = {
    1: f"alter table instances add column place text; {APPLICATIONS} {SCALING}",
    2: f"{APPLICATIONS} {SCALING}",
    3: SCALING,
}
"""From older forms to this one."""


class StoredInstance(msgspec.Struct, frozen=True):
    """A process that was started, or was about to be."""

    id: str
    deployment: str
    recipe: str
    host: str
    port: int
    pid: int | None = None
    """None: nobody knows whether it came to that."""
    born: str = ""
    """When its kernel started it, so that it is not taken for another process of the same number."""
    place: str = ""
    """Where it was placed, as JSON; empty: nowhere in particular."""


class Happened(msgspec.Struct, frozen=True):
    """A change, and when it was made."""

    generation: int
    at: float
    """Unix time."""
    change: Change


class Store:
    """The memory of one state directory."""

    def __init__(self, state: Path) -> None:
        path = state / FILE
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")
            version = self._db.execute("pragma user_version").fetchone()[0]
            change = SCHEMA if version == 0 else MIGRATIONS.get(version, "")
            if change:
                self._db.executescript(f"begin; {change} pragma user_version = {VERSION}; commit;")
        except sqlite3.DatabaseError as error:
            raise PointsmanError(
                f"{path} cannot be used ({error}); move it away, and apply the manifest anew"
            ) from error
        if version > VERSION:
            self._db.close()
            raise PointsmanError(f"{path} was written by a newer Pointsman (form {version}; this one knows {VERSION})")

    def close(self) -> None:
        self._db.close()

    # The manifest

    def manifest(self) -> tuple[int, ManifestText] | None:
        """The one in force, and its generation; None: none was ever applied."""
        row = self._db.execute(
            "select generation, text, folder, file from manifests order by generation desc limit 1"
        ).fetchone()
        return None if row is None else (row[0], ManifestText(*row[1:]))

    def save_manifest(self, manifest: ManifestText, changes: Changes, at: float) -> int:
        """Put a manifest in force. Its generation."""
        self._db.execute("pragma synchronous = full")  # what somebody wanted survives a power cut, too
        with self._db:
            self._db.execute("begin")
            generation = int(
                self._db.execute(
                    "insert into manifests (text, folder, file, at) values (?, ?, ?, ?)",
                    (manifest.text, manifest.folder, manifest.file, at),
                ).lastrowid
                or 0
            )
            self._note(generation, changes, at)
        self._db.execute("pragma synchronous = normal")
        return generation

    # Applications, of each the newest version in force

    def applications(self) -> dict[str, ManifestText]:
        """Those in force, by name, in the order in which they were first deployed."""
        rows = self._db.execute(
            "select name, text, folder, file from applications where id in (select max(id) from applications group by"
            " name) order by (select min(id) from applications as first where first.name = applications.name)"
        )
        return {row[0]: ManifestText(*row[1:]) for row in rows}

    def application_before(self, name: str) -> ManifestText | None:
        """The version before the one in force; None: there is none."""
        row = self._db.execute(
            "select text, folder, file from applications where name = ? order by id desc limit 1 offset 1", (name,)
        ).fetchone()
        return None if row is None else ManifestText(*row)

    def save_application(self, name: str, document: ManifestText, changes: Changes, at: float) -> None:
        """Put a version in force; the one before is kept, to go back to."""
        self._change_application(
            "insert into applications (name, text, folder, file, at) values (?, ?, ?, ?, ?)",
            (name, document.text, document.folder, document.file, at),
            changes,
            at,
        )
        self._db.execute(
            "delete from applications where name = ? and id not in"
            " (select id from applications where name = ? order by id desc limit ?)",
            (name, name, APPLICATION_HISTORY),
        )

    def roll_back_application(self, name: str, changes: Changes, at: float) -> None:
        """Forget the version in force: the one before takes its place."""
        newest = "select max(id) from applications where name = ?"
        self._change_application(f"delete from applications where id = ({newest})", (name,), changes, at)

    def delete_application(self, name: str, changes: Changes, at: float) -> None:
        """Forget it, with all its versions."""
        self._change_application("delete from applications where name = ?", (name,), changes, at)

    def _change_application(self, sql: str, values: tuple[object, ...], changes: Changes, at: float) -> None:
        self._db.execute("pragma synchronous = full")
        with self._db:
            self._db.execute("begin")
            self._db.execute(sql, values)
            row = self._db.execute("select max(generation) from manifests").fetchone()
            self._note(row[0] or 0, changes, at)
        self._db.execute("pragma synchronous = normal")

    # What was changed

    def note(self, generation: int, changes: Changes, at: float) -> None:
        """Remember changes that no manifest has brought."""
        with self._db:
            self._db.execute("begin")
            self._note(generation, changes, at)

    def _note(self, generation: int, changes: Changes, at: float) -> None:
        rows = [(generation, at, step.what, step.subject, step.why) for step in changes.steps]
        self._db.executemany("insert into changes (generation, at, what, subject, why) values (?, ?, ?, ?, ?)", rows)
        self._db.execute("delete from changes where id <= (select max(id) from changes) - ?", (HISTORY,))

    def history(self, limit: int = 100) -> list[Happened]:
        """The newest changes, newest first."""
        rows = self._db.execute(
            "select generation, at, what, subject, why from changes order by id desc limit ?", (limit,)
        )
        return [Happened(generation, at, Change(*change)) for generation, at, *change in rows]

    # How many there are of each deployment, and why

    def scaling(self) -> dict[str, str]:
        """What was last known of the targets, by deployment or application, as JSON."""
        return dict(self._db.execute("select name, state from scaling"))

    def save_scaling(self, states: Mapping[str, str]) -> None:
        """Remember where they are."""
        with self._db:
            self._db.execute("begin")
            self._db.executemany("insert or replace into scaling (name, state) values (?, ?)", states.items())

    def forget_scaling(self, name: str) -> None:
        """It is gone."""
        with self._db:
            self._db.execute("begin")
            self._db.execute("delete from scaling where name = ?", (name,))
            self._db.execute("delete from scaling_records where name = ?", (name,))

    def scaling_records(self, name: str) -> list[str]:
        """Why its target became what it is, as JSON, the newest last."""
        rows = self._db.execute("select record from scaling_records where name = ? order by id", (name,))
        return [row[0] for row in rows]

    def note_scaling(self, name: str, record: str) -> None:
        """Remember why a target has changed, or has not."""
        with self._db:
            self._db.execute("begin")
            self._db.execute("insert into scaling_records (name, record) values (?, ?)", (name, record))
            self._db.execute(
                "delete from scaling_records where name = ? and id not in"
                " (select id from scaling_records where name = ? order by id desc limit ?)",
                (name, name, SCALING_HISTORY),
            )

    # Processes

    def instances(self) -> list[StoredInstance]:
        """All processes that may be there."""
        rows = self._db.execute(
            "select id, deployment, recipe, host, port, pid, born, coalesce(place, '') from instances order by id"
        )
        return [StoredInstance(*row) for row in rows]

    def save(self, instance: StoredInstance) -> None:
        """It is about to be started, or was."""
        self._db.execute(
            "insert or replace into instances (id, deployment, recipe, host, port, pid, born, place)"
            " values (?, ?, ?, ?, ?, ?, ?, ?)",
            msgspec.structs.astuple(instance),
        )

    def forget(self, instance_id: str) -> None:
        """Its process has ended."""
        self._db.execute("delete from instances where id = ?", (instance_id,))


def stored_manifest(state: Path) -> ManifestText | None:
    """The manifest in force in a state directory; None: none was ever applied there."""
    if not (state / FILE).exists():
        return None
    store = Store(state)
    try:
        found = store.manifest()
    finally:
        store.close()
    return None if found is None else found[1]

"""The state of a plane in one SQLite file: documents in force, replica targets, and processes.

Only the plane that holds the lock of the state directory writes. Every write is a transaction of its own: whenever the
plane is killed, the file says what was true a moment before.
"""

import fcntl
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pointsman.config.revision import ManifestText
from pointsman.errors import PointsmanError

LOCK_FILE = "lock"
FILE = "pointsman.sqlite"
VERSION = 5
"""Of the schema."""
MAX_SCALING_RECORDS = 200
"""Of each deployment; older ones are dropped."""
MAX_VERSIONS = 100
"""Of each application; older ones are dropped."""
SCHEMA = f"""
begin;
create table manifests (generation integer primary key, text text, folder text, file text, at real);
create table applications (id integer primary key, name text, text text, folder text, file text, at real);
create table instances (
    id text primary key, deployment text, recipe text, host text, port integer, pid integer, born text, place text
) without rowid;
create table scaling (name text primary key, state text) without rowid;
create table scaling_records (id integer primary key, name text, record text);
pragma user_version = {VERSION};
commit;
"""


class Lock:
    """The right to use a state directory, until `release` or the end of this process."""

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
        os.truncate(self._file, 0)
        os.close(self._file)


class Store:
    def __init__(self, state: Path) -> None:
        path = state / FILE
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")
            version = self._db.execute("pragma user_version").fetchone()[0]
            if version == 0:
                self._db.executescript(SCHEMA)
        except sqlite3.DatabaseError as error:
            raise PointsmanError(
                f"{path} cannot be used ({error}); move it away, and apply the manifest anew"
            ) from error
        if version not in (0, VERSION):
            self._db.close()
            raise PointsmanError(
                f"{path} was written by another version of Pointsman (form {version}; this one reads {VERSION}); "
                "move it away, and apply the manifest anew"
            )
        self.documents = SqliteDocuments(self._db)
        self.targets = SqliteTargets(self._db)
        self.processes = SqliteProcesses(self._db)

    def close(self) -> None:
        self._db.close()


class SqliteDocuments:
    """`DocumentStore` of the interface. A write waits for the disk: what was wanted survives a power cut."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def manifest(self) -> tuple[int, ManifestText] | None:
        row = self._db.execute(
            "select generation, text, folder, file from manifests order by generation desc limit 1"
        ).fetchone()
        return None if row is None else (row[0], ManifestText(*row[1:]))

    def save_manifest(self, manifest: ManifestText, at: float) -> int:
        values = (manifest.text, manifest.folder, manifest.file, at)
        return self._write("insert into manifests (text, folder, file, at) values (?, ?, ?, ?)", values)

    def applications(self) -> dict[str, ManifestText]:
        rows = self._db.execute(
            "select name, text, folder, file from applications where id in (select max(id) from applications group by"
            " name) order by (select min(id) from applications as first where first.name = applications.name)"
        )
        return {row[0]: ManifestText(*row[1:]) for row in rows}

    def application_before(self, name: str) -> ManifestText | None:
        row = self._db.execute(
            "select text, folder, file from applications where name = ? order by id desc limit 1 offset 1", (name,)
        ).fetchone()
        return None if row is None else ManifestText(*row)

    def save_application(self, name: str, document: ManifestText, at: float) -> None:
        self._write(
            "insert into applications (name, text, folder, file, at) values (?, ?, ?, ?, ?)",
            (name, document.text, document.folder, document.file, at),
        )
        self._db.execute(
            "delete from applications where name = ? and id not in"
            " (select id from applications where name = ? order by id desc limit ?)",
            (name, name, MAX_VERSIONS),
        )

    def roll_back_application(self, name: str) -> None:
        newest = "select max(id) from applications where name = ?"
        self._write(f"delete from applications where id = ({newest})", (name,))

    def delete_application(self, name: str) -> None:
        self._write("delete from applications where name = ?", (name,))

    def _write(self, sql: str, values: tuple[object, ...]) -> int:
        self._db.execute("pragma synchronous = full")
        row = self._db.execute(sql, values).lastrowid
        self._db.execute("pragma synchronous = normal")
        return row or 0


class SqliteTargets:
    """`TargetStore` of the interface."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def scaling(self) -> dict[str, str]:
        return dict(self._db.execute("select name, state from scaling"))

    def save_scaling(self, states: Mapping[str, str]) -> None:
        with self._db:
            self._db.execute("begin")
            self._db.executemany("insert or replace into scaling (name, state) values (?, ?)", states.items())

    def forget_scaling(self, name: str) -> None:
        with self._db:
            self._db.execute("begin")
            self._db.execute("delete from scaling where name = ?", (name,))
            self._db.execute("delete from scaling_records where name = ?", (name,))

    def scaling_records(self, name: str) -> list[str]:
        rows = self._db.execute("select record from scaling_records where name = ? order by id", (name,))
        return [row[0] for row in rows]

    def note_scaling(self, name: str, record: str) -> None:
        with self._db:
            self._db.execute("begin")
            self._db.execute("insert into scaling_records (name, record) values (?, ?)", (name, record))
            self._db.execute(
                "delete from scaling_records where name = ? and id not in"
                " (select id from scaling_records where name = ? order by id desc limit ?)",
                (name, name, MAX_SCALING_RECORDS),
            )


class StoredProcess(msgspec.Struct, frozen=True):
    """A process that was started, or was about to be."""

    id: str
    """Of its instance."""
    deployment: str
    recipe: str
    host: str
    port: int
    pid: int | None = None
    """None if it may not have been started."""
    born: str = ""
    """When the kernel started it: tells it from a later process of the same pid."""
    place: str = ""
    """As JSON; empty if it has none."""


class SqliteProcesses:
    """Every process that may be running."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def all(self) -> list[StoredProcess]:
        rows = self._db.execute(
            "select id, deployment, recipe, host, port, pid, born, place from instances order by id"
        )
        return [StoredProcess(*row) for row in rows]

    def save(self, process: StoredProcess) -> None:
        self._db.execute(
            "insert or replace into instances (id, deployment, recipe, host, port, pid, born, place)"
            " values (?, ?, ?, ?, ?, ?, ?, ?)",
            msgspec.structs.astuple(process),
        )

    def forget(self, instance_id: str) -> None:
        self._db.execute("delete from instances where id = ?", (instance_id,))

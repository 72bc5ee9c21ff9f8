"""The state of a plane in one SQLite file: documents in force, replica targets, usage, and processes.

Only the plane that holds the lock of the state directory writes. Documents are stored before they take effect, or
refused. Everything else is already decided when it is stored: the plane's memory is authoritative, and the file is
a copy for the next plane. Each change is written at once, in its own transaction. So if the plane is killed, the file
has the state of a moment before. If the disk is full or broken, changes wait in memory and are written later, all of
them together. These writes do not raise.
"""

import os
import sqlite3
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pointsman.config.revision import ManifestText
from pointsman.errors import NotStored, PointsmanError
from pointsman.reasons import Reason
from pointsman.runtimes.machine.kept_sources import DOCUMENT, SqliteSources, document_in, values_of
from pointsman.runtimes.stores import StoredManifest

FILE = "pointsman.sqlite"
VERSION = 8
"""Version of the schema."""
MAX_SCALING_RECORDS = 200
"""Maximum records of each deployment; older ones are dropped."""
MAX_VERSIONS = 100
"""Maximum versions of the manifest, and of each application; older ones are dropped."""
BUSY_MS = 100
"""How long a document waits for another program that has locked the file. Other writes do not wait."""
SCHEMA = f"""
begin;
create table manifests (
    generation integer primary key, text text, folder text, file text, code text, at real, summary text,
    restores integer
);
create table applications (
    id integer primary key, name text, text text, folder text, file text, code text, at real
);
create table instances (
    id text primary key, deployment text, recipe text, host text, port integer, pid integer, born text, place text,
    worker text
) without rowid;
create table scaling (name text primary key, state text) without rowid;
create table usage (tenant text primary key, state text) without rowid;
create table scaling_records (id integer primary key, name text, record text);
pragma user_version = {VERSION};
commit;
"""
MOVE_AWAY = "move it away while no plane runs, and apply the manifest again"
ADVICE = {
    sqlite3.SQLITE_FULL: "free space on its disk",
    sqlite3.SQLITE_READONLY: "make it and its disk writable",
    sqlite3.SQLITE_BUSY: "another program has locked it: end that program",
    sqlite3.SQLITE_LOCKED: "another program has locked it: end that program",
    sqlite3.SQLITE_IOERR: "check its disk, quotas, and limits on the size of files",
    sqlite3.SQLITE_CANTOPEN: "check its disk, quotas, and who may open it",
}
"""Advice by error code; `MOVE_AWAY` for other codes."""


DISK_ERRORS = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
SPACE_BYTES = 64 * 1024
"""A disk with less space than this is full, whatever SQLite reports."""


def _advice(error: Exception, path: Path) -> str:
    code = _code(error)
    if code in DISK_ERRORS:
        with suppress(OSError):
            disk = os.statvfs(path.parent)
            if disk.f_bavail * disk.f_frsize < SPACE_BYTES:
                return ADVICE[sqlite3.SQLITE_FULL]
    return ADVICE.get(code, MOVE_AWAY)


def _code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest of the code is too detailed here


class UnsavedRows(Protocol):
    """Rows of a table that are not in the file yet."""

    def __len__(self) -> int: ...

    def write(self, db: sqlite3.Connection) -> None:
        """Write the rows, within a transaction. They count as unsaved until `saved` is called."""
        ...

    def saved(self) -> None: ...


class WriteBehind:
    """Writes rows at once if the file can be written, else as soon as possible."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self.failures = 0
        """Failed attempts to write."""
        self.failed_since: float | None = None
        self.why = ""
        """Why the last attempt failed; empty if it succeeded."""
        self.written: Callable[[], None] = lambda: None
        """Called when rows were written."""
        self._db = db
        self._path = path
        self._tables: list[UnsavedRows] = []

    def add(self, table: UnsavedRows) -> None:
        self._tables.append(table)

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def changed(self) -> None:
        """Write changed rows. After a failure, they wait for the next `flush`."""
        if not self.why:
            self.flush()

    def flush(self) -> None:
        """Write everything that is unsaved, or nothing."""
        if not len(self):
            return
        try:
            with _transaction(self._db):
                for table in self._tables:
                    table.write(self._db)
        except sqlite3.Error as error:
            self.failures += 1
            self.failed_since = self.failed_since or time.monotonic()
            self.why = f"{error}; {_advice(error, self._path)}"
            return
        for table in self._tables:
            table.saved()
        self.failed_since, self.why = None, ""
        self.written()


def _make_private(path: Path) -> None:
    """Create a file for its owner only; SQLite would let others read it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.fchmod(file, 0o600)
    finally:
        os.close(file)


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("begin immediate")
    try:
        yield
        db.execute("commit")
    except BaseException:
        with suppress(sqlite3.Error):  # some errors have already rolled it back
            db.execute("rollback")
        raise


class Store:
    """The state in one file. Raises `PointsmanError` if the file cannot be used."""

    def __init__(self, state: Path, image: bytes | None = None) -> None:
        """`image` is the content of a store that is in memory only and kept elsewhere. If empty, the store is new."""
        self._path, self._first = state / FILE, image
        try:
            if image is None:
                _make_private(self._path)
            try:
                self._open(shared=True)
            except sqlite3.Error as error:
                if _code(error) not in DISK_ERRORS:
                    raise
                self._open(shared=False)
        except OSError as error:
            raise PointsmanError(f"{self._path} cannot be used ({error.strerror}); move it away") from error
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise PointsmanError(f"{self._path} cannot be used ({error}); {_advice(error, self._path)}") from error

    def _open(self, *, shared: bool) -> None:
        """`shared`: other programs may read the file at the same time, for which SQLite needs a little disk space."""
        where = self._path if self._first is None else ":memory:"
        db = self._db = sqlite3.connect(where, isolation_level=None, timeout=1.0)
        try:
            if self._first:
                db.deserialize(self._first)
            if not shared:
                db.execute("pragma locking_mode = exclusive")
            db.execute("pragma journal_mode = wal")
            db.execute("pragma synchronous = normal")
            version = db.execute("pragma user_version").fetchone()[0]
            if version == 0:
                db.executescript(SCHEMA)
            elif version != VERSION:
                raise PointsmanError(
                    f"{self._path} was written by another version of Pointsman (form {version}; this one reads "
                    f"{VERSION}); {MOVE_AWAY}"
                )
            self.behind = WriteBehind(db, self._path)
            self.documents = SqliteDocuments(db, self._path)
            self.documents.check()
            self.targets = SqliteTargets(db, self.behind)
            self.usage = SqliteUsage(db, self.behind)
            self.processes = SqliteProcesses(db, self.behind)
            db.execute("pragma busy_timeout = 0")
        except BaseException:
            db.close()
            raise

    @property
    def problem(self) -> Reason | None:
        """Why the file is not up to date; None if it is up to date."""
        behind = self.behind
        if behind.failed_since is None:
            return None
        since_s = time.monotonic() - behind.failed_since
        facts = {"file": str(self._path), "since_s": since_s, "error": behind.why, "changes": len(behind)}
        return Reason("store-behind", facts)

    def image(self) -> bytes:
        """The whole content, for `Store` in another process."""
        return self._db.serialize()

    def close(self) -> None:
        """Try once more to write what is unsaved."""
        self.behind.flush()
        self._db.close()


class SqliteDocuments:
    """`DocumentStore` of the interface. A write waits for the disk, so that documents survive a power cut."""

    kept: SqliteSources

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path
        self.push: Callable[[], None] | None = None
        """Stores the written content elsewhere, and may raise `NotStored`. If None, the content stays here."""

    def check(self) -> None:
        """Load the stored state. Raises `sqlite3.Error`."""
        self.kept = SqliteSources(self._db)
        for table in ("manifests", "applications"):
            self._db.execute(f"select {DOCUMENT} from {table} limit 1").fetchall()

    @contextmanager
    def together(self) -> Iterator[None]:
        before = b"" if self.push is None else self._db.serialize()
        try:
            self._db.execute(f"pragma busy_timeout = {BUSY_MS}")
            self._db.execute("pragma synchronous = full")
            with _transaction(self._db):
                yield
            if self.push is not None:
                self.push()
        except NotStored:
            self._db.deserialize(before)
            raise
        except sqlite3.Error as error:
            why = f"{self._path} cannot be written ({error})"
            raise NotStored(
                f"nothing was changed, because {why}; {_advice(error, self._path)}, and try again"
            ) from error
        finally:
            self._db.execute("pragma synchronous = normal")
            self._db.execute("pragma busy_timeout = 0")

    def manifest(self) -> tuple[int, ManifestText] | None:
        rows = self._read(f"select generation, {DOCUMENT} from manifests order by generation desc limit 1")
        return (rows[0][0], document_in(rows[0][1:])) if rows else None

    def save_manifest(self, manifest: ManifestText, at: float, summary: str = "", restores: int | None = None) -> int:
        row = self._db.execute(
            f"insert into manifests ({DOCUMENT}, at, summary, restores) values (?, ?, ?, ?, ?, ?, ?)",
            (*values_of(manifest), at, summary, restores),
        ).lastrowid
        oldest = "select generation from manifests order by generation desc limit 1 offset ?"
        self._db.execute(f"delete from manifests where generation <= ({oldest})", (MAX_VERSIONS,))
        return row or 0

    def manifests(self) -> list[StoredManifest]:
        rows = self._read(
            f"select generation, at, summary, restores, {DOCUMENT} from manifests order by generation desc"
        )
        return [StoredManifest(row[0], row[1], row[2], row[3], document_in(row[4:])) for row in rows]

    def applications(self) -> dict[str, ManifestText]:
        rows = self._read(
            f"select name, {DOCUMENT} from applications where id in (select max(id) from applications group by"
            " name) order by (select min(id) from applications as first where first.name = applications.name)"
        )
        return {row[0]: document_in(row[1:]) for row in rows}

    def application_before(self, name: str) -> ManifestText | None:
        rows = self._read(f"select {DOCUMENT} from applications where name = ? order by id desc limit 1 offset 1", name)
        return document_in(rows[0]) if rows else None

    def save_application(self, name: str, document: ManifestText, at: float) -> None:
        self._db.execute(
            f"insert into applications (name, {DOCUMENT}, at) values (?, ?, ?, ?, ?, ?)",
            (name, *values_of(document), at),
        )
        self._db.execute(
            "delete from applications where name = ? and id not in"
            " (select id from applications where name = ? order by id desc limit ?)",
            (name, name, MAX_VERSIONS),
        )

    def roll_back_application(self, name: str) -> None:
        newest = "select max(id) from applications where name = ?"
        self._db.execute(f"delete from applications where id = ({newest})", (name,))

    def delete_application(self, name: str) -> None:
        self._db.execute("delete from applications where name = ?", (name,))

    def _read(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise NotStored(f"{self._path} cannot be read ({error}); {_advice(error, self._path)}") from error


class SqliteTargets:
    """`TargetStore` of the interface."""

    def __init__(self, db: sqlite3.Connection, behind: WriteBehind) -> None:
        self._states = msgspec.convert(dict(db.execute("select name, state from scaling")), dict[str, str])
        self._records: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=MAX_SCALING_RECORDS))
        for name, record in db.execute("select name, record from scaling_records order by id"):
            self._records[name].append(record)
        self._forgotten: set[str] = set()
        self._unsaved_states: set[str] = set()
        self._unsaved_records: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=MAX_SCALING_RECORDS))
        self._behind = behind
        behind.add(self)

    def scaling(self) -> dict[str, str]:
        return dict(self._states)

    def save_scaling(self, states: Mapping[str, str]) -> None:
        self._states |= states
        self._unsaved_states |= states.keys()
        self._behind.changed()

    def forget_scaling(self, name: str) -> None:
        self._states.pop(name, None)
        self._records.pop(name, None)
        self._unsaved_states.discard(name)
        self._unsaved_records.pop(name, None)
        self._forgotten.add(name)
        self._behind.changed()

    def scaling_records(self, name: str) -> list[str]:
        return list(self._records.get(name, ()))

    def note_scaling(self, name: str, record: str) -> None:
        self._records[name].append(record)
        self._unsaved_records[name].append(record)
        self._behind.changed()

    def __len__(self) -> int:
        return len(self._forgotten) + len(self._unsaved_states) + sum(map(len, self._unsaved_records.values()))

    def write(self, db: sqlite3.Connection) -> None:
        for name in self._forgotten:  # removals come first, because a present row of this name is newer
            db.execute("delete from scaling where name = ?", (name,))
            db.execute("delete from scaling_records where name = ?", (name,))
        states = [(name, self._states[name]) for name in self._unsaved_states]
        db.executemany("insert or replace into scaling (name, state) values (?, ?)", states)
        for name, records in self._unsaved_records.items():
            rows = [(name, record) for record in records]
            db.executemany("insert into scaling_records (name, record) values (?, ?)", rows)
            db.execute(
                "delete from scaling_records where name = ? and id not in"
                " (select id from scaling_records where name = ? order by id desc limit ?)",
                (name, name, MAX_SCALING_RECORDS),
            )

    def saved(self) -> None:
        self._forgotten.clear()
        self._unsaved_states.clear()
        self._unsaved_records.clear()


class SqliteUsage:
    """`UsageStore` of the interface."""

    def __init__(self, db: sqlite3.Connection, behind: WriteBehind) -> None:
        self._states = msgspec.convert(dict(db.execute("select tenant, state from usage")), dict[str, str])
        self._unsaved: set[str] = set()
        self._behind = behind
        behind.add(self)

    def usage(self) -> dict[str, str]:
        return dict(self._states)

    def save_usage(self, states: Mapping[str, str]) -> None:
        self._states |= states
        self._unsaved |= states.keys()
        self._behind.changed()

    def forget_usage(self, names: Iterable[str]) -> None:
        for name in names:
            self._states.pop(name, None)
            self._unsaved.add(name)
        self._behind.changed()

    def __len__(self) -> int:
        return len(self._unsaved)

    def write(self, db: sqlite3.Connection) -> None:
        states = [(name, self._states[name]) for name in self._unsaved if name in self._states]
        db.executemany("insert or replace into usage (tenant, state) values (?, ?)", states)
        gone = [(name,) for name in self._unsaved if name not in self._states]
        db.executemany("delete from usage where tenant = ?", gone)

    def saved(self) -> None:
        self._unsaved.clear()


class StoredProcess(msgspec.Struct, frozen=True):
    """A process that was started, or was about to be."""

    id: str
    """Id of the instance."""
    deployment: str
    recipe: str
    host: str
    port: int
    pid: int | None = None
    """None if the process may not have been started."""
    born: str = ""
    """When the kernel started it, which distinguishes it from a later process with the same pid."""
    place: str = ""
    """The place of the instance as JSON; empty if it has no place."""
    worker: str = ""
    """The worker on which the process runs; if empty, the machine of the plane."""


PROCESS = ", ".join(StoredProcess.__struct_fields__)
"""The columns of a process."""


class SqliteProcesses:
    """Every process that may be running."""

    def __init__(self, db: sqlite3.Connection, behind: WriteBehind) -> None:
        rows = db.execute(f"select {PROCESS} from instances order by id")
        names = [column[0] for column in rows.description]
        self.found = [msgspec.convert(dict(zip(names, row, strict=True)), StoredProcess) for row in rows]
        """Processes in the file when it was opened."""
        self._unsaved: dict[str, StoredProcess | None] = {}
        """Changed processes; None for a process that has ended."""
        self._behind = behind
        behind.add(self)

    def save(self, process: StoredProcess) -> None:
        self._unsaved[process.id] = process
        self._behind.changed()

    def forget(self, instance_id: str) -> None:
        self._unsaved[instance_id] = None
        self._behind.changed()

    def __len__(self) -> int:
        return len(self._unsaved)

    def write(self, db: sqlite3.Connection) -> None:
        for instance_id, process in self._unsaved.items():
            if process is None:
                db.execute("delete from instances where id = ?", (instance_id,))
            else:
                db.execute(
                    f"insert or replace into instances ({PROCESS}) values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    msgspec.structs.astuple(process),
                )

    def saved(self) -> None:
        self._unsaved.clear()

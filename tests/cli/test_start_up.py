"""`pointsman up` in a state directory that cannot be used: one error with what to do, and nothing is left behind."""

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from uuid import uuid4

import pytest

from bench.chaos.disks import SmallDisk, can_mount
from bench.chaos.planes import LivePlane
from pointsman.cli.main import main
from pointsman.runtimes.machine.store import FILE, Store
from tests.live.manifests import manifest, simulated

AS_OTHERS = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all")
"""Root without the right to open every file, so that permissions apply."""
TABLES = ("manifests", "applications", "instances", "scaling", "scaling_records")


def file_instead(state: Path) -> None:
    state.write_text("x")


def dangling_link(state: Path) -> None:
    state.symlink_to(state.with_name("nowhere"))


def folder(state: Path, mode: int = 0o700) -> Path:
    state.mkdir()
    state.chmod(mode)
    return state


def entry(name: str, *, content: bytes | None = None, mode: int = 0o600) -> Callable[[Path], None]:
    """A file in the state directory; without content, a directory."""

    def make(state: Path) -> None:
        path = folder(state) / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
            path.chmod(mode)

    return make


def database(sql: str) -> Callable[[Path], None]:
    """The file of an earlier plane, damaged."""

    def make(state: Path) -> None:
        Store(folder(state)).close()
        with sqlite3.connect(state / FILE) as db:
            db.executescript(sql)
        db.close()

    return make


INSTANCE = "insert into instances values ('m-1', 'm', 'r', '127.0.0.1', 'x', null, '', '', '')"
CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (file_instead, "{state} is not a directory; move it away, or choose another --state"),
    "a dangling link": (dangling_link, "{state} is not a directory; move it away, or choose another --state"),
    "open to its group": (lambda state: folder(state, 0o750), "run: chmod 700 {state}"),
    "open to all": (lambda state: folder(state, 0o755), "run: chmod 700 {state}"),
    "secret open to its group": (entry("secret", content=b"x", mode=0o640), "run: chmod 600 {state}/secret"),
    "secret open to all": (entry("secret", content=b"x", mode=0o644), "run: chmod 600 {state}/secret"),
    "binary secret": (
        entry("secret", content=b"\xff\x00\x01"),
        "{state}/secret holds something else than a secret",
    ),
    "secret of lines": (entry("secret", content=b"a\nb"), "{state}/secret holds something else than a secret; move it"),
    "secret as a directory": (entry("secret"), "{state}/secret is not a file; move it away"),
    "lock as a directory": (entry("lock"), "{state}/lock is not a file; move it away"),
    "log as a directory": (entry("supervisor.log"), "{state}/supervisor.log is not a file; move it away"),
    "admin.sock as a directory": (entry("admin.sock"), "{state}/admin.sock is not a socket; move it away"),
    "admin.sock as a file": (entry("admin.sock", content=b""), "{state}/admin.sock is not a socket; move it away"),
    "supervisor.sock as a file": (
        entry("supervisor.sock", content=b""),
        "{state}/supervisor.sock is not a socket; move",
    ),
    "logs as a file": (entry("logs", content=b""), "{state}/logs is not a directory; move it away"),
    "store as a directory": (entry(FILE), f"{{state}}/{FILE} is not a file; move it away"),
    "store that is none": (entry(FILE, content=b"no database " * 99), "(file is not a database); move it away"),
    "store of another version": (database("pragma user_version = 99"), "written by another version of Pointsman"),
    **{
        f"store without {table}": (database(f"drop table {table}"), f"(no such table: {table}); move it away")
        for table in TABLES
    },
    "store without a column": (database("alter table instances drop column born"), "(no such column: born); move it"),
    "store with nonsense": (database(INSTANCE), "(Expected `int`, got `str` - at `$.port`); move it away"),
}
"""How the state directory is made, and what the error says."""
PERMISSIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "unreadable": (lambda state: folder(state, 0o300), "run: chmod 700 {state}"),
    "read-only": (lambda state: folder(state, 0o500), "run: chmod 700 {state}"),
    "closed": (lambda state: folder(state, 0o000), "run: chmod 700 {state}"),
    "unreadable secret": (
        entry("secret", content=b"x", mode=0o200),
        "{state}/secret cannot be read or made",
    ),
    "unreadable store": (entry(FILE, content=b"", mode=0o200), f"{{state}}/{FILE} cannot be used (Permission denied)"),
    "unreadable lock": (entry("lock", content=b"", mode=0o200), "{state}/lock cannot be used (Permission denied)"),
}
"""The same for a user whose permissions apply."""


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[LivePlane]:
    """To look for processes that are left behind."""
    made = LivePlane(tmp_path)
    yield made
    made.close()


def refused(plane: LivePlane, *prefix: str) -> str:
    """What `pointsman up` says. Nothing may be different afterwards, but for the lock and the empty store. Without a
    prefix it runs in this process, which takes a fraction of the time."""
    file = plane.write(manifest(simulated("m", 1)))
    arguments = ["up", str(file), "--state", str(plane.state)]
    before = entries(plane.state)
    code, output, errors = started(plane, *prefix, arguments=arguments) if prefix else called(arguments)
    assert code == 1, errors
    assert output == ""
    assert errors.startswith("pointsman: ")
    assert errors.count("\n") == 1, errors
    assert plane.processes() == {}
    assert set(entries(plane.state)) - set(before) <= {"lock", FILE, "secret"}
    assert {name: kind for name, kind in entries(plane.state).items() if name in before} == before
    return errors


def called(arguments: list[str]) -> tuple[int, str, str]:
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        code = main(arguments)
    return code, output.getvalue(), errors.getvalue()


def started(plane: LivePlane, *prefix: str, arguments: list[str]) -> tuple[int, str, str]:
    result = subprocess.run(
        [*prefix, sys.executable, "-m", "pointsman.cli.main", *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **plane.environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return result.returncode, result.stdout, result.stderr


def entries(state: Path) -> dict[str, str]:
    """Names in the state directory, and what they are."""
    try:
        return {path.name: stat.filemode(path.lstat().st_mode) for path in state.iterdir()}
    except OSError:
        return {}


@pytest.mark.parametrize("case", CASES)
def test_a_state_directory_that_cannot_be_used_is_one_error(case: str, plane: LivePlane) -> None:
    make, message = CASES[case]
    make(plane.state)
    assert message.format(state=plane.state) in refused(plane)


@pytest.mark.parametrize("case", PERMISSIONS)
def test_permissions_that_are_missing_are_one_error(case: str, plane: LivePlane) -> None:
    if os.geteuid() == 0 and shutil.which(AS_OTHERS[0]) is None:
        pytest.skip("permissions do not apply to root, and setpriv is not there to drop that right")
    make, message = PERMISSIONS[case]
    make(plane.state)
    try:
        assert message.format(state=plane.state) in refused(plane, *(AS_OTHERS if os.geteuid() == 0 else ()))
    finally:
        plane.state.chmod(0o700)


def test_a_directory_below_a_file_is_one_error(plane: LivePlane) -> None:
    (plane.folder / "file").write_text("x")
    plane.state = plane.folder / "file" / "state"
    assert f"{plane.state} cannot be made (Not a directory); choose another --state" in refused(plane)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_a_directory_of_another_user_is_one_error(plane: LivePlane) -> None:
    os.chown(folder(plane.state), 12345, 12345)
    assert f"{plane.state} belongs to another user; choose another --state, or run: chown 0" in refused(plane)


@pytest.mark.skipif(not can_mount(), reason="no disk can be mounted here")
@pytest.mark.parametrize("how", ["read-only", "full"])
def test_a_disk_that_cannot_be_written_is_one_error(how: str, plane: LivePlane) -> None:
    disk = SmallDisk(plane.state)
    with ExitStack() as stack:
        stack.callback(disk.close)
        if how == "full":
            disk.fill()
            assert "free space on its disk" in refused(plane)
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(plane.state)], check=True)
            assert f"{plane.state} is on a read-only file system" in refused(plane)


def test_only_the_owner_may_read_what_a_plane_makes(plane: LivePlane) -> None:
    old = os.umask(0)
    try:
        plane.up(manifest(simulated("m", 1)))
        plane.kill()  # so that the files of SQLite are still there
        made = {path.relative_to(plane.folder): path.stat().st_mode for path in plane.state.rglob("*")}
    finally:
        os.umask(old)
    names = {str(path) for path in made}
    known = ("lock", FILE, f"{FILE}-wal", "secret", "supervisor.log", "supervisor.sock", "admin.sock", "logs/m-1.log")
    assert {f"state/{name}" for name in known} <= names
    assert stat.S_IMODE(plane.state.stat().st_mode) == 0o700
    open_to_others = [str(path) for path, mode in made.items() if mode & 0o077]
    assert open_to_others == []
    plane.up()


def test_the_state_directory_is_made_with_its_parents(plane: LivePlane) -> None:
    plane.state = plane.folder / uuid4().hex / "deep" / "state"
    plane.admin = type(plane.admin)(plane.state)
    plane.up(manifest(simulated("m", 1)))
    assert stat.S_IMODE(plane.state.stat().st_mode) == 0o700

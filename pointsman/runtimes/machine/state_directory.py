"""The folder of a plane on its machine: its permissions, its lock, and the socket of the admin API."""

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

from pointsman.errors import PointsmanError, command
from pointsman.http.pool import short_path
from pointsman.replica.handles import GatewayTransport
from pointsman.runtimes.machine.store import FILE

SOCKET = "admin.sock"
LOCK_FILE = "lock"
SECRET_FILE = "secret"


def by_cause(error: OSError) -> str:
    """What to do about a file or folder that cannot be created."""
    return "free space on its disk" if error.errno in (ENOSPC, EDQUOT) else "move it away, or choose another --state"


ENTRIES: dict[str, tuple[Callable[[Path], bool], str]] = {
    LOCK_FILE: (Path.is_file, "file"),
    FILE: (Path.is_file, "file"),
    SECRET_FILE: (Path.is_file, "file"),
    "supervisor.log": (Path.is_file, "file"),
    SOCKET: (Path.is_socket, "socket"),
    "supervisor.sock": (Path.is_socket, "socket"),
    "logs": (Path.is_dir, "directory"),
}
"""Entries of the state directory."""


def check_state(state: Path) -> None:
    """Create the state directory, for its owner only. Raises `PointsmanError`, and changes nothing, if an existing one
    cannot be used."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = state.stat()
    except FileExistsError:
        raise PointsmanError(f"{state} is not a directory; move it away, or choose another --state") from None
    except OSError as error:
        raise PointsmanError(f"{state} cannot be made ({error.strerror}); choose another --state") from None
    if found.st_uid != os.geteuid():
        remedy = f"choose another --state, or run: chown {os.geteuid()} {state}"
        raise PointsmanError(f"{state} belongs to another user; {remedy}")
    if found.st_mode & 0o077:
        raise PointsmanError(f"{state} is open to other users, who could read its secret; run: chmod 700 {state}")
    if os.statvfs(state).f_flag & os.ST_RDONLY:
        raise PointsmanError(f"{state} is on a read-only file system; make it writable, or choose another --state")
    if not os.access(state, os.R_OK | os.W_OK | os.X_OK):
        raise PointsmanError(f"{state} cannot be read and written by its owner; run: chmod 700 {state}")
    for name, (is_right, kind) in ENTRIES.items():
        path = state / name
        if not path.exists():
            continue
        if not is_right(path):
            raise PointsmanError(f"{path} is not a {kind}; move it away")
        if name == SECRET_FILE and path.stat().st_mode & 0o077:
            raise PointsmanError(f"{path} is open to other users; run: chmod 600 {path}")


class Lock:
    """The right to use a state directory, until `release` or the end of this process."""

    def __init__(self, state: Path) -> None:
        try:
            self._file = os.open(state / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise PointsmanError(f"{state / LOCK_FILE} cannot be used ({error.strerror}); move it away") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 20).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            instead = f"choose another --state, or stop it with: {command('down')}"
            raise PointsmanError(f"a plane runs in {state} already (pid {holder}); {instead}") from None
        with suppress(OSError):  # the disk is full: the lock works without the pid
            os.truncate(self._file, 0)
            os.write(self._file, b"%d\n" % os.getpid())

    def release(self) -> None:
        with suppress(OSError):
            os.truncate(self._file, 0)
        os.close(self._file)


class AdminSocket:
    """`AdminListener` of the interface: a unix socket in the state directory, for its owner."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._server: asyncio.AbstractServer | None = None

    async def listen(self, connect: Callable[[], Any], connect_replica: Callable[[], Any]) -> None:
        """Replaces a socket of an earlier plane; the lock of the directory shows that this plane is gone."""
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._path.unlink(missing_ok=True)
            with short_path(self._path) as short:
                bound.bind(short)
        except OSError as error:
            bound.close()
            raise PointsmanError(f"{self._path} cannot be made ({error.strerror}); {by_cause(error)}") from error
        finally:
            os.umask(before)
        self._inode = self._path.stat().st_ino
        self._server = await asyncio.get_running_loop().create_unix_server(connect, sock=bound)

    def dial(self) -> GatewayTransport:
        return GatewayTransport(self._path)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            with suppress(OSError):
                if self._path.stat().st_ino == self._inode:  # otherwise the next plane listens here
                    self._path.unlink()

"""Memory that the processes of one machine share: a folder, and a server that sends its files to other nodes.

Enters: names of files, from processes that know the secret of the plane. Leaves: their content.
"""

import asyncio
import hashlib
import hmac
import os
import shutil
from pathlib import Path

import msgspec

from pointsman.errors import PointsmanError
from pointsman.http.heads import HttpRequest
from pointsman.http.server import HttpServer, ServerConnection
from pointsman.runtimes.machine.state_directory import by_cause
from pointsman.wire.node_memory import FETCH_PATH, FREE_PATH
from pointsman.wire.shared_memory import BufferFiles, SharedBuffers, UnreadableBlob

MEMORY = Path("/dev/shm")
SWEEP_S, MAX_AGE_S = 60.0, 900.0
"""Interval between checks of files, and the age from which no request can need a file."""
OCTETS = b"application/octet-stream"


def memory_folder(state: Path, memory: Path = MEMORY) -> Path:
    """The folder for a state directory, in memory if the system has such a folder."""
    digest = hashlib.sha256(os.fsencode(state)).hexdigest()[:12]
    return memory / f"pointsman-{digest}" if os.access(memory, os.W_OK) else state / "shm"


class SharedFolder(BufferFiles):
    """A folder that only its owner may use."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        _own_folder(path)

    def clear(self) -> None:
        """Remove all files. No process that could use them may be left."""
        self.close()
        _own_folder(self.path)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _own_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        stat = folder.lstat()
        if stat.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
            raise PointsmanError(f"{folder} is owned by another user; move it away, or use another --state")
        folder.chmod(0o700)
    except OSError as error:
        raise PointsmanError(f"{folder} cannot be made ({error.strerror}); {by_cause(error)}") from error


class NodeMemory:
    """The memory of a node of a cluster: sent to replicas on other nodes, and freed on messages of gateways."""

    def __init__(self, state: Path, node: str, host: str) -> None:
        """`state`: a folder of this node. `host`: the address at which other nodes reach it."""
        self._folder = memory_folder(state)
        self._home = state / "memory"
        """A file with the home of this node: its name and the address of this server."""
        self._node, self._host = node, host
        self.secret = b""
        """The secret of the plane; without a secret, nothing is sent."""
        self._files = SharedBuffers(self._folder)
        self._http: HttpServer | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def open(self, *, is_used: bool) -> None:
        """Serve the memory. `is_used`: whether processes that an earlier actor has started use it."""
        folder = SharedFolder(self._folder)
        if not is_used:
            folder.clear()
        self._http = HttpServer(self._serve)
        before = self._home.read_text(encoding="utf-8").rpartition(":")[2] if self._home.exists() else ""
        try:
            port = await self._http.listen(self._host, int(before) if before.isdecimal() else 0)
        except OSError:  # the port has another owner now
            port = await self._http.listen(self._host, 0)
        host = f"[{self._host}]" if ":" in self._host else self._host
        replace_text(self._home, f"{self._node} {host}:{port}")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the processes of this node."""
        return {"POINTSMAN_SHM": str(self._folder), "POINTSMAN_MEMORY": str(self._home)}

    def sweep(self) -> None:
        """Free the files that requests no longer need."""
        BufferFiles(self._folder).remove_older_than(MAX_AGE_S)

    def close(self) -> None:
        if self._http is not None:
            self._http.stop_listening()
            for connection in list(self._http.connections):
                connection.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._http = None

    def _serve(self, client: ServerConnection, request: HttpRequest) -> None:
        given = request.headers.get(b"x-pointsman-secret", b"")
        if not self.secret or not hmac.compare_digest(given, self.secret):
            client.answer(403, _problem("x-pointsman-secret is not that of this plane"))
            return
        lines = bytes(request.body).decode("utf-8", "replace").split("\n")
        if request.path == FREE_PATH.encode():
            for name in lines:
                self._files.remove(name)
            client.answer(200, b"{}")
        elif request.path == FETCH_PATH.encode() and len(lines) == 2 and lines[1].isdecimal():
            task = asyncio.ensure_future(self._send(client, lines[0], int(lines[1])))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        else:
            client.answer(404, _problem("there is no such page"))

    async def _send(self, client: ServerConnection, name: str, length: int) -> None:
        """Send a file. It is copied on a thread, because a large file would block everything else."""
        try:
            body = await asyncio.to_thread(lambda: bytes(self._files.get(name, length)))
        except UnreadableBlob as error:
            client.answer(404, _problem(str(error)))
        else:
            client.answer(200, body, OCTETS)


def replace_text(file: Path, text: str) -> None:
    """Write a small file in one step: other processes of this user may read it at any time."""
    unfinished = file.with_suffix(".new")
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
    unfinished.replace(file)


def _problem(message: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message}})

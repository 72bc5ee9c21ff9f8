"""Shared memory of other nodes: replicas fetch the files that they need from it, and gateways free the files.

Enters: blobs whose files are in the memory of other nodes. Leaves: the content of these files, over a connection that
stays open between requests. The one rule: the name of a node says which memory has a file; an address never does.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from pointsman.errors import shown
from pointsman.http.client import HttpClient, NoResponse, Reply
from pointsman.wire.blobs import KIND_COMPOSED, KIND_WITH_BUFFERS, Bytes, StoredFile, files_inside
from pointsman.wire.shared_memory import BufferSource, SharedBuffers, UnreadableBlob, node_of

FETCH_PATH, FREE_PATH = "/memory", "/memory/free"
"""Pages of the server of a node. The body of a request has the name and length of a file to read, or the names of files
to free, one per line."""
FETCH_S = 60.0
TRIES, AGAIN_S = 20, 0.1
"""Time limit for the server of a node to come back after its actor has died."""
FREE_S = 5.0


class NodeAddress(NamedTuple):
    """The address of the server of a node: a `TcpTarget`."""

    host: str
    port: int
    tls: bool = False


class NodeClients:
    """Connections to the servers of nodes."""

    def __init__(self, secret: str) -> None:
        self._clients: dict[str, HttpClient] = {}
        """Connections by address."""
        self.headers = f"x-pointsman-secret: {secret}\r\ncontent-type: text/plain\r\n"

    def to(self, home: str) -> HttpClient:
        """The client for the server of this home. Raises `UnreadableBlob` if the text is not a home."""
        address = home.rpartition(" ")[2]
        if address not in self._clients:
            try:
                where = urlsplit(f"//{address}")
                target = NodeAddress(where.hostname or "", where.port or 0)
            except ValueError:
                target = NodeAddress("", 0)
            if not target.host or not target.port:
                raise UnreadableBlob(f'a value is in memory that cannot be reached: "{shown(home)}"')
            self._clients[address] = HttpClient(target)
        return self._clients[address]


class Fetched:
    """A `BufferSource` for one call: the memory of this node, and files that were fetched from other nodes."""

    def __init__(self, shared: SharedBuffers, content: dict[StoredFile, memoryview]) -> None:
        self._shared, self._content = shared, content

    def get(self, name: str, length: int, home: str = "") -> memoryview:
        found = self._content.get(StoredFile(name, home, length))
        return self._shared.get(name, length, home) if found is None else found


class Fetcher:
    """Fetches the files of other nodes that blobs need."""

    def __init__(self, shared: SharedBuffers, secret: str) -> None:
        self.shared = shared
        self._clients = NodeClients(secret)

    def elsewhere(self, blobs: Sequence[Bytes]) -> list[StoredFile]:
        """The files that these blobs need and that this node does not have. Raises `UnreadableBlob`."""
        return [
            file
            for blob in blobs
            if blob and blob[0] in (KIND_WITH_BUFFERS, KIND_COMPOSED)
            for file in files_inside(blob)
            if not self.shared.is_here(file.home)
        ]

    async def source(self, files: Iterable[StoredFile]) -> BufferSource:
        """Fetches these files, and returns a source for decoding blobs. Raises `UnreadableBlob`."""
        wanted = list(dict.fromkeys(files))
        found = await asyncio.gather(*map(self._fetch, wanted))
        return Fetched(self.shared, dict(zip(wanted, found, strict=True)))

    async def _fetch(self, file: StoredFile) -> memoryview:
        client = self._clients.to(file.home)
        for left in reversed(range(TRIES)):
            try:
                answer = await client.fetch(
                    "POST",
                    FETCH_PATH,
                    f"{file.file}\n{file.length}".encode(),
                    timeout_s=FETCH_S,
                    headers=self._clients.headers,
                    max_bytes=max(file.length, 10_000),
                )
                break
            except NoResponse as error:
                if not left or error.error is None:  # the connection was made: the server is running
                    raise UnreadableBlob(f"a value cannot be fetched from {node_of(file.home)}: {error}") from error
                await asyncio.sleep(AGAIN_S)
        if answer.status != 200 or len(answer.body) != file.length:
            what = shown(answer.body[:200].decode("utf-8", "replace")) if answer.status != 200 else "it is incomplete"
            raise UnreadableBlob(f"a value cannot be fetched from {node_of(file.home)}: {what}")
        return memoryview(answer.body)


class FilesOfNodes:
    """`SharedMemory` of the runtimes, for gateways on several nodes: each file is freed on the node that has it."""

    def __init__(self, secret: str) -> None:
        self._clients = NodeClients(secret)

    def remove(self, names: Iterable[str]) -> None:
        by_home: dict[str, list[str]] = {}
        for name in names:
            file, _, home = name.partition("@")
            by_home.setdefault(home, []).append(file)
        for home, files in by_home.items():
            body, headers = "\n".join(files).encode(), self._clients.headers
            self._clients.to(home).exchange("POST", FREE_PATH, body, FREE_S, _left_to_the_sweep, headers)

    def remove_older_than(self, age_s: float) -> None:
        """Does nothing: each node removes its own old files."""


def _left_to_the_sweep(_: Reply) -> None:
    """A node that this message does not reach frees its files when they are old."""

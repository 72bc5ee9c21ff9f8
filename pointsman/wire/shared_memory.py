"""Large buffers in files that are kept in memory: a sender copies a buffer once; a receiver on its node copies nothing.

A sender copies its buffers into a file and sends the file's name; a receiver maps the file, read-only. The gateway
removes the name when the request has ended. New memory costs ten times as much as copying, so a sender keeps its files
under a second, hidden name. It reuses a file when the public name is removed and no receiver holds a lock on the file.
A receiver's lock lasts as long as its mapping, and the mapping lasts as long as any array made from it.

On several nodes, a blob names the `home` of its file: the name of the node that has the file in its memory, and the
address of the server that sends the node's files to other nodes. A receiver on the same node maps the file; a receiver
on another node fetches it (`node_memory.py`).
"""

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from pointsman.errors import PointsmanError, shown


class Unsendable(PointsmanError):
    """A value that cannot leave its process."""


class UnreadableBlob(PointsmanError):
    """A blob that is broken, or whose shared memory is gone."""


KEPT_BYTES = 128 * 1024 * 1024
"""Maximum total size of files that a process keeps for reuse."""
ALIGNMENT = 64
"""Alignment of buffers, for vector instructions."""
MAX_WASTE = 4
"""The number of times by which a reused file may be larger than its content."""


class Span(NamedTuple):
    """The position of a buffer in a file."""

    offset: int
    length: int

    def of(self, memory: memoryview) -> memoryview:
        """The buffer with this position in a file's memory. Raises `UnreadableBlob`."""
        end = self.offset + self.length
        if not 0 <= self.offset <= end <= memory.nbytes:
            raise UnreadableBlob(f"a buffer of {self.length} bytes at {self.offset} is not in its shared memory")
        return memory[self.offset : end]


def node_of(home: str) -> str:
    """The name of the node in this home."""
    return home.rpartition(" ")[0]


class BufferSource(Protocol):
    """The interface through which a receiver finds buffers."""

    def get(self, name: str, length: int, home: str = "") -> memoryview:
        """The content of a file. Raises `UnreadableBlob`."""


class BufferFiles:
    """`SharedMemory` of the runtimes: the files of a folder, for gateways."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(OSError):
                (self.path / name).unlink()

    def remove_older_than(self, age_s: float) -> None:
        oldest = time.time() - age_s
        with suppress(OSError):
            for file in self.path.iterdir():
                if not file.name.startswith(".") and file.stat().st_ctime < oldest:
                    file.unlink()


class _Kept:
    """A file of this process. A reused file is mapped, so that copying into it allocates no new memory."""

    def __init__(self, fd: int, size: int, hidden: str) -> None:
        self.size = size
        self.hidden = hidden
        """The second name, which keeps the file when the public name is removed."""
        self._fd = fd
        self._is_new = True
        self._mapping: mmap.mmap | None = None

    def is_free(self) -> bool:
        """Whether the file can be reused. If it can, this call also locks it."""
        if os.fstat(self._fd).st_nlink != 1:  # the public name exists, so a receiver may still open the file
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def fill(self, buffers: Sequence[memoryview], spans: Sequence[Span]) -> None:
        """Copy buffers into the file, and unlock it. Raises OSError if there is no room."""
        for buffer, (start, length) in zip(buffers, spans, strict=True):
            content = buffer.cast("B") if length else buffer
            if self._is_new:  # writing allocates memory without clearing it first, and fails if there is no room
                written = 0
                while written < length:
                    written += os.pwrite(self._fd, content[written:], start + written)
            else:
                self._mapping = self._mapping or mmap.mmap(self._fd, self.size)
                self._mapping[start : start + length] = content
        if self._is_new:
            os.truncate(self._fd, self.size)
            self._is_new = False
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def drop(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.hidden)  # noqa: PTH108 - a path object costs more than the call
        if self._mapping is not None:
            self._mapping.close()
        os.close(self._fd)


class SharedBuffers:
    """The shared memory of one plane on one node, for one of its processes."""

    def __init__(self, folder: str | Path, home_file: str = "") -> None:
        """`home_file`: the path of a file with the home of this node; empty if the plane has only one node."""
        self._folder = str(folder)
        self._home_file = home_file
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []
        self._number = 0
        self._has_cleared = False

    def put(self, buffers: Sequence[memoryview]) -> tuple[str, int, list[Span]]:
        """Copy buffers into a file. Returns the file's name and length, and the buffers' spans. Raises OSError if the
        memory is full."""
        spans, end = [], 0
        for buffer in buffers:
            spans.append(Span(end, buffer.nbytes))
            end += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            kept, name = self._file_for(max(end, 1))
            try:
                kept.fill(buffers, spans)
            except OSError:
                self.remove(name)
                self._drop(kept)
                raise
            if sum(one.size for one in self._kept) > KEPT_BYTES:
                self._drop(kept)
        return name, end, spans

    @property
    def home(self) -> str:
        """The home of this node; empty if there are no other nodes. Raises OSError if the home is unknown."""
        return Path(self._home_file).read_text(encoding="utf-8") if self._home_file else ""

    def is_here(self, home: str) -> bool:
        """Whether the files of that home are in this node's memory."""
        try:
            return not home or node_of(home) == node_of(self.home)
        except OSError:
            return False

    def get(self, name: str, length: int, home: str = "") -> memoryview:
        """The content of a file, mapped and read-only. Raises `UnreadableBlob`."""
        if not self.is_here(home):
            raise UnreadableBlob(f'a value is in the memory of "{shown(node_of(home))}" and was not fetched')
        if not is_file_name(name):
            raise UnreadableBlob(f'a blob names the file "{shown(name)}", which cannot be in shared memory')
        path = f"{self._folder}/{name}"
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            raise _gone(name) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(fd), os.stat(path)):  # noqa: PTH116
                raise _gone(name)
            return memoryview(mmap.mmap(fd, length, access=mmap.ACCESS_READ)) if length else memoryview(b"")
        except (OSError, ValueError):  # reused for something else, or truncated
            raise _gone(name) from None
        finally:
            os.close(fd)  # the mapping keeps a copy of the descriptor, and so the lock

    def remove(self, name: str) -> None:
        """Remove the public name of a file; mappings stay valid."""
        if is_file_name(name):
            with suppress(OSError):
                os.unlink(f"{self._folder}/{name}")  # noqa: PTH108

    def close(self) -> None:
        """Stop keeping files for reuse. A file that was sent stays until its public name is removed."""
        with self._lock:
            for kept in self._kept:
                kept.drop()
            self._kept.clear()

    def sweep(self) -> None:
        """Empty the folder. Call it only when no file in the folder is needed any more."""
        with suppress(FileNotFoundError):
            for file in Path(self._folder).iterdir():
                with suppress(OSError):
                    file.unlink()

    def _file_for(self, size: int) -> tuple[_Kept, str]:
        """A file of at least this size, locked, and a new public name for it."""
        self._number += 1
        name = f"{os.getpid()}-{self._number}"
        for kept in self._kept:
            if size <= kept.size <= MAX_WASTE * size and kept.is_free():
                try:
                    os.link(kept.hidden, f"{self._folder}/{name}")
                except OSError:  # the folder was emptied
                    self._drop(kept)
                    break
                return kept, name
        if not self._has_cleared:
            self._has_cleared = True
            self._remove_files_of_dead_processes()
        hidden = f"{self._folder}/.{name}"
        kept = _Kept(os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), size, hidden)
        self._kept.append(kept)
        os.link(kept.hidden, f"{self._folder}/{name}")
        return kept, name

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        kept.drop()

    def _remove_files_of_dead_processes(self) -> None:
        for file in Path(self._folder).glob(".*-*"):
            pid = file.name[1:].partition("-")[0]
            if pid.isdecimal() and not _is_alive(int(pid)):
                with suppress(OSError):
                    file.unlink()


def is_file_name(name: str) -> bool:
    """Whether a name can be the name of a file in shared memory; other files must not be touched."""
    return 0 < len(name) <= 100 and "/" not in name and "\0" not in name and not name.startswith(".")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _gone(name: str) -> UnreadableBlob:
    return UnreadableBlob(f'the shared memory of a value ("{name}") is gone: its request has ended')

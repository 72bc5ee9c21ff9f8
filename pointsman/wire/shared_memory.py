"""Large buffers in files that live in memory: one copy in, none out.

Whoever sends copies its buffers into a file and tells its name; whoever receives maps it, read-only. The gateway
removes the name once the request has ended, and then nobody new can find it. New memory costs ten times what copying
costs, so a sender keeps its files (by a second, hidden name) and uses one again when its public name is gone and nobody
holds a lock on it. A receiver's lock lives as long as its mapping, and so as long as any array made from it.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pointsman.wire.failures import UnreadableBlob

KEPT_BYTES = 128 * 1024 * 1024
"""Of files that a process keeps for the next time."""
ALIGNMENT = 64
"""Buffers begin where vector instructions like it."""
WASTE = 4
"""A kept file may be so many times larger than what is put into it."""


class Span(NamedTuple):
    """Where a buffer is."""

    offset: int
    length: int


class _Kept:
    """A file of our own. When it is used again it is mapped, so that copying into it touches no new memory."""

    def __init__(self, fd: int, size: int, hidden: str) -> None:
        self.size = size
        self.hidden = hidden
        """The name by which we keep it."""
        self._fd = fd
        self._is_new = True
        self._mapping: mmap.mmap | None = None

    def is_free(self) -> bool:
        """If so, it is locked from then on."""
        if os.fstat(self._fd).st_nlink != 1:  # somebody may still be told of it
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def fill(self, buffers: Sequence[memoryview], spans: Sequence[Span]) -> None:
        """Copy buffers in, and unlock it. Raises OSError if there is no room."""
        for buffer, (start, length) in zip(buffers, spans, strict=True):
            content = buffer.cast("B") if length else buffer
            if self._is_new:  # what is written gets its memory without being cleared first; and no room is an error
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
    """The shared memory of one plane, as one of its processes sees it."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []
        self._number = 0
        self._looked_around = False

    def put(self, buffers: Sequence[memoryview]) -> tuple[str, int, list[Span]]:
        """Copy buffers into a file: its name, its length, where each of them is. Raises OSError if there is no room."""
        spans, end = [], 0
        for buffer in buffers:
            spans.append(Span(end, buffer.nbytes))
            end += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            kept, name = self._taken(max(end, 1))
            try:
                kept.fill(buffers, spans)
            except OSError:
                self.remove(name)
                self._drop(kept)
                raise
            if sum(one.size for one in self._kept) > KEPT_BYTES:
                self._drop(kept)
        return name, end, spans

    def get(self, name: str, length: int) -> memoryview:
        """The content of a file, mapped and read-only. Raises `UnreadableBlob`."""
        if "/" in name or name.startswith("."):
            raise UnreadableBlob(f'a blob names the file "{name}", which cannot be one of shared memory')
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
        except (OSError, ValueError):  # used again for something else, or cut short
            raise _gone(name) from None
        finally:
            os.close(fd)  # the mapping keeps a copy of it, and by that the lock

    def remove(self, name: str) -> None:
        """Nobody new may read this file; who has it mapped goes on."""
        if name and "/" not in name and not name.startswith("."):
            with suppress(OSError):
                os.unlink(f"{self._folder}/{name}")  # noqa: PTH108

    def close(self) -> None:
        """Keep nothing; what was sent stays until it is removed."""
        with self._lock:
            for kept in self._kept:
                kept.drop()
            self._kept.clear()

    def sweep(self) -> None:
        """Empty the folder: for whoever knows that nothing of it is needed any more."""
        with suppress(FileNotFoundError):
            for file in Path(self._folder).iterdir():
                with suppress(OSError):
                    file.unlink()

    def _taken(self, size: int) -> tuple[_Kept, str]:
        """A file with room, locked, and a new public name of it."""
        self._number += 1
        name = f"{os.getpid()}-{self._number}"
        for kept in self._kept:
            if size <= kept.size <= WASTE * size and kept.is_free():
                try:
                    os.link(kept.hidden, f"{self._folder}/{name}")
                except OSError:  # somebody has emptied the folder
                    self._drop(kept)
                    break
                return kept, name
        if not self._looked_around:
            self._looked_around = True
            self._clear_up_after_the_dead()
        hidden = f"{self._folder}/.{name}"
        kept = _Kept(os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), size, hidden)
        self._kept.append(kept)
        os.link(kept.hidden, f"{self._folder}/{name}")
        return kept, name

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        kept.drop()

    def _clear_up_after_the_dead(self) -> None:
        """Who was killed has left what it kept."""
        for file in Path(self._folder).glob(".*-*"):
            pid = file.name[1:].partition("-")[0]
            if pid.isdecimal() and not _lives(int(pid)):
                with suppress(OSError):
                    file.unlink()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _gone(name: str) -> UnreadableBlob:
    return UnreadableBlob(f'the shared memory of a value ("{name}") is gone: the request that it belonged to has ended')

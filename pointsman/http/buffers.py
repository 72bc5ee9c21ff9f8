"""Memory for requests: bodies as they arrive, one limit for all bodies together, and the return of free memory."""

import ctypes
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

from pointsman.http.heads import Bytes
from pointsman.http.responses import TURN_BYTES

READ_BYTES = 96 * 1024
"""Bytes that are read from a connection at a time. The rest of a longer body is read into its own buffer."""
TINY_BYTES = 512
"""Shorter parts of a body are joined as they arrive: a list of short parts would take many times their size."""
LARGE_BYTES = 1024 * 1024
"""Larger bodies are copied into their own pages as they arrive: joining the parts at the end would block the loop."""
SHARE_FOR_BUFFER = 16
"""A body of known length gets its buffer only once 1/16 of it has arrived, because clients may announce any length."""
TRIMMED_BYTES = 64 * 1024 * 1024
"""Memory is returned to the system once the server holds this much less than it did before."""
KEPT_BYTES = 16 * 1024 * 1024
"""Free memory that the allocator keeps for the next requests."""


class PartialBody:
    """The part of one body that has arrived."""

    __slots__ = ("_buffer", "_is_exact", "_parts", "_room", "size")

    def __init__(self, room: int, *, is_exact: bool = False) -> None:
        """`room`: the length of the body if `is_exact`, else a bound that the body is unlikely to exceed."""
        self._room = room
        self._is_exact = is_exact
        self.size = 0
        self._parts: list[Bytes] = []
        self._buffer: bytearray | mmap | None = None
        """The buffer of a large body; its pages take no memory until something is written to them."""

    def add(self, part: Bytes) -> int:
        """Add bytes that have arrived. Returns how much memory they take."""
        parts, buffer, taken, end = self._parts, self._buffer, len(part), self.size + len(part)
        if buffer is not None and end <= self._room:
            buffer[self.size : end] = part
            taken = self._taken(taken)
        elif buffer is not None or self._is_worth_a_buffer(end):
            so_far, self._room = self.whole(), self._room if end <= self._room else 2 * end
            if self._room <= LARGE_BYTES:
                taken = self._room - self.size
                self._buffer = bytearray(self._room)
            else:
                self._buffer = mmap(-1, self._room, flags=MAP_PRIVATE | MAP_ANONYMOUS)
            self._buffer[:end] = b"".join((so_far, part))
            parts.clear()
        elif parts and len(parts[-1]) < TINY_BYTES:
            parts[-1] = b"".join((parts[-1], part))
        else:
            parts.append(part)
        self.size = end
        return taken

    def _is_worth_a_buffer(self, end: int) -> bool:
        if self._is_exact and self._room > READ_BYTES:
            return end < self._room <= SHARE_FOR_BUFFER * end or (end > LARGE_BYTES and bool(self._parts))
        return end > LARGE_BYTES and bool(self._parts)

    def _taken(self, size: int) -> int:
        """The memory that further bytes in the buffer take."""
        return 0 if isinstance(self._buffer, bytearray) else size

    def space(self) -> memoryview | None:
        """The memory to read the next bytes into; None if the body does not have a buffer of its full length."""
        if self._buffer is None or not self._is_exact:
            return None
        return memoryview(self._buffer)[self.size : self.size + TURN_BYTES]

    def filled(self, size: int) -> int:
        """Count bytes that were read into `space`. Returns how much memory they take."""
        self.size += size
        return self._taken(size)

    def whole(self) -> Bytes:
        if self._buffer is not None:
            return memoryview(self._buffer)[: self.size]
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)


NO_BODY = PartialBody(0)


def placed(body: Bytes) -> tuple[bytes | bytearray, int]:
    """The object that a body is part of, and the offset of the body in it. A body from `whole` is the beginning of its
    buffer; a view of received bytes is the end of those bytes."""
    if isinstance(body, bytes):
        return body, 0
    owner = body.obj
    if isinstance(owner, bytearray):
        return owner, 0
    return (owner, len(owner) - len(body)) if isinstance(owner, bytes) else (bytes(body), 0)


class BufferBudget:
    """Bytes of requests that a server holds in memory for all its connections together."""

    __slots__ = ("_most", "held", "limit", "scratch")

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self.held = 0
        self.scratch = memoryview(bytearray(READ_BYTES))
        """The buffer that connections read into, one at a time, unless they read into the buffer of a body."""
        self._most = 0
        """Maximum number of bytes held since memory was last returned."""

    @property
    def is_exceeded(self) -> bool:
        return self.held > self.limit

    def trim(self) -> None:
        """Return memory of large requests to the system from time to time; otherwise the allocator would keep it."""
        self._most = max(self._most, self.held)
        if self._most - self.held > TRIMMED_BYTES:
            self._most = self.held
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:  # if the C library can
                trim(0)


def keep_freed_memory() -> None:
    """Let the allocator of this process keep the buffers of requests for the next ones, if the C library can.

    By default the allocator returns each large buffer to the system. Then every request gets new pages, each with a
    page fault.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # constants of <malloc.h>
        mallopt(mmap_threshold, 2 * LARGE_BYTES)
        mallopt(trim_threshold, KEPT_BYTES)
